"""The check finds every kind of wrong kernel, and lets right ones pass. Kernels are played by functions on CPU tensors."""

import math
import random

import pytest
import torch

from flashgen import check, reference
from flashgen.errors import ArgumentError
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
            errors = check._errors(case.out, case.lse, case.expected, case.expected_lse, case.typical)
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
