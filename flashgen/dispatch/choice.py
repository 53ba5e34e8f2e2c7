"""Problem and device -> the candidate to run, and why: a measured winner, one that is near, the model's choice, or the default."""

import functools
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flashgen import cost, space
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.errors import BuildError
from flashgen.problem import Problem
from flashgen.record import Record
from flashgen.render import render

LIMIT = 4.0  # winners farther away than this say less than the model does
CHANGED_SOURCE = 0.5  # what it adds to the distance that a winner's source was rendered anew since it was measured
OTHER_TRITON = 0.25  # and that another minor release of Triton compiled it
_NEAREST = 8  # winners looked at closely, and tried
_PREDICTED = 3  # candidates of the model tried before the default


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A candidate and where it came from.

    how       exact: the winner measured for this very problem and device, with the source of today and the same minor release of
              Triton; nearest: a winner carried over from elsewhere; predicted: the model's favourite; default: the hand-picked one.
    record    the row it came from, for exact and nearest.
    distance  of that row: see `distance`; 0 for exact.
    because   why nothing better was used, one sentence each.
    """

    candidate: Candidate
    how: str
    record: Record | None = None
    distance: float | None = None
    because: tuple[str, ...] = ()


def choose(
    problem: Problem,
    device: Device,
    winners: Iterable[Record],
    *,
    negative_scale: bool = False,
    portable: bool = False,
    failures: Mapping[Candidate, str] | None = None,
) -> Choice:
    """The first of `choices`. Raises BuildError if each of them is among the failures."""
    for choice in choices(problem, device, winners, negative_scale=negative_scale, portable=portable, failures=failures):
        return choice
    raise BuildError(f"every choice failed here: {'; '.join(dict.fromkeys((failures or {}).values()))}")


def choices(
    problem: Problem,
    device: Device,
    winners: Iterable[Record],
    *,
    negative_scale: bool = False,
    portable: bool = False,
    failures: Mapping[Candidate, str] | None = None,
) -> Iterator[Choice]:
    """Choices for a problem that is not empty, best first, each candidate once.

    A candidate in failures is left out, and the reason said; failures may grow while this is iterated. With a negative scale each
    candidate is taken in its scale_first form, the only one that is right then; backward kernels are right for scales of any sign.
    portable: only kernels that Triton's interpreter runs. A deterministic problem has no candidate that is not.
    """
    because: list[str] = []
    for candidate, how, record, away in _sources(problem, device, winners, because, portable):
        if negative_scale and problem.direction == "forward":
            candidate = replace(candidate, variant=replace(candidate.variant, scale_first=True))
        if failures is None or candidate not in failures:
            yield Choice(candidate=candidate, how=how, record=record, distance=away, because=tuple(because))
        if failures is not None and candidate in failures:
            because.append(f"{candidate} failed here: {failures[candidate]}")


def has_nothing_to_compute(problem: Problem) -> bool:
    """Without queries or keys results are zeros (and -inf as the LSE), and no kernel runs."""
    return 0 in (problem.batch, problem.seqlen_q, problem.seqlen_kv)


def distance(record: Record, problem: Problem, device: Device) -> float:
    """How little a winner says about a problem on a device: 0 for its own, infinite where it says nothing. A sum of

    - dtype: 0.25 between bfloat16 and float16; float32 is infinitely far from both;
    - 3 for each octave between the head dims rounded up to powers of two, which is how a kernel sees them, and 0.5 for each between
      the head dims themselves, for qk and v each;
    - 1.5 for another kind of mask, 0.2 for another diagonal;
    - for each octave between sizes: 0.3 for seqlen_q, 0.25 for the mean number of keys a query sees, 0.2 for batch * heads_q,
      0.2 for the query heads that share a key/value head;
    - 1 if one is aligned for TMA and the other is not, 0.1 for another layout, 0.1 for storing the LSE (backward: a gradient of it) or not;
    - 0.5 for a sibling of the device (the same architecture), 1 for each octave between SM counts and 0.5 for each between DRAM
      bandwidths; other architectures are infinitely far.

    Octaves are base-two logarithms of ratios. Different problems are at least 0.05 apart.
    """
    other, sibling = record.problem, record.device
    if problem.direction != other.direction or problem.itemsize != other.itemsize or device.capability != sibling.capability:
        return math.inf
    away = 0.25 * (problem.dtype != other.dtype)
    for ours, theirs in ((problem.head_dim_qk, other.head_dim_qk), (problem.head_dim_v, other.head_dim_v)):
        away += 3.0 * _octaves(_power_of_two(ours), _power_of_two(theirs)) + 0.5 * _octaves(ours, theirs)
    away += 1.5 * (_mask_kind(problem) != _mask_kind(other)) + 0.2 * (_is_top_left(problem) != _is_top_left(other))
    away += 0.3 * _octaves(problem.seqlen_q, other.seqlen_q)
    away += 0.25 * _octaves(_mean_keys(problem), _mean_keys(other))
    away += 0.2 * _octaves(problem.batch * problem.heads_q, other.batch * other.heads_q)
    away += 0.2 * _octaves(problem.heads_q / problem.heads_kv, other.heads_q / other.heads_kv)
    away += 1.0 * (problem.aligned_16 != other.aligned_16)
    away += 0.1 * (problem.layout != other.layout) + 0.1 * (problem.return_lse != other.return_lse)
    if device.key != sibling.key:
        away += 0.5 + _octaves(device.num_sms, sibling.num_sms) + 0.5 * _octaves(device.dram_bytes_per_s, sibling.dram_bytes_per_s)
    return away if problem == other else max(away, 0.05)


def expected_us(choice: Choice, problem: Problem, device: Device) -> float | None:
    """The time to expect here: the one measured for the row, times the ratio of the model's estimates here and there."""
    record = choice.record
    if record is None or record.candidate is None or record.measurement.median_us is None:
        return None
    here = cost.estimate(choice.candidate, problem, device)
    there = cost.estimate(record.candidate, record.problem, record.device)
    return record.measurement.median_us * here.time_s / there.time_s


def _sources(
    problem: Problem, device: Device, winners: Iterable[Record], because: list[str], portable: bool
) -> Iterator[tuple[Candidate, str, Record | None, float | None]]:
    """(candidate, how, record, distance), best first, each candidate once; appends to because why a better source was not used."""
    given: set[Candidate] = set()
    known = list(winners)
    if not any(_is_own(record, problem, device) for record in known):
        because.append("no winner was measured for this problem on this device")
    fit: list[Record] = []
    unfit: list[Record] = []
    for record in known:
        (unfit if record.candidate is not None and _unfit(record.candidate, problem, portable) else fit).append(record)
    for _, record, _ in _near(problem, device, unfit)[:1]:
        assert record.candidate is not None
        because.append(f"{_row(record)} is {record.candidate}, {_unfit(record.candidate, problem, portable)}")
    for away, record, doubts in _near(problem, device, fit):
        assert record.candidate is not None
        candidate = space.adapt(record.candidate, problem, device)
        row = _row(record)
        if candidate is None:
            broken = space.violations(record.candidate, problem, device) if _is_own(record, problem, device) else []
            if record.candidate.variant.backend == "hopper" and not broken and space.without_hopper(problem, device):
                continue  # an Explanation says so once, for all of them
            because.append(f"{row} is not legal here: {'; '.join(broken) or 'no form of its candidate is'}")
            continue
        if _is_own(record, problem, device):
            doubts = [*doubts] if candidate == record.candidate else [*doubts, "the candidate is not legal as it was measured"]
            because.extend(f"{row}: {doubt}" for doubt in doubts)
        else:
            doubts = ["another problem or device"]
        if candidate not in given:
            given.add(candidate)
            yield candidate, "nearest" if doubts else "exact", record, away
    if not given:
        because.append(f"none of {len(known)} known winners is usable within distance {LIMIT:g}")
    for candidate in _favourites(problem, device, portable):
        if candidate not in given:
            given.add(candidate)
            yield candidate, "predicted", None, None
    for default in (space.default, space.portable_default):
        candidate = default(problem, device)
        if candidate not in given and not _unfit(candidate, problem, portable):
            given.add(candidate)
            yield candidate, "default", None, None


def _row(record: Record) -> str:
    return f"the winner of {record.problem} on {record.device.name}"


def _unfit(candidate: Candidate, problem: Problem, portable: bool) -> str:
    """Why a candidate may not run, whatever it is worth; empty if it may."""
    if portable and candidate.variant.backend != "triton":
        return "which Triton's interpreter does not run"
    if problem.deterministic and candidate.variant.fused:
        return "which adds to dq in the order in which programs come along, and the problem is deterministic"
    return ""


def _near(problem: Problem, device: Device, winners: Sequence[Record]) -> list[tuple[float, Record, list[str]]]:
    """The nearest winners with their distances and what speaks against trusting them, nearest first."""
    measured = ((distance(record, problem, device), record) for record in winners if record.is_winner_material)
    usable = ((away, record.key, record) for away, record in measured if away <= LIMIT)
    near = []
    for away, _, record in heapq.nsmallest(_NEAREST, usable):
        doubts = []
        if _source_sha256(record) != record.source_sha256:
            away += CHANGED_SOURCE
            doubts.append("its source has changed since it was measured")
        if _minor(record.provenance.triton) != _minor(_triton_version()):
            away += OTHER_TRITON
            doubts.append(f"it was compiled by Triton {record.provenance.triton}, and this is {_triton_version()}")
        near.append((away, record, doubts))
    return sorted(near, key=lambda each: each[0])


def _is_own(record: Record, problem: Problem, device: Device) -> bool:
    return record.problem == problem and record.device.key == device.key


def _favourites(problem: Problem, device: Device, portable: bool) -> list[Candidate]:
    """The model's best candidates, as they are legal for this problem."""
    fits = (space.adapt(candidate, problem, device) for candidate in _ranked(_rounded(problem), device, portable))
    return [candidate for candidate in fits if candidate is not None]


@functools.lru_cache(maxsize=256)
def _ranked(problem: Problem, device: Device, portable: bool) -> tuple[Candidate, ...]:
    ranked = heapq.nsmallest(
        _PREDICTED,
        (
            (cost.estimate(candidate, problem, device).time_s, place, candidate)
            for place, candidate in enumerate(space.candidates(problem, device))
            if not _unfit(candidate, problem, portable)
        ),
    )
    return tuple(candidate for _, _, candidate in ranked)


def _rounded(problem: Problem) -> Problem:
    """The problem with lengths and batch rounded up to powers of two, so that growing sequences do not rank the space at every step."""
    return replace(
        problem,
        batch=_power_of_two(problem.batch),
        seqlen_q=_power_of_two(problem.seqlen_q),
        seqlen_kv=_power_of_two(problem.seqlen_kv),
    )


def _source_sha256(record: Record) -> str:
    assert record.candidate is not None
    return render(record.candidate.variant).sha256


@functools.cache
def _triton_version() -> str:
    import triton

    return str(triton.__version__)


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _octaves(a: float, b: float) -> float:
    return abs(math.log2(max(a, 1)) - math.log2(max(b, 1)))


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _mask_kind(problem: Problem) -> str:
    if problem.window[0] is not None or problem.window[1] is not None:
        return "window"
    return "full" if problem.mask == "full" else "causal"


def _is_top_left(problem: Problem) -> bool:
    return problem.mask == "causal_top_left"


def _mean_keys(problem: Problem) -> float:
    return problem.visible_pairs / max(problem.seqlen_q, 1)
