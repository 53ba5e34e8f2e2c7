"""Who wins: the order of the trials of one problem on one device.

The rules, in this order:
1. Only candidates whose trial ended with a right, measured time can win. Predicted and skipped rows say nothing here.
2. A wrong result is for good: once a candidate gave one, none of its times counts while its generated source stays the same.
3. What was seen on this machine speaks: a candidate with local rows is judged by them alone; shipped and imported rows of the
   same candidate and source are then ignored, were they faster or not.
4. The newest trial speaks: a candidate measured twice is judged by its last trial (the minimum over repeats would pick the
   luckiest), and is out if that one failed.
5. The lowest median wins. Medians within TIE of the lowest are equal, and among equals the order is: less shared memory, fewer
   registers, lower candidate key.
Different candidates are compared by their times wherever these were measured; tuning measures stored winners again before others.
"""

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

from flashgen.record import Record, Status

TIE = 0.01  # relative; a smaller difference of medians may be noise

# A trial that ended in one of these was run, or could not be.
DECIDED = (
    Status.OK,
    Status.COMPILE_ERROR,
    Status.OUT_OF_RESOURCES,
    Status.LAUNCH_ERROR,
    Status.WRONG_RESULT,
    Status.TIMEOUT,
    Status.CRASHED,
)


class Trial(NamedTuple):
    """The columns of a row that decide whether it wins."""

    key: str
    candidate_key: str
    source_sha256: str
    status: str
    median_us: float | None
    origin: str
    utc: str
    smem_bytes: int | None
    registers: int | None

    @property
    def is_sound(self) -> bool:
        """The columns have their types, and exactly ok rows a time above 0: SQLite itself promises neither."""
        words = (self.key, self.candidate_key, self.source_sha256, self.status, self.origin, self.utc)
        numbers = (self.smem_bytes, self.registers)
        return (
            all(isinstance(word, str) for word in words)
            and all(number is None or isinstance(number, int) for number in numbers)
            and (self.status == Status.OK.value) == (isinstance(self.median_us, float) and 0 < self.median_us < math.inf)
        )


def trial_of(record: Record) -> Trial:
    """The trial of a candidate's record."""
    measurement, resources = record.measurement, record.measurement.resources
    return Trial(
        key=record.key,
        candidate_key=record.candidate.key if record.candidate else "",
        source_sha256=record.source_sha256,
        status=measurement.status.value,
        median_us=measurement.median_us,
        origin=record.provenance.origin,
        utc=record.provenance.utc,
        smem_bytes=resources.smem_bytes if resources else None,
        registers=resources.registers if resources else None,
    )


def ranked_records(records: Iterable[Record]) -> list[Record]:
    """As ranked, for records in hand: those of one problem on one device that could win, best first."""
    trials = {trial_of(record): record for record in records if record.candidate is not None and record.measurement.status in DECIDED}
    return [trials[trial] for trial in ranked(trials)]


def ranked(trials: Iterable[Trial]) -> list[Trial]:
    """At most one trial for each candidate and source, best first; given all trials of one problem on one device."""
    identity = lambda trial: (trial.candidate_key, trial.source_sha256)  # noqa: E731
    groups = itertools.groupby(sorted(trials, key=identity), identity)
    judged = [verdict for _, group in groups if (verdict := _verdict(list(group))) is not None]
    if not judged:
        return []
    fastest = min(_time(trial) for trial in judged)
    return sorted(judged, key=lambda trial: _place(trial, fastest))


def _verdict(trials: list[Trial]) -> Trial | None:
    if any(trial.status == Status.WRONG_RESULT.value for trial in trials):
        return None
    heard = [trial for trial in trials if trial.origin == "local"] or trials
    # Of trials in one and the same second the failed, then the slower one counts as the last.
    last = max(heard, key=lambda trial: (trial.utc, _time(trial), trial.key))
    return last if _time(last) < math.inf else None


def _time(trial: Trial) -> float:
    return trial.median_us if trial.status == Status.OK.value and trial.median_us is not None else math.inf


def _place(trial: Trial, fastest: float) -> tuple[float, float, float, str, str]:
    tied = _time(trial) <= fastest * (1 + TIE)
    unknown = math.inf
    return (
        0.0 if tied else _time(trial),
        unknown if trial.smem_bytes is None else trial.smem_bytes,
        unknown if trial.registers is None else trial.registers,
        trial.candidate_key,
        trial.source_sha256,
    )
