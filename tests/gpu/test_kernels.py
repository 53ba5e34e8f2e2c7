"""Generated kernels on a GPU, in bf16 and fp16 too, against the float64 oracle: every structure over the awkward shapes."""

import functools
import itertools
import random
import zlib
from dataclasses import replace

import pytest
import torch

from flashgen import check, launch, space
from flashgen.build import CompilePool, build
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.problem import Problem

pytestmark = pytest.mark.gpu

SHAPES = {
    "one key": dict(seqlen_q=1, seqlen_kv=1),
    "one query": dict(seqlen_q=1, seqlen_kv=777),
    "tails": dict(seqlen_q=129, seqlen_kv=255),
    "multiple of the tiles": dict(seqlen_q=256, seqlen_kv=512),
    "more queries": dict(seqlen_q=300, seqlen_kv=100),
    "no key": dict(seqlen_q=70, seqlen_kv=0),
}
MASKS = {
    "full": dict(),
    "causal": dict(mask="causal"),
    "top left": dict(mask="causal_top_left"),
    "window": dict(mask="causal", window=(40, None)),
    "both sides": dict(window=(70, 33)),
    "itself only": dict(window=(0, 0)),
}
HEADS = {"MHA": dict(heads_q=2, heads_kv=2), "GQA": dict(heads_q=6, heads_kv=2)}
STRUCTURES = 2  # candidates of each problem
DIMS = {"64": (64, 64), "128": (128, 128), "256": (256, 256), "odd": (80, 40), "192/128": (192, 128), "tiny": (8, 8)}


@functools.cache
def structures(problem: Problem, device: Device, count: int) -> list[Candidate]:
    """One candidate of each variant, persistent or not, and then some more at random, `count` in all."""
    legal = space.candidates(problem, device)
    chance = random.Random(problem.key)
    chance.shuffle(legal)
    first: dict[object, Candidate] = {}
    for candidate in legal:
        first.setdefault((candidate.variant, candidate.config.persistent), candidate)
    return ([*first.values()] + [candidate for candidate in legal if candidate not in first.values()])[:count]


def awkward(mask: str, dims: str) -> list[Problem]:
    """A problem of each shape, with dtype, heads and layout drawn by chance."""
    chance = random.Random(f"{mask} {dims}")
    return [
        Problem(
            batch=2,
            head_dim_qk=DIMS[dims][0],
            head_dim_v=DIMS[dims][1],
            dtype=chance.choice(["bfloat16", "bfloat16", "float16", "float32"]),
            layout=chance.choice(["bhsd", "bshd"]),
            return_lse=chance.random() < 0.7,
            aligned_16=chance.random() < 0.8,
            **HEADS[chance.choice(list(HEADS))],
            **MASKS[mask],
            **shape,
        )
        for shape in SHAPES.values()
    ]


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compiles all kernels of the test below on all cores, so that each test finds them in Triton's cache."""
    device = Device.current()
    with CompilePool() as pool:
        for mask, dims in itertools.product(MASKS, DIMS):
            for problem in awkward(mask, dims):
                for candidate in structures(problem, device, STRUCTURES):
                    pool.submit(candidate, problem, device)
        for _ in pool.results():
            pass


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("mask", MASKS)
def test_awkward_shapes(mask: str, dims: str) -> None:
    """N21 to N27 and their kin; NaN lies between and around the rows, in outputs too."""
    device = Device.current()
    for problem in awkward(mask, dims):
        case = check.prepare(problem, "cuda", seed=zlib.crc32(problem.key.encode()))
        for candidate in structures(problem, device, STRUCTURES):
            kernel = build(candidate, problem, device)
            bound = launch.prepare(kernel, problem, case.query, case.key, case.value, case.out, case.lse, device)
            result = check.check(bound, case)
            assert result.ok, f"{problem}: {candidate}: {result.message}"


@pytest.mark.parametrize("num_sms", [1, 7, 78, 200])
def test_persistent_grid_of_any_size(num_sms: int) -> None:
    """T25: the result does not depend on how many programs share the work."""
    device = Device.current()
    problem = Problem(batch=2, heads_q=4, heads_kv=4, seqlen_q=2100, seqlen_kv=2100, head_dim_qk=64, head_dim_v=64, mask="causal")
    candidate = next(c for c in space.candidates(problem, device) if c.config.persistent and c.config.block_m == 64)
    case = check.prepare(problem, "cuda", seed=num_sms)
    kernel = build(candidate, problem, device)
    bound = launch.prepare(kernel, problem, case.query, case.key, case.value, case.out, case.lse, replace(device, num_sms=num_sms))
    result = check.check(bound, case)
    assert result.ok, result.message


def test_stress_of_the_default() -> None:
    """Several scales and seeds, and bitwise the same result again and again."""
    device = Device.current()
    problem = Problem(
        batch=1, heads_q=8, heads_kv=2, seqlen_q=1111, seqlen_kv=1300, head_dim_qk=128, head_dim_v=128, mask="causal", return_lse=True
    )
    case = check.prepare(problem, "cuda", seed=1)
    kernel = build(space.default(problem, device), problem, device)
    bound = launch.prepare(kernel, problem, case.query, case.key, case.value, case.out, case.lse, device)
    result = check.stress(bound, problem, "cuda", seed=3)
    assert result.ok, result.message
    torch.cuda.synchronize()
