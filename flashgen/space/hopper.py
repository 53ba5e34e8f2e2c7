"""Legality of warp-specialised kernels for sm_90: clauses in the order in which they are judged."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flashgen import resources, schedule
from flashgen.candidate import Candidate, Config, Variant
from flashgen.device import Device
from flashgen.problem import Problem
from flashgen.schedule import WARPGROUP_ROWS, forward_tiles, head_packs, most_packed, tile_rows

ORDERS = ("qk_first", "pv_first")
MOST_STAGES = 4
# Heads are packed by default where that leaves fewer than this share of the tiles: 1.57 times as fast with half the rows of 128 filled
# otherwise, a tie with 0.97 of the tiles, and up to 20 % slower where it saves none (H200, groups of 8, 2026-11-30).
WORTH_PACKING = 0.9

# What these kernels have no choice of.
FIXED: dict[str, Any] = {
    "load": "tma",
    "lazy_rescale": True,
    "maxnreg": None,
    "masked_apart": True,
    "persistent": True,
    "fused": False,
    "split_roles": False,
    "float16_dq": False,
}

Violation = tuple[str, str]  # name of the constraint, message


def misfits(problem: Problem, device: Device) -> Iterator[Violation]:
    """What keeps every kernel of this backend away from a problem or device."""
    if device.capability != 90:
        yield "sm_90", f"{device.name} is {device.arch}, hopper kernels run on sm_90 alone"
    if problem.itemsize != 2:
        yield "dtype", f"elements have {problem.itemsize} bytes, warpgroup products take 2"
    if not problem.aligned_16:
        yield "tma", "needs addresses and strides that are multiples of 16 bytes, the problem has others"
    for name in ("head_dim_qk", "head_dim_v"):
        dim = getattr(problem, name)
        if dim * problem.itemsize % 16:
            yield "tma", f"{name} of {dim} makes rows of {dim * problem.itemsize} bytes, TMA needs a multiple of 16"
        # Everything is padded to 64 columns: four times the work of a portable kernel with 16.
        if dim <= 16:
            yield name, f"is {dim}, padding to 64 columns only pays above 16"
    # Where heads are packed, one tile takes the place of several, however few queries it has.
    for name, rows, packs in (("seqlen_q", WARPGROUP_ROWS, most_packed(problem) > 1), ("seqlen_kv", 64, False)):
        seqlen = getattr(problem, name)
        if tile_rows(seqlen) < rows and not packs:
            yield name, f"is {seqlen}, tiles of {rows} rows need more than {rows // 2}"


def axes(problem: Problem, device: Device) -> dict[str, list[Any]]:
    """Choices of every other knob. Of candidates with the same estimate the first is tried: the one with most slots and buffers, and most
    heads together, because a head at a time was up to 34 % slower (H200, d 64, causal, N 512, 2026-11-30)."""
    most_heads = 1 << max(0, (problem.batch * problem.heads_q).bit_length() - 1)
    masked = problem.band != (None, None)
    return {
        "order": list(ORDERS),
        "ping_pong": [True, False],
        "block_m": [64, 128, 192],
        "block_n": [64, 128],
        "num_warps": [4, 8, 12],
        "num_stages": list(range(MOST_STAGES, 1, -1)),
        "q_stages": [2, 1],
        "packed_heads": list(dict.fromkeys([most_packed(problem), 1])),
        "longest_first": [True, False] if masked else [False],
        "head_group": sorted({min(group, most_heads) for group in (1, 4, 8)}, reverse=True) if masked else [1],
    }


def most_stages(candidate: Candidate, problem: Problem, device: Device) -> int:
    """Slots of K and V that are of use to this tile, and fit."""
    config = candidate.config
    one, two = (resources.smem_bytes(replace(candidate, config=replace(config, num_stages=stages)), problem, device) for stages in (1, 2))
    fit = 1 + (device.smem_per_block_bytes - one) // (two - one)
    useful = MOST_STAGES
    if forward_tiles(problem, config) <= device.num_sms:  # they end with the only tile, whose last V has a slot of its own
        useful = min(useful, schedule.walk(problem, config.queries, config.block_n).most + 1)
    return min(fit, max(useful, _least_stages(problem, config)))


def tile_violations(candidate: Candidate, problem: Problem, device: Device) -> Iterator[Violation]:
    """Clauses about the tile and how it is loaded; they do not look at the order of work."""
    variant, config = candidate.variant, candidate.config
    if config.block_m not in (64, 128, 192):
        yield "block_m", f"is {config.block_m}, one to three warpgroups make 64, 128 or 192"
        return
    if config.block_n not in (64, 128):
        yield "block_n", f"is {config.block_n}, must be 64 or 128"
        return
    if config.num_warps != config.block_m // 16:
        yield "num_warps", f"is {config.num_warps}, {config.block_m} rows have {config.block_m // 16}"
        return
    broken = list(misfits(problem, device))
    if broken:
        yield from broken
        return
    packed, most = config.packed_heads, most_packed(problem)
    if packed & (packed - 1) or packed > most:
        yield "packed_heads", f"is {packed}, must be a power of two of at most {most}"
        return
    tiles, apart = forward_tiles(problem, config), forward_tiles(problem, replace(config, packed_heads=1))
    if packed > 1 and tiles >= apart:
        yield "packed_heads", f"is {packed}, which makes {tiles} tiles, no fewer than {apart}"
    rows = problem.seqlen_q * packed
    for name, value, filled in (("block_m", config.block_m, rows), ("block_n", config.block_n, problem.seqlen_kv)):
        if value > tile_rows(filled) and (packed == 1 or value > WARPGROUP_ROWS):
            yield name, f"is {value}, {filled} rows fill {tile_rows(filled)}"

    # Registers: with too few, ptxas lets one product run at a time.
    limit, wanted = resources.consumer_registers(config), resources.wanted_by_consumer(candidate, problem)
    if variant.order not in ORDERS:
        yield "order", f"is {variant.order!r}, must be one of {', '.join(ORDERS)}"
    if wanted > limit:
        yield "registers", f"a consumer's thread needs about {wanted}, it has {limit}"

    # Turns are taken by two warpgroups or more. A second buffer of Q is for a program's second tile.
    if variant.ping_pong and config.block_m <= WARPGROUP_ROWS:
        yield "ping_pong", f"needs 2 warpgroups, {config.block_m} rows have {config.block_m // WARPGROUP_ROWS}"
    useful = 1 if tiles <= device.num_sms else 2
    if config.q_stages > useful:
        yield "q_stages", f"is {config.q_stages}, with {tiles} tiles on {device.num_sms} SMs {useful} are of use"
    elif config.q_stages < useful:
        # With one buffer Q waits for the tile before: 5 % slower at N 1024 (H200, d 128, 2026-11-30).
        more = replace(candidate, config=replace(config, q_stages=config.q_stages + 1))
        needed = resources.smem_bytes(more, problem, device)
        if needed <= device.smem_per_block_bytes:
            yield "q_stages", f"is {config.q_stages}, one more fits: {needed} bytes of {device.smem_per_block_bytes}"
    least, most = _least_stages(problem, config), most_stages(candidate, problem, device)
    smem = resources.smem_bytes(candidate, problem, device)
    if config.num_stages < least:
        yield "num_stages", f"is {config.num_stages}, this tile needs {least} slots"
    elif smem > device.smem_per_block_bytes:
        yield "smem", f"needs {smem} bytes, {device.name} has {device.smem_per_block_bytes}"
    elif config.num_stages > most:
        yield "num_stages", f"is {config.num_stages}, more than {most} slots are of no use here"


def order_violations(candidate: Candidate, problem: Problem, device: Device) -> Iterator[Violation]:
    """Clauses about the order of work."""
    variant, config = candidate.variant, candidate.config
    # Lists of tiles are balanced best if the longest come first; with one tile a program, or equal ones, there is nothing to order.
    ordered, tiles = is_ordered(problem, device, config), forward_tiles(problem, config)
    idle = f"mask {variant.mask}, {tiles} tiles and {device.num_sms} SMs leave nothing to order"
    if ordered and not variant.longest_first:
        yield "longest_first", f"is not set, but {tiles} tiles of unequal length are shared by {device.num_sms} SMs"
    if variant.longest_first and not ordered:
        yield "longest_first", f"is set, but {idle}"
    packs = head_packs(problem, config)
    if config.head_group > max(1, packs):
        yield "head_group", f"is {config.head_group}, batch * heads_q / packed_heads is {packs}"
    elif config.head_group > 1 and not ordered:
        yield "head_group", f"is {config.head_group}, but {idle}"


def is_ordered(problem: Problem, device: Device, config: Config) -> bool:
    """Whether the order of tiles matters: they are unequal, and some program computes several."""
    return problem.band != (None, None) and problem.seqlen_q > config.queries and forward_tiles(problem, config) > device.num_sms


def pick(problem: Problem, device: Device) -> Candidate:
    """A good kernel for large problems with these head dims, as measured on an H200 (2026-12-01); it may not fit."""
    dim = max(schedule.specialised_dims(problem))
    if dim <= 64 and problem.band != (None, None) and problem.seqlen_q <= 1024:
        block_m, block_n = 128, 128  # 368 TFLOP/s causal at N 1024; 192 x 128 351
    elif dim <= 64:
        block_m, block_n = 192, 128  # 625 TFLOP/s full, 592 causal (N 8192); 128 x 128 478 and 457
    elif dim <= 128:
        block_m, block_n = 128, 128  # 755 and 720
    else:
        block_m, block_n = 128, 64  # 784 and 742
    numbers = Config(
        block_m=block_m,
        block_n=block_n,
        num_warps=block_m // 16,
        num_stages=3 if dim <= 64 else 2,
        head_group=8,
        persistent=True,
        q_stages=2 if dim <= 128 else 1,
    )
    packed = replace(numbers, packed_heads=most_packed(problem))
    if forward_tiles(problem, packed) < WORTH_PACKING * forward_tiles(problem, numbers):
        numbers = packed
    variant = Variant(backend="hopper", load="tma", order="qk_first", ping_pong=True, lazy_rescale=True)
    return Candidate(variant=variant, config=numbers)


def adapt(candidate: Candidate, problem: Problem, device: Device) -> Candidate | None:
    """A candidate with the structure that the problem requires, made to fit: as many buffers of Q as may be, smaller tiles as needed, heads
    packed where it packs them and that saves tiles, or where it needs to."""
    variant, config = candidate.variant, candidate.config
    if any(misfits(problem, device)):
        return None
    smaller = itertools.product(
        [rows for rows in (192, 128, 64) if rows <= config.block_m],
        [keys for keys in (128, 64) if keys <= config.block_n],
        sorted({1, most_packed(problem)}, reverse=config.packed_heads > 1),
        (2, 1),  # buffers of Q: as many as are of use and fit, never a choice
    )
    for rows, keys, packed, q_stages in sorted(smaller, key=lambda tile: -tile[0] * tile[1]):
        numbers = replace(config, block_m=rows, block_n=keys, num_warps=rows // 16, packed_heads=packed, q_stages=q_stages)
        packs, ordered = head_packs(problem, numbers), is_ordered(problem, device, numbers)
        shrunk = Candidate(
            variant=replace(
                variant,
                lazy_rescale=True,
                ping_pong=variant.ping_pong and rows > WARPGROUP_ROWS,
                longest_first=ordered,
                masked_apart=True,
            ),
            config=replace(numbers, head_group=min(config.head_group, 1 << (packs.bit_length() - 1)) if ordered else 1, persistent=True),
        )
        stages = max(_least_stages(problem, shrunk.config), min(config.num_stages, most_stages(shrunk, problem, device)))
        shrunk = replace(shrunk, config=replace(shrunk.config, num_stages=stages))
        if not any(tile_violations(shrunk, problem, device)) and not any(order_violations(shrunk, problem, device)):
            return shrunk
    return None


def _least_stages(problem: Problem, config: Config) -> int:
    """With one slot, loads and products take turns."""
    return max(2, schedule.least_stages(problem, config))
