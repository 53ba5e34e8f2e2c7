"""Backward: the check of dq, dk and dv, each against limits of its own."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flashgen import reference
from flashgen.check.measures import Check, Errors, Size, dims_of, errors_of, gradient_limits, unfinished, where, wrong
from flashgen.check.stressing import stressed
from flashgen.check.tensors import allocate, allocate_inputs, allocate_rows, fingerprint, inputs
from flashgen.errors import ArgumentError
from flashgen.launch import BackwardInputs
from flashgen.problem import Problem

BACKWARD_SCALES = (None, 1.0, -0.125, 0.0)


class BackwardLaunch(Protocol):
    """A backward kernel bound to a problem's shapes and strides; writes dq, dk and dv.

    dlse is None where the problem's LSE has no gradient.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        scale: float,
        /,
    ) -> None: ...


class Gradients(NamedTuple):
    """What a backward kernel writes."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class BackwardCase:
    """Inputs, the gradients that are expected of them, and tensors to write gradients to: made once, then used for every candidate.

    Tensors are in the problem's layout, with strides that the problem admits and no better; an expanded dout is one row for all. out and
    lse are the oracle's, rounded to the dtype and float32. expected is float32 (float64 for float32 problems). Everything is drawn from
    `seed`. sizes and limits are those of dq, dk, dv.
    """

    problem: Problem
    seed: int
    scale: float
    expanded_dout: bool
    given: BackwardInputs
    gradients: Gradients
    expected: Gradients
    sizes: tuple[Size, Size, Size]
    limits: tuple[Errors, Errors, Errors]
    buffers: Gradients
    fingerprint: tuple[int, ...]

    def poison(self) -> None:
        """Fill the gradients, and what lies around them, with NaN."""
        for buffer in self.buffers:
            buffer.fill_(math.nan)

    def bind(self, launch: BackwardLaunch) -> Callable[[], None]:
        """The launch as a call without arguments on this case's tensors, as a bench wants it."""
        return lambda: launch(*self.given, *self.gradients, self.scale)


def prepare_backward(
    problem: Problem, device: torch.device | str, seed: int, scale: float | None = None, *, expanded_dout: bool = False
) -> BackwardCase:
    """A case for a backward problem that is not empty: fresh inputs from the seed, the oracle's gradients, limits, and poisoned outputs.

    scale None is 1/sqrt(head_dim_qk). expanded_dout: dout is a single row of random values that all others repeat: its strides
    are 0 but for the last.
    """
    if problem.direction != "backward":
        raise ArgumentError(f"direction is {problem.direction!r}; prepare_backward takes backward problems")
    scale = 1 / math.sqrt(problem.head_dim_qk) if scale is None else scale
    given = _given(problem, device, seed, scale, expanded_dout)
    query, key, value, _, _, dout, dlse = given
    words = dict(mask=problem.mask, window=problem.window, scale=scale, layout=problem.layout)
    expected = Gradients(*reference.gradients(query, key, value, dout, dlse, **words))  # type: ignore[arg-type]
    if problem.dtype != "float32":
        expected = Gradients(*(each.float() for each in expected))
    plain = reference.plain_gradients(query, key, value, dout, dlse, **words)  # type: ignore[arg-type]
    sizes = _sizes(problem, scale, given)
    limits = []
    for wanted, size, honest in zip(expected, sizes, plain):
        nothing = wanted.numel() == 0
        errors = Errors(0.0, 0.0, 0.0) if nothing else errors_of(honest, None, wanted, None, size.typical)
        limits.append(errors if nothing else gradient_limits(problem, scale, wanted, size, errors))
    outputs = allocate_inputs(problem, device)
    return BackwardCase(
        problem=problem,
        seed=seed,
        scale=scale,
        expanded_dout=expanded_dout,
        given=given,
        gradients=Gradients(*(tensor for tensor, _ in outputs)),
        expected=expected,
        sizes=sizes,
        limits=(limits[0], limits[1], limits[2]),
        buffers=Gradients(*(buffer for _, buffer in outputs)),
        fingerprint=_fingerprint(given),
    )


def check_backward(launch: BackwardLaunch, case: BackwardCase) -> Check:
    """Run a kernel once on gradients filled with NaN, and judge what it wrote and what it left alone.

    Whatever the launch raises goes through, also errors of the device that only show up when results are read. A kernel that
    writes to its inputs is wrong, and the inputs are restored for the next one.
    """
    case.poison()
    case.bind(launch)()
    result = judge_backward(*case.gradients, case)
    if _fingerprint(case.given) != case.fingerprint:
        drawn = _given(case.problem, case.given.query.device, case.seed, case.scale, case.expanded_dout)
        for damaged, fresh in zip(case.given, drawn):
            if damaged is not None and fresh is not None:
                _unexpanded(damaged).copy_(_unexpanded(fresh))
        return wrong(result, "the kernel wrote to its inputs")
    for name, written, buffer in zip(Gradients._fields, case.gradients, case.buffers):
        if result.ok and int(buffer.isnan().sum()) != buffer.numel() - written.numel():
            return wrong(result, f"the kernel wrote outside {name}")
    return result


def judge_backward(dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, case: BackwardCase) -> Check:
    """Compare gradients, in the problem's layout, with what the case expects; None leaves one out."""
    nearest = Check(ok=True, error=0.0, tolerance=0.0)
    closeness = -1.0
    message = ""
    for name, got, wanted, size, limits in zip(Gradients._fields, (dq, dk, dv), case.expected, case.sizes, case.limits):
        if got is None or not got.numel():
            continue
        errors = errors_of(got, None, wanted, None, size.typical)
        finite = math.isfinite(errors.absolute)
        close = errors.absolute / max(limits.absolute, 1e-300) if finite else math.inf
        if close > closeness:
            closeness = close
            nearest = Check(ok=True, error=errors.absolute if finite else None, tolerance=limits.absolute)
        if message:
            continue
        if not finite and not got.isfinite().all():
            message = unfinished(name, got)
            continue
        for measure, measured, limit in zip(Errors._fields, errors, limits):
            if not measured <= limit:
                place = where(got, wanted, dims_of(case.problem))
                message = f"{measure} error of {name}, {measured:.3g}, is above {limit:.3g}{place}"
                break
    return wrong(nearest, message) if message else nearest


def stress_backward(
    launch: BackwardLaunch,
    problem: Problem,
    device: torch.device | str,
    *,
    seed: int,
    same_dq: bool = True,
    scales: Sequence[float | None] = BACKWARD_SCALES,
    repeats: int = 100,
) -> Check:
    """The harder check that a winner must pass: several scales, each on inputs of its own, and bitwise the same gradients again and again.

    same_dq False: the kernel adds to dq in whatever order programs come along, so dq need not keep its bits, only its limits, each time.
    Seeds are seed, seed + 1 ... for the scales in turn; `repeats` runs on the inputs of the first scale follow. Returns the first
    verdict that is not ok, else that of the first scale.
    """
    return stressed(
        lambda number, scale: prepare_backward(problem, device, number, scale),
        lambda case: check_backward(launch, case),
        lambda case: _changes(launch, case, repeats, same_dq),
        seed=seed,
        scales=scales,
    )


def _changes(launch: BackwardLaunch, case: BackwardCase, repeats: int, same_dq: bool) -> str:
    """What is wrong with the first repeat whose gradients are not those that the case holds now; empty if all are."""
    expected = Gradients(*(gradient.clone() for gradient in case.gradients))
    for number in range(1, repeats + 1):
        case.poison()
        case.bind(launch)()
        run = f"run {number} of {repeats} on the same inputs"
        for name, result, same in zip(Gradients._fields, case.gradients, expected):
            if (same_dq or name != "dq") and not torch.equal(result, same):
                return f"{run} gave another {name}"
        if not same_dq:
            verdict = judge_backward(case.gradients.dq, None, None, case)
            if not verdict.ok:
                return f"{run}: {verdict.message}"
    return ""


def _fingerprint(given: BackwardInputs) -> tuple[int, ...]:
    return fingerprint(*(tensor for tensor in given if tensor is not None))


def _given(problem: Problem, device: torch.device | str, seed: int, scale: float, expanded_dout: bool) -> BackwardInputs:
    """Inputs from the seed. What lies between and around their rows is NaN.

    dout leans on out by one unit in each element: without that a row's sum of dout * out vanishes beside its terms where keys are many,
    and a kernel that leaves it out is hardly wrong.
    """
    query, key, value = inputs(problem, device, seed)
    exact, exact_lse = reference.attention(query, key, value, mask=problem.mask, window=problem.window, scale=scale, layout=problem.layout)
    out, _ = allocate(problem, device, problem.heads_q, problem.seqlen_q, problem.head_dim_v)
    out.copy_(exact)
    lse, _ = allocate_rows(problem, device)
    lse.copy_(exact_lse)
    random = torch.Generator(device).manual_seed(seed + 2**32)  # apart from the seeds of other inputs
    if expanded_dout:
        row, _ = allocate(replace(problem, batch=1), device, 1, 1, problem.head_dim_v)
        row.copy_(torch.randn(row.shape, dtype=torch.float32, device=device, generator=random))
        dout = row.expand(out.shape)
    else:
        dout, _ = allocate(problem, device, problem.heads_q, problem.seqlen_q, problem.head_dim_v)
        size = exact.square().mean(dim=-1, keepdim=True).sqrt()
        noise = torch.randn(dout.shape, dtype=torch.float32, device=device, generator=random)
        dout.copy_(exact.div_(size.masked_fill_(size == 0, 1.0)).add_(noise))
    dlse = None
    if problem.return_lse:
        dlse, _ = allocate_rows(problem, device)
        dlse.copy_(torch.randn(dlse.shape, dtype=torch.float32, device=device, generator=random))
    return BackwardInputs(query, key, value, out, lse, dout, dlse)


def _sizes(problem: Problem, scale: float, given: BackwardInputs) -> tuple[Size, Size, Size]:
    """Sizes of dq, dk, dv for values that are random."""
    query, key, value, dout = (_root_mean_square(t) for t in (given.query, given.key, given.value, given.dout))
    keys = max(1.0, problem.visible_pairs / max(1, problem.seqlen_q))  # that a row sees, in the mean
    queries = max(1.0, problem.visible_pairs / max(1, problem.seqlen_kv) * problem.heads_q / problem.heads_kv)
    product = dout * value * math.sqrt(problem.head_dim_v)
    sums = (given.dout.float() * given.out.float()).sum(dim=-1).abs()
    most = float(sums.amax()) if sums.numel() else 0.0
    cancelled = [max(1.0, each / max(product, 1e-300)) for each in (_root_mean_square(sums), most)]
    score = abs(scale) * product  # the gradient of a score, times the number of keys
    return (
        Size(score * key / math.sqrt(keys), *cancelled),
        Size(score * query * math.sqrt(queries) / keys, *cancelled),
        Size(dout * math.sqrt(queries) / keys),
    )


def _root_mean_square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) / math.sqrt(max(1, tensor.numel()))


def _unexpanded(tensor: Tensor) -> Tensor:
    """The same elements, each once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor
