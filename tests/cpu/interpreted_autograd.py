"""Run by test_autograd.py with TRITON_INTERPRET=1: gradients of flashgen.attention with generated kernels, on the CPU."""

import math
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen import dispatch, space
from flashgen.dispatch.choice import _triton_version
from flashgen.record import Measurement, Provenance, Record, Status
from flashgen.render import render
from tests.cpu.torch_kernels import expected_gradients

torch.manual_seed(0)
torch.set_num_threads(1)


def inputs(
    b: int, hq: int, hkv: int, sq: int, sk: int, d: int, dv: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    shapes = [(b, hq, sq, d), (b, hkv, sk, d), (b, hkv, sk, dv or d)]
    return tuple(torch.randn(*shape, dtype=dtype).requires_grad_() for shape in shapes)


def compare(
    query: Tensor, key: Tensor, value: Tensor, *, layout: str = "bhsd", with_lse: bool = False, dout: Tensor | None = None, **keywords: Any
) -> list[Tensor]:
    """The gradients, which are right."""
    given = [each.transpose(1, 2) for each in (query, key, value)] if layout == "bshd" else [query, key, value]
    out, lse = flashgen.attention(*given, layout=layout, return_lse=True, **keywords)
    if layout == "bshd":
        out = out.transpose(1, 2)
    dout = torch.randn_like(out) if dout is None else dout.expand(out.shape)
    dlse = torch.randn_like(lse) if with_lse else None
    grads = torch.autograd.grad([out, lse] if with_lse else [out], (query, key, value), [dout, dlse] if with_lse else [dout])
    right = expected_gradients(*(each.detach() for each in (query, key, value)), dout, dlse, **keywords)
    tolerance = 2e-5 if query.dtype == torch.float32 else 1e-2
    for name, grad, each in zip(("dq", "dk", "dv"), grads, right):
        assert grad.dtype == query.dtype and bool(grad.isfinite().all())
        torch.testing.assert_close(grad.double(), each, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}")
    return list(grads)


# Masks, lengths, layouts, grouped heads (G04), with and without a gradient of the LSE (G05).
for place, (causal, window) in enumerate(
    [(False, None), (True, None), ("top_left", None), (True, (5, None)), (False, (3, 4)), ("top_left", (9, 0))]
):
    for sq, sk in [(40, 70), (70, 40)]:
        compare(*inputs(1, 2, 1, sq, sk, 16), causal=causal, window=window, with_lse=bool(place % 2))
compare(*inputs(2, 6, 2, 33, 17, 16), layout="bshd", causal=True, with_lse=True)
compare(*inputs(1, 12, 3, 20, 24, 16, 32), causal=True)

# fp16; scales of any sign; tiny lengths (G01); head dims that are padded, and unequal.
compare(*inputs(1, 2, 1, 50, 70, 32, dtype=torch.float16), causal=True, with_lse=True)
for scale in (0.0, -0.5, 1.0):
    compare(*inputs(1, 1, 1, 20, 20, 16), scale=scale)
for sq, sk, d in [(1, 1, 16), (1, 15, 16), (15, 1, 16), (2, 5, 8), (5, 2, 16)]:
    compare(*inputs(1, 1, 1, sq, sk, d), causal=True, with_lse=True)
for d, dv in [(40, 40), (8, 96), (96, 80)]:
    compare(*inputs(1, 1, 1, 20, 36, d, dv), causal=True)
compare(*inputs(1, 1, 1, 5, 0, 16))
compare(*inputs(1, 1, 1, 0, 5, 16))

# Upstream gradients of any strides (G02), columns and rows of NaN beside the inputs, inputs that are copied (G03).
query, key, value = inputs(1, 2, 2, 20, 36, 32)
for dout in [
    torch.ones(()),
    torch.randn(32),
    torch.randn(1, 20, 2, 32).transpose(1, 2),
    torch.randn(1, 2, 32, 20).mT,
    torch.full((1, 2, 20, 48), math.nan)[..., :32].fill_(0.5),
]:
    compare(query, key, value, dout=dout, causal=True)
poisoned = [torch.full((1, 2, 64, 48), math.nan) for _ in range(2)]
for buffer, good in zip(poisoned, (key, value)):
    buffer[:, :, :36, :32] = good.detach()
compare(query, *(buffer[:, :, :36, :32].requires_grad_() for buffer in poisoned), causal=True)
compare(*(each.detach().mT.contiguous().mT.requires_grad_() for each in (query, key, value)), causal=True)

# Only what is needed (G08), from memory that is not zero.
right = compare(query, key, value, dout=torch.ones(()))
for place in range(3):
    given = [each.detach().clone().requires_grad_(place == which) for which, each in enumerate((query, key, value))]
    flashgen.attention(*given).sum().backward()
    assert [each.grad is not None for each in given] == [place == which for which in range(3)]
    assert torch.equal(given[place].grad, right[place]), "and the same bits"

# The whole space: a winner of every structure is used as it is stored.
query, key, value = inputs(1, 2, 1, 50, 70, 16)
out = flashgen.attention(query, key, value, window=(30, 12))
forward = dispatch.explain(query, key, value, window=(30, 12))
(plan,) = [plan for plan in dispatch._plans.values() if plan.problem == forward.problem]
problems = []
choose = plan.choose
object.__setattr__(plan, "choose", lambda problem, *rest: (problems.append(problem), choose(problem, *rest))[1])
right = torch.autograd.grad(out.sum(), (query, key, value))
(problem,) = problems
database = flashgen.Database.open()
by_variant = {}
for candidate in space.candidates(problem, forward.device):
    by_variant.setdefault((candidate.variant, candidate.config.block_m == candidate.config.block_n), candidate)
assert len(by_variant) >= 2
for place, candidate in enumerate(by_variant.values()):
    database.add(
        Record(
            problem=problem,
            device=forward.device,
            candidate=candidate,
            measurement=Measurement(status=Status.OK, times_us=(1.0,), median_us=100.0 / 2**place),
            provenance=Provenance(flashgen="0", torch="2", triton=_triton_version(), cuda="", driver="", gpu="", utc="2026-01-01T00:00:00"),
            source_sha256=render(candidate.variant).sha256,
        )
    )
    dispatch.reset()
    gradients = dispatch.explain(query, key, value, window=(30, 12)).gradients
    assert gradients is not None and (gradients.how, gradients.candidate) == ("exact", candidate), gradients
    compare(query, key, value, window=(30, 12), dout=torch.ones(()))

# Training: a layer learns as with PyTorch's own attention.
torch.manual_seed(1)
layers = [torch.nn.Linear(16, 48) for _ in range(2)]
layers[1].load_state_dict(layers[0].state_dict())
x = torch.randn(2, 24, 16)
for layer, attend in zip(
    layers,
    (
        lambda q, k, v: flashgen.attention(q, k, v, causal=True),
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    ),
):
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(3):
        q, k, v = layer(x).unflatten(-1, (3, 1, 16)).permute(2, 0, 3, 1, 4)
        loss = (attend(q, k, v)[:, 0] - x).pow(2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
torch.testing.assert_close(layers[0].weight, layers[1].weight, atol=1e-5, rtol=1e-4)

print("all right")
