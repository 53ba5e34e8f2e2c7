"""Legality of portable kernels: clauses in the order in which they are judged."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flashgen import resources, schedule
from flashgen.candidate import Candidate, Config, Variant
from flashgen.device import Device
from flashgen.problem import Problem
from flashgen.schedule import tile_rows

MOST_ELEMENTS = 1 << 20  # of one Triton tensor
MOST_COSTLY_SPILL = 320  # bytes, as guessed: with as many, kernels took 1.4 to 2 times as long (H200, 2026-11-29)
UNSURE_REGISTERS = 8  # what a guess of the registers may be off

# What these kernels have no choice of.
FIXED: dict[str, Any] = {
    "order": "",
    "ping_pong": False,
    "lazy_rescale": False,
    "q_stages": 1,
    "packed_heads": 1,
    "fused": False,
    "split_roles": False,
    "float16_dq": False,
}

Violation = tuple[str, str]  # name of the constraint, message


def no_tma(problem: Problem) -> bool:
    """TMA cannot describe these tensors, or does not help, on any device."""
    odd_rows = any(dim * problem.itemsize % 16 for dim in (problem.head_dim_qk, problem.head_dim_v))
    return odd_rows or problem.itemsize > 2 or not problem.aligned_16 or problem.seqlen_kv == 0


def axes(problem: Problem, device: Device) -> dict[str, list[Any]]:
    """Choices of every other knob."""
    most_heads = 1 << max(0, (problem.batch * problem.heads_q).bit_length() - 1)
    masked = problem.band != (None, None)
    return {
        "load": ["pointer"] if no_tma(problem) or not device.has_tma else ["tma", "pointer"],
        # 256 rows or keys were never best: 10 to 25 % behind (H200, d 64 to 256, 2026-11-29).
        "block_m": [16, 32, 64, 128],
        "block_n": [16, 32, 64, 128],
        "num_warps": [1, 2, 4, 8],
        "num_stages": [1, 2, 3, 4],
        "maxnreg": [None, 96, 128, 168],
        "masked_apart": [True, False],
        "persistent": [False, True],
        "longest_first": [True, False] if masked else [False],
        "head_group": sorted({min(group, most_heads) for group in (1, 4, 16)}) if masked else [1],
    }


def tile_violations(candidate: Candidate, problem: Problem, device: Device) -> Iterator[Violation]:
    """Clauses about the tile and how it is loaded; they do not look at the order of work."""
    variant, config = candidate.variant, candidate.config
    block_m, block_n, num_warps, num_stages = config.block_m, config.block_n, config.num_warps, config.num_stages

    # Triton's tensors have powers of two of elements, and its products at least 16 rows, columns and depth.
    for name, least in (("block_m", 16), ("block_n", 16), ("num_warps", 1)):
        value = getattr(config, name)
        if value < least or value & (value - 1):
            yield name, f"is {value}, must be a power of two of at least {least}"
            return
    columns = max(schedule.tile_dim(problem.head_dim_qk), schedule.tile_dim(problem.head_dim_v))
    for elements in (max(block_m, block_n) * columns, block_m * block_n):
        if elements > MOST_ELEMENTS:
            yield "elements", f"a tile has {elements}, Triton allows {MOST_ELEMENTS}"
    # A program has at most 1024 threads.
    if num_warps > 32:
        yield "num_warps", f"is {num_warps}, a program has at most 32"
        return

    # TMA: hardware from Hopper on, 16-byte addresses and strides, boxes of at most 256 rows, no empty tensor.
    if variant.load == "tma":
        row_bytes = [dim * problem.itemsize for dim in (problem.head_dim_qk, problem.head_dim_v)]
        if not device.has_tma:
            yield "tma", f"needs sm_90, {device.name} is {device.arch}"
        if not problem.aligned_16:
            yield "tma", "needs addresses and strides that are multiples of 16 bytes, the problem has others"
        if any(size % 16 for size in row_bytes):
            yield "tma", f"needs rows of a multiple of 16 bytes, the problem's have {row_bytes[0]} and {row_bytes[1]}"
        if problem.seqlen_kv == 0:
            yield "tma", "needs at least 1 key, the problem has 0"
        # Ordinary cores read TMA's layout badly: 632 bytes of spills, against none (32 x 32, d 64, 4 warps, sm_90, Triton 3.6).
        if problem.itemsize > 2:
            yield "tma", f"is for elements of 2 bytes, the problem's have {problem.itemsize}"
        if max(block_m, block_n) > 256:
            yield "tma", f"a box has {max(block_m, block_n)} rows, at most 256 are allowed"

    # A tile beyond the end of the sequence is wasted.
    for name, value, seqlen in (("block_m", block_m, problem.seqlen_q), ("block_n", block_n, problem.seqlen_kv)):
        if value > tile_rows(seqlen):
            yield name, f"is {value}, seqlen {seqlen} fills {tile_rows(seqlen)}"

    if problem.itemsize == 2:
        # A tensor core instruction has 16 rows a warp: with fewer, warps repeat each other's work.
        if block_m < 16 * num_warps:
            yield "warp_rows", f"{num_warps} warps need {16 * num_warps} rows, block_m is {block_m}"
        # Small tiles read K and V more often, and on Hopper miss the fast products (4 warps, 64 rows): only for want of tiles.
        tiles = problem.batch * problem.heads_q * math.ceil(problem.seqlen_q / 64)
        if tiles >= device.num_sms and problem.seqlen_q >= 64:
            if block_m < 64 or num_warps < 4:
                yield "small_tile", f"{block_m} rows and {num_warps} warps, but {tiles} tiles of 64 rows fill {device.num_sms} SMs"
            if block_n < min(32, tile_rows(problem.seqlen_kv)):
                yield "small_tile", f"{block_n} keys at a time, where there are {problem.seqlen_kv} and no want of work"
    else:
        # Products on ordinary cores keep the operands of a thread's scores in its registers: 16 scores spill 350 to 1200 bytes.
        scores = block_m * block_n / (32 * num_warps)
        if not 2 <= scores <= 8:
            yield "fma_tile", f"{scores:g} scores a thread, fp32 products run with 2 to 8"

    # Some spills cost nothing; many in the loop make a kernel hopeless, unless no smaller tile exists.
    guess = resources.guess(candidate, problem, device)
    spilled = math.ceil(resources.costly_spill(candidate, guess.spill_bytes))
    if spilled > MOST_COSTLY_SPILL and max(block_m, block_n) > 16:
        limit = resources.register_limit(candidate, device)
        yield "registers", f"with {limit} a thread the loop spills about {spilled} bytes, more than {MOST_COSTLY_SPILL}"
    smem = guess.smem_bytes
    if smem > device.smem_per_block_bytes:
        yield "smem", f"needs {smem} bytes, {device.name} has {device.smem_per_block_bytes}"

    # A pipeline deeper than the longest loop is the same kernel as a shorter one.
    most = max(1, schedule.walk(problem, block_m, block_n).most)
    if num_stages > most:
        yield "num_stages", f"is {num_stages}, the longest loop has {most} blocks"
    # Without a pipeline, pointers load through registers: 1.5 to 2 times as long as TMA (H200, d 64 to 256, 2026-11-29).
    if num_stages == 1 < most and variant.load == "pointer" and device.has_tma and not no_tma(problem):
        yield "num_stages", f"is 1, pointer loads need 2 to compete with TMA over {most} blocks"
    # A cap on registers only pays where it lets one more program onto the SM, and then the largest such cap is enough.
    if config.maxnreg is not None:
        fit = resources.programs_per_sm(num_warps, config.maxnreg, smem, device)
        more = min(
            config.maxnreg + 8,
            resources.guess(replace(candidate, config=replace(config, maxnreg=None)), problem, device).registers + UNSURE_REGISTERS,
        )
        fit_without = resources.programs_per_sm(num_warps, more, smem, device)
        if fit <= fit_without:
            yield "maxnreg", f"a cap of {config.maxnreg} lets {fit} programs onto an SM, without it or with more there fit {fit_without}"
        # A warpgroup's product holds its whole result: ptxas refuses a cap that leaves less than this beside it (C7602, sm_90a).
        result = block_m * schedule.tile_dim(problem.head_dim_v) // (32 * num_warps)
        if resources.uses_warpgroups(candidate, problem, device) and config.maxnreg < result + 30:
            yield "maxnreg", f"a cap of {config.maxnreg} leaves too little beside a result of {result} registers, which needs {result + 30}"


def order_violations(candidate: Candidate, problem: Problem, device: Device) -> Iterator[Violation]:
    """Clauses about the order of work."""
    variant, config = candidate.variant, candidate.config
    # Loops apart for whole and for cut blocks only differ from one loop where there are both; with nothing to mask, nothing is masked.
    walked = schedule.walk(problem, config.block_m, config.block_n)
    if variant.masked_apart and walked.cut and not walked.whole:
        yield "masked_apart", f"is set, but {walked.whole} of {walked.whole + walked.cut} blocks need no mask"
    if not variant.masked_apart and not walked.cut:
        yield "masked_apart", f"is not set, but {walked.cut} of {walked.whole} blocks need a mask"

    # The order of tiles only matters where they are unequal, and there are several row blocks or heads to order.
    heads = problem.batch * problem.heads_q
    ordered = variant.mask != "full" and walked.row_blocks > 1
    if variant.longest_first and not ordered:
        yield "longest_first", f"is set, but mask {variant.mask} over {walked.row_blocks} row blocks leaves nothing to order"
    if config.head_group > max(1, heads):
        yield "head_group", f"is {config.head_group}, batch * heads_q is {heads}"
    elif config.head_group > 1 and not ordered:
        yield "head_group", f"is {config.head_group}, but mask {variant.mask} over {walked.row_blocks} row blocks leaves nothing to order"
    # With one tile a program, a persistent kernel is the plain one.
    tiles = heads * walked.row_blocks
    if config.persistent and tiles <= device.num_sms:
        yield "persistent", f"needs more tiles than SMs, there are {tiles} and {device.num_sms}"


def pick(problem: Problem, device: Device) -> Candidate:
    """The hand-picked candidate; it may not fit."""
    dim = max(schedule.tile_dim(problem.head_dim_qk), schedule.tile_dim(problem.head_dim_v))
    masked = problem.band != (None, None)
    tma = device.has_tma and not no_tma(problem)
    if problem.itemsize == 4:
        block_m, block_n, num_warps, num_stages = 32, 32, 4, 2
    elif device.capability >= 90 and dim <= 64:
        # 364 TFLOP/s on an H200, against 260 of 128 x 128 with 8 warps and 2 stages (d 64, full, N 1024, 2026-11-29).
        block_m, block_n, num_warps, num_stages = 128, 64, 4 if tma else 8, 3
    elif device.capability >= 90 and dim <= 128:
        # 504 TFLOP/s on an H200 by TMA (d 128, full, N 8192, 2026-11-29).
        block_m, block_n, num_warps, num_stages = 128, 128 if tma else 64, 8, 2
    elif device.capability >= 90:
        # 450 TFLOP/s on an H200 by TMA, 4 % behind the best (d 256, causal, N 8192, 2026-11-29).
        block_m, block_n, num_warps, num_stages = 128, 32, 8, 3
    else:
        block_m, block_n, num_warps, num_stages = 128, 64 if dim <= 128 else 32, 4 if dim <= 64 else 8, 3 if dim <= 128 else 2
    heads = problem.batch * problem.heads_q
    numbers = Config(
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        head_group=4 if masked and heads >= 4 else 1,
    )
    return Candidate(variant=Variant(load="tma" if tma else "pointer", longest_first=masked), config=numbers)


def adapt(candidate: Candidate, problem: Problem, device: Device) -> Candidate:
    """A candidate with the structure that the problem requires, whose numbers are cut down where that may make them legal."""
    variant, config = candidate.variant, candidate.config
    if not device.has_tma:
        variant = replace(variant, load="pointer")

    def smem(config: Config) -> int:
        return resources.smem_bytes(Candidate(variant=variant, config=config), problem, device)

    heads = problem.batch * problem.heads_q
    block_m = min(config.block_m, tile_rows(problem.seqlen_q))
    config = replace(
        config,
        block_m=block_m,
        block_n=min(config.block_n, tile_rows(problem.seqlen_kv)),
        num_warps=min(config.num_warps, max(1, block_m // 16)) if problem.itemsize == 2 else config.num_warps,
    )
    walked = schedule.walk(problem, config.block_m, config.block_n)
    config = replace(config, num_stages=min(config.num_stages, max(1, walked.most)))
    while config.num_stages > 1 and smem(config) > device.smem_per_block_bytes:
        config = replace(config, num_stages=config.num_stages - 1)
    if any(tile_violations(Candidate(variant=variant, config=config), problem, device)):
        config = replace(config, maxnreg=None)
    ordered = variant.mask != "full" and walked.row_blocks > 1
    config = replace(
        config,
        head_group=min(config.head_group, 1 << (heads.bit_length() - 1)) if ordered and heads else 1,
        persistent=config.persistent and heads * walked.row_blocks > device.num_sms,
    )
    variant = replace(
        variant,
        masked_apart=walked.cut == 0 or (variant.masked_apart and walked.whole > 0),
        longest_first=variant.longest_first and ordered,
    )
    return Candidate(variant=variant, config=config)
