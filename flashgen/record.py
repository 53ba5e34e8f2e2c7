"""Record: what was predicted and what was seen of one kernel on one problem and device."""

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flashgen import canonical
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.errors import ArgumentError
from flashgen.problem import Problem


class Status(enum.Enum):
    """How the trial of a candidate ended. Only OK rows have times, and only they can win; COUNTED rows are no trials."""

    OK = "ok"
    PREDICTED = "predicted"  # estimated and perhaps compiled, never run on the device
    SKIPPED = "skipped"  # its bound could not beat the incumbent
    INVALID = "invalid"  # outside the legal space
    COMPILE_ERROR = "compile_error"
    OUT_OF_RESOURCES = "out_of_resources"
    LAUNCH_ERROR = "launch_error"
    WRONG_RESULT = "wrong_result"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    COUNTED = "counted"  # run under a profiler, which counts what the device did and disturbs how long it took


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the cost model says of a candidate: work and traffic of one call, and the seconds each unit needs for it.

    flops include wasted parts of tiles; exp_ops count results of the exponential unit. time_s ranks candidates and may be
    calibrated; bound_s (compulsory work at the highest clocks) is never above the truth, and alone may skip a candidate. bound
    names what limits time_s: tensor, exp, issue, smem, l2, dram or latency.
    """

    flops: float
    dram_bytes: float
    l2_bytes: float
    smem_bytes: float
    exp_ops: float
    tensor_s: float
    exp_s: float
    smem_s: float
    l2_s: float
    dram_s: float
    programs_per_sm: int
    waves: float
    time_s: float
    bound_s: float
    bound: str


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What the compiler says of a kernel. Instructions are counts of SASS mnemonics (HGMMA, MUFU ...)."""

    registers: int
    spill_bytes: int
    smem_bytes: int
    binary_sha256: str
    instructions: Mapping[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class FunctionCounters:
    """What the device counted in one launch of one function of a kernel; None is what the profiler did not say.

    time_us         at sm_clock_mhz, the mean clock of the SMs meanwhile.
    l2_*_bytes      what SMs read from L2 and wrote to it, which compares with Estimate.l2_bytes; slice: all that the slices of L2 served,
                    traffic among themselves and with DRAM too.
    *_share         of a unit's peak over the whole time, 0 to 1: tensor cores; the exponential unit (XU, which also converts numbers); the
                    pipe of loads from shared memory and stores to it; reads and writes of its banks; slots of the schedulers.
    occupancy       resident warps, relative to as many as an SM can hold.
    stalls          by reason: how many warps of a scheduler were held up by it, in the mean, each time that it issued an instruction.
    """

    name: str
    time_us: float | None = None
    sm_clock_mhz: float | None = None
    dram_read_bytes: float | None = None
    dram_write_bytes: float | None = None
    l2_read_bytes: float | None = None
    l2_write_bytes: float | None = None
    l2_slice_bytes: float | None = None
    tensor_share: float | None = None
    exp_share: float | None = None
    smem_share: float | None = None
    bank_read_share: float | None = None
    bank_write_share: float | None = None
    issue_share: float | None = None
    occupancy: float | None = None
    stalls: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What the device counted in one call of a kernel, function by function, under Nsight Compute.

    cache     cold: emptied before each function, and before each pass in which it was repeated. So a forward kernel finds caches as in
              bench, or in a model whose layers are larger than L2; but a function of a backward kernel also reads from DRAM what the
              one before it left in L2. warm: as the pass before left them. In both, what was written and still lies in L2 at the end
              never got to DRAM.
    profiler  its version.
    missing   metrics that it was asked for and did not give.
    """

    functions: tuple[FunctionCounters, ...]
    cache: str = "cold"
    profiler: str = ""
    missing: tuple[str, ...] = ()

    def total(self, *names: str) -> float | None:
        """The sum of these figures over all functions; None if one of them was not counted."""
        figures = [getattr(function, name) for function in self.functions for name in names]
        return None if None in figures else float(sum(figures))

    def mean(self, name: str) -> float | None:
        """The mean of this figure over the functions, weighted by their times; None if something for it was not counted."""
        pairs = [(getattr(function, name), function.time_us) for function in self.functions]
        if any(None in pair for pair in pairs) or not self.time_us:
            return None
        return float(sum(figure * time for figure, time in pairs) / self.time_us)

    @property
    def time_us(self) -> float | None:
        """Of all functions, without what passes between them."""
        return self.total("time_us")

    @property
    def dram_bytes(self) -> float | None:
        """Read from DRAM and written to it."""
        return self.total("dram_read_bytes", "dram_write_bytes")

    @property
    def l2_bytes(self) -> float | None:
        """Between SMs and L2."""
        return self.total("l2_read_bytes", "l2_write_bytes")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was seen. median_us is corrected for drift by the incumbent that ran between its rounds; times_us are raw.

    error and tolerance are the largest absolute difference from the float64 oracle and what was allowed. message says why, where
    status is not OK. counters belong to COUNTED rows.
    """

    status: Status
    times_us: tuple[float, ...] = ()
    median_us: float | None = None
    spread_us: float | None = None  # half the distance between the quartiles
    error: float | None = None
    tolerance: float | None = None
    resources: Resources | None = None
    message: str = ""
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    counters: Counters | None = None

    def __post_init__(self) -> None:
        if (self.status is Status.COUNTED) != (self.counters is not None):
            raise ArgumentError(f"status is {self.status.value} and counters are {self.counters}; exactly counted rows have counters")
        if (self.status is Status.OK) != (self.median_us is not None and self.median_us > 0):
            raise ArgumentError(f"median_us is {self.median_us!r} with status {self.status.value}; exactly ok rows have a time above 0")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """An implementation that is not flashgen's: cudnn, flash, efficient, math (SDPA's backends), flex, fa4."""

    name: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where and when. Versions are empty strings where there was none, gpu too if nothing ran on one."""

    flashgen: str
    torch: str
    triton: str
    cuda: str
    driver: str
    gpu: str
    utc: str  # ISO 8601, seconds
    origin: str = "local"  # or shipped (with flashgen), imported (from a file); says how the row came here, and is no part of its key


@dataclass(frozen=True, kw_only=True)
class Record:
    """One row of the database: a candidate or a peer, on a problem and a device."""

    problem: Problem
    device: Device
    measurement: Measurement
    provenance: Provenance
    candidate: Candidate | None = None
    peer: Peer | None = None
    estimate: Estimate | None = None
    source_sha256: str = ""  # of the generated source without comments

    def __post_init__(self) -> None:
        if (self.candidate is None) == (self.peer is None):
            raise ArgumentError("a record needs a candidate or a peer, and not both")

    @cached_property
    def key(self) -> str:
        """sha256 of everything but the origin: one and the same row wherever it is merged from."""
        data = canonical.to_dict(self)
        data["provenance"].pop("origin", None)
        return hashlib.sha256(canonical.dict_to_text(data).encode()).hexdigest()

    @property
    def is_winner_material(self) -> bool:
        """Measured, right, and of a candidate."""
        return self.candidate is not None and self.measurement.status is Status.OK

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Record":
        """The record whose stored form is data. Raises ArgumentError."""
        return canonical.from_dict(cls, data)
