"""flashgen.attention on a GPU: values that can be worked out by hand, sizes that overflow, streams, graphs and devices."""

import math

import pytest
import torch

import flashgen
from flashgen import reference
from flashgen.errors import FlashgenError

pytestmark = pytest.mark.gpu


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def close(out: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.02) -> None:
    difference = (out.double() - expected.double()).abs().max().item()
    assert difference <= tolerance, difference


def test_logits_that_a_finite_minus_infinity_would_drown() -> None:
    """N01: all logits are exactly -65536."""
    q = torch.full((1, 1, 2, 16), -64.0, dtype=torch.bfloat16, device="cuda")
    k = torch.full((1, 1, 4, 16), 64.0, dtype=torch.bfloat16, device="cuda")
    v = torch.tensor([1.0, 2, 3, 4], device="cuda", dtype=torch.bfloat16).reshape(1, 1, 4, 1).expand(1, 1, 4, 16)
    out, lse = flashgen.attention(q, k, v, scale=1.0, return_lse=True)
    assert (out == 2.5).all()
    assert (lse + 65534.6137).abs().max() < 0.02


@pytest.mark.parametrize("sign", [1, -1])
def test_products_beyond_fp16(sign: int) -> None:
    """N11: raw dot products of 115200, scaled by 1 / sqrt(128)."""
    q = torch.full((1, 1, 3, 128), 30.0 * sign, dtype=torch.float16, device="cuda")
    k = torch.full((1, 1, 4, 128), 30.0, dtype=torch.float16, device="cuda")
    v = torch.arange(4.0, device="cuda", dtype=torch.float16).reshape(1, 1, 4, 1).expand(1, 1, 4, 128)
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    assert (out == 1.5).all()
    assert (lse - (sign * 115200 / math.sqrt(128) + math.log(4))).abs().max() < 4e-3


@pytest.mark.parametrize("seqlen", [512, 8192, 65536])
def test_error_does_not_grow_with_the_context(seqlen: int) -> None:
    """N12: no more than twice the error of fp32 arithmetic with one cast at the end, at any length."""
    q, k = randn(1, 1, 64, 128), randn(1, 1, seqlen, 128)
    v = (1 + 2**-6 * torch.randn(1, 1, seqlen, 128, device="cuda")).bfloat16()
    expected = reference.attention(q, k, v)[0]
    once = (expected.float().bfloat16().double() - expected).abs().max().item()
    close(flashgen.attention(q, k, v), expected, 2 * once)


def test_strides_beyond_32_bits() -> None:
    """N13: views of one packed buffer whose rows reach past 2**31 elements."""
    qkv = torch.randn(99900, 3, 56, 128, dtype=torch.float16, device="cuda")
    q, k, v = (qkv[None, :, i, :, :] for i in range(3))
    out = flashgen.attention(q, k, v, causal=True, window=(255, None), layout="bshd")
    tail = [t[:, -320:, -1:].contiguous() for t in (q, k, v)]
    expected = reference.attention(*tail, mask="causal", window=(255, None), layout="bshd")[0]
    close(out[:, -64:, -1:], expected[:, -64:], 5e-3)


def test_batch_stride_beyond_32_bits() -> None:
    """N13: the second batch item begins past 2**31 elements."""
    buffer = torch.empty(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    q = buffer.as_strided((2, 2, 256, 64), (2**31, 256 * 64, 64, 1)).normal_()
    close(flashgen.attention(q, q, q), reference.attention(q, q, q)[0])


def test_more_heads_than_a_grid_axis() -> None:
    """N16: batch times heads is 69632."""
    q, k, v = randn(4096, 17, 16, 16), randn(4096, 17, 16, 16), randn(4096, 17, 16, 16)
    out = flashgen.attention(q, k, v, causal=True)
    close(out[-1:], reference.attention(q[-1:], k[-1:], v[-1:], mask="causal")[0])
    close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), 0.04)


def test_nothing_to_do() -> None:
    """N17: no batch item, no query, no key."""
    out, lse = flashgen.attention(randn(0, 8, 128, 64), randn(0, 2, 64, 64), randn(0, 2, 64, 64), return_lse=True)
    assert out.shape == (0, 8, 128, 64) and lse.shape == (0, 8, 128)
    assert flashgen.attention(randn(1, 8, 0, 64), randn(1, 2, 64, 64), randn(1, 2, 64, 64)).shape == (1, 8, 0, 64)
    out, lse = flashgen.attention(randn(1, 2, 5, 64), randn(1, 2, 0, 64), randn(1, 2, 0, 64), return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_mask_hides_every_key_of_some_rows() -> None:
    """N03: bottom-right causal with more queries than keys."""
    q, k, v = randn(1, 1, 5, 16), randn(1, 1, 2, 16), randn(1, 1, 2, 16)
    out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    assert (out[:, :, :3] == 0).all() and (lse[:, :, :3] == -math.inf).all()
    assert torch.equal(out[:, :, 3], v[:, :, 0])
    assert torch.equal(flashgen.attention(q, k, v, causal="top_left")[:, :, 0], v[:, :, 0])


def test_fp32_is_ieee() -> None:
    """N29: neither TF32 nor the switches for it change the result."""
    q, k, v = (randn(1, 2, 256, 128, dtype=torch.float32) for _ in range(3))
    close(flashgen.attention(q, k, v), reference.attention(q, k, v)[0], 1e-5)


def test_other_stream_and_graph() -> None:
    """A kernel runs on the current stream; a captured one reads what its inputs hold when the graph is replayed (I05)."""
    q, k, v = randn(1, 4, 500, 64), randn(1, 4, 500, 64), randn(1, 4, 500, 64)
    flashgen.attention(q, k, v, causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            q = q * 1.0 + 0.01
        out = flashgen.attention(q, k, v, causal=True)
    stream.synchronize()
    close(out, reference.attention(q, k, v, mask="causal")[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashgen.attention(q, k, v, causal=True)
    q.normal_()
    graph.replay()
    close(captured, reference.attention(q, k, v, mask="causal")[0])


def test_first_call_in_a_capture_is_refused() -> None:
    """I05: nothing is compiled inside a capture, and the capture stays valid."""
    q = randn(1, 3, 77, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(FlashgenError, match="captur"):
            flashgen.attention(q, q, q, causal=True, window=(17, None))
        doubled = q + q
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(doubled, q + q)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch 2.11's own, on the way into its compiler
def test_compiled_function() -> None:
    """Under torch.compile there is a clean graph break and the same result."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(x * 2, x, x + 1, causal=True) * 3

    x = randn(1, 2, 200, 64)
    with torch.no_grad():
        close(torch.compile(layer)(x), layer(x), 0.05)


def test_second_device() -> None:
    """I08: tensors of another device than the current one; the current one stays."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q = torch.randn(1, 2, 300, 64, dtype=torch.bfloat16, device="cuda:1")
    out = flashgen.attention(q, q, q)
    assert out.device == q.device and torch.cuda.current_device() == 0
    close(out, reference.attention(q, q, q)[0])
    with pytest.raises(FlashgenError, match="key"):
        flashgen.attention(q, q.to("cuda:0"), q)
