"""The closed forms give the published figures, and the bound is below every truth."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen import theory
from flashgen.device import Device
from flashgen.errors import ArgumentError
from flashgen.problem import Problem

H100 = Device.named("h100")


def problem(**changes):
    values = dict(batch=2, heads_q=4, heads_kv=2, seqlen_q=256, seqlen_kv=256, head_dim_qk=64, head_dim_v=64)
    return Problem(**(values | changes))


@pytest.mark.parametrize(("seqlen", "head_dim", "ratio"), [(8192, 128, 11.8), (8192, 64, 39.7), (512, 128, 3.9)])
def test_traffic_ratios_of_the_anchor_table(seqlen, head_dim, ratio):
    assert round(theory.layer(seqlen, head_dim, 32, H100).traffic_ratio, 1) == ratio


def test_times_and_scores_of_the_anchor_table():
    model = theory.layer(8192, 128, 32, H100)
    assert round(model.standard_time_s * 1e3, 1) == 5.2
    assert round(model.flash_time_s * 1e3, 1) == 1.1
    assert round(model.time_ratio, 1) == 4.7
    assert round(model.score_bytes / 1e9, 1) == 4.3
    assert round(theory.layer(131072, 128, 32, H100).score_bytes / 1e12, 1) == 1.1


def test_elements_are_per_head_and_the_rest_over_all_heads():
    one, many = theory.layer(4096, 128, 1, H100), theory.layer(4096, 128, 7, H100)
    assert (one.standard_elements, one.flash_elements, one.traffic_ratio) == (
        many.standard_elements,
        many.flash_elements,
        many.traffic_ratio,
    )
    assert many.score_bytes == 7 * one.score_bytes == 7 * 2 * 4096**2
    assert many.standard_time_s == pytest.approx(7 * one.standard_time_s)


def test_backward_traffic_is_that_of_theorem_5():
    """FlashAttention (2022), Theorem 5: N d + N^2 for standard attention, N^2 d^2 / M for FlashAttention, up to constants."""
    sram = 116_736
    for seqlen, dim in itertools.product((1024, 8192, 65536), (64, 128)):
        standard, flash = theory.standard_elements(seqlen, dim, "backward"), theory.flash_elements(seqlen, dim, sram, "backward")
        assert standard == 7 * (seqlen * dim + seqlen**2)
        assert flash == 8 * seqlen * dim + 4 * seqlen**2 * dim**2 / sram
        assert theory.flash_elements(2 * seqlen, dim, sram, "backward") < 4 * flash
    long = theory.layer(1 << 20, 128, 1, H100, direction="backward")
    assert long.traffic_ratio == pytest.approx(7 / 4 * sram / 128**2, rel=0.01)


def test_a_backward_layer_computes_scores_anew_and_is_faster_for_it():
    model, forward = theory.layer(8192, 128, 32, H100, direction="backward"), theory.layer(8192, 128, 32, H100)
    assert model.flash_time_s == pytest.approx(32 * 10 * 8192**2 * 128 / 989e12)  # by arithmetic
    assert model.standard_time_s == pytest.approx(32 * 2 * 7 * (8192**2 + 8192 * 128) / 3.35e12)  # by memory
    assert 1.7 < model.standard_time_s / forward.standard_time_s < 1.8
    assert 3 < model.time_ratio < forward.time_ratio
    assert model.score_bytes == forward.score_bytes
    with pytest.raises(ArgumentError, match="direction is 'back'; it must be one of forward, backward"):
        theory.layer(8192, 128, 32, H100, direction="back")


def test_on_chip_memory_is_228_kib_in_elements():
    assert theory.layer(8192, 128, 32, H100) == theory.layer(8192, 128, 32, H100, sram_bytes=2 * 116736)
    assert theory.layer(8192, 128, 32, H100, sram_bytes=100 * 1024).traffic_ratio < theory.layer(8192, 128, 32, H100).traffic_ratio


def test_elements_of_four_bytes_move_twice_the_bytes_at_the_fp32_rate():
    model = theory.layer(8192, 128, 32, H100, element_bytes=4)
    assert model.score_bytes == 4 * 8192**2 * 32
    assert model.flash_time_s == pytest.approx(32 * theory.flash_flops(8192, 128) / 67e12)


@pytest.mark.parametrize("name", ["seqlen", "head_dim", "heads", "sram_bytes", "element_bytes"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_bad_figures_are_refused_by_name(name, value):
    values = dict(seqlen=1024, head_dim=64, heads=8, sram_bytes=1024, element_bytes=2) | {name: value}
    with pytest.raises(ArgumentError, match=name):
        theory.layer(device=H100, **values)


def test_roofline_takes_the_slower_of_arithmetic_and_memory():
    assert theory.roofline(989e12, 0, H100) == pytest.approx(1)
    assert theory.roofline(0, 3.35e12, H100) == pytest.approx(1)
    assert theory.roofline(989e12, 2 * 3.35e12, H100) == pytest.approx(2)
    assert theory.roofline(67e12, 0, H100, "float32") == pytest.approx(1)


def seen(problem):
    """The visible (query, key) pairs, from the documented words and not from the band."""
    left, right = problem.window
    offset = 0 if problem.mask == "causal_top_left" else problem.seqlen_kv - problem.seqlen_q
    for i, j in itertools.product(range(problem.seqlen_q), range(problem.seqlen_kv)):
        inside = (left is None or j >= i + offset - left) and (right is None or j <= i + offset + right)
        if inside and (problem.mask == "full" or j <= i + offset):
            yield i, j


sides = st.none() | st.integers(0, 12)
small_problems = st.builds(
    Problem,
    batch=st.integers(1, 2),
    heads_q=st.sampled_from([2, 4]),
    heads_kv=st.sampled_from([1, 2]),
    seqlen_q=st.integers(0, 9),
    seqlen_kv=st.integers(0, 9),
    head_dim_qk=st.just(8),
    head_dim_v=st.just(16),
    mask=st.sampled_from(["full", "causal", "causal_top_left"]),
    window=st.tuples(sides, sides),
)


@given(small_problems)
def test_compulsory_reads_are_what_visible_pairs_need(problem):
    pairs = list(seen(problem))
    queries, keys = {i for i, _ in pairs}, {j for _, j in pairs}
    rows_q, rows_kv = len(queries) * problem.heads_q, len(keys) * problem.heads_kv
    assert theory.compulsory_read_bytes(problem) == problem.batch * 2 * (8 * rows_q + (8 + 16) * rows_kv)
    backward = replace(problem, direction="backward")
    row_bytes = {False: 2 * (8 + 16 + 16) + 4, True: 2 * (8 + 16 + 16) + 4 + 4}  # q, out, dout, lse; and dlse
    for with_dlse, each in row_bytes.items():
        wanted = problem.batch * (each * rows_q + 2 * (8 + 16) * rows_kv)
        assert theory.compulsory_read_bytes(replace(backward, return_lse=with_dlse)) == wanted


def test_compulsory_writes_are_the_output_and_the_lse():
    assert theory.compulsory_write_bytes(problem()) == 2 * 4 * 256 * 64 * 2
    assert theory.compulsory_write_bytes(problem(return_lse=True)) == 2 * 4 * 256 * (64 * 2 + 4)
    assert theory.compulsory_bytes(problem()) == (4 + 2 + 2 + 4) * 2 * 256 * 64 * 2  # q, k, v, out


def test_backward_writes_three_gradients():
    backward = problem(direction="backward", seqlen_kv=128, head_dim_v=32)
    assert theory.compulsory_write_bytes(backward) == 2 * 2 * (4 * 256 * 64 + 2 * 128 * (64 + 32))
    assert theory.compulsory_write_bytes(replace(backward, return_lse=True)) == theory.compulsory_write_bytes(backward)


def test_backward_has_five_products():
    long = problem(direction="backward", seqlen_q=8192, seqlen_kv=8192)
    assert theory.bound_s(long, H100) == pytest.approx(2.5 * theory.bound_s(replace(long, direction="forward"), H100))
    assert theory.bound_s(problem(direction="backward", seqlen_kv=0), H100) == 0


def test_bound_takes_the_highest_clock_and_no_writes():
    long = problem(seqlen_q=8192, seqlen_kv=8192)
    assert theory.bound_s(long, H100) == pytest.approx(long.flops / (989e12 * 1.98 / 1.83))
    decode = problem(seqlen_q=1, seqlen_kv=65536)
    assert theory.bound_s(decode, H100) == pytest.approx(theory.compulsory_read_bytes(decode) / 3.35e12)
    assert theory.bound_s(problem(dtype="float32"), H100) > 10 * theory.bound_s(problem(), H100)


@pytest.mark.parametrize("empty", [dict(batch=0), dict(seqlen_q=0), dict(seqlen_kv=0)])
def test_bound_of_nothing_is_zero(empty):
    assert theory.bound_s(problem(**empty), H100) == 0


# Fastest known times on an H200 at 16k tokens, in TFLOP/s (FA4, cuDNN; bf16): the bound must stay below them all.
@pytest.mark.parametrize(
    ("head_dim", "mask", "seqlen", "tflops"),
    [(64, "full", 8192, 559), (128, "full", 16384, 702), (128, "causal", 16384, 673), (256, "full", 8192, 740), (256, "causal", 8192, 714)],
)
def test_bound_is_below_what_was_measured(head_dim, mask, seqlen, tflops):
    heads = 2048 // head_dim
    cell = problem(
        batch=2, heads_q=heads, heads_kv=heads, seqlen_q=seqlen, seqlen_kv=seqlen, head_dim_qk=head_dim, head_dim_v=head_dim, mask=mask
    )
    assert theory.bound_s(cell, Device.named("h200")) < cell.flops / (tflops * 1e12)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_causal_mask_halves_what_grows_with_the_square_of_the_length_for_flash_attention_alone(direction):
    full, causal = (theory.layer(65536, 128, 32, H100, direction=direction, causal=causal) for causal in (False, True))
    once = theory.flash_elements(65536, 128, float("inf"), direction)
    assert causal.flash_elements - once == pytest.approx((full.flash_elements - once) / 2)
    assert causal.flash_time_s == pytest.approx(full.flash_time_s / 2)
    assert (causal.standard_elements, causal.standard_time_s) == (full.standard_elements, full.standard_time_s)
