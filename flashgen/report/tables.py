"""The report as rich tables."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashgen import space, theory
from flashgen.database.ranking import TIE
from flashgen.record import Record, Resources
from flashgen.report.comparison import Change, Comparison
from flashgen.report.limits import NAMES
from flashgen.report.summary import Summary, describe, peer_name, summarize, time_us
from flashgen.report.units import quantity, tflops, times

NOTHING_MEASURED = "Nothing was measured, and bf16 was not checked: every figure below is predicted by the cost model."
TOP = 8


def terminal(records: Iterable[Record], console: Console, *, warn: bool = True) -> None:
    """Prints one problem in full, or several as an overview with a row each; first, unless warn is False, if nothing was measured."""
    summaries = summarize(records)
    if warn and summaries and all(summary.is_predicted_only for summary in summaries):
        console.print(NOTHING_MEASURED, style="bold yellow")
    if len(summaries) > 1:
        console.print(overview(summaries))
    for summary in summaries if len(summaries) == 1 else ():
        console.print(f"[bold]{summary.problem}[/] on [bold]{summary.device.name}[/]", highlight=False)
        if not summary.is_predicted_only:
            console.print(comparison(summary))
            if summary.why_not_faster:
                console.print(Text.assemble(("Why not faster? ", "bold"), summary.why_not_faster))
        console.print(favourites(summary))
        console.print(tally(summary), highlight=False)
        if summary.excluded:
            console.print(
                "Outside the legal space, never tried: " + ", ".join(f"{count} {name}" for name, count in summary.excluded.items())
            )
        if summary.importances:
            console.print(importances(summary), highlight=False)
        if summary.failures:
            console.print(failures(summary))


def overview(summaries: Sequence[Summary]) -> Table:
    """One row a problem: winner, default and the best peer."""
    table = _table("device", "problem", "winner")
    for name in ("TFLOP/s", "of roofline", "x default", "x best peer"):
        table.add_column(name, justify="right")
    for name in ("best peer", "held by"):
        table.add_column(name)
    for summary in summaries:
        winner, peer = summary.winner, next(iter(summary.peers), None)
        if winner is None:
            favourite = summary.favourite
            text = "" if favourite is None else f"predicted only: {describe(favourite)}"
            table.add_row(summary.device.name, str(summary.problem), text, "", "", "", "", "", "")
            continue
        table.add_row(
            summary.device.name,
            str(summary.problem),
            describe(winner),
            f"{summary.tflops(winner):.0f}",
            f"{summary.roofline_us / time_us(winner):.0%}",
            times(time_us(summary.default) / time_us(winner)) if summary.default else "",
            times(time_us(peer) / time_us(winner)) if peer else "",
            peer_name(peer) if peer else "",
            f"{NAMES[summary.limit.bound]} {summary.limit.share:.0%}" if summary.limit else "",
        )
    return table


def changes(comparison: Comparison) -> Table:
    """Both sides' winners, a row a problem."""
    table = _table("problem")
    for name in (comparison.before, comparison.after, "as fast", "peers"):
        table.add_column(name, justify="right")
    table.add_column("winner", overflow="fold")
    for change in comparison.changes:
        style = "green" if change.speedup > 1 + TIE else "red" if change.speedup < 1 / (1 + TIE) else None
        table.add_row(*(Text(cell) for cell in change_cells(change)), style=style)
    return table


def change_cells(change: Change) -> list[str]:
    """Problem, time before and after, how many times as fast, the same of peers, and what won."""
    before, after = change.winners
    return [
        str(change.after.problem),
        quantity(time_us(before) * 1e-6, "s"),
        quantity(time_us(after) * 1e-6, "s"),
        f"{change.speedup:.3f}x",
        "" if change.peers_speedup is None else f"{change.peers_speedup:.3f}x",
        "the same" if change.is_same_candidate else f"{describe(before)} → {describe(after)}",
    ]


def winners_table(records: Sequence[Record]) -> Table:
    """Stored winners, a row each."""
    table = _table("device", "problem", "candidate")
    for name in ("time", "TFLOP/s", "of roofline"):
        table.add_column(name, justify="right")
    table.add_column("measured")
    for record in records:
        us, bound_us = time_us(record), theory.bound_s(record.problem, record.device) * 1e6
        table.add_row(
            record.device.name,
            str(record.problem),
            describe(record),
            quantity(us * 1e-6, "s"),
            f"{tflops(record.problem.flops, us * 1e-6):.0f}",
            f"{bound_us / us:.0%}",
            f"{record.provenance.utc[:10]} {record.provenance.origin}",
        )
    return table


def comparison(summary: Summary) -> Table:
    """Winner, default, peers and the roofline side by side."""
    table = _table("")
    for name in ("time", "TFLOP/s", "of roofline", "winner is faster by"):
        table.add_column(name, justify="right")
    table.add_column("what")
    for name, record in summary.contenders():
        is_winner = record is summary.winner and name == "winner"
        table.add_row(
            name,
            quantity(time_us(record) * 1e-6, "s"),
            f"{summary.tflops(record):.0f}",
            f"{summary.roofline_us / time_us(record):.0%}",
            times(time_us(record) / time_us(summary.winner)) if summary.winner and not is_winner else "",
            Text(describe(record)),
            style="bold green" if is_winner else None,
        )
    table.add_row("roofline", quantity(summary.roofline_us * 1e-6, "s"), f"{summary.roofline_tflops:.0f}", "100%", "", "", style="dim")
    return table


def favourites(summary: Summary) -> Table:
    """The fastest trials, or where nothing was measured the model's order, with what the compiler said of them."""
    table = _table("candidate")
    for name in ("predicted", "measured", "limited by", "registers", "spills", "smem", "error", "allowed"):
        table.add_column(name, justify="right" if name != "limited by" else "left")
    default = space.default(summary.problem, summary.device)
    rows = sorted(summary.measured, key=time_us)[:TOP] if summary.measured else _by_estimate(summary)[:TOP]
    for record in rows:
        measurement, estimate = record.measurement, record.estimate
        table.add_row(
            describe(record) + " (default)" * (record.candidate == default),
            quantity(estimate.time_s, "s") if estimate else "",
            quantity(measurement.median_us * 1e-6, "s") if measurement.median_us else "[yellow]predicted only[/]",
            estimate.bound if estimate else "",
            *_resources(measurement.resources),
            "" if measurement.error is None else f"{measurement.error:.1e}",
            "" if measurement.tolerance is None else f"{measurement.tolerance:.1e}",
        )
    return table


def failures(summary: Summary) -> Table:
    """Failed trials by reason."""
    table = _table("status", "reason")
    table.add_column("trials", justify="right")
    table.add_column("for example", overflow="fold")
    for failure in summary.failures:
        first = failure.example.strip().splitlines()[:1]
        table.add_row(failure.status.value, failure.reason, str(failure.count), Text(first[0][:200] if first else ""))
    return table


def tally(summary: Summary) -> str:
    """How many trials ended how, and how well the model ranked them."""
    counts: dict[str, int] = {}
    for record in summary.trials:
        counts[record.measurement.status.value] = counts.get(record.measurement.status.value, 0) + 1
    text = f"{len(summary.trials)} trials: " + ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    correlation = summary.rank_correlation
    return text if correlation is None else f"{text}. Rank correlation of predicted and measured: {correlation:.2f} (Spearman)."


def importances(summary: Summary) -> str:
    """How much of the measured times knobs explain, one by one."""
    words = [f"{each.name} {each.share:.0%} (best {each.best})" for each in summary.importances[:TOP]]
    return "Share of the variance of log time that a knob explains alone: " + ", ".join(words) + "."


def _by_estimate(summary: Summary) -> list[Record]:
    """Rows with an estimate, the promising ones first; those that were compiled before those that were not."""
    rows = [(record.estimate.time_s, record) for record in summary.trials if record.estimate is not None]
    return [record for _, record in sorted(rows, key=lambda row: row[0])]


def _resources(resources: Resources | None) -> tuple[str, str, str]:
    if resources is None:
        return "", "", ""
    spills = f"[red]{resources.spill_bytes} B[/]" if resources.spill_bytes else "0"
    return str(resources.registers), spills, f"{resources.smem_bytes / 1024:.0f} KiB"


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
