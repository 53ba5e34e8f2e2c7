"""flashgen winners and flashgen report: what the database holds."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flashgen import canonical
from flashgen.cli.answer import Answer, say
from flashgen.cli.options import DatabaseOptions, DeviceOptions, ProblemOptions
from flashgen.device import Device

NO_ROWS = "No rows match. `flashgen tune` makes some; `flashgen doctor` says which database this is."


def winners(problem: ProblemOptions, device: DeviceOptions, database: DatabaseOptions) -> Answer:
    """The best measured kernel of every problem and device in the database.

    Problem options and --device narrow it down; without them everything is listed.
    """
    part = _wanted(device)
    rows = [record for record in database.open_existing().winners() if problem.matches(record.problem)]
    rows = [record for record in rows if part is None or record.device.key == part.key]

    def show(console: Console) -> None:
        from flashgen.report.tables import winners_table

        console.print(winners_table(rows) if rows else NO_ROWS)

    return Answer(data=[canonical.to_dict(record) for record in rows], show=show)


def report(
    problem: ProblemOptions,
    device: DeviceOptions,
    database: DatabaseOptions,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write one self-contained HTML page.", show_default=False)] = None,
) -> Answer:
    """What was tried, predicted and measured: in the terminal, and as an HTML page with --out.

    Problem options and --device narrow it down; without them every row is taken.
    """
    from flashgen.report import summary, tables

    part = _wanted(device)
    rows = [record for record in database.open_existing().records(device=part) if problem.matches(record.problem)]
    summaries = summary.summarize(rows)
    if out is not None:
        from flashgen.report.page import write

        write(out, rows)

    def show(console: Console) -> None:
        if not rows:
            console.print(NO_ROWS)
        tables.terminal(rows, console)
        if out is not None:
            say(console, f"Wrote {out}")

    from flashgen.report.page import data

    return Answer(data=data(summaries), show=show)


def _wanted(device: DeviceOptions) -> Device | None:
    """The device to narrow down to: only one that is named."""
    return None if device.device is None else device.get()
