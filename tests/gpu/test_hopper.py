"""Warp-specialised kernels on the GPU against the float64 oracle: every structure over the shapes that break pipelines and masks."""

import functools
import itertools
import math
import random
import zlib
from dataclasses import replace

import pytest
import torch

from flashgen import check, launch, reference, space
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

STRUCTURES = 2  # of each mask and pair of head dims
# Few queries, and as many as make several tiles; each with keys that end in a block.
PACKED_LENGTHS = [(1, 777), (5, 100), (17, 1030), (64, 65), (100, 300), (1000, 1030)]
PACKED = list(itertools.product(("full", "causal", "window", "both sides"), ("64", "128", "256", "odd"), (2, 4, 8)))


def structures(mask: str, dims: str) -> list[Candidate]:
    """Candidates of different variants and tiles, drawn by chance; the search offers them for one large problem."""
    large = problem(mask, dims, 4096, 4096)
    by_kind: dict[object, Candidate] = {}
    for candidate in space.candidates(large, Device.named("h200")):
        if candidate.variant.backend == "hopper" and candidate.config.packed_heads == 1:
            by_kind.setdefault((candidate.variant, candidate.config.block_m, candidate.config.block_n), candidate)
    kinds = list(by_kind.values())
    random.Random(f"{mask} {dims}").shuffle(kinds)
    return kinds[:STRUCTURES]


def problem(mask: str, dims: str, seqlen_q: int, seqlen_kv: int) -> Problem:
    return awkward.problem(mask, dims, seqlen_q, seqlen_kv, direction="forward", return_lse=True)


def packed(mask: str, dims: str, packed_heads: int) -> list[tuple[Problem, list[Candidate]]]:
    """Problems with at least 4 heads that share keys, and candidates that pack so many of them."""
    found = []
    for lengths in PACKED_LENGTHS:
        stated = replace(problem(mask, dims, *lengths), heads_q=2 * max(4, packed_heads), heads_kv=2)
        each = structures(mask, dims)
        found.append((stated, [replace(one, config=replace(one.config, packed_heads=packed_heads)) for one in each]))
    return found


@functools.cache
def compiled() -> None:
    cases = itertools.product(MASKS, DIMS, LENGTHS)
    awkward.compile_all((each, problem(mask, dims, *lengths)) for mask, dims, lengths in cases for each in structures(mask, dims))


@functools.cache
def compiled_packed() -> None:
    cases = itertools.chain(*itertools.starmap(packed, PACKED))
    awkward.compile_all((each, stated) for stated, candidates in cases for each in candidates)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("mask", MASKS)
def test_awkward_lengths(mask: str, dims: str) -> None:
    """Whether or not the search would offer the tile for such lengths, its result is right, again and again the same, and the same
    however many programs share the work."""
    compiled()
    for lengths in LENGTHS:
        judge(problem(mask, dims, *lengths), structures(mask, dims))


@pytest.mark.parametrize(("mask", "dims", "packed_heads"), PACKED)
def test_packed_heads(mask: str, dims: str, packed_heads: int) -> None:
    """The same where a tile has rows of several heads."""
    compiled_packed()
    for stated, candidates in packed(mask, dims, packed_heads):
        judge(stated, candidates)


def judge(stated: Problem, candidates: list[Candidate]) -> None:
    device = Device.current()
    case = check.prepare(stated, "cuda", seed=zlib.crc32(stated.key.encode()))
    for candidate in candidates:
        kernel = build(candidate, stated, device)
        results = []
        for num_sms in (device.num_sms, 3, 3):
            few = replace(device, num_sms=num_sms)
            bound = launch.prepare(kernel, stated, case.query, case.key, case.value, case.out, case.lse, few)
            result = check.check(bound, case)
            assert result.ok, f"{stated}: {candidate} on {num_sms} SMs: {result.message}"
            results.append((case.out.clone(), case.lse.clone()))
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]), f"{stated}: {candidate}"


# What is added to the scores of 64 keys, counted from the last ones, which are walked first.
RISES = {
    "by little": lambda block: 3.0 * block,
    "beyond the guess now and then": lambda block: 50.0 * (block // 3),
    "fast": lambda block: 2.0**block,
    "up and down": lambda block: random.Random(block).choice([-3000.0, 0.0, 0.0, 100.0, 3000.0]),
}


@pytest.mark.parametrize("rise", RISES)
@pytest.mark.parametrize("dims", ["64", "128", "256"])
@pytest.mark.parametrize("mask", ["full", "causal", "both sides"])
def test_references_follow_scores_that_rise(mask: str, dims: str, rise: str) -> None:
    """They rise from block to block for a third of the queries, and fall for another. NaN in a query or key reaches no one else."""
    stated = problem(mask, dims, 577, 1030)
    dim, scale, random_rows = stated.head_dim_qk, stated.head_dim_qk**-0.5, torch.Generator("cuda").manual_seed(5)
    query, key, value = check.inputs(stated, "cuda", seed=7)
    blocks = (stated.seqlen_kv - 1 - torch.arange(stated.seqlen_kv)) // 64
    rises = torch.tensor([RISES[rise](int(block)) for block in blocks], device="cuda") / scale
    heads_first = (0, 1, 2, 3) if stated.layout == "bhsd" else (0, 2, 1, 3)
    queries, keys = query.permute(heads_first), key.permute(heads_first)
    queries[..., 0] = torch.randint(-1, 2, (stated.seqlen_q,), generator=random_rows, device="cuda").to(query.dtype)
    keys[..., 0] = rises.to(key.dtype)
    queries[0, 0, 300, dim - 1] = keys[1, 0, 500, 3] = math.nan
    given = dict(mask=stated.mask, window=stated.window, scale=scale, layout=stated.layout)
    expected, expected_lse = reference.attention(query, key, value, **given)
    plain, _ = reference.plain(query, key, value, **given)
    allowed = 1e-3 + 2 * float((plain - expected).abs().nan_to_num().max())
    for candidate in structures(mask, dims):
        out = torch.full_like(expected, math.inf, dtype=query.dtype)
        lse = torch.full_like(expected_lse, math.inf, dtype=torch.float32)
        launch.bind(candidate, stated, query, key, value, out, lse, Device.current())(query, key, value, out, lse, scale)
        assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(lse.isnan(), expected_lse.isnan()), candidate
        assert float((out - expected).abs().nan_to_num().max()) < allowed, candidate
        torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=1e-5, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("dims", ["64", "128", "256"])
def test_stress(dims: str) -> None:
    """Several scales, 0 among them, and 30 times the same bits, for every structure of a causal problem with a diagonal off the blocks."""
    device = Device.current()
    for candidate in structures("causal", dims):
        stated = replace(problem("causal", dims, 1111, 1300), batch=1)
        case = check.prepare(stated, "cuda", seed=1)
        kernel = build(candidate, stated, device)
        bound = launch.prepare(kernel, stated, case.query, case.key, case.value, case.out, case.lse, device)
        result = check.stress(bound, stated, "cuda", seed=3, repeats=30)
        assert result.ok, f"{candidate}: {result.message}"
