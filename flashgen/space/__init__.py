"""Space: which candidates are legal for a problem on a device, and why the others are not.

The raw grid is the product of `axes`. Legality is decided by `violations`, clause by clause; a clause either keeps what cannot work or
cannot be fast out, or what would be the same kernel as another candidate.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from flashgen import resources, schedule
from flashgen.candidate import Candidate, Config, Variant
from flashgen.device import Device
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.problem import Problem
from flashgen.schedule import tile_rows
from flashgen.space import backward, hopper, triton

MOST_HEAD_DIM = 256
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
    for heads, seqlen in (("heads_q", "seqlen_q"), ("heads_kv", "seqlen_kv")):
        tiles = problem.batch * getattr(problem, heads) * math.ceil(getattr(problem, seqlen) / 64)
        if tiles > MOST_GRID and (heads == "heads_q" or problem.direction == "backward"):
            raise UnsupportedError(f"batch, {heads} and {seqlen} make {tiles} tiles of 64 rows; a grid has at most {MOST_GRID}")


def required(problem: Problem) -> dict[str, object]:
    """Variant fields that the problem fixes."""
    low, high = problem.band
    fixed: dict[str, object] = {
        "family": problem.direction,
        "mask": "full" if low is None and high is None else "causal" if low is None else "window",
        "padded": any(schedule.tile_dim(dim) != dim for dim in (problem.head_dim_qk, problem.head_dim_v)),
        "store_lse": problem.return_lse,
    }
    if problem.direction == "backward" or triton.no_tma(problem):
        fixed["load"] = "pointer"
    return fixed


def backends(problem: Problem, device: Device) -> list[str]:
    """Kinds of kernels with candidates for this problem and device."""
    return ["triton"] if problem.direction == "backward" or without_hopper(problem, device) else ["triton", "hopper"]


def without_hopper(problem: Problem, device: Device) -> str:
    """Why no warp-specialised kernel takes this problem on this device; empty if some do."""
    return next((f"hopper kernels do not take it: {name}: {message}" for name, message in hopper.misfits(problem, device)), "")


def axes(problem: Problem, device: Device, backend: str) -> dict[str, list[Any]]:
    """Choices of every knob, numbers and structure in one flat dict; some of their combinations are illegal. All backends have the same
    knobs, and one choice of those that mean nothing to them."""
    masked = required(problem)["mask"] != "full"
    if problem.direction == "backward":
        return backward.axes(problem)
    return hopper.axes(problem, masked) if backend == "hopper" else triton.axes(problem, device, masked)


def from_axes(problem: Problem, device: Device, values: Mapping[str, Any]) -> Candidate:
    """The candidate with these choices, one for each axis; it may be illegal. Raises ArgumentError for other names."""
    names = axes(problem, device, "triton").keys()
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
    found = [*_tile_violations(candidate, problem, device)]
    if not found:  # the rest counts blocks, which needs sound numbers
        found += _required_violations(candidate.variant, required(problem))
        found += _order_violations(candidate, problem, device)
    return [f"{name}: {message}" for name, message in found]


def default(problem: Problem, device: Device) -> Candidate:
    """The hand-picked candidate, or the legal one nearest to it: sane everywhere, best nowhere; searches measure it first."""
    if problem.direction == "backward":
        return default_backward(problem, device)
    return adapt(hopper.pick(problem), problem, device) or portable_default(problem, device)


def default_backward(problem: Problem, device: Device) -> Candidate:
    """The same for a backward problem, whose kernels are all portable."""
    picked = backward.pick(problem, device, required(problem))
    if not violations(picked, problem, device):
        return picked
    return min(candidates(problem, device), key=lambda other: _distance(picked, other))


def portable_default(problem: Problem, device: Device) -> Candidate:
    """The same among portable kernels, which every device and Triton's interpreter run."""
    if problem.direction == "backward":
        return default_backward(problem, device)
    dim = max(schedule.tile_dim(problem.head_dim_qk), schedule.tile_dim(problem.head_dim_v))
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
    portable = (candidate for candidate in candidates(problem, device) if candidate.variant.backend == "triton")
    return adapt(picked, problem, device) or min(portable, key=lambda other: _distance(picked, other))


def adapt(candidate: Candidate, problem: Problem, device: Device) -> Candidate | None:
    """A candidate of a similar problem carried over to this one: required structure replaced, knobs that cannot matter here reset,
    numbers cut down where that makes them legal. None if it does not become legal."""
    variant, config = candidate.variant, candidate.config
    fixed = dict(required(problem))
    if problem.direction == "backward":
        carried = Candidate(variant=replace(variant, **fixed), config=config)  # type: ignore[arg-type]
        return None if candidate.variant.family != "backward" or violations(carried, problem, device) else carried
    if not device.has_tma:
        fixed["load"] = "pointer"
    variant = replace(variant, **fixed)  # type: ignore[arg-type]
    if variant.backend == "hopper":
        return hopper.adapt(replace(candidate, variant=variant), problem, device)
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
    while config.num_stages > 1 and _smem_bytes(variant, config, problem, device) > device.smem_per_block_bytes:
        config = replace(config, num_stages=config.num_stages - 1)
    if any(_tile_violations(Candidate(variant=variant, config=config), problem, device)):
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


_STRUCTURE = ("backend", "load", "order", "ping_pong", "lazy_rescale", "masked_apart", "longest_first")
_ORDER = ("masked_apart", "persistent", "longest_first", "head_group")  # axes that decide the order of work, not the tile


@lru_cache(maxsize=64)
def _explored(problem: Problem, device: Device) -> tuple[tuple[Candidate, ...], tuple[tuple[str, int], ...]]:
    """The legal candidates, and how many points each constraint removed. Tiles are judged once, not once for each order of work."""
    require_supported(problem, device)
    legal: list[Candidate] = []
    removed: Counter[str] = Counter()
    fixed = required(problem)

    @cache
    def variant(**structure: Any) -> Variant:
        return Variant(**(structure | fixed))

    for backend in backends(problem, device):
        choices = axes(problem, device, backend)
        tile_axes = {name: values for name, values in choices.items() if name not in _ORDER}
        orders = [dict(zip(_ORDER, point)) for point in itertools.product(*(choices[name] for name in _ORDER))]
        for point in itertools.product(*tile_axes.values()):
            tile = dict(zip(tile_axes, point))
            shape = {name: tile.pop(name) for name in _STRUCTURE if name not in _ORDER}
            first = Candidate(variant=variant(**shape), config=Config(**tile))
            broken = next(_tile_violations(first, problem, device), None)
            if broken is not None:
                removed[broken[0]] += len(orders)
                continue
            for order in orders:
                numbers = Config(**tile, head_group=order["head_group"], persistent=order["persistent"])
                structure = variant(**shape, masked_apart=order["masked_apart"], longest_first=order["longest_first"])
                candidate = Candidate(variant=structure, config=numbers)
                broken = next(_order_violations(candidate, problem, device), None)
                if broken is None:
                    legal.append(candidate)
                else:
                    removed[broken[0]] += 1
    return tuple(legal), tuple(removed.items())


def _tile_violations(candidate: Candidate, problem: Problem, device: Device) -> Iterator[Violation]:
    """Clauses about the tile and how it is loaded; they do not look at the order of work."""
    found: Iterator[Violation] = _rules(candidate, problem).tile_violations(candidate, problem, device)
    return found


def _order_violations(candidate: Candidate, problem: Problem, device: Device) -> Iterator[Violation]:
    """Clauses about the order of work."""
    found: Iterator[Violation] = _rules(candidate, problem).order_violations(candidate, problem, device)
    return found


def _rules(candidate: Candidate, problem: Problem) -> Any:
    """The module that judges such candidates."""
    if problem.direction == "backward":
        return backward
    return hopper if candidate.variant.backend == "hopper" else triton


def _required_violations(variant: Variant, fixed: Mapping[str, object]) -> Iterator[Violation]:
    """Clauses about what the problem fixes."""
    for name, value in fixed.items():
        if name != "load" and getattr(variant, name) != value:
            yield name, f"is {getattr(variant, name)!r}, the problem needs {value!r}"


def _smem_bytes(variant: Variant, config: Config, problem: Problem, device: Device) -> int:
    return resources.smem_bytes(Candidate(variant=variant, config=config), problem, device)


def _distance(one: Candidate, other: Candidate) -> float:
    """How unlike two candidates of one problem are: a doubling of a number counts 1, another structure 1, a cap on registers 2, another
    backend 8."""
    numbers = sum(
        abs(math.log2(getattr(one.config, name) / getattr(other.config, name)))
        for name in ("block_m", "block_n", "num_warps", "num_stages", "head_group", "q_stages")
    )
    flags = [getattr(one.variant, name) != getattr(other.variant, name) for name in _STRUCTURE]
    flags += [one.config.persistent != other.config.persistent]
    flags += [one.variant.backend != other.variant.backend] * 7
    return float(numbers + sum(flags) + 2 * (one.config.maxnreg != other.config.maxnreg))
