"""Tensors -> Problem -> winner -> launch.

The first call with a signature (shapes, strides, dtypes, device, alignment of addresses, mask, layout, sign of the scale ...)
checks the arguments, chooses a candidate, builds and launches it. Every further call is one look-up and that launch: no file is
read and nothing is compiled. So a signature can be captured in a CUDA graph after one call of it outside the capture.

    arguments    every check; tensors -> Problem
    choice       Problem -> candidates, best first, and the distance between problems
    plan         the prepared launch of a signature
    gradients    what autograd keeps of a call, and the backward pass
    explanation  what is chosen, and why
"""

import contextlib
import os
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashgen.device import Device
from flashgen.dispatch.arguments import checked_call, checked_scale, interpreted, refuse_keywords
from flashgen.dispatch.choice import Choice, choices, choose, distance
from flashgen.dispatch.explanation import Explanation, explained
from flashgen.dispatch.plan import Planner
from flashgen.errors import ArgumentTypeError, UnsupportedError
from flashgen.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashgen.database import Database

    Causal = bool | Literal["top_left"]
    Window = Sequence[int | None] | None

__all__ = ["Choice", "Explanation", "attention", "choices", "choose", "distance", "explain", "reset"]

_planner = Planner()
_plans = _planner.plans


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: "Causal" = ...,
    window: "Window" = ...,
    scale: float | None = ...,
    layout: str = ...,
    return_lse: Literal[False] = ...,
    float16_dq: bool = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: "Causal" = ...,
    window: "Window" = ...,
    scale: float | None = ...,
    layout: str = ...,
    return_lse: Literal[True],
    float16_dq: bool = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: "Causal" = False,
    window: "Window" = None,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    float16_dq: bool = False,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * query key^T + mask) value, by the fastest kernel that flashgen knows for these shapes and this GPU.

    query   (batch, heads_q, seqlen_q, head_dim_qk), or (batch, seqlen_q, heads_q, head_dim_qk) in layout "bshd".
    key     (batch, heads_kv, seqlen_kv, head_dim_qk); heads_q is a multiple of heads_kv (GQA, MQA).
    value   (batch, heads_kv, seqlen_kv, head_dim_v).
    causal  True: the last query sees the last key (FlashAttention's convention). "top_left": the first query sees the first key
            only (SDPA's). They differ if seqlen_q != seqlen_kv.
    window  (left, right): how many keys a query sees before and after its diagonal, its own not counted; None or -1 is
            unbounded. The diagonal is causal's, else bottom-right; causal masks bound the right side by 0.
    scale   any finite number, also negative; by default 1 / sqrt(head_dim_qk).
    float16_dq  dq may be added up in float16 instead of float32, in 16-bit types and where it need not be deterministic. No sum overflows:
            each row has a scale that fits the largest value and key of its head, so a single huge one makes dq coarser. Whether a kernel
            does so is a matter of what is known to be faster.

    Gives out (batch, heads_q, seqlen_q, head_dim_v) in the layout and dtype of the inputs, contiguous; with return_lse also the
    natural logarithm of each row's sum of exponentials, float32 (batch, heads_q, seqlen_q). A row that sees no key is 0, its LSE
    -inf.

    The tensors are bfloat16, float16 or float32 on one CUDA device of sm_80 or later. Strides are free; a tensor whose last
    dimension is not contiguous is copied at every call. Under torch.autocast they are cast to its dtype. Tensors on the CPU run
    in Triton's interpreter if TRITON_INTERPRET=1 was set before triton was loaded (in float16 and float32), else are refused.

    Differentiable once, in query, key and value: a call with inputs that need gradients keeps them, out and the LSE, and returns
    them in the inputs' dtype; a backward pass computes only those that are needed. So is the LSE. The fastest kernels give dq other bits
    from run to run, none does under torch.use_deterministic_algorithms(True). Under torch.no_grad() and torch.inference_mode()
    nothing is kept.

    Never tunes: without a measured winner it runs the nearest one, else the cost model's choice, says so once in the log, and
    `explain` tells the whole story. In a CUDA graph capture only signatures that were called before can be called. torch.compile
    breaks its graph here.

    Raises ArgumentError or ArgumentTypeError naming the argument; UnsupportedError for what flashgen does not compute, such as
    arbitrary masks, dropout, and derivatives of the gradients; BuildError or LaunchError if no candidate runs.
    """
    if unknown:
        refuse_keywords(unknown)
    if scale is not None:
        scale = checked_scale(scale)
    try:
        place = "cuda" if query.is_cuda else "cpu"
        signature: Hashable = (
            query.shape,
            key.shape,
            value.shape,
            query.stride(),
            key.stride(),
            value.stride(),
            query.dtype,
            key.dtype,
            value.dtype,
            place,
            query.get_device(),
            key.get_device(),
            value.get_device(),
            query.__class__,
            key.__class__,
            value.__class__,
            (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15 == 0,
            causal,
            window if window is None else (*window, *map(type, window)),
            layout,
            return_lse,
            float16_dq,
            scale is not None and scale < 0,
            torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
            torch.is_autocast_enabled(place) and torch.get_autocast_dtype(place),
            forward_ad._current_level,
        )
        plan = _plans.get(signature)
    except (AttributeError, RuntimeError, TypeError):  # of what is no plain tensor, or cannot be hashed: the checks will say
        signature = plan = None
    if plan is None:
        return _first_call(signature, query, key, value, causal, window, scale, layout, return_lse, float16_dq)
    return plan(query, key, value, scale)


def _hide_from_dynamo(function: Any) -> None:
    """Under torch.compile the graph breaks at a call of function, and nothing inside it is traced.

    The attributes are what torch.compiler.disable sets; that decorator would import all of torch._dynamo, and cost time at every call.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "flashgen.attention launches kernels of its own"
    with contextlib.suppress(ImportError, AttributeError, TypeError):  # without it dynamo gives up on each inner function by itself
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


_hide_from_dynamo(attention)


def explain(
    query: Tensor | Problem,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    causal: "Causal" = False,
    window: "Window" = None,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    float16_dq: bool = False,
    device: Device | str | None = None,
    database: "Database | None" = None,
) -> Explanation:
    """Which candidate `attention` runs for these arguments, or for a Problem of either direction, and why; nothing is built or launched.

    Of tensors that need gradients it explains the forward kernel with its LSE stored, which such calls run; one line of every
    explanation names the kernels that compute gradients.

    device, for a Problem: the one to explain for, or its short name such as h200; by default the current CUDA device.
    database: whose winners to choose from; by default the user's. Raises what `attention` raises for the arguments.
    """
    negative_scale = scale is not None and checked_scale(scale) < 0
    if isinstance(query, Problem):
        problem = query
        if (key, value, causal, window, layout, return_lse, float16_dq) != (None, None, False, None, "bhsd", False, False):
            raise ArgumentTypeError("tensors or other arguments of a call are given beside a Problem, which says all of that itself")
        if device is None:
            device = _planner_here().device(torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0))
        elif isinstance(device, str):
            device = Device.named(device)
    else:
        if device is not None:
            raise ArgumentTypeError("device is given beside tensors, which are on one already; it goes with a Problem")
        call = checked_call(query, key, value, causal=causal, window=window, layout=layout, return_lse=return_lse, float16_dq=float16_dq)
        problem, device = call.problem, _planner_here().device(call.device)
    planner = _planner_here()
    winners = planner.winners() if database is None else database.winners()
    failures = planner.failures(problem, device)
    return explained(
        problem,
        device,
        winners,
        negative_scale=negative_scale,
        portable=interpreted(),
        failures=failures,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        float16_dq=float16_dq,
    )


def reset() -> None:
    """Choose anew from the next call on, for instance after tuning: plans are dropped and winners read again."""
    _planner_here().forget()


def _first_call(
    signature: Hashable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: "Causal",
    window: "Window",
    scale: float | None,
    layout: str,
    return_lse: bool,
    float16_dq: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    if getattr(query, "is_cuda", False) and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "this signature's first call is inside a CUDA graph capture, where nothing can be compiled; call it once before"
        )
    call = checked_call(query, key, value, causal=causal, window=window, layout=layout, return_lse=return_lse, float16_dq=float16_dq)
    if forward_ad._current_level >= 0:
        signature = None  # whether a tensor has a tangent is checked at every call
    return _planner_here().first_call(signature, call, scale)


def _planner_here() -> Planner:
    """This process's planner: a forked child starts with a new one."""
    global _planner, _plans
    if _planner.pid != os.getpid():
        _planner = Planner()
        _plans = _planner.plans
    return _planner
