"""The commands that reproduce a row, as one would type them."""

from flashgen.device import DEVICES
from flashgen.problem import Problem
from flashgen.record import Record

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def stated(problem: Problem) -> str:
    """The options that state a problem; empty where none do (tensors that are not aligned)."""
    if not problem.aligned_16:
        return ""
    words = ["--direction backward"] if problem.direction == "backward" else []
    words += [f"--dtype {_SHORT[problem.dtype]}"] if problem.dtype != "bfloat16" else []
    words += [f"--batch {problem.batch}"]
    for name, first, second in (
        ("heads", ("heads-q", problem.heads_q), ("heads-kv", problem.heads_kv)),
        ("seqlen", ("seqlen-q", problem.seqlen_q), ("seqlen-kv", problem.seqlen_kv)),
        ("head-dim", ("head-dim-qk", problem.head_dim_qk), ("head-dim-v", problem.head_dim_v)),
    ):
        same = first[1] == second[1]
        words += [f"--{name} {first[1]}"] if same else [f"--{first[0]} {first[1]} --{second[0]} {second[1]}"]
    if problem.mask != "full":
        words.append("--causal" if problem.mask == "causal" else f"--mask {problem.mask}")
    if problem.window != (None, None):
        words.append("--window " + ",".join("-1" if side is None else str(side) for side in problem.window))
    if problem.layout != "bhsd":
        words.append(f"--layout {problem.layout}")
    words += [f"--{name.replace('_', '-')}" for name in ("return_lse", "deterministic") if getattr(problem, name)]
    return " ".join(words)


def commands(record: Record) -> dict[str, str]:
    """What to type, by what it does, for a candidate's row: measure it beside SDPA, and write its source."""
    assert record.candidate is not None
    options, written = stated(record.problem), f"flashgen generate --variant {record.candidate.variant.name} --out kernel"
    if not options:
        return {"source": written}
    device = next((f" --device {name}" for name, device in DEVICES.items() if device.key == record.device.key), "")
    if record.problem.direction == "forward":
        written = f"flashgen generate {options}{device} --out kernel"
    return {"measure": f"flashgen bench {options}", "source": written}
