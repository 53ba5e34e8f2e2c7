"""Peers: the backends of PyTorch's scaled_dot_product_attention, as calls on the tensors of a problem."""

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashgen.errors import ArgumentError
from flashgen.problem import Problem
from flashgen.record import Peer

logger = logging.getLogger(__name__)

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MATH_SCORES_BYTES = 4 * 2**30  # the math backend keeps float32 scores of all heads, in several copies

Results = Tensor | tuple[Tensor, ...]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def peers(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, dout: Tensor | None = None
) -> dict[str, Callable[[], Results]]:
    """The backends that compute this problem, as calls on tensors in its layout that return out, or (dq, dk, dv), in its layout.

    Each has run once. dout, the gradient of out, is there for a backward problem: its peers keep what their own forward pass, which runs
    here, leaves them, and a call is the backward pass alone. A window has no peer, nor has a causal mask where the lengths differ:
    SDPA's backends do not agree on the diagonal there. LSE is not among what they return or have gradients of, and they know of
    no `deterministic`. Raises ArgumentError if dout is missing or of no use.
    """
    if (dout is not None) != (problem.direction == "backward"):
        raise ArgumentError(
            f"dout is {'None' if dout is None else 'given'} and direction is {problem.direction!r}; backward problems have one"
        )
    if problem.window != (None, None) or (problem.mask != "full" and problem.seqlen_q != problem.seqlen_kv):
        return {}
    scores_bytes = 4 * problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_kv
    able: dict[str, Callable[[], Results]] = {}
    for name, backend in BACKENDS.items():
        if name == "math" and scores_bytes > MATH_SCORES_BYTES:
            continue
        try:
            with warnings.catch_warnings():  # each reason why a backend is refused is a warning of its own
                warnings.simplefilter("ignore")
                attention = laid_out(functools.partial(_attention, backend, problem, scale), problem.layout)
                call = call_of(attention, query, key, value, dout)
        except RuntimeError as error:
            if "CUDA error" in str(error):  # the device failed, and every later call would
                raise
            logger.debug("no %s for %s: %s", name, problem, error)
        else:
            able[name] = call
    return able


def peer(name: str) -> Peer:
    """A backend and the version of what implements it here."""
    version = f"torch {torch.__version__}"
    if name == "cudnn":
        cudnn: Any = torch.backends.cudnn  # which carries no types
        number = cudnn.version()
        version += "" if number is None else f", cuDNN {number // 10000}.{number // 100 % 100}.{number % 100}"
    return Peer(name=name, version=version)


def laid_out(attention: Attention, layout: str, own: str = "bhsd") -> Attention:
    """Attention on tensors in this layout, from one that takes and gives tensors in its own."""
    if layout == own:
        return attention

    def transposed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)).transpose(1, 2)

    return transposed


def call_of(attention: Attention, query: Tensor, key: Tensor, value: Tensor, dout: Tensor | None) -> Callable[[], Results]:
    """A call without arguments, which has run once: attention, or where dout is given the backward pass alone of one that runs here."""
    call: Callable[[], Results] = functools.partial(attention, query, key, value)
    if dout is not None:
        query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
        with torch.enable_grad():
            out = attention(query, key, value)
        call = functools.partial(torch.autograd.grad, out, (query, key, value), dout, retain_graph=True)
    call()
    if query.is_cuda:
        torch.cuda.synchronize(query.device)
    return call


def _attention(backend: SDPBackend, problem: Problem, scale: float | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=problem.mask != "full", scale=scale, enable_gqa=problem.heads_q != problem.heads_kv
        )
