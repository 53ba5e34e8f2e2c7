"""Gradients through torch.autograd.

Kernels are replaced by a stand-in that computes in PyTorch, so that what autograd is told can be seen without compiling.
test_in_the_interpreter runs real ones.
"""

import copy
import dataclasses
import gc
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen import dispatch, space
from flashgen.dispatch import gradients as gradients_module
from flashgen.dispatch import plan
from flashgen.errors import ArgumentTypeError, BuildError, LaunchError, UnsupportedError
from flashgen.record import Measurement, Provenance, Record, Status
from flashgen.render import render
from tests.cpu.torch_kernels import Kernels, close, expected, expected_gradients, fresh_planner, run_interpreted, tensors, torch_kernels


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> plan.Planner:
    """A planner that has seen nothing."""
    return fresh_planner(monkeypatch)


@pytest.fixture
def kernels(fresh: plan.Planner, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Kernels that compute in PyTorch."""
    return torch_kernels(fresh, monkeypatch)


def leaves(*needs: bool, **shape: Any) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value in fp32, all of which need gradients unless told otherwise."""
    made = tensors(**({"dtype": torch.float32} | shape))
    query, key, value = (tensor.requires_grad_(need) for tensor, need in zip(made, needs or (True,) * 3))
    return query, key, value


def upstream(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)


def all_close(gradients: Any, right: Any, tolerance: float = 1e-4) -> None:
    for gradient, each in zip(gradients, right, strict=True):
        torch.testing.assert_close(gradient.double(), each, atol=tolerance, rtol=tolerance)


def by_torch(query: Tensor, key: Tensor, value: Tensor, loss: Any, **keywords: Any) -> tuple[Tensor, ...]:
    """Gradients of loss(out, lse) in float64, by torch's own rules."""
    given = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    return torch.autograd.grad(loss(*expected(*given, **keywords)), given, materialize_grads=True)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("mask", [{}, dict(causal=True), dict(causal="top_left"), dict(window=(1, 2)), dict(scale=-0.3), dict(scale=0.0)])
def test_gradients(kernels: Kernels, layout: str, mask: dict[str, Any]) -> None:
    """G04: of grouped heads, different head dims and lengths, in both layouts, as torch computes them."""
    query, key, value = leaves(head_dim_v=24)
    given = (query, key, value) if layout == "bhsd" else tuple(each.transpose(1, 2) for each in (query, key, value))
    out = flashgen.attention(*given, layout=layout, **mask)
    assert out.is_contiguous() and out.requires_grad and "FlashgenAttention" in str(out.grad_fn)
    if layout == "bshd":
        out = out.transpose(1, 2)
    close(out.detach(), expected(query.detach(), key.detach(), value.detach(), **mask)[0])
    dout = upstream(out)
    right = by_torch(query, key, value, lambda out, lse: (out * dout).sum(), **mask)
    out.backward(dout)
    all_close([query.grad, key.grad, value.grad], right)
    all_close(right, expected_gradients(query.detach(), key.detach(), value.detach(), dout, **mask))
    ((problem, _),) = kernels.backward_launches
    assert (problem.direction, problem.return_lse, problem.layout) == ("backward", False, layout)
    assert kernels.launches[0][0] == dataclasses.replace(problem, direction="forward", return_lse=True), "the forward kernel stored the LSE"


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, lse: lse.sum(),
        lambda out, lse: out.sum() + lse.pow(2).sum(),
        lambda out, lse: (out * lse[..., None]).pow(2).sum(),
        lambda out, lse: (torch.linspace(0, 1, 7)[2:].to(lse.dtype) * lse).sum(),
    ],
)
def test_gradients_through_the_lse(kernels: Kernels, loss: Any) -> None:
    """G05: losses may use out, the LSE, or both."""
    query, key, value = leaves()
    out, lse = flashgen.attention(query, key, value, causal=True, return_lse=True)
    assert lse.requires_grad and lse.dtype == torch.float32
    right = by_torch(query, key, value, loss, causal=True)
    all_close(torch.autograd.grad(loss(out, lse), (query, key, value)), right, 1e-3)
    assert kernels.backward_launches[-1][0].return_lse


def test_an_lse_that_is_not_used_costs_nothing(kernels: Kernels) -> None:
    query, key, value = leaves()
    out, lse = flashgen.attention(query, key, value, return_lse=True)
    out.sum().backward()
    lse.detach().sum()
    assert [problem.return_lse for problem, _ in kernels.backward_launches] == [False]


def test_by_hand(kernels: Kernels) -> None:
    """G05: with q = 0 the LSE's gradient is scale times the mean key. G01: one query, one key: dv = dout and no more."""
    query, key, value = torch.zeros(1, 1, 4, 8), torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)
    for each in (query, key, value):
        each.requires_grad_()
    flashgen.attention(query, key, value, scale=0.5, return_lse=True)[1].sum().backward()
    torch.testing.assert_close(query.grad, 0.5 * key.detach().mean(2, keepdim=True).expand(1, 1, 4, 8))
    assert (key.grad == 0).all() and (value.grad == 0).all()
    query, key, value = leaves(batch=1, heads_q=1, heads_kv=1, seqlen_q=1, seqlen_kv=1)
    out = flashgen.attention(query, key, value)
    out.backward(dout := upstream(out))
    all_close([query.grad, key.grad, value.grad], [torch.zeros(1, 1, 1, 16).double()] * 2 + [dout.double()])


def test_rows_without_keys(kernels: Kernels) -> None:
    """They have no gradient, also where the LSE, -inf there, is asked for one."""
    query, key, value = leaves(batch=1, heads_q=2, seqlen_q=5, seqlen_kv=2)
    out, lse = flashgen.attention(query, key, value, causal=True, return_lse=True)
    dout, dlse = upstream(out), upstream(lse)
    dq, dk, dv = torch.autograd.grad([out, lse], (query, key, value), [dout, dlse])
    assert (dq[:, :, :3] == 0).all()
    all_close((dq, dk, dv), expected_gradients(query.detach(), key.detach(), value.detach(), dout, dlse, causal=True))


@pytest.mark.parametrize("shape", [dict(batch=0), dict(seqlen_q=0), dict(seqlen_kv=0), dict(seqlen_q=0, seqlen_kv=0)])
def test_nothing_to_differentiate(kernels: Kernels, shape: dict[str, int]) -> None:
    """G14: zeros, and no kernel."""
    query, key, value = leaves(**shape)
    out, lse = flashgen.attention(query, key, value, causal=True, return_lse=True)
    (out.sum() + lse.clamp(min=0).sum()).backward()
    for tensor in (query, key, value):
        assert tensor.grad.shape == tensor.shape and (tensor.grad == 0).all()
    assert not kernels.builds


def test_one_tensor_three_times(kernels: Kernels) -> None:
    x, _, _ = leaves(heads_kv=4, seqlen_kv=5)
    flashgen.attention(x, x, x, causal=True).backward(dout := upstream(x.detach()))
    all_close([x.grad], [sum(by_torch(x, x, x, lambda out, lse: (out * dout).sum(), causal=True))])


# ---- layouts and dtypes ----------------------------------------------------------------------------------------------


def gradients_of(dout: Tensor, **keywords: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(what flashgen says, what torch says) for one upstream gradient."""
    query, key, value = leaves(seqlen_q=4, seqlen_kv=6)
    out = flashgen.attention(query, key, value, **keywords)
    gradients = torch.autograd.grad(out, (query, key, value), dout.expand(out.shape))
    return gradients, by_torch(query, key, value, lambda out, lse: (out * dout).sum(), **keywords)


@pytest.mark.parametrize(
    ("dout", "copied"),
    [
        (torch.ones(()), True),
        (torch.randn(16), True),
        (torch.randn(2, 1, 4, 1), True),
        (torch.randn(2, 4, 1, 16), True),
        (torch.randn(2, 4, 4, 16).transpose(1, 2), False),
        (torch.randn(2, 4, 16, 4).transpose(2, 3), True),
        (torch.randn(2, 9, 4, 20)[:, 2:6, :, 3:19], False),
        (torch.randn(2, 4, 4, 32)[..., ::2], True),
    ],
)
def test_upstream_gradients_of_any_strides(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, dout: Tensor, copied: bool) -> None:
    """G02: nothing is copied where the last dimension is contiguous and none is expanded. TMA reads no expanded ones."""
    copies: list[bool] = []
    dense = gradients_module._dense

    def seen(tensor: Tensor) -> Tensor:
        result = dense(tensor)
        copies.append(result.data_ptr() != tensor.data_ptr())
        assert 0 not in result.stride()
        return result

    monkeypatch.setattr(gradients_module, "_dense", seen)
    all_close(*gradients_of(dout, causal=True))
    all_close(*gradients_of(dout, causal=True))
    assert copies == [copied] * 2
    assert len(kernels.launches) == 2 and len(dispatch._plans) == 1


def test_alignment_of_what_comes_back(kernels: Kernels) -> None:
    """T08: an upstream gradient of the LSE, or of out, that begins anywhere is another backward problem."""
    query, key, value = leaves(batch=1, seqlen_q=5)
    out, lse = flashgen.attention(query, key, value, return_lse=True)
    off = lambda tensor, by: torch.zeros(tensor.numel() + 8)[by : by + tensor.numel()].view(tensor.shape)  # noqa: E731
    for by_out, by_lse in [(0, 0), (1, 0), (0, 1), (4, 0)]:
        torch.autograd.grad([out, lse], query, [off(out, by_out), off(lse, by_lse)], retain_graph=True)
        assert kernels.backward_launches[-1][0].aligned_16 == ((by_out, by_lse) in [(0, 0), (4, 0)])


def test_inputs_of_any_strides(kernels: Kernels) -> None:
    """G03: gradients of inputs that had to be copied, were packed, or expanded."""
    query, key, value = (each.detach() for each in leaves(heads_kv=4, seqlen_q=6, seqlen_kv=6))
    right = by_torch(query, key, value, lambda out, lse: out.square().sum())
    for turned in range(8):
        given = [
            (each.mT.contiguous().mT if turned >> place & 1 else each.clone()).requires_grad_()
            for place, each in enumerate((query, key, value))
        ]
        flashgen.attention(*given).square().sum().backward()
        all_close([each.grad for each in given], right)
        assert all(each.grad.stride() == each.stride() for each in given)
    packed = torch.stack([query, key, value], 3).requires_grad_()
    flashgen.attention(*packed.unbind(3)).square().sum().backward()
    all_close([packed.grad], [torch.stack(right, 3)])
    padded = [torch.cat([each, each], -1).requires_grad_() for each in (query, key, value)]
    flashgen.attention(*(each[..., :16] for each in padded)).square().sum().backward()
    all_close([each.grad[..., :16] for each in padded], right)
    one = key[:, :1].clone().requires_grad_()
    flashgen.attention(query, one.expand_as(key), value).square().sum().backward()
    shared = by_torch(query, key[:, :1].expand_as(key), value, lambda out, lse: out.square().sum())[1]
    all_close([one.grad], [shared.sum(1, keepdim=True)])


def test_gradients_have_the_strides_of_their_tensors(kernels: Kernels) -> None:
    """So .grad is the buffer that the kernel wrote, and views like (batch, seqlen, heads, ...) get gradients like them."""
    query, key, value = leaves()
    by_seqlen = query.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    dq, dk, _ = torch.autograd.grad(flashgen.attention(by_seqlen, key, value).sum(), (by_seqlen, key, value))
    assert dq.stride() == by_seqlen.stride() and dk.stride() == key.stride()


def test_autocast(kernels: Kernels) -> None:
    """I10: gradients arrive in the dtypes of the inputs, also where those are mixed."""
    query, key, value = leaves()
    value = value.detach().half().requires_grad_()
    for _ in range(2):
        with torch.autocast("cpu", torch.float16):
            out = flashgen.attention(query, key, value)
        assert out.dtype == torch.float16
        dout = upstream(out)
        gradients = torch.autograd.grad(out, (query, key, value), dout)
        assert [each.dtype for each in gradients] == [torch.float32, torch.float32, torch.float16]
        all_close(gradients, by_torch(query, key, value, lambda out, lse, dout=dout: (out * dout).sum()), 1e-2)
    assert len(dispatch._plans) == 1 and kernels.backward_launches[0][0].dtype == "float16"


# ---- what is computed, and what is not ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (True, False, True), (False, True, True)]
)
def test_only_what_is_needed(kernels: Kernels, needs: tuple[bool, ...]) -> None:
    """G08: no kernel for inputs that need no gradient; those of keys and values come from one."""
    query, key, value = leaves(*needs)
    out = flashgen.attention(query, key, value)
    out.backward(dout := upstream(out))
    right = by_torch(query, key, value, lambda out, lse: (out * dout).sum())
    for tensor, need, each in zip((query, key, value), needs, right):
        assert (tensor.grad is not None) == need
        if need:
            all_close([tensor.grad], [each])
    both = needs[1] or needs[2]
    assert kernels.backward_launches == [(kernels.backward_launches[0][0], (needs[0], both, both))]


def test_without_gradients_nothing_is_new(kernels: Kernels) -> None:
    """no_grad, inference_mode and detached inputs run the kernel without LSE and keep nothing; modes do not share plans."""
    query, key, value = leaves()
    for _ in range(2):
        flashgen.attention(query, key, value)
        assert kernels.launches[-1][0].return_lse
        with torch.no_grad():
            out = flashgen.attention(query, key, value)
        assert not out.requires_grad and not kernels.launches[-1][0].return_lse
        with torch.inference_mode():
            assert flashgen.attention(query, key, value).is_inference()
        out = flashgen.attention(query.detach(), key.detach(), value.detach())
        assert not out.requires_grad and not kernels.launches[-1][0].return_lse
    assert sorted(type(each).__name__ for each in dispatch._plans.values()) == ["DifferentiablePlan", "Plan"]


def test_the_second_backward_pass_is_a_look_up_and_a_launch(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """T18: nothing is chosen or built again."""
    query, key, value = leaves()
    dout = torch.randn(2, 4, 5, 16)
    flashgen.attention(query, key, value).backward(dout)
    first = query.grad.clone()
    for module, name in [(dispatch, "checked_call"), (plan, "choices"), (plan, "build"), (plan, "prepare_backward")]:
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("done again"))
    flashgen.attention(query, key, value).backward(dout)
    assert torch.equal(query.grad, 2 * first) and len(kernels.backward_launches) == 2


def test_backward_plans_are_bounded(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients_module, "MOST_LAUNCHES", 2)
    query, key, value = leaves()
    out = flashgen.attention(query, key, value)
    for width in (16, 17, 18, 19, 16):
        torch.autograd.grad(out, query, torch.randn(2, 4, 5, width)[..., :16], retain_graph=True)
    (only,) = dispatch._plans.values()
    assert len(only.launches) == 2 and len(kernels.backward_launches) == 5


def test_a_backward_pass_in_another_thread(kernels: Kernels) -> None:
    """First calls of both directions in several threads."""
    query, key, value = leaves()
    right = by_torch(query, key, value, lambda out, lse: out.sum())
    results: list[Any] = []

    def work() -> None:
        results.append(torch.autograd.grad(flashgen.attention(query, key, value).sum(), (query, key, value)))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    for each in results:
        all_close(each, right)


def test_deterministic_mode_is_told(kernels: Kernels) -> None:
    """G09: torch's switch makes the backward problem a deterministic one."""
    query, key, value = leaves()
    torch.use_deterministic_algorithms(True)
    try:
        flashgen.attention(query, key, value).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    flashgen.attention(query, key, value).sum().backward()
    assert [problem.deterministic for problem, _ in kernels.backward_launches] == [True, False]


def test_sums_in_float16_are_allowed_by_the_call(kernels: Kernels) -> None:
    """Where a problem can allow them: 16-bit gradients, all three, that need not be deterministic."""
    query, key, value = leaves(dtype=torch.float16)
    flashgen.attention(query, key, value, float16_dq=True).sum().backward()
    flashgen.attention(query, key, value).sum().backward()
    flashgen.attention(query, key.detach(), value.detach(), float16_dq=True).sum().backward()
    torch.use_deterministic_algorithms(True)
    try:
        flashgen.attention(query, key, value, float16_dq=True).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    wide = leaves()
    flashgen.attention(*wide, float16_dq=True).sum().backward()
    assert [problem.float16_dq for problem, _ in kernels.backward_launches] == [True, False, False, False, False]
    with pytest.raises(flashgen.ArgumentError, match="float16_dq is 2; it must be True or False"):
        flashgen.attention(query, key, value, float16_dq=2)


# ---- autograd's own rules ----------------------------------------------------------------------------------------------


def test_twice_through_one_graph(kernels: Kernels) -> None:
    query, key, value = leaves()
    out = flashgen.attention(query, key, value)
    out.sum().backward(retain_graph=True)
    first = query.grad.clone()
    out.sum().backward()
    torch.testing.assert_close(query.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_inputs_and_outputs_changed_in_place(kernels: Kernels) -> None:
    """What is kept must stay as it is; PyTorch says so."""
    for which in range(4):
        query, key, value = (each * 1.0 for each in leaves())
        out = flashgen.attention(query, key, value)
        loss = out.sum()
        with torch.no_grad():
            (query, key, value, out)[which].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_is_kept(kernels: Kernels) -> None:
    """Five tensors, and nothing of them when the graph is gone."""
    query, key, value = leaves()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = flashgen.attention(query, key, value)
    assert [tuple(each.shape) for each in kept] == [query.shape, key.shape, value.shape, out.shape, (2, 4, 5)]
    out = flashgen.attention(query, key, value)
    lse = out.grad_fn.saved_tensors[-1]
    gone = [weakref.ref(out), weakref.ref(lse)]
    del out, lse
    gc.collect()
    assert all(each() is None for each in gone)


def test_kept_tensors_may_come_back_with_other_strides(kernels: Kernels) -> None:
    """As from torch.autograd.graph.save_on_cpu, which forgets strides."""
    query, key, value = (each.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for each in leaves())
    right = by_torch(query, key, value, lambda out, lse: out.sum())
    away = lambda tensor: tensor.detach().clone(memory_format=torch.contiguous_format)  # noqa: E731
    for hooks in [
        (away, lambda tensor: tensor),
        (lambda tensor: tensor, lambda tensor: tensor),
        (away, lambda tensor: tensor.mT.contiguous().mT),
    ]:
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            out = flashgen.attention(query, key, value)
        all_close(torch.autograd.grad(out.sum(), (query, key, value)), right)


def test_checkpointing(kernels: Kernels) -> None:
    """The forward pass runs again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    query, key, value = leaves()
    right = by_torch(query, key, value, lambda out, lse: out.sum(), causal=True)
    for reentrant in (False, True):
        out = checkpoint(lambda *given: flashgen.attention(*given, causal=True), query, key, value, use_reentrant=reentrant)
        all_close(torch.autograd.grad(out.sum(), (query, key, value)) if not reentrant else _grads(out.sum(), query, key, value), right)


def _grads(loss: Tensor, *given: Tensor) -> list[Tensor]:
    loss.backward()
    return [each.grad for each in given]


def test_gradients_of_gradients_are_refused(kernels: Kernels) -> None:
    """G13: in one sentence that names flashgen, for every way to ask; asking for a graph alone is no error."""
    query, key, value = leaves()
    weight = torch.ones((), requires_grad=True)
    out = flashgen.attention(query, key, value)
    right = by_torch(query, key, value, lambda out, lse: out.sum())
    gradients = torch.autograd.grad(out.sum(), (query, key, value), create_graph=True)
    all_close([each.detach() for each in gradients], right)
    with pytest.raises(UnsupportedError, match=r"flashgen\.attention is differentiable once"):
        gradients[0].pow(2).sum().backward()
    for wanted in (query, key, value, weight):
        out = flashgen.attention(query, key, value)
        dq, dk, _ = torch.autograd.grad((weight * out).sum(), (query, key, value), create_graph=True)
        with pytest.raises(UnsupportedError, match="differentiable once"):
            torch.autograd.grad((dq.sum() + dk.sum()), wanted)
    frozen = flashgen.attention(query, key.detach(), value.detach())
    (dq,) = torch.autograd.grad(frozen.sum(), query, create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiable once"):
        torch.autograd.grad(dq.sum(), query)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch.autograd.forward_ad's own
def test_other_derivatives_are_refused(kernels: Kernels) -> None:
    """I11, G13: torch.func, batched gradients, forward mode."""
    query, key, value = leaves()
    with pytest.raises(UnsupportedError, match="inside torch.func"):
        torch.func.grad(lambda each: flashgen.attention(each, key, value).sum())(query)
    with pytest.raises(UnsupportedError, match="inside torch.func"):
        torch.func.grad(lambda each: (flashgen.attention(query, key, value) * each).sum())(torch.ones(()))
    with pytest.raises(UnsupportedError, match="inside torch.func"):
        torch.func.vmap(torch.func.grad(lambda each: flashgen.attention(each, key, value).sum()))(query[None])
    out = flashgen.attention(query, key, value)
    with pytest.raises(UnsupportedError, match="is_grads_batched"):
        torch.autograd.grad(out, query, torch.ones(3, *out.shape), is_grads_batched=True)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(UnsupportedError, match="query is a dual tensor"):
            flashgen.attention(dual, key, value)
        flashgen.attention(query, key, value).sum().backward()
    all_close([query.grad], by_torch(query, key, value, lambda out, lse: out.sum())[:1])


def test_no_gradient_of_the_scale(kernels: Kernels) -> None:
    scale = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(ArgumentTypeError, match="scale is a tensor that requires grad.*multiply query by it"):
        flashgen.attention(*leaves(), scale=scale)
    query, key, value = leaves()
    flashgen.attention(query * scale, key, value, scale=1.0).sum().backward()
    assert scale.grad.isfinite()


def test_bad_arguments_are_refused_as_without_gradients(kernels: Kernels) -> None:
    query, key, value = leaves()
    for keywords, words in [(dict(return_lse="yes"), "return_lse"), (dict(window=(-3, 0)), "window"), (dict(layout="sbhd"), "layout")]:
        with pytest.raises(ValueError, match=words):
            flashgen.attention(query, key, value, **keywords)
    with pytest.raises(UnsupportedError, match="head_dim"):
        flashgen.attention(*leaves(head_dim=512))


def test_a_module(kernels: Kernels) -> None:
    """I18: what a module keeps can be copied; parameters learn."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).unbind(2)
            return flashgen.attention(q, k, v, causal=True, layout="bshd").flatten(-2)

    torch.manual_seed(0)
    layer = Layer()
    x = torch.randn(2, 9, 32)
    optimiser = torch.optim.SGD(layer.parameters(), lr=1.0)
    losses = []
    for _ in range(5):
        loss = (layer(x) - x).pow(2).mean()
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_breaks_cleanly(kernels: Kernels) -> None:
    query, key, value = leaves()

    def model(query: Tensor) -> Tensor:
        return flashgen.attention(query * 2, key, value, causal=True) + 1

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    (dq,) = torch.autograd.grad(compiled(query).sum(), query)
    (right,) = torch.autograd.grad(model(query).sum(), query)
    torch.testing.assert_close(dq, right)
    torch._dynamo.reset()


# ---- choice ------------------------------------------------------------------------------------------------------------


def backward_winner(problem: Any, device: Any, candidate: Any, **changes: str) -> Record:
    return Record(
        problem=problem,
        device=device,
        candidate=candidate,
        measurement=Measurement(status=Status.OK, times_us=(9.0,), median_us=9.0),
        provenance=Provenance(
            flashgen="0", torch="2", triton=dispatch.choice._triton_version(), cuda="", driver="", gpu="", utc="2026-01-01T00:00:00"
        ),
        source_sha256=changes.get("source_sha256") or render(candidate.variant).sha256,
    )


def asked(kernels: Kernels) -> Any:
    """The backward problem of `leaves`, and its device."""
    query, key, value = leaves()
    flashgen.attention(query, key, value, causal=True).sum().backward()
    return kernels.backward_launches[-1][0], kernels.builds[-1][2]


def test_winners_of_backward_problems(kernels: Kernels, fresh: plan.Planner) -> None:
    """By the rules of forward ones: the exact one, the nearest, or the model's favourite. None is of the other direction."""
    problem, device = asked(kernels)
    favourite = dispatch.choose(problem, device, ())
    assert (favourite.how, favourite.candidate) == ("predicted", kernels.builds[-1][0])
    other = next(each for each in space.candidates(problem, device) if each != favourite.candidate)
    row = backward_winner(problem, device, other)
    for winners, how, right in [
        ((row,), "exact", other),
        ((backward_winner(dataclasses.replace(problem, batch=64), device, other),), "nearest", other),
        ((backward_winner(problem, device, other, source_sha256="0" * 64),), "nearest", other),
        (
            (backward_winner(dataclasses.replace(problem, head_dim_qk=256, head_dim_v=256), device, other),),
            "predicted",
            favourite.candidate,
        ),
    ]:
        dispatch.reset()
        fresh._winners = winners
        choice = dispatch.choose(problem, device, winners)
        assert (choice.how, choice.candidate) == (how, right)
        before = len(kernels.backward_launches)
        query, key, value = leaves()
        flashgen.attention(query, key, value, causal=True).sum().backward()
        assert len(kernels.backward_launches) == before + 1
        explanation = flashgen.explain(problem, device=device, database=types.SimpleNamespace(winners=lambda winners=winners: winners))
        assert (explanation.how, explanation.candidate, explanation.gradients) == (how, right, None)
        assert explanation.predicted_us > explanation.bound_us > 0 and "backward" in str(explanation)
        if how == "nearest":
            assert explanation.expected_us > 0
    forward = dataclasses.replace(problem, direction="forward", return_lse=True)
    assert dispatch.choose(forward, device, [row]).candidate.variant.family == "forward", "no winner of the other direction"


def test_deterministic_problems_get_no_other_kernels(kernels: Kernels) -> None:
    """G09: a winner that adds to dq in any order is passed over, and said to be; one of the same problem that does not is used."""
    problem, device = asked(kernels)
    wanted = dataclasses.replace(problem, deterministic=True)
    plain = next(each for each in space.candidates(problem, device) if not each.variant.fused)
    fused = dataclasses.replace(plain, variant=dataclasses.replace(plain.variant, fused=True))
    rows = [backward_winner(where, device, fused) for where in (problem, wanted, dataclasses.replace(problem, batch=64))]
    for winners in (rows, [*rows, backward_winner(dataclasses.replace(problem, batch=128), device, plain)]):
        each = list(dispatch.choices(wanted, device, winners))
        assert each and not any(choice.candidate.variant.fused for choice in each)
        assert each[0].how == ("predicted" if winners is rows else "nearest")
        assert any("the problem is deterministic" in sentence for sentence in each[0].because)
    choice = dispatch.choose(wanted, device, [backward_winner(problem, device, plain)])
    assert (choice.how, choice.candidate, choice.distance) == ("nearest", plain, 0.05)
    forward = dataclasses.replace(problem, direction="forward", return_lse=True)
    explanation = dispatch.explanation.explained(forward, device, rows, deterministic=True)
    assert not explanation.gradients.candidate.variant.fused


def test_a_problem_that_allows_float16_gets_what_is_known_without(kernels: Kernels) -> None:
    """Until it has a winner of its own, which no problem gets that does not allow it."""
    problem, device = asked(kernels)
    problem = dataclasses.replace(problem, dtype="bfloat16", head_dim_qk=64, head_dim_v=64, seqlen_q=1024, seqlen_kv=1024, aligned_16=True)
    allowing = dataclasses.replace(problem, float16_dq=True)
    summed = next(each for each in space.candidates(allowing, device) if each.variant.float16_dq)
    plain = dataclasses.replace(summed, variant=dataclasses.replace(summed.variant, float16_dq=False))
    row, own = backward_winner(problem, device, plain), backward_winner(allowing, device, summed)
    choose = lambda *rows: dispatch.choose(allowing, device, rows)  # noqa: E731
    assert (choose(row).how, choose(row).candidate, choose(row).distance) == ("nearest", plain, 0.05)
    assert (choose(row, own).how, choose(row, own).candidate) == ("exact", summed)
    other = dispatch.choose(problem, device, [own])
    assert (other.how, other.candidate) == ("nearest", plain)
    forward = dataclasses.replace(problem, direction="forward", return_lse=True)
    for flag in (False, True):
        explanation = dispatch.explanation.explained(forward, device, [own], float16_dq=flag)
        assert explanation.gradients.candidate.variant.float16_dq == flag


@pytest.mark.parametrize("error", [BuildError("ptxas: too many registers"), LaunchError("kernel image is invalid")])
def test_a_failing_choice_gives_way(kernels: Kernels, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """T23: the next choice computes the gradients, and the reason is said once."""
    problem, device = asked(kernels)
    favourite = dispatch.choose(problem, device, ()).candidate
    dispatch.reset()
    broken = lambda candidate: error if candidate == favourite else None  # noqa: E731
    if isinstance(error, BuildError):
        kernels.build_error = broken
        dispatch._planner._kernels.clear()
    else:
        kernels.launch_error = broken
    query, key, value = leaves()
    dout = torch.randn(2, 4, 5, 16)
    right = by_torch(query, key, value, lambda out, lse: (out * dout).sum(), causal=True)
    for _ in range(2):
        all_close(torch.autograd.grad(flashgen.attention(query, key, value, causal=True), (query, key, value), dout), right)
    assert sum(str(error) in record.getMessage() for record in caplog.records) == 1
    used = kernels.builds[-1][0]
    assert used != favourite and used.variant.family == "backward"
    assert str(used) in str(flashgen.explain(query, key, value, causal=True))


def test_no_choice_runs(kernels: Kernels) -> None:
    """The error of the backward pass is flashgen's; the forward pass was fine."""
    kernels.build_error = lambda candidate: BuildError("ptxas is missing") if candidate.variant.family == "backward" else None
    query, key, value = leaves()
    out = flashgen.attention(query, key, value)
    with pytest.raises(BuildError, match="no choice runs on NVIDIA H200.*ptxas is missing"):
        out.sum().backward()
    assert "gradients" not in str(flashgen.explain(query, key, value))


def test_nothing_is_compiled_inside_a_capture(kernels: Kernels, fresh: plan.Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """I05: a first backward pass in a capture is refused before anything is chosen."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kept: Any = types.SimpleNamespace(query=types.SimpleNamespace(is_cuda=True))
    nothing: Any = None
    with pytest.raises(UnsupportedError, match="first backward pass is inside a CUDA graph capture"):
        fresh._first_backward(nothing, nothing, kept, nothing, 1.0)
    assert not kernels.builds


def test_explain_names_the_kernels_of_both_directions(kernels: Kernels) -> None:
    """Of tensors that need gradients, the forward kernel that such a call runs: the one with the LSE."""
    query, key, value = leaves()
    explanation = flashgen.explain(query, key, value, causal=True)
    assert explanation.problem.return_lse and explanation.candidate.variant.store_lse
    flashgen.attention(query, key, value, causal=True).sum().backward()
    assert kernels.backward_launches[0][0].aligned_16, "an expanded upstream gradient is read as fast as others"
    assert [each for each, _, _ in kernels.builds] == [explanation.candidate, explanation.gradients.candidate]
    (line,) = [line for line in str(explanation).splitlines() if line.startswith("gradients")]
    assert str(explanation.gradients.candidate) in line and "(predicted)" in line and "LSE" not in line
    plain = flashgen.explain(query.detach(), key.detach(), value.detach(), causal=True)
    assert not plain.problem.return_lse and "which follows a forward kernel that stores the LSE" in str(plain)
    assert plain.to_dict()["gradients"]["candidate_name"] == str(explanation.gradients.candidate)
    assert flashgen.explain(*leaves(batch=0)).to_dict()["gradients"] is None


# ---- real kernels ------------------------------------------------------------------------------------------------------


def test_in_the_interpreter(tmp_path: Path) -> None:
    """The whole way with generated kernels."""
    run_interpreted("interpreted_autograd.py", tmp_path / "new.db")
