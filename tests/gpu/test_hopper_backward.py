"""Warp-specialised backward kernels on the GPU against the float64 oracle: structures over the shapes that break pipelines and masks."""

import functools
import itertools
import zlib
from dataclasses import replace

import pytest
import torch

from flashgen import check, launch, space
from flashgen.build import build
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.problem import Problem
from tests.gpu import awkward
from tests.gpu.awkward import DIMS, LENGTHS, MASKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"),
]


def structures(stated: Problem) -> list[Candidate]:
    """One candidate of each variant and tile that the search offers for such a problem when it is large."""
    large = replace(stated, seqlen_q=4096, seqlen_kv=4096)
    by_kind: dict[object, Candidate] = {}
    for candidate in space.candidates(large, Device.named("h200")):
        if candidate.variant.backend == "hopper":
            by_kind.setdefault((candidate.variant, candidate.config.block_m), candidate)
    return list(by_kind.values())


def problem(mask: str, dims: str, seqlen_q: int, seqlen_kv: int) -> Problem:
    """Whether the LSE has a gradient differs from one mask to the next."""
    return awkward.problem(mask, dims, seqlen_q, seqlen_kv, direction="backward", return_lse=mask in ("causal", "both sides"))


@functools.cache
def compiled() -> None:
    problems = (problem(mask, dims, *lengths) for mask, dims, lengths in itertools.product(MASKS, DIMS, LENGTHS))
    awkward.compile_all((each, stated) for stated in problems for each in structures(stated))


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("mask", MASKS)
def test_awkward_lengths(mask: str, dims: str) -> None:
    """Whether or not the search would offer the tile for such lengths, the gradients are right, and the same however many programs share
    the work; but dq of a fused kernel, which is only right again."""
    compiled()
    device = Device.current()
    for lengths in LENGTHS:
        stated = problem(mask, dims, *lengths)
        case = check.prepare_backward(stated, "cuda", seed=zlib.crc32(stated.key.encode()))
        for candidate in structures(stated):
            kernel = build(candidate, stated, device)
            results = []
            for num_sms in (device.num_sms, 3):
                bound = launch.prepare_backward(kernel, stated, case.given, replace(device, num_sms=num_sms))
                result = check.check_backward(bound, case)
                assert result.ok, f"{stated}: {candidate}: {result.message}"
                results.append([gradient.clone() for gradient in case.gradients])
            for name, first, second in zip(("dq", "dk", "dv"), *results):
                assert torch.equal(first, second) or (name == "dq" and candidate.variant.fused), f"{stated}: {candidate}: {name}"


@pytest.mark.parametrize("dims", ["64", "128", "256"])
def test_stress(dims: str) -> None:
    """Several scales, 0 and a negative one among them, and 30 times the same bits, of a causal problem with a diagonal off the blocks."""
    device = Device.current()
    stated = replace(problem("causal", dims, 1111, 1300), batch=1)
    case = check.prepare_backward(stated, "cuda", seed=1)
    for candidate in structures(stated):
        bound = launch.prepare_backward(build(candidate, stated, device), stated, case.given, device)
        result = check.stress_backward(bound, stated, "cuda", seed=3, repeats=30, same_dq=not candidate.variant.fused)
        assert result.ok, f"{candidate}: {result.message}"
