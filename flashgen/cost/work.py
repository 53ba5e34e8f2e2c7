"""Work: what one function of a kernel does to the device, and what all functions have in common."""

from dataclasses import dataclass

from flashgen.candidate import Candidate
from flashgen.cost.calibration import Calibration
from flashgen.device import Device
from flashgen.record import Resources
from flashgen.resources import costly_spill


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of one launch.

    seconds    by unit, if each of them worked alone: tensor, exp, issue, smem, l2, dram.
    compute_s  of everything but DRAM, with its waits and the uneven end of the grid.
    uneven     how many times as long compute_s is as it would be without an uneven end.
    waves      programs, relative to those that run at one time.
    """

    flops: float = 0.0
    exp_ops: float = 0.0
    smem_bytes: float = 0.0
    l2_bytes: float
    dram_bytes: float
    seconds: dict[str, float]
    compute_s: float = 0.0
    uneven: float = 1.0
    waves: float = 0.0

    def time_s(self, fitted: Calibration) -> float:
        """DRAM runs beside the rest."""
        return max(self.compute_s, self.seconds["dram"]) + fitted.launch_s


def hz(device: Device, fitted: Calibration) -> float:
    """The clock of a device under load."""
    return device.boost_hz * fitted.clock


def dram_s(moved_bytes: float, device: Device, fitted: Calibration) -> float:
    return moved_bytes / (device.dram_bytes_per_s * fitted.dram_rate)


def l2_bytes_per_cycle(device: Device, fitted: Calibration) -> float:
    """Of one SM."""
    return device.l2_bytes_per_s * fitted.l2_rate / device.num_sms / hz(device, fitted)


def flops_per_cycle(dtype: str, device: Device, warpgroups: bool, fitted: Calibration) -> float:
    """Of one SM, in a portable kernel."""
    if dtype == "float32":
        rate = fitted.fma_rate
    elif not warpgroups and 90 <= device.capability < 120:
        rate = fitted.mma_sync_rate * fitted.tensor_rate
    else:
        rate = fitted.tensor_rate
    return device.flops_per_s(dtype) / device.num_sms / device.boost_hz * rate


def missed(working_bytes: float, device: Device, fitted: Calibration) -> float:
    """Part of what is read again that L2 no longer holds."""
    return max(0.0, working_bytes - device.l2_bytes * fitted.l2_share) / working_bytes if working_bytes else 0.0


def spill_wait(candidate: Candidate, resources: Resources, fitted: Calibration) -> float:
    """Cycles of a block."""
    spilled = costly_spill(candidate, resources.spill_bytes)
    return fitted.spill_latency * spilled + (fitted.spill_wait if spilled else 0.0)


def cycles_of_block(fitted: Calibration, units: dict[str, float], wait: float, programs: int, num_warps: int) -> float:
    """Cycles of an SM for one block of one of so many programs of a portable kernel.

    A program alone has its products, then its softmax (exponentials and instructions depend on each other), then its waits. With n
    of them a block takes the nth part; but a program finds a unit busy as often as each of the others uses it, and then waits as
    long again (mean value analysis for small queues). No block is faster than the busiest unit.
    """
    quarters = 4 / min(4, num_warps)  # parts of the SM that the warps leave idle, for other programs to run in side by side
    side_by_side = min(programs, quarters)
    used = [units["tensor"] * quarters, (units["exp"] + units["issue"]) * quarters]
    alone = sum(used) + wait
    together = programs / side_by_side * (1 + fitted.overlap_warps * max(0.0, num_warps / 4 - 1))
    met = sum(cycles * cycles for cycles in used) / alone
    return max(*units.values(), (alone + (together - 1) * met) / together / side_by_side)


def contended(tensor: float, smem: float, power: float) -> float:
    """Cycles of products of a hopper kernel whose operands lie in shared memory: the larger, and more where both are much the same."""
    return float((tensor**power + smem**power) ** (1 / power))
