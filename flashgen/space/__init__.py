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

from flashgen import schedule
from flashgen.candidate import Candidate, Config, Variant
from flashgen.device import Device
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.problem import Problem
from flashgen.space import hopper, hopper_backward, triton, triton_backward

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
    if triton.no_tma(problem):
        fixed["load"] = "pointer"
    return fixed


def backends(problem: Problem, device: Device) -> list[str]:
    """Kinds of kernels with candidates for this problem and device."""
    return ["triton"] if without_hopper(problem, device) else ["triton", "hopper"]


def without_hopper(problem: Problem, device: Device) -> str:
    """Why no warp-specialised kernel takes this problem on this device; empty if some do."""
    return next((f"hopper kernels do not take it: {name}: {message}" for name, message in hopper.misfits(problem, device)), "")


def axes(problem: Problem, device: Device, backend: str) -> dict[str, list[Any]]:
    """Choices of every knob, numbers and structure in one flat dict; some of their combinations are illegal. All kinds of kernels have
    the same knobs, and one choice of those that mean nothing to them."""
    rules = _RULES[problem.direction, backend]
    choices: dict[str, list[Any]] = rules.axes(problem, device)
    return {"backend": [backend]} | {name: [value] for name, value in rules.FIXED.items()} | choices


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
    rules = _rules(candidate)
    found = [*_fixed_violations(candidate), *rules.tile_violations(candidate, problem, device)]
    if not found:  # the rest counts blocks, which needs sound numbers
        found += _required_violations(candidate.variant, required(problem))
        found += rules.order_violations(candidate, problem, device)
    return [f"{name}: {message}" for name, message in found]


def default(problem: Problem, device: Device) -> Candidate:
    """The hand-picked candidate, or the legal one nearest to it: sane everywhere, best nowhere; searches measure it first. Raises
    UnsupportedError."""
    require_supported(problem, device)
    return adapt(_RULES[problem.direction, "hopper"].pick(problem, device), problem, device) or portable_default(problem, device)


def portable_default(problem: Problem, device: Device) -> Candidate:
    """The same among portable kernels, which every device and Triton's interpreter run."""
    picked = _RULES[problem.direction, "triton"].pick(problem, device)
    portable = (candidate for candidate in candidates(problem, device) if candidate.variant.backend == "triton")
    return adapt(picked, problem, device) or min(portable, key=lambda other: distance(picked, other))


def adapt(candidate: Candidate, problem: Problem, device: Device) -> Candidate | None:
    """A candidate of a similar problem carried over to this one: required structure replaced, knobs that cannot matter here reset,
    numbers cut down where that makes them legal. None if it does not become legal."""
    if candidate.variant.family != problem.direction:
        return None
    variant = replace(candidate.variant, **required(problem))  # type: ignore[arg-type]
    adapted: Candidate | None = _rules(candidate).adapt(replace(candidate, variant=variant), problem, device)
    return None if adapted is None or violations(adapted, problem, device) else adapted


_RULES: dict[tuple[str, str], Any] = {
    ("forward", "triton"): triton,
    ("forward", "hopper"): hopper,
    ("backward", "triton"): triton_backward,
    ("backward", "hopper"): hopper_backward,
}
_STRUCTURE = (
    "backend",
    "load",
    "order",
    "ping_pong",
    "lazy_rescale",
    "masked_apart",
    "longest_first",
    "fused",
    "split_roles",
    "float16_dq",
)
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
            broken = next(_rules(first).tile_violations(first, problem, device), None)
            if broken is not None:
                removed[broken[0]] += len(orders)
                continue
            for order in orders:
                numbers = Config(**tile, head_group=order["head_group"], persistent=order["persistent"])
                structure = variant(**shape, masked_apart=order["masked_apart"], longest_first=order["longest_first"])
                candidate = Candidate(variant=structure, config=numbers)
                broken = next(_rules(candidate).order_violations(candidate, problem, device), None)
                if broken is None:
                    legal.append(candidate)
                else:
                    removed[broken[0]] += 1
    return tuple(legal), tuple(removed.items())


def _rules(candidate: Candidate) -> Any:
    """The module that judges such candidates."""
    return _RULES[candidate.variant.family, candidate.variant.backend]


def _fixed_violations(candidate: Candidate) -> Iterator[Violation]:
    """Clauses about what such kernels have no choice of."""
    variant = candidate.variant
    for name, needed in _rules(candidate).FIXED.items():
        value = getattr(variant if name in _STRUCTURE else candidate.config, name)
        if value != needed:
            yield name, f"is {value!r}, must be {needed!r}: {variant.family} kernels for {variant.backend} have no such choice"


def _required_violations(variant: Variant, fixed: Mapping[str, object]) -> Iterator[Violation]:
    """Clauses about what the problem fixes."""
    for name, value in fixed.items():
        if name != "load" and getattr(variant, name) != value:
            yield name, f"is {getattr(variant, name)!r}, the problem needs {value!r}"


def distance(one: Candidate, other: Candidate) -> float:
    """How unlike two candidates of one problem are: a doubling of a number counts 1, another structure 1, a cap on registers 2, another
    backend 8."""
    numbers = sum(
        abs(math.log2(getattr(one.config, name) / getattr(other.config, name)))
        for name in ("block_m", "block_n", "num_warps", "num_stages", "head_group", "q_stages", "packed_heads")
    )
    flags = [getattr(one.variant, name) != getattr(other.variant, name) for name in _STRUCTURE]
    flags += [one.config.persistent != other.config.persistent]
    flags += [one.variant.backend != other.variant.backend] * 7
    return float(numbers + sum(flags) + 2 * (one.config.maxnreg != other.config.maxnreg))
