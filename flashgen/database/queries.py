"""What is asked of the tables, given a connection."""

import itertools
from collections.abc import Collection, Iterable, Iterator

from sqlalchemy import ColumnElement, Connection, and_, delete, literal_column, select

from flashgen.database import ranking, schema
from flashgen.errors import ArgumentError
from flashgen.record import Record, Status

Conditions = Iterable[ColumnElement[bool]]
rows = schema.records.c


def entries(connection: Connection, conditions: Conditions = ()) -> list[tuple[str, Record | str]]:
    """Key and record of the rows for which all conditions hold, oldest first; for a broken row the reason is in its record's place."""
    columns = [rows[name] for name in ("key", "format", "text", "origin", *schema.DECISIVE)]
    query = select(*columns).where(*conditions).order_by(rows.utc, literal_column("rowid"))
    return [(row["key"], _entry(row)) for row in connection.execute(query).mappings()]


def best(connection: Connection, conditions: Conditions, most: int | None) -> list[list[Record]]:
    """The best records, best first, for each problem and device that has rows for which all conditions hold."""
    cells = list(_trials(connection, conditions))
    good: dict[str, Record] = {}
    broken: set[str] = set()
    while True:
        chosen = [ranking.ranked(trials)[:most] for trials in cells]
        wanted = {trial.key for trials in chosen for trial in trials} - good.keys()
        if not wanted:
            return [[good[trial.key] for trial in trials] for trials in chosen]
        for part in _parts(wanted):
            for key, entry in entries(connection, [rows.key.in_(part)]):
                if isinstance(entry, Record):
                    good[key] = entry
                else:
                    broken.add(key)
        # What turned out to be broken is as if it were not there; the rest is ranked anew.
        cells = [[trial for trial in trials if trial.key not in broken] for trials in cells]


def prunable(connection: Connection, conditions: Conditions, keep_best: int | None) -> set[str]:
    """Keys of the rows that are not shipped, for which all conditions hold, and that are a candidate's beyond the best of its cell.

    Contains with each wrong result the measured times of the same candidate and source.
    """
    removable = [rows.origin != "shipped", *conditions]
    if keep_best is not None:
        removable.append(rows.candidate_key.is_not(None))
    keys = set(connection.execute(select(rows.key).where(*removable)).scalars())
    if keep_best is not None:
        kept = (trial.key for trials in _trials(connection, ()) for trial in ranking.ranked(trials)[:keep_best])
        keys.difference_update(kept)
    wrong, timed = schema.records.alias().c, schema.records.alias().c
    same = [wrong[name] == timed[name] for name in ("problem_key", "device_key", "candidate_key", "source_sha256")]
    pairs = select(wrong.key, timed.key).where(
        and_(wrong.status == Status.WRONG_RESULT.value, timed.status == Status.OK.value, timed.origin != "shipped", *same)
    )
    keys.update(time for verdict, time in connection.execute(pairs) if verdict in keys)
    return keys


def remove(connection: Connection, keys: Collection[str]) -> None:
    """Delete the rows with these keys."""
    for part in _parts(keys):
        connection.execute(delete(schema.records).where(rows.key.in_(part)))


def _parts(keys: Collection[str]) -> Iterator[list[str]]:
    """The keys in parts that fit one statement: SQLite limits the number of its parameters."""
    remaining = iter(keys)
    while part := list(itertools.islice(remaining, 500)):
        yield part


def _entry(row: schema.Row) -> Record | str:
    try:
        return schema.record_of(row)
    except ArgumentError as error:
        return str(error)


def _trials(connection: Connection, conditions: Conditions) -> Iterator[list[ranking.Trial]]:
    """The sound trials for which the conditions hold, a list for each problem and device."""
    columns = [rows[name] for name in ranking.Trial._fields]
    decided = [status.value for status in ranking.DECIDED]
    query = (
        select(rows.problem_key, rows.device_key, *columns)
        .where(rows.candidate_key.is_not(None), rows.status.in_(decided), *conditions)
        .order_by(rows.problem_key, rows.device_key)
    )
    for _, cell in itertools.groupby(connection.execute(query), key=lambda row: tuple(row[:2])):
        yield [trial for row in cell if (trial := ranking.Trial(*row[2:])).is_sound]
