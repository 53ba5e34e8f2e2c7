"""Gradients of flashgen.attention on a GPU: against the oracle, on streams, in graphs, and what is launched."""

import pytest
import torch

import flashgen
from flashgen import dispatch, reference, space
from flashgen.dispatch import plan
from flashgen.errors import FlashgenError

pytestmark = pytest.mark.gpu


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> list[torch.Tensor]:
    return [torch.randn(*shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]


def close(gradients, inputs, dout, dlse=None, **mask) -> None:
    """No gradient is farther from the oracle than a few times what arithmetic with the roundings of the dtype is. In fp32 that has
    exponentials of the library, and kernels those of the device, so they get a longer leash."""
    given = [each.detach() for each in inputs]
    right = reference.gradients(*given, dout, dlse, **mask)
    plain = reference.plain_gradients(*given, dout, dlse, **mask)
    for name, gradient, each, rounded in zip(("dq", "dk", "dv"), gradients, right, plain):
        assert gradient.isfinite().all(), name
        error = (gradient.double() - each).abs().max().item()
        times, least = (10, 1e-5) if gradient.dtype == torch.float32 else (4, 1e-6)
        limit = times * (rounded.double() - each).abs().max().item() + least
        assert error <= limit, f"{name}: {error} > {limit}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256), (96, 80), (40, 128)])
def test_gradients(dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
    """G04: grouped heads, different lengths, causal, with a gradient of the LSE."""
    d, dv = head_dims
    q, k, v = leaves((2, 6, 300, d), (2, 2, 430, d), (2, 2, 430, dv), dtype=dtype)
    out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad([out, lse], (q, k, v), [dout, dlse])
    close(gradients, (q, k, v), dout, dlse, mask="causal")


@pytest.mark.parametrize(
    ("keywords", "mask"),
    [
        ({}, {}),
        (dict(causal="top_left"), dict(mask="causal_top_left")),
        (dict(window=(100, 30)), dict(window=(100, 30))),
        (dict(causal=True, window=(64, None)), dict(mask="causal", window=(64, None))),
        (dict(scale=-0.05), dict(scale=-0.05)),
    ],
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(500, 300), (300, 500)])
def test_masks(keywords, mask, seqlen_q: int, seqlen_kv: int) -> None:
    q, k, v = leaves((1, 4, seqlen_q, 64), (1, 2, seqlen_kv, 64), (1, 2, seqlen_kv, 64))
    out = flashgen.attention(q, k, v, **keywords)
    dout = torch.randn_like(out)
    close(torch.autograd.grad(out, (q, k, v), dout), (q, k, v), dout, **mask)


def test_degenerate() -> None:
    """G01, N17: one query and one key, rows without keys, nothing at all."""
    q, k, v = leaves((1, 1, 1, 16), (1, 1, 1, 16), (1, 1, 1, 16))
    out = flashgen.attention(q, k, v)
    dout = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert torch.equal(dv, dout) and dq.abs().max() < 0.05 and dk.abs().max() < 0.05
    q, k, v = leaves((1, 2, 50, 64), (1, 2, 20, 64), (1, 2, 20, 64))
    (dq,) = torch.autograd.grad(flashgen.attention(q, k, v, causal=True).sum(), q)
    assert (dq[:, :, :30] == 0).all() and dq.isfinite().all()
    for shapes in [((0, 2, 5, 64),) * 3, ((1, 2, 0, 64), (1, 2, 5, 64), (1, 2, 5, 64)), ((1, 2, 5, 64), (1, 2, 0, 64), (1, 2, 0, 64))]:
        q, k, v = leaves(*shapes)
        flashgen.attention(q, k, v).sum().backward()
        assert all(each.grad.shape == each.shape and (each.grad == 0).all() for each in (q, k, v))


def test_upstream_gradients_of_any_strides() -> None:
    """G02. What TMA cannot read goes to portable kernels."""
    q, k, v = leaves((2, 4, 200, 64), (2, 4, 200, 64), (2, 4, 200, 64))
    out = flashgen.attention(q, k, v, causal=True)
    row = torch.randn(64, dtype=torch.bfloat16, device="cuda")
    turned = torch.randn(2, 200, 4, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    odd = torch.randn(2, 4, 200, 67, dtype=torch.bfloat16, device="cuda")[..., 1:65]
    for dout in (row.new_ones(()).expand(out.shape), row.expand(out.shape), turned, odd):
        gradients = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        close(gradients, (q, k, v), dout, mask="causal")


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_same_bits_every_time(deterministic: bool) -> None:
    """G09: of dk and dv always, of dq where PyTorch is told so."""
    q, k, v = leaves((4, 8, 1024, 128), (4, 2, 1024, 128), (4, 2, 1024, 128))
    dout = torch.randn_like(q)
    torch.use_deterministic_algorithms(deterministic)
    try:
        first = torch.autograd.grad(flashgen.attention(q, k, v, causal=True), (q, k, v), dout)
        for _ in range(30):
            again = torch.autograd.grad(flashgen.attention(q, k, v, causal=True), (q, k, v), dout)
            assert all(torch.equal(one, other) for one, other in zip(first[not deterministic :], again[not deterministic :]))
    finally:
        torch.use_deterministic_algorithms(False)


def test_offsets_beyond_32_bits() -> None:
    """G10: the last batch item of tensors with more than 2**31 elements."""
    shape = (16400, 8, 128, 128)
    if torch.cuda.mem_get_info()[0] < 9 * 2 * 16400 * 8 * 128 * 128:
        pytest.skip("needs 40 GB of free memory")
    q, k, v = leaves(shape, shape, shape)
    flashgen.attention(q, k, v).backward(dout := torch.randn(shape, dtype=torch.bfloat16, device="cuda"))
    gradients = [each.grad[-1:] for each in (q, k, v)]
    close(gradients, [each[-1:] for each in (q, k, v)], dout[-1:])


@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler:UserWarning")  # torch's own
def test_only_what_is_needed_is_launched() -> None:
    """G08"""
    q, k, v = leaves((1, 4, 256, 64), (1, 4, 256, 64), (1, 4, 256, 64))
    for needs, launched in [((True, False, False), {"delta", "dq"}), ((False, True, True), {"delta", "dkdv"})]:
        for each, need in zip((q, k, v), needs):
            each.requires_grad_(need)
        flashgen.attention(q, k, v).sum().backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            flashgen.attention(q, k, v).sum().backward()
            torch.cuda.synchronize()
        names = {event.key for event in profile.key_averages() if event.key.startswith("attention_backward_")}
        assert {name.removeprefix("attention_backward_") for name in names} == launched


def test_memory_is_linear() -> None:
    """Nothing of seqlen_q x seqlen_kv, and nothing is left behind."""
    q, k, v = leaves((1, 8, 16384, 64), (1, 8, 16384, 64), (1, 8, 16384, 64))
    flashgen.attention(q, k, v).sum().backward()
    del q.grad, k.grad, v.grad
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    flashgen.attention(q, k, v).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 8 * q.numel() * q.element_size()
    del q.grad, k.grad, v.grad
    assert torch.cuda.memory_allocated() == before


def test_autocast() -> None:
    """I10"""
    q, k, v = leaves((1, 4, 200, 64), (1, 4, 200, 64), (1, 4, 200, 64), dtype=torch.float32)
    v = v.detach().bfloat16().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        out = flashgen.attention(q, k, v, causal=True)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert [each.dtype for each in gradients] == [torch.float32, torch.float32, torch.bfloat16]
    close([each.bfloat16() for each in gradients], [each.detach().bfloat16() for each in (q, k, v)], dout, mask="causal")


def test_other_stream() -> None:
    """The backward pass runs on the stream of the forward pass, whatever stream asks for it."""
    q, k, v = leaves((1, 8, 2000, 64), (1, 8, 2000, 64), (1, 8, 2000, 64))
    dout = torch.randn_like(q)
    right = torch.autograd.grad(flashgen.attention(q, k, v, causal=True), (q, k, v), dout)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(stream):
            out = flashgen.attention(q, k, v, causal=True)
        torch.cuda.current_stream().wait_stream(stream)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(gradients[1:], right[1:]))
        torch.testing.assert_close(gradients[0], right[0])  # the fastest kernels add dq up in any order


def test_graph_of_a_training_step() -> None:
    """I05: forward and backward in one CUDA graph, replayed with new values."""
    q, k, v = leaves((1, 4, 500, 64), (1, 4, 500, 64), (1, 4, 500, 64))
    dout = torch.randn_like(q)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(flashgen.attention(q, k, v, causal=True), (q, k, v), dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = torch.autograd.grad(flashgen.attention(q, k, v, causal=True), (q, k, v), dout)
    with torch.no_grad():
        q.normal_()
        dout.normal_()
    graph.replay()
    torch.cuda.synchronize()
    close(gradients, (q, k, v), dout, mask="causal")


def test_first_backward_in_a_capture_is_refused() -> None:
    """I05: nothing is compiled inside a capture, and the capture stays valid."""
    q, k, v = leaves((1, 3, 77, 64), (1, 3, 77, 64), (1, 3, 77, 64))
    flashgen.attention(q, k, v, window=(19, None))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, k, v, window=(19, None))
        with pytest.raises(FlashgenError, match="captur"):
            torch.autograd.grad(out, q, torch.ones_like(out))
        doubled = q.detach() * 2
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(doubled, q.detach() * 2)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90")
def test_sums_of_dq_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are allowed, and a kernel that makes use of it is chosen."""
    chosen = []

    def choices(problem, device, winners, **more):
        for candidate in space.candidates(problem, device):
            if candidate.variant.float16_dq:
                chosen.append(candidate)
                yield dispatch.Choice(candidate=candidate, how="default")
        yield from dispatch.choices(problem, device, winners, **more)

    monkeypatch.setattr(plan, "choices", choices)
    dispatch.reset()
    q, k, v = leaves((2, 6, 1000, 64), (2, 2, 1100, 64), (2, 2, 1100, 64))
    out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True, float16_dq=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad([out, lse], (q, k, v), [dout, dlse])
    dispatch.reset()
    assert len(chosen) == 1
    close(gradients, (q, k, v), dout, dlse, mask="causal")


def test_as_pytorch_trains() -> None:
    """Gradients of a step are SDPA's, within what bf16 allows."""
    q, k, v = leaves((2, 8, 777, 128), (2, 8, 777, 128), (2, 8, 777, 128))
    dout = torch.randn_like(q)
    ours = torch.autograd.grad(flashgen.attention(q, k, v, causal=True), (q, k, v), dout)
    theirs = torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), dout)
    for one, other in zip(ours, theirs):
        assert (one.double() - other.double()).norm() < 0.02 * other.double().norm()


def test_second_device() -> None:
    """I08: the autograd thread of another device; the current one stays."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = leaves((1, 2, 300, 64), (1, 2, 300, 64), (1, 2, 300, 64), device="cuda:1")
    out = flashgen.attention(q, k, v)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert all(each.device == q.device for each in gradients) and torch.cuda.current_device() == 0
    close(gradients, (q, k, v), dout)
