"""Space: which candidates are legal for a problem on a device, and why the others are not.

The raw grid is the product of `axes`. Legality is decided by `violations`, clause by clause; a clause either keeps what cannot work or
cannot be fast out, or what would be the same kernel as another candidate.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from flashgen import cost
from flashgen.candidate import Candidate, Config, Variant
from flashgen.device import Device
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.problem import Problem

MOST_HEAD_DIM = 256
MOST_ELEMENTS = 1 << 20  # of one Triton tensor
MOST_COSTLY_SPILL = 320  # bytes, as guessed: with as many, kernels took 1.4 to 2 times as long (H200, 2026-11-29)
UNSURE_REGISTERS = 8  # what a guess of the registers may be off
MOST_GRID = (1 << 31) - 1

Violation = tuple[str, str]  # name of the constraint, message


def require_supported(problem: Problem, device: Device) -> None:
    """Raise UnsupportedError, naming argument and limit, for a problem that no candidate computes."""
    for name in ("head_dim_qk", "head_dim_v"):
        if getattr(problem, name) > MOST_HEAD_DIM:
            raise UnsupportedError(f"{name} is {getattr(problem, name)}; kernels exist up to {MOST_HEAD_DIM}")
    if device.capability < 80:
        raise UnsupportedError(f"device is {device.name}, {device.arch}; kernels exist from sm_80 on")
    for name in ("seqlen_q", "seqlen_kv"):
        if getattr(problem, name) > MOST_GRID // 2:
            raise UnsupportedError(f"{name} is {getattr(problem, name)}; kernels number rows up to {MOST_GRID // 2}")
    tiles = problem.batch * problem.heads_q * math.ceil(problem.seqlen_q / 64)
    if tiles > MOST_GRID:
        raise UnsupportedError(f"batch, heads_q and seqlen_q make {tiles} tiles of 64 rows; a grid has at most {MOST_GRID}")


def required(problem: Problem) -> dict[str, object]:
    """Variant fields that the problem fixes."""
    low, high = problem.band
    fixed: dict[str, object] = {
        "family": problem.direction,
        "mask": "full" if low is None and high is None else "causal" if low is None else "window",
        "padded": any(cost.tile_dim(dim) != dim for dim in (problem.head_dim_qk, problem.head_dim_v)),
        "store_lse": problem.return_lse,
    }
    if _no_tma(problem):
        fixed["load"] = "pointer"
    return fixed


def axes(problem: Problem, device: Device) -> dict[str, list[Any]]:
    """Choices of every knob, numbers and structure in one flat dict; some of their combinations are illegal."""
    most_heads = 1 << max(0, (problem.batch * problem.heads_q).bit_length() - 1)
    masked = required(problem)["mask"] != "full"
    return {
        "load": ["pointer"] if _no_tma(problem) or not device.has_tma else ["tma", "pointer"],
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


def from_axes(problem: Problem, device: Device, values: Mapping[str, Any]) -> Candidate:
    """The candidate with these choices, one for each axis; it may be illegal. Raises ArgumentError for other names."""
    names = axes(problem, device).keys()
    if values.keys() != names:
        raise ArgumentError(f"axes are {', '.join(names)}; got {', '.join(values)}")
    structure = {name: values[name] for name in _STRUCTURE}
    numbers = {name: value for name, value in values.items() if name not in _STRUCTURE}
    return Candidate(variant=Variant(**(structure | required(problem))), config=Config(**numbers))


def candidates(problem: Problem, device: Device) -> list[Candidate]:
    """Every legal candidate, in a fixed order."""
    return list(_explored(problem, device)[0])


def rejected(problem: Problem, device: Device) -> dict[str, int]:
    """How many points of the raw grid each constraint removes: the first one that a point breaks counts."""
    return dict(_explored(problem, device)[1])


def variants(problem: Problem, device: Device) -> list[Variant]:
    """The variants of all legal candidates: the modules that would be generated."""
    return list(dict.fromkeys(candidate.variant for candidate in candidates(problem, device)))


def violations(candidate: Candidate, problem: Problem, device: Device) -> list[str]:
    """What is wrong with a candidate, as "name: message" with both numbers; nothing if it is legal."""
    found = [*_number_violations(candidate, problem, device)]
    if not found:  # the rest counts blocks, which needs sound numbers
        found += _structure_violations(candidate, problem, device, required(problem))
    return [f"{name}: {message}" for name, message in found]


def default(problem: Problem, device: Device) -> Candidate:
    """The hand-picked candidate, or the legal one nearest to it: sane everywhere, best nowhere; searches measure it first."""
    dim = max(cost.tile_dim(problem.head_dim_qk), cost.tile_dim(problem.head_dim_v))
    fixed = required(problem)
    masked = fixed["mask"] != "full"
    tma = "load" not in fixed and device.has_tma
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
    structure = Variant(**(dict(load="tma" if tma else "pointer", longest_first=masked) | fixed))  # type: ignore[arg-type]
    picked = Candidate(variant=structure, config=numbers)
    return adapt(picked, problem, device) or min(candidates(problem, device), key=lambda other: _distance(picked, other))


def adapt(candidate: Candidate, problem: Problem, device: Device) -> Candidate | None:
    """A candidate of a similar problem carried over to this one: required structure replaced, knobs that cannot matter here reset,
    numbers cut down where that makes them legal. None if it does not become legal."""
    variant, config = candidate.variant, candidate.config
    fixed = dict(required(problem))
    if not device.has_tma:
        fixed["load"] = "pointer"
    variant = replace(variant, **fixed)  # type: ignore[arg-type]
    heads = problem.batch * problem.heads_q
    block_m = min(config.block_m, _power_above(problem.seqlen_q))
    config = replace(
        config,
        block_m=block_m,
        block_n=min(config.block_n, _power_above(problem.seqlen_kv)),
        num_warps=min(config.num_warps, max(1, block_m // 16)) if problem.itemsize == 2 else config.num_warps,
    )
    walked = cost.walk(problem, config.block_m, config.block_n)
    config = replace(config, num_stages=min(config.num_stages, max(1, walked.most)))
    while config.num_stages > 1 and _smem_bytes(variant, config, problem, device) > device.smem_per_block_bytes:
        config = replace(config, num_stages=config.num_stages - 1)
    if any(_number_violations(Candidate(variant=variant, config=config), problem, device)):
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
    adapted = Candidate(variant=variant, config=config)
    return None if violations(adapted, problem, device) else adapted


_STRUCTURE = ("load", "masked_apart", "longest_first")
_ORDER = ("masked_apart", "persistent", "longest_first", "head_group")  # axes that decide the order of work, not the tile


@lru_cache(maxsize=64)
def _explored(problem: Problem, device: Device) -> tuple[tuple[Candidate, ...], tuple[tuple[str, int], ...]]:
    """The legal candidates, and how many points each constraint removed. Tiles are judged once, not once for each order of work."""
    require_supported(problem, device)
    choices = axes(problem, device)
    tile_axes = {name: values for name, values in choices.items() if name not in _ORDER}
    orders = [dict(zip(_ORDER, point)) for point in itertools.product(*(choices[name] for name in _ORDER))]
    legal: list[Candidate] = []
    removed: dict[str, int] = {}
    fixed = required(problem)

    @cache
    def variant(load: str, masked_apart: bool, longest_first: bool) -> Variant:
        return Variant(**(dict(load=load, masked_apart=masked_apart, longest_first=longest_first) | fixed))  # type: ignore[arg-type]

    for point in itertools.product(*tile_axes.values()):
        tile = dict(zip(tile_axes, point))
        load = tile.pop("load")
        first = Candidate(variant=variant(load, True, False), config=Config(**tile))
        broken = next(_number_violations(first, problem, device), None)
        if broken is not None:
            removed[broken[0]] = removed.get(broken[0], 0) + len(orders)
            continue
        for order in orders:
            numbers = Config(**tile, head_group=order["head_group"], persistent=order["persistent"])
            candidate = Candidate(variant=variant(load, order["masked_apart"], order["longest_first"]), config=numbers)
            broken = next(_structure_violations(candidate, problem, device, fixed), None)
            if broken is None:
                legal.append(candidate)
            else:
                removed[broken[0]] = removed.get(broken[0], 0) + 1
    return tuple(legal), tuple(removed.items())


def _number_violations(candidate: Candidate, problem: Problem, device: Device) -> Iterator[Violation]:
    """Clauses about the tile and how it is loaded; they do not look at the order of work."""
    variant, config = candidate.variant, candidate.config
    block_m, block_n, num_warps, num_stages = config.block_m, config.block_n, config.num_warps, config.num_stages

    # Triton's tensors have powers of two of elements, and its products at least 16 rows, columns and depth.
    for name, least in (("block_m", 16), ("block_n", 16), ("num_warps", 1)):
        value = getattr(config, name)
        if value < least or value & (value - 1):
            yield name, f"is {value}, must be a power of two of at least {least}"
            return
    columns = max(cost.tile_dim(problem.head_dim_qk), cost.tile_dim(problem.head_dim_v))
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
        if value > _power_above(seqlen):
            yield name, f"is {value}, seqlen {seqlen} fills {_power_above(seqlen)}"

    if problem.itemsize == 2:
        # A tensor core instruction has 16 rows a warp: with fewer, warps repeat each other's work.
        if block_m < 16 * num_warps:
            yield "warp_rows", f"{num_warps} warps need {16 * num_warps} rows, block_m is {block_m}"
        # Small tiles read K and V more often, and on Hopper miss the fast products (4 warps, 64 rows): only for want of tiles.
        tiles = problem.batch * problem.heads_q * math.ceil(problem.seqlen_q / 64)
        if tiles >= device.num_sms and problem.seqlen_q >= 64:
            if block_m < 64 or num_warps < 4:
                yield "small_tile", f"{block_m} rows and {num_warps} warps, but {tiles} tiles of 64 rows fill {device.num_sms} SMs"
            if block_n < min(32, _power_above(problem.seqlen_kv)):
                yield "small_tile", f"{block_n} keys at a time, where there are {problem.seqlen_kv} and no want of work"
    else:
        # Products on ordinary cores keep the operands of a thread's scores in its registers: 16 scores spill 350 to 1200 bytes.
        scores = block_m * block_n / (32 * num_warps)
        if not 2 <= scores <= 8:
            yield "fma_tile", f"{scores:g} scores a thread, fp32 products run with 2 to 8"

    # Some spills cost nothing; many in the loop make a kernel hopeless, unless no smaller tile exists.
    guess = cost.guess(candidate, problem, device)
    spilled = math.ceil(cost.costly_spill(candidate, guess.spill_bytes))
    if spilled > MOST_COSTLY_SPILL and max(block_m, block_n) > 16:
        limit = cost.register_limit(candidate, device)
        yield "registers", f"with {limit} a thread the loop spills about {spilled} bytes, more than {MOST_COSTLY_SPILL}"
    smem = guess.smem_bytes
    if smem > device.smem_per_block_bytes:
        yield "smem", f"needs {smem} bytes, {device.name} has {device.smem_per_block_bytes}"

    # A pipeline deeper than the longest loop is the same kernel as a shorter one.
    most = max(1, cost.walk(problem, block_m, block_n).most)
    if num_stages > most:
        yield "num_stages", f"is {num_stages}, the longest loop has {most} blocks"
    # Without a pipeline, pointers load through registers: 1.5 to 2 times as long as TMA (H200, d 64 to 256, 2026-11-29).
    if num_stages == 1 < most and variant.load == "pointer" and device.has_tma and not _no_tma(problem):
        yield "num_stages", f"is 1, pointer loads need 2 to compete with TMA over {most} blocks"
    # A cap on registers only pays where it lets one more program onto the SM, and then the largest such cap is enough.
    if config.maxnreg is not None:
        fit = cost.programs_per_sm(num_warps, config.maxnreg, smem, device)
        more = min(config.maxnreg + 8, cost.guess(_uncapped(candidate), problem, device).registers + UNSURE_REGISTERS)
        fit_without = cost.programs_per_sm(num_warps, more, smem, device)
        if fit <= fit_without:
            yield "maxnreg", f"a cap of {config.maxnreg} lets {fit} programs onto an SM, without it or with more there fit {fit_without}"
        # A warpgroup's product holds its whole result: ptxas refuses a cap that leaves less than this beside it (C7602, sm_90a).
        result = block_m * cost.tile_dim(problem.head_dim_v) // (32 * num_warps)
        if cost.uses_warpgroups(candidate, problem, device) and config.maxnreg < result + 30:
            yield "maxnreg", f"a cap of {config.maxnreg} leaves too little beside a result of {result} registers, which needs {result + 30}"


def _structure_violations(candidate: Candidate, problem: Problem, device: Device, fixed: Mapping[str, object]) -> Iterator[Violation]:
    """Clauses about what the problem fixes and about the order of work."""
    variant, config = candidate.variant, candidate.config
    for name, value in fixed.items():
        if name != "load" and getattr(variant, name) != value:
            yield name, f"is {getattr(variant, name)!r}, the problem needs {value!r}"

    # Loops apart for whole and for cut blocks only differ from one loop where there are both; with nothing to mask, nothing is masked.
    walked = cost.walk(problem, config.block_m, config.block_n)
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


def _no_tma(problem: Problem) -> bool:
    """TMA cannot describe these tensors, or does not help, on any device."""
    odd_rows = any(dim * problem.itemsize % 16 for dim in (problem.head_dim_qk, problem.head_dim_v))
    return odd_rows or problem.itemsize > 2 or not problem.aligned_16 or problem.seqlen_kv == 0


def _power_above(seqlen: int) -> int:
    """Rows of the smallest tile that holds a whole sequence."""
    return max(16, 1 << max(0, seqlen - 1).bit_length())


def _smem_bytes(variant: Variant, config: Config, problem: Problem, device: Device) -> int:
    return cost.smem_bytes(Candidate(variant=variant, config=config), problem, device)


def _uncapped(candidate: Candidate) -> Candidate:
    return replace(candidate, config=replace(candidate.config, maxnreg=None))


def _distance(one: Candidate, other: Candidate) -> float:
    """How unlike two candidates of one problem are: a doubling of a number counts 1, a flag 1, a cap on registers 2."""
    numbers = sum(
        abs(math.log2(getattr(one.config, name) / getattr(other.config, name)))
        for name in ("block_m", "block_n", "num_warps", "num_stages", "head_group")
    )
    flags = [getattr(one.variant, name) != getattr(other.variant, name) for name in _STRUCTURE]
    flags += [one.config.persistent != other.config.persistent]
    return float(numbers + sum(flags) + 2 * (one.config.maxnreg != other.config.maxnreg))
