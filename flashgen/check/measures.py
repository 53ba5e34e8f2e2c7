"""How wrong a result is, and how wrong it may be.

Four errors of a kernel's results are measured:

    absolute   the largest difference of any element: one wrong element
    relative   the Frobenius norm of the difference over that of what is expected: a systematic fault, such as 1 % everywhere
    block      the worst relative error of BLOCK_ROWS rows that lie together: a wrong row or tile of rows whose values are small
    lse        the largest difference of any LSE, in units of 1 + |LSE|

A forward limit is FACTOR times the error of `reference.plain` on the same inputs, plus a floor for where that is exact by luck: a
quarter of the dtype's epsilon (not for lse), and float32's epsilon times 4 + sqrt(seqlen_kv) + 4 s, where the root is how rounding
errors grow in a sum over the keys, and s = |scale| sqrt(head_dim_qk) is the size of a typical score. Relative errors are taken of what
is expected, or of the mean of seqlen_kv random values where that is more: values that cancelled are no measure of rounding.

Of dq, dk and dv the first three are measured, each gradient by itself. Their limits are made alike of `reference.plain_gradients`, with
a sum over the queries of a group where that is longer, float32's part as many times as what is subtracted in dq and dk is larger than
what is left (see `Size`), and epsilon over the root of the number of visible pairs, for the luck that few roundings leave. The
relative limit is closer, for it is made of many: RELATIVE_FACTOR times plain's error, or a quarter of epsilon where that is more.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashgen.problem import Problem

FACTOR = 2.0
# Of gradients. PyTorch's backward of SDPA on a CPU has 1.0 to 1.3 times plain's error of dq, up to 2 of dk and dv (bf16).
RELATIVE_FACTOR = 1.5
BLOCK_ROWS = 16


class Size(NamedTuple):
    """The size of a gradient's elements where each row sees all its keys alike, and how much cancels: the row sum of dout * out over the
    typical product of a row of dout and of v, from which it is subtracted; in the mean, and at most. At least 1."""

    typical: float
    mean_cancelled: float = 1.0
    most_cancelled: float = 1.0


class Errors(NamedTuple):
    """Measured errors, or the limits they must keep."""

    absolute: float
    relative: float
    block: float
    lse: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """Verdict on one kernel. error and tolerance are the largest absolute difference in out and its limit; backward: in
    the gradient that comes closest to its own.

    error is None where it is not a finite number. message says what is wrong where ok is False.
    """

    ok: bool
    error: float | None
    tolerance: float
    message: str = ""


def errors_of(out: Tensor, lse: Tensor | None, expected: Tensor, expected_lse: Tensor | None, typical: float) -> Errors:
    """Errors of a tensor that has elements, and of an LSE; NaN where a result is NaN.

    typical is the size of an element where a row sees all keys alike.
    """
    difference = out.to(expected.dtype) - expected
    wrong, right = (_squares_of_blocks(tensor) for tensor in (difference, expected))
    least = max(typical**2 * BLOCK_ROWS * expected.shape[-1], 1e-300)  # of a block
    measures = [
        difference.abs().amax().double(),
        (wrong.sum() / right.sum().clamp(min=typical**2 * expected.numel() + 1e-300)).sqrt(),
        (wrong / right.clamp(min=least)).amax().sqrt(),
    ]
    if lse is not None and expected_lse is not None:
        off = (lse.double() - expected_lse).abs() / (1 + expected_lse.abs())
        measures.append(off.masked_fill_(lse == expected_lse, 0.0).amax())  # -inf, too, must be met
    return Errors(*torch.stack(measures).tolist())


def _squares_of_blocks(tensor: Tensor) -> Tensor:
    """Sum of squares of every BLOCK_ROWS rows that lie together, float64; the last block may be smaller."""
    rows = torch.linalg.vector_norm(tensor, dim=-1).double().square().flatten()
    return torch.nn.functional.pad(rows, (0, -len(rows) % BLOCK_ROWS)).view(-1, BLOCK_ROWS).sum(dim=1)


def limits_of(problem: Problem, scale: float, expected: Tensor, typical: float, plain: Errors) -> Errors:
    """Limits of a forward kernel's results."""
    resolution = _resolution(problem, scale, problem.seqlen_kv)
    floor = torch.finfo(getattr(torch, problem.dtype)).eps / 4 + resolution
    floors = Errors(floor * max(float(expected.abs().amax()), typical), floor, floor, resolution)
    return Errors(*(floor + (FACTOR * error if math.isfinite(error) else 0.0) for floor, error in zip(floors, plain)))


def gradient_limits(problem: Problem, scale: float, expected: Tensor, size: Size, plain: Errors) -> Errors:
    """Limits of one gradient that has elements."""
    epsilon = torch.finfo(getattr(torch, problem.dtype)).eps
    terms = max(problem.seqlen_kv, problem.seqlen_q * (problem.heads_q // problem.heads_kv))
    resolution = _resolution(problem, scale, terms)
    luck = epsilon / math.sqrt(max(1, problem.batch * problem.heads_q * problem.visible_pairs))
    absolute, relative, block, _ = (error if math.isfinite(error) else 0.0 for error in plain)
    floor = epsilon / 4 + luck + resolution * size.most_cancelled
    return Errors(
        absolute=FACTOR * absolute + floor * max(float(expected.abs().amax()), size.typical),
        relative=max(RELATIVE_FACTOR * relative, epsilon / 4) + luck + resolution * size.mean_cancelled,
        block=FACTOR * block + floor,
    )


def _resolution(problem: Problem, scale: float, terms: int) -> float:
    """What float32 leaves open in sums of so many terms."""
    score = abs(scale) * math.sqrt(problem.head_dim_qk)
    return torch.finfo(torch.float32).eps * (4 + math.sqrt(terms) + 4 * score)


def unfinished(name: str, tensor: Tensor) -> str:
    """What is wrong with a tensor that holds NaN or infinities."""
    missing = int((~tensor.isfinite()).sum())
    return f"{missing} of {tensor.numel()} elements of {name} were never written or are not finite"


def where(got: Tensor, wanted: Tensor, dims: tuple[str, ...]) -> str:
    """Where the largest difference is, in words for the dimensions."""
    difference = (got.double() - wanted.double()).abs().masked_fill_(got == wanted, 0.0).nan_to_num_(nan=math.inf)
    place = torch.unravel_index(difference.argmax(), difference.shape)
    index = tuple(int(i) for i in place)
    spot = ", ".join(f"{word} {i}" for word, i in zip(dims, index))
    return f"; worst at {spot}: {float(got[index]):.6g} instead of {float(wanted[index]):.6g}"


def dims_of(problem: Problem) -> tuple[str, ...]:
    """Words for the dimensions of tensors in the problem's layout."""
    return ("batch", "head", "row", "column") if problem.layout == "bhsd" else ("batch", "row", "head", "column")


def wrong(result: Check, message: str) -> Check:
    """The verdict turned down."""
    return Check(ok=False, error=result.error, tolerance=result.tolerance, message=message)
