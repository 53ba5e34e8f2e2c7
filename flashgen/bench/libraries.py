"""Peers beside SDPA's backends, which are asked for by name because each compiles first: FlashAttention-4, and PyTorch's FlexAttention."""

import importlib
import importlib.metadata
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from flashgen.bench.sdpa import Attention, Results, call_of, laid_out
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.problem import Problem
from flashgen.record import Peer

LIBRARIES = {"fa4": ("flash_attn.cute", "flash-attn-4"), "flex": ("torch.nn.attention.flex_attention", "torch")}  # module, distribution


def libraries(
    names: Collection[str],
    problem: Problem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    dout: Tensor | None = None,
) -> dict[str, Callable[[], Results]]:
    """These peers as calls on tensors in the problem's layout, as `peers` gives SDPA's; each has run once, and so is compiled.

    Raises ArgumentError for a name that is none, UnsupportedError for a peer that is not installed, or does not compute the problem.
    """
    require_libraries(names)
    calls = {}
    for name in names:
        try:
            module = importlib.import_module(LIBRARIES[name][0])
        except ImportError as error:
            raise UnsupportedError(f"peer {name} is not here: {error}; it comes with the package {LIBRARIES[name][1]}") from None
        attention = _fa4(module, problem, scale) if name == "fa4" else _flex(module, problem, scale, query.device)
        try:
            calls[name] = call_of(attention, query, key, value, dout)
        except Exception as error:  # each library has errors of its own
            if "CUDA error" in str(error):  # the device failed, and every later call would
                raise
            raise UnsupportedError(f"peer {name} does not compute {problem}: {' '.join(str(error).split())[:300]}") from error
    return calls


def require_libraries(names: Collection[str], argument: str = "peers") -> None:
    """Raise ArgumentError for a name that is none."""
    for name in names:
        if name not in LIBRARIES:
            raise ArgumentError(f"{argument} is {name!r}; it must be among {', '.join(LIBRARIES)}")


def library(name: str) -> Peer:
    """One of them, and its version here."""
    package = LIBRARIES[name][1]
    return Peer(name=name, version=f"{package} {importlib.metadata.version(package)}")


def _fa4(module: Any, problem: Problem, scale: float | None) -> Attention:
    if problem.mask == "causal_top_left":
        raise UnsupportedError(f"peer fa4 aligns causal masks to the last query and key, and the mask of {problem} is top-left")

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        causal = problem.mask == "causal"
        result = module.flash_attn_func(query, key, value, softmax_scale=scale, causal=causal, window_size=problem.window)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return laid_out(attention, problem.layout, own="bshd")


def _flex(module: Any, problem: Problem, scale: float | None, device: torch.device) -> Attention:
    low, high = problem.band

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key - query >= (-problem.seqlen_q if low is None else low)) & (key - query <= (problem.seqlen_kv if high is None else high))

    mask = None
    if (low, high) != (None, None):
        mask = module.create_block_mask(visible, None, None, problem.seqlen_q, problem.seqlen_kv, device=device)
    # Each problem is compiled anew. Beyond a limit PyTorch would run the others slowly; with fullgraph it raises instead.
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, 1024)
    compiled: Any = torch.compile(module.flex_attention, dynamic=False, fullgraph=True)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = compiled(query, key, value, block_mask=mask, scale=scale, enable_gqa=problem.heads_q != problem.heads_kv)
        return out

    return laid_out(attention, problem.layout)
