"""Database: records in, winners out; the only package that knows SQLAlchemy.

One row a measurement; winners are a query, whose rules are in ranking.py. The file is --database, FLASHGEN_DATABASE or
flashgen.sqlite in the user's data folder, made at first use with the shipped winners in it.
"""

import datetime
import functools
import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

import platformdirs
from sqlalchemy import ColumnElement, Connection

from flashgen.database import lines, queries, schema
from flashgen.database.lines import shipped_dir
from flashgen.database.store import BUSY_S, Store, warn_once
from flashgen.device import Device
from flashgen.errors import ArgumentError, DatabaseError
from flashgen.problem import Problem
from flashgen.record import Record, Status

__all__ = ["Database", "Merged", "shipped_dir"]

T = TypeVar("T")
rows = queries.rows

READING_PATIENCE_S = 2.0  # how long a call of attention may wait for others' locks


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What became of the rows of a file: how many were added or already here, and a sentence for each broken one."""

    added: int
    known: int
    broken: tuple[str, ...]


class Database:
    """Records of all problems and devices, in one SQLite file or in memory.

    May be used from several threads and processes at once, also after a fork. A row that cannot be read (damaged, or written by
    another version of flashgen) is left out of every answer, and counted by info. Methods raise DatabaseError, unless the
    database was opened for reading: then reads give the next best answer and log one warning.
    """

    def __init__(self, store: Store, *, forgiving: bool = False) -> None:
        self._store = store
        self._forgiving = forgiving

    @classmethod
    def open(cls, path: str | os.PathLike[str] | None = None, *, read_only: bool = False) -> "Database":
        """The database at path, else at FLASHGEN_DATABASE, else in the user's data folder; ":memory:" is in memory.

        A missing or empty file is made, an older one migrated after a copy was put beside it, a damaged one moved aside; shipped
        winners are merged in if they changed. read_only does none of this. Where there is no place for the user's own data, one
        database in memory serves the whole process, with a warning. Raises DatabaseError.
        """
        return cls(cls._opened(path, read_only, BUSY_S))

    @classmethod
    def open_for_reading(cls, path: str | os.PathLike[str] | None = None) -> "Database":
        """As open, but never raises: gives the file as it is, else the shipped winners, after one warning that says why.

        What goes wrong later is answered in the same way. Adding to it raises DatabaseError.
        """
        reason: Exception | None = None
        for read_only in (False, True):
            try:
                store = cls._opened(path, read_only, READING_PATIENCE_S)
            except DatabaseError as error:
                reason = reason or error
            else:
                if reason is not None:
                    warn_once(f"{reason}; it is read as it is")
                return cls(store, forgiving=True)
        warn_once(f"{reason}; only the winners that come with flashgen are used")
        return cls(_for_this_process(), forgiving=True)

    @classmethod
    def memory(cls) -> "Database":
        """A new database in memory, with the shipped winners."""
        return cls(Store.memory())

    @classmethod
    def _opened(cls, path: str | os.PathLike[str] | None, read_only: bool, patience_s: float) -> Store:
        place = path or os.environ.get("FLASHGEN_DATABASE") or None
        if str(place) == ":memory:":
            return _for_this_process()
        file = _default_path() if place is None else Path(os.path.expanduser(place))
        if place is None and not _can_hold(file):
            warn_once(f"the folder {file.parent} cannot be made or written; results are kept for this process only, see FLASHGEN_DATABASE")
            return _for_this_process()
        return (Store.open_read_only if read_only else Store.open)(file, patience_s)

    @property
    def path(self) -> Path | None:
        """The file; None in memory."""
        return self._store.path

    # ---- records in --------------------------------------------------------------------------------------------------

    def add(self, records: Record | Iterable[Record]) -> int:
        """Keep these records: all of them or, if this raises, none. Gives how many were not here already."""
        added = [records] if isinstance(records, Record) else list(records)
        return self._write(lambda connection: schema.keep(connection, added))

    def merge(self, path: str | os.PathLike[str]) -> Merged:
        """Add the records of another database, or of an exported file, as imported. Merging twice changes nothing.

        Shipped rows of the other database are left out: they come with the installed flashgen.
        """
        try:
            with open(path, "rb") as opened:
                is_database = opened.read(16) == b"SQLite format 3\0"
        except OSError as error:
            raise DatabaseError(f"the file {path} cannot be read: {error.strerror}") from error
        if not is_database:
            return self.import_(path)
        others = Store.open_read_only(Path(path)).read(lambda connection: queries.entries(connection, [rows.origin != "shipped"]))
        return self._merge(f"row {key}: {entry}" if isinstance(entry, str) else _imported(entry) for key, entry in others)

    def import_(self, source: str | os.PathLike[str] | TextIO) -> Merged:
        """Add the records of an exported file or stream, as imported."""
        if not isinstance(source, (str, os.PathLike)):
            text = source.read()
        else:
            try:
                text = Path(source).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DatabaseError(f"the file {source} cannot be read: {error}") from error
        return self._merge(lines.records_of(text.splitlines(), origin="imported"))

    def _merge(self, entries: Iterable[Record | str]) -> Merged:
        records: list[Record] = []
        broken: list[str] = []
        for entry in entries:
            if isinstance(entry, Record):
                records.append(entry)
            else:
                broken.append(entry)
        added = self.add(records)
        return Merged(added=added, known=len(records) - added, broken=tuple(broken))

    # ---- records out -------------------------------------------------------------------------------------------------

    def records(
        self,
        problem: Problem | None = None,
        device: Device | None = None,
        status: Status | Collection[Status] | None = None,
        *,
        peers: bool | None = None,
    ) -> list[Record]:
        """All records of this problem, device and status (or any), oldest first. peers: only peers' rows, or none of them."""
        conditions = _conditions(problem, device, status)
        if peers is not None:
            conditions.append(rows.peer.is_not(None) if peers else rows.peer.is_(None))
        found = self._read(lambda connection: queries.entries(connection, conditions))
        return [entry for _, entry in found if isinstance(entry, Record)]

    def winner(self, problem: Problem, device: Device) -> Record | None:
        """The best record of this very problem on this kind of device, by the rules of ranking.py."""
        return next(iter(self.ranked(problem, device, most=1)), None)

    def ranked(self, problem: Problem, device: Device, most: int | None = None) -> list[Record]:
        """The records that could win this very problem on this kind of device, best first, one for each candidate and source."""
        conditions = _conditions(problem, device, None)
        cells = self._read(lambda connection: queries.best(connection, conditions, most))
        return cells[0] if cells else []

    def winners(self, device: Device | None = None, *, most: int = 1) -> list[Record]:
        """The winner of each problem and device (or its best `most` records), in the order of exported files."""
        return self._winners(_conditions(None, device, None), most)

    def near(self, problem: Problem, arch: str | None = None, *, most: int = 1) -> list[Record]:
        """The winners of all problems of the same direction on devices of this architecture (or any).

        How far each is from the problem, and whether it can be carried over, is for the caller to say.
        """
        return self._winners([rows.direction == problem.direction, *([rows.arch == arch] if arch else [])], most)

    def export(
        self,
        target: str | os.PathLike[str] | TextIO,
        *,
        problem: Problem | None = None,
        device: Device | None = None,
        status: Status | Collection[Status] | None = None,
        winners: bool = False,
        compact: bool = False,
    ) -> int:
        """Write records as JSON lines in a fixed order: the same records give the same bytes. Gives how many lines.

        winners: only the winner of each problem and device. compact: without raw times and instruction counts.
        """
        if winners:
            if status is not None:
                raise ArgumentError("status and winners exclude each other: every winner's status is ok")
            chosen = self._winners(_conditions(problem, device, None), most=1)
        else:
            chosen = self.records(problem, device, status)
        written = lines.lines_of(lines.compacted(each) if compact else each for each in chosen)
        text = "".join(f"{line}\n" for line in written)
        if isinstance(target, (str, os.PathLike)):
            _replace_file(Path(target), text)
        else:
            target.write(text)
        return len(written)

    # ---- housekeeping ------------------------------------------------------------------------------------------------

    def prune(
        self,
        *,
        status: Status | Collection[Status] | None = None,
        older_than: datetime.timedelta | None = None,
        keep_best: int | None = None,
        broken: bool = False,
        dry_run: bool = False,
    ) -> int:
        """Remove the rows for which all of the given conditions hold. Gives how many (dry_run: would be).

        status      it is one of these.
        older_than  it was measured longer ago.
        keep_best   it is a candidate's, and not one of this many best of its problem and device.
        broken      also, whatever the other conditions, every row that this version of flashgen cannot read.

        Shipped rows stay unless broken: they come and go with the installed flashgen. With a wrong result go the times of the
        same candidate, which would count again without it. Raises ArgumentError if no condition is given.
        """
        if keep_best is not None and (type(keep_best) is not int or keep_best < 1):
            raise ArgumentError(f"keep_best is {keep_best!r}; it must be a whole number of at least 1")
        if older_than is not None and older_than < datetime.timedelta(0):
            raise ArgumentError(f"older_than is {older_than}; it must not be negative")
        conditions = _conditions(None, None, status)
        if older_than is not None:
            oldest = datetime.datetime.now(datetime.timezone.utc) - older_than
            conditions.append(rows.utc < oldest.strftime("%Y-%m-%dT%H:%M:%S"))
        selective = bool(conditions) or keep_best is not None
        if not selective and not broken:
            raise ArgumentError("prune needs at least one of status, older_than, keep_best and broken")

        def work(connection: Connection) -> int:
            keys = queries.prunable(connection, conditions, keep_best) if selective else set()
            if broken:
                keys.update(key for key, entry in queries.entries(connection) if isinstance(entry, str))
            if not dry_run:
                queries.remove(connection, keys)
            return len(keys)

        if dry_run:
            return self._read(work)
        removed = self._write(work)
        self._store.vacuum()
        return removed

    def info(self, current_sources: Collection[str] | None = None) -> dict[str, Any]:
        """What is in the database, in plain types. Reads every row.

        current_sources: the sha256 of the sources that today's templates give; a candidate's rows with any other are stale.
        """
        found = self._read(queries.entries)
        good = [entry for _, entry in found if isinstance(entry, Record)]
        by_device: dict[str, list[Record]] = {}
        for record in good:
            by_device.setdefault(record.device.key, []).append(record)
        stale = None
        if current_sources is not None:
            stale = sum(record.candidate is not None and record.source_sha256 not in current_sources for record in good)
        return {
            "path": str(self.path) if self.path else None,
            "writable": self._store.writable and not self._forgiving,
            "size_bytes": self._store.size_bytes(),
            "schema": schema.REVISIONS[-1],
            "records": len(found),
            "problems": len({record.problem.key for record in good}),
            "winners": len(self.winners()),
            "by_status": _counts(record.measurement.status.value for record in good),
            "by_origin": _counts(record.provenance.origin for record in good),
            "devices": {
                key: {"name": of[0].device.name, "records": len(of), "problems": len({record.problem.key for record in of})}
                for key, of in sorted(by_device.items())
            },
            "newest_utc": max((record.provenance.utc for record in good), default=None),
            "broken": _counts(entry for _, entry in found if isinstance(entry, str)),
            "stale": stale,
        }

    # ---- transactions ------------------------------------------------------------------------------------------------

    def _winners(self, conditions: list[ColumnElement[bool]], most: int) -> list[Record]:
        cells = self._read(lambda connection: queries.best(connection, conditions, most))
        return lines.in_order(itertools.chain.from_iterable(cells))

    def _write(self, work: Callable[[Connection], T]) -> T:
        if self._forgiving:
            raise DatabaseError(f"the database {self.path or 'in memory'} is open for reading only")
        return self._store.write(work)

    def _read(self, work: Callable[[Connection], T]) -> T:
        try:
            return self._store.read(work)
        except DatabaseError as error:
            if not self._forgiving or self.path is None:
                raise
            warn_once(f"{error}; only the winners that come with flashgen are used")
            self._store = _for_this_process()
            return self._store.read(work)


@functools.cache
def _for_this_process() -> Store:
    """The database in memory that serves where no file can: tune and attention of one process share it."""
    return Store.memory()


def _default_path() -> Path:
    return Path(platformdirs.user_data_dir("flashgen")) / "flashgen.sqlite"


def _can_hold(file: Path) -> bool:
    """Whether a file is there or can be made, without a new folder at the root of the file system (a home that is not there)."""
    if os.path.exists(file):
        return True
    folder = next((each for each in file.parents if os.path.exists(each)), None)
    return file.is_absolute() and folder is not None and folder != Path(file.anchor) and os.access(folder, os.W_OK | os.X_OK)


def _conditions(problem: Problem | None, device: Device | None, status: Status | Collection[Status] | None) -> list[ColumnElement[bool]]:
    conditions = []
    if problem is not None:
        conditions.append(rows.problem_key == problem.key)
    if device is not None:
        conditions.append(rows.device_key == device.key)
    if status is not None:
        wanted = [status] if isinstance(status, Status) else status
        conditions.append(rows.status.in_([each.value for each in wanted]))
    return conditions


def _imported(record: Record) -> Record:
    return replace(record, provenance=replace(record.provenance, origin="imported"))


def _counts(words: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items()))


def _replace_file(path: Path, text: str) -> None:
    """In one step: a reader never sees half of it."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DatabaseError(f"the file {path} cannot be written: {error.strerror}") from error
