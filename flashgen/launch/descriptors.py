"""TMA descriptors: made once for shapes and strides, encoded once for each address."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.build.kernel import Function

KEPT_MAPS = 64  # encoded TMA descriptors that a Launch keeps of a parameter, each for one address: 0.1 KB

Describe = Callable[[Any], Any]  # tensor -> Triton's TensorDescriptor of it
Encode = Callable[[int], Any]  # address -> what a kernel takes for the descriptor of what lies there


@dataclass(frozen=True)
class _Address:
    """Stands for a tensor in a TensorDescriptor that outlives it."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def describer(shape: Sequence[int], strides: Sequence[int], block: list[int], dtype: torch.dtype) -> Describe:
    """What describes tensors of this shape that move in such blocks. strides: of all dimensions but the last, which is contiguous."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    # TMA wants sizes above 0 and strides that are multiples of 16 bytes also where a tensor is empty, or has one of something.
    multiple = 16 // dtype.itemsize
    unused = -(-shape[-1] // multiple) * multiple
    steps = [stride if size > 1 and 0 not in shape else unused for size, stride in zip(shape, strides)] + [1]
    sizes = [max(1, size) for size in shape]

    def describe(tensor: Any) -> Any:
        return TensorDescriptor(tensor, sizes, steps, block)

    return describe


def encoder(function: Function, loaded: Any, name: str, describe: Describe, somewhere: torch.Tensor, encodes: bool) -> Encode:
    """What gives a function's parameter for an address; the most recent are kept.

    An encoded map depends on nothing but the address, so it stays right whichever tensor comes to lie there. somewhere: a tensor of
    the parameter's type, whose address stands for the missing one of an empty tensor. encodes: see `enqueuer`.
    """
    from triton.backends.nvidia.driver import make_tensordesc_arg

    layout = dict(zip(function.described, loaded.metadata.tensordesc_meta))[name]
    rest = (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)  # one more parameter since Triton 3.8

    @functools.lru_cache(maxsize=KEPT_MAPS)
    def encode(address: int) -> Any:
        descriptor = describe(_Address(address or somewhere.data_ptr(), somewhere.dtype))
        if not encodes:
            return descriptor
        try:
            return make_tensordesc_arg(descriptor, layout, *rest)[0]
        except RuntimeError:
            # A thread that never used the GPU has no CUDA context yet, and the driver's encoder, unlike a launch, does not bind one.
            # To record an event does, and is allowed while a graph is captured.
            torch.cuda.Event().record()  # type: ignore[no-untyped-call]
            return make_tensordesc_arg(descriptor, layout, *rest)[0]

    return encode


def expanded(describe: Describe, somewhere: torch.Tensor) -> list[int]:
    """What Triton's C function takes besides an encoded map: the shape and the strides."""
    blank = describe(somewhere)
    return [*blank.shape, *blank.strides]
