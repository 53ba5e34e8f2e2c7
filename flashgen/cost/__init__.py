"""Candidate -> Estimate: what a kernel does to every unit of the device, and how long that may take.

The model follows one program through its blocks of keys. For one block every unit of an SM has a number of cycles: tensor cores,
exponentials, instruction issue, shared memory, and the SM's share of L2. A program waits for its first product before its softmax,
and for its tiles where no pipeline fetches them in time, so alone it needs the sum of all that. Several programs on an SM fill each
other's waits, and only meet where two want the same unit at the same time, until the busiest unit is the limit. Blocks add up to
tiles, tiles to waves with an uneven end, and DRAM runs beside all of it. Only the constants in `Calibration` are fitted; everything
else is counted. See Estimate for what the results may be used for.
"""

from flashgen import theory
from flashgen.candidate import Candidate
from flashgen.cost.backward import works as _backward
from flashgen.cost.calibration import CALIBRATION, Calibration
from flashgen.cost.forward import works as _forward
from flashgen.cost.work import Work
from flashgen.device import Device
from flashgen.problem import Problem
from flashgen.record import Estimate, Resources
from flashgen.resources import guess, resident

__all__ = ["CALIBRATION", "Calibration", "Work", "estimate", "works"]


def estimate(
    candidate: Candidate,
    problem: Problem,
    device: Device,
    resources: Resources | None = None,
    *,
    calibration: Calibration = CALIBRATION,
) -> Estimate:
    """What one call of this kernel does and takes. resources, where the kernel was compiled, replace guessed registers and memory.

    The candidate need not be legal, but its tiles must be powers of two, or rows of whole warpgroups in a hopper kernel. About 0.1 ms.
    """
    fitted = calibration
    bound_s = theory.bound_s(problem, device)
    if problem.is_empty:
        return _nothing(bound_s)
    if resources is None:
        resources = guess(candidate, problem, device)
    parts = works(candidate, problem, device, resources, calibration=fitted)
    longest = max(parts, key=lambda work: work.time_s(fitted))
    time_s = max(bound_s, sum(work.time_s(fitted) for work in parts))
    seconds = {unit: sum(work.seconds.get(unit, 0.0) for work in parts) for unit in longest.seconds}
    busiest = max(seconds, key=lambda unit: seconds[unit])
    return Estimate(
        flops=sum(work.flops for work in parts),
        dram_bytes=sum(work.dram_bytes for work in parts),
        l2_bytes=sum(work.l2_bytes for work in parts),
        smem_bytes=sum(work.smem_bytes for work in parts),
        exp_ops=sum(work.exp_ops for work in parts),
        tensor_s=seconds.get("tensor", 0.0),
        exp_s=seconds.get("exp", 0.0),
        smem_s=seconds.get("smem", 0.0),
        l2_s=seconds.get("l2", 0.0),
        dram_s=seconds["dram"],
        programs_per_sm=resident(candidate, resources, device),
        waves=longest.waves,
        time_s=time_s,
        bound_s=bound_s,
        bound=busiest if seconds[busiest] > 0.4 * time_s else "latency",
    )


def works(
    candidate: Candidate, problem: Problem, device: Device, resources: Resources | None = None, *, calibration: Calibration = CALIBRATION
) -> list[Work]:
    """What each function of the kernel does, in launch order: what estimate adds up. The problem must not be empty."""
    if resources is None:
        resources = guess(candidate, problem, device)
    return (_forward if problem.direction == "forward" else _backward)(candidate, problem, device, resources, calibration)


def _nothing(bound_s: float) -> Estimate:
    return Estimate(
        flops=0.0,
        dram_bytes=0.0,
        l2_bytes=0.0,
        smem_bytes=0.0,
        exp_ops=0.0,
        tensor_s=0.0,
        exp_s=0.0,
        smem_s=0.0,
        l2_s=0.0,
        dram_s=0.0,
        programs_per_sm=0,
        waves=0.0,
        time_s=bound_s,
        bound_s=bound_s,
        bound="latency",
    )
