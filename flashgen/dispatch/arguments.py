"""What a caller passed -> what is computed: every check of a call's arguments, before anything is chosen or compiled."""

import numbers
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashgen.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from flashgen.problem import DTYPES, LAYOUTS, Problem

_DTYPES = {getattr(torch, name): name for name in DTYPES}
_MASK_OF_CAUSAL = {False: "full", True: "causal", "top_left": "causal_top_left"}
_FLOAT32_MAX = torch.finfo(torch.float32).max
_PLAIN = (Tensor, torch.nn.Parameter)
_NAMES = ("query", "key", "value")

# Keywords of other attention functions, for features that do not exist here.
_MISSING_FEATURES = {
    "attn_mask": "arbitrary masks",
    "mask": "arbitrary masks",
    "block_mask": "arbitrary masks",
    "attn_bias": "a bias on the scores",
    "bias": "a bias on the scores",
    "alibi_slopes": "a bias on the scores",
    "score_mod": "functions on the scores",
    "softcap": "a cap on the scores",
    "dropout_p": "dropout",
    "dropout": "dropout",
    "sinks": "attention sinks",
    "cu_seqlens_q": "packed sequences of different lengths",
    "cu_seqlens_k": "packed sequences of different lengths",
    "seqlens": "packed sequences of different lengths",
    "block_table": "a paged KV cache",
    "q_descale": "FP8",
    "k_descale": "FP8",
    "v_descale": "FP8",
    "deterministic": "such a switch: torch.use_deterministic_algorithms(True) is one",
}
_OTHER_NAMES = {
    "is_causal": "causal: True aligns the diagonal to the last query and key, 'top_left' to the first ones as PyTorch's SDPA does",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "window_size": "window",
    "sliding_window": "window, whose left side does not count the query's own key",
    "return_attn_probs": "return_lse",
    "enable_gqa": "nothing: fewer heads in key and value than in query are always allowed",
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """A checked call: what is computed, where, and what the tensors must become first.

    cast      dtype the tensors are cast to under autocast, else None.
    copied    some tensor has a last dimension that is not contiguous, or another dtype, and so is copied at every call.
    training  some tensor needs a gradient: the kernel stores the LSE.
    return_lse  the caller gets the LSE.
    float16_dq  a kernel of the gradients may add up dq in float16.
    query, key, value  the tensors as the kernel gets them.
    """

    problem: Problem
    query: Tensor
    key: Tensor
    value: Tensor
    cast: torch.dtype | None
    copied: bool
    training: bool
    return_lse: bool
    float16_dq: bool

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.query.device

    def new_outputs(self) -> tuple[Tensor, Tensor | None]:
        """out, contiguous in the problem's layout, and the LSE where one is returned; neither is filled."""
        problem = self.problem
        sizes = {"b": problem.batch, "h": problem.heads_q, "s": problem.seqlen_q, "d": problem.head_dim_v}
        out = self.query.new_empty([sizes[dim] for dim in problem.layout])
        return out, out.new_empty([sizes[dim] for dim in "bhs"], dtype=torch.float32) if problem.return_lse else None


def checked_call(query: Any, key: Any, value: Any, *, causal: Any, window: Any, layout: Any, return_lse: Any, float16_dq: Any) -> Call:
    """The call that these arguments of `attention` ask for.

    Raises ArgumentError, ArgumentTypeError or UnsupportedError naming the first argument that is not right.
    """
    tensors = dict(zip(_NAMES, (query, key, value)))
    for name, tensor in tensors.items():
        _require_plain(name, tensor)
    _require_one_place(tensors)
    cast = _cast_of(tensors)
    for name, tensor in tensors.items():
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise UnsupportedError(f"{name} is a dual tensor; flashgen does not compute forward-mode derivatives")
    if isinstance(causal, Tensor) or not any(causal is each or causal == each for each in _MASK_OF_CAUSAL):
        raise ArgumentError(f"causal is {_shown(causal)}; it must be False, True or 'top_left'")
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ArgumentError(f"layout is {_shown(layout)}; it must be one of {', '.join(LAYOUTS)}")
    if not isinstance(float16_dq, bool):
        raise ArgumentError(f"float16_dq is {_shown(float16_dq)}; it must be True or False")
    sizes = _sizes(tensors, layout)
    copied = any(needs_copy(tensor, cast) for tensor in tensors.values())
    training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values())
    ready = {name: converted(tensor, cast) for name, tensor in tensors.items()}
    problem = Problem(
        **sizes,
        dtype=_DTYPES[ready["query"].dtype],
        mask=_MASK_OF_CAUSAL[causal],
        window=window,
        layout=layout,
        return_lse=return_lse,
        aligned_16=_aligned(tensors, ready, sizes["head_dim_v"]),
    )
    if training:
        problem = replace(problem, return_lse=True)
    return Call(problem=problem, **ready, cast=cast, copied=copied, training=training, return_lse=return_lse, float16_dq=float16_dq)


def needs_copy(tensor: Tensor, cast: torch.dtype | None) -> bool:
    """A copy stands in for a tensor of another dtype than wanted, and for one whose last dimension is not contiguous."""
    return (cast is not None and tensor.dtype != cast) or (tensor.stride(-1) != 1 and tensor.shape[-1] != 1)


def converted(tensor: Tensor, cast: torch.dtype | None) -> Tensor:
    """The tensor as a kernel can read it. Strides of the result depend on shape, strides and dtype alone."""
    if cast is not None:
        tensor = tensor.to(cast)
    return tensor.resolve_neg().contiguous() if needs_copy(tensor, None) else tensor


def strides_aligned(tensor: Tensor) -> bool:
    """Whether strides are multiples of 16 bytes, and none is 0. The last dimension is contiguous."""
    return all(stride > 0 and stride * tensor.element_size() % 16 == 0 for size, stride in _steps(tensor) if size > 1)


def require_no_transform(tensor: Tensor | None = None) -> None:
    """Raise UnsupportedError inside torch.func's transforms, and for a tensor that comes from one, such as autograd's batched gradients."""
    functorch = torch._C._functorch
    wrapped = tensor is not None and (functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor))
    if wrapped or torch._C._are_functorch_transforms_active():
        raise UnsupportedError("flashgen has no gradients inside torch.func (vmap, grad, is_grads_batched ...): call it on plain tensors")


def checked_scale(scale: Any) -> float:
    """The scale as a float. Raises ArgumentError unless it is finite in float32, ArgumentTypeError unless it is a real number."""
    if type(scale) is float and -_FLOAT32_MAX <= scale <= _FLOAT32_MAX:
        return scale
    if isinstance(scale, Tensor):
        if scale.requires_grad:
            raise ArgumentTypeError(
                "scale is a tensor that requires grad, and flashgen has no gradient for it; multiply query by it and pass scale=1.0"
            )
        raise ArgumentTypeError("scale is a tensor; pass a number, such as scale.item()")
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise ArgumentTypeError(f"scale is {_shown(scale)}; it must be a real number")
    number = float(scale)
    if not -_FLOAT32_MAX <= number <= _FLOAT32_MAX:
        raise ArgumentError(f"scale is {scale}; it must be finite in float32")
    return number


def refuse_keywords(keywords: Mapping[str, object]) -> NoReturn:
    """Raise for keywords that `attention` does not have: UnsupportedError for a feature, ArgumentTypeError for a name."""
    for name in keywords:
        if name in _MISSING_FEATURES:
            raise UnsupportedError(f"{name}: flashgen does not have {_MISSING_FEATURES[name]}")
    for name in keywords:
        if name in _OTHER_NAMES:
            raise ArgumentTypeError(f"attention() has no argument {name!r}; use {_OTHER_NAMES[name]}")
    raise ArgumentTypeError(f"attention() got an unexpected keyword argument {next(iter(keywords))!r}")


def interpreted() -> bool:
    """Triton was told to run kernels in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def _require_plain(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(f"{name} is {_shown(tensor)}; it must be a torch.Tensor")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise UnsupportedError(f"{name} is inside torch.func (vmap, grad, jvp ...); flashgen has no rule for it: call it on plain tensors")
    if tensor.is_nested:
        raise UnsupportedError(f"{name} is a nested tensor; flashgen takes dense tensors: pad it with .to_padded_tensor()")
    if type(tensor) not in _PLAIN:
        raise UnsupportedError(f"{name} is a {type(tensor).__name__}; flashgen takes plain torch.Tensors: pass the local, dense one")
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"{name} has layout {tensor.layout}; flashgen takes strided tensors: pass .to_dense()")
    if tensor.dim() != 4:
        raise ArgumentError(f"{name} has {tensor.dim()} dimensions, {tuple(tensor.shape)}; it must have 4")


def _require_one_place(tensors: Mapping[str, Tensor]) -> None:
    where = {str(tensor.device) for tensor in tensors.values()}
    if len(where) > 1:
        told = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ArgumentTypeError(f"tensors are on different devices: {told}")
    device = tensors["query"].device
    if device.type == "cpu" and not interpreted():
        raise UnsupportedError(
            "query, key and value are on the CPU; flashgen runs on CUDA devices (or, slowly, in Triton's interpreter "
            "if TRITON_INTERPRET=1 is set before triton is loaded)"
        )
    if device.type not in ("cuda", "cpu"):
        raise UnsupportedError(f"query, key and value are on {device}; flashgen runs on CUDA devices")


def _cast_of(tensors: Mapping[str, Tensor]) -> torch.dtype | None:
    """The dtype that autocast wants. Checks dtypes on the way."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ArgumentTypeError(f"{name} is {tensor.dtype}; it must be one of {', '.join(DTYPES)}")
    place = tensors["query"].device.type
    if torch.is_autocast_enabled(place):
        cast = torch.get_autocast_dtype(place)
    else:
        cast = None
        if len({tensor.dtype for tensor in tensors.values()}) > 1:
            told = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
            raise ArgumentTypeError(f"tensors have different dtypes: {told}; cast them to one, or call under torch.autocast")
    wanted = cast or tensors["query"].dtype
    if wanted not in _DTYPES:
        raise ArgumentTypeError(f"torch.autocast's dtype is {wanted}; it must be one of {', '.join(DTYPES)}")
    if place == "cpu" and wanted is torch.bfloat16:
        raise UnsupportedError(
            "query, key and value are bfloat16, whose products Triton's interpreter computes wrongly; use float16 or float32"
        )
    return cast


def _sizes(tensors: Mapping[str, Tensor], layout: str) -> dict[str, Any]:
    """The size fields of a Problem. Raises ArgumentError where the tensors' shapes disagree."""
    shapes = {name: dict(zip(layout, tensor.shape)) for name, tensor in tensors.items()}
    query, key, value = (shapes[name] for name in _NAMES)
    words = {"b": "batch size", "h": "number of heads", "s": "sequence length", "d": "head dim"}
    for (one, other), dims in ((("query", "key"), "bd"), (("key", "value"), "bhs")):
        for dim in dims:
            a, b = shapes[one][dim], shapes[other][dim]
            if a != b:
                raise ArgumentError(
                    f"{one} has {words[dim]} {a} and {other} {b} in layout {layout}: {tuple(tensors[one].shape)} and "
                    f"{tuple(tensors[other].shape)}; they must agree"
                )
    return dict(
        batch=query["b"],
        heads_q=query["h"],
        heads_kv=key["h"],
        seqlen_q=query["s"],
        seqlen_kv=key["s"],
        head_dim_qk=query["d"],
        head_dim_v=value["d"],
    )


def _aligned(given: Mapping[str, Tensor], ready: Mapping[str, Tensor], head_dim_v: int) -> bool:
    """Whether addresses and strides allow TMA. Addresses are those of the tensors given, so that one answer holds for every call
    with the same strides; the output is contiguous in a fresh allocation, and so has only its row to be looked at. Expanded
    dimensions, with a stride of 0, are not for TMA: NVIDIA's documentation does not say that they work."""
    return (
        all(tensor.data_ptr() % 16 == 0 for tensor in given.values())
        and all(strides_aligned(tensor) for tensor in ready.values())
        and head_dim_v * ready["query"].element_size() % 16 == 0
    )


def _steps(tensor: Tensor) -> Iterable[tuple[int, int]]:
    """(size, stride) of each dimension but the last. The stride of a dimension of size 1 means nothing."""
    return zip(tensor.shape[:-1], tensor.stride())


def _shown(value: object) -> str:
    """A value as an error message shows it: tensors and other large things by type."""
    text = repr(value)
    return text if len(text) <= 60 and not isinstance(value, Tensor) else f"a {type(value).__name__}"
