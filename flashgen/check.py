"""Check: a kernel against the oracle, with a tolerance derived from what an honest implementation of the same dtype gets.

Four errors are measured, each against a limit of its own, so that no kind of fault can hide behind another:

    absolute   the largest difference of any element of out: one wrong element
    relative   the Frobenius norm of the difference over that of the expected out: a systematic fault, such as 1 % everywhere
    block      the worst relative error of BLOCK_ROWS rows that lie together: a wrong row or tile of rows whose values are small
    lse        the largest difference of any LSE, in units of 1 + |LSE|

A limit is FACTOR times the error of `reference.plain` on the same inputs, plus a floor for where that is exact by luck: a quarter
of the dtype's epsilon (not for lse), and float32's epsilon times 4 + sqrt(seqlen_kv) + 4 s, where the root is how rounding errors
grow in a sum over the keys, and s = |scale| sqrt(head_dim_qk) is the size of a typical score. Relative errors are taken of what is
expected, or of the mean of seqlen_kv random values where that is more: values that cancelled are no measure of rounding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flashgen import reference
from flashgen.errors import ArgumentError
from flashgen.problem import Problem

FACTOR = 2.0
BLOCK_ROWS = 16
GUARD = 4096  # elements on either side of an output that nobody may write
STRESS_SCALES = (None, 1.0, 0.125, 0.0)


class Launch(Protocol):
    """A kernel bound to a problem's shapes and strides; writes out, and lse where the problem returns it."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None, scale: float, /) -> None: ...


class Errors(NamedTuple):
    """Measured errors, or the limits they must keep."""

    absolute: float
    relative: float
    block: float
    lse: float


@dataclass(frozen=True, kw_only=True)
class Check:
    """Verdict on one kernel. error and tolerance are the largest absolute difference in out and its limit.

    error is None where it is not a finite number. message says what is wrong where ok is False.
    """

    ok: bool
    error: float | None
    tolerance: float
    message: str = ""


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


def inputs(problem: Problem, device: torch.device | str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value (standard normal) in the problem's layout and dtype.

    With aligned_16 rows start at multiples of 16 bytes; without, neither bases nor rows do. What lies between and around the rows
    is NaN, so that a kernel which reads it is found out.
    """
    random = torch.Generator(device).manual_seed(seed)
    drawn = []
    for heads, seqlen, head_dim in (
        (problem.heads_q, problem.seqlen_q, problem.head_dim_qk),
        (problem.heads_kv, problem.seqlen_kv, problem.head_dim_qk),
        (problem.heads_kv, problem.seqlen_kv, problem.head_dim_v),
    ):
        tensor, _ = _allocate(problem, device, heads, seqlen, head_dim)
        tensor.copy_(torch.randn(tensor.shape, dtype=tensor.dtype, device=device, generator=random))
        drawn.append(tensor)
    return drawn[0], drawn[1], drawn[2]


def prepare(problem: Problem, device: torch.device | str, seed: int, scale: float | None = None) -> Case:
    """A case for a problem that is not empty: fresh inputs from the seed, the oracle's results, limits, and poisoned outputs.

    scale None is 1/sqrt(head_dim_qk).
    """
    query, key, value = inputs(problem, device, seed)
    scale = 1 / math.sqrt(problem.head_dim_qk) if scale is None else scale
    expected, expected_lse = _attention(reference.attention, problem, query, key, value, scale)
    if problem.dtype != "float32":
        expected = expected.float()
    typical = float(torch.linalg.vector_norm(value, dtype=torch.float32)) / math.sqrt(max(1, value.numel() * problem.seqlen_kv))
    plain, plain_lse = _attention(reference.plain, problem, query, key, value, scale)
    out, out_buffer = _allocate(problem, device, problem.heads_q, problem.seqlen_q, problem.head_dim_v)
    lse = lse_buffer = None
    if problem.return_lse:
        lse_buffer = torch.full((expected_lse.numel() + 2 * GUARD,), math.nan, dtype=torch.float32, device=device)
        lse = lse_buffer[GUARD:-GUARD].view(expected_lse.shape)
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
        limits=_limits(problem, scale, expected, typical, _errors(plain, plain_lse, expected, expected_lse, typical)),
        out_buffer=out_buffer,
        lse_buffer=lse_buffer,
        fingerprint=_fingerprint(query, key, value),
    )


def check(launch: Launch, case: Case) -> Check:
    """Run a kernel once on outputs filled with NaN, and judge what it wrote and what it left alone.

    Whatever the launch raises goes through, also errors of the device that only show up when results are read. A kernel that
    writes to its inputs is wrong, and the inputs are restored for the next one.
    """
    case.poison()
    case.bind(launch)()
    result = judge(case.out, case.lse, case)
    if _fingerprint(case.query, case.key, case.value) != case.fingerprint:
        for damaged, drawn in zip((case.query, case.key, case.value), inputs(case.problem, case.query.device, case.seed)):
            damaged.copy_(drawn)
        return _wrong(result, "the kernel wrote to its inputs")
    for name, written, buffer in (("out", case.out, case.out_buffer), ("lse", case.lse, case.lse_buffer)):
        if result.ok and written is not None and buffer is not None and int(buffer.isnan().sum()) != buffer.numel() - written.numel():
            return _wrong(result, f"the kernel wrote outside {name}")
    return result


def judge(out: Tensor, lse: Tensor | None, case: Case) -> Check:
    """Compare results, in the problem's layout, with what the case expects; lse is left out where None is given."""
    errors = _errors(out, lse, case.expected, case.expected_lse, case.typical)
    error = errors.absolute if math.isfinite(errors.absolute) else None
    result = Check(ok=True, error=error, tolerance=case.limits.absolute)
    missing = int((~out.isfinite()).sum()) if error is None else 0
    if missing:
        return _wrong(result, f"{missing} of {out.numel()} elements of out were never written or are not finite")
    for name, measured, limit in zip(Errors._fields, errors, case.limits):
        if not measured <= limit:
            return _wrong(result, f"{name} error {measured:.3g} is above {limit:.3g}{_where(name, out, lse, case)}")
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
    first: Check | None = None
    for number, scale in enumerate(scales):
        case = prepare(problem, device, seed + number, scale)
        result = check(launch, case)
        if not result.ok:
            return _wrong(result, f"with scale {case.scale:.6g} and seed {case.seed}: {result.message}")
        if first is None:
            first = result
            changed = _first_change(launch, case, repeats)
            if changed is not None:
                return _wrong(result, f"run {changed} of {repeats} on the same inputs gave another result")
    if first is None:
        raise ArgumentError("scales is empty; there must be at least one")
    return first


def _first_change(launch: Launch, case: Case, repeats: int) -> int | None:
    """Number of the first repeat whose results differ by a bit from those that the case holds now; None if none does."""
    expected = [tensor.clone() for tensor in (case.out, case.lse) if tensor is not None]
    for number in range(1, repeats + 1):
        case.poison()
        case.bind(launch)()
        results = [tensor for tensor in (case.out, case.lse) if tensor is not None]
        if not all(torch.equal(result, same) for result, same in zip(results, expected)):
            return number
    return None


def _attention(
    function: Callable[..., tuple[Tensor, Tensor]], problem: Problem, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return function(query, key, value, mask=problem.mask, window=problem.window, scale=scale, layout=problem.layout)


def _allocate(problem: Problem, device: torch.device | str, heads: int, seqlen: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """A tensor in the problem's layout and the buffer it lies in, which is all NaN. Rows are as aligned as the problem says."""
    dtype: torch.dtype = getattr(torch, problem.dtype)
    lead = (problem.batch, heads, seqlen) if problem.layout == "bhsd" else (problem.batch, seqlen, heads)
    lane = 16 // dtype.itemsize
    width, start = (-(-head_dim // lane) * lane, GUARD) if problem.aligned_16 else (head_dim + 1, GUARD + 1)
    size = math.prod(lead) * width
    buffer = torch.full((start + size + GUARD,), math.nan, dtype=dtype, device=device)
    return buffer[start : start + size].view(*lead, width)[..., :head_dim], buffer


def _errors(out: Tensor, lse: Tensor | None, expected: Tensor, expected_lse: Tensor, typical: float) -> Errors:
    """NaN where a result is NaN."""
    difference = out.to(expected.dtype) - expected
    wrong, right = (_squares_of_blocks(tensor) for tensor in (difference, expected))
    least = max(typical**2 * BLOCK_ROWS * expected.shape[-1], 1e-300)  # of a block
    measures = [
        difference.abs().amax().double(),
        (wrong.sum() / right.sum().clamp(min=typical**2 * expected.numel() + 1e-300)).sqrt(),
        (wrong / right.clamp(min=least)).amax().sqrt(),
    ]
    if lse is not None:
        off = (lse.double() - expected_lse).abs() / (1 + expected_lse.abs())
        measures.append(off.masked_fill_(lse == expected_lse, 0.0).amax())  # -inf, too, must be met
    numbers = torch.stack(measures).tolist()
    return Errors(*numbers, *([0.0] if lse is None else []))


def _squares_of_blocks(tensor: Tensor) -> Tensor:
    """Sum of squares of every BLOCK_ROWS rows that lie together, float64; the last block may be smaller."""
    rows = torch.linalg.vector_norm(tensor, dim=-1).double().square().flatten()
    return torch.nn.functional.pad(rows, (0, -len(rows) % BLOCK_ROWS)).view(-1, BLOCK_ROWS).sum(dim=1)


def _limits(problem: Problem, scale: float, expected: Tensor, typical: float, plain: Errors) -> Errors:
    score = abs(scale) * math.sqrt(problem.head_dim_qk)
    resolution = torch.finfo(torch.float32).eps * (4 + math.sqrt(problem.seqlen_kv) + 4 * score)
    floor = torch.finfo(getattr(torch, problem.dtype)).eps / 4 + resolution
    floors = Errors(floor * max(float(expected.abs().amax()), typical), floor, floor, resolution)
    return Errors(*(floor + (FACTOR * error if math.isfinite(error) else 0.0) for floor, error in zip(floors, plain)))


def _fingerprint(*tensors: Tensor) -> tuple[int, ...]:
    """Changes with nearly every change of the tensors' bits."""
    return tuple(int(t.view(torch.int16 if t.dtype.itemsize == 2 else torch.int32).sum(dtype=torch.int64)) for t in tensors)


def _where(name: str, out: Tensor, lse: Tensor | None, case: Case) -> str:
    """Where the largest difference is, in words."""
    got, wanted = (lse, case.expected_lse) if name == "lse" and lse is not None else (out, case.expected)
    difference = (got.double() - wanted.double()).abs().masked_fill_(got == wanted, 0.0).nan_to_num_(nan=math.inf)
    place = torch.unravel_index(difference.argmax(), difference.shape)
    index = tuple(int(i) for i in place)
    words = ("batch", "head", "row") if name == "lse" or case.problem.layout == "bhsd" else ("batch", "row", "head")
    spot = ", ".join(f"{word} {i}" for word, i in zip((*words, "column"), index))
    return f"; worst at {spot}: {float(got[index]):.6g} instead of {float(wanted[index]):.6g}"


def _wrong(result: Check, message: str) -> Check:
    return Check(ok=False, error=result.error, tolerance=result.tolerance, message=message)
