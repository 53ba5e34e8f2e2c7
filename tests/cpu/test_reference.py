"""The oracle against figures worked out by hand, and against PyTorch's own attention with explicit masks."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen import reference
from flashgen.problem import Problem


def explicit(mask, window, seqlen_q, seqlen_kv):
    """The mask spelled out pair by pair, in plain Python."""
    left, right = window
    rows = []
    for i in range(seqlen_q):
        diagonal = i if mask == "causal_top_left" else i + seqlen_kv - seqlen_q
        row = []
        for j in range(seqlen_kv):
            hidden = mask != "full" and j > diagonal
            hidden = hidden or (left not in (None, -1) and j < diagonal - left)
            hidden = hidden or (right not in (None, -1) and j > diagonal + right)
            row.append(not hidden)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.bool).reshape(seqlen_q, seqlen_kv)


def by_torch(query, key, value, visible, scale):
    """SDPA in float64 with a boolean mask; rows without a key are zeros, as documented."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~visible, -math.inf)
    out = out.masked_fill(~visible.any(-1)[:, None], 0.0)
    return out, scores.logsumexp(-1)


def tensors(batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim_qk, head_dim_v, seed=0):
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)  # noqa: E731
    return (
        draw(batch, heads_q, seqlen_q, head_dim_qk),
        draw(batch, heads_kv, seqlen_kv, head_dim_qk),
        draw(batch, heads_kv, seqlen_kv, head_dim_v),
    )


WINDOWS = ((None, None), (-1, -1), (0, 0), (2, None), (None, 1), (3, 1), (10**9, 10**9))


@pytest.mark.parametrize("mask", ["full", "causal", "causal_top_left"])
@pytest.mark.parametrize("lengths", [(5, 2), (2, 5), (1, 7), (7, 1), (9, 9)])
def test_masks_agree_with_an_explicit_boolean_matrix(mask, lengths):
    """N03, N05: every mask and window, where the diagonals differ."""
    q, k, v = tensors(2, 4, 2, *lengths, 16, 8)
    for window in WINDOWS:
        visible = explicit(mask, window, *lengths)
        assert torch.equal(reference.visibility(mask, window, *lengths), visible)
        out, lse = reference.attention(q, k, v, mask=mask, window=window, scale=0.3)
        expected, expected_lse = by_torch(q, k, v, visible, 0.3)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-13)


@pytest.mark.parametrize("heads", [(6, 2), (3, 1), (4, 4)])
def test_blocks_change_nothing(monkeypatch, heads):
    """Tiny blocks of rows, heads and batch items; grouped heads; head dims that differ; both layouts."""
    q, k, v = tensors(3, *heads, 23, 19, 12, 20)
    whole, whole_lse = reference.attention(q, k, v, mask="causal", window=(11, None))
    expected, expected_lse = by_torch(q, k, v, explicit("causal", (11, None), 23, 19), 1 / math.sqrt(12))
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(whole_lse, expected_lse, rtol=0, atol=1e-13)
    for rows, scores_bytes in ((1, 40000), (5, 3000), (16, 1)):
        monkeypatch.setattr(reference, "BLOCK_ROWS", rows)
        monkeypatch.setattr(reference, "SCORES_BYTES", scores_bytes)
        out, lse = reference.attention(*(t.transpose(1, 2) for t in (q, k, v)), mask="causal", window=(11, None), layout="bshd")
        assert out.shape == (3, 23, heads[0], 20) and lse.shape == (3, heads[0], 23)
        torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-13)


def test_blocks_bound_the_scratch_memory():
    """Memory is linear in the length: no block of scores passes the limit, also for 128 heads of a million keys."""
    for batch, heads_kv, group, seqlen in ((1, 16, 1, 16384), (32, 16, 1, 512), (1, 1, 128, 2**20), (4096, 17, 1, 16)):
        row_bytes = group * seqlen * 8
        covered = 0
        for items, heads, blocks in reference._blocks(batch, heads_kv, seqlen, row_bytes):
            width = min(items.stop, batch) - items.start
            height = min(heads.stop, heads_kv) - heads.start
            largest = width * height * max(map(len, blocks)) * row_bytes
            assert largest <= max(reference.SCORES_BYTES, row_bytes)
            covered += width * height * sum(map(len, blocks))
        assert covered == batch * heads_kv * seqlen


def test_very_low_logits_are_not_masked_keys():
    """N01: all logits are -65536."""
    q, k = torch.full((1, 1, 2, 16), -64.0), torch.full((1, 1, 4, 16), 64.0)
    v = torch.arange(1.0, 5.0).view(1, 1, 4, 1).expand(1, 1, 4, 16)
    out, lse = reference.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), scale=1.0)
    assert torch.equal(out, torch.full_like(out, 2.5))
    assert lse.flatten().tolist() == pytest.approx([-65534.6137] * 2, abs=1e-4)


def test_a_masked_key_leaks_nothing():
    """N02, with a causal mask: the visible key has a far lower score than the hidden one."""
    q = torch.full((1, 1, 2, 16), -64.0)
    k = torch.stack([torch.full((16,), 64.0), torch.zeros(16)]).view(1, 1, 2, 16)
    v = torch.tensor([1.0, 100.0]).view(1, 1, 2, 1)
    for function in (reference.attention, reference.plain):
        out, lse = function(q, k, v, mask="causal", scale=1.0)
        assert out[0, 0, :, 0].tolist() == [1.0, 100.0]
        assert lse[0, 0].tolist() == [-65536.0, 0.0]


def test_diagonals_differ_where_lengths_do():
    """N03: five queries, two keys."""
    q, k, v = tensors(1, 1, 1, 5, 2, 16, 16)
    out, lse = reference.attention(q, k, v, mask="causal")
    assert torch.equal(out[0, 0, :3], torch.zeros(3, 16, dtype=torch.float64))
    assert lse[0, 0, :3].tolist() == [-math.inf] * 3 and lse[0, 0, 3:].isfinite().all()
    assert torch.equal(out[0, 0, 3], v[0, 0, 0])
    out, lse = reference.attention(q, k, v, mask="causal_top_left")
    assert torch.equal(out[0, 0, 0], v[0, 0, 0]) and lse.isfinite().all()


def test_wide_windows_hide_nothing():
    """N05: a left window of the length less one is plain causal; an over-large right window is no mask."""
    for window in ((256, 0), (-1, 0), (10**9, 0)):
        assert torch.equal(reference.visibility("full", window, 257, 257), explicit("causal", (None, None), 257, 257))
    assert reference.visibility("full", (-1, 10**6), 300, 100).all()


def test_canonical_problems_keep_their_mask():
    """N05: the spelling that Problem makes of a mask and window sees the same keys as the one that the user gave."""
    sides = (None, -1, 0, 1, 3, 6, 7, 50)
    for mask, left, right, lengths in itertools.product(
        ("full", "causal", "causal_top_left"), sides, sides, ((7, 7), (7, 3), (3, 7), (1, 7), (7, 1))
    ):
        problem = Problem(
            batch=1, heads_q=1, heads_kv=1, seqlen_q=lengths[0], seqlen_kv=lengths[1], head_dim_qk=16, head_dim_v=16,
            mask=mask, window=(left, right),
        )  # fmt: skip
        given = explicit(mask, (left, right), *lengths)
        assert torch.equal(reference.visibility(problem.mask, problem.window, *lengths), given), (mask, left, right, lengths)
        assert problem.visible_pairs == int(given.sum())


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_beyond_the_range_of_float16(sign):
    """N11: the raw dot product is 115200."""
    q = torch.full((1, 1, 4, 128), 30.0 * sign, dtype=torch.float16)
    v = torch.arange(4.0).view(1, 1, 4, 1).expand(1, 1, 4, 128).half()
    for function in (reference.attention, reference.plain):
        out, lse = function(q, q, v)
        assert torch.equal(out, torch.full_like(out, 1.5))
        assert lse.flatten().tolist() == pytest.approx([10183.7239] * 4, abs=2e-3)


def test_lse_is_a_natural_logarithm():
    """N30."""
    q, k = torch.zeros(1, 1, 1, 16), torch.randn(1, 1, 8, 16)
    for function in (reference.attention, reference.plain):
        _, lse = function(q, k, k)
        assert lse.item() == pytest.approx(2.0794415, abs=1e-6)


def test_no_keys_and_no_queries():
    """N17: empty sides give zeros and -inf, or nothing."""
    q, k, v = tensors(2, 4, 2, 3, 0, 16, 8)
    out, lse = reference.attention(q, k, v)
    assert torch.equal(out, torch.zeros(2, 4, 3, 8, dtype=torch.float64)) and (lse == -math.inf).all()
    q, k, v = tensors(2, 4, 2, 0, 3, 16, 8)
    out, lse = reference.attention(q, k, v)
    assert out.shape == (2, 4, 0, 8) and lse.shape == (2, 4, 0)
    q, k, v = tensors(0, 8, 2, 128, 64, 64, 64)
    assert reference.attention(q, k, v)[0].shape == (0, 8, 128, 64)


@pytest.mark.parametrize("scale", [0.0, -0.7, 1.0])
def test_any_scale(scale):
    q, k, v = tensors(1, 2, 1, 6, 6, 16, 16)
    out, lse = reference.attention(q, k, v, mask="causal", scale=scale)
    expected, expected_lse = by_torch(q, k, v, explicit("causal", (None, None), 6, 6), scale)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 4e-3), (torch.float16, 5e-4), (torch.float32, 1e-6)])
def test_plain_has_the_error_of_its_dtype(dtype, most):
    """N29: the yardstick is IEEE in float32, and keeps float32 sums in half precision."""
    q, k, v = (t.to(dtype) for t in tensors(1, 4, 2, 200, 200, 64, 64))
    expected, expected_lse = reference.attention(q, k, v, mask="causal")
    out, lse = reference.plain(q, k, v, mask="causal")
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert 0 < (out.double() - expected).norm() / expected.norm() < most
    assert (lse.double() - expected_lse).abs().max() < 1e-5


def test_plain_leaves_the_precision_switches_alone():
    """N29: TF32 is off inside, and whatever the caller chose outside."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with reference._ieee_products():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


# ---- gradients -------------------------------------------------------------------------------------------------------------


def dense(query, key, value, visible, scale):
    """Attention written down with one dense matrix, without a block or a running sum, for torch to differentiate."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    powers = torch.where(visible, torch.exp(query @ key.transpose(-1, -2) * scale), 0.0)
    total = powers.sum(-1, keepdim=True)
    full = visible.any(-1)[:, None]
    out = torch.where(full, powers @ value / torch.where(full, total, 1.0), 0.0)
    return out, torch.where(full, total, 1.0).log().squeeze(-1)


def by_autograd(query, key, value, dout, dlse, visible, scale):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
    out, lse = dense(*leaves, visible, scale)
    loss = (out * dout).sum() if dlse is None else (out * dout).sum() + (lse * dlse).sum()
    return torch.autograd.grad(loss, leaves)


def upstream(query, value, seed=1):
    random = torch.Generator().manual_seed(seed)
    dout = torch.randn(*query.shape[:-1], value.shape[-1], generator=random, dtype=torch.float64)
    return dout, torch.randn(query.shape[:-1], generator=random, dtype=torch.float64)


def assert_same(found, expected, atol=1e-12):
    for name, one, other in zip(("dq", "dk", "dv"), found, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("mask", ["full", "causal", "causal_top_left"])
@pytest.mark.parametrize("lengths", [(5, 2), (2, 5), (1, 7), (7, 1), (9, 9)])
def test_gradients_agree_with_autograd(mask, lengths):
    """G01, G04, G05: every mask and window, grouped heads, head dims that differ, with a gradient of the LSE and without."""
    q, k, v = tensors(2, 6, 2, *lengths, 16, 8)
    dout, dlse = upstream(q, v)
    for window in WINDOWS:
        visible = explicit(mask, window, *lengths)
        for given_dlse in (None, dlse):
            found = reference.gradients(q, k, v, dout, given_dlse, mask=mask, window=window, scale=0.3)
            assert_same(found, by_autograd(q, k, v, dout, given_dlse, visible, 0.3))
            assert [each.shape for each in found] == [q.shape, k.shape, v.shape]


sides = st.none() | st.integers(-1, 6)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    heads=st.sampled_from([(1, 1), (2, 1), (6, 3)]),
    dims=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    mask=st.sampled_from(["full", "causal", "causal_top_left"]),
    window=st.none() | st.tuples(sides, sides),
    scale=st.sampled_from([0.0, -0.7, 1.0, None]),
    seed=st.integers(0, 2**31),
)
def test_gradients_are_slopes(lengths, heads, dims, mask, window, scale, seed):
    """A step along any direction changes the oracle's own sum(out * dout) + sum(lse * dlse) by what the gradients say."""
    given_tensors = tensors(1, *heads, *lengths, *dims, seed)
    dout, dlse = upstream(given_tensors[0], given_tensors[2], seed + 1)
    words = dict(mask=mask, window=window, scale=scale)
    found = reference.gradients(*given_tensors, dout, dlse, **words)

    def loss(q, k, v):
        out, lse = reference.attention(q, k, v, **words)
        return (out * dout).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * dlse).sum()

    step = 1e-4
    for place, tensor in enumerate(given_tensors):
        direction = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed + 2), dtype=torch.float64)
        there = [[*given_tensors[:place], tensor + sign * step * direction, *given_tensors[place + 1 :]] for sign in (1, -1)]
        slope = (loss(*there[0]) - loss(*there[1])) / (2 * step)
        assert float((found[place] * direction).sum()) == pytest.approx(float(slope), abs=2e-5, rel=1e-5)


@pytest.mark.parametrize("heads", [(6, 2), (12, 3), (3, 1), (4, 4)])
def test_blocks_change_no_gradient(monkeypatch, heads):
    """G04: tiny blocks of rows, heads and batch items; both layouts."""
    q, k, v = tensors(3, *heads, 23, 19, 12, 20)
    dout, dlse = upstream(q, v)
    expected = by_autograd(q, k, v, dout, dlse, explicit("causal", (11, None), 23, 19), 1 / math.sqrt(12))
    assert_same(reference.gradients(q, k, v, dout, dlse, mask="causal", window=(11, None)), expected)
    for rows, scores_bytes in ((1, 40000), (5, 9000), (16, 1)):
        monkeypatch.setattr(reference, "BLOCK_ROWS", rows)
        monkeypatch.setattr(reference, "SCORES_BYTES", scores_bytes)
        turned = (t.transpose(1, 2).contiguous() for t in (q, k, v, dout))
        found = reference.gradients(*turned, dlse, mask="causal", window=(11, None), layout="bshd")
        assert [each.shape for each in found] == [t.transpose(1, 2).shape for t in (q, k, v)]
        assert_same([each.transpose(1, 2) for each in found], expected)


def test_gradient_of_one_query_and_one_key():
    """G01: nothing can be moved by a weight that is always 1."""
    q, k, v = (3 * t for t in tensors(1, 1, 1, 1, 1, 16, 16))
    dout, _ = upstream(q, v)
    for function in (reference.gradients, reference.plain_gradients):
        dq, dk, dv = function(q.float(), k.float(), v.float(), dout.float())
        assert dq.abs().max() < 1e-4 and dk.abs().max() < 1e-4
        assert torch.equal(dv, dout.float().to(dv.dtype))


@pytest.mark.parametrize("lengths", [(3, 1), (7, 1), (14, 1)])
def test_rows_without_a_key_have_no_gradient(lengths):
    """G01: causal, with far fewer keys than queries; only the last query sees the key."""
    q, k, v = (3 * t for t in tensors(1, 2, 1, *lengths, 16, 16))
    dout, dlse = upstream(q, v)
    for function in (reference.gradients, reference.plain_gradients):
        dq, dk, dv = function(q, k, v, dout, dlse, mask="causal")
        assert torch.equal(dq[:, :, :-1], torch.zeros_like(dq[:, :, :-1]))
        torch.testing.assert_close(dv[:, :, 0], dout[:, :, -1].sum(1, keepdim=True))
        torch.testing.assert_close(dq[:, :, -1], 0.25 * dlse[:, :, -1:] * k[:, :, 0], rtol=0, atol=1e-5)
        torch.testing.assert_close(dk[:, :, 0], 0.25 * (dlse[:, :, -1:] * q[:, :, -1]).sum(1, keepdim=True), rtol=0, atol=1e-5)


def test_gradients_of_an_expanded_dout():
    """G02: out.sum() has a gradient of strides 0. dv sums the weights of each key; by hand, for zero queries they are 1 / seqlen_kv."""
    q, k, v = tensors(2, 4, 2, 6, 3, 16, 8)
    ones = torch.ones((), dtype=torch.float64).expand(2, 4, 6, 8)
    assert_same(reference.gradients(q, k, v, ones), reference.gradients(q, k, v, ones.contiguous()), atol=0)
    _, _, dv = reference.gradients(torch.zeros_like(q), k, v, ones)
    torch.testing.assert_close(dv, torch.full_like(dv, 2 * 6 / 3))


def test_gradients_of_grouped_heads_are_sums():
    """G04: key/value heads that are repeated for each query head have the group's gradients between them."""
    for heads_q, heads_kv in ((6, 2), (12, 3)):
        q, k, v = tensors(1, heads_q, heads_kv, 9, 7, 16, 8)
        dout, dlse = upstream(q, v)
        group = heads_q // heads_kv
        dq, dk, dv = reference.gradients(q, k, v, dout, dlse, mask="causal")
        alone = reference.gradients(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), dout, dlse, mask="causal")
        assert_same((dq, dk, dv), (alone[0], *(each.unflatten(1, (heads_kv, group)).sum(2) for each in alone[1:])))


def test_gradient_of_the_lse():
    """G05: the loss is the sum of the log-sum-exps, and queries are 0."""
    q, k, v = torch.zeros(1, 1, 3, 8), torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    for function in (reference.gradients, reference.plain_gradients):
        dq, dk, dv = function(q, k, v, torch.zeros(1, 1, 3, 8), torch.ones(1, 1, 3), scale=0.5)
        torch.testing.assert_close(dq, (0.5 * k.mean(2, keepdim=True)).expand_as(q).to(dq.dtype))
        assert not dk.any() and not dv.any()


def test_keys_without_a_query_have_no_gradient():
    """G14: no query and four keys, no key and five queries, and keys that a window hides from all."""
    q, k, v = tensors(1, 2, 1, 0, 4, 16, 8)
    dq, dk, dv = reference.gradients(q, k, v, *upstream(q, v))
    assert dq.shape == q.shape and dk.shape == k.shape and not dk.any() and dv.shape == v.shape and not dv.any()
    q, k, v = tensors(1, 2, 1, 5, 0, 16, 8)
    dq, dk, dv = reference.gradients(q, k, v, *upstream(q, v))
    assert dq.shape == q.shape and not dq.any() and dk.shape == k.shape and dv.shape == v.shape
    q, k, v = tensors(1, 2, 1, 2, 9, 16, 8)
    _, dk, dv = reference.gradients(q, k, v, *upstream(q, v), mask="causal", window=(2, None))
    assert not dk[:, :, :5].any() and not dv[:, :, :5].any() and dk[:, :, 5:].all() and dv[:, :, 5:].all()


def test_gradients_of_very_low_and_very_high_logits():
    """N01, N11: weights are what they are for logits of 0."""
    for size, dtype in ((64.0, torch.bfloat16), (30.0, torch.float16)):
        for sign in (1, -1):
            q, k = torch.full((1, 1, 2, 128), sign * size, dtype=dtype), torch.full((1, 1, 4, 128), size, dtype=dtype)
            v = torch.arange(1.0, 5.0).view(1, 1, 4, 1).expand(1, 1, 4, 128).to(dtype)
            dout = torch.ones(1, 1, 2, 128, dtype=dtype)
            for function in (reference.gradients, reference.plain_gradients):
                dq, dk, dv = function(q, k, v, dout)
                torch.testing.assert_close(dv.double(), torch.full((1, 1, 4, 128), 0.5, dtype=torch.float64), rtol=5e-3, atol=0)
                # delta is 128 * 2.5, and a key's score has the slope (128 v - 128 * 2.5) / 4 for each query
                slopes = torch.tensor([-48.0, -16.0, 16.0, 48.0]).view(1, 1, 4, 1) * sign * size / math.sqrt(128) * 2
                torch.testing.assert_close(dk.double(), slopes.double().expand(1, 1, 4, 128), rtol=5e-3, atol=0)
                assert dq.abs().max() < 1e-3 * slopes.abs().max()


@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 6e-3), (torch.float16, 8e-4), (torch.float32, 1e-6)])
def test_plain_gradients_have_the_error_of_their_dtype(dtype, most):
    """N29: the yardstick is IEEE in float32, and keeps float32 sums in half precision."""
    q, k, v = (t.to(dtype) for t in tensors(1, 4, 2, 200, 200, 64, 64))
    dout, dlse = upstream(q, v)
    found = reference.plain_gradients(q, k, v, dout.to(dtype), dlse.float(), mask="causal")
    expected = reference.gradients(q, k, v, dout.to(dtype), dlse.float(), mask="causal")
    for one, other in zip(found, expected):
        assert one.dtype == dtype and other.dtype == torch.float64
        assert 0 < (one.double() - other).norm() / other.norm() < most
