"""flashgen winners and flashgen report: what the database holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flashgen import canonical
from flashgen.cli.answer import Answer, say
from flashgen.cli.options import DatabaseOptions, DeviceOptions, ProblemOptions
from flashgen.device import DEVICES, Device
from flashgen.errors import ArgumentError, DatabaseError

if TYPE_CHECKING:
    from flashgen.record import Record

TRITON = "triton="
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
    triton: Annotated[
        str | None, typer.Option(metavar="RELEASE", help="Only rows of this release, such as 3.9.", show_default=False)
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="Compare with other rows: those of a database or exported file, of a device (h100), or of a Triton release (triton=3.6).",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write a file: a self-contained page (.html), Markdown (.md) or JSON (.json).", show_default=False
        ),
    ] = None,
) -> Answer:
    """What was tried, predicted and measured, and why winners are not faster: in the terminal, and as a file with --out.

    Problem options, --device and --triton narrow it down; without them every row is taken. --against sets winners beside others: those
    of another database, or of another device or Triton release in this one.
    """
    from flashgen.report import data, summary, tables
    from flashgen.report.comparison import compare

    if out is not None:
        from flashgen.report import files

        files.maker_for(out)
    part = _wanted(device)
    known = [record for record in database.open_existing().records() if problem.matches(record.problem)]
    rows = [record for record in known if part is None or record.device.key == part.key]
    if triton is not None:
        rows = [record for record in rows if _is_release(record, triton)]
    comparison = None
    if against is not None:
        before, name, across_devices = _baseline(against, known)
        before = [
            each for each in before if problem.matches(each.problem) and (across_devices or part is None or each.device.key == part.key)
        ]
        named = {id(record) for record in before}
        rows = [record for record in rows if id(record) not in named]
        here = ([] if part is None else [part.name]) + ([] if triton is None else [f"Triton {triton}"])
        comparison = compare(before, rows, names=(name, ", ".join(here) or "these rows"), across_devices=across_devices)
    if out is not None:
        files.write(out, rows, comparison)

    def show(console: Console) -> None:
        if not rows:
            console.print(NO_ROWS)
        if comparison is None:
            tables.terminal(rows, console)
        else:
            say(console, str(comparison))
            if comparison.changes:
                console.print(tables.changes(comparison))
        if out is not None:
            say(console, f"Wrote {out}")

    return Answer(data=data.data_of(summary.summarize(rows), comparison), show=show)


def _baseline(against: str, known: "list[Record]") -> "tuple[list[Record], str, bool]":
    """The rows that --against names, what to call them, and whether they are another device's."""
    if against.startswith(TRITON):
        release = against.removeprefix(TRITON)
        return [record for record in known if _is_release(record, release)], f"Triton {release}", False
    if against.lower().replace("-", "_") in DEVICES:
        other = Device.named(against)
        return [record for record in known if record.device.key == other.key], other.name, True
    if not Path(against).is_file():
        raise ArgumentError(f"--against is {against!r}; it must be a file, {TRITON}RELEASE, or one of {', '.join(DEVICES)}")
    return _rows_of(Path(against)), Path(against).name, False


def _is_release(record: "Record", release: str) -> bool:
    """3.6 is every 3.6.x."""
    return f"{record.provenance.triton}.".startswith(f"{release}.")


def _rows_of(path: Path) -> "list[Record]":
    """All rows of a database or an exported file. Raises DatabaseError."""
    from flashgen.database import Database, lines
    from flashgen.record import Record

    with path.open("rb") as opened:
        if opened.read(16).startswith(b"SQLite format 3"):
            return Database.open(path, read_only=True).records()
    try:
        entries = list(lines.records_of(path.read_text(encoding="utf-8").splitlines(), origin="imported"))
    except UnicodeDecodeError as error:
        raise DatabaseError(f"the file {path} cannot be read: {error}") from error
    broken = [entry for entry in entries if not isinstance(entry, Record)]
    if broken:
        raise DatabaseError(f"the file {path} has {len(broken)} of {len(entries)} lines that are no rows: {broken[0]}")
    return [entry for entry in entries if isinstance(entry, Record)]


def _wanted(device: DeviceOptions) -> Device | None:
    """The device to narrow down to: only one that is named."""
    return None if device.device is None else device.get()
