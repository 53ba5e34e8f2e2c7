"""A candidate as one file that needs torch and triton, not flashgen: the generated kernel and a launcher for it."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashgen.build import binary
from flashgen.build.kernel import ELEMENTS, Kernel, build, constants_of, options_of
from flashgen.candidate import Candidate, Variant
from flashgen.device import DEVICES, Device
from flashgen.errors import ArgumentError
from flashgen.problem import FLAGS, Problem
from flashgen.render import environment, tidy
from flashgen.resources import programs_per_sm
from flashgen.schedule import queries_together

EMIT = ("source", "ttgir", "ptx", "sass")


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """What templates/launcher.py.jinja reads; the numbers of a candidate are in this file alone.

    imports, kernel   parts of the generated kernel module: its imports and the launcher's, and everything after them.
    numbers           (name, value) of what the candidate decides.
    constants         (name, expression) of every constexpr parameter.
    options           of the launch, as they are written in Python.
    programs_per_sm   of a persistent kernel.
    band_low, _high   expressions of seqlen_q and seqlen_kv: query i sees key j exactly if low <= j - i <= high.
    command           options of `flashgen generate` that write this file again, while the same candidate is the choice for the problem.
    """

    problem: Problem
    device: Device
    candidate: Candidate
    imports: str
    kernel: str
    numbers: tuple[tuple[str, int], ...]
    constants: tuple[tuple[str, str], ...]
    options: str
    programs_per_sm: int
    band_low: str
    band_high: str
    mask_words: str
    command: tuple[str, ...]

    @property
    def variant(self) -> Variant:
        return self.candidate.variant


def export(candidate: Candidate, problem: Problem, device: Device, out_dir: str | Path, emit: Sequence[str] = ("source",)) -> list[Path]:
    """Writes the candidate into a folder, as source, ttgir, ptx and sass where asked; the files, in that order.

    source is a module whose attention(query, key, value, *, scale=None) takes any batch, heads and lengths, with the problem's
    mask, dtype and head dims, and is right for all of them; the problem's sizes only chose the kernel. Raises ArgumentError for
    unknown kinds, BuildError.
    """
    unknown = [kind for kind in emit if kind not in EMIT]
    if unknown:
        raise ArgumentError(f"emit is {unknown[0]!r}; it must be among {', '.join(EMIT)}")
    problem.require_forward("export")
    kernel = build(candidate, problem, device)
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    stem = _stem(candidate, problem, device)
    paths = []
    for kind in EMIT:
        if kind in emit:
            path = out_dir / (f"{stem}.py" if kind == "source" else f"{stem}.{kind}")
            path.write_text(source_text(kernel, device) if kind == "source" else _intermediate(kernel, kind))
            paths.append(path)
    return paths


def source_text(kernel: Kernel, device: Device) -> str:
    """The text of the standalone module."""
    candidate, problem = kernel.candidate, kernel.problem
    imports, body = _parts(kernel.source.text, candidate.variant)
    of_problem = {name: name for name in kernel.constants if name.startswith("HEAD_DIM")}
    if "CUTS" in kernel.constants:
        of_problem["CUTS"] = _cuts(kernel)
    numbers = constants_of(candidate, problem)
    low, high = _band(problem)
    launcher = Launcher(
        problem=problem,
        device=device,
        candidate=candidate,
        imports=imports,
        kernel=body,
        numbers=tuple(
            (name, value) for name, value in numbers.items() if name not in of_problem and (name in kernel.constants or "BLOCK" in name)
        ),
        constants=tuple((name, of_problem.get(name, name)) for name in kernel.constants),
        options="{" + ", ".join(f'"{name}": {value!r}' for name, value in options_of(candidate).items()) + "}",
        programs_per_sm=_programs_per_sm(kernel, device),
        band_low=low,
        band_high=high,
        mask_words=_mask_words(problem),
        command=(*stated(problem), *(f"--device {name}" for name, known in DEVICES.items() if known == device), "--out DIR"),
    )
    return tidy(environment().get_template("launcher.py.jinja").render(launcher=launcher))


def _intermediate(kernel: Kernel, kind: str) -> str:
    if kernel.compiled is None:
        raise ArgumentError(f"emit has {kind}, which an interpreted kernel does not have; unset TRITON_INTERPRET")
    return binary.sass(kernel.compiled) if kind == "sass" else str(kernel.compiled.asm[kind])


def _programs_per_sm(kernel: Kernel, device: Device) -> int:
    if kernel.compiled is None or not kernel.candidate.config.persistent or kernel.candidate.variant.backend == "hopper":
        return 1  # a hopper kernel hands out all registers of an SM
    resources = kernel.resources
    return max(1, programs_per_sm(kernel.compiled.metadata.num_warps, resources.registers, resources.smem_bytes, device))


def _cuts(kernel: Kernel) -> str:
    """The constant CUTS for any lengths, an expression."""
    problem, config = kernel.problem, kernel.candidate.config
    if problem.band == (None, None):
        return "int(seqlen_kv % BLOCK_N > 0)"
    if problem.band[1] is None:
        return "1"
    together = queries_together(problem, config)
    return "2" if config.block_n % together else f"1 if band_high % {together} == 0 else 2"


def _parts(text: str, variant: Variant) -> tuple[str, str]:
    """(imports of the kernel module and the launcher, what follows them in the kernel module)."""
    imports = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    last = max(node.end_lineno or 0 for node in imports)
    standard = ["import math"]
    plain = {ast.unparse(node) for node in imports if isinstance(node, ast.Import)} | {"import torch", "import triton"}
    named = {ast.unparse(node) for node in imports if isinstance(node, ast.ImportFrom)}
    if variant.backend == "hopper":
        standard = ["import functools", "import heapq", "import math"]
        named.add("from triton.experimental.gluon.nvidia.hopper import TensorDescriptor")
    elif variant.load == "tma":
        named.add("from triton.tools.tensor_descriptor import TensorDescriptor")
    third_party = sorted(plain - {"import math"}) + sorted(named)
    return "\n".join([*standard, "", *third_party]), "\n".join(text.splitlines()[last:]).strip("\n")


def _band(problem: Problem) -> tuple[str, str]:
    """Problem.band for any lengths: offsets from the mask's diagonal."""
    left, right = problem.window
    right = 0 if problem.mask != "full" else right
    diagonal = "" if problem.mask == "causal_top_left" else "seqlen_kv - seqlen_q"
    low = "-(seqlen_q + seqlen_kv)" if left is None else f"{diagonal} - {left}".strip() if diagonal else f"-{left}"
    high = "seqlen_q + seqlen_kv" if right is None else f"{diagonal} + {right}" if diagonal and right else diagonal or f"{right}"
    return low, high


def _mask_words(problem: Problem) -> str:
    words = {
        "full": "Every query sees every key",
        "causal": "Causal: the last query sees the last key",
        "causal_top_left": "Causal: the first query sees the first key only",
    }[problem.mask]
    left, right = problem.window
    if left is None and right is None:
        return words
    if problem.mask == "full":
        words = "The diagonal ends at the last query and the last key"
    sides = [f"{count} keys {side} the diagonal" for count, side in ((left, "before"), (right, "after")) if count is not None]
    return f"{words}; a query sees at most {' and '.join(sides)}"


def _stem(candidate: Candidate, problem: Problem, device: Device) -> str:
    dims = f"{problem.head_dim_qk}" if problem.head_dim_qk == problem.head_dim_v else f"{problem.head_dim_qk}_{problem.head_dim_v}"
    mask = problem.mask if problem.window == (None, None) else f"{problem.mask}_window"
    return re.sub(r"\W+", "_", f"attention_{ELEMENTS[problem.dtype]}_{mask}_d{dims}_{device.arch}")


def stated(problem: Problem) -> list[str]:
    """The options that state a problem on the command line, but for tensors that are not aligned, which none does."""
    words = [] if problem.direction == "forward" else [f"--direction {problem.direction}"]
    words.append(f"--dtype {ELEMENTS[problem.dtype]}")
    for name, sides in (("batch", ("batch",)), ("heads", ("q", "kv")), ("seqlen", ("q", "kv")), ("head_dim", ("qk", "v"))):
        values = [getattr(problem, name if name == side else f"{name}_{side}") for side in sides]
        option = "--" + name.replace("_", "-")
        words += [f"{option} {values[0]}"] if len(set(values)) == 1 else [f"{option}-{side} {value}" for side, value in zip(sides, values)]
    if problem.mask != "full":
        words.append(f"--mask {problem.mask}")
    if problem.window != (None, None):
        words.append("--window " + ",".join("-1" if side is None else str(side) for side in problem.window))
    if problem.layout != "bhsd":
        words.append(f"--layout {problem.layout}")
    return words + ["--" + name.replace("_", "-") for name in FLAGS if getattr(problem, name)]
