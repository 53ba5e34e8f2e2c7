"""The check finds every kind of wrong kernel, and lets right ones pass. Kernels are played by functions on CPU tensors."""

import math
import random

import pytest
import torch

from flashgen import check, reference
from flashgen.check import measures
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.problem import Problem


def problem(**fields):
    sizes = dict(batch=2, heads_q=4, heads_kv=2, seqlen_q=96, seqlen_kv=80, head_dim_qk=32, head_dim_v=16, dtype="float16")
    return Problem(**(sizes | dict(mask="causal", return_lse=True) | fields))


def right(of):
    """A right kernel for a problem: sums in float32, in another order than the yardstick's, with exponentials to base 2."""

    def launch(query, key, value, out, lse, scale):
        if not of.seqlen_kv:
            out.zero_()
            lse.fill_(-math.inf)
            return
        q, k, v = (t.transpose(1, 2) if of.layout == "bshd" else t for t in (query, key, value))
        group = of.heads_q // of.heads_kv
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = (q.float() @ k.float().transpose(-1, -2)) * (scale / math.log(2))
        scores = scores.masked_fill(~reference.visibility(of.mask, of.window, of.seqlen_q, of.seqlen_kv), -math.inf)
        most = scores.amax(-1, keepdim=True).masked_fill_(~scores.isfinite().any(-1, keepdim=True), 0.0)
        weights = torch.exp2(scores - most)
        total = weights.sum(-1, keepdim=True)
        sums = weights.to(value.dtype).float().flip(-1) @ v.float().flip(-2)
        result = (sums / total.masked_fill(total == 0, 1.0)).to(out.dtype)
        out.copy_(result.transpose(1, 2) if of.layout == "bshd" else result)
        if lse is not None:
            lse.copy_((most + total.log2()).squeeze(-1) * math.log(2))

    return launch


def then(of, spoil):
    """A right kernel whose results are spoiled afterwards."""

    def launch(query, key, value, out, lse, scale):
        right(of)(query, key, value, out, lse, scale)
        spoil(query, key, value, out, lse)

    return launch


PROBLEMS = [
    problem(),
    problem(mask="full"),
    problem(mask="causal_top_left", window=(7, None), layout="bshd"),
    problem(dtype="bfloat16", mask="full", window=(9, 4)),
    problem(dtype="float32"),
    problem(dtype="float32", layout="bshd", head_dim_qk=10, head_dim_v=20),
    problem(aligned_16=False, head_dim_qk=24),
    problem(head_dim_v=9, return_lse=False),
    problem(seqlen_kv=1),
    problem(seqlen_q=1, seqlen_kv=300, heads_kv=1),
    problem(seqlen_kv=0),
    problem(seqlen_q=5, seqlen_kv=2, batch=1, heads_q=1, heads_kv=1),
]


@pytest.mark.parametrize("of", PROBLEMS, ids=str)
@pytest.mark.parametrize("scale", [None, 1.0, 0.0])
def test_right_kernels_pass(of, scale):
    for seed in (0, 1):
        case = check.prepare(of, "cpu", seed, scale)
        result = check.check(right(of), case)
        assert result.ok, result.message
        assert result.error <= result.tolerance and result.message == ""


def test_honest_kernels_have_room_and_no_more():
    """N12, N29: limits lie within a small factor of what is reached, flat in length and far below 1 %."""
    for length in (64, 512):
        for dtype, most in (("bfloat16", 0.0075), ("float16", 0.001), ("float32", 1e-5)):
            of = problem(dtype=dtype, seqlen_q=length, seqlen_kv=length, head_dim_qk=64, head_dim_v=64, batch=1)
            case = check.prepare(of, "cpu", 5)
            check.check(right(of), case)
            errors = measures.errors_of(case.out, case.lse, case.expected, case.expected_lse, case.typical)
            assert errors.relative < case.limits.relative / 2 < most / 2
            assert errors.block < case.limits.block / 2 < 0.0045
            assert errors.absolute < case.limits.absolute / 1.5
            assert errors.lse < case.limits.lse / 2 < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_one_per_cent_everywhere_is_wrong(dtype):
    """T07."""
    of = problem(dtype=dtype, head_dim_v=64)
    result = check.check(then(of, lambda q, k, v, out, lse: out.mul_(1.01)), check.prepare(of, "cpu", 0))
    assert not result.ok and result.message


def late_row(q, k, v, out, lse):
    out[1, 3, 90] = out[1, 3, 89].clone()


def unwritten_row(q, k, v, out, lse):
    out[0, 0, 95] = math.nan


def infinity(q, k, v, out, lse):
    out[0, 0, 50, 3] = math.inf


def empty_rows_written(q, k, v, out, lse):
    out[:, :, :16] = 1e-3


def heads_swapped(q, k, v, out, lse):
    out[:, [0, 1]] = out[:, [1, 0]]


def lse_in_base_2(q, k, v, out, lse):
    lse.mul_(1 / math.log(2))


def lse_zero(q, k, v, out, lse):
    lse.zero_()


def lse_finite_for_empty_rows(q, k, v, out, lse):
    lse[lse == -math.inf] = -1e30


def lse_unwritten(q, k, v, out, lse):
    lse[0, 0, 40] = math.nan


@pytest.mark.parametrize(
    "spoil, word",
    [
        (late_row, "error"),
        (unwritten_row, "16 of 12288 elements of out were never written"),
        (infinity, "1 of 12288"),
        (empty_rows_written, "error"),
        (heads_swapped, "error"),
        (lse_in_base_2, "lse error"),
        (lse_zero, "lse error"),
        (lse_finite_for_empty_rows, "lse error"),
        (lse_unwritten, "lse error"),
    ],
)
def test_spoiled_results_are_wrong(spoil, word):
    """N30 and kin: each measure does its part, and the message says which."""
    of = problem()
    result = check.check(then(of, spoil), check.prepare(of, "cpu", 0))
    assert not result.ok and word in result.message


def test_a_wrong_late_row_is_found_where_values_are_small():
    """Long causal rows are a hundred times smaller than the first ones: a tolerance taken from the largest value would miss them."""
    of = problem(batch=1, heads_q=1, heads_kv=1, seqlen_q=2048, seqlen_kv=2048, head_dim_v=32, dtype="bfloat16")
    case = check.prepare(of, "cpu", 0, 0.02)
    assert check.check(right(of), case).ok

    def small_row(q, k, v, out, lse):
        out[0, 0, 2000] *= 1.1

    result = check.check(then(of, small_row), case)
    assert not result.ok and result.message.startswith("block error") and result.error < result.tolerance


def test_masks_off_by_one_are_wrong():
    """N03, N22: the mask's diagonal, the window's edge and the last keys."""
    of = problem(seqlen_q=80)
    case = check.prepare(of, "cpu", 0)
    for other in (
        problem(seqlen_q=80, mask="full"),
        problem(seqlen_q=80, window=(70, None)),
        problem(seqlen_q=80, mask="full", window=(None, 1)),
    ):
        assert not check.check(right(other), case).ok
    wide, narrow = problem(window=(8, None)), problem(window=(7, None))
    assert not check.check(right(narrow), check.prepare(wide, "cpu", 0)).ok
    top_left = problem(mask="causal_top_left")
    assert not check.check(right(top_left), check.prepare(problem(), "cpu", 0)).ok


def test_every_run_starts_from_nan():
    """A kernel that writes nothing must not live on what a right one left there."""
    of = problem()
    case = check.prepare(of, "cpu", 0)
    assert check.check(right(of), case).ok
    result = check.check(lambda *tensors: None, case)
    assert not result.ok and result.error is None and "12288 of 12288" in result.message
    assert check.check(right(of), case).ok


def test_reads_beyond_the_rows_are_found():
    """N22, N24: padding columns and what surrounds the tensors are NaN, and rows are as unaligned as the problem admits."""
    for of in (problem(head_dim_qk=20), problem(aligned_16=False)):
        query, key, value = check.inputs(of, "cpu", 0)
        for tensor, columns in ((query, of.head_dim_qk), (key, of.head_dim_qk), (value, of.head_dim_v)):
            assert tensor.isfinite().all() and tensor.stride(-1) == 1
            around = torch.as_strided(tensor, (2, columns + 1), (tensor.stride(-2), 1), tensor.storage_offset())
            aligned = tensor.data_ptr() % 16 == 0 and all(step * tensor.itemsize % 16 == 0 for step in tensor.stride()[:-1])
            assert aligned == of.aligned_16
            if not aligned or columns * tensor.itemsize % 16:
                assert around[:, columns].isnan().all()
        assert torch.equal(query, check.inputs(of, "cpu", 0)[0]) and not torch.equal(query, check.inputs(of, "cpu", 1)[0])


@pytest.mark.parametrize("place", [check.GUARD - 1, -check.GUARD])
@pytest.mark.parametrize("buffer", ["out_buffer", "lse_buffer"])
def test_writes_outside_the_outputs_are_found(place, buffer):
    """T05: a stray store is a wrong result here, before it is a crash elsewhere."""
    of = problem()
    case = check.prepare(of, "cpu", 0)

    def stray(*ignored):
        getattr(case, buffer)[place] = 0.0

    result = check.check(then(of, stray), case)
    assert not result.ok and f"outside {buffer[:3]}" in result.message
    padded = problem(head_dim_v=9)
    case = check.prepare(padded, "cpu", 0)

    def pad(q, k, v, out, lse):
        torch.as_strided(out, (1,), (1,), out.storage_offset() + 9).zero_()

    assert "outside out" in check.check(then(padded, pad), case).message


def test_a_kernel_that_damages_the_inputs_spoils_no_later_trial():
    """T05, O19: later candidates are judged on the inputs that were drawn, by the oracle and not by each other."""
    of = problem()
    case = check.prepare(of, "cpu", 0)

    def greedy(q, k, v, out, lse):
        k[0, 0, 3, 5] += 1

    result = check.check(then(of, greedy), case)
    assert not result.ok and "inputs" in result.message
    assert [check.check(right(of), case).ok for _ in range(4)] == [True] * 4


def test_errors_of_the_launch_go_through():
    def broken(*tensors):
        raise RuntimeError("misaligned address")

    with pytest.raises(RuntimeError, match="misaligned"):
        check.check(broken, check.prepare(problem(), "cpu", 0))


def test_winners_pass_the_stress():
    of = problem()
    seen = []

    def launch(query, key, value, out, lse, scale):
        seen.append((scale, float(query[0, 0, 0, 0])))
        right(of)(query, key, value, out, lse, scale)

    result = check.stress(launch, of, "cpu", seed=3, repeats=4)
    assert result.ok, result.message
    assert len(seen) == 4 + 4 and {scale for scale, _ in seen} == {1 / math.sqrt(32), 1.0, 0.125, 0.0}
    assert len({drawn for _, drawn in seen}) == 4  # fresh inputs for every scale
    with pytest.raises(ArgumentError):
        check.stress(launch, of, "cpu", seed=3, scales=())


def test_now_and_then_wrong_is_wrong():
    """T07: wrong in one of twenty runs, by less than any tolerance."""
    of, chance = problem(), random.Random(1)

    def flaky(q, k, v, out, lse):
        if chance.random() < 0.05:
            out[0, 0, 20, 0] = out[0, 0, 20, 0] * 1.001

    result = check.stress(then(of, flaky), of, "cpu", seed=0)
    assert not result.ok and "on the same inputs gave another result" in result.message


@pytest.mark.parametrize("good", [0.125, 1.0])
def test_right_for_one_scale_only_is_wrong(good):
    """T07: the scale is a run-time argument; a kernel that has one built in is wrong."""
    of = problem(head_dim_qk=64)

    def launch(query, key, value, out, lse, scale):
        right(of)(query, key, value, out, lse, good)

    assert check.check(launch, check.prepare(of, "cpu", 0, good)).ok
    result = check.stress(launch, of, "cpu", seed=0, repeats=0)
    assert not result.ok and "with scale" in result.message


def test_results_of_others_can_be_judged():
    """Peers return tensors of their own."""
    of = problem()
    case = check.prepare(of, "cpu", 0)
    out, lse = reference.plain(case.query, case.key, case.value, mask="causal")
    assert check.judge(out, None, case).ok and check.judge(out, lse, case).ok
    assert not check.judge(out.roll(1, dims=-1), None, case).ok


# ---- backward --------------------------------------------------------------------------------------------------------------


def backward_problem(**fields):
    return problem(**(dict(direction="backward") | fields))


def grouped(tensor, heads_kv):
    return tensor.unflatten(1, (heads_kv, -1)).sum(2)


def right_backward(of, *, delta_of=None, scores_of=None, weights_of=None, slopes_of=None, group=True):
    """A right backward kernel: sums in float32, in another order than the yardstick's, with exponentials to base 2; or one with a fault.

    The functions put something else in a step's place: row sums, visible scores, weights, and the gradients of the scores.
    """

    def same(tensor):
        return tensor

    def launch(query, key, value, out, lse, dout, dlse, dq, dk, dv, scale):
        turned = (t.transpose(1, 2) if of.layout == "bshd" else t for t in (query, key, value, out, dout))
        q, k, v, o, do = (t.float() for t in turned)
        heads_kv, times = of.heads_kv, of.heads_q // of.heads_kv
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        sees = reference.visibility(of.mask, of.window, of.seqlen_q, of.seqlen_kv)
        scores = (scores_of or same)((q @ k.transpose(-1, -2)) * scale)
        powers = (scores - lse[..., None]) / math.log(2)
        weights = torch.exp2(powers.masked_fill(~sees | (lse == -math.inf)[..., None], -math.inf))
        weights = (weights_of or same)(weights)
        delta = (do.flip(-1) * o.flip(-1)).sum(-1) - (0 if dlse is None else dlse)
        delta = delta if delta_of is None else delta_of(delta, dlse)
        slopes = weights * (do @ v.transpose(-1, -2) - delta[..., None])
        slopes = (slopes_of or same)(slopes).to(query.dtype).float().flip(-1).flip(-2)
        weights = weights.to(query.dtype).float().flip(-2)
        results = (
            slopes.flip(-2) @ k.flip(-2) * scale,
            grouped(slopes.flip(-1).transpose(-1, -2) @ q.flip(-2) * scale, heads_kv),
            grouped(weights.transpose(-1, -2) @ do.flip(-2), heads_kv),
        )
        for written, result in zip((dq, dk, dv), results):
            written.copy_((result.transpose(1, 2) if of.layout == "bshd" else result).to(written.dtype))

    return launch


def then_backward(of, spoil):
    """A right backward kernel whose gradients are spoiled afterwards."""

    def launch(*tensors):
        right_backward(of)(*tensors)
        spoil(*tensors[7:10])

    return launch


BACKWARD_PROBLEMS = [
    backward_problem(),
    backward_problem(mask="full", return_lse=False),
    backward_problem(mask="causal_top_left", window=(7, None), layout="bshd"),
    backward_problem(dtype="bfloat16", mask="full", window=(9, 4)),
    backward_problem(dtype="bfloat16", heads_q=12, heads_kv=3, batch=1, return_lse=False),
    backward_problem(dtype="float32"),
    backward_problem(dtype="float32", layout="bshd", head_dim_qk=10, head_dim_v=20),
    backward_problem(aligned_16=False, head_dim_qk=24),
    backward_problem(head_dim_v=9, return_lse=False),
    backward_problem(dtype="bfloat16", seqlen_kv=1),
    backward_problem(seqlen_q=1, seqlen_kv=1, batch=1, heads_q=1, heads_kv=1, dtype="bfloat16", return_lse=False),
    backward_problem(seqlen_q=2, seqlen_kv=2, batch=1, heads_q=1, heads_kv=1, dtype="bfloat16"),
    backward_problem(seqlen_q=1, seqlen_kv=300, heads_kv=1),
    backward_problem(seqlen_q=5, seqlen_kv=2, batch=1, heads_q=1, heads_kv=1),
    backward_problem(seqlen_kv=0),
    backward_problem(seqlen_q=0),
]


@pytest.mark.parametrize("of", BACKWARD_PROBLEMS, ids=str)
@pytest.mark.parametrize("scale", [None, 1.0, -0.3, 0.0])
def test_right_backward_kernels_pass(of, scale):
    for seed, expanded in ((0, False), (1, False), (2, True)):
        case = check.prepare_backward(of, "cpu", seed, scale, expanded_dout=expanded)
        result = check.check_backward(right_backward(of), case)
        assert result.ok, result.message
        assert result.error <= result.tolerance and result.message == ""


def test_honest_backward_kernels_have_room_and_no_more():
    """N12, N29: limits lie within a small factor of what is reached, flat in length and far below 1 %."""
    for length in (64, 512):
        for dtype, most in (("bfloat16", 0.0045), ("float16", 0.0006), ("float32", 1e-5)):
            of = backward_problem(dtype=dtype, seqlen_q=length, seqlen_kv=length, head_dim_qk=64, head_dim_v=64, batch=1)
            case = check.prepare_backward(of, "cpu", 5)
            assert check.check_backward(right_backward(of), case).ok
            for got, wanted, size, limits in zip(case.gradients, case.expected, case.sizes, case.limits):
                errors = measures.errors_of(got, None, wanted, None, size.typical)
                assert errors.relative < limits.relative / 1.35 < most / 1.35
                assert errors.block < limits.block / 2 < 0.0045
                assert errors.absolute < limits.absolute / 1.5


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_backward_limits_are_near_what_pytorch_reaches(mask):
    """A kernel that passes has at most one and a half times the error of PyTorch's own backward in bfloat16, on the whole."""
    of = backward_problem(
        dtype="bfloat16", seqlen_q=256, seqlen_kv=256, head_dim_qk=64, head_dim_v=64, heads_kv=4, mask=mask, return_lse=False
    )
    for scale in (None, 1.0):
        case = check.prepare_backward(of, "cpu", 0, scale)
        leaves = [tensor.detach().clone().requires_grad_() for tensor in case.given[:3]]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=mask == "causal", scale=case.scale)
        found = torch.autograd.grad(out, leaves, case.given.dout)
        for got, wanted, size, limits in zip(found, case.expected, case.sizes, case.limits):
            errors = measures.errors_of(got, None, wanted, None, size.typical)
            assert limits.relative < 1.5 * 1.05 * errors.relative


def first_head_only(of):
    """dk and dv of the first query head of each group."""

    def launch(*tensors):
        right_backward(of)(*tensors)
        query, key, value, out, lse, dout, dlse, _, dk, dv, scale = tensors
        few = backward_problem(heads_q=of.heads_kv, heads_kv=of.heads_kv)
        every = slice(None, None, of.heads_q // of.heads_kv)
        these = (query[:, every], key, value, out[:, every], lse[:, every], dout[:, every], dlse[:, every])
        right_backward(few)(*these, torch.empty_like(query[:, every]), dk, dv, scale)

    return launch


def heads_modulo(dq, dk, dv):
    dk.copy_(dk.flip(1))
    dv.copy_(dv.flip(1))


def nan_in(name):
    def spoil(**gradients):
        gradients[name][1, 1, 40, 3] = math.nan

    return lambda dq, dk, dv: spoil(dq=dq, dk=dk, dv=dv)


def scaled(name, factor):
    def spoil(**gradients):
        gradients[name].mul_(factor)

    return lambda dq, dk, dv: spoil(dq=dq, dk=dk, dv=dv)


def without_tile(tensor):
    tensor = tensor.clone()
    tensor[1, 2, 64:80, 16:32] = 0
    return tensor


def late_gradient_row(dq, dk, dv):
    dq[1, 3, 90] = dq[1, 3, 89].clone()


def gradient_of_hidden_rows(dq, dk, dv):
    dq[:, :, :16] = 1e-2


WRONG_BACKWARD = {
    "scale forgotten in dq": then_backward(backward_problem(), scaled("dq", math.sqrt(32))),
    "scale forgotten in dk": then_backward(backward_problem(), scaled("dk", math.sqrt(32))),
    "scale taken twice": right_backward(backward_problem(), scores_of=lambda scores: scores / math.sqrt(32)),
    "1 % of dv": then_backward(backward_problem(), scaled("dv", 1.01)),
    "1 % of dk": then_backward(backward_problem(), scaled("dk", 1.01)),
    "1 % of dq": then_backward(backward_problem(), scaled("dq", 1.01)),
    "delta forgotten": right_backward(backward_problem(), delta_of=lambda delta, dlse: -dlse),
    "delta with the wrong sign": right_backward(backward_problem(), delta_of=lambda delta, dlse: -delta),
    "dlse forgotten": right_backward(backward_problem(), delta_of=lambda delta, dlse: delta + dlse),
    "dlse with the wrong sign": right_backward(backward_problem(), delta_of=lambda delta, dlse: delta + 2 * dlse),
    "dlse of another row": right_backward(backward_problem(), delta_of=lambda delta, dlse: delta + dlse - dlse.roll(1, -1)),
    "lse to base 2": right_backward(backward_problem(), scores_of=lambda scores: scores * math.log(2)),
    "a head of the group missing": first_head_only(backward_problem()),
    "another key/value head": then_backward(backward_problem(), heads_modulo),
    "dk and dv exchanged": lambda *t: right_backward(backward_problem(head_dim_v=32))(*t[:8], t[9], t[8], t[10]),
    "weights transposed": right_backward(backward_problem(seqlen_kv=96), weights_of=lambda weights: weights.transpose(-1, -2)),
    "slopes transposed": right_backward(backward_problem(seqlen_kv=96), slopes_of=lambda slopes: slopes.transpose(-1, -2)),
    "a tile missing": right_backward(backward_problem(), weights_of=without_tile),
    "a tile of slopes missing": right_backward(backward_problem(), slopes_of=without_tile),
    "NaN in dq": then_backward(backward_problem(), nan_in("dq")),
    "NaN in dk": then_backward(backward_problem(), nan_in("dk")),
    "NaN in dv": then_backward(backward_problem(), nan_in("dv")),
    "another row": then_backward(backward_problem(), late_gradient_row),
    "rows without a key": then_backward(backward_problem(), gradient_of_hidden_rows),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("fault", WRONG_BACKWARD)
def test_wrong_gradients_are_wrong(fault, dtype):
    """G01, G04, G05 and kin."""
    shape = dict(head_dim_v=32) if "exchanged" in fault else dict(seqlen_kv=96) if "transposed" in fault else {}
    of = backward_problem(dtype=dtype, **shape)
    result = check.check_backward(WRONG_BACKWARD[fault], check.prepare_backward(of, "cpu", 0))
    assert not result.ok and result.message
    if fault.startswith("NaN"):
        assert result.error is None
        assert result.message.startswith("1 of") and f"elements of {fault[-2:]} were never written" in result.message
    else:
        assert result.error > 0 and " error of d" in result.message and "worst at batch" in result.message


def test_a_forgotten_delta_is_found_where_keys_are_many():
    """The row sum of dout * out of random tensors vanishes beside its terms; that of a check does not."""
    of = backward_problem(
        batch=1, heads_q=1, heads_kv=1, seqlen_q=16, seqlen_kv=32768, mask="full", dtype="bfloat16", head_dim_v=64, return_lse=False
    )
    case = check.prepare_backward(of, "cpu", 0)
    assert check.check_backward(right_backward(of), case).ok
    result = check.check_backward(right_backward(of, delta_of=lambda delta, dlse: torch.zeros_like(delta)), case)
    assert not result.ok and "of dq" in result.message


def test_backward_masks_off_by_one_are_wrong():
    of = backward_problem(seqlen_q=80)
    case = check.prepare_backward(of, "cpu", 0)
    for other in (
        backward_problem(seqlen_q=80, mask="full"),
        backward_problem(seqlen_q=80, window=(70, None)),
        backward_problem(seqlen_q=80, mask="full", window=(None, 1)),
    ):
        assert not check.check_backward(right_backward(other), case).ok
    wide, narrow = backward_problem(window=(8, None)), backward_problem(window=(7, None))
    assert not check.check_backward(right_backward(narrow), check.prepare_backward(wide, "cpu", 0)).ok


def test_every_backward_run_starts_from_nan():
    """Gradients that are added to what is there are NaN, and those that are not written, too."""
    of = backward_problem()
    case = check.prepare_backward(of, "cpu", 0)

    def adding(*tensors):
        fresh = [torch.zeros_like(tensor) for tensor in tensors[7:10]]
        right_backward(of)(*tensors[:7], *fresh, tensors[10])
        for written, gradient in zip(tensors[7:10], fresh):
            written.add_(gradient)

    assert check.check_backward(right_backward(of), case).ok
    for wrong in (adding, lambda *tensors: None):
        result = check.check_backward(wrong, case)
        assert not result.ok and result.error is None and "24576 of 24576 elements of dq" in result.message
    assert check.check_backward(right_backward(of), case).ok


def test_what_surrounds_the_inputs_of_a_backward_kernel_is_nan():
    """N22, N24, G02."""
    for of in (backward_problem(head_dim_qk=20, head_dim_v=20), backward_problem(aligned_16=False)):
        for expanded in (False, True):
            case = check.prepare_backward(of, "cpu", 0, expanded_dout=expanded)
            given = case.given
            for name, tensor in given._asdict().items():
                assert not tensor.isnan().any()
                whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
                filled = of.head_dim_v if expanded and name == "dout" else tensor.numel()
                assert int((~whole.isnan()).sum()) == filled and whole[: check.GUARD].isnan().all() and whole[-check.GUARD :].isnan().all()
            assert (given.dout.stride() == (0, 0, 0, 1)) == expanded
            assert given.lse.dtype == given.dlse.dtype == torch.float32
            assert check.prepare_backward(of, "cpu", 0, expanded_dout=expanded).fingerprint == case.fingerprint
    assert check.prepare_backward(backward_problem(return_lse=False), "cpu", 0).given.dlse is None


@pytest.mark.parametrize("place", [check.GUARD - 1, -check.GUARD])
@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_writes_outside_the_gradients_are_found(place, name):
    """T05."""
    of = backward_problem()
    case = check.prepare_backward(of, "cpu", 0)

    def stray(*ignored):
        getattr(case.buffers, name)[place] = 0.0

    result = check.check_backward(then_backward(of, stray), case)
    assert not result.ok and f"outside {name}" in result.message
    padded = backward_problem(head_dim_v=9, head_dim_qk=9)
    case = check.prepare_backward(padded, "cpu", 0)

    def pad(dq, dk, dv):
        gradient = {"dq": dq, "dk": dk, "dv": dv}[name]
        torch.as_strided(gradient, (1,), (1,), gradient.storage_offset() + 9).zero_()

    assert f"outside {name}" in check.check_backward(then_backward(padded, pad), case).message


@pytest.mark.parametrize("place", range(7))
def test_a_backward_kernel_that_damages_its_inputs_spoils_no_later_trial(place):
    """T05, O19."""
    of = backward_problem()
    for expanded in (False, True):
        case = check.prepare_backward(of, "cpu", 0, expanded_dout=expanded)

        def greedy(*tensors):
            right_backward(of)(*tensors)
            tensors[place].view(-1)[-1:].add_(1) if tensors[place].is_contiguous() else tensors[place][-1, -1, -1, -1:].add_(1)

        result = check.check_backward(greedy, case)
        assert not result.ok and "inputs" in result.message
        assert check.check_backward(right_backward(of), case).ok


def test_gradients_that_are_not_wanted_are_left_out():
    """G08."""
    case = check.prepare_backward(backward_problem(), "cpu", 0)
    right_backward(backward_problem())(*case.given, *case.gradients, case.scale)
    dq, dk, dv = case.gradients
    for wanted in ((dq, None, None), (None, dk, dv), (None, None, None)):
        assert check.judge_backward(*wanted, case).ok
    dq.mul_(2)
    assert check.judge_backward(None, dk, dv, case).ok and not check.judge_backward(dq, dk, dv, case).ok


def test_each_direction_has_its_own_check():
    with pytest.raises(ArgumentError, match="direction is 'forward'"):
        check.prepare_backward(problem(), "cpu", 0)
    with pytest.raises(UnsupportedError, match="direction is 'backward'"):
        check.prepare(backward_problem(), "cpu", 0)


def test_backward_winners_pass_the_stress():
    of = backward_problem()
    seen = []

    def launch(*tensors):
        seen.append((tensors[10], float(tensors[0][0, 0, 0, 0])))
        right_backward(of)(*tensors)

    result = check.stress_backward(launch, of, "cpu", seed=3, repeats=4)
    assert result.ok, result.message
    assert len(seen) == 4 + 4 and {scale for scale, _ in seen} == {1 / math.sqrt(32), 1.0, -0.125, 0.0}
    assert len({drawn for _, drawn in seen}) == 4  # fresh inputs for every scale
    with pytest.raises(ArgumentError):
        check.stress_backward(launch, of, "cpu", seed=3, scales=())


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_gradients_that_are_now_and_then_wrong_are_wrong(name):
    """T07, G09: other bits in one of twenty runs; those of dq may be in the kernel's order of work, but dq must be right each time."""
    of = backward_problem()

    def flaky(factor):
        chance = random.Random(1)

        def spoil(dq, dk, dv):
            if chance.random() < 0.05:
                {"dq": dq, "dk": dk, "dv": dv}[name][0, 0, 20, 0] *= factor

        return then_backward(of, spoil)

    result = check.stress_backward(flaky(1.001), of, "cpu", seed=0, scales=[None], repeats=40)
    assert not result.ok and result.message.endswith(f"on the same inputs gave another {name}")
    assert check.stress_backward(flaky(1.001), of, "cpu", seed=0, scales=[None], repeats=40, same_dq=False).ok == (name == "dq")
    result = check.stress_backward(flaky(100.0), of, "cpu", seed=0, scales=[None], repeats=40, same_dq=False)
    assert not result.ok and name in result.message


@pytest.mark.parametrize("good", [-0.125, 1.0])
def test_gradients_that_are_right_for_one_scale_only_are_wrong(good):
    """T07"""
    of = backward_problem()

    def launch(*tensors):
        right_backward(of)(*tensors[:10], good)

    assert check.check_backward(launch, check.prepare_backward(of, "cpu", 0, good)).ok
    result = check.stress_backward(launch, of, "cpu", seed=0, repeats=0)
    assert not result.ok and "with scale" in result.message
