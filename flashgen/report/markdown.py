"""The report as Markdown, for pull requests."""

from collections.abc import Iterable, Sequence

from flashgen.record import Record
from flashgen.report.commands import commands
from flashgen.report.comparison import Comparison
from flashgen.report.data import provenance
from flashgen.report.limits import NAMES
from flashgen.report.summary import Summary, describe, peer_name, summarize, time_us
from flashgen.report.tables import NOTHING_MEASURED, change_cells, importances, tally
from flashgen.report.units import quantity, times

MOST_DETAILS = 16  # problems; comments of a pull request end at 65 536 characters


def markdown(records: Iterable[Record], comparison: Comparison | None = None) -> str:
    """The comparison if there is one, all problems as a table, and each of up to MOST_DETAILS problems in a fold."""
    summaries = summarize(records)
    parts = ["# flashgen report", ", ".join(f"{name} {value}" for name, value in provenance(summaries).items())]
    if all(summary.is_predicted_only for summary in summaries):
        parts.append(f"**{NOTHING_MEASURED}**" if summaries else "There are no rows yet.")
    if comparison is not None:
        parts += ["## Comparison", str(comparison), _changes(comparison)]
    if summaries:
        parts += ["## Problems", _overview(summaries)]
    if len(summaries) <= MOST_DETAILS:
        parts += [_details(summary) for summary in summaries]
    return "\n\n".join(part for part in parts if part) + "\n"


def _overview(summaries: Sequence[Summary]) -> str:
    rows = []
    for summary in summaries:
        winner, peer = summary.winner, next(iter(summary.peers), None)
        if winner is None:
            favourite = "" if summary.favourite is None else f"predicted only: {describe(summary.favourite)}"
            rows.append([str(summary.problem), summary.device.name, favourite, "", "", "", "", "", ""])
            continue
        limit = summary.limit
        rows.append(
            [
                str(summary.problem),
                summary.device.name,
                describe(winner),
                quantity(time_us(winner) * 1e-6, "s"),
                f"{summary.tflops(winner):.0f}",
                f"{summary.roofline_us / time_us(winner):.0%}",
                times(time_us(summary.default) / time_us(winner)) if summary.default else "",
                f"{times(time_us(peer) / time_us(winner))} {peer_name(peer)}" if peer else "",
                "" if limit is None else f"{NAMES[limit.bound]} {limit.share:.0%}",
            ]
        )
    heads = ["problem", "device", "winner", "time", "TFLOP/s", "of roofline", "over default", "over best peer", "held by"]
    return _table(heads, rows, left=3)


def _changes(comparison: Comparison) -> str:
    if not comparison.changes:
        return ""
    heads = ["problem", comparison.before, comparison.after, "as fast", "peers", "winner"]
    return _table(heads, [change_cells(change) for change in comparison.changes], left=1, right_text=True)


def _details(summary: Summary) -> str:
    parts = [f"<details><summary>{_escaped(str(summary.problem))}, {_escaped(summary.device.name)}</summary>"]
    if summary.winner is not None:
        rows = [
            [
                name,
                quantity(time_us(record) * 1e-6, "s"),
                f"{summary.tflops(record):.0f}",
                f"{summary.roofline_us / time_us(record):.0%}",
                describe(record),
            ]
            for name, record in summary.contenders()
        ]
        parts.append(_table(["", "time", "TFLOP/s", "of roofline", "what"], rows, left=1, right_text=True))
        parts.append(f"**Why not faster?** {_escaped(summary.why_not_faster)}")
        parts.append("```\n" + "\n".join(commands(summary.winner).values()) + "\n```")
    parts.append(_escaped(tally(summary)))
    if summary.importances:
        parts.append(_escaped(importances(summary)))
    if summary.failures:
        rows = [[failure.status.value, failure.reason, str(failure.count)] for failure in summary.failures]
        parts.append(_table(["status", "reason", "trials"], rows, left=2))
    return "\n\n".join([*parts, "</details>"])


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int, right_text: bool = False) -> str:
    """So many columns of text, then numbers; right_text: the last one is text again."""
    marks = ["---" if place < left or (right_text and place == len(heads) - 1) else "---:" for place in range(len(heads))]
    lines = [heads, marks, *([_escaped(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _escaped(text: str) -> str:
    """Text that neither ends a cell nor reads as markup."""
    for char, instead in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("`", "\\`"), ("*", "\\*"), ("[", "\\["), ("_", "\\_"), ("\n", " ")):
        text = text.replace(char, instead)
    return text
