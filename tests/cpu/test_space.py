"""Every legal candidate can work, every other has a named reason, and no two are the same kernel."""

import dataclasses
import itertools
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen import resources, space
from flashgen.candidate import Candidate, Config, Variant
from flashgen.device import DEVICES, Device
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.problem import Problem

H200, A100 = Device.named("h200"), Device.named("a100")


def problem(**changes):
    values = dict(batch=2, heads_q=16, heads_kv=16, seqlen_q=2048, seqlen_kv=2048, head_dim_qk=128, head_dim_v=128, mask="causal")
    return Problem(**(values | changes))


def candidate(load="tma", mask="causal", masked_apart=True, longest_first=False, **numbers):
    values = dict(block_m=128, block_n=64, num_warps=8, num_stages=2)
    return Candidate(
        variant=Variant(mask=mask, load=load, masked_apart=masked_apart, longest_first=longest_first), config=Config(**(values | numbers))
    )


def names(found):
    return {message.split(":")[0] for message in found}


def drawn(deterministic, float16_dq, **values):
    """A problem, which states what its direction and dtype let it state."""
    deterministic &= values["direction"] == "backward"
    float16_dq &= values["direction"] == "backward" and values["dtype"] != "float32" and not deterministic
    return Problem(**values, deterministic=deterministic, float16_dq=float16_dq)


any_problem = st.builds(
    drawn,
    direction=st.sampled_from(["forward", "backward"]),
    deterministic=st.booleans(),
    float16_dq=st.booleans(),
    batch=st.integers(0, 3),
    heads_q=st.sampled_from([2, 6, 32]),
    heads_kv=st.sampled_from([1, 2]),
    seqlen_q=st.sampled_from([0, 1, 17, 64, 100, 128, 1000, 4096]),
    seqlen_kv=st.sampled_from([0, 1, 15, 33, 128, 1000, 4096]),
    head_dim_qk=st.sampled_from([1, 8, 40, 64, 128, 192, 256]),
    head_dim_v=st.sampled_from([1, 8, 64, 128, 256]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    mask=st.sampled_from(["full", "causal", "causal_top_left"]),
    window=st.sampled_from([(None, None), (128, 0), (0, 0), (None, 30), (64, 64)]),
    return_lse=st.booleans(),
    aligned_16=st.booleans(),
)
any_device = st.sampled_from(sorted(DEVICES)).map(Device.named)


@settings(deadline=None, max_examples=25)
@given(any_problem, any_device)
def test_no_problem_is_without_candidates_and_default_is_one_of_them(problem, device):
    found = space.candidates(problem, device)
    assert found
    assert len(set(found)) == len(found)
    assert space.default(problem, device) in set(found)
    for each in found[:: max(1, len(found) // 20)]:
        assert space.violations(each, problem, device) == []


@settings(deadline=None, max_examples=25)
@given(any_problem, any_device)
def test_candidates_and_rejected_ones_make_up_the_grid(problem, device):
    grid = sum(math.prod(map(len, space.axes(problem, device, backend).values())) for backend in space.backends(problem, device))
    assert len(space.candidates(problem, device)) + sum(space.rejected(problem, device).values()) == grid


@settings(deadline=None, max_examples=60)
@given(any_problem, any_device, st.data())
def test_a_point_of_the_grid_is_legal_exactly_if_it_is_listed(problem, device, data):
    backend = data.draw(st.sampled_from(space.backends(problem, device)))
    values = {name: data.draw(st.sampled_from(choices), label=name) for name, choices in space.axes(problem, device, backend).items()}
    point = space.from_axes(problem, device, values)
    assert (space.violations(point, problem, device) == []) == (point in set(space.candidates(problem, device)))


@settings(deadline=None, max_examples=60)
@given(any_problem, any_device, any_problem, any_device)
def test_a_carried_over_candidate_is_legal_or_none(source, source_device, target, target_device):
    for picked in (space.default(source, source_device), space.portable_default(source, source_device)):
        adapted = space.adapt(picked, target, target_device)
        assert adapted is None or space.violations(adapted, target, target_device) == []
        assert adapted is None or source.direction == target.direction


def test_the_space_is_large_enough_to_search_and_small_enough_to_rank():
    for head_dim, mask, dtype in itertools.product((64, 128, 256), ("full", "causal"), ("bfloat16", "float32")):
        count = len(space.candidates(problem(head_dim_qk=head_dim, head_dim_v=head_dim, mask=mask, dtype=dtype), H200))
        assert 40 <= count <= (3500 if dtype == "bfloat16" else 4500)


def test_enumeration_is_quick():
    space._explored.cache_clear()
    start = time.process_time()
    space.candidates(problem(), H200)
    assert time.process_time() - start < 1.5  # about 0.2 s on an idle core


def test_order_is_fixed():
    first = space.candidates(problem(), H200)
    space._explored.cache_clear()
    assert space.candidates(problem(), H200) == first


def test_known_good_kernels_are_legal():
    """128 x 128, 8 warps, 3 stages by TMA is what reached 504 TFLOP/s on an H200."""
    full = problem(mask="full")
    assert space.violations(candidate(mask="full", block_n=128, num_stages=3), full, H200) == []
    assert space.violations(candidate(mask="full", load="pointer", num_stages=3), full, H200) == []
    assert space.violations(candidate(longest_first=True, head_group=16, persistent=True), problem(), H200) == []


@pytest.mark.parametrize(
    ("dim", "numbers"),
    [
        (64, dict(block_m=128, block_n=64, num_warps=4, num_stages=3)),
        (64, dict(block_m=128, block_n=128, num_warps=4, num_stages=2)),
        (64, dict(block_m=128, block_n=32, num_warps=4, num_stages=4)),
        (128, dict(block_m=64, block_n=64, num_warps=4, num_stages=1, persistent=True)),
        (128, dict(block_m=128, block_n=64, num_warps=8, num_stages=4)),
        (128, dict(block_m=128, block_n=64, num_warps=4, num_stages=1)),
        (128, dict(block_m=64, block_n=128, num_warps=4, num_stages=3)),
        (256, dict(block_m=128, block_n=128, num_warps=8, num_stages=1)),
        (256, dict(block_m=64, block_n=64, num_warps=4, num_stages=1)),
        (256, dict(block_m=128, block_n=32, num_warps=8, num_stages=3)),
    ],
)
def test_what_was_measured_fast_is_listed(dim, numbers):
    """The fastest tiles of 215 measured ones (H200, 2026-11-29); 128 x 128 with 4 warps fills all 255 registers."""
    full = problem(mask="full", head_dim_qk=dim, head_dim_v=dim)
    assert candidate(mask="full", **numbers) in space.candidates(full, H200)


def test_pointer_loads_need_a_pipeline_where_tma_could_do_without():
    assert names(space.violations(candidate(load="pointer", num_stages=1), problem(), H200)) == {"num_stages"}
    assert space.violations(candidate(load="pointer", num_stages=1), problem(aligned_16=False), H200) == []
    assert space.violations(candidate(load="pointer", num_stages=1), problem(), A100) == []


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("smem", dict(block_n=128, num_stages=4)),
        ("registers", dict(block_m=256, block_n=128)),
        ("registers", dict(block_n=128, num_warps=4)),
        ("warp_rows", dict(num_warps=16)),
        ("small_tile", dict(block_m=32, num_warps=2)),
        ("small_tile", dict(block_n=16)),
        ("block_m", dict(block_m=4096)),
        ("block_m", dict(block_m=8)),
        ("block_n", dict(block_n=48)),
        ("num_stages", dict(num_stages=60)),
        ("maxnreg", dict(maxnreg=168)),
        ("head_group", dict(head_group=64)),
        ("elements", dict(block_m=16384)),
        ("tma", dict(block_m=512)),
    ],
)
def test_each_limit_on_numbers_has_a_name_and_both_figures(name, numbers):
    messages = [message for message in space.violations(candidate(**numbers), problem(), H200) if message.startswith(f"{name}: ")]
    assert messages
    assert all(len([word for word in message.replace(",", " ").split() if any(map(str.isdigit, word))]) >= 2 for message in messages)


@pytest.mark.parametrize("num_warps", [3, 32, 64, 128])
def test_num_warps_beyond_the_hardware_or_odd_are_refused(num_warps):
    """T02: num_warps 3, 32 and 128 never reach the compiler."""
    assert space.violations(candidate(num_warps=num_warps), problem(), H200)


def test_too_much_shared_memory_is_refused_with_both_numbers():
    """T01: a configuration that needs more than 227 KB is not tried, and the message says by how much."""
    (message,) = space.violations(candidate(block_n=128, num_stages=4), problem(), H200)
    assert message == "smem: needs 295936 bytes, NVIDIA H200 has 232448"


def test_tma_needs_hopper_and_alignment():
    """T08: descriptors are only made for 16-byte strides, and only where the hardware has them."""
    assert "tma" in names(space.violations(candidate(), problem(), A100))
    assert "tma" in names(space.violations(candidate(), problem(aligned_16=False), H200))
    assert "tma" in names(space.violations(candidate(), problem(head_dim_qk=100), H200))
    assert "tma" in names(space.violations(candidate(), problem(seqlen_kv=0), H200))
    assert "tma" in names(space.violations(candidate(), problem(dtype="float32"), H200))
    assert space.axes(problem(), A100, "triton")["load"] == ["pointer"]
    assert space.axes(problem(aligned_16=False), H200, "triton")["load"] == ["pointer"]
    assert {each.variant.load for each in space.candidates(problem(), H200)} == {"tma", "pointer"}


def test_structure_that_the_problem_fixes_is_checked():
    assert names(space.violations(candidate(mask="full"), problem(), H200)) >= {"mask"}
    assert names(space.violations(candidate(), problem(return_lse=True), H200)) == {"store_lse"}
    assert names(space.violations(candidate(), problem(head_dim_qk=96), H200)) == {"padded"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(mask="full"), "full"),
        (dict(mask="causal"), "causal"),
        (dict(mask="causal_top_left", seqlen_kv=1000), "causal"),
        (dict(mask="full", window=(None, 5)), "causal"),
        (dict(mask="full", window=(5, None)), "window"),
        (dict(mask="causal", window=(128, None)), "window"),
    ],
)
def test_mask_kind_follows_the_band(changes, expected):
    assert space.required(problem(**changes))["mask"] == expected


@pytest.mark.parametrize(("dim", "padded"), [(64, False), (16, False), (8, True), (72, True), (1, True)])
def test_tiles_wider_than_the_head_dim_are_padded(dim, padded):
    assert space.required(problem(head_dim_v=dim))["padded"] is padded


def test_knobs_that_cannot_matter_are_refused():
    full = problem(mask="full")
    assert names(space.violations(candidate(mask="full", longest_first=True), full, H200)) == {"longest_first"}
    assert names(space.violations(candidate(mask="full", head_group=4), full, H200)) == {"head_group"}
    assert names(space.violations(candidate(mask="full", masked_apart=False), full, H200)) == {"masked_apart"}
    tail = problem(mask="full", seqlen_kv=2000)
    assert space.violations(candidate(mask="full", masked_apart=False), tail, H200) == []
    short = problem(seqlen_q=64, seqlen_kv=40)
    assert "masked_apart" in names(space.violations(candidate(block_m=64, num_warps=4, num_stages=1), short, H200))
    few = problem(batch=1, heads_q=4, heads_kv=4)
    assert names(space.violations(candidate(persistent=True), few, H200)) == {"persistent"}
    one_block = problem(seqlen_q=128)
    assert names(space.violations(candidate(head_group=4), one_block, H200)) == {"head_group"}


def test_a_cap_on_registers_must_let_another_program_in():
    narrow = problem(head_dim_qk=64, head_dim_v=64)
    capped = candidate(block_m=64, num_warps=4, maxnreg=96)
    assert space.violations(capped, narrow, H200) == []
    assert resources.programs_per_sm(4, 96, resources.smem_bytes(capped, narrow), H200) == 5
    for no_use in (104, 128):  # four programs fit anyway, with about 110 registers
        assert names(space.violations(candidate(block_m=64, num_warps=4, maxnreg=no_use), narrow, H200)) == {"maxnreg"}


def test_small_tiles_are_legal_only_for_want_of_work():
    decode = problem(seqlen_q=1, seqlen_kv=8192, mask="full")
    assert {each.config.block_m for each in space.candidates(decode, H200)} == {16}
    assert {each.config.block_m for each in space.candidates(problem(), H200)} == {64, 128, 192}
    assert {each.config.block_m for each in space.candidates(problem(), A100)} == {64, 128}
    few = problem(batch=1, heads_q=2, heads_kv=2, seqlen_q=512, seqlen_kv=512)
    assert {each.config.block_m for each in space.candidates(few, H200)} >= {16, 32, 64, 128}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_axes_and_candidates_convert_both_ways(backend, direction):
    choices = space.axes(problem(direction=direction), H200, backend)
    values = {name: options[0] for name, options in choices.items()}
    made = space.from_axes(problem(direction=direction), H200, values)
    for name, value in values.items():
        assert getattr(made.variant if hasattr(made.variant, name) else made.config, name) == value
    with pytest.raises(ArgumentError, match="axes are"):
        space.from_axes(problem(), H200, {"block_m": 128})


def test_variants_are_those_of_the_candidates():
    found = space.variants(problem(), H200)
    portable = [each for each in found if each.backend == "triton"]
    assert len(portable) == 8  # two loads, masked blocks apart or not, two orders
    assert len(found) - len(portable) == 4  # two orders of the products, in turns or not
    assert len(found) == len(set(found))
    assert {each.variant for each in space.candidates(problem(), H200)} == set(found)


@pytest.mark.parametrize("dim", [(64, 64), (128, 128), (256, 256), (192, 128)])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("device", [H200, A100], ids=["h200", "a100"])
def test_default_is_a_large_tile_with_a_pipeline(dim, mask, device):
    picked = space.default(problem(head_dim_qk=dim[0], head_dim_v=dim[1], mask=mask), device)
    assert picked.variant.backend == ("hopper" if device is H200 else "triton")
    assert picked.config.block_m == (192 if device is H200 and dim == (64, 64) else 128)
    assert picked.config.num_stages >= 2
    assert picked.variant.load == ("tma" if device is H200 else "pointer")
    assert picked.variant.longest_first == (mask == "causal")
    assert picked.variant.masked_apart


def test_adapt_keeps_what_it_can():
    winner = candidate(longest_first=True, head_group=16, persistent=True, num_stages=3)
    same = space.adapt(winner, problem(), H200)
    assert same == winner
    longer = space.adapt(winner, problem(seqlen_q=8192, seqlen_kv=8192, return_lse=True), H200)
    assert longer == dataclasses.replace(winner, variant=dataclasses.replace(winner.variant, store_lse=True))
    full = space.adapt(winner, problem(mask="full"), H200)
    assert (full.variant.longest_first, full.config.head_group, full.config.persistent) == (False, 1, True)
    older = space.adapt(winner, problem(), A100)
    assert older.variant.load == "pointer"
    assert space.adapt(winner, problem(aligned_16=False), H200).variant.load == "pointer"
    short = space.adapt(winner, problem(seqlen_q=60, seqlen_kv=60), H200)
    assert (short.config.block_m, short.config.block_n, short.config.num_warps, short.config.num_stages) == (64, 64, 4, 1)
    wide = space.adapt(candidate(num_stages=3), problem(head_dim_qk=256, head_dim_v=256), H200)
    assert wide.config.num_stages == 2  # three would not fit
    assert space.adapt(candidate(block_n=128), problem(head_dim_qk=256, head_dim_v=256, dtype="float32"), H200) is None


def test_adapt_drops_a_cap_that_no_longer_pays():
    narrow = problem(head_dim_qk=64, head_dim_v=64)
    capped = candidate(block_m=64, num_warps=4, maxnreg=96)
    assert space.adapt(capped, narrow, H200).config.maxnreg == 96
    assert space.adapt(capped, problem(), H200).config.maxnreg is None


def test_fp32_tiles_are_small_enough_for_registers():
    precise = problem(dtype="float32")
    small = candidate(load="pointer", block_m=32, block_n=32, num_warps=4)
    assert space.violations(small, precise, H200) == []
    assert "fma_tile" in names(space.violations(candidate(load="pointer", num_warps=4), precise, H200))


@pytest.mark.parametrize("numbers", [dict(num_warps=4096), dict(maxnreg=1), dict(block_m=3), dict(block_n=1 << 20), dict(num_stages=10**9)])
def test_a_stored_candidate_with_absurd_numbers_is_illegal_and_no_crash(numbers):
    """S08: a row whose numbers are not of this space is judged, not run."""
    assert space.violations(candidate(**numbers), problem(), H200)
    assert space.violations(candidate(**numbers), problem(dtype="float32"), H200)
    space.adapt(candidate(**numbers), problem(), H200)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("head_dim_qk", dict(head_dim_qk=257)),
        ("head_dim_v", dict(head_dim_v=512)),
        ("seqlen_q", dict(seqlen_q=1 << 31)),
        ("seqlen_kv", dict(seqlen_kv=1 << 31)),
        ("batch", dict(batch=1 << 30)),
    ],
)
def test_unsupported_problems_name_argument_and_limit(name, changes):
    with pytest.raises(UnsupportedError, match=rf"{name}.*\d"):
        space.require_supported(problem(**changes), H200)
    with pytest.raises(UnsupportedError):
        space.candidates(problem(**changes), H200)


def test_old_devices_are_unsupported():
    with pytest.raises(UnsupportedError, match="sm_75"):
        space.require_supported(problem(), dataclasses.replace(A100, arch="sm_75"))
    space.require_supported(problem(), A100)


# ---- Hopper kernels ---------------------------------------------------------------------------------------------------------


def specialised(mask="causal", order="qk_first", ping_pong=True, **numbers):
    values = dict(block_m=128, block_n=128, num_stages=2, head_group=8 if mask != "full" else 1, persistent=True, q_stages=2)
    values |= numbers
    structure = dict(order=order, ping_pong=ping_pong, lazy_rescale=True)
    variant = Variant(backend="hopper", mask=mask, load="tma", longest_first=mask != "full", **structure)
    return Candidate(variant=variant, config=Config(**(dict(num_warps=values["block_m"] // 16) | values)))


LARGE = dict(batch=2, heads_q=16, heads_kv=16, seqlen_q=8192, seqlen_kv=8192)


@pytest.mark.parametrize(
    ("dim", "expected"),
    [
        (64, dict(block_m=192, num_stages=3)),
        (128, dict()),
        (256, dict(block_n=64, q_stages=1)),
    ],
)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_hopper_defaults_are_what_was_measured_fastest(dim, expected, mask):
    bounds = dict(window=(256, None)) if mask == "window" else dict(mask=mask)
    large = problem(**LARGE, head_dim_qk=dim, head_dim_v=dim, **bounds)
    assert space.default(large, H200) == specialised(mask=mask, **expected)
    assert space.default(large, H200) in space.candidates(large, H200)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(dtype="float32"), "elements have 4 bytes, warpgroup products take 2"),
        (dict(aligned_16=False), "multiples of 16 bytes"),
        (dict(head_dim_v=100), "head_dim_v of 100 makes rows of 200 bytes, TMA needs a multiple of 16"),
        (dict(head_dim_qk=16), "head_dim_qk: is 16, padding to 64 columns only pays above 16"),
        (dict(seqlen_q=32), "seqlen_q: is 32, tiles of 64 rows need more than 32"),
        (dict(seqlen_kv=20), "seqlen_kv: is 20, tiles of 64 rows need more than 32"),
    ],
)
def test_what_hopper_kernels_do_not_take_goes_to_portable_ones_and_the_reason_is_one_sentence(changes, reason):
    odd = problem(**changes)
    assert reason in space.without_hopper(odd, H200)
    assert space.backends(odd, H200) == ["triton"]
    assert space.default(odd, H200).variant.backend == "triton"
    assert {each.variant.backend for each in space.candidates(odd, H200)} == {"triton"}
    assert space.adapt(specialised(), odd, H200) is None


def test_hopper_kernels_run_on_sm_90_alone():
    """Newer GPUs have TMA, but other products."""
    newer = dataclasses.replace(H200, name="NVIDIA B200", arch="sm_100")
    for device in (newer, A100):
        assert device.arch in space.without_hopper(problem(), device)
        assert "sm_90" in names(space.violations(specialised(), problem(), device))
    assert space.without_hopper(problem(), H200) == ""
    assert space.backends(problem(head_dim_qk=40, head_dim_v=24, dtype="float16"), H200) == ["triton", "hopper"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("block_m", dict(block_m=96)),
        ("block_n", dict(block_n=32)),
        ("num_warps", dict(num_warps=4)),
        ("registers", dict(block_m=192, q_stages=1)),
        ("smem", dict(num_stages=3)),
        ("num_stages", dict(num_stages=1)),
        ("num_stages", dict(block_n=64, num_stages=5, q_stages=1)),
        ("ping_pong", dict(block_m=64)),
        ("q_stages", dict(q_stages=3, block_n=64)),
        ("head_group", dict(head_group=64)),
        ("packed_heads", dict(packed_heads=2)),
    ],
)
def test_each_limit_of_hopper_kernels_has_a_name_and_both_figures(name, changes):
    messages = [message for message in space.violations(specialised(**changes), problem(), H200) if message.startswith(f"{name}: ")]
    assert messages
    assert all(len([word for word in message.replace(",", " ").split() if any(map(str.isdigit, word))]) >= 2 for message in messages)


def test_what_means_nothing_to_a_backend_has_one_value_there():
    assert names(space.violations(specialised(order=""), problem(), H200)) == {"order"}
    assert names(space.violations(specialised(maxnreg=168), problem(), H200)) == {"maxnreg"}
    assert names(space.violations(specialised(persistent=False), problem(), H200)) == {"persistent"}
    portable = candidate()
    for field, value in (("order", "pv_first"), ("ping_pong", True), ("lazy_rescale", True)):
        changed = dataclasses.replace(portable, variant=dataclasses.replace(portable.variant, **{field: value}))
        assert names(space.violations(changed, problem(), H200)) == {field}
    assert names(space.violations(candidate(q_stages=2), problem(), H200)) == {"q_stages"}
    assert names(space.violations(candidate(packed_heads=2), problem(heads_kv=8), H200)) == {"packed_heads"}


@pytest.mark.parametrize(("dim", "wanted", "limit"), [(256, 249, 240), (128, 185, 160)])
def test_registers_of_consumers(dim, wanted, limit):
    """What does not fit was serialised by ptxas: 256 columns with 128 keys, and 128 columns in three warpgroups with 128 keys."""
    wide = problem(**LARGE, head_dim_qk=dim, head_dim_v=dim)
    each = specialised(block_m=64 if dim == 256 else 192, ping_pong=dim == 128, q_stages=1)
    message = next(message for message in space.violations(each, wide, H200) if message.startswith("registers"))
    assert message == f"registers: a consumer's thread needs about {wanted}, it has {limit}"


def test_one_tile_a_program_needs_no_order_and_no_second_buffer():
    few = problem(batch=1, heads_q=8, heads_kv=8, seqlen_q=1024, seqlen_kv=1024)
    found = [each for each in space.candidates(few, H200) if each.variant.backend == "hopper" and each.config.block_m == 128]
    assert found
    assert not any(each.variant.longest_first or each.config.head_group > 1 or each.config.q_stages > 1 for each in found)
    assert not any(
        each.config.head_group == 1 and not each.variant.longest_first
        for each in space.candidates(problem(**LARGE), H200)
        if each.variant.backend == "hopper"
    )


def test_hopper_adds_a_few_hundred_candidates():
    for dim, mask in itertools.product((64, 128, 256), ("full", "causal")):
        found = space.candidates(problem(**LARGE, head_dim_qk=dim, head_dim_v=dim, mask=mask), H200)
        assert 4 <= sum(each.variant.backend == "hopper" for each in found) <= 400


FEW = dict(batch=8, heads_q=32, heads_kv=8, seqlen_kv=8192)


def test_heads_are_packed_where_that_saves_tiles():
    """Of 4 heads that share K and V, 4 queries each: 16 of the 64 rows of a tile, and not 4 tiles of 4 rows."""
    for seqlen_q, expected in ((1, {4}), (4, {4}), (64, {1, 4}), (100, {1, 4}), (1024, {1, 4}), (1152, {1})):
        few = problem(**FEW, seqlen_q=seqlen_q)
        found = [each.config for each in space.candidates(few, H200) if each.variant.backend == "hopper"]
        assert {config.packed_heads for config in found} == expected
    for without in (problem(seqlen_q=4), problem(**FEW, seqlen_q=4, direction="backward")):
        assert "seqlen_q: is 4, tiles of 64 rows need more than 32" in space.without_hopper(without, H200)
    odd = specialised(packed_heads=3)
    assert "packed_heads: is 3, must be a power of two of at most 4" in space.violations(odd, problem(**FEW, seqlen_q=4), H200)
    none_saved = space.violations(specialised(packed_heads=4), problem(**FEW, seqlen_q=1024), H200)
    assert none_saved == ["packed_heads: is 4, which makes 2048 tiles, no fewer than 2048"]


@pytest.mark.parametrize(
    ("heads", "seqlen_q", "block_m", "packed_heads"),
    [
        ((32, 8), 1, 64, 4),
        ((64, 8), 1, 64, 8),
        ((64, 8), 17, 128, 8),
        ((32, 8), 64, 128, 4),
        ((32, 8), 128, 128, 1),
        ((32, 8), 4096, 128, 1),
    ],
)
def test_heads_are_packed_for_few_queries(heads, seqlen_q, block_m, packed_heads):
    few = problem(**FEW | dict(heads_q=heads[0], heads_kv=heads[1]), seqlen_q=seqlen_q)
    config = space.default(few, H200).config
    assert (config.block_m, config.packed_heads) == (block_m, packed_heads)
    many = space.adapt(space.default(few, H200), problem(**LARGE), H200)
    assert many.config.packed_heads == 1
    assert space.adapt(many, few, H200).config.packed_heads == packed_heads


def test_a_hopper_winner_is_made_to_fit():
    narrow = specialised(block_m=192, num_stages=3, order="pv_first")
    wide = space.adapt(narrow, problem(**LARGE), H200)
    assert (wide.config.block_m, wide.config.block_n, wide.config.num_stages) == (128, 128, 2)
    wider = space.adapt(narrow, problem(**LARGE, head_dim_qk=256, head_dim_v=256), H200)
    assert (wider.config.block_m, wider.config.block_n, wider.config.num_stages, wider.config.q_stages) == (128, 64, 2, 1)
    short = space.adapt(narrow, problem(seqlen_q=100, seqlen_kv=60), H200)
    assert (short.config.block_m, short.config.block_n, short.config.num_warps) == (128, 64, 8)
    full = space.adapt(specialised(), problem(**LARGE, mask="full"), H200)
    assert full == specialised(mask="full")
    assert space.adapt(full, problem(**LARGE), H200).variant.longest_first
    eager = dataclasses.replace(full, variant=dataclasses.replace(full.variant, lazy_rescale=False))  # a row of an older release
    assert space.adapt(eager, problem(**LARGE, mask="full"), H200) == full
    negative = dataclasses.replace(narrow, variant=dataclasses.replace(narrow.variant, scale_first=True))
    assert space.violations(negative, problem(**LARGE, head_dim_qk=64, head_dim_v=64), H200) == []


# ---- backward kernels -------------------------------------------------------------------------------------------------------


def backward(dim=128, fused=True, split_roles=False, float16_dq=False, **numbers):
    values = dict(block_m=128 if dim == 64 else 64, block_n=64 if dim == 256 else 128, num_warps=8, num_stages=2)
    structure = dict(fused=fused, split_roles=split_roles, float16_dq=float16_dq)
    variant = Variant(family="backward", backend="hopper", mask="causal", load="tma", **structure)
    return Candidate(variant=variant, config=Config(**(values | numbers)))


def gradients(dim=128, **changes):
    return problem(**(LARGE | dict(direction="backward", head_dim_qk=dim, head_dim_v=dim) | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(dim=64), backward(64, head_group=4)),
        (dict(dim=128), backward(128, head_group=4)),
        (dict(dim=256), backward(256, fused=False, split_roles=True, head_group=4)),
        (dict(dim=64, head_dim_v=256), backward(256, fused=False, split_roles=True, head_group=4)),
        (dict(deterministic=True), backward(fused=False, head_group=4)),
        (dict(dim=64, seqlen_q=60), backward(64, block_m=64, num_stages=1, head_group=4)),
        (dict(batch=1, heads_q=4, heads_kv=1), backward()),
    ],
)
def test_default_of_backward_problems(changes, expected):
    large = gradients(**changes)
    assert space.default(large, H200) == expected
    assert expected in space.candidates(large, H200)
    assert space.backends(large, H200) == ["triton", "hopper"]


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.arch)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (40, 80), (128, 128), (192, 128), (256, 256)], ids=str)
def test_portable_default_of_backward_problems(device, dtype, dims):
    for seqlen_q, seqlen_kv in ((1, 1), (2048, 2048), (5, 700), (0, 3), (3, 0)):
        each = gradients(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, head_dim_qk=dims[0], head_dim_v=dims[1], dtype=dtype, mask="full")
        portable = space.portable_default(each, device)
        assert portable.variant.backend == "triton"
        assert portable in space.candidates(each, device)
        if device is A100 or dtype == "float32":
            assert space.default(each, device) == portable


def test_what_hopper_kernels_do_not_take_has_a_portable_backward():
    for changes in (dict(dtype="float32"), dict(aligned_16=False), dict(head_dim_v=100), dict(seqlen_q=32), dict(seqlen_kv=0)):
        odd = gradients(**changes)
        assert space.backends(odd, H200) == ["triton"]
        assert space.default(odd, H200).variant.backend == "triton"
        assert space.adapt(backward(), odd, H200) is None


@pytest.mark.parametrize(
    ("name", "candidate", "changes"),
    [
        ("tile", backward(64), dict()),
        ("tile", backward(block_n=64), dict()),
        ("tile", backward(), dict(dim=256)),
        ("block_m", backward(64, num_stages=1), dict(dim=64, seqlen_q=64)),
        ("split_roles", backward(split_roles=True), dict()),
        ("split_roles", backward(256, fused=False), dict(dim=256)),
        ("fused", backward(256, split_roles=True), dict(dim=256)),
        ("fused", backward(), dict(deterministic=True)),
        ("float16_dq", backward(64, float16_dq=True), dict(dim=64)),
        ("float16_dq", backward(64, fused=False, float16_dq=True), dict(dim=64, float16_dq=True)),
        ("float16_dq", backward(float16_dq=True), dict(float16_dq=True)),
        ("smem", backward(num_stages=3), dict()),
        ("num_stages", backward(fused=False, num_stages=4), dict()),
        ("num_stages", backward(), dict(seqlen_q=64)),
        ("head_group", backward(head_group=64), dict()),
        ("head_group", backward(head_group=4), dict(batch=1, heads_kv=1)),
        ("num_warps", backward(num_warps=4), dict()),
        ("persistent", backward(persistent=True), dict()),
        ("maxnreg", backward(maxnreg=128), dict()),
    ],
)
def test_each_limit_of_backward_hopper_kernels_has_a_name(name, candidate, changes):
    assert names(space.violations(candidate, gradients(**changes), H200)) == {name}


def test_directions_are_not_mixed():
    forward, large = space.default(problem(**LARGE), H200), gradients()
    assert "family" in names(space.violations(forward, large, H200))
    assert "family" in names(space.violations(backward(), problem(**LARGE), H200))
    assert space.adapt(forward, large, H200) is None
    assert space.adapt(backward(), problem(**LARGE), H200) is None
    wrong = dataclasses.replace(forward, variant=dataclasses.replace(forward.variant, fused=True, split_roles=True))
    assert names(space.violations(wrong, problem(**LARGE), H200)) == {"fused", "split_roles"}


def test_a_backward_winner_is_made_to_fit():
    wide = backward(256, fused=False, split_roles=True, head_group=8)
    assert space.adapt(wide, gradients(), H200) == backward(head_group=8)
    assert space.adapt(wide, gradients(64), H200) == backward(64, head_group=8)
    assert space.adapt(wide, gradients(deterministic=True), H200) == backward(fused=False, head_group=8)
    assert space.adapt(backward(64, block_m=64, num_stages=3), gradients(), H200) == backward()  # three do not fit
    assert space.adapt(backward(fused=False, num_stages=3), gradients(64), H200) == backward(64, block_m=64, fused=False, num_stages=3)
    full = space.adapt(wide, gradients(256, mask="full"), H200)
    assert (full.config.head_group, full.variant.mask) == (1, "full")
    portable = space.portable_default(gradients(64), H200)
    assert space.adapt(portable, gradients(256), H200).config.block_n == 64
    assert space.adapt(portable, gradients(128, dtype="float32"), A100) is not None
    assert space.adapt(portable, gradients(64, seqlen_q=20, seqlen_kv=20), H200).config.block_n == 32


def test_sums_in_float16_are_a_permission():
    """It adds the fused kernels that such sums are worth it for to the space, and takes nothing away."""
    for dim, added in ((64, 2), (128, 0), (256, 0)):
        allowed, strict = (set(space.candidates(gradients(dim, mask="full", float16_dq=flag), H200)) for flag in (True, False))
        assert strict < allowed if added else strict == allowed
        assert len(allowed - strict) == added
        assert all(each.variant.fused and each.variant.float16_dq and each.config.block_m == 128 for each in allowed - strict)
    summed = backward(64, float16_dq=True)
    assert space.adapt(summed, gradients(64, float16_dq=True, seqlen_kv=2048), H200) == summed
    assert space.adapt(summed, gradients(64), H200) == backward(64)
    assert space.adapt(summed, gradients(128, float16_dq=True), H200) == backward()
    assert space.adapt(summed, gradients(256, float16_dq=True), H200) == backward(256, False, True)
    assert space.adapt(backward(64), gradients(64, float16_dq=True), H200) == backward(64)
    assert space.default(gradients(64, float16_dq=True), H200).variant.float16_dq
    assert not space.default(gradients(128, float16_dq=True), H200).variant.float16_dq


def test_the_backward_space_is_small():
    for dim, mask in itertools.product((64, 128, 256), ("full", "causal")):
        found = space.candidates(gradients(dim, mask=mask), H200)
        specialised = [each for each in found if each.variant.backend == "hopper"]
        assert (1 if dim == 256 else 4) <= len(specialised) <= 40
        assert len(found) <= 300
        assert {each.variant.fused for each in specialised} == ({False} if dim == 256 else {False, True})


# 230 816 bytes are what a probe of 128 columns with two stages needed (H200, 2026-11-29).
def test_shared_memory_of_backward_hopper_kernels():
    assert resources.smem_bytes(backward(), gradients(), H200) == pytest.approx(230816, abs=512)
    for each, dim in ((backward(64), 64), (backward(64, block_m=64), 64), (backward(), 128), (backward(256, False, True), 256)):
        assert resources.smem_bytes(each, gradients(dim), H200) <= H200.smem_per_block_bytes
        more = dataclasses.replace(each, config=dataclasses.replace(each.config, num_stages=3))
        fits = resources.smem_bytes(more, gradients(dim), H200) <= H200.smem_per_block_bytes
        assert fits == (each.config.block_m == dim)
