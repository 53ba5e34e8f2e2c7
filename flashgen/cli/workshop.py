"""flashgen workshop: the paper's model, the cost model and what was measured, as a page to play with."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flashgen.cli.answer import Answer, notice, say
from flashgen.cli.options import DatabaseOptions


def workshop(
    database: DatabaseOptions,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("report/workshop.html"),
    show_page: Annotated[bool, typer.Option("--open", help="Also open it in the browser.")] = False,
) -> Answer:
    """Writes one self-contained HTML page: what attention moves and how long it takes, for every length, head size and on-chip memory.

    It needs no network. It also shows how a kernel walks its tiles, what the cost model says of it, and the winners and other
    implementations whose times the database holds.
    """
    from flashgen.report import document
    from flashgen.report.workshop import data, html

    made = data(database.open_existing().records())
    document.write(out, html(made))
    if show_page:
        import webbrowser

        if not webbrowser.open(out.resolve().as_uri()):
            notice(f"no browser was found here; the page is {out}")

    def show(console: Console) -> None:
        say(console, f"Wrote {out}, with {len(made['measured'])} measured times")

    return Answer(data={"file": str(out), **made}, show=show)
