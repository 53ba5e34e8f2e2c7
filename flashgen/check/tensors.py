"""Tensors for checks: random inputs and empty outputs, with NaN between and around their rows."""

import math

import torch
from torch import Tensor

from flashgen.problem import Problem

GUARD = 4096  # elements on either side of a tensor: nobody may write those of an output, and those of an input are NaN


def inputs(problem: Problem, device: torch.device | str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value (standard normal) in the problem's layout and dtype.

    With aligned_16 rows start at multiples of 16 bytes; without, neither bases nor rows do. What lies between and around the rows
    is NaN, so that a kernel which reads it is found out.
    """
    random = torch.Generator(device).manual_seed(seed)
    query, key, value = (tensor for tensor, _ in allocate_inputs(problem, device))
    for tensor in (query, key, value):
        tensor.copy_(torch.randn(tensor.shape, dtype=tensor.dtype, device=device, generator=random))
    return query, key, value


def allocate_inputs(problem: Problem, device: torch.device | str) -> list[tuple[Tensor, Tensor]]:
    """Tensors of the shapes of query, key and value, which are also those of their gradients, each with its buffer: see `allocate`."""
    return [
        allocate(problem, device, heads, seqlen, head_dim)
        for heads, seqlen, head_dim in (
            (problem.heads_q, problem.seqlen_q, problem.head_dim_qk),
            (problem.heads_kv, problem.seqlen_kv, problem.head_dim_qk),
            (problem.heads_kv, problem.seqlen_kv, problem.head_dim_v),
        )
    ]


def allocate(problem: Problem, device: torch.device | str, heads: int, seqlen: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """A tensor in the problem's layout and the buffer it lies in, which is all NaN. Rows are as aligned as the problem says."""
    dtype: torch.dtype = getattr(torch, problem.dtype)
    lead = (problem.batch, heads, seqlen) if problem.layout == "bhsd" else (problem.batch, seqlen, heads)
    lane = 16 // dtype.itemsize
    width, start = (-(-head_dim // lane) * lane, GUARD) if problem.aligned_16 else (head_dim + 1, GUARD + 1)
    size = math.prod(lead) * width
    buffer = torch.full((start + size + GUARD,), math.nan, dtype=dtype, device=device)
    return buffer[start : start + size].view(*lead, width)[..., :head_dim], buffer


def allocate_rows(problem: Problem, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """A number for each row of each query head, float32 (batch, heads_q, seqlen_q), and the buffer it lies in, which is all NaN."""
    shape = (problem.batch, problem.heads_q, problem.seqlen_q)
    buffer = torch.full((math.prod(shape) + 2 * GUARD,), math.nan, dtype=torch.float32, device=device)
    return buffer[GUARD:-GUARD].view(shape), buffer


def fingerprint(*tensors: Tensor) -> tuple[int, ...]:
    """Changes with nearly every change of the tensors' bits."""
    return tuple(int(t.view(torch.int16 if t.dtype.itemsize == 2 else torch.int32).sum(dtype=torch.int64)) for t in tensors)
