"""Legality of warp-specialised backward kernels for sm_90: a program owns block_n keys and walks block_m queries at a time."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flashgen import resources, schedule
from flashgen.candidate import Candidate, Config, Variant
from flashgen.device import Device
from flashgen.problem import Problem
from flashgen.schedule import tile_rows
from flashgen.space.hopper import misfits

# (block_m, block_n) by the larger head dim, the one that is mostly faster first. Two warpgroups have 64 keys and both sums each, but at 256
# one sum each for the same keys: more do not fit into registers.
TILES = {64: ((128, 128), (64, 128)), 128: ((64, 128),), 256: ((64, 64),)}
MOST_STAGES = 3
MOST_FUSED = 128  # head dim: with more, shared memory has no room for the score gradients and dq
# Queries of a tile whose dq is worth adding up in float16: +4 % (d 64, full, N 1024 and 4096). With 64 queries scales cost more than the
# bytes that they save: -3 % at d 64, -4 to -7 % at d 128 (H200, 2026-11-30).
FLOAT16_QUERIES = 128

# What these kernels have no choice of.
FIXED: dict[str, Any] = {
    "load": "tma",
    "order": "",
    "ping_pong": False,
    "lazy_rescale": False,
    "num_warps": 8,
    "q_stages": 1,
    "packed_heads": 1,
    "maxnreg": None,
    "masked_apart": True,
    "persistent": False,
    "longest_first": False,  # their schedule begins with the keys that most queries see, whatever the variant says
}

Violation = tuple[str, str]  # name of the constraint, message


def axes(problem: Problem, device: Device) -> dict[str, list[Any]]:
    """Choices of every other knob, the most promising first."""
    most_heads = 1 << max(0, (problem.batch * problem.heads_kv).bit_length() - 1)
    masked = problem.band != (None, None)
    return {
        "fused": [True, False],
        "split_roles": [False, True],
        "float16_dq": [True, False] if problem.float16_dq else [False],
        "block_m": [128, 64],
        "block_n": [128, 64],
        "num_stages": list(range(MOST_STAGES, 0, -1)),
        "head_group": list(dict.fromkeys(min(group, most_heads) for group in (4, 8, 1))) if masked else [1],
    }


def tile_violations(candidate: Candidate, problem: Problem, device: Device) -> Iterator[Violation]:
    """Clauses about the tile and how it is loaded; they do not look at the order of work."""
    variant, config = candidate.variant, candidate.config
    dim = max(schedule.specialised_dims(problem))
    tiles = TILES.get(dim, ())
    if (config.block_m, config.block_n) not in tiles:
        allowed = " or ".join(f"{block_m} x {block_n}" for block_m, block_n in tiles) or "none"
        yield "tile", f"is {config.block_m} x {config.block_n}, head dims padded to {dim} have {allowed}"
        return
    broken = list(misfits(problem, device))
    if broken:
        yield from broken
        return
    if config.block_m > tile_rows(problem.seqlen_q):
        yield "block_m", f"is {config.block_m}, seqlen {problem.seqlen_q} fills {tile_rows(problem.seqlen_q)}"
    if variant.split_roles != _splits(problem):
        yield "split_roles", f"is {variant.split_roles}, head dims padded to {dim} need {_splits(problem)}"
    if variant.fused and dim > MOST_FUSED:
        yield "fused", f"is set, head dims are padded to {dim}, and shared memory has room for {MOST_FUSED}"
    if variant.fused and problem.deterministic:
        yield "fused", "is set, but dq is then added up in the order in which programs come along, and the problem is deterministic"
    if variant.float16_dq and not problem.float16_dq:
        yield "float16_dq", "is set, but the problem wants dq added up in float32"
    if variant.float16_dq and not variant.fused:
        yield "float16_dq", "is set, but a loop of dq alone sums in registers, in float32"
    if variant.float16_dq and config.block_m < FLOAT16_QUERIES:
        yield "float16_dq", f"is set, which only pays with {FLOAT16_QUERIES} queries a tile, and these are {config.block_m}"
    smem = resources.smem_bytes(candidate, problem, device)
    if smem > device.smem_per_block_bytes:
        yield "smem", f"needs {smem} bytes, {device.name} has {device.smem_per_block_bytes}"
    # More slots than the longest loop has blocks are the same kernel as fewer.
    longest = _longest_loop(problem, config.block_m)
    if config.num_stages > longest:
        yield "num_stages", f"is {config.num_stages}, the longest loop has {longest} blocks"
    elif config.num_stages > MOST_STAGES:
        yield "num_stages", f"is {config.num_stages}, more than {MOST_STAGES} slots are of no use"


def order_violations(candidate: Candidate, problem: Problem, device: Device) -> Iterator[Violation]:
    """Clauses about the order of work."""
    config = candidate.config
    heads, tiles = problem.batch * problem.heads_kv, schedule.key_blocks(problem, config.block_n)
    if config.head_group > max(1, heads):
        yield "head_group", f"is {config.head_group}, batch * heads_kv is {heads}"
    elif config.head_group > 1 and not is_ordered(problem, device, config.block_n):
        unordered = f"mask {candidate.variant.mask}, {tiles} blocks of keys and {device.num_sms} SMs leave nothing to order"
        yield "head_group", f"is {config.head_group}, but {unordered}"


def is_ordered(problem: Problem, device: Device, block_n: int) -> bool:
    """Whether the order of blocks of keys matters: they see unequal numbers of queries, and some SM has several."""
    return problem.band != (None, None) and problem.seqlen_kv > block_n and schedule.key_blocks(problem, block_n) > device.num_sms


def pick(problem: Problem, device: Device) -> Candidate:
    """The hand-picked candidate for large problems with these head dims; it may not fit.

    At head dims 64, 128 and 256 it has 529, 614 and 512 TFLOP/s (full, N 8192, H200, 2026-11-30). Under causal masks (N 8192) four heads
    are 0.4, 2.4 and 5 % ahead of one, and at 128 and 256 1.4 and 1.6 % ahead of eight.
    """
    # Two bounds a row take registers that the larger tile does not have: 42 loads and stores of spills a step (Triton 3.6).
    block_m, block_n = TILES[max(schedule.specialised_dims(problem))][-1 if problem.band[0] is not None else 0]
    fused, float16_dq = _may_fuse(problem), problem.float16_dq and block_m == FLOAT16_QUERIES
    structure: dict[str, Any] = dict(fused=fused, split_roles=_splits(problem), float16_dq=float16_dq)
    variant = Variant(family="backward", backend="hopper", load="tma", **structure)
    return Candidate(variant=variant, config=Config(block_m=block_m, block_n=block_n, num_warps=8, num_stages=2, head_group=4))


def adapt(candidate: Candidate, problem: Problem, device: Device) -> Candidate | None:
    """A candidate with the structure that the problem requires, made to fit: the same tile or the largest, fewer slots as needed."""
    variant, config = candidate.variant, candidate.config
    if any(misfits(problem, device)):
        return None
    usable = [tile for tile in TILES[max(schedule.specialised_dims(problem))] if tile[0] <= tile_rows(problem.seqlen_q)]
    block_m, block_n = (config.block_m, config.block_n) if (config.block_m, config.block_n) in usable else usable[0]
    ordered = is_ordered(problem, device, block_n)
    heads = problem.batch * problem.heads_kv
    # Where roles are split, fused was no choice.
    fused = _may_fuse(problem) and (variant.fused or variant.split_roles)
    structure: dict[str, Any] = {
        "fused": fused,
        "split_roles": _splits(problem),
        "float16_dq": variant.float16_dq and fused and problem.float16_dq and block_m == FLOAT16_QUERIES,
    }
    for num_stages in range(min(config.num_stages, MOST_STAGES, _longest_loop(problem, block_m)), 0, -1):
        shrunk = Candidate(
            variant=replace(variant, **structure),
            config=replace(
                config,
                block_m=block_m,
                block_n=block_n,
                num_stages=num_stages,
                head_group=min(config.head_group, 1 << (heads.bit_length() - 1)) if ordered else 1,
            ),
        )
        if resources.smem_bytes(shrunk, problem, device) <= device.smem_per_block_bytes:
            return shrunk
    return None


def _splits(problem: Problem) -> bool:
    """Whether each warpgroup has one of the sums over queries."""
    return max(schedule.specialised_dims(problem)) > MOST_FUSED


def _may_fuse(problem: Problem) -> bool:
    return not problem.deterministic and max(schedule.specialised_dims(problem)) <= MOST_FUSED


def _longest_loop(problem: Problem, block_m: int) -> int:
    """Blocks of queries, of all heads that read the same keys, that a program walks at most."""
    return max(1, problem.heads_q // problem.heads_kv * math.ceil(problem.seqlen_q / block_m))
