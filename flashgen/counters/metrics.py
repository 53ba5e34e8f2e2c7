"""Which of Nsight Compute's metrics become which figure of FunctionCounters, and how its answer is read.

Names are those of sm_90 (`ncu --query-metrics --chip gh100`); they differ between chips, so that some figures have a second choice.
Metrics are described in "Metrics Decoder" of NVIDIA's Kernel Profiling Guide.
"""

import csv
from collections.abc import Collection, Iterable, Mapping

from flashgen.record import FunctionCounters

ELAPSED = "avg.pct_of_peak_sustained_elapsed"
CYCLES = "sm__cycles_elapsed.avg"  # of the SMs' clock

FIGURES: dict[str, tuple[str, ...]] = {
    "time_us": ("gpu__time_duration.sum",),
    "dram_read_bytes": ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    "dram_write_bytes": ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    "l2_read_bytes": ("l1tex__m_xbar2l1tex_read_bytes.sum",),
    "l2_write_bytes": ("l1tex__m_l1tex2xbar_write_bytes.sum",),
    "l2_slice_bytes": ("lts__t_bytes.sum",),
    # wgmma counts as hmma. Its instructions are few and long, so that cycles say how busy the cores are, and instructions do not.
    "tensor_share": (f"sm__pipe_tensor_op_hmma_cycles_active.{ELAPSED}", f"sm__pipe_tensor_cycles_active.{ELAPSED}"),
    "exp_share": (f"sm__inst_executed_pipe_xu.{ELAPSED}",),
    "smem_share": (f"l1tex__data_pipe_lsu_wavefronts_mem_shared.{ELAPSED}", f"l1tex__data_pipe_lsu_wavefronts.{ELAPSED}"),
    "bank_read_share": (f"l1tex__data_bank_reads.{ELAPSED}",),
    "bank_write_share": (f"l1tex__data_bank_writes.{ELAPSED}",),
    "issue_share": (f"smsp__issue_active.{ELAPSED}", f"sm__inst_issued.{ELAPSED}"),
    "occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
}
REASONS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "gmma",  # for products of warpgroups; sm_90 only
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "misc",
    "no_instruction",
    "not_selected",
    "selected",  # issued, so no stall: 1 by definition
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
)
STALLS = {reason: f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio" for reason in REASONS}

# What one of a unit is in seconds, bytes or 1. `--print-units base` asks for the first of each kind; other releases spell it otherwise.
UNITS = {
    **{"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3, "s": 1.0, "second": 1.0},
    **{"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12},
    "%": 0.01,
}

Launch = tuple[str, Mapping[str, float | None]]  # a function's name, and its metrics


def wanted(unknown: Collection[str] = ()) -> list[str]:
    """The metrics to ask for: of each figure the first choice that is not unknown."""
    chosen = [next((name for name in names if name not in unknown), None) for names in (*FIGURES.values(), (CYCLES,))]
    return [name for name in (*chosen, *STALLS.values()) if name is not None and name not in unknown]


def parsed(text: str) -> list[Launch]:
    """Each launch of what ncu printed with `--csv --page raw`, in seconds, bytes and shares.

    That is a line of names, a line of units, and a line for each launch; lines that do not begin with a quotation mark are ncu's messages.
    """
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    start = next((place for place, row in enumerate(rows) if "Kernel Name" in row), len(rows))
    launches: list[Launch] = []
    units: dict[str, str] = {}
    for row in rows[start + 1 :]:
        fields = dict(zip(rows[start], row))
        if not fields["Kernel Name"]:
            units = fields
            continue
        figures = {name: _number(value, units.get(name, "")) for name, value in fields.items() if "__" in name}
        launches.append((fields["Kernel Name"], figures))
    return launches


def functions(launches: Iterable[Launch]) -> tuple[FunctionCounters, ...]:
    """The figures of launches."""
    return tuple(_function(name, metrics) for name, metrics in launches)


def missing(asked: Iterable[str], launches: Iterable[Launch]) -> tuple[str, ...]:
    """Metrics without which a launch came back."""
    given = list(launches)
    return tuple(name for name in asked if any(metrics.get(name) is None for _, metrics in given))


def _function(name: str, metrics: Mapping[str, float | None]) -> FunctionCounters:
    figures: dict[str, float | None] = {
        figure: next((value for choice in choices if (value := metrics.get(choice)) is not None), None)
        for figure, choices in FIGURES.items()
    }
    seconds, cycles = figures["time_us"], metrics.get(CYCLES)
    figures["time_us"] = None if seconds is None else seconds * 1e6
    clock = None if seconds is None or cycles is None or seconds <= 0 else cycles / seconds * 1e-6
    stalls = {reason: value for reason, metric in STALLS.items() if (value := metrics.get(metric)) is not None}
    return FunctionCounters(name=name, sm_clock_mhz=clock, stalls=stalls or None, **figures)


def _number(text: str, unit: str) -> float | None:
    """Its value in seconds, bytes or 1; None where it is not a number, such as n/a."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value * UNITS.get(unit.strip().lower(), 1.0) if abs(value) < float("inf") else None
