"""Run by test_dispatch.py with TRITON_INTERPRET=1: flashgen.attention with generated kernels, on the CPU."""

import math
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen import dispatch, space
from flashgen.dispatch.choice import _triton_version
from flashgen.record import Measurement, Provenance, Record, Status
from flashgen.render import render

torch.manual_seed(0)
torch.set_num_threads(1)


def oracle(
    query: Tensor, key: Tensor, value: Tensor, *, causal: Any = False, window: Any = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64, from an explicit mask; bhsd."""
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    rows, keys = query.shape[2], key.shape[2]
    i, j = torch.arange(rows)[:, None], torch.arange(keys)[None, :]
    diagonal = i if causal == "top_left" else i + keys - rows
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        visible &= j <= diagonal
    left, right = window or (None, None)
    if left is not None:
        visible &= j >= diagonal - left
    if right is not None:
        visible &= j <= diagonal + right
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse[..., None].clamp(min=-1e300)) @ value, lse


def compare(query: Tensor, key: Tensor, value: Tensor, layout: str = "bhsd", **keywords: Any) -> Tensor:
    right, right_lse = oracle(query, key, value, **keywords)
    if layout == "bshd":
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    out, lse = flashgen.attention(query, key, value, layout=layout, return_lse=True, **keywords)
    assert out.is_contiguous() and out.dtype == query.dtype
    if layout == "bshd":
        out = out.transpose(1, 2)
    tolerance = 1e-5 if query.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out.double(), right, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-4, rtol=1e-4)
    return out


def inputs(
    b: int, hq: int, hkv: int, sq: int, sk: int, d: int, dv: int | None = None, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, ...]:
    return torch.randn(b, hq, sq, d, dtype=dtype), torch.randn(b, hkv, sk, d, dtype=dtype), torch.randn(b, hkv, sk, dv or d, dtype=dtype)


# Masks, lengths, layouts, grouped heads (N03, N27).
for causal, window in [(False, None), (True, None), ("top_left", None), (True, (5, None)), (False, (3, 4)), ("top_left", (9, 0))]:
    for sq, sk in [(40, 70), (70, 40)]:
        compare(*inputs(1, 2, 1, sq, sk, 32), causal=causal, window=window)
compare(*inputs(2, 2, 1, 33, 17, 16), layout="bshd", causal=True)

# Tiny lengths (N23), odd and unequal head dims (N24, N25), in fp32 with IEEE precision (N29).
for sq, sk, d in [(1, 1, 8), (1, 15, 16), (15, 1, 64), (2, 5, 8), (5, 2, 16)]:
    compare(*inputs(1, 1, 1, sq, sk, d), causal=True)
for d, dv in [(40, 40), (8, 96), (96, 80), (64, 128)]:
    compare(*inputs(1, 1, 1, 20, 36, d, dv, torch.float32), causal=True)

# Tails of NaN (N22), columns of NaN (N24), expanded and transposed tensors, odd addresses (T08).
query, key, value = inputs(1, 2, 2, 20, 64, 32)
poisoned = [torch.full((1, 2, 64, 48), math.nan, dtype=torch.float16) for _ in range(2)]
for buffer, good in zip(poisoned, (key, value)):
    buffer[:, :, :33, :32] = good[:, :, :33]
out = compare(query, key[:, :, :33], value[:, :, :33])
views = [buffer[:, :, :33, :32] for buffer in poisoned]
assert torch.equal(out, flashgen.attention(query, *views))
compare(query, key[:, :1].expand(1, 2, 64, 32), value)
compare(query.transpose(-1, -2).contiguous().transpose(-1, -2), key, value)
odd = torch.empty(key.numel() + 1, dtype=torch.float16)[1:].view(key.shape).copy_(key)
compare(query, odd, value)

# Scales: zero gives the mean, and the natural logarithm of the number of keys (N30); negative ones; an empty K.
out, lse = flashgen.attention(query, key, value, scale=0.0, return_lse=True)
torch.testing.assert_close(out.double(), value.double().mean(2, keepdim=True).expand_as(out), atol=2e-3, rtol=2e-3)
torch.testing.assert_close(lse, torch.full_like(lse, math.log(64)))
for scale in (-1.0, -0.1, 2.0):
    compare(query, key, value, scale=scale)
compare(*inputs(1, 2, 1, 5, 0, 16))

# Winners of every structure are used as they are stored.
query, key, value = inputs(1, 2, 1, 50, 70, 32)
problem = dispatch.explain(query, key, value, causal=True, return_lse=True).problem
device = dispatch.explain(query, key, value).device
legal = [candidate for candidate in space.candidates(problem, device) if candidate.variant.backend == "triton"]
database = flashgen.Database.open()
by_variant = {}
for candidate in legal:
    by_variant.setdefault((candidate.variant, candidate.config.persistent), candidate)
assert len(by_variant) >= 4
for place, candidate in enumerate(by_variant.values()):
    database.add(
        Record(
            problem=problem,
            device=device,
            candidate=candidate,
            measurement=Measurement(status=Status.OK, times_us=(1.0,), median_us=100.0 / 2**place),
            provenance=Provenance(flashgen="0", torch="2", triton=_triton_version(), cuda="", driver="", gpu="", utc="2026-01-01T00:00:00"),
            source_sha256=render(candidate.variant).sha256,
        )
    )
    dispatch.reset()
    chosen = dispatch.explain(query, key, value, causal=True, return_lse=True)
    assert (chosen.how, chosen.candidate) == ("exact", candidate), chosen
    compare(query, key, value, causal=True)

print("all right")
