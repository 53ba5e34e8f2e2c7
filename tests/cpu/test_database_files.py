"""What befalls the file of a database: places, damage, permissions, schemas, processes."""

import contextlib
import itertools
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from flashgen import database as database_module
from flashgen.database import Database, migrations, schema, store
from flashgen.database.store import Store
from flashgen.errors import DatabaseError
from tests.cpu.database_rows import H200, PROBLEM, other_problem, record

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Warnings and the database in memory are once a process; here a test is one."""
    store.warn_once.cache_clear()
    database_module._for_this_process.cache_clear()
    yield
    store.warn_once.cache_clear()
    database_module._for_this_process.cache_clear()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database with two rows and nobody using it."""
    path = tmp_path / "data" / "rows.sqlite"
    Database.open(path).add([record(300.0), record(310.0, block_m=64)])
    return path


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings logged so far."""
    return lambda: [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def aside(file: Path, word: str = "corrupt") -> list[Path]:
    return sorted(each for each in file.parent.glob(f"{file.name}.{word}-*") if not each.name.endswith(("-wal", "-shm")))


def whole(file: Path) -> bool:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        return bool(connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)])


# ---- places ----------------------------------------------------------------------------------------------------------


def test_the_path_given_goes_before_the_environment_and_that_before_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_DATABASE", str(tmp_path / "environment.sqlite"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    assert Database.open(tmp_path / "given.sqlite").path == tmp_path / "given.sqlite"
    assert Database.open().path == tmp_path / "environment.sqlite"
    for empty in ("", None):
        monkeypatch.setenv("FLASHGEN_DATABASE", "") if empty == "" else monkeypatch.delenv("FLASHGEN_DATABASE")
        assert Database.open().path == tmp_path / "share" / "flashgen" / "flashgen.sqlite"


def test_a_home_folder_in_a_path_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Database.open("~/rows.sqlite").path == tmp_path / "rows.sqlite"


@pytest.mark.parametrize("name", ["with space.sqlite", "100%.sqlite", "question?mode=ro.sqlite", "hash#.sqlite", "ümlaut.sqlite"])
def test_any_name_is_a_name(tmp_path: Path, name: str) -> None:
    Database.open(tmp_path / name).add(record())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, f"{name}.lock"])
    assert len(Database.open(tmp_path / name, read_only=True).records()) == 1


@pytest.mark.parametrize("home", ["/nonexistent", "/"])
def test_no_home_keeps_results_in_memory_for_the_process(
    home: str, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]], tmp_path: Path
) -> None:
    """T16: one warning; tune and attention of one process share the rows, nothing is written anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("FLASHGEN_DATABASE")
    monkeypatch.setenv("HOME", home)
    writer, reader = Database.open(), Database.open_for_reading()
    writer.add(record())
    assert writer.path is None and reader.records() == [record()]
    assert len(warnings()) == 1 and "FLASHGEN_DATABASE" in warnings()[0]
    assert not Path("/nonexistent").exists() and not any(tmp_path.iterdir())


def test_in_memory_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_DATABASE", ":memory:")
    Database.open().add(record())
    assert Database.open_for_reading().records() == [record()]
    assert Database.memory().records() == []


def test_a_place_that_cannot_be(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    (tmp_path / "plain").write_text("")
    for path in (tmp_path, tmp_path / "plain" / "rows.sqlite", Path("/proc/flashgen/rows.sqlite")):
        with pytest.raises(DatabaseError, match=str(path.parent)):
            Database.open(path)
        assert Database.open_for_reading(path).winner(PROBLEM, H200) is None
    assert len(warnings()) == 3


# ---- creation and damage ---------------------------------------------------------------------------------------------


def test_a_new_file_has_a_write_ahead_log_and_todays_schema(file: Path) -> None:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(schema.REVISIONS[-1],)]
    assert sorted(each.name for each in file.parent.iterdir()) == ["rows.sqlite", "rows.sqlite.lock"]


def test_network_file_systems_keep_a_rollback_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/sda / ext4 rw 0 0\nserver:/home {tmp_path}/my\\040home nfs4 rw 0 0\nserver:/b {tmp_path}/my\\040home/b ext4 rw 0 0\n"
    )
    assert store._on_network(tmp_path / "my home" / "x", str(mounts))
    assert not store._on_network(tmp_path / "my home" / "b" / "x", str(mounts))
    assert not store._on_network(tmp_path / "x", str(mounts))
    assert not store._on_network(tmp_path / "x", str(tmp_path / "missing"))
    monkeypatch.setattr(store, "_on_network", lambda _: True)
    Database.open(tmp_path / "rows.sqlite").add(record())
    with contextlib.closing(sqlite3.connect(tmp_path / "rows.sqlite")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_an_empty_file_becomes_a_database(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    """S01: no bytes are no damage."""
    (tmp_path / "rows.sqlite").touch()
    Database.open(tmp_path / "rows.sqlite").add(record())
    assert Database.open(tmp_path / "rows.sqlite").records() == [record()]
    assert warnings() == [] and aside(tmp_path / "rows.sqlite") == []


def flip_bytes(file: Path) -> None:
    data = bytearray(file.read_bytes())
    for at in range(1024, len(data), 97):
        data[at] ^= 0xFF
    file.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "random bytes": lambda file: file.write_bytes(os.urandom(10_000)),
    "a text": lambda file: file.write_text("winners: none\n"),
    "cut to three pages": lambda file: os.truncate(file, 3 * 4096),
    "cut inside the header": lambda file: os.truncate(file, 50),
    "flipped bytes": flip_bytes,
}


@pytest.mark.parametrize("opened_before", [False, True], ids=["before it is opened", "while it is open"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_moved_aside(
    file: Path, damage: Callable[[Path], object], opened_before: bool, warnings: Callable[[], list[str]]
) -> None:
    """S01: lookups and stores go on in a new file, with one warning, and the damaged one is kept."""
    database = Database.open(file) if opened_before else None
    damage(file)
    damaged = file.read_bytes()
    database = database or Database.open(file)
    database.add(record(320.0, block_m=32))
    assert record(320.0, block_m=32) in database.records()
    assert database.winner(PROBLEM, H200) is not None
    assert Database.open(file).records() == database.records() and whole(file)
    assert len(warnings()) == 1 and "moved to" in warnings()[0]
    assert [kept.read_bytes() for kept in aside(file)] == [damaged]


def test_what_can_be_read_of_a_damaged_file_is_kept(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    """S01: one bad sector must not cost hours of tuning."""
    path = tmp_path / "rows.sqlite"
    Database.open(path).add([record(300.0 + number, block_m=1 + number) for number in range(200)])
    with open(path, "r+b") as opened:
        opened.seek(path.stat().st_size // 2 // 4096 * 4096)
        opened.write(b"\xa5" * 4096)
    database = Database.open(path)
    kept = sorted(each.measurement.median_us or 0.0 for each in database.records())
    assert 100 < len(kept) < 200 and set(kept) < {300.0 + number for number in range(200)}
    assert {kept[0], kept[-1]} == {300.0, 499.0} and whole(path)
    assert f"{len(kept)} readable rows" in warnings()[0] and len(warnings()) == 1


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_forward_survives_damage(file: Path, damage: Callable[[Path], object], warnings: Callable[[], list[str]]) -> None:
    """S01: dispatch's lookups never raise."""
    reader = Database.open_for_reading(file)
    damage(file)
    for database in (reader, Database.open_for_reading(file)):
        database.winner(PROBLEM, H200)
        database.winners()
        database.near(PROBLEM)
        database.records()
    assert len(warnings()) == 1


def test_a_lost_log_is_survived(tmp_path: Path) -> None:
    """S01: the log is deleted under a process that was killed before it was folded into the file."""
    path = tmp_path / "rows.sqlite"
    Database.open(path).add(record(300.0))
    connection = sqlite3.connect(path)
    connection.execute("SELECT count(*) FROM records").fetchone()  # keeps the log from being folded in
    Database.open(path).add(record(310.0, block_m=64))
    copy = tmp_path / "copy.sqlite"
    shutil.copy(path, copy)
    connection.close()
    database = Database.open(copy)
    assert record(300.0) in database.records()
    database.add(record(310.0, block_m=64))
    assert len(database.records()) == 2 and whole(copy)


def test_a_database_of_another_program_is_left_alone(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    path = tmp_path / "places.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match="another program"):
        Database.open(path)
    assert Database.open_for_reading(path).winners() == []
    assert path.read_bytes() == before and len(warnings()) == 1


def test_a_file_deleted_while_in_use_is_made_anew(file: Path, warnings: Callable[[], list[str]]) -> None:
    """S04: lookups find nothing, stores go on."""
    database = Database.open(file)
    file.unlink()
    assert database.winner(PROBLEM, H200) is None
    assert database.add(record()) == 1 and database.winner(PROBLEM, H200) == record()
    shutil.rmtree(file.parent)
    assert database.add(record()) == 1 and database.records() == [record()]
    assert len(warnings()) == 1


# ---- schemas ---------------------------------------------------------------------------------------------------------


def tables(connection: object) -> list[tuple[str, str]]:
    return sorted(
        (name, " ".join(sql.split()).replace("( ", "(").replace(" )", ")"))
        for name, sql in connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")  # type: ignore[attr-defined]
    )


def test_migrated_tables_are_those_of_the_schema() -> None:
    """The first revision and all later ones lead to what a new file gets."""
    migrated, made = Store(None), Store(None)
    migrated.write(migrations.upgrade)
    made.write(schema.create)
    assert migrated.read(tables) == made.read(tables)
    assert migrated.read(lambda connection: compare_metadata(MigrationContext.configure(connection), schema.metadata)) == []


def test_revisions_are_listed_in_order() -> None:
    scripts = ScriptDirectory(str(migrations.FOLDER))
    assert [script.revision for script in reversed(list(scripts.walk_revisions()))] == list(schema.REVISIONS)


SECOND = '''
"""A note on each record."""
import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("records", sa.Column("note", sa.String))
    {then}
'''


@pytest.fixture
def second_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make this flashgen one whose schema is a revision further; `then` is a line at the end of the migration."""

    def make(then: str = "") -> None:
        folder = tmp_path / "migrations"
        shutil.copytree(migrations.FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "versions" / "revision_0002.py").write_text(SECOND.format(then=then))
        monkeypatch.setattr(migrations, "FOLDER", folder)
        monkeypatch.setattr(schema, "REVISIONS", ("0001", "0002"))

    return make


def test_an_older_schema_is_migrated_after_a_backup(
    file: Path, second_revision: Callable[[str], None], warnings: Callable[[], list[str]]
) -> None:
    second_revision("")
    with pytest.raises(DatabaseError, match="0001, older than 0002"):
        Database.open(file, read_only=True)
    database = Database.open(file)
    assert len(database.records()) == 2
    with contextlib.closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT note FROM records").fetchall() == [(None,), (None,)]
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("0002",)]
    (backup,) = aside(file, "backup")
    with contextlib.closing(sqlite3.connect(backup)) as connection:
        assert connection.execute("SELECT count(*) FROM records").fetchone() == (2,)
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("0001",)]
    assert warnings() == []


def test_a_migration_that_fails_leaves_the_file_as_it_was(file: Path, second_revision: Callable[[str], None]) -> None:
    second_revision('op.execute("INSERT INTO nowhere VALUES (1)")')
    with pytest.raises(DatabaseError, match="nowhere"):
        Database.open(file)
    with contextlib.closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT count(*) FROM pragma_table_info('records') WHERE name = 'note'").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM records").fetchone() == (2,)
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("0001",)]


def test_a_newer_schema_is_refused_with_both_revisions_and_the_remedy(file: Path, warnings: Callable[[], list[str]]) -> None:
    """O08: never written, and dispatch goes on with what ships."""
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '0099'")
    before = file.read_bytes()
    for read_only in (False, True):
        with pytest.raises(DatabaseError, match=r"0099, newer than 0001.*upgrade flashgen.*FLASHGEN_DATABASE"):
            Database.open(file, read_only=read_only)
    reader = Database.open_for_reading(file)
    assert reader.path is None and reader.winners() == Database.memory().winners()
    assert len(warnings()) == 1 and "0099" in warnings()[0]
    assert file.read_bytes() == before and aside(file) == []


# ---- reading and permissions -----------------------------------------------------------------------------------------


def test_reading_handles_do_not_write(file: Path) -> None:
    for database in (Database.open(file, read_only=True), Database.open_for_reading(file)):
        assert len(database.records()) == 2 and not database.info()["writable"]
        with pytest.raises(DatabaseError, match="reading only"):
            database.add(record(block_m=16))
    with pytest.raises(DatabaseError, match="missing"):
        Database.open(file.with_name("missing.sqlite"), read_only=True)
    assert not file.with_name("missing.sqlite").exists()


def test_a_database_locked_by_another_is_read_without_waiting(file: Path) -> None:
    """O01: with the write-ahead log a reader waits for no writer."""
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        assert len(Database.open_for_reading(file).records()) == 2
        waiting = Database(Store.open(file, patience_s=0.2))
        with pytest.raises(DatabaseError, match="locked"):
            waiting.add(record(block_m=16))
        connection.execute("ROLLBACK")
    assert waiting.add(record(block_m=16)) == 1


def test_a_reader_falls_back_if_the_file_is_being_made_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(database_module, "READING_PATIENCE_S", 0.1)
    with store._exclusive(tmp_path / "rows.sqlite", 1.0):
        assert Database.open_for_reading(tmp_path / "rows.sqlite").winner(PROBLEM, H200) is None
    assert len(warnings()) == 1 and "another process" in warnings()[0]


def test_a_full_disk_is_one_sentence(file: Path) -> None:
    """S04: what cannot be stored is an error of its own, and what is there stays."""
    database = Database.open(file)
    with pytest.raises(DatabaseError, match="full"):
        database._store.write(fill_up)
    assert len(database.records()) == 2


def fill_up(connection: object) -> None:
    connection.exec_driver_sql("PRAGMA max_page_count = 12")  # type: ignore[attr-defined]
    schema.keep(connection, [record(block_m=size) for size in range(1, 100)])  # type: ignore[arg-type]


def run(script: str, *arguments: object, timeout: float = 120) -> str:
    """What the script prints, run by a Python of its own in which `rows` are the helpers of this folder."""
    head = "import os, sys, time, logging\nfrom tests.cpu import database_rows as rows\nfrom flashgen.database import Database\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", head + textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


AS_NOBODY = """
database = Database.memory()
database.add(rows.record())  # all modules are loaded before the rights to read them may be gone
database.winners(), database.info()
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
logging.basicConfig(format="WARNED %(message)s")
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that any user may enter, with a database in it."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        Database.open(folder / "rows.sqlite").add(record())
        yield folder
        folder.chmod(0o755)


@pytest.mark.parametrize("folder_mode", [0o555, 0o777])
def test_a_read_only_file_is_read(public: Path, folder_mode: int) -> None:
    """S04, T16: a shared or packaged database is used as it is; storing is refused before hours of tuning."""
    (public / "rows.sqlite").chmod(0o444)
    public.chmod(folder_mode)
    said = run(
        AS_NOBODY
        + """
        database = Database.open_for_reading(sys.argv[1])
        assert database.records() == [rows.record()], database.records()
        assert database.winner(rows.PROBLEM, rows.H200) == rows.record()
        assert len(Database.open(sys.argv[1], read_only=True).records()) == 1
        try:
            Database.open(sys.argv[1])
        except RuntimeError as error:
            print(error)
        """.replace("\n        ", "\n"),
        public / "rows.sqlite",
    )
    assert said.count("WARNED") == 1
    assert "cannot be written; choose another with --database or FLASHGEN_DATABASE" in said


def test_a_folder_that_cannot_be_written_and_has_no_database(public: Path) -> None:
    """T16: attention goes on with what ships."""
    public.chmod(0o555)
    said = run(
        AS_NOBODY
        + """
        assert Database.open_for_reading(sys.argv[1]).winner(rows.PROBLEM, rows.H200) is None
        try:
            Database.open(sys.argv[1])
        except RuntimeError as error:
            print(error)
        os.environ.update(HOME=os.path.dirname(sys.argv[1]), FLASHGEN_DATABASE="")
        del os.environ["XDG_DATA_HOME"]
        database = Database.open()
        database.add(rows.record())
        assert database.path is None and Database.open_for_reading().records() == [rows.record()]
        """.replace("\n        ", "\n"),
        public / "new.sqlite",
    )
    assert said.count("WARNED") == 2 and "Permission denied" in said


# ---- processes -------------------------------------------------------------------------------------------------------


def test_processes_that_start_together_lose_nothing(tmp_path: Path) -> None:
    """O01: eight writers and a reader meet on a file that does not exist; none sees a lock."""
    path = tmp_path / "rows.sqlite"
    run(
        """
        def child(number):
            database = Database.open(sys.argv[1])
            for trial in range(50):
                assert database.add(rows.record(300.0 + trial, block_m=1 + 50 * number + trial)) == 1
                if trial % 10 == 0:
                    assert database.add(rows.record(status=rows.Status.TIMEOUT)) in (0, 1)  # all store this one (S06)

        def reader(_):
            database, seen = Database.open_for_reading(sys.argv[1]), 0
            deadline = time.monotonic() + 100
            while seen < 401 and time.monotonic() < deadline:
                now = len(database.records())
                assert now >= seen
                seen = now
                database.winner(rows.PROBLEM, rows.H200)
            assert database.path is not None and seen == 401, seen

        children = []
        for number in range(9):
            child_id = os.fork()
            if not child_id:
                status = 1
                try:
                    (reader if number == 8 else child)(number)
                    status = 0
                finally:
                    os._exit(status)
            children.append(child_id)
        assert all(os.waitpid(child_id, 0)[1] == 0 for child_id in children)
        """,
        path,
    )
    assert len(Database.open(path).records()) == 401 and whole(path)
    assert aside(path) == []


def test_a_database_survives_forks(tmp_path: Path) -> None:
    """S05: children use what the parent opened, exit as they like, and neither file nor parent is harmed."""
    path = tmp_path / "rows.sqlite"
    run(
        """
        database, memory = Database.open(sys.argv[1]), Database.memory()
        database.add(rows.record(1.0, block_m=1000))
        memory.add(rows.record(1.0, block_m=1000))
        children = []
        for number in range(8):
            child_id = os.fork()
            if not child_id:
                for trial in range(3):
                    database.add(rows.record(block_m=1 + 3 * number + trial))
                    memory.add(rows.record(block_m=1 + trial))
                assert database.winner(rows.PROBLEM, rows.H200) == rows.record(1.0, block_m=1000)
                assert len(memory.records()) == 4
                sys.exit(0)
            children.append(child_id)
            database.add(rows.record(block_m=500 + number))
        assert all(os.waitpid(child_id, 0)[1] == 0 for child_id in children)
        assert len(database.records()) == 1 + 24 + 8
        assert len(memory.records()) == 1
        """,
        path,
    )
    assert whole(path)


def test_a_killed_writer_harms_nothing(tmp_path: Path) -> None:
    """S01: whatever was acknowledged before kill -9 is there, the file is whole, and nobody waits for the dead."""
    path = tmp_path / "rows.sqlite"
    said = run(
        """
        import signal
        acknowledged = 0
        for round, patience in enumerate((0.0, 0.02, 0.05, 0.1, 0.15)):
            read, write = os.pipe()
            child_id = os.fork()
            if not child_id:
                os.close(read)
                database = Database.open(sys.argv[1])
                for number in range(1, 10_000):
                    database.add(rows.record(block_m=10_000 * round + number))
                    os.write(write, b".")
            os.close(write)
            count = len(os.read(read, 1))  # it is at work
            time.sleep(patience)
            os.kill(child_id, signal.SIGKILL)
            os.waitpid(child_id, 0)
            while more := os.read(read, 4096):
                count += len(more)
            os.close(read)
            acknowledged += count
            database = Database.open(sys.argv[1])
            assert acknowledged <= len(database.records()) <= acknowledged + round + 1
            assert database.add(rows.record(block_m=10_000 * round + 9_999)) == 1
            acknowledged += 1
        print(acknowledged)
        """,
        path,
    )
    assert int(said) >= 10 and whole(path) and aside(path) == []


def test_threads_share_a_database(tmp_path: Path) -> None:
    """S06: many threads store the same and different rows, in a file and in memory."""
    for database in (Database.open(tmp_path / "rows.sqlite"), Database.memory()):
        failures: list[BaseException] = []

        def work(number: int, database: Database = database, failures: list[BaseException] = failures) -> None:
            try:
                for trial in range(5):
                    database.add([record(problem=other_problem(trial)), record(block_m=1 + number)])
                    assert database.winner(other_problem(trial), H200) is not None
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(database.records()) == 5 + 12


def test_opening_an_up_to_date_database_is_cheap(file: Path) -> None:
    """I16, T18: no Alembic, and a few milliseconds (of this process, as others may keep the machine busy)."""
    said = run(
        """
        import sqlalchemy.dialects.sqlite
        taken = []
        for _ in range(5):
            start = time.process_time()
            database = Database.open_for_reading(sys.argv[1])
            taken.append(time.process_time() - start)
        assert len(database.records()) == 2
        assert "alembic" not in sys.modules
        print(min(taken))
        """,
        file,
    )
    assert float(said) < 0.05


def test_importing_opens_nothing(tmp_path: Path) -> None:
    """I16"""
    run("assert not os.path.exists(os.environ['FLASHGEN_DATABASE'])")
    assert list(itertools.chain(tmp_path.glob("*.db*"))) == []
