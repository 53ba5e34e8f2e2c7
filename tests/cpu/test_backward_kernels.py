"""Backward kernels: their numbers in Triton's interpreter, what the compiler makes of them, and what their launch refuses."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashgen import launch as launch_module
from flashgen import resources, space
from flashgen.build import build, constants_of, sass_mix
from flashgen.candidate import Candidate, Config, Variant
from flashgen.check import prepare_backward as prepare_case
from flashgen.device import Device
from flashgen.errors import ArgumentError
from flashgen.launch import prepare, prepare_backward
from flashgen.problem import Problem

ROOT = Path(launch_module.__file__).parents[2]
H200, A100 = Device.named("h200"), Device.named("a100")
PROBLEM = Problem(
    direction="backward", batch=1, heads_q=4, heads_kv=2, seqlen_q=256, seqlen_kv=256, head_dim_qk=64, head_dim_v=64, mask="causal"
)


def interpreted(*tests: str) -> dict[str, str]:
    """What interpreted_backward.py says of each case."""
    script = Path(__file__).with_name("interpreted_backward.py")
    environment = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, str(script), *tests], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


# ---- numbers ---------------------------------------------------------------------------------------------------------------


def test_gradients_of_awkward_shapes():
    """G01, G04, N21, N24, N25: one query, one key, tails, no key at all, GQA, windows, padded and unequal head dims, layouts, views."""
    found = interpreted("awkward")
    assert len(found) >= 25
    assert not {what: message for what, message in found.items() if message}


def test_gradients_that_are_asked_for_and_upstream_gradients_of_any_strides():
    """G02, G03, G05, G08"""
    found = interpreted("expanded_dout", "some_gradients", "rows_without_a_key")
    assert len(found) == 8
    assert not {what: message for what, message in found.items() if message}


# ---- compiled --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "product"), [(H200, "HGMMA"), (A100, "HMMA")])
def test_the_default_compiles_without_spills(device, product):
    kernel = build(space.portable_default(PROBLEM, device), PROBLEM, device)
    assert [function.name for function in kernel.functions] == list(kernel.source.entries)
    compiled = kernel.resources
    assert 0 < compiled.registers <= 255
    assert compiled.spill_bytes == 0
    assert 0 < compiled.smem_bytes == max(function.compiled.metadata.shared for function in kernel.functions)
    mix = sass_mix(kernel)
    assert mix[product] > 0
    assert not [name for name in mix if name.startswith(("RED", "ATOM"))]  # G09: the same bits every time


def test_functions_have_constants_of_their_own():
    kernel = build(space.portable_default(PROBLEM, H200), PROBLEM, H200)
    every = constants_of(kernel.candidate, PROBLEM)
    for function in kernel.functions:
        assert function.constants == {name: every[name] for name in function.arg_names if name in every}
    assert set(kernel.functions[0].constants) == {"HEAD_DIM_V", "BLOCK_D_V", "BLOCK_N"}
    with pytest.raises(ValueError, match="3 functions: attention_backward_delta, attention_backward_dkdv, attention_backward_dq"):
        kernel.function  # noqa: B018


def test_equal_code_with_another_grid_is_another_kernel():
    """The grid follows from block_n, and so do the constants; a forward kernel's block_m has nothing to do with it."""
    default = space.portable_default(PROBLEM, H200)
    other = dataclasses.replace(default, config=dataclasses.replace(default.config, block_n=64))
    digests = [build(candidate, PROBLEM, H200).resources.binary_sha256 for candidate in (default, default, other)]
    assert digests[0] == digests[1] != digests[2]


# ---- what a launch refuses -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel():
    problem = dataclasses.replace(PROBLEM, seqlen_q=40, seqlen_kv=48, return_lse=True)
    return build(space.portable_default(problem, H200), problem, H200)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dout": torch.zeros(1, 4, 40, 1, dtype=torch.bfloat16).expand(1, 4, 40, 64)}, "dout has a stride of 0 in its last dimension"),
        ({"dout": torch.zeros(1, 4, 40, 64)}, r"dout is .* torch\.float32"),
        ({"key": torch.zeros(1, 2, 47, 64, dtype=torch.bfloat16)}, r"key is \(1, 2, 47, 64\)"),
        ({"lse": torch.zeros(1, 40, 4).mT}, "lse must be a contiguous float32 tensor"),
        ({"dlse": None}, "dlse must be a contiguous float32 tensor"),
        ({"out": torch.zeros(1, 4, 40, 65, dtype=torch.bfloat16)[..., 1:]}, "out has strides"),
    ],
)
def test_prepare_names_the_tensor_that_does_not_fit(kernel, changes, words):
    given = prepare_case(kernel.problem, "cpu", seed=0).given._replace(**changes)
    with pytest.raises(ArgumentError, match=words):
        prepare_backward(kernel, kernel.problem, given, H200)


def test_gradients_of_other_shapes_and_strides_are_refused():
    """They are looked at when they come, before anything runs."""
    problem = dataclasses.replace(PROBLEM, seqlen_q=40, seqlen_kv=48)
    case = prepare_case(problem, "cpu", seed=0)
    candidate = space.portable_default(problem, H200)
    built = build(candidate, problem, H200)
    functions = tuple(dataclasses.replace(function, compiled=None) for function in built.functions)
    launch = prepare_backward(dataclasses.replace(built, functions=functions), problem, case.given, H200)
    for wrong, words in [
        (torch.zeros(1, 4, 41, 64, dtype=torch.bfloat16), r"dq is \(1, 4, 41, 64\)"),
        (torch.zeros(1, 4, 64, 40, dtype=torch.bfloat16).mT, "dq has a stride of 40 in its last dimension"),
        (torch.zeros(1, 4, 40, 68, dtype=torch.bfloat16)[..., :64], "dq has strides"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            launch(*case.given, wrong, None, None, 1.0)


def test_forward_and_backward_kernels_are_told_apart(kernel):
    forward = dataclasses.replace(kernel.problem, direction="forward")
    config = Config(block_m=32, block_n=32, num_warps=4, num_stages=1)
    other = build(Candidate(variant=Variant(mask="causal", store_lse=True), config=config), forward, H200)
    case = prepare_case(kernel.problem, "cpu", seed=0)
    with pytest.raises(ArgumentError, match="computes no gradients"):
        prepare_backward(other, kernel.problem, case.given, H200)
    with pytest.raises(ArgumentError, match="computes gradients"):
        prepare(kernel, forward, *case.given[:5], H200)


def test_shared_memory_is_not_guessed_too_low():
    """What the compiler says is at most what the space thinks, and not much less."""
    for device, numbers in ((H200, (64, 64, 4, 2)), (A100, (64, 64, 4, 2)), (A100, (32, 64, 8, 1))):
        config = Config(**dict(zip(("block_m", "block_n", "num_warps", "num_stages"), numbers)))
        candidate = dataclasses.replace(space.portable_default(PROBLEM, device), config=config)
        there_is = build(candidate, PROBLEM, device).resources.smem_bytes
        assert there_is <= resources.smem_bytes(candidate, PROBLEM, device) <= 1.3 * there_is
