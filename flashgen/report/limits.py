"""Why not faster? What holds a kernel back, by the cost model, and the nearest candidate that it would not hold back.

Every limit is a part of the time that one call takes: that in which a unit is busy (tensor, exp, issue, smem, l2, dram), that in which
SMs have run out of programs while others still work (waves), and that of starting and ending kernels (launch). The longest one is the
bound. Where all are below LEAST of the time, kernels wait for what comes one after the other, and the bound is called latency.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flashgen import cost, space
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.problem import Problem
from flashgen.record import Record, Resources

UNITS = {
    "tensor": "tensor cores",
    "exp": "exponential unit",
    "issue": "instruction issue",
    "smem": "shared memory",
    "l2": "L2",
    "dram": "DRAM",
}
NAMES = UNITS | {"waves": "waves", "launch": "launch", "latency": "latency"}
AT_SM_CLOCK = ("tensor", "exp", "issue", "smem")  # the other units have clocks of their own
LEAST = 0.4  # of the time, as in Estimate.bound


@dataclass(frozen=True, kw_only=True)
class Account:
    """Where the time of one call goes, by the model: seconds of each limit, which overlap, so that their sum says nothing. time_s may be
    one that was measured. waves are those of the longest kernel; kernels: how many are launched."""

    time_s: float
    seconds: Mapping[str, float]
    waves: float
    kernels: int

    @property
    def bound(self) -> str:
        """The limit that takes longest, else latency."""
        longest = max(self.seconds, key=lambda name: self.seconds[name])
        return longest if self.seconds[longest] > LEAST * self.time_s else "latency"

    def lost_s(self, bound: str) -> float:
        """Seconds of a limit; of latency those in which the busiest unit has nothing to do."""
        return self.time_s - max(self.seconds[unit] for unit in UNITS) if bound == "latency" else self.seconds[bound]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What holds a kernel back.

    bound   tensor, exp, issue, smem, l2, dram, waves, launch or latency.
    share   of the time that was measured, or where nothing was of the model's: how long the unit is busy, how long SMs lack programs,
            how long launches take; of latency, how long the busiest unit is busy.
    shares  the same of every limit.
    waves   programs, relative to those that run at one time; kernels: how many are launched.
    """

    bound: str
    share: float
    shares: Mapping[str, float]
    waves: float
    kernels: int

    def __str__(self) -> str:
        part = f"{self.share:.0%}"
        if self.bound == "waves":
            return f"waves: {self.waves:.2f} waves of programs leave SMs without work for {part} of the time"
        if self.bound == "launch":
            kernels = "1 kernel starts and ends" if self.kernels == 1 else f"{self.kernels} kernels start and end"
            return f"launch: {kernels} for {part} of the time"
        if self.bound == "latency":
            busiest = max(UNITS, key=lambda unit: self.shares[unit])
            return f"latency: no unit is busy for more than {part} of the time ({UNITS[busiest]}); the rest is waiting"
        second = max((unit for unit in UNITS if unit != self.bound), key=lambda unit: self.shares[unit])
        return f"{NAMES[self.bound]}: busy for {part} of the time; next {UNITS[second]}, {self.shares[second]:.0%}"


@dataclass(frozen=True, kw_only=True)
class Lift:
    """The nearest candidate that a bound would not hold: the model gives it another bound, and less time at this one.

    distance   space.distance from the winner.
    slowdown   the model's time of it, relative to the winner's.
    measured   its row, if it was measured, too.
    """

    candidate: Candidate
    bound: str
    distance: float
    slowdown: float
    measured: Record | None


def account(candidate: Candidate, problem: Problem, device: Device, resources: Resources | None, sm_clock_mhz: float | None) -> Account:
    """The account of one call, at the clock that SMs were seen to run at, else at the one that the model assumes under load."""
    fitted = cost.CALIBRATION
    slower = device.boost_hz * fitted.clock / (sm_clock_mhz * 1e6) if sm_clock_mhz else 1.0
    works = cost.works(candidate, problem, device, resources)
    seconds = {unit: sum(work.seconds.get(unit, 0.0) for work in works) * (slower if unit in AT_SM_CLOCK else 1.0) for unit in UNITS}
    seconds["launch"] = len(works) * fitted.launch_s
    time_s, seconds["waves"] = seconds["launch"], 0.0
    for work in works:
        taken = max(work.compute_s * slower, work.seconds["dram"])
        time_s += taken
        seconds["waves"] += taken - max(work.compute_s * slower / work.uneven, work.seconds["dram"])
    waves = max(works, key=lambda work: work.compute_s).waves
    return Account(time_s=time_s, seconds=seconds, waves=waves, kernels=len(works))


def limit_of(record: Record) -> Limit | None:
    """What holds a candidate's row back; None where there is nothing to compute."""
    if record.candidate is None or record.problem.is_empty or not record.problem.flops:
        return None
    measurement = record.measurement
    of = account(record.candidate, record.problem, record.device, measurement.resources, measurement.sm_clock_mhz)
    time_s = of.time_s if measurement.median_us is None else measurement.median_us * 1e-6
    shares = {name: min(1.0, taken / time_s) for name, taken in of.seconds.items()}
    bound = replace(of, time_s=time_s).bound
    share = max(shares[unit] for unit in UNITS) if bound == "latency" else shares[bound]
    return Limit(bound=bound, share=share, shares=shares, waves=of.waves, kernels=of.kernels)


def counted_shares(record: Record) -> dict[str, float]:
    """Of a counted row, the shares that the device counted, where counters and model speak of the same: not of shared memory, which
    warpgroup products read past the counted pipe, nor of waves and launches."""
    counters = record.measurement.counters
    if counters is None:
        return {}
    found = {unit: counters.mean(f"{unit}_share") for unit in ("tensor", "exp", "issue")}
    if counters.dram_bytes is not None and counters.time_us:
        found["dram"] = counters.dram_bytes / record.device.dram_bytes_per_s / (counters.time_us * 1e-6)
    return {unit: share for unit, share in found.items() if share is not None}


def lift_of(record: Record, rows: Mapping[Candidate, Record]) -> Lift | None:
    """The nearest legal candidate that would lift a row's bound, given the rows of other candidates; None where the model knows of none.

    Tries every legal candidate if need be: 0.2 s at most.
    """
    limit = limit_of(record)
    if limit is None or record.candidate is None:
        return None
    problem, device, here, clock = record.problem, record.device, record.candidate, record.measurement.sm_clock_mhz
    own = account(here, problem, device, record.measurement.resources, clock)
    for other in sorted(space.candidates(problem, device), key=lambda each: space.distance(here, each)):
        row = rows.get(other)
        its = account(other, problem, device, row.measurement.resources if row else None, clock)
        if its.bound != limit.bound and its.lost_s(limit.bound) < 0.99 * own.lost_s(limit.bound):
            return Lift(
                candidate=other,
                bound=its.bound,
                distance=space.distance(here, other),
                slowdown=its.time_s / own.time_s,
                measured=row if row is not None and row.is_winner_material else None,
            )
    return None
