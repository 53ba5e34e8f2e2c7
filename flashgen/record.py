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
    """How the trial of a candidate ended. Only OK rows have times, and only they can win."""

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
class Measurement:
    """What was seen. median_us is corrected for drift by the incumbent that ran between its rounds; times_us are raw.

    error and tolerance are the largest absolute difference from the float64 oracle and what was allowed. message says why, where
    status is not OK.
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

    def __post_init__(self) -> None:
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
