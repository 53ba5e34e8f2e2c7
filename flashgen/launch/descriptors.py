"""TMA descriptors: made once for shapes and strides, encoded once for each address."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.build.kernel import TENSORS, Kernel, block_of

KEPT_MAPS = 256  # encoded TMA descriptors a Launch keeps, each for one address of one tensor: 0.5 KB


@dataclass(frozen=True)
class _Address:
    """Stands for a tensor in a TensorDescriptor that outlives it."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def describer(
    kernel: Kernel, shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]], query: torch.Tensor
) -> Callable[[int, Any], Any]:
    """(which of q, k, v, out; tensor) -> Triton's TensorDescriptor of it as (batch, heads, seqlen, head_dim)."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    blocks = [block_of(name, kernel.candidate, kernel.problem) for name in TENSORS]
    # TMA wants sizes above 0 and strides that are multiples of 16 bytes also where a tensor is empty, or has one of something.
    multiple = 16 // query.element_size()
    sizes, steps = [], []
    for shape, each in zip(shapes, strides):
        unused = -(-shape[3] // multiple) * multiple
        sizes.append([max(1, size) for size in shape])
        steps.append([stride if size > 1 and 0 not in shape else unused for size, stride in zip(shape, each)] + [1])

    def describe(which: int, tensor: Any) -> Any:
        return TensorDescriptor(tensor, sizes[which], steps[which], blocks[which])

    return describe


def encoder(
    kernel: Kernel, loaded: Any, describe: Callable[[int, Any], Any], query: torch.Tensor, encodes: bool
) -> Callable[[int, int], Any]:
    """(which of q, k, v, out; address) -> what the kernel takes for it; the most recent are kept.

    An encoded map depends on nothing but the address, so it stays right whichever tensor comes to lie there.
    """
    from triton.backends.nvidia.driver import make_tensordesc_arg

    names = [name for name in kernel.arg_names if name in TENSORS]
    layouts = dict(zip(names, loaded.metadata.tensordesc_meta))
    rest = (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)  # one more parameter since Triton 3.8
    dtype = query.dtype
    somewhere = query.new_empty(512)  # an empty tensor has no address

    @functools.lru_cache(maxsize=KEPT_MAPS)
    def encode(which: int, address: int) -> Any:
        descriptor = describe(which, _Address(address or somewhere.data_ptr(), dtype))
        if not encodes:
            return descriptor
        try:
            return make_tensordesc_arg(descriptor, layouts[TENSORS[which]], *rest)[0]
        except RuntimeError:
            # A thread that never used the GPU has no CUDA context yet, and the driver's encoder, unlike a launch, does not bind one.
            # To record an event does, and is allowed while a graph is captured.
            torch.cuda.Event().record()  # type: ignore[no-untyped-call]
            return make_tensordesc_arg(descriptor, layouts[TENSORS[which]], *rest)[0]

    return encode
