"""Predicted against counted, and the paper's traffic against what DRAM moved."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashgen import theory
from flashgen.device import Device
from flashgen.errors import ArgumentError
from flashgen.problem import Problem
from flashgen.record import Counters, Estimate, Record


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A counted record beside its estimate. Ratios are predicted / counted; None where one side is not known."""

    record: Record
    estimate: Estimate
    counters: Counters

    @property
    def dram_ratio(self) -> float | None:
        return _ratio(self.estimate.dram_bytes, self.counters.dram_bytes)

    @property
    def l2_ratio(self) -> float | None:
        return _ratio(self.estimate.l2_bytes, self.counters.l2_bytes)

    @property
    def time_ratio(self) -> float | None:
        """The counted time is that of a kernel between the profiler's passes, at whatever clock the GPU had."""
        return _ratio(self.estimate.time_s * 1e6, self.counters.time_us)

    @property
    def compulsory_ratio(self) -> float | None:
        """Counted DRAM bytes / what every kernel must read or write once."""
        return _ratio(self.counters.dram_bytes, theory.compulsory_bytes(self.record.problem))

    @property
    def paper_ratio(self) -> float | None:
        """Counted DRAM bytes / the paper's."""
        return _ratio(self.counters.dram_bytes, paper_bytes(self.record.problem, self.record.device))


@dataclass(frozen=True, kw_only=True)
class Medians:
    """Over several comparisons, each where it is known. Errors are |predicted / counted - 1|."""

    rows: int
    dram_error: float | None
    l2_error: float | None
    time_error: float | None
    compulsory_ratio: float | None
    paper_ratio: float | None


def compare(record: Record) -> Comparison:
    """Raises ArgumentError for a record that is not counted, or has no estimate."""
    counters = record.measurement.counters
    if counters is None or record.estimate is None:
        raise ArgumentError(f"status is {record.measurement.status.value}; it must be counted, with an estimate")
    return Comparison(record=record, estimate=record.estimate, counters=counters)


def medians(comparisons: Iterable[Comparison]) -> Medians:
    """Of errors and ratios."""
    rows = list(comparisons)
    return Medians(
        rows=len(rows),
        dram_error=_median([_error(row.dram_ratio) for row in rows]),
        l2_error=_median([_error(row.l2_ratio) for row in rows]),
        time_error=_median([_error(row.time_ratio) for row in rows]),
        compulsory_ratio=_median([row.compulsory_ratio for row in rows]),
        paper_ratio=_median([row.paper_ratio for row in rows]),
    )


def paper_bytes(problem: Problem, device: Device) -> float | None:
    """Bytes that FlashAttention moves between DRAM and the chip by the model of `theory`, over all heads, with one SM's shared memory as M.

    Its second term, of order N^2 d^2 / M, counts for the part of all pairs that the mask leaves: Proposition 4 of the paper, on sparse
    masks. None where the model has no such form: the sides' lengths, head dims or heads differ.
    """
    if (problem.seqlen_q, problem.head_dim_qk, problem.heads_q) != (problem.seqlen_kv, problem.head_dim_v, problem.heads_kv):
        return None
    if problem.seqlen_q == 0:
        return 0.0
    seqlen, head_dim, direction = problem.seqlen_q, problem.head_dim_qk, problem.direction
    once = theory.flash_elements(seqlen, head_dim, math.inf, direction)
    whole = theory.flash_elements(seqlen, head_dim, device.smem_per_sm_bytes / problem.itemsize, direction)
    elements = once + (whole - once) * problem.visible_pairs / seqlen**2
    return problem.batch * problem.heads_q * problem.itemsize * elements


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _error(ratio: float | None) -> float | None:
    return None if ratio is None else abs(ratio - 1)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
