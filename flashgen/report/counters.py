"""Predicted against counted, as rich tables."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from flashgen.counters import Comparison, Medians
from flashgen.record import FunctionCounters
from flashgen.report.summary import label
from flashgen.report.units import quantity, times

TOP_STALLS = 3
UNKNOWN = "–"
LEGEND = {
    "cold": "Caches were emptied before each function (cold), so a function also reads from DRAM what the one before it left in L2.",
    "warm": "Caches were as the profiler's pass before left them (warm).",
}
WRITES = "What was written and still lay in L2 at the end is not among the bytes of DRAM. Ratios are predicted / counted."


def show(comparisons: Sequence[Comparison], medians: Medians, console: Console) -> None:
    """Prints traffic and time, utilisation, and the medians of several; of a single kernel with several functions each of them."""
    if not comparisons:
        return
    shared, own = _told_apart([str(row.record.problem) for row in comparisons])
    console.print(f"[bold]{shared}[/] on [bold]{comparisons[0].record.device.name}[/]", highlight=False)
    console.print(traffic(comparisons, own))
    console.print()
    console.print(utilisation(comparisons))
    if len(comparisons) == 1 and len(comparisons[0].counters.functions) > 1:
        console.print()
        console.print(functions(comparisons[0]))
    console.print()
    for line in lines(comparisons, medians):
        console.print(line, highlight=False, markup=False)


def traffic(comparisons: Sequence[Comparison], names: Sequence[str]) -> Table:
    """Bytes and time; names are what tells the problems apart."""
    table = _table("#", "problem", "kernel")
    for name in ("DRAM predicted", "read", "written", "ratio", "of compulsory", "of the paper's"):
        table.add_column(name, justify="right")
    for name in ("L2 ratio", "time predicted", "counted", "ratio"):
        table.add_column(name, justify="right")
    for number, (row, name) in enumerate(zip(comparisons, names), start=1):
        counters = row.counters
        table.add_row(
            str(number),
            name,
            "" if row.record.candidate is None else label(row.record.candidate),
            quantity(row.estimate.dram_bytes, "B"),
            _quantity(counters.total("dram_read_bytes"), "B"),
            _quantity(counters.total("dram_write_bytes"), "B"),
            _times(row.dram_ratio),
            _times(row.compulsory_ratio),
            _times(row.paper_ratio),
            _times(row.l2_ratio),
            quantity(row.estimate.time_s, "s"),
            _quantity(_seconds(counters.time_us), "s"),
            _times(row.time_ratio),
        )
    return table


def utilisation(comparisons: Sequence[Comparison]) -> Table:
    """Shares of the units' peaks over the time of all functions, and the model's limit; stalls are those of the longest function."""
    table = _table("#", "model's limit")
    _add_shares(table)
    for number, row in enumerate(comparisons, start=1):
        longest = max(row.counters.functions, key=lambda function: function.time_us or 0.0)
        figures = [_percent(row.counters.mean(name)) for name in SHARES]
        clock = _quantity(_hertz(row.counters.mean("sm_clock_mhz")), "Hz")
        table.add_row(str(number), row.estimate.bound, *figures, clock, _stalls(longest))
    return table


def functions(comparison: Comparison) -> Table:
    """Each function of a kernel."""
    table = _table("function")
    for name in ("time", "DRAM read", "written", "L2 read", "written"):
        table.add_column(name, justify="right")
    _add_shares(table)
    for each in comparison.counters.functions:
        traffic = [each.dram_read_bytes, each.dram_write_bytes, each.l2_read_bytes, each.l2_write_bytes]
        table.add_row(
            each.name,
            _quantity(_seconds(each.time_us), "s"),
            *(_quantity(value, "B") for value in traffic),
            *(_percent(getattr(each, name)) for name in SHARES),
            _quantity(_hertz(each.sm_clock_mhz), "Hz"),
            _stalls(each),
        )
    return table


def lines(comparisons: Sequence[Comparison], medians: Medians) -> list[str]:
    """What the tables cannot say: medians, how it was counted, and what was not."""
    said = []
    if medians.rows > 1:
        said.append(
            f"Medians of |predicted / counted - 1| over {medians.rows} kernels: DRAM {_percent(medians.dram_error)}, "
            f"time {_percent(medians.time_error)}, L2 {_percent(medians.l2_error)}. DRAM moved {_times(medians.compulsory_ratio)} of "
            f"what every kernel must, and {_times(medians.paper_ratio)} of the paper's traffic, which grows with N^2 d^2 / M."
        )
    said += [f"{LEGEND[cache]} {WRITES}" for cache in dict.fromkeys(row.counters.cache for row in comparisons)]
    if missing := dict.fromkeys(name for row in comparisons for name in row.counters.missing):
        said.append(f"Not given by this ncu: {', '.join(missing)}.")
    return said


SHARES = {
    "tensor_share": "tensor",
    "exp_share": "exp",
    "issue_share": "issue",
    "smem_share": "smem",
    "bank_read_share": "bank reads",
    "occupancy": "occupancy",
}


def _add_shares(table: Table) -> None:
    for name in (*SHARES.values(), "SM clock"):
        table.add_column(name, justify="right")
    table.add_column("most stalls")


def _told_apart(texts: Sequence[str]) -> tuple[str, list[str]]:
    """The words, between commas, that all texts share, and for each text the others."""
    words = [text.split(", ") for text in texts]
    shared = [word for word in words[0] if all(word in other for other in words)]
    return ", ".join(shared), [", ".join(word for word in own if word not in shared) for own in words]


def _stalls(function: FunctionCounters) -> str:
    """The reasons that hold up most warps; `selected` is none."""
    stalls = [(count, reason) for reason, count in (function.stalls or {}).items() if reason != "selected" and count > 0]
    return ", ".join(f"{reason.replace('_', ' ')} {count:.1f}" for count, reason in sorted(stalls, reverse=True)[:TOP_STALLS])


def _seconds(us: float | None) -> float | None:
    return None if us is None else us * 1e-6


def _hertz(mhz: float | None) -> float | None:
    return None if mhz is None else mhz * 1e6


def _quantity(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else quantity(value, unit)


def _times(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else times(ratio)


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
