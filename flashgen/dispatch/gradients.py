"""Gradients: what torch.autograd keeps of a call, and how they come back to its inputs."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashgen.dispatch.arguments import converted, require_no_transform, strides_aligned
from flashgen.dispatch.choice import has_nothing_to_compute
from flashgen.errors import UnsupportedError
from flashgen.launch import BackwardInputs
from flashgen.problem import Problem

if TYPE_CHECKING:
    from flashgen.dispatch.plan import Plan, Result

MOST_LAUNCHES = 64  # a plan keeps, each for upstream gradients of other strides; the oldest goes first

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # dq, dk, dv; None is not computed
RunBackward = Callable[..., None]  # (query, key, value, out, lse, dout, dlse, dq, dk, dv, scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class DifferentiablePlan:
    """How calls of one signature are answered whose inputs need gradients.

    forward     gives (out, lse).
    problem     of the forward kernel.
    return_lse  the caller gets the LSE; the backward pass needs it in any case.
    float16_dq  dq may be added up in float16, where a problem can allow that.
    choose      (backward problem, kept, gradients, scale) -> what computes these gradients, which it has done once.
    launches    the answers of choose.
    """

    forward: "Plan"
    problem: Problem
    return_lse: bool
    float16_dq: bool
    choose: Callable[[Problem, BackwardInputs, Gradients, float], RunBackward]
    launches: dict[Hashable, RunBackward] = field(default_factory=dict)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> "Result":
        """out, or (out, lse), with gradients on the way back."""
        require_no_transform()
        forward = self.forward
        if forward.convert:  # outside of the Function, so that autograd itself takes the gradients back through it
            query, key, value = (converted(tensor, forward.cast) for tensor in (query, key, value))
        result: Result = FlashgenAttention.apply(self, query, key, value, forward.scale if scale is None else scale)  # type: ignore[no-untyped-call]
        return result

    def gradients(self, kept: BackwardInputs, needed: tuple[bool, bool, bool], scale: float) -> Gradients:
        """dq, dk and dv, those that are needed; dk and dv come together, from one kernel."""
        needs_dq, needs_dk, needs_dv = needed
        needed = (needs_dq, needs_dk or needs_dv, needs_dk or needs_dv)
        if has_nothing_to_compute(self.problem):
            return _each(torch.zeros_like, kept, needed)
        gradients = _each(_empty_gradient, kept, needed)
        aligned = all(tensor.data_ptr() % 16 == 0 for tensor in kept if tensor is not None)
        # A kernel that is not deterministic computes all three at once.
        deterministic = torch.are_deterministic_algorithms_enabled() or not all(needed)
        signature = (*(tensor.stride() for tensor in kept.strided), kept.dlse is None, needed, aligned, deterministic)
        run = self.launches.get(signature)
        if run is not None:
            run(*kept, *gradients, scale)
            return gradients
        problem = self.problem.gradients(
            deterministic=deterministic,
            float16_dq=self.float16_dq,
            return_lse=kept.dlse is not None,
            aligned_16=aligned and all(strides_aligned(tensor) for tensor in kept.strided_with(gradients)),
        )
        run = self.choose(problem, kept, gradients, scale)
        while len(self.launches) >= MOST_LAUNCHES:
            self.launches.pop(next(iter(self.launches)), None)
        self.launches[signature] = run
        return gradients


class FlashgenAttention(torch.autograd.Function):
    """The node of a call in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, plan: DifferentiablePlan, query: Tensor, key: Tensor, value: Tensor, scale: float) -> "Result":
        out, lse = plan.forward(query, key, value, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.set_materialize_grads(False)  # an LSE that nobody used costs nothing
        ctx.plan, ctx.scale = plan, scale
        return (out, lse) if plan.return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 5
        for each in (dout, dlse):
            require_no_transform(each)
        with torch.no_grad():
            kept = BackwardInputs(
                query=_readable(query),
                key=_readable(key),
                value=_readable(value),
                out=_readable(out),
                lse=lse.contiguous(),
                dout=torch.zeros_like(out) if dout is None else _dense(dout),
                dlse=None if dlse is None else dlse.resolve_neg().contiguous(),
            )
            gradients = ctx.plan.gradients(kept, ctx.needs_input_grad[1:4], ctx.scale)
        if torch.is_grad_enabled():  # create_graph=True
            depends = [each for each in (query, key, value, dout, dlse) if each is not None]
            gradients = _differentiable_no_more(gradients, depends)
        return None, *gradients, None


class _OnceOnly(torch.autograd.Function):
    """Gives the first count tensors, and depends on all of them; torch's once_differentiable would forget on what its result depends,
    and not say who refuses."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> None:
        raise UnsupportedError("flashgen.attention is differentiable once; its gradients have no gradients of their own")


def _differentiable_no_more(gradients: Gradients, depends: list[Tensor]) -> Gradients:
    """The same gradients, which say so if they are differentiated again."""
    computed = [gradient for gradient in gradients if gradient is not None]
    marked = iter(_OnceOnly.apply(len(computed), *computed, *depends))  # type: ignore[no-untyped-call]
    dq, dk, dv = (None if gradient is None else next(marked) for gradient in gradients)
    return dq, dk, dv


def _readable(tensor: Tensor) -> Tensor:
    """The tensor with a last dimension that is contiguous: itself, or a copy, in which other dimensions stay expanded that are."""
    tensor = tensor.resolve_neg()
    if tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride()[:-1])
    return tensor[once].contiguous().expand(tensor.shape)


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it is expanded, which TMA does not read, or its last dimension not contiguous."""
    expanded = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride()))
    return _readable(tensor.contiguous() if expanded else tensor)


def _each(made: Callable[[Tensor], Tensor], kept: BackwardInputs, needed: tuple[bool, ...]) -> Gradients:
    """made of query, key and value, of those that need it."""
    dq, dk, dv = (made(tensor) if need else None for tensor, need in zip((kept.query, kept.key, kept.value), needed))
    return dq, dk, dv


def _empty_gradient(tensor: Tensor) -> Tensor:
    """A gradient to be filled, with the strides of its tensor if those are dense, as autograd likes it best."""
    gradient = torch.empty_like(tensor)
    if gradient.stride(-1) == 1 or gradient.shape[-1] == 1:
        return gradient
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
