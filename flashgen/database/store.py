"""The SQLite file: where it lies, how it comes to be, and transactions that survive what happens to files.

SQLite's write-ahead log is switched on once, when the file is made, under a lock file beside it: switching ignores the busy
timeout, and is what several processes that start together trip over. On a network file system, where that log does not work, the
file keeps a rollback journal. Connections live as long as one transaction and engines belong to one process, so forks, deleted
files and files made read-only are noticed at the next transaction.
"""

import contextlib
import datetime
import enum
import fcntl
import functools
import logging
import os
import random
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool, Pool, StaticPool

from flashgen.database import lines, migrations, schema
from flashgen.errors import ArgumentError, DatabaseError
from flashgen.record import Record

T = TypeVar("T")
logger = logging.getLogger(__name__)

BUSY_S = 30.0
NETWORK = {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.sshfs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "panfs", "smb3", "wekafs"}
WRITABLE, READ_ONLY, IMMUTABLE = "mode=rw", "mode=ro", "immutable=1"  # ways to open a file; the last ignores locks and log


class State(enum.Enum):
    """What lies at a path."""

    MISSING = "missing"
    EMPTY = "empty"
    CURRENT = "current"
    OLDER = "older"
    NEWER = "newer"
    FOREIGN = "foreign"  # a database, but not flashgen's
    CORRUPT = "corrupt"


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, each message once a process: dispatch must not repeat itself at every call."""
    logger.warning(message)


class Store:
    """One database file, or a database in memory (path None)."""

    def __init__(self, path: Path | None, *, access: str = WRITABLE, patience_s: float = BUSY_S) -> None:
        self.path = path
        self.access = access
        self.patience_s = patience_s
        self._pid = os.getpid()
        self._alone = threading.RLock()  # a database in memory has one connection
        self._engine = _engine(functools.partial(_connected, ":memory:", patience_s), StaticPool) if path is None else self._on_file(path)
        if path is None:
            weakref.finalize(self, self._engine.dispose)

    @classmethod
    def memory(cls) -> "Store":
        """A database in memory, with the shipped winners."""
        store = cls(None)
        store.write(_fill)
        return store

    @classmethod
    def open(cls, path: Path, patience_s: float = BUSY_S) -> "Store":
        """The file at path, made, migrated and given the shipped winners as needed. Raises DatabaseError."""
        store = cls(path, patience_s=patience_s)
        store._prepare(deep=False)
        return store

    @classmethod
    def open_read_only(cls, path: Path, patience_s: float = BUSY_S) -> "Store":
        """The file at path, which must be there and current; nothing is written to it. Raises DatabaseError."""
        store = cls(path, access=READ_ONLY, patience_s=patience_s)
        with store._sentences():
            try:
                state = store._state()
            except DBAPIError as error:
                if not any(words in str(error.orig) for words in ("unable to open", "readonly")):
                    raise
                # Not even the index of the log can be made here, so that no one else can be writing here either.
                store = cls(path, access=IMMUTABLE, patience_s=patience_s)
                state = store._state()
        if state is not State.CURRENT:
            raise DatabaseError(store._refusal(state))
        return store

    @property
    def writable(self) -> bool:
        """Whether write may be called."""
        return self.access == WRITABLE

    def read(self, work: Callable[[Connection], T]) -> T:
        """work's result, given a connection in a transaction of its own. Raises DatabaseError."""
        return self._run(work, writes=False)

    def write(self, work: Callable[[Connection], T]) -> T:
        """work's result, given a connection in a transaction that others wait for; all of it is kept or nothing.

        Raises DatabaseError.
        """
        if not self.writable:
            raise DatabaseError(f"the database {self.path} is open for reading only")
        return self._run(work, writes=True)

    def size_bytes(self) -> int:
        """Bytes on disk, the log included; 0 in memory."""
        files = [] if self.path is None else [self.path, Path(f"{self.path}-wal")]
        return sum(os.path.getsize(file) for file in files if os.path.exists(file))

    def vacuum(self) -> None:
        """Give freed space back to the file system, unless someone else uses the database now."""
        if self.path is not None:
            with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(self.path)) as connection:
                connection.execute("VACUUM")

    def _run(self, work: Callable[[Connection], T], writes: bool) -> T:
        try:
            return self._attempt(work, writes)
        except DBAPIError as error:
            if self.path is None or not self.writable or not self._is_damage(error):
                raise DatabaseError(self._sentence(error)) from error
        self._prepare(deep=True)
        with self._sentences():
            return self._attempt(work, writes)

    def _attempt(self, work: Callable[[Connection], T], writes: bool) -> T:
        """work's result after a transaction, without any repair. Raises what the driver raises."""
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                with self._connection() as connection, connection.execution_options(flashgen_writes=writes).begin():
                    return work(connection)
            except DBAPIError as error:
                # SQLite itself waits for most locks, but not for a log that is being deleted or recovered.
                if not any(word in str(error.orig) for word in ("locked", "busy")) or time.monotonic() > deadline:
                    raise
                time.sleep(random.uniform(0.005, 0.05))

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Connection]:
        if self._pid != os.getpid():
            # After a fork. The parent's connections are not this process's to close; a database in memory was copied whole.
            self._pid, self._alone = os.getpid(), threading.RLock()
            if self.path is not None:
                self._engine = self._on_file(self.path)
        with self._alone if self.path is None else contextlib.nullcontext(), self._engine.connect() as connection:
            yield connection

    def _on_file(self, path: Path) -> Engine:
        return _engine(functools.partial(_connected, _address(path, self.access), self.patience_s), NullPool)

    def _prepare(self, deep: bool) -> None:
        """Make the file exist, whole and current. Deep also looks for damage that only shows when the damaged part is read."""
        assert self.path is not None
        if os.path.exists(self.path) and not (os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)):
            raise DatabaseError(f"the database {self.path} cannot be written; choose another with --database or FLASHGEN_DATABASE")
        with self._sentences():
            if deep or self._state() is not State.CURRENT:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with _exclusive(self.path, self.patience_s):
                    self._mend(self._state(deep), anew=deep)
            if self._attempt(lambda connection: schema.fact(connection, "shipped"), writes=False) != lines.shipped_signature():
                self._attempt(_take_shipped, writes=True)

    def _mend(self, state: State, anew: bool) -> None:
        """Bring a file in this state to the current one; the caller holds the lock. Anew: it was whole when it was opened."""
        assert self.path is not None
        match state:
            case State.MISSING | State.EMPTY:
                if anew:
                    warn_once(f"the database {self.path} was deleted while in use; a new one was made")
                self._create()
            case State.CORRUPT:
                aside = _unused(self.path, "corrupt")
                for ending in ("-wal", "-shm", ""):  # the log first: a new file must never meet an old log
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(f"{self.path}{ending}", f"{aside}{ending}")
                self._create()
                kept = self._attempt(lambda connection: schema.keep(connection, _salvaged(aside)), writes=True)
                warn_once(f"the database {self.path} is damaged; it was moved to {aside.name}, and {kept} readable rows to a new one")
            case State.OLDER:
                backup = _unused(self.path, "backup")
                with contextlib.closing(sqlite3.connect(self.path)) as source, contextlib.closing(sqlite3.connect(backup)) as copy:
                    source.backup(copy)
                self._attempt(migrations.upgrade, writes=True)
                logger.info("the database %s was migrated; %s is as it was before", self.path, backup.name)
            case State.NEWER | State.FOREIGN:
                raise DatabaseError(self._refusal(state))

    def _create(self) -> None:
        assert self.path is not None
        with contextlib.closing(sqlite3.connect(self.path, timeout=self.patience_s)) as connection:
            connection.execute("PRAGMA journal_mode=" + ("DELETE" if _on_network(self.path) else "WAL"))
        self._attempt(_fill, writes=True)

    def _state(self, deep: bool = False) -> State:
        """Raises what the system or the driver raises where the file cannot be looked at."""
        assert self.path is not None
        try:
            if self.path.stat().st_size == 0:
                return State.EMPTY
            return self._attempt(functools.partial(_examined, deep=deep), writes=False)
        except FileNotFoundError:
            return State.MISSING
        except DBAPIError as error:
            if _is_corrupt(error):
                return State.CORRUPT
            raise

    def _is_damage(self, error: DBAPIError) -> bool:
        assert self.path is not None
        return _is_corrupt(error) or "no such table" in str(error.orig) or not os.path.exists(self.path)

    def _refusal(self, state: State) -> str:
        if state is State.FOREIGN:
            return f"the file {self.path} is a database of another program"
        if state not in (State.NEWER, State.OLDER):
            return f"the database {self.path} is {state.value}"
        revision = self._attempt(_revision, writes=False)
        remedy = "upgrade flashgen" if state is State.NEWER else "open it once where it can be written"
        return (
            f"the database {self.path} has schema {revision}, {state.value} than {schema.REVISIONS[-1]}, which this flashgen uses; "
            f"{remedy}, or choose another with --database or FLASHGEN_DATABASE"
        )

    @contextlib.contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except (DBAPIError, sqlite3.Error, OSError) as error:
            raise DatabaseError(self._sentence(error)) from error

    def _sentence(self, error: Exception) -> str:
        reason = f"{error.strerror}, {error.filename}" if isinstance(error, OSError) else getattr(error, "orig", error)
        return f"the database {self.path or 'in memory'} cannot be used: {reason}"


def _revision(connection: Connection) -> str:
    return str(connection.execute(select(schema.version.c.version_num)).scalar())


def _examined(connection: Connection, deep: bool) -> State:
    tables = set(connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'").scalars())
    if not tables:
        return State.EMPTY
    if not {"alembic_version", "records", "meta"} <= tables:
        return State.FOREIGN
    if deep and connection.exec_driver_sql("PRAGMA quick_check(1)").scalar() != "ok":
        return State.CORRUPT
    revision = _revision(connection)
    if revision == schema.REVISIONS[-1]:
        return State.CURRENT
    return State.OLDER if revision in schema.REVISIONS else State.NEWER


def _fill(connection: Connection) -> None:
    schema.create(connection)
    _take_shipped(connection)


def _salvaged(path: Path) -> Iterator[Record]:
    """The records of a damaged file that are themselves undamaged, read from both ends up to the damage."""
    for order in ("ASC", "DESC"):
        with contextlib.suppress(sqlite3.Error), contextlib.closing(_connected(_address(path, READ_ONLY), 1.0)) as connection:
            for key, text, origin in connection.execute(f"SELECT key, text, origin FROM records ORDER BY rowid {order}"):
                with contextlib.suppress(ArgumentError):
                    yield schema.undamaged(key, text, origin)


def _take_shipped(connection: Connection) -> None:
    """Make the shipped rows those of the installed files, so that a winner withdrawn by a release is withdrawn here too."""
    signature = lines.shipped_signature()
    if schema.fact(connection, "shipped") != signature:
        connection.execute(schema.records.delete().where(schema.records.c.origin == "shipped"))
        schema.keep(connection, lines.shipped())
        schema.set_fact(connection, "shipped", signature)


def _engine(connect: Callable[[], sqlite3.Connection], pool: type[Pool]) -> Engine:
    engine = create_engine("sqlite://", creator=connect, poolclass=pool)
    event.listen(engine, "begin", _on_begin)
    return engine


def _address(path: Path, access: str) -> str:
    return f"{path.absolute().as_uri()}?{access}"


def _connected(address: str, patience_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(address, uri=True, timeout=patience_s, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous=NORMAL")  # with the log, a power cut may lose the last rows, never the file
    except sqlite3.Error:
        connection.close()
        raise
    connection.text_factory = functools.partial(str, encoding="utf-8", errors="replace")  # a damaged byte spoils its row only
    return connection


def _on_begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("flashgen_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _is_corrupt(error: DBAPIError) -> bool:
    return any(words in str(error.orig) for words in ("malformed", "not a database", "unsupported file format"))


def _unused(path: Path, word: str) -> Path:
    """A path beside this one that says what for and when, and does not exist."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    names = (path.with_name(f"{path.name}.{word}-{now}" + (f"-{number}" if number else "")) for number in range(1000))
    return next(name for name in names if not name.exists())


def _on_network(path: Path, mounts: str = "/proc/mounts") -> bool:
    """Whether the path lies on one of the file systems of NETWORK; no where the system does not say."""
    try:
        entries = [line.split()[1:3] for line in Path(mounts).read_text().splitlines()]
    except OSError:
        return False
    holders = [(point, kind) for point, kind in entries if path.resolve().is_relative_to(point.replace("\\040", " "))]
    return max(holders, key=lambda holder: len(holder[0]), default=("", ""))[1] in NETWORK


@contextlib.contextmanager
def _exclusive(path: Path, patience_s: float) -> Iterator[None]:
    """Hold the lock file beside path. Raises DatabaseError if others hold it for longer than patience_s, and OSError."""
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DatabaseError(f"the database {path} is being made by another process, for more than {patience_s:g} s") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)
