"""Two sets of rows side by side: databases, devices or Triton releases."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashgen.database.ranking import TIE
from flashgen.record import Record
from flashgen.report.summary import Summary, summarize, time_us


@dataclass(frozen=True, kw_only=True)
class Change:
    """The winners of one problem on both sides."""

    before: Summary
    after: Summary

    @property
    def winners(self) -> tuple[Record, Record]:
        """Before and after."""
        assert self.before.winner is not None and self.after.winner is not None
        return self.before.winner, self.after.winner

    @property
    def speedup(self) -> float:
        """Time before over time after: above 1 is faster."""
        before, after = self.winners
        return time_us(before) / time_us(after)

    @property
    def peers_speedup(self) -> float | None:
        """The same of the implementations that both sides measured in one version, in geomean: what clocks and drivers did. None without
        any."""
        known = {record.peer: record for record in self.before.peers}
        ratios = [time_us(known[record.peer]) / time_us(record) for record in self.after.peers if record.peer in known]
        return geomean(ratios)

    @property
    def is_same_candidate(self) -> bool:
        """Both winners are the same candidate."""
        before, after = self.winners
        return before.candidate == after.candidate


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The problems that have a measured winner on both sides, in the order of summaries, and how many have one on one side only."""

    before: str
    after: str
    changes: tuple[Change, ...]
    only_before: int
    only_after: int

    @property
    def speedup(self) -> float | None:
        """Geomean over all problems in common."""
        return geomean([change.speedup for change in self.changes])

    @property
    def peers_speedup(self) -> float | None:
        """Geomean over the problems whose peers both sides measured."""
        return geomean([change.peers_speedup for change in self.changes if change.peers_speedup is not None])

    def __str__(self) -> str:
        if self.speedup is None:
            text = f"{self.after} against {self.before}: no problem has a measured winner on both sides"
        else:
            faster = sum(change.speedup > 1 + TIE for change in self.changes)
            slower = sum(change.speedup < 1 / (1 + TIE) for change in self.changes)
            count = len(self.changes)
            text = (
                f"{self.after} against {self.before}: {self.speedup:.3f}x as fast in geomean over {count} problem{'s' * (count > 1)}; "
                f"{faster} faster, {slower} slower, {count - faster - slower} within {TIE:.0%}"
            )
            if self.peers_speedup is not None:
                text += f"; peers, whose versions are the same on both sides, {self.peers_speedup:.3f}x"
        alone = [f"{n} only {side}" for n, side in ((self.only_before, f"in {self.before}"), (self.only_after, f"in {self.after}")) if n]
        return text + ("; " + ", ".join(alone) if alone else "") + "."


def compare(
    before: Iterable[Record], after: Iterable[Record], *, names: tuple[str, str] = ("before", "after"), across_devices: bool = False
) -> Comparison:
    """Winners of the same problem, on the same device unless across_devices."""
    first = {_place(summary, across_devices): summary for summary in summarize(before) if summary.winner is not None}
    second = [summary for summary in summarize(after) if summary.winner is not None]
    changes = [
        Change(before=first[_place(summary, across_devices)], after=summary)
        for summary in second
        if _place(summary, across_devices) in first
    ]
    met = {_place(change.after, across_devices) for change in changes}
    return Comparison(
        before=names[0],
        after=names[1],
        changes=tuple(changes),
        only_before=len(first.keys() - met),
        only_after=len(second) - len(changes),
    )


def geomean(ratios: Sequence[float]) -> float | None:
    """None of nothing."""
    return statistics.geometric_mean(ratios) if ratios else None


def _place(summary: Summary, across_devices: bool) -> tuple[str, str]:
    return "" if across_devices else summary.device.key, summary.problem.key
