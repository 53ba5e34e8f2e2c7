"""Parameter importances: how much of what was measured each knob explains, by itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from flashgen.candidate import Candidate, Config, Variant
from flashgen.record import Record

FEWEST = 8  # measured trials; of fewer nothing is said


@dataclass(frozen=True, kw_only=True)
class Importance:
    """A knob that measured trials differ in.

    share  of the variance of the logarithm of their times, between 0 and 1, that the knob's values explain alone: epsilon squared (Kelley,
           "An unbiased correlation ratio measure", 1935), which is 0 in the mean for a knob that does nothing, however many values it
           has. Searches do not draw at random, and knobs move together, so shares need not add up to 1.
    best   the value of the fastest trial.
    trials, fastest_us  by value.
    """

    name: str
    share: float
    best: str
    trials: dict[str, int]
    fastest_us: dict[str, float]


def importances(records: Sequence[Record]) -> list[Importance]:
    """Of each knob that varies among the measured rows of one problem, the most important first; empty for fewer than FEWEST rows."""
    rows = [(record.candidate, record.measurement.median_us) for record in records]
    measured = [(candidate, us) for candidate, us in rows if candidate is not None and us is not None]
    if len(measured) < FEWEST:
        return []
    found = []
    for holder, each in [(Variant, each) for each in fields(Variant)] + [(Config, each) for each in fields(Config)]:
        values = [_value(candidate, holder, each.name) for candidate, _ in measured]
        share = _epsilon_squared(values, [math.log(us) for _, us in measured])
        if share is not None:
            groups: dict[str, list[float]] = {}
            for value, (_, us) in zip(values, measured):
                groups.setdefault(value, []).append(us)
            best = min(zip(values, measured), key=lambda pair: pair[1][1])[0]
            found.append(
                Importance(
                    name=each.name,
                    share=share,
                    best=best,
                    trials={value: len(times) for value, times in groups.items()},
                    fastest_us={value: min(times) for value, times in groups.items()},
                )
            )
    return sorted(found, key=lambda importance: -importance.share)


def _value(candidate: Candidate, holder: type, name: str) -> str:
    value = getattr(candidate.variant if holder is Variant else candidate.config, name)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value in (None, "") else str(value)


def _epsilon_squared(groups: Sequence[str], values: Sequence[float]) -> float | None:
    """(between - (k - 1) within / (n - k)) / total, of sums of squares, at least 0; None where it says nothing."""
    members: dict[str, list[float]] = {}
    for group, value in zip(groups, values):
        members.setdefault(group, []).append(value)
    n, k = len(values), len(members)
    mean = sum(values) / n
    total = sum((value - mean) ** 2 for value in values)
    if k < 2 or k == n or total <= 0:
        return None
    between = sum(len(of) * (sum(of) / len(of) - mean) ** 2 for of in members.values())
    return max(0.0, (between - (k - 1) * (total - between) / (n - k)) / total)
