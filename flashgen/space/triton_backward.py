"""Legality of portable backward kernels: a program owns block_n rows and walks block_m of the others at a time."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flashgen import resources, schedule
from flashgen.candidate import Candidate, Config, Variant
from flashgen.device import Device
from flashgen.problem import Problem
from flashgen.schedule import tile_rows

# Most of dk and dv that a thread holds beside the scores. 128 spill 144 bytes and more, 256 spill 1256 (head dim 256, sm_90, Triton 3.6).
MOST_ACCUMULATORS = 128
MOST_ACCUMULATORS_FP32 = 32  # ordinary cores take both operands from registers

# What these kernels have no choice of.
FIXED: dict[str, Any] = {
    "load": "pointer",
    "order": "",
    "ping_pong": False,
    "lazy_rescale": False,
    "q_stages": 1,
    "packed_heads": 1,
    "maxnreg": None,
    "persistent": False,
    "longest_first": False,
    "head_group": 1,
    "fused": False,
    "split_roles": False,
    "float16_dq": False,
}

Violation = tuple[str, str]  # name of the constraint, message


def axes(problem: Problem, device: Device) -> dict[str, list[Any]]:
    """Choices of every other knob."""
    return {
        "block_m": [16, 32, 64, 128],
        "block_n": [16, 32] if problem.itemsize == 4 else [32, 64, 128],
        "num_warps": [4, 8],
        "num_stages": [1, 2, 3],
        "masked_apart": [True, False],
    }


def tile_violations(candidate: Candidate, problem: Problem, device: Device) -> Iterator[Violation]:
    """Clauses in the order in which they are judged."""
    config = candidate.config
    # Triton's tensors have powers of two of elements, and its products at least 16 rows, columns and depth.
    for name, least in (("block_m", 16), ("block_n", 16), ("num_warps", 1)):
        value = getattr(config, name)
        if value < least or value & (value - 1):
            yield name, f"is {value}, must be a power of two of at least {least}"
            return
    if config.num_warps > 32:
        yield "num_warps", f"is {config.num_warps}, a program has at most 32"
        return

    # A tile beyond the end of both sequences is wasted.
    rows = _most_rows(problem)
    for name in ("block_m", "block_n"):
        if getattr(config, name) > rows:
            yield name, f"is {getattr(config, name)}, the longer sequence fills {rows}"
    # What a thread holds for the whole loop, and for a block of it.
    accumulators, most = _accumulators(config, problem)
    if accumulators > most and config.block_n > 16:
        yield "registers", f"dk and dv take {accumulators:g} of a thread, more than {most}"
    scores, most = _scores(config, problem)
    if scores > most:
        yield "registers", f"scores take {scores:g} of a thread, more than {most}"
    if problem.itemsize == 2 and config.block_n < 8 * config.num_warps:
        yield "warp_rows", f"{config.num_warps} warps need {8 * config.num_warps} rows, block_n is {config.block_n}"
    smem = resources.smem_bytes(candidate, problem, device)
    if smem > device.smem_per_block_bytes:
        yield "smem", f"needs {smem} bytes, {device.name} has {device.smem_per_block_bytes}"
    # A pipeline deeper than the longest loop is the same kernel as a shorter one.
    longest = _longest_loop(problem, config.block_m)
    if config.num_stages > longest:
        yield "num_stages", f"is {config.num_stages}, the longest loop has {longest} blocks"


def order_violations(candidate: Candidate, problem: Problem, device: Device) -> Iterator[Violation]:
    """Clauses about the order of work."""
    # Loops apart for whole and for cut blocks only differ from one loop where there are both; with nothing to mask, nothing is masked.
    whole, cut = _walked(candidate.config, problem)
    if candidate.variant.masked_apart and cut and not whole:
        yield "masked_apart", f"is set, but {whole} of {whole + cut} blocks need no mask"
    if not candidate.variant.masked_apart and not cut:
        yield "masked_apart", f"is not set, but {cut} of {whole} blocks need a mask"


def pick(problem: Problem, device: Device) -> Candidate:
    """The hand-picked candidate: the largest tiles of which no function spills at head dims up to 128. Registers are those of dk and dv,
    causal, in bf16, as Triton 3.6 compiles them; nothing here was measured on a GPU yet."""
    dim = max(schedule.tile_dim(problem.head_dim_qk), schedule.tile_dim(problem.head_dim_v))
    if problem.itemsize == 4:
        block_m, block_n, num_warps, num_stages = 16, 32 if dim <= 64 else 16, 8, 1
    elif dim <= 128 and device.capability < 90:
        # 255 on sm_80 with head dim 128, where a window spills 8 bytes with 64 rows and needs 175 with 32. 64 x 128 spill 8 at 64.
        block_m, block_n, num_warps, num_stages = 32 if dim > 64 and problem.band[0] is not None else 64, 64, 8, 2
    elif dim <= 64:
        block_m, block_n, num_warps, num_stages = 64, 128, 8, 2  # 215 on sm_90
    elif dim <= 128:
        block_m, block_n, num_warps, num_stages = 32, 128, 8, 2  # 246 on sm_90; 64 x 128 spill 128 bytes without a mask
    else:
        block_m, block_n, num_warps, num_stages = 16, 64, 8, 2  # 255 and 144 bytes spilled on sm_90, none on sm_80
    numbers = Config(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
    return Candidate(variant=Variant(family="backward"), config=numbers)


def adapt(candidate: Candidate, problem: Problem, device: Device) -> Candidate:
    """A candidate with the structure that the problem requires, whose numbers are cut down where that may make them legal."""
    rows, config = _most_rows(problem), candidate.config
    config = replace(config, block_m=min(config.block_m, rows), block_n=min(config.block_n, rows))
    while config.block_n > 16 and _accumulators(config, problem)[0] > _accumulators(config, problem)[1]:
        config = replace(config, block_n=config.block_n // 2)
    while config.block_m > 16 and _scores(config, problem)[0] > _scores(config, problem)[1]:
        config = replace(config, block_m=config.block_m // 2)
    if problem.itemsize == 2:
        config = replace(config, num_warps=min(config.num_warps, max(4, config.block_n // 8)))
    config = replace(config, num_stages=min(config.num_stages, _longest_loop(problem, config.block_m)))
    shrunk = replace(candidate, config=config)
    while shrunk.config.num_stages > 1 and resources.smem_bytes(shrunk, problem, device) > device.smem_per_block_bytes:
        shrunk = replace(shrunk, config=replace(shrunk.config, num_stages=shrunk.config.num_stages - 1))
    whole, cut = _walked(config, problem)
    masked_apart = cut == 0 or (candidate.variant.masked_apart and whole > 0)
    return replace(shrunk, variant=replace(candidate.variant, masked_apart=masked_apart))


def _walked(config: Config, problem: Problem) -> tuple[int, int]:
    """Blocks without and with a cut, that a head's programs walk for dk and dv, and for dq."""
    queries = schedule.walk_queries(problem, config.block_m, config.block_n)
    keys = schedule.walk(problem, config.block_n, config.block_m)
    return queries.whole + keys.whole, queries.cut + keys.cut


def _accumulators(config: Config, problem: Problem) -> tuple[float, int]:
    """How much of dk and dv a thread holds, and may hold."""
    columns = schedule.tile_dim(problem.head_dim_qk) + schedule.tile_dim(problem.head_dim_v)
    return config.block_n * columns / (32 * config.num_warps), MOST_ACCUMULATORS if problem.itemsize == 2 else MOST_ACCUMULATORS_FP32


def _scores(config: Config, problem: Problem) -> tuple[float, int]:
    """How many scores of a block a thread holds, and may hold."""
    return config.block_m * config.block_n / (32 * config.num_warps), 32 if problem.itemsize == 2 else 4


def _most_rows(problem: Problem) -> int:
    """Rows of the largest tile that makes sense."""
    return max(32 if problem.itemsize == 2 else 16, tile_rows(max(problem.seqlen_q, problem.seqlen_kv)))


def _longest_loop(problem: Problem, block_m: int) -> int:
    """Blocks that a program walks at most: queries of all heads of a group, or keys."""
    group = problem.heads_q // problem.heads_kv
    return max(1, group * math.ceil(problem.seqlen_q / block_m), math.ceil(problem.seqlen_kv / block_m))
