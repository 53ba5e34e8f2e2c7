"""What a search is given and what it gives: Budget, the events while it runs, and the Outcome."""

import math
import numbers
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.errors import ArgumentError
from flashgen.problem import Problem
from flashgen.record import Record


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When a search ends, whichever comes first. None switches a limit off.

    trials      candidates that were run on the GPU, those of earlier searches that are resumed included.
    seconds     of this search, from the end of its first trial on: what comes before is the start of compilers and GPU. The last
                trial and the comparison of the finalists (about 2 s) may go beyond.
    patience    trials in a row that improved the best time by less than 1 % in all.
    near_bound  the best time is so close to the least that the device could take (bound_s / time).
    """

    trials: int | None = 32
    seconds: float | None = None
    patience: int | None = 14
    near_bound: float | None = 0.95

    def __post_init__(self) -> None:
        for name in ("trials", "patience"):
            object.__setattr__(self, name, _count(name, getattr(self, name)))
        for name, most in (("seconds", math.inf), ("near_bound", 1.0)):
            object.__setattr__(self, name, _number(name, getattr(self, name), most))


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(f"{name} is {value!r}; it must be a whole number, or None for no limit")
    number = operator.index(value)
    if number < 1:
        raise ArgumentError(f"{name} is {number}; it must be at least 1, or None for no limit")
    return number


def _number(name: str, value: Any, most: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentError(f"{name} is {value!r}; it must be a number, or None for no limit")
    number = float(value)
    if not (math.isfinite(number) and 0 < number <= most):
        limit = "above 0" if most == math.inf else f"above 0 and at most {most:g}"
        raise ArgumentError(f"{name} is {value!r}; it must be {limit}, or None for no limit")
    return number


@dataclass(frozen=True, kw_only=True)
class Started:
    """A search begins: legal candidates, how many of them earlier searches have run, and the budget."""

    problem: Problem
    device: Device
    legal: int
    known: int
    budget: Budget


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A candidate was run, or turned out not to be worth it; record says how that ended.

    source        where the candidate came from: default, nearest, model, random (a sample), or predicted where nothing is measured.
    trials        run so far, and of_trials the budget's (None: no limit).
    best_us       the fastest so far, default_us the default's; None while there is none.
    remaining_s   a guess of how long the search will go on at most; None while nothing is known.
    """

    record: Record
    source: str
    trials: int
    of_trials: int | None
    compiled: int
    best_us: float | None
    best: Candidate | None
    default_us: float | None
    elapsed_s: float
    remaining_s: float | None


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Another kind of work begins: starting, searching, deciding (finalists are measured together), validating; predicting."""

    stage: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The search of a problem ended with this outcome."""

    outcome: "Outcome"


Event = Started | Tried | Staged | Ended
Listener = Callable[[Event], None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a search.

    winner    the row that dispatch will use, with status OK; or if nothing could be measured (`measured` is False) the model's favourite,
              with status PREDICTED.
    default   the newest row of the default candidate, None if it has none.
    records   the rows of this search, in order; those of earlier searches are in the database.
    peers     rows of other implementations, measured together with the finalists.
    trials    candidates run so far, earlier searches included.
    reason    why the search ended, one sentence.
    notes     what else a reader of the result must know, one sentence each.
    """

    problem: Problem
    device: Device
    winner: Record
    default: Record | None
    records: tuple[Record, ...]
    peers: tuple[Record, ...]
    measured: bool
    trials: int
    skipped: int
    seconds: float
    reason: str
    notes: tuple[str, ...] = ()

    @property
    def speedup(self) -> float | None:
        """Time of the default over time of the winner; None if either was not measured."""
        default_us = self.default.measurement.median_us if self.default is not None else None
        winner_us = self.winner.measurement.median_us
        return None if default_us is None or winner_us is None else default_us / winner_us
