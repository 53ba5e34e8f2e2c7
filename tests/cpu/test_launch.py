"""What a Launch hands to the driver, without one: through Triton's C launcher on a fake driver, and in Triton's interpreter."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from flashgen import launch as launch_module
from flashgen.build import build
from flashgen.candidate import Candidate, Config, Variant
from flashgen.device import Device
from flashgen.errors import ArgumentError
from flashgen.launch import needs_wide_offsets, prepare
from flashgen.problem import Problem

ROOT = Path(launch_module.__file__).parents[2]
H200 = Device.named("h200")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What launch_on_fake_driver.py saw."""
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("needs a C compiler, as Triton 3.6 does to launch")
    script = Path(__file__).with_name("launch_on_fake_driver.py")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    arguments = [sys.executable, str(script), str(tmp_path_factory.mktemp("driver"))]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


NUMBERS = {"num_heads": 12, "heads_q": 6, "heads_per_kv": 2, "seqlen_q": 130, "seqlen_kv": 200, "band_high": 70, "scale": 0.125}
ADDRESSES = {"q": 0x10000, "k": 0x20000, "v": 0x30000, "out": 0x40000, "lse": 0x50000}


def test_pointers_strides_and_numbers_arrive(seen):
    strides = {
        **{"stride_qb": 6 * 130 * 64, "stride_qh": 130 * 64, "stride_qs": 64},
        **{"stride_kb": 200 * 256, "stride_kh": 64, "stride_ks": 256},  # N27: each tensor has strides of its own
        **{"stride_vb": 3 * 200 * 64, "stride_vh": 200 * 64, "stride_vs": 64},
        **{"stride_ob": 6 * 130 * 64, "stride_oh": 130 * 64, "stride_os": 64},
    }
    assert seen["pointer"]["parameters"] == ADDRESSES | strides | NUMBERS
    assert seen["pointer"]["grid"] == 12 * 3  # three blocks of 64 rows hold 130
    assert seen["pointer"]["threads"] == 128


def test_descriptors_arrive_with_sizes_and_strides(seen):
    parameters = seen["tma"]["parameters"]
    assert {name: parameters[name] for name in ADDRESSES} == ADDRESSES
    assert {name: parameters[name] for name in NUMBERS} == NUMBERS
    assert parameters["k_sizes"] == [2, 3, 200, 64]
    assert parameters["k_strides"] == [200 * 256, 64, 256, 1]
    assert parameters["out_sizes"] == [2, 6, 130, 64]
    by_address = {each["address"]: each for each in seen["encoded"]}
    # As the driver counts: innermost first, strides in bytes without the innermost.
    assert by_address[0x20000]["sizes"] == [64, 200, 3, 2]
    assert by_address[0x20000]["strides"] == [512, 128, 200 * 512]
    assert by_address[0x20000]["box"] == [64, 32, 1, 1]
    assert by_address[0x10000]["box"] == by_address[0x40000]["box"] == [64, 64, 1, 1]


@pytest.mark.parametrize("load", ["pointer", "tma"])
def test_a_call_fills_in_addresses_and_scale_only(seen, load):
    first, again = seen[load]["parameters"], seen[f"{load}_again"]["parameters"]
    assert {name for name in first if first[name] != again[name]} == {"out", "lse", "scale"}
    assert (again["out"], again["lse"], again["scale"]) == (0x60000, 0x70000, 0.25)


@pytest.mark.parametrize("load", ["pointer", "tma"])
def test_right_device_and_stream(seen, load):
    """I08: the tensors are on cuda:1 while cuda:0 is current, and then the other way about; each device has a handle of its own."""
    assert seen[load]["stream"] == seen[f"{load}_again"]["stream"] == 101
    assert seen[f"{load}_guarded"][-1] == 1
    assert seen[f"{load}_again_guarded"] == []
    assert seen[f"{load}_on_first"]["stream"] == 100
    assert seen[f"{load}_on_first"]["function"] != seen[load]["function"] == seen[f"{load}_again"]["function"]


def test_descriptors_are_encoded_once_for_an_address_and_not_kept_for_ever(seen):
    addresses = [each["address"] for each in seen["encoded"]]
    assert sorted(set(addresses)) == [0x10000, 0x20000, 0x30000, 0x40000, 0x60000]
    # cuda:0 and cuda:1 have a Launch each; neither encodes anything twice.
    assert all(addresses.count(address) == (1 if address == 0x60000 else 2) for address in addresses)
    assert seen["encoded_for_many"] == 2 * launch_module.KEPT_MAPS
    assert seen["encoded_again"] == 0
    assert seen["kept"] == launch_module.KEPT_MAPS


@pytest.mark.parametrize("load", ["pointer", "tma"])
def test_unaligned_addresses_and_refusals_of_the_driver(seen, load):
    """T08, T23"""
    assert seen[f"{load}_unaligned"].startswith("LaunchError: ")
    assert "16-byte aligned" in seen[f"{load}_unaligned"]
    assert seen[f"{load}_refused"].startswith("LaunchError: ")
    assert "an error of the fake driver" in seen[f"{load}_refused"]


def test_no_keys(seen):
    """An empty tensor has no address, and TMA wants one, and sizes above 0."""
    assert seen["pointer_empty"]["parameters"]["k"] == 0
    assert seen["pointer_empty"]["parameters"]["seqlen_kv"] == seen["tma_empty"]["parameters"]["seqlen_kv"] == 0
    assert all(each["address"] and min(each["sizes"]) >= 1 for each in seen["encoded_empty"])
    assert all(stride > 0 and stride % 16 == 0 for each in seen["encoded_empty"] for stride in each["strides"])


@pytest.mark.parametrize("num_sms", [1, 7, 132])
def test_a_persistent_grid_follows_the_number_of_sms(seen, num_sms):
    """T25: 168 registers (the fake driver says) and 128 threads fit three times into the registers of an SM."""
    launched = seen[f"persistent_{num_sms}"]
    assert launched["grid"] == 3 * num_sms
    assert launched["parameters"]["band_low"] == -100
    assert launched["parameters"]["band_high"] == 0


def test_wide_strides(seen):
    """N13"""
    assert seen["wide"]["parameters"]["stride_qb"] == 2**33
    assert seen["narrow"].startswith("ArgumentError: ")
    assert "wide_offsets" in seen["narrow"]


def test_a_hopper_kernel_gets_descriptors_and_its_schedule(seen):
    """One box of 64 columns is a row. 7 SMs hold a program each, of 12 heads times 3 blocks of 192 rows."""
    parameters = seen["hopper"]["parameters"]
    assert seen["hopper"]["grid"] == 7
    assert seen["hopper"]["threads"] == 32 * 16  # three warpgroups, and one for the warp that loads
    assert {name: parameters[name] for name in ADDRESSES} == ADDRESSES
    numbers = {"seqlen_q": 520, "seqlen_kv": 520, "band_high": 0, "scale": 0.125}
    assert {name: parameters[name] for name in numbers} == numbers
    assert parameters["schedule"] == seen["hopper_schedule_address"]
    boxes = {each["address"]: each["box"] for each in seen["hopper_encoded"]}
    assert boxes == {0x10000: [64, 64, 1, 1], 0x20000: [64, 128, 1, 1], 0x30000: [64, 128, 1, 1], 0x40000: [64, 64, 1, 1]}


def test_a_schedule_holds_every_tile_once(seen):
    """Batch item, heads of Q and of K and V, first row, first block of keys, blocks, head: two heads of Q share one of K and V."""
    programs = seen["hopper_schedule"]
    assert len(programs) == 7 and {len(program) for program in programs} == {seen["hopper"]["parameters"]["schedule_width"]}
    tiles = [tile[:7] for (count, *_), *tiles in programs for tile in tiles[:count]]
    walks = [(0, 0, 2), (192, 0, 3), (384, 0, 5)]
    expected = [[item, head, head // 2, *walk, item * 6 + head] for item in range(2) for head in range(6) for walk in walks]
    assert sorted(tiles) == expected
    assert max(count for (count, *_), *_ in programs) == len(programs[0]) - 1


def test_a_schedule_is_copied_once_and_not_while_capturing(seen):
    """Candidates that walk alike share it, in a second prepare it is there; another order is another schedule."""
    assert seen["hopper_captured"].startswith("LaunchError: ")
    assert "call once before capturing" in seen["hopper_captured"]
    assert seen["hopper_other_heads"] == 2


def test_a_standalone_hopper_kernel_launches_alike(seen):
    standalone, launched = seen["standalone"], seen["hopper"]["parameters"]
    assert standalone["grid"] == [12 * 3]
    assert standalone["more"] == seen["hopper_constants"] | {"num_warps": 4, "enable_fp_fusion": True}
    assert standalone["parameters"] == [name for name in launched if not name.endswith(("_sizes", "_strides"))]
    assert standalone["numbers"] == {name: launched[name] for name in standalone["numbers"]} | {"schedule_width": 2}
    rows = {"q": 64, "k": 128, "v": 128, "out": 64}
    for name, layout in standalone["layouts"].items():
        assert layout == [launched[f"{name}_sizes"], launched[f"{name}_strides"], [1, 1, rows[name], 64]]
    assert standalone["schedule"] == seen["hopper_schedule"]


def test_packed_heads_share_a_tile(seen):
    """64 rows of a warpgroup are 32 queries of 2 heads. A tile has 64 queries; heads of K and V have one each."""
    assert {name: seen["packed"]["parameters"][name] for name in ADDRESSES} == ADDRESSES
    boxes = {each["address"]: each["box"] for each in seen["packed_encoded"]}
    assert boxes == {0x10000: [64, 32, 2, 1], 0x20000: [64, 128, 1, 1], 0x30000: [64, 128, 1, 1], 0x40000: [64, 32, 2, 1]}
    tiles = [tile[:7] for (count, *_), *tiles in seen["packed_schedule"] for tile in tiles[:count]]
    walks = [(64 * tile, 0, tile // 2 + 1) for tile in range(9)]
    assert sorted(tiles) == [[item, 2 * head, head, *walk, item * 6 + 2 * head] for item in range(2) for head in range(3) for walk in walks]
    assert seen["packed_apart"].startswith("ArgumentError: the kernel packs 2 heads that share keys; ")
    standalone = seen["standalone_packed"]
    assert standalone["grid"] == [6 * 9]
    assert standalone["blocks"] == [[1, 2, 32, 64], [1, 1, 128, 64], [1, 1, 128, 64], [1, 2, 32, 64]]
    assert standalone["constants"] == seen["packed_constants"]
    assert standalone["schedule"] == seen["packed_schedule"]


def test_a_hopper_kernel_is_refused_for_another_mask(seen):
    """With one more key the mask cuts two blocks of a warpgroup, and the kernel was built for one."""
    assert seen["hopper_other_constants"].startswith("ArgumentError: CUTS is 2 for ")
    assert seen["hopper_other_constants"].endswith("the kernel was built with 1")


def test_a_backward_kernel_gets_its_functions_in_order(seen):
    """Each has the strides of its own tensors, an expanded dout has none; delta is scratch that the launch allocates."""
    launched = seen["backward_dq_dk_dv"]
    assert list(launched) == ["attention_backward_delta", "attention_backward_dkdv", "attention_backward_dq"]
    rows, keys = 12 * 3, 6 * 4  # blocks of 64 queries, and of as many keys
    assert [each["grid"] for each in launched.values()] == [rows, keys, rows]
    delta, dkdv, dq = (each["parameters"] for each in launched.values())
    dout = {"dout": 0x80000, "stride_dob": 0, "stride_doh": 0, "stride_dos": 0}
    inputs = {"q": 0x10000, "k": 0x20000, "v": 0x30000, "lse": 0x50000, "delta": 0xD0000}
    key = {"stride_kb": 200 * 256, "stride_kh": 64, "stride_ks": 256}
    numbers = {"heads_q": 6, "heads_per_kv": 2, "seqlen_q": 130, "seqlen_kv": 200, "band_high": 70, "scale": 0.125}
    assert {"out": 0x40000, "dlse": 0x90004, "lse": 0x50000, "delta": 0xD0000, "heads_q": 6, "seqlen_q": 130}.items() <= delta.items()
    gradients = {"dk": 0xB0000, "dv": 0xC0000, "stride_dkb": 200 * 256, "stride_dkh": 64, "stride_dks": 256, "stride_dvs": 64}
    assert (dout | inputs | key | numbers | gradients).items() <= dkdv.items()
    assert (dout | inputs | key | numbers | {"dq": 0xA0000, "stride_dqb": 6 * 130 * 64, "stride_dqs": 64}).items() <= dq.items()


def test_a_backward_kernel_launches_what_is_needed(seen):
    """G08: and dv has a place of its own where dk alone is wanted."""
    assert list(seen["backward_dq"]) == ["attention_backward_delta", "attention_backward_dq"]
    assert list(seen["backward_dk"]) == ["attention_backward_delta", "attention_backward_dkdv"]
    assert seen["backward_dk"]["attention_backward_dkdv"]["parameters"]["dv"] == 0xD0000
    assert seen["backward_unaligned"].startswith("LaunchError: ") and "16-byte aligned" in seen["backward_unaligned"]


def test_sums_in_float16_have_half_the_memory_and_scales_beside_them(seen):
    """Two float32 a row, two for each 128 keys of a head, a scale a row, and the sums as rows of 128 bytes."""
    tiles, blocks = 12 * 3, 6 * 2
    sizes = [2 * tiles * 64, 2 * blocks, tiles * 64, tiles * 64 * 64]
    kinds = ["torch.float32", "torch.float32", "torch.float32", "torch.float16"]
    assert [each[:2] for each in seen["float16_dq_scratch"]] == [list(each) for each in zip(kinds, sizes)]
    rows, bounds, scales, sums = (address for _, _, address in seen["float16_dq_scratch"])
    launched = seen["float16_dq"]
    assert [name.removeprefix("attention_backward_") for name in launched] == ["bounds", "delta", "dkdv", "dq_convert"]
    assert [each["grid"] for each in launched.values()] == [blocks, tiles, blocks, 2 * tiles]
    of_bounds, of_delta, of_loop, of_convert = (each["parameters"] for each in launched.values())
    key = {"k": 0x20000, "stride_kb": 200 * 256, "stride_kh": 64, "stride_ks": 256}
    assert (key | {"v": 0x30000, "bounds": bounds, "heads_q": 6, "heads_per_kv": 2, "seqlen_kv": 200}).items() <= of_bounds.items()
    scratch = {"rows": rows, "bounds": bounds, "dq_scales": scales, "dq_sum": sums}
    assert (scratch | {"heads_per_kv": 2, "seqlen_q": 130, "seqlen_kv": 200}).items() <= of_delta.items()
    assert of_loop["dq_tiles_sizes"] == [tiles * 64, 64] and of_loop["dq_beyond"] == tiles * 64
    assert (of_loop["scales_tiles_sizes"], of_loop["rows_tiles_sizes"]) == ([tiles * 64], [2 * tiles * 64])
    assert {"dq_sum": sums, "dq_scales": scales, "dq": 0xA0000, "scale": 0.125}.items() <= of_convert.items()


@pytest.mark.parametrize("load", ["pointer", "tma", "hopper"])
def test_an_unknown_release_launches_through_tritons_own_launcher(seen, load):
    """T22"""
    assert seen[f"{load}_unknown"]["parameters"] == seen[load]["parameters"]
    assert seen[f"{load}_unknown"]["grid"] == seen[load]["grid"]


def test_a_launch_costs_little(seen):
    """T18: 2.2 us for pointers and 3.3 for descriptors where nothing else ran (Triton 3.6, 2026-11); CPU time, with a margin."""
    assert seen["pointer_us"] < 20
    assert seen["tma_us"] < 30


def far(*shape: int, strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    ("tensor", "wide"),
    [
        (far(16, 64, 65536, 128, strides=(2**29, 2**23, 128, 1)), False),  # 2^33 elements, but each part is counted in 64 bits
        (far(2, 8, 1024, 64, strides=(2**31, 2**16, 64, 1)), True),
        (far(2, 8, 1024, 64, strides=(2**31 - 16, 2**16, 64, 1)), False),
        (far(1, 8, 1024, 64, strides=(2**40, 2**16, 64, 1)), False),  # one batch item: its stride is not used
        (far(2, 1024, 8, 64, strides=(2**35, 2**22, 2**18, 1)), True),  # bshd: 512 rows of one tile span 2^31
        (far(2, 1024, 8, 64, strides=(2**30, 2**22 - 16, 64, 1)), False),
        (far(2, 100, 8, 64, strides=(2**30, 2**24, 64, 1)), False),  # 100 rows span less
        (far(0, 8, 0, 64, strides=(2**40, 2**40, 64, 1)), False),
    ],
)
def test_wide_offsets_are_needed(tensor, wide):
    """N13: what must fit 32 bits is a stride, and the rows of one tile times theirs."""
    assert needs_wide_offsets([far(1, 1, 1, 1, strides=(1, 1, 1, 1)), tensor]) is wide


# ---- what prepare refuses ------------------------------------------------------------------------------------------------------

PROBLEM = Problem(batch=2, heads_q=4, heads_kv=2, seqlen_q=64, seqlen_kv=96, head_dim_qk=64, head_dim_v=64, return_lse=True)


def tensors(problem: Problem, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    q_shape = (problem.batch, problem.heads_q, problem.seqlen_q)
    kv_shape = (problem.batch, problem.heads_kv, problem.seqlen_kv)
    return {
        "query": torch.zeros(*q_shape, problem.head_dim_qk, dtype=dtype),
        "key": torch.zeros(*kv_shape, problem.head_dim_qk, dtype=dtype),
        "value": torch.zeros(*kv_shape, problem.head_dim_v, dtype=dtype),
        "out": torch.zeros(*q_shape, problem.head_dim_v, dtype=dtype),
        "lse": torch.zeros(*q_shape),
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": torch.zeros(2, 2, 95, 64, dtype=torch.bfloat16)}, r"key is \(2, 2, 95, 64\)"),
        ({"value": torch.zeros(2, 4, 96, 64, dtype=torch.bfloat16)}, "value is"),
        ({"query": torch.zeros(2, 4, 64, 64)}, r"query is .* torch\.float32"),
        ({"out": torch.zeros(2, 4, 64, 64, dtype=torch.bfloat16, device="meta")}, "out is on meta"),
        ({"key": torch.zeros(2, 2, 64, 96, dtype=torch.bfloat16).mT}, "key has a stride of 96 in its last dimension"),
        ({"value": torch.zeros(2, 2, 96, 65, dtype=torch.bfloat16)[..., 1:]}, "value has strides"),
        ({"lse": None}, "lse must be"),
        ({"lse": torch.zeros(2, 64, 4).mT}, "lse must be a contiguous float32 tensor"),
    ],
)
def test_prepare_names_the_tensor_that_does_not_fit(changes, words):
    config = Config(block_m=64, block_n=32, num_warps=4, num_stages=2)
    kernel = build(Candidate(variant=Variant(store_lse=True), config=config), PROBLEM, H200)
    with pytest.raises(ArgumentError, match=words):
        prepare(kernel, PROBLEM, *(tensors(PROBLEM) | changes).values(), H200)


def test_prepare_refuses_a_problem_that_the_kernel_was_not_built_for():
    config = Config(block_m=64, block_n=32, num_warps=4, num_stages=2)
    kernel = build(Candidate(variant=Variant(store_lse=True), config=config), PROBLEM, H200)
    other = dataclasses.replace(PROBLEM, dtype="float16")
    with pytest.raises(ArgumentError, match="dtype is float16; the kernel was built for bfloat16"):
        prepare(kernel, other, *tensors(other, torch.float16).values(), H200)


# ---- interpreted -----------------------------------------------------------------------------------------------------------------


def test_interpreted_launches_compute(tmp_path):
    """Both loads and layouts, GQA, windows, a persistent grid, views, and no keys at all."""
    script = """
        import math
        import torch
        from flashgen.build import build
        from flashgen.candidate import Candidate, Config, Variant
        from flashgen.device import Device
        from flashgen.errors import BuildError
        from flashgen.launch import prepare
        from flashgen.problem import Problem

        H200 = Device.named("h200")
        torch.manual_seed(0)
        for mask, load, layout, skv in (
            ("causal", "pointer", "bhsd", 25), ("full", "tma", "bshd", 20), ("window", "pointer", "bshd", 20), ("full", "tma", "bhsd", 0)
        ):
            window = (10, 5) if mask == "window" else (None, None)
            problem = Problem(
                batch=1, heads_q=2, heads_kv=1, seqlen_q=20, seqlen_kv=skv, head_dim_qk=32, head_dim_v=16, dtype="float16",
                mask="causal" if mask == "causal" else "full", window=window, layout=layout, return_lse=True,
            )
            config = Config(block_m=16, block_n=16, num_warps=4, num_stages=2, persistent=load == "tma")
            kernel = build(Candidate(variant=Variant(mask=mask, load=load, store_lse=True), config=config), problem, H200)
            try:
                kernel.resources
            except BuildError as error:
                assert "interpreted" in str(error)
            else:
                raise AssertionError("an interpreted kernel has no machine code")

            def make(heads, seqlen, dim):
                whole = torch.randn(1, heads, seqlen, dim + 8, dtype=torch.float16)[..., :dim]
                return whole if layout == "bhsd" else whole.transpose(1, 2)

            q, k, v, out = make(2, 20, 32), make(1, skv, 32), make(1, skv, 16), make(2, 20, 16)
            lse = torch.full((1, 2, 20), math.nan)
            scale = 0.3
            out.fill_(math.nan)
            prepare(kernel, problem, q, k, v, out, lse, H200)(q, k, v, out, lse, scale)
            plain = lambda x: (x if layout == "bhsd" else x.transpose(1, 2)).double()
            scores = plain(q) @ plain(k).repeat_interleave(2, 1).mT * scale
            distance = torch.arange(skv)[None, :] - torch.arange(20)[:, None]
            visible = {"causal": distance <= skv - 20, "full": distance < 99, "window": (distance >= -10) & (distance <= 5)}[mask]
            scores = scores.masked_fill(~visible, -math.inf)
            expected = torch.softmax(scores, -1).nan_to_num() @ plain(v).repeat_interleave(2, 1)
            torch.testing.assert_close(plain(out), expected, rtol=0, atol=3e-3)
            torch.testing.assert_close(lse.double(), torch.logsumexp(scores, -1), rtol=0, atol=1e-4)
    """
    environment = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment, cwd=tmp_path)
