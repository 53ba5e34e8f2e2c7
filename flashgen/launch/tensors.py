"""What a problem says of its tensors, and what a kernel needs of them: shapes, strides, integers, 64-bit offsets."""

from collections.abc import Iterable, Mapping

import torch

from flashgen.build.kernel import Kernel, constants_of
from flashgen.errors import ArgumentError
from flashgen.problem import Problem
from flashgen.schedule import most_packed

MAX_BLOCK = 512  # rows of the largest tile
WORDS = {"q": "query", "k": "key", "v": "value"}  # what callers name tensors


def needs_wide_offsets(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a kernel needs 64-bit strides for these tensors.

    Kernels count batch, head and the first row of a tile in 64 bits in any case; what must fit 32 is a stride, and the rows of
    one tile times theirs. Rows are dimension 1 or 2, by layout; both are taken for rows here. Beyond the end, where addresses
    are not used, they may wrap around.
    """
    for tensor in tensors:
        if 0 in tensor.shape:
            continue
        for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
            rows = min(size, MAX_BLOCK) if dimension in (1, 2) else 1
            if size > 1 and rows * stride >= 2**31:
                return True
    return False


def integers_of(problem: Problem) -> dict[str, int]:
    """The kernel's integers. An unbounded side of the mask lies beyond every pair of query and key."""
    low, high = problem.band
    beyond = problem.seqlen_q + problem.seqlen_kv
    return {
        "num_heads": problem.batch * problem.heads_q,
        "heads_q": problem.heads_q,
        "heads_per_kv": problem.heads_q // problem.heads_kv,
        "seqlen_q": problem.seqlen_q,
        "seqlen_kv": problem.seqlen_kv,
        "band_low": -beyond if low is None else low,
        "band_high": beyond if high is None else high,
    }


def shape_of(name: str, problem: Problem) -> tuple[int, int, int, int]:
    """(batch, heads, seqlen, head_dim) of q, k, v or out, or of the gradient of one of them."""
    if name.removeprefix("d") in ("k", "v"):
        heads, seqlen = problem.heads_kv, problem.seqlen_kv
    else:
        heads, seqlen = problem.heads_q, problem.seqlen_q
    head_dim = problem.head_dim_qk if name.removeprefix("d") in ("q", "k") else problem.head_dim_v
    return problem.batch, heads, seqlen, head_dim


def strides_of(tensor: torch.Tensor, layout: str) -> tuple[int, int, int]:
    """Strides of (batch, heads, seqlen), in elements; 0 where there is but one, whatever PyTorch says then."""
    sizes, strides = list(tensor.shape[:3]), list(tensor.stride()[:3])
    order = (0, 1, 2) if layout == "bhsd" else (0, 2, 1)
    batch, heads, seqlen = (strides[place] if sizes[place] > 1 else 0 for place in order)
    return batch, heads, seqlen


def stride_arguments(name: str, tensor: torch.Tensor, layout: str) -> dict[str, int]:
    """Values of the stride parameters of a tensor, by their names: stride_qb, stride_qh and stride_qs of q, stride_dob ... of dout."""
    letters = name.replace("out", "o")
    return {f"stride_{letters}{dimension}": stride for dimension, stride in zip("bhs", strides_of(tensor, layout))}


def require_built_for(kernel: Kernel, problem: Problem) -> None:
    """ArgumentError naming what of the problem is not what the kernel was built for."""
    built = kernel.problem
    for name in ("dtype", "head_dim_qk", "head_dim_v"):
        if getattr(problem, name) != getattr(built, name):
            raise ArgumentError(f"{name} is {getattr(problem, name)}; the kernel was built for {getattr(built, name)}")
    packed, most = kernel.candidate.config.packed_heads, most_packed(problem)
    if packed > most:
        raise ArgumentError(f"the kernel packs {packed} heads that share keys; {problem} has no more than {most} to pack")
    constants = constants_of(kernel.candidate, built)
    for name, number in constants_of(kernel.candidate, problem).items():
        if constants[name] != number:
            raise ArgumentError(f"{name} is {number} for {problem}; the kernel was built with {constants[name]}")


def require_fit(kernel: Kernel, problem: Problem, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """ArgumentError naming the first tensor that is not what the problem says, or what the kernel was built for."""
    built = kernel.problem
    multiple = 16 // problem.itemsize if built.aligned_16 else 1
    for name, tensor in tensors.items():
        word, shape = WORDS.get(name, name), shape_of(name, problem)
        if problem.layout == "bshd":
            shape = (shape[0], shape[2], shape[1], shape[3])
        if tuple(tensor.shape) != shape or tensor.dtype != getattr(torch, problem.dtype):
            raise ArgumentError(f"{word} is {tuple(tensor.shape)} {tensor.dtype}; the problem says {shape} {problem.dtype}")
        if tensor.device != device:
            raise ArgumentError(f"{word} is on {tensor.device}; query is on {device}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ArgumentError(f"{word} has a stride of {tensor.stride(-1)} in its last dimension; it must be 1")
        if any(stride % multiple for stride in strides_of(tensor, problem.layout)):
            raise ArgumentError(f"{word} has strides {tensor.stride()}; the kernel was built for multiples of {multiple}")
    if kernel.candidate.variant.load == "pointer" and not kernel.wide_offsets and needs_wide_offsets(tensors.values()):
        raise ArgumentError("a tensor needs 64-bit strides; the kernel was built without wide_offsets")


def require_rows(name: str, rows: torch.Tensor | None, problem: Problem) -> None:
    """ArgumentError unless this is one float32 for each row of the output, contiguous."""
    expected = (problem.batch, problem.heads_q, problem.seqlen_q)
    if rows is None or tuple(rows.shape) != expected or rows.dtype != torch.float32 or not rows.is_contiguous():
        raise ArgumentError(f"{name} must be a contiguous float32 tensor of shape {expected}")
