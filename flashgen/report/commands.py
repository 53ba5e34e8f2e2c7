"""The commands that reproduce a row, as one would type them."""

from flashgen.build import stated
from flashgen.device import DEVICES
from flashgen.record import Record

_SHORTER = {"--dtype bf16": "", "--mask causal": "--causal"}  # what is the default, and what is short for it


def commands(record: Record) -> dict[str, str]:
    """What to type, by what it does, for a candidate's row: measure it beside SDPA, and write its source."""
    assert record.candidate is not None
    problem, written = record.problem, f"flashgen generate --variant {record.candidate.variant.name} --out kernel"
    if not problem.aligned_16:
        return {"source": written}
    options = " ".join(filter(None, (_SHORTER.get(word, word) for word in stated(problem))))
    device = next((f" --device {name}" for name, device in DEVICES.items() if device.key == record.device.key), "")
    if problem.direction == "forward":
        written = f"flashgen generate {options}{device} --out kernel"
    return {"measure": f"flashgen bench {options}", "source": written}
