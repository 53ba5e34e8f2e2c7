"""Warp-specialised backward kernels on the GPU against the float64 oracle: structures over the shapes that break pipelines and masks."""

import functools
import itertools
import math
import zlib
from dataclasses import replace

import pytest
import torch

from flashgen import check, launch, space
from flashgen.build import build
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.launch import BackwardInputs
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
    """Whether the LSE has a gradient differs from one mask to the next. dq may be added up in float16, and in float32 all the same."""
    stated = awkward.problem(mask, dims, seqlen_q, seqlen_kv, direction="backward", return_lse=mask in ("causal", "both sides"))
    return replace(stated, float16_dq=True)


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


@pytest.mark.parametrize(("of_v", "of_dout"), [(2.0**60, 2.0**40), (2.0**-50, 2.0**-50), (2.0**80, 2.0**-80), (2.0**13, 2.0**13)])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_sums_in_float16_of_huge_and_tiny_numbers(mask: str, of_v: float, of_dout: float, monkeypatch) -> None:
    """Gradients are linear in v and dout, and times powers of two they keep their bits, but for the order in which dq was added up. What
    lay in scratch memory before does not matter."""
    device = Device.current()
    stated = problem(mask, "64", 1000, 1030)
    case = check.prepare_backward(stated, "cuda", seed=5)
    query, key, value, out, lse, dout, dlse = case.given
    given = BackwardInputs(
        query, key, value * of_v, out * of_v, lse, dout * of_dout, None if dlse is None else (dlse * of_v * of_dout).contiguous()
    )
    empty = torch.empty
    for candidate in structures(stated):
        if candidate.variant.float16_dq:
            bound = launch.prepare_backward(build(candidate, stated, device), stated, given, device)
            case.poison()
            monkeypatch.setattr(torch, "empty", lambda *sizes, **more: empty(*sizes, **more).fill_(math.nan))
            bound(*given, *case.gradients, case.scale)
            monkeypatch.undo()
            dq, dk, dv = case.gradients
            result = check.judge_backward(dq / of_v / of_dout, dk / of_v / of_dout, dv / of_dout, case)
            assert result.ok, f"{candidate}: {result.message}"


def test_sums_in_float16_that_do_not_fit_are_no_numbers() -> None:
    """An infinite value, which every row sees."""
    device = Device.current()
    stated = problem("full", "64", 1000, 1030)
    case = check.prepare_backward(stated, "cuda", seed=6)
    value = case.given.value.clone()
    value[0, 0, 0, 0] = math.inf
    for candidate in structures(stated):
        bound = launch.prepare_backward(build(candidate, stated, device), stated, case.given._replace(value=value), device)
        bound(*case.given._replace(value=value), *case.gradients, case.scale)
        dq = case.gradients.dq if stated.layout == "bhsd" else case.gradients.dq.transpose(1, 2)
        assert not dq[0, 0].isfinite().any(), str(candidate)
        assert dq[1].isfinite().all(), str(candidate)
