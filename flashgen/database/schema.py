"""The tables, and what a Record looks like as a row of them.

A row keeps the record's whole stored form as text, and beside it the columns that queries filter and sort by, all derived from
it. The text leaves out the origin, which has a column of its own, so that the sha256 of the text is the row's primary key: adding
a record twice changes nothing, and a row that was damaged is known by its key.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Float,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    RowMapping,
    String,
    Table,
    Text,
    insert,
    select,
)
from sqlalchemy.dialects import sqlite

from flashgen import canonical
from flashgen.errors import ArgumentError
from flashgen.record import Record

FORMAT = 1  # of the stored form; raised when an older flashgen could misread it
REVISIONS = ("0001",)  # of the tables, oldest first: the names of migrations/versions

Row = Mapping[str, Any] | RowMapping

metadata = MetaData()

records = Table(
    "records",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("format", Integer, nullable=False),
    Column("text", Text, nullable=False),
    Column("origin", String, nullable=False),
    Column("status", String, nullable=False),
    Column("median_us", Float),
    Column("problem_key", String(64), nullable=False),
    Column("direction", String, nullable=False),
    Column("batch", Integer, nullable=False),
    Column("heads_q", Integer, nullable=False),
    Column("heads_kv", Integer, nullable=False),
    Column("seqlen_q", Integer, nullable=False),
    Column("seqlen_kv", Integer, nullable=False),
    Column("head_dim_qk", Integer, nullable=False),
    Column("head_dim_v", Integer, nullable=False),
    Column("dtype", String, nullable=False),
    Column("mask", String, nullable=False),
    Column("device_key", String, nullable=False),
    Column("arch", String, nullable=False),
    Column("variant", String),  # its name; NULL for a peer
    Column("config", String),
    Column("candidate_key", String(64)),
    Column("peer", String),  # its name; NULL for a candidate
    Column("source_sha256", String, nullable=False),
    Column("registers", Integer),
    Column("smem_bytes", Integer),
    Column("triton", String, nullable=False),
    Column("utc", String, nullable=False),
    Index("records_by_problem", "problem_key", "device_key", "status"),
    Index("records_by_device", "direction", "arch", "device_key", "status"),
    Index("records_by_status", "status", "utc"),
)

# Facts about the file itself: "shipped" is the signature of the shipped winners merged into it.
meta = Table("meta", metadata, Column("name", String, primary_key=True), Column("value", Text, nullable=False))

# Alembic's own table, as Alembic makes it.
version = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


def create(connection: Connection) -> None:
    """Make the tables of the newest revision in an empty database."""
    metadata.create_all(connection)
    version.create(connection)
    connection.execute(insert(version).values(version_num=REVISIONS[-1]))


def text_of(record: Record) -> str:
    """The stored form: canonical JSON without the origin. Its sha256 is the record's key."""
    data = canonical.to_dict(record)
    data["provenance"].pop("origin", None)
    return canonical.dict_to_text(data)


def row_of(record: Record) -> dict[str, Any]:
    """The row that keeps this record."""
    text = text_of(record)
    return {"key": _sha256(text), "format": FORMAT, "text": text, "origin": record.provenance.origin, **columns_of(record)}


def columns_of(record: Record) -> dict[str, Any]:
    """What queries filter and sort by; all of it follows from the text."""
    problem, device, measurement, provenance = record.problem, record.device, record.measurement, record.provenance
    candidate, resources = record.candidate, record.measurement.resources
    return {
        "status": measurement.status.value,
        "median_us": measurement.median_us,
        "problem_key": problem.key,
        "direction": problem.direction,
        "batch": problem.batch,
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "seqlen_q": problem.seqlen_q,
        "seqlen_kv": problem.seqlen_kv,
        "head_dim_qk": problem.head_dim_qk,
        "head_dim_v": problem.head_dim_v,
        "dtype": problem.dtype,
        "mask": problem.mask,
        "device_key": device.key,
        "arch": device.arch,
        "variant": candidate.variant.name if candidate else None,
        "config": str(candidate.config) if candidate else None,
        "candidate_key": candidate.key if candidate else None,
        "peer": record.peer.name if record.peer else None,
        "source_sha256": record.source_sha256,
        "registers": resources.registers if resources else None,
        "smem_bytes": resources.smem_bytes if resources else None,
        "triton": provenance.triton,
        "utc": provenance.utc,
    }


# The columns that decide which row is used: where they contradict the text, the row was tampered with. How names are spelled
# may change between versions of flashgen, so columns that only inform are left out.
DECISIVE = ("status", "median_us", "problem_key", "device_key", "candidate_key", "source_sha256", "registers", "smem_bytes", "utc")


def record_of(row: Row) -> Record:
    """The record that a row keeps. Raises ArgumentError with the reason, one of four, if the row is broken."""
    if row["format"] != FORMAT:
        raise ArgumentError("its format is unknown to this version of flashgen")
    record = undamaged(row["key"], row["text"], row["origin"])
    right = columns_of(record)
    if any(right[name] != row[name] for name in DECISIVE):
        raise ArgumentError("its columns contradict its text")
    return record


def undamaged(key: object, text: object, origin: object) -> Record:
    """The record of a stored form that is what its key says. Raises ArgumentError with the reason, one of two, if it is not."""
    if not isinstance(text, str) or _sha256(text) != key:
        raise ArgumentError("its text is damaged")
    try:
        return parsed(text, origin)
    except ArgumentError:
        raise ArgumentError("this version of flashgen cannot read it") from None


def parsed(text: str, origin: object) -> Record:
    """The record of a stored form, which may carry its format. Raises ArgumentError with the reason if it is none."""
    try:
        data = json.loads(text)
        if data.pop("format", FORMAT) != FORMAT:
            raise ArgumentError("its format is unknown to this version of flashgen")
        data["provenance"]["origin"] = origin
        return Record.from_dict(data)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ArgumentError(str(error) if isinstance(error, ArgumentError) else f"it is not a record: {error!r}") from None


def keep(connection: Connection, added: Iterable[Record]) -> int:
    """Insert these records, but for those already there. Gives how many were new.

    Each is read back from its stored form first, so that nothing unreadable is ever stored, and a time given as a whole number
    has one key with the same time given as a fraction. Raises ArgumentError.
    """
    rows = [row_of(Record.from_dict(canonical.to_dict(record))) for record in added]
    if not rows:
        return 0
    before = _changes(connection)
    connection.execute(sqlite.insert(records).on_conflict_do_nothing(), rows)
    return _changes(connection) - before


def fact(connection: Connection, name: str) -> str | None:
    """What the meta table says under this name."""
    return connection.execute(select(meta.c.value).where(meta.c.name == name)).scalar()


def set_fact(connection: Connection, name: str, value: str) -> None:
    """Write what the meta table says under this name."""
    connection.execute(sqlite.insert(meta).values(name=name, value=value).on_conflict_do_update(set_={"value": value}))


def _changes(connection: Connection) -> int:
    return int(connection.exec_driver_sql("SELECT total_changes()").scalar_one())


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()
