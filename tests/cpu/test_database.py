"""Records in, winners out: queries, ranking, exchange, housekeeping. What befalls the file is in test_database_files.py."""

import datetime
import hashlib
import io
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen import render, space
from flashgen.database import Database, lines, ranking, schema
from flashgen.device import from_properties
from flashgen.errors import ArgumentError, DatabaseError
from flashgen.problem import Problem
from flashgen.record import Record, Status
from tests.cpu.database_rows import A100, H100, H200, PROBLEM, other_problem, record

EARLIER, LATER = "2026-11-28T12:00:00Z", "2026-11-30T12:00:00Z"


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of shipped winners."""
    folder = tmp_path / "tuning_db"
    folder.mkdir()
    monkeypatch.setenv("FLASHGEN_TUNING_DB", str(folder))
    return folder


@pytest.fixture
def database(shipped: Path, tmp_path: Path) -> Database:
    return Database.open(tmp_path / "rows.sqlite")


def ship(folder: Path, *records: Record, name: str = "nvidia_h200.jsonl") -> None:
    (folder / name).write_text("".join(f"{line}\n" for line in lines.lines_of(records)))


def sql(database: Database, statement: str, *values: object) -> None:
    """Do to the file what someone with a database tool, or a bad disk, would."""
    database._store.write(lambda connection: connection.exec_driver_sql(statement, values))


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_every_kind_of_record_comes_back_as_it_was(database: Database) -> None:
    kept = [record(status=status, utc=f"2026-11-29T12:00:{second:02}Z") for second, status in enumerate(Status)]
    kept += [record(peer="cudnn", utc=LATER), record(origin="imported", block_m=64, utc="2026-12-01T00:00:00Z")]
    assert database.add(kept) == len(kept)
    assert database.records() == kept
    assert Database.open(database.path).records() == kept


def test_the_key_of_a_row_is_the_sha256_of_its_text() -> None:
    for each in (record(), record(origin="shipped"), record(peer="flash"), record(status=Status.CRASHED)):
        assert schema.row_of(each)["key"] == each.key


def test_adding_again_changes_nothing(database: Database) -> None:
    """S06: one row whatever the order and origin."""
    assert database.add(record()) == 1
    assert database.add([record(), record(origin="shipped"), record(block_m=64)]) == 1
    assert [each.provenance.origin for each in database.records()] == ["local", "local"]


def test_whole_and_fractional_spellings_of_a_time_are_one_row(database: Database) -> None:
    assert database.add([record(300), record(300.0)]) == 1
    (kept,) = database.records()
    assert database.add(kept) == 0


def test_nothing_unreadable_is_stored(database: Database) -> None:
    """O09, S08: a search that measured nonsense hears of it."""
    measured = record()
    for name in ("error", "spread_us"):
        with pytest.raises(ArgumentError, match=name):
            database.add([record(310.0), replace(measured, measurement=replace(measured.measurement, **{name: math.nan}))])
    assert database.records() == []


def test_a_list_is_added_wholly_or_not_at_all(database: Database) -> None:
    with pytest.raises(TypeError):
        database.add([record(), "not a record"])  # type: ignore[list-item]
    assert database.records() == []


def test_records_filters(database: Database) -> None:
    here, failed = record(), record(status=Status.TIMEOUT, block_m=64)
    there, other, peer = record(device=H100), record(problem=other_problem(1)), record(peer="flash")
    database.add([here, failed, there, other, peer])
    assert database.records(PROBLEM, H200, peers=False) == [here, failed]
    assert database.records(PROBLEM, status=Status.OK, peers=False) == [here, there]
    assert database.records(status=[Status.TIMEOUT, Status.CRASHED]) == [failed]
    assert database.records(status=[]) == []
    assert database.records(device=H100) == [there]
    assert database.records(peers=True) == [peer]


@pytest.mark.parametrize(
    "change",
    [
        *({name: value} for name, value in {"batch": 5, "heads_q": 32, "heads_kv": 8, "seqlen_q": 4095, "seqlen_kv": 4097}.items()),
        *({"dtype": dtype} for dtype in ("float16", "float32")),
        *({name: 64} for name in ("head_dim_qk", "head_dim_v")),
        *({name: True} for name in ("return_lse",)),
        {"mask": "full"},
        {"window": (128, None)},
        {"layout": "bshd"},
        {"aligned_16": False},
        {"direction": "backward"},
        {"direction": "backward", "deterministic": True},
        {"direction": "backward", "float16_dq": True},
    ],
    ids=lambda change: "-".join(map(str, next(iter(change.items())))),
)
def test_problems_that_differ_in_one_field_share_no_winner(change: dict[str, object]) -> None:
    """T13: an incomplete key would hand out a winner where it is invalid."""
    database = Database.memory()
    database.add(record())
    assert database.winner(PROBLEM, H200) is not None
    assert database.winner(Problem(**{**vars_of(PROBLEM), **change}), H200) is None  # type: ignore[arg-type]


def vars_of(problem: Problem) -> dict[str, object]:
    return {name: getattr(problem, name) for name in problem.__dataclass_fields__}


def test_a_device_is_found_whatever_it_is_called(database: Database) -> None:
    """O21: names inform, properties decide; parts that differ do not share winners."""
    database.add(record())
    assert database.winner(PROBLEM, replace(H200, name="H200 of a cloud")) is not None
    assert database.winner(PROBLEM, H100) is None
    slice_of_it = from_properties(
        name="NVIDIA H200 MIG 1g.18gb",
        arch="sm_90",
        num_sms=16,
        dram_bytes=18 * 10**9,
        l2_bytes=8 * 2**20,
        smem_per_block_bytes=H200.smem_per_block_bytes,
        smem_per_sm_bytes=H200.smem_per_sm_bytes,
        threads_per_sm=2048,
        clock_hz=1.98e9,
        dram_bytes_per_s=6e11,
    )
    assert database.winner(PROBLEM, slice_of_it) is None


# ---- winners ---------------------------------------------------------------------------------------------------------


def test_the_fastest_measured_candidate_wins(database: Database) -> None:
    database.add([record(310.0, block_m=64), record(300.0), record(320.0, block_m=32), record(100.0, peer="cudnn")])
    database.add([record(status=status, block_m=16) for status in Status if status is not Status.OK])
    winner = database.winner(PROBLEM, H200)
    assert winner == record(300.0)
    assert [each.measurement.median_us for each in database.ranked(PROBLEM, H200)] == [300.0, 310.0, 320.0]
    assert [each.measurement.median_us for each in database.ranked(PROBLEM, H200, most=2)] == [300.0, 310.0]


def test_no_winner_without_a_measurement(database: Database) -> None:
    database.add([record(status=status) for status in Status if status is not Status.OK] + [record(peer="cudnn")])
    assert database.winner(PROBLEM, H200) is None
    assert database.winners() == [] and database.near(PROBLEM) == []


def test_ties_are_broken_by_resources_then_by_key(database: Database) -> None:
    """O14: times inside the noise band are equal, so that repeats of a tuning agree."""
    a = record(300.0, block_m=128, smem_bytes=200_000, registers=100)
    b = record(302.0, block_m=64, smem_bytes=100_000, registers=200)
    c = record(302.9, block_m=32, smem_bytes=100_000, registers=199)
    d = record(303.1, block_m=16, smem_bytes=1, registers=1)  # just outside of the band
    for order in itertools.permutations([a, b, c, d]):
        memory = Database.memory()
        memory.add(order)
        assert memory.ranked(PROBLEM, H200) == [c, b, a, d]
    twins = [record(300.0, block_m=size) for size in (128, 64)]
    database.add(twins)
    assert database.winner(PROBLEM, H200) == min(twins, key=lambda each: each.candidate.key)  # type: ignore[union-attr]


def test_a_wrong_result_is_for_good(database: Database) -> None:
    """T07: a candidate that was once wrong never wins, however often it was right before or after."""
    database.add([record(100.0, utc=EARLIER), record(status=Status.WRONG_RESULT), record(100.0, utc=LATER), record(300.0, block_m=64)])
    assert database.winner(PROBLEM, H200) == record(300.0, block_m=64)
    mended = record(120.0, source="6" * 64)
    database.add(mended)
    assert database.winner(PROBLEM, H200) == mended


def test_a_wrong_result_here_outweighs_shipped_and_imported_rows(database: Database) -> None:
    database.add([record(100.0, origin="shipped"), record(101.0, origin="imported"), record(status=Status.WRONG_RESULT)])
    assert database.winner(PROBLEM, H200) is None


def test_the_newest_trial_of_a_candidate_counts(database: Database) -> None:
    """O14: the luckiest of repeated measurements is not what a user will see."""
    database.add([record(100.0, utc=EARLIER), record(200.0, utc=LATER)])
    database.add([record(150.0, block_m=64, utc=EARLIER), record(status=Status.CRASHED, block_m=64, utc=LATER)])
    assert [each.measurement.median_us for each in database.ranked(PROBLEM, H200)] == [200.0]


def test_local_rows_of_a_candidate_replace_foreign_ones(database: Database) -> None:
    """A shipped time from a cooler GPU must not stand against what was measured here, but an unmeasured one still counts."""
    shipped = record(200.0, origin="shipped", utc=LATER)
    database.add([shipped, record(250.0, block_m=64)])
    assert database.winner(PROBLEM, H200) == shipped
    here = record(260.0, utc=EARLIER)
    database.add(here)
    assert database.ranked(PROBLEM, H200) == [record(250.0, block_m=64), here]


TRIALS = st.lists(
    st.builds(
        ranking.Trial,
        key=st.uuids().map(str),
        candidate_key=st.sampled_from("abc"),
        source_sha256=st.sampled_from("xy"),
        status=st.sampled_from([status.value for status in ranking.DECIDED]),
        median_us=st.floats(1, 10) | st.none(),
        origin=st.sampled_from(["local", "shipped", "imported"]),
        utc=st.sampled_from([EARLIER, LATER]),
        smem_bytes=st.integers(0, 3) | st.none(),
        registers=st.integers(0, 3) | st.none(),
    ).filter(lambda trial: trial.is_sound),
    max_size=12,
)


@given(TRIALS, st.randoms())
def test_ranking_depends_on_the_trials_and_not_on_their_order(trials: list[ranking.Trial], random) -> None:  # type: ignore[no-untyped-def]
    best = ranking.ranked(trials)
    shuffled = random.sample(trials, len(trials))
    assert ranking.ranked(shuffled) == best
    assert len({(trial.candidate_key, trial.source_sha256) for trial in best}) == len(best)
    wrong = {(trial.candidate_key, trial.source_sha256) for trial in trials if trial.status == "wrong_result"}
    assert not wrong & {(trial.candidate_key, trial.source_sha256) for trial in best}
    times = [trial.median_us for trial in best if trial.median_us is not None]
    assert len(times) == len(best)
    if times:
        assert times[0] <= min(times) * (1 + ranking.TIE)


def test_records_in_hand_are_ranked_as_stored_ones(database: Database) -> None:
    rows = [record(300.0 + number, block_m=16 << number, smem_bytes=1000 - number) for number in range(5)]
    rows += [record(status=status, block_m=3) for status in Status if status is not Status.OK]
    rows += [record(status=Status.WRONG_RESULT, block_m=16), record(peer="cudnn"), record(290.0, block_m=32, origin="shipped")]
    database.add(rows)
    assert ranking.ranked_records(rows) == database.ranked(PROBLEM, H200)
    assert len(ranking.ranked_records(rows)) == 4


def test_winners_of_all_problems_and_near_ones(database: Database) -> None:
    rows = [record(problem=other_problem(number), device=device) for number in range(3) for device in (H200, H100, A100)]
    slower = [record(999.0, block_m=64, problem=each.problem, device=each.device) for each in rows]
    database.add(rows + slower)
    assert sorted(each.key for each in database.winners()) == sorted(each.key for each in rows)
    assert {each.device for each in database.winners(H100)} == {H100}
    assert {each.device for each in database.near(PROBLEM, "sm_90")} == {H200, H100}
    assert len(database.near(PROBLEM)) == 9
    assert len(database.near(PROBLEM, "sm_80", most=2)) == 6 and len(database.winners(H100, most=9)) == 6


# ---- broken rows -----------------------------------------------------------------------------------------------------


def with_text(replaced: str, by: str, forged: bool = False) -> Callable[[str], dict[str, object]]:
    """Changes the text of a row, and its key too if it is to look undamaged."""

    def change(text: str) -> dict[str, object]:
        assert replaced in text
        changed = text.replace(replaced, by)
        return {"text": changed, "key": hashlib.sha256(changed.encode()).hexdigest()} if forged else {"text": changed}

    return change


def with_column(name: str, value: object) -> Callable[[str], dict[str, object]]:
    return lambda _: {name: value}


POISON = {
    "an edited time": with_text('"median_us":100.0', '"median_us":90.0'),
    "invalid JSON": with_text('"problem":', '"problem"', forged=True),
    "deep nesting": with_text('"problem":', '"problem":' + "[" * 100_000, forged=True),
    "another shape": lambda _: {"text": "[]", "key": hashlib.sha256(b"[]").hexdigest()},
    "an unknown field": with_text('"block_m"', '"block_q"', forged=True),
    "a wrong type": with_text('"block_m":64', '"block_m":"64"', forged=True),
    "a null": with_text('"block_m":64', '"block_m":null', forged=True),
    "an unknown status": with_text('"status":"ok"', '"status":"fine"', forged=True),
    "a time of NaN": with_text('"median_us":100.0', '"median_us":NaN', forged=True),
    "a number without end": with_text('"waves":1.5', '"waves":1e999', forged=True),
    "a huge integer": with_text('"waves":1.5', '"waves":1' + "0" * 400, forged=True),
    "a faster time in the column": with_column("median_us", 1.0),
    "no time in the column": with_column("median_us", None),
    "a time without end in the column": with_column("median_us", math.inf),
    "a time below 0 in the column": with_column("median_us", -1.0),
    "a word for a time": with_column("median_us", "fast"),
    "a word for a size": with_column("smem_bytes", "big"),
    "bytes for a text": with_column("text", b"\xff\x00"),
    "a future format": with_column("format", 2),
    "another candidate's key": with_column("candidate_key", "c"),
    "no candidate's key": with_column("candidate_key", None),
    "another status in the column": with_column("status", "predicted"),
}


@pytest.mark.parametrize("change", POISON.values(), ids=POISON)
def test_a_broken_row_is_a_miss(database: Database, change: Callable[[str], dict[str, object]]) -> None:
    """S08: it is never used, breaks nothing, is counted, and can be removed; what it displaced wins."""
    good, bad = record(300.0), record(100.0, block_m=64)
    database.add([good, bad])
    for name, value in change(schema.text_of(bad)).items():
        sql(database, f"UPDATE records SET {name} = ? WHERE config LIKE '64x%'", value)
    assert database.winner(PROBLEM, H200) == good
    assert database.ranked(PROBLEM, H200) == database.winners() == database.near(PROBLEM) == database.records() == [good]
    assert sum(database.info()["broken"].values()) == 1 and database.info()["records"] == 2
    assert database.export(io.StringIO()) == 1
    assert database.prune(broken=True) == 1
    assert database.info()["broken"] == {} and database.records() == [good]
    assert database.add(bad) == 1  # measured again, it is back
    assert database.winner(PROBLEM, H200) == bad


def test_bytes_that_are_no_text_spoil_their_row_only(database: Database) -> None:
    database.add([record(300.0), record(100.0, block_m=64)])
    for column in ("text", "utc", "origin", "source_sha256"):
        sql(database, f"UPDATE records SET {column} = CAST(x'7bff7d' AS TEXT) WHERE config LIKE '64x%'")
        assert database.winner(PROBLEM, H200) == record(300.0)
        assert len(database.records()) == sum(database.info()["broken"].values()) == 1


def test_broken_rows_are_told_apart_by_reason(database: Database) -> None:
    database.add([record(block_m=size) for size in (16, 32, 64)])
    sql(database, "UPDATE records SET format = 99 WHERE config LIKE '16x%'")
    sql(database, "UPDATE records SET text = 'x' WHERE config LIKE '32x%' OR config LIKE '64x%'")
    assert database.info()["broken"] == {"its format is unknown to this version of flashgen": 1, "its text is damaged": 2}


# ---- exchange --------------------------------------------------------------------------------------------------------


@pytest.fixture
def many(database: Database) -> Iterator[list[Record]]:
    rows = [record(300.0 + number, block_m=16 << number % 3, problem=other_problem(number % 2)) for number in range(6)]
    rows += [record(status=Status.TIMEOUT, block_m=256), record(peer="cudnn"), record(device=A100, origin="shipped")]
    database.add(rows)
    yield rows


def test_export_is_stable_sorted_and_complete(database: Database, many: list[Record], tmp_path: Path) -> None:
    assert database.export(tmp_path / "a.jsonl") == len(many)
    again = Database.memory()
    again.add(reversed(many))
    stream = io.StringIO()
    again.export(stream)
    assert (tmp_path / "a.jsonl").read_text() == stream.getvalue()
    for line in stream.getvalue().splitlines():
        data = json.loads(line)
        assert data["format"] == schema.FORMAT and "origin" not in data["provenance"]
        assert line == json.dumps(data, sort_keys=True, separators=(",", ":"))
    assert [path.name for path in tmp_path.glob("a.jsonl*")] == ["a.jsonl"]


def test_export_filters(database: Database, many: list[Record]) -> None:
    assert database.export(io.StringIO(), winners=True) == len(database.winners()) == 3
    assert database.export(io.StringIO(), winners=True, problem=other_problem(0)) == 1
    assert database.export(io.StringIO(), device=A100) == 1
    assert database.export(io.StringIO(), status=Status.TIMEOUT) == 1
    with pytest.raises(ArgumentError, match="status"):
        database.export(io.StringIO(), winners=True, status=Status.OK)


def test_a_compact_export_wins_as_the_whole_one_does_and_is_stable(database: Database, many: list[Record], tmp_path: Path) -> None:
    whole, small, smaller = io.StringIO(), io.StringIO(), io.StringIO()
    database.export(whole, winners=True)
    database.export(small, winners=True, compact=True)
    assert len(small.getvalue()) < len(whole.getvalue()) and "times_us" not in small.getvalue()
    other = Database.memory()
    small.seek(0)
    other.import_(small)
    other.export(smaller, winners=True, compact=True)
    assert smaller.getvalue() == small.getvalue()
    of = lambda source: [(each.problem, each.candidate, each.measurement.median_us) for each in source.winners()]  # noqa: E731
    assert of(other) == of(database)


def test_import_is_idempotent_and_skips_broken_lines(database: Database, tmp_path: Path) -> None:
    line = lines.line_of(record())
    file = tmp_path / "rows.jsonl"
    future = line.replace('"format":1', '"format":2')
    file.write_text("\n".join([line, "", line[:-5], line.replace("block_m", "block_q"), "[]", "3", future]))
    merged = database.import_(file)
    assert (merged.added, merged.known) == (1, 0)
    assert [sentence.split(":")[0] for sentence in merged.broken] == ["line 3", "line 4", "line 5", "line 6", "line 7"]
    assert "unknown fields block_q" in merged.broken[1] and "format" in merged.broken[4]
    assert database.import_(io.StringIO(line)).known == 1
    assert [each.provenance.origin for each in database.records()] == ["imported"]


def test_merge_another_database(database: Database, tmp_path: Path) -> None:
    other = Database.open(tmp_path / "other.sqlite")
    other.add([record(), record(200.0, block_m=64), record(block_m=32, origin="shipped"), record(block_m=16)])
    sql(other, f"UPDATE records SET text = 'x' WHERE key = '{record(block_m=16).key}'")
    database.add(record())
    merged = database.merge(tmp_path / "other.sqlite")
    assert (merged.added, merged.known) == (1, 1)
    assert len(merged.broken) == 1 and "damaged" in merged.broken[0]
    assert database.merge(tmp_path / "other.sqlite").added == 0
    assert {each.provenance.origin for each in database.records()} == {"local", "imported"}
    assert len(other.records()) == 3
    assert database.path is not None
    assert database.merge(database.path).added == 0


def test_merge_of_lines_and_of_nonsense(database: Database, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(lines.line_of(record()))
    assert database.merge(tmp_path / "rows.jsonl").added == 1
    with pytest.raises(DatabaseError, match="cannot be read"):
        database.merge(tmp_path / "missing.jsonl")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(DatabaseError, match="cannot be read"):
        database.merge(tmp_path / "picture.png")
    with pytest.raises(DatabaseError, match="cannot be written"):
        database.export(tmp_path / "missing" / "rows.jsonl")


# ---- shipped winners -------------------------------------------------------------------------------------------------


def test_shipped_winners_arrive_at_first_use(shipped: Path, tmp_path: Path) -> None:
    ship(shipped, record(), record(problem=other_problem(1)))
    for database in (Database.open(tmp_path / "new.sqlite"), Database.memory()):
        assert len(database.winners()) == 2
        assert database.info()["by_origin"] == {"shipped": 2}


def test_an_updated_file_is_merged_again(shipped: Path, tmp_path: Path) -> None:
    """A new release adds, improves and withdraws winners; what was measured here stays."""
    ship(shipped, record(300.0), record(300.0, problem=other_problem(1)))
    database = Database.open(tmp_path / "rows.sqlite")
    mine = record(310.0, block_m=64, problem=other_problem(1))
    database.add(mine)
    ship(shipped, record(280.0))
    again = Database.open(tmp_path / "rows.sqlite")
    assert again.winner(PROBLEM, H200).measurement.median_us == 280.0  # type: ignore[union-attr]
    assert again.winner(other_problem(1), H200) == mine
    assert again.info()["by_origin"] == {"local": 1, "shipped": 1}
    (shipped / "nvidia_h200.jsonl").unlink()
    assert Database.open(tmp_path / "rows.sqlite").records() == [mine]


def test_what_was_measured_here_and_then_shipped_stays_local(shipped: Path, tmp_path: Path) -> None:
    database = Database.open(tmp_path / "rows.sqlite")
    database.add(record())
    ship(shipped, record())
    assert Database.open(tmp_path / "rows.sqlite").records() == [record()]
    (shipped / "nvidia_h200.jsonl").unlink()
    assert Database.open(tmp_path / "rows.sqlite").records() == [record()]


def test_a_broken_shipped_line_harms_no_other(shipped: Path, tmp_path: Path) -> None:
    ship(shipped, record())
    with open(shipped / "nvidia_h200.jsonl", "a") as file:
        file.write('{"nonsense":1}\n')
    (shipped / "binary.jsonl").write_bytes(b"\xff\xfe")
    assert len(Database.open(tmp_path / "rows.sqlite").winners()) == 1


def test_the_files_that_ship_are_canonical_winners() -> None:
    folder = render.shipped_dir("tuning_db")
    assert (folder / "README.md").is_file()
    for file in folder.glob("*.jsonl"):
        read = list(lines.records_of(file.read_text().splitlines(), origin="shipped"))
        records = [entry for entry in read if isinstance(entry, Record)]
        assert len(records) == len(read)
        assert file.read_text() == "".join(f"{line}\n" for line in lines.lines_of(lines.compacted(each) for each in records))
        assert all(each.is_winner_material for each in records)
        assert len({(each.problem.key, each.device.key) for each in records}) == len(records)
        assert not [each for each in records if each.candidate and space.violations(each.candidate, each.problem, each.device)]


# ---- housekeeping ----------------------------------------------------------------------------------------------------


def test_prune_by_status_and_age(database: Database) -> None:
    now = datetime.datetime.now(datetime.timezone.utc)
    stamp = lambda days: (now - datetime.timedelta(days=days)).strftime("%Y-%m-%dT%H:%M:%SZ")  # noqa: E731
    old, new = record(utc=stamp(10)), record(utc=stamp(1), block_m=64)
    old_failure, new_failure = (record(status=Status.TIMEOUT, utc=stamp(days), block_m=32) for days in (10, 1))
    database.add([old, old_failure, new, new_failure])
    week = datetime.timedelta(days=7)
    assert database.prune(older_than=week, dry_run=True) == 2 and len(database.records()) == 4
    assert database.prune(status=Status.TIMEOUT, older_than=week) == 1
    assert database.records() == [old, new, new_failure]
    assert database.prune(older_than=week) == 1
    assert database.prune(status=[Status.TIMEOUT]) == 1
    assert database.records() == [new]


def test_prune_keeps_the_best_of_each_problem(database: Database) -> None:
    for problem in (PROBLEM, other_problem(1)):
        database.add([record(300.0 + 10 * number, block_m=16 << number, problem=problem) for number in range(4)])
        database.add([record(peer="cudnn", problem=problem), record(status=Status.CRASHED, block_m=3, problem=problem)])
    before = database.winners()
    assert database.prune(keep_best=2) == 6
    assert database.winners() == before
    assert [each.measurement.median_us for each in database.ranked(PROBLEM, H200)] == [300.0, 310.0]
    assert len(database.records(peers=True)) == 2


def test_prune_never_brings_a_wrong_candidate_back(database: Database) -> None:
    """T07: without its wrong result the candidate's times would count again."""
    database.add([record(100.0, utc=EARLIER), record(status=Status.WRONG_RESULT), record(300.0, block_m=64)])
    assert database.prune(status=Status.WRONG_RESULT) == 2
    assert database.records() == [record(300.0, block_m=64)]


def test_prune_leaves_shipped_rows(shipped: Path, tmp_path: Path) -> None:
    ship(shipped, record(utc="2001-01-01T00:00:00Z"))
    database = Database.open(tmp_path / "rows.sqlite")
    assert database.prune(older_than=datetime.timedelta(days=1)) == 0
    assert len(database.winners()) == 1


@pytest.mark.parametrize(
    "arguments", [{}, {"keep_best": 0}, {"keep_best": -1}, {"keep_best": 1.5}, {"keep_best": True}, {"older_than": datetime.timedelta(-1)}]
)
def test_prune_refuses_nonsense(database: Database, arguments: dict[str, object]) -> None:
    """O24: nothing is removed by a slip."""
    database.add(record())
    with pytest.raises(ArgumentError):
        database.prune(**arguments)  # type: ignore[arg-type]
    assert len(database.records()) == 1


def test_pruning_gives_the_space_back(database: Database) -> None:
    database.add([record(status=Status.SKIPPED, block_m=size) for size in range(1, 300)])
    before = database.info()["size_bytes"]
    assert database.prune(status=Status.SKIPPED) == 299
    assert database.info()["size_bytes"] < before / 4


def test_info_for_doctor(database: Database) -> None:
    database.add(
        [record(), record(block_m=64, source="6" * 64), record(peer="cudnn"), record(device=H100, status=Status.TIMEOUT, utc=LATER)]
    )
    info = database.info(current_sources={"6" * 64})
    assert info["records"] == 4 and info["winners"] == 1 and info["problems"] == 1
    assert info["by_status"] == {"ok": 3, "timeout": 1}
    assert info["stale"] == 2
    assert info["devices"][H200.key] == {"name": "NVIDIA H200", "records": 3, "problems": 1}
    assert info["newest_utc"] == LATER and info["size_bytes"] > 0 and info["path"] == str(database.path) and info["writable"]
    assert database.info()["stale"] is None
    json.dumps(info)
    assert math.isfinite(Database.memory().info()["size_bytes"])
