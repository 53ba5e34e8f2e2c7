"""What the rows of one problem on one device come to: the numbers under every report."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from flashgen import space, theory
from flashgen.candidate import Candidate
from flashgen.database import ranking
from flashgen.device import Device
from flashgen.problem import DIRECTIONS, Problem
from flashgen.record import Record, Status
from flashgen.report.knobs import Importance, importances
from flashgen.report.limits import NAMES, Lift, Limit, counted_shares, lift_of, limit_of
from flashgen.report.units import tflops

# Predicted and skipped rows are no failures, counted rows no trials; a peer that does not apply is not a row at all.
UNTRIED = (Status.PREDICTED, Status.SKIPPED)
FAILURES = tuple(status for status in Status if status not in (Status.OK, Status.COUNTED, *UNTRIED))


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Trials that ended the same way for the same reason, and what one of them said."""

    status: Status
    reason: str
    count: int
    example: str


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All rows of one problem on one device.

    trials     a row for each candidate, the newest that ran, in the order in which they first came.
    winner     the best measured and right one by the database's rules; None where nothing was measured.
    favourite  the row that the cost model puts first, measured or not.
    default    the hand-picked candidate's row.
    peers      of each other implementation the measurement nearest in time to the winner's, fastest first: clocks differ from one
               run to the next, and only what ran together compares.
    counted    the newest row of the winner's candidate that ran under a profiler with a cold cache, else with any; None without one.
    """

    problem: Problem
    device: Device
    trials: tuple[Record, ...]
    winner: Record | None
    favourite: Record | None
    default: Record | None
    peers: tuple[Record, ...]
    counted: Record | None = None

    @property
    def measured(self) -> list[Record]:
        """Trials with a time, in order."""
        return [record for record in self.trials if record.is_winner_material]

    @property
    def is_predicted_only(self) -> bool:
        """Nothing ran on the device."""
        return not self.measured

    @cached_property
    def roofline_us(self) -> float:
        """The least time that compulsory work and traffic take on this device."""
        return theory.bound_s(self.problem, self.device) * 1e6

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's correlation of predicted and measured times; None for fewer than three trials."""
        pairs = [(record.estimate.time_s, time_us(record)) for record in self.measured if record.estimate is not None]
        return rank_correlation([first for first, _ in pairs], [second for _, second in pairs])

    @property
    def failures(self) -> list[Failure]:
        """Failed trials by status and reason, most frequent first."""
        groups: dict[tuple[Status, str], list[str]] = {}
        for record in self.trials:
            if record.measurement.status in FAILURES:
                groups.setdefault((record.measurement.status, reason(record)), []).append(record.measurement.message)
        rows = [Failure(status=status, reason=why, count=len(all_), example=all_[0]) for (status, why), all_ in groups.items()]
        return sorted(rows, key=lambda row: (-row.count, row.status.value, row.reason))

    @cached_property
    def excluded(self) -> dict[str, int]:
        """How many candidates each constraint of the space rules out before any trial, most first."""
        return dict(sorted(space.rejected(self.problem, self.device).items(), key=lambda item: -item[1]))

    @cached_property
    def limit(self) -> Limit | None:
        """What holds the winner back, by the cost model."""
        return None if self.winner is None else limit_of(self.winner)

    @cached_property
    def counted_shares(self) -> dict[str, float]:
        """The shares of the limits that the device's counters tell of."""
        return {} if self.counted is None else counted_shares(self.counted)

    @cached_property
    def lift(self) -> Lift | None:
        """The nearest candidate that the winner's bound would not hold; None where the model knows of none."""
        return None if self.winner is None else lift_of(self.winner, {row.candidate: row for row in self.trials if row.candidate})

    @property
    def why_not_faster(self) -> str:
        """Limit and lift as sentences; empty without a winner."""
        if self.winner is None or self.limit is None:
            return ""
        text = f"Held by {self.limit}."
        if self.limit.bound in self.counted_shares:
            text += f" The device counted {self.counted_shares[self.limit.bound]:.0%}."
        if self.lift is None:
            return f"{text} By the model none of the legal candidates would lift that."
        took = f"{self.lift.slowdown:.2f}x the time by the model"
        if self.lift.measured is not None:
            took += f" and {time_us(self.lift.measured) / time_us(self.winner):.2f}x measured"
        return f"{text} Nearest candidate that would lift it: {label(self.lift.candidate)}; {took}, held by {NAMES[self.lift.bound]}."

    @cached_property
    def importances(self) -> list[Importance]:
        """How much of the measured times each knob explains."""
        return importances(self.measured)

    def tflops(self, record: Record) -> float:
        """TFLOP/s of a measured row, counting what the mask leaves."""
        return tflops(self.problem.flops, time_us(record) * 1e-6)

    @property
    def roofline_tflops(self) -> float:
        """TFLOP/s at the roofline."""
        return tflops(self.problem.flops, self.roofline_us * 1e-6) if self.problem.flops else 0.0

    def contenders(self) -> list[tuple[str, Record]]:
        """(name, row) of what is compared side by side: winner, default, then the peers."""
        rows = [("winner", self.winner), ("default", self.default)]
        return [(name, record) for name, record in rows if record is not None] + [(peer_name(record), record) for record in self.peers]


def summarize(records: Iterable[Record]) -> list[Summary]:
    """One Summary for each problem and device that has trials or peers among the rows, in a fixed order."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.device.key, record.problem.key), []).append(record)
    tried = (group for group in groups.values() if any(record.measurement.status is not Status.COUNTED for record in group))
    return sorted((_summary(group) for group in tried), key=_order)


def time_us(record: Record) -> float:
    """The median time of a measured row."""
    if record.measurement.median_us is None:
        raise ValueError(f"a row with status {record.measurement.status.value} has no time")
    return record.measurement.median_us


def label(candidate: Candidate) -> str:
    """What tells a candidate from the others of its problem: 128x64 warps 8 stages 3, tma, masked apart. Hopper kernels have no choice
    of these two."""
    variant, config = candidate.variant, candidate.config
    if variant.backend == "hopper":
        structure, names = ["hopper", variant.order], ["ping_pong", "scale_first", "fused", "split_roles", "float16_dq"]
        config = replace(config, persistent=False)
    else:
        structure, names = [variant.load], ["masked_apart", "longest_first", "scale_first"]
    words = structure + [name for name in names if getattr(variant, name)]
    return ", ".join([str(config), *(word.replace("_", " ") for word in words if word)])


def describe(record: Record) -> str:
    """A row's candidate, or its peer's version."""
    if record.candidate is not None:
        return label(record.candidate)
    return record.peer.version if record.peer is not None else ""


def reason(record: Record) -> str:
    """What a failure's message begins with, where it names its reason before a colon; else the status in words."""
    head, colon, _ = record.measurement.message.partition(":")
    return head if colon and len(head) <= 40 and "\n" not in head else record.measurement.status.value.replace("_", " ")


def peer_name(record: Record) -> str:
    """SDPA's backends by the name PyTorch gives them, others by their own."""
    name = record.peer.name if record.peer is not None else ""
    return f"SDPA {name}" if name in ("cudnn", "flash", "efficient", "math") else name


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation, equal values sharing their mean rank; None where it says nothing (under 3 pairs, no spread)."""
    if len(first) < 3:
        return None
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) + 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b))
    spread = sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)
    return covariance / spread**0.5 if spread > 0 else None


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for position in order[start:stop]:
            ranks[position] = (start + stop + 1) / 2
        start = stop
    return ranks


def _summary(records: list[Record]) -> Summary:
    problem, device = records[0].problem, records[0].device
    in_order = sorted(records, key=lambda record: record.provenance.utc)
    trials: dict[Candidate, Record] = {}
    for record in in_order:
        if record.candidate is not None and record.measurement.status is not Status.COUNTED:
            known = trials.setdefault(record.candidate, record)
            if record.measurement.status not in UNTRIED or known.measurement.status in UNTRIED:
                trials[record.candidate] = record
    winner = next(iter(ranking.ranked_records([record for record in in_order if record.candidate is not None])), None)
    estimated = [(record.estimate.time_s, record) for record in trials.values() if record.estimate is not None]
    default = trials.get(space.default(problem, device))
    peers: dict[str, Record] = {}
    for record in in_order:
        if record.peer is not None and record.measurement.status is Status.OK:
            known = peers.setdefault(record.peer.name, record)
            if winner is None or _seconds_apart(record, winner) <= _seconds_apart(known, winner):
                peers[record.peer.name] = record
    return Summary(
        problem=problem,
        device=device,
        trials=tuple(trials.values()),
        winner=winner,
        favourite=min(estimated, key=lambda pair: pair[0])[1] if estimated else None,
        default=default if default is not None and default.is_winner_material else None,
        peers=tuple(sorted(peers.values(), key=time_us)),
        counted=_counted(in_order, winner),
    )


def _counted(in_order: Sequence[Record], winner: Record | None) -> Record | None:
    rows = [record for record in in_order if record.measurement.counters and winner and record.candidate == winner.candidate]
    cold = [record for record in rows if record.measurement.counters and record.measurement.counters.cache == "cold"]
    return next(reversed(cold or rows), None)


def _seconds_apart(first: Record, second: Record) -> float:
    began, ended = (datetime.fromisoformat(record.provenance.utc.replace("Z", "+00:00")) for record in (first, second))
    return abs((ended - began).total_seconds())


def _order(summary: Summary) -> tuple[object, ...]:
    problem = summary.problem
    return (
        summary.device.name,
        DIRECTIONS.index(problem.direction),
        problem.dtype,
        problem.head_dim_qk,
        problem.head_dim_v,
        problem.mask,
        problem.seqlen_kv,
        problem.seqlen_q,
        problem.heads_q,
        problem.batch,
        problem.key,
    )
