"""Ledger: the rows of one problem on one device, earlier searches' first, and what they say by now."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from flashgen.candidate import Candidate
from flashgen.database import Database
from flashgen.device import Device
from flashgen.problem import Problem
from flashgen.record import Estimate, Measurement, Peer, Provenance, Record, Status
from flashgen.render import render
from flashgen.search import provenance

RAN = (Status.OK, Status.WRONG_RESULT, Status.LAUNCH_ERROR, Status.TIMEOUT, Status.CRASHED)
FAILED = (*RAN[1:], Status.COMPILE_ERROR, Status.OUT_OF_RESOURCES, Status.INVALID)


class Ledger:
    """Rows of today's generated sources, of this release of Triton and this machine. New ones are in the database at once.

    rows   what candidates went through, in order; kept  those of this search, peers' rows among them.
    gpu    name of the GPU that new rows come from, as soon as it is known.
    """

    def __init__(self, problem: Problem, device: Device, database: Database, here: Callable[[], Provenance] = provenance.here) -> None:
        self.problem, self.device, self.database = problem, device, database
        self.rows: list[Record] = []
        self.kept: list[Record] = []
        self.gpu = ""
        self._here = here

    def resume(self) -> list[Record]:
        """Take over what earlier searches kept; gives the last row of each candidate that was tried."""
        stored = self.database.records(self.problem, self.device, peers=False)
        self.rows = [row for row in stored if row.provenance.origin == "local" and self._is_current(row)]
        return list(self._last().values())

    def keep(self, candidate: Candidate, measurement: Measurement, estimate: Estimate) -> Record:
        """A new row of a candidate."""
        row = self.record(candidate, measurement, estimate)
        self.rows.append(row)
        self.kept.append(row)
        self.database.add(row)
        return row

    def keep_peers(self, measured: Iterable[tuple[Peer, Measurement]]) -> None:
        """New rows of peers."""
        rows = [self._row(measurement, peer=peer) for peer, measurement in measured]
        self.kept += rows
        self.database.add(rows)

    def record(self, candidate: Candidate, measurement: Measurement, estimate: Estimate) -> Record:
        """A row of a candidate here and now, not kept."""
        return self._row(measurement, candidate=candidate, estimate=estimate, source_sha256=_source(candidate))

    def _row(self, measurement: Measurement, **what: object) -> Record:
        where = provenance.now(replace(self._here(), gpu=self.gpu))
        return Record(problem=self.problem, device=self.device, measurement=measurement, provenance=where, **what)  # type: ignore[arg-type]

    def latest(self, candidate: Candidate) -> Record | None:
        """The last row of a candidate that was tried."""
        return next((row for row in reversed(self.rows) if row.candidate == candidate and _is_tried(row)), None)

    def standing(self) -> list[Record]:
        """The last rows of candidates whose last row is a measured time, fastest first."""
        sound = [row for row in self._last().values() if row.measurement.status is Status.OK]
        return sorted(sound, key=time_us)

    def incumbent(self) -> Record | None:
        """The fastest row that stands."""
        return min(self.standing(), key=time_us, default=None)

    def winner(self) -> Record | None:
        """Who wins by the database's rules, among candidates of these rows."""
        ours = {row.candidate for row in self.rows if row.measurement.status is Status.OK}
        ranked = self.database.ranked(self.problem, self.device)
        return next((row for row in ranked if row.candidate in ours and self._is_current(row)), None)

    def is_settled(self) -> bool:
        """An earlier search has compared its finalists, and nothing was measured since: its newest time is a second one."""
        measured = [row.candidate for row in self.rows if row.measurement.status is Status.OK]
        return bool(measured) and measured[-1] in measured[:-1] and self.winner() is not None

    def peers(self) -> tuple[Record, ...]:
        """The newest row of each peer."""
        rows = self.database.records(self.problem, self.device, Status.OK, peers=True)
        return tuple({row.peer.name: row for row in rows if row.peer is not None}.values())

    def reasons(self) -> str:
        """Why candidates failed, the most frequent reasons first."""
        failed = (row.measurement for row in self.rows if row.measurement.status in FAILED)
        counts = Counter(f"{measurement.status.value} ({measurement.message[:200]})" for measurement in failed)
        return "; ".join(f"{count} x {reason}" for reason, count in counts.most_common(5)) or "none was tried"

    def _last(self) -> dict[Candidate | None, Record]:
        return {row.candidate: row for row in self.rows if _is_tried(row)}

    def _is_current(self, row: Record) -> bool:
        """The row tells of today's generated source, compiled by this release of Triton."""
        same_release = row.provenance.triton.split(".")[:2] == self._here().triton.split(".")[:2]
        return same_release and row.candidate is not None and row.source_sha256 == _source(row.candidate)


def time_us(row: Record) -> float:
    """The row's time, infinite if it has none."""
    return math.inf if row.measurement.median_us is None else row.measurement.median_us


def _is_tried(row: Record) -> bool:
    return row.measurement.status is Status.OK or row.measurement.status in FAILED


def _source(candidate: Candidate) -> str:
    return render(candidate.variant).sha256
