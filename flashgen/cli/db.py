"""flashgen db: rows out of the database, into it, and away."""

import datetime
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flashgen.cli.answer import Answer, say
from flashgen.cli.options import DatabaseOptions, DeviceOptions
from flashgen.errors import ArgumentError, DatabaseError

if TYPE_CHECKING:
    from flashgen.database import Merged
    from flashgen.record import Status


def export(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where to; - is stdout.", show_default=False)],
    device: DeviceOptions,
    database: DatabaseOptions,
    winners: Annotated[bool, typer.Option("--winners", help="Only the winner of each problem and device.")] = False,
    compact: Annotated[bool, typer.Option("--compact", help="Without raw times and instruction counts.")] = False,
) -> Answer:
    """Writes rows as JSON lines, sorted, for other machines and for git."""
    source, part = database.open_existing(), None if device.device is None else device.get()
    if file != "-":
        lines = source.export(file, device=part, winners=winners, compact=compact)
        return Answer(data={"file": file, "rows": lines}, show=lambda console: say(console, f"Wrote {lines} rows to {file}"))
    text = io.StringIO()
    lines = source.export(text, device=part, winners=winners, compact=compact)
    rows = text.getvalue()
    return Answer(data=[json.loads(line) for line in rows.splitlines()], show=lambda console: _write(rows))


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines that `db export` wrote; - is stdin.", show_default=False)],
    database: DatabaseOptions,
) -> Answer:
    """Adds the rows of an exported file; those already here are left as they are."""
    return _merged(str(file), database.open().import_(sys.stdin if str(file) == "-" else file))


def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Other databases, or exported files.", show_default=False)],
    database: DatabaseOptions,
) -> Answer:
    """Adds the rows of other databases; doing it twice changes nothing."""
    from flashgen.database import Merged

    into = database.open()
    parts = [into.merge(file) for file in files]
    whole = Merged(
        added=sum(part.added for part in parts),
        known=sum(part.known for part in parts),
        broken=tuple(sentence for part in parts for sentence in part.broken),
    )
    return _merged(", ".join(map(str, files)), whole)


def prune(
    database: DatabaseOptions,
    status: Annotated[str | None, typer.Option(metavar="STATUS[,...]", help="Rows with one of these.", show_default=False)] = None,
    older_than: Annotated[float | None, typer.Option(metavar="DAYS", help="Rows measured longer ago.", show_default=False)] = None,
    keep_best: Annotated[int | None, typer.Option(metavar="N", help="All but the N best of a problem.", show_default=False)] = None,
    broken: Annotated[bool, typer.Option("--broken", help="Also rows that this version cannot read.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many.")] = False,
) -> Answer:
    """Removes the rows for which all of the given conditions hold."""
    if older_than is not None and not 0 <= older_than < 1e6:
        raise ArgumentError(f"--older-than is {older_than}; it must be a number of days of at least 0")
    removed = database.open().prune(
        status=None if status is None else _statuses(status),
        older_than=None if older_than is None else datetime.timedelta(days=older_than),
        keep_best=keep_best,
        broken=broken,
        dry_run=dry_run,
    )
    words = "would be removed" if dry_run else "removed"
    return Answer(data={"rows": removed, "dry_run": dry_run}, show=lambda console: say(console, f"{removed} rows {words}"))


def path(database: DatabaseOptions) -> Answer:
    """Says where the database is."""
    file = database.open().path
    return Answer(data={"path": None if file is None else str(file)}, show=lambda console: say(console, str(file or ":memory:")))


def _merged(files: str, merged: "Merged") -> Answer:
    if merged.broken and not merged.added + merged.known:
        raise DatabaseError(f"no row of {files} can be read; the first: {merged.broken[0]}")

    def show(console: Console) -> None:
        say(console, f"{merged.added} rows added, {merged.known} already here, {len(merged.broken)} unreadable")
        for sentence in merged.broken[:5]:
            say(console, f"  {sentence}")

    return Answer(data={"added": merged.added, "known": merged.known, "broken": list(merged.broken)}, show=show)


def _statuses(text: str) -> "list[Status]":
    from flashgen.record import Status

    names = [status.value for status in Status]
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in names:
            raise ArgumentError(f"--status is {word!r}; it must be one of {', '.join(names)}")
    return [Status(word) for word in words]


def _write(text: str) -> None:
    sys.stdout.write(text)
