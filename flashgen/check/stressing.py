"""The harder check that a winner must pass, whichever its direction: several scales, and the same inputs again and again."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from flashgen.check.measures import Check, wrong
from flashgen.errors import ArgumentError


class Drawn(Protocol):
    """What both directions' cases have."""

    @property
    def seed(self) -> int: ...
    @property
    def scale(self) -> float: ...


C = TypeVar("C", bound=Drawn)


def stressed(
    prepare: Callable[[int, float | None], C],
    check: Callable[[C], Check],
    repeat: Callable[[C], str],
    *,
    seed: int,
    scales: Sequence[float | None],
) -> Check:
    """The first verdict of `check` that is not ok, else that of the first scale. Seeds are seed, seed + 1 ... for the scales in turn.

    repeat  says what is wrong with further runs on the inputs of the first scale; empty if nothing is.
    """
    first: Check | None = None
    for number, scale in enumerate(scales):
        case = prepare(seed + number, scale)
        result = check(case)
        if not result.ok:
            return wrong(result, f"with scale {case.scale:.6g} and seed {case.seed}: {result.message}")
        if first is None:
            first = result
            message = repeat(case)
            if message:
                return wrong(result, message)
    if first is None:
        raise ArgumentError("scales is empty; there must be at least one")
    return first
