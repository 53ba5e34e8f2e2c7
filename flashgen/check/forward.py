"""Forward: the check of out and LSE, and the stress that winners must pass."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flashgen import reference
from flashgen.check.measures import Check, Errors, dims_of, errors_of, limits_of, unfinished, where, wrong
from flashgen.check.stressing import stressed
from flashgen.check.tensors import allocate, allocate_rows, fingerprint, inputs
from flashgen.problem import Problem

STRESS_SCALES = (None, 1.0, 0.125, 0.0)


class Launch(Protocol):
    """A kernel bound to a problem's shapes and strides; writes out, and lse where the problem returns it."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None, scale: float, /) -> None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Inputs, what is expected of them, and outputs to write to: made once, then used for every candidate of a problem.

    Tensors are in the problem's layout, with strides that the problem admits and no better. expected is float32 (float64 for
    float32 problems), expected_lse float64. Everything is drawn from `seed`.
    """

    problem: Problem
    seed: int
    scale: float
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor | None
    expected: Tensor
    expected_lse: Tensor
    typical: float  # size of an element of out, where a row sees all keys alike
    limits: Errors
    out_buffer: Tensor
    lse_buffer: Tensor | None
    fingerprint: tuple[int, ...]

    def poison(self) -> None:
        """Fill the outputs, and what lies around them, with NaN."""
        for buffer in (self.out_buffer, self.lse_buffer):
            if buffer is not None:
                buffer.fill_(math.nan)

    def bind(self, launch: Launch) -> Callable[[], None]:
        """The launch as a call without arguments on this case's tensors, as a bench wants it."""
        return lambda: launch(self.query, self.key, self.value, self.out, self.lse, self.scale)


def prepare(problem: Problem, device: torch.device | str, seed: int, scale: float | None = None) -> Case:
    """A case for a problem that is not empty: fresh inputs from the seed, the oracle's results, limits, and poisoned outputs.

    scale None is 1/sqrt(head_dim_qk).
    """
    problem.require_forward("prepare")
    query, key, value = inputs(problem, device, seed)
    scale = 1 / math.sqrt(problem.head_dim_qk) if scale is None else scale
    expected, expected_lse = _attention(reference.attention, problem, query, key, value, scale)
    if problem.dtype != "float32":
        expected = expected.float()
    typical = float(torch.linalg.vector_norm(value, dtype=torch.float32)) / math.sqrt(max(1, value.numel() * problem.seqlen_kv))
    plain, plain_lse = _attention(reference.plain, problem, query, key, value, scale)
    out, out_buffer = allocate(problem, device, problem.heads_q, problem.seqlen_q, problem.head_dim_v)
    lse, lse_buffer = allocate_rows(problem, device) if problem.return_lse else (None, None)
    return Case(
        problem=problem,
        seed=seed,
        scale=scale,
        query=query,
        key=key,
        value=value,
        out=out,
        lse=lse,
        expected=expected,
        expected_lse=expected_lse,
        typical=typical,
        limits=limits_of(problem, scale, expected, typical, errors_of(plain, plain_lse, expected, expected_lse, typical)),
        out_buffer=out_buffer,
        lse_buffer=lse_buffer,
        fingerprint=fingerprint(query, key, value),
    )


def check(launch: Launch, case: Case) -> Check:
    """Run a kernel once on outputs filled with NaN, and judge what it wrote and what it left alone.

    Whatever the launch raises goes through, also errors of the device that only show up when results are read. A kernel that
    writes to its inputs is wrong, and the inputs are restored for the next one.
    """
    case.poison()
    case.bind(launch)()
    result = judge(case.out, case.lse, case)
    if fingerprint(case.query, case.key, case.value) != case.fingerprint:
        for damaged, drawn in zip((case.query, case.key, case.value), inputs(case.problem, case.query.device, case.seed)):
            damaged.copy_(drawn)
        return wrong(result, "the kernel wrote to its inputs")
    for name, written, buffer in (("out", case.out, case.out_buffer), ("lse", case.lse, case.lse_buffer)):
        if result.ok and written is not None and buffer is not None and int(buffer.isnan().sum()) != buffer.numel() - written.numel():
            return wrong(result, f"the kernel wrote outside {name}")
    return result


def judge(out: Tensor, lse: Tensor | None, case: Case) -> Check:
    """Compare results, in the problem's layout, with what the case expects; lse is left out where None is given."""
    errors = errors_of(out, lse, case.expected, case.expected_lse, case.typical)
    error = errors.absolute if math.isfinite(errors.absolute) else None
    result = Check(ok=True, error=error, tolerance=case.limits.absolute)
    if error is None and not out.isfinite().all():
        return wrong(result, unfinished("out", out))
    for name, measured, limit in zip(Errors._fields, errors, case.limits):
        if not measured <= limit:
            got, wanted = (lse, case.expected_lse) if name == "lse" and lse is not None else (out, case.expected)
            dims = ("batch", "head", "row") if name == "lse" else dims_of(case.problem)
            return wrong(result, f"{name} error {measured:.3g} is above {limit:.3g}{where(got, wanted, dims)}")
    return result


def stress(
    launch: Launch,
    problem: Problem,
    device: torch.device | str,
    *,
    seed: int,
    scales: Sequence[float | None] = STRESS_SCALES,
    repeats: int = 100,
) -> Check:
    """The harder check that a winner must pass: several scales, each on inputs of its own, and bitwise the same result again and again.

    Seeds are seed, seed + 1 ... for the scales in turn; `repeats` runs on the inputs of the first scale follow. Returns the first
    verdict that is not ok, else that of the first scale. Kernels that take no negative scale are not to be given one.
    """
    return stressed(
        lambda number, scale: prepare(problem, device, number, scale),
        lambda case: check(launch, case),
        lambda case: _changes(launch, case, repeats),
        seed=seed,
        scales=scales,
    )


def _changes(launch: Launch, case: Case, repeats: int) -> str:
    """Which repeat, if any, gives results that differ by a bit from those that the case holds now."""
    expected = [tensor.clone() for tensor in (case.out, case.lse) if tensor is not None]
    for number in range(1, repeats + 1):
        case.poison()
        case.bind(launch)()
        results = [tensor for tensor in (case.out, case.lse) if tensor is not None]
        if not all(torch.equal(result, same) for result, same in zip(results, expected)):
            return f"run {number} of {repeats} on the same inputs gave another result"
    return ""


def _attention(
    function: Callable[..., tuple[Tensor, Tensor]], problem: Problem, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return function(query, key, value, mask=problem.mask, window=problem.window, scale=scale, layout=problem.layout)
