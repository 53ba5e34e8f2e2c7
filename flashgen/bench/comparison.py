"""How kernels are compared: pure policy over anything that can time calls, so that it can be tested with made-up times."""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from flashgen.record import Measurement, Status

Call = Callable[[], object]

FIRST_ROUNDS = 2  # after them, what is clearly slower is dropped
BATCH_S = 0.05  # rounds are queued for about this long before the next decision
CONTENDED = 0.1  # a calm GPU keeps the quartiles within 1 or 2 % of the median
SIGMAS = 3.0  # a lead below this many standard errors is no lead: the best of a dozen equals leads by two
LEAST_LEAD = 0.003  # nor is one below this fraction
BURST_S = 0.25


class Gpu(Protocol):
    """What the policy needs of a GPU."""

    def measure(self, calls: Sequence[Call]) -> list[float]:
        """Run the calls in order, each with a cold L2; microseconds of each."""

    def burst(self, seconds: float) -> float:
        """Keep the GPU as busy as can be for about so long; the rate of work that it reached, in any unit."""

    def clock(self) -> float:
        """Seconds, monotonic."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How long to measure.

    seconds       what one comparison may take, roughly; three rounds are always made.
    precision     rounds end earlier once the standard error of every median is below this fraction of it,
    least_rounds  but not before so many,
    most_rounds   and never go beyond so many.
    drop_ratio    a call that takes more than this many times the reference's time in the first two rounds gets no more of them.
    """

    seconds: float = 0.2
    precision: float = 0.0025
    least_rounds: int = 8
    most_rounds: int = 200
    drop_ratio: float = 1.5


DEFAULT = Policy()
FINAL = Policy(seconds=1.0, precision=0.001)  # of a decision among finalists


@dataclass(frozen=True, kw_only=True)
class Times:
    """Samples of one call. times_us are raw; median_us and spread_us (half the distance between the quartiles) are corrected.

    dropped says that the call was clearly slower than the reference, and so was measured twice only.
    """

    times_us: tuple[float, ...]
    median_us: float
    spread_us: float
    dropped: bool = False

    @cached_property
    def standard_error_us(self) -> float:
        """Of the median, as if the samples were normal."""
        return 1.2533 * self.spread_us / 0.6745 / math.sqrt(len(self.times_us))

    def measurement(self, **more: Any) -> Measurement:
        """These times as a measurement of something right; more are its other fields."""
        times = dict(times_us=self.times_us, median_us=self.median_us, spread_us=self.spread_us)
        return Measurement(status=Status.OK, **times, **more)  # type: ignore[arg-type]

    @property
    def contended(self) -> bool:
        """The samples scatter as they do when something else uses the GPU."""
        return self.spread_us > CONTENDED * self.median_us


def compare(
    gpu: Gpu,
    calls: Mapping[str, Call],
    *,
    reference: str | None = None,
    reference_us: float | None = None,
    policy: Policy = DEFAULT,
) -> dict[str, Times]:
    """Times of calls that are measured in turn, round by round, in an order that chance changes each time.

    reference names the call that the others are dropped against; None takes the fastest. With reference_us, what the reference is
    known to take, all results are scaled so that it takes just that: times then compare across comparisons, whatever the clocks
    did in between.
    """
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    live = names
    began, turn, rounds = gpu.clock(), 0, FIRST_ROUNDS
    while names:
        order = [name for number in range(turn, turn + rounds) for name in _shuffled(live, number)]
        for name, time_us in zip(order, gpu.measure([calls[name] for name in order])):
            samples[name].append(time_us)
        turn += rounds
        if turn == FIRST_ROUNDS:
            yardstick = min(statistics.median(samples[name]) for name in ([reference] if reference else names))
            live = [name for name in names if name == reference or min(samples[name]) <= policy.drop_ratio * yardstick]
        spent = gpu.clock() - began
        precise = all(_times(samples[name]).standard_error_us <= policy.precision * statistics.median(samples[name]) for name in live)
        out_of_time = spent >= policy.seconds and turn > FIRST_ROUNDS
        if turn >= policy.most_rounds or out_of_time or (precise and turn >= policy.least_rounds) or (live == [reference] != names):
            break
        affordable = int(min(policy.seconds - spent, BATCH_S) * turn / spent) if spent > 0 else policy.most_rounds
        rounds = max(1, min(affordable, policy.most_rounds - turn))
    factor = 1.0
    if reference is not None and reference_us is not None:
        factor = reference_us / statistics.median(samples[reference])
    return {name: _times(samples[name], factor, dropped=name not in live) for name in names}


def best(times: Mapping[str, Times], order: Sequence[str] | None = None) -> str:
    """The fastest; of all that cannot be told from it, the first in `order` (None: the order of times).

    Put the default first and simpler candidates before others. Dropped calls never win.
    """
    finalists = {name: each for name, each in times.items() if not each.dropped}
    leader = min(finalists.values(), key=lambda each: each.median_us)
    tied = [name for name, each in finalists.items() if each.median_us - leader.median_us <= noise_us(each, leader)]
    return next((name for name in order or () if name in tied), tied[0])


def noise_us(one: Times, other: Times) -> float:
    """The difference of two medians below which they are the same."""
    error_us = math.hypot(one.standard_error_us, other.standard_error_us)
    return max(SIGMAS * error_us, LEAST_LEAD * min(one.median_us, other.median_us))


def warm_up(gpu: Gpu, most_s: float = 10.0) -> list[float]:
    """Heat the GPU until its rate falls no more, two seconds at least and most_s at most; the rates of the bursts."""
    rates: list[float] = []
    began = gpu.clock()
    while not _is_steady(rates) and gpu.clock() - began < most_s:
        rates.append(gpu.burst(BURST_S))
    return rates


def _is_steady(rates: Sequence[float]) -> bool:
    """Over the last second the rate fell by less than half a per cent of what it was in the second before."""
    return len(rates) >= 8 and statistics.fmean(rates[-4:]) >= 0.995 * statistics.fmean(rates[-8:-4])


def _shuffled(names: Sequence[str], turn: int) -> list[str]:
    """The order of a round, the same in every run. In a mere rotation a call would always follow the same other one, and a GPU at its
    power limit clocks higher after a light kernel: between 30 ms of FlashAttention-2 and 30 ms of FlashAttention-4 as the neighbour
    lay 5 to 11 % (H200, d 128 and 256, N 8192 and 16384, 2026-11-30)."""
    return random.Random(turn).sample(names, len(names))


def _times(samples: Sequence[float], factor: float = 1.0, *, dropped: bool = False) -> Times:
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else (samples[0],) * 3
    median_us, spread_us = factor * statistics.median(samples), factor * (high - low) / 2
    return Times(times_us=tuple(samples), median_us=median_us, spread_us=spread_us, dropped=dropped)
