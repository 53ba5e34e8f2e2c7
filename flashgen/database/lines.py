"""Records as text, one a line (JSONL): what is exported, imported, and shipped in tuning_db."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from flashgen import canonical, render
from flashgen.database import schema
from flashgen.errors import ArgumentError
from flashgen.record import Record


def line_of(record: Record) -> str:
    """One line of canonical JSON with the format number, without the origin and the line's end."""
    return canonical.dict_to_text({"format": schema.FORMAT, **json.loads(schema.text_of(record))})


def lines_of(records: Iterable[Record]) -> list[str]:
    """The lines of these records in order, each line once."""
    return list(dict.fromkeys(line_of(record) for record in in_order(records)))


def in_order(records: Iterable[Record]) -> list[Record]:
    """The records by device, problem, then time."""
    return sorted(records, key=_place)


def records_of(lines: Iterable[str], origin: str) -> Iterator[Record | str]:
    """For each line that is not blank its record, or a sentence that says where and why it is none."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield schema.parsed(line, origin)
            except ArgumentError as error:
                yield f"line {number}: {error}"


def compacted(record: Record) -> Record:
    """The record without its raw times and instruction counts: all that a winner's review, use and report need."""
    measurement = record.measurement
    resources = measurement.resources and replace(measurement.resources, instructions=None)
    return replace(record, measurement=replace(measurement, times_us=(), resources=resources))


def shipped_dir() -> Path | None:
    """The folder of winners that came with flashgen, or the one that FLASHGEN_TUNING_DB names; None where they were left out."""
    if folder := os.environ.get("FLASHGEN_TUNING_DB"):
        return Path(folder)
    try:
        return render.shipped_dir("tuning_db")
    except FileNotFoundError:
        return None


def shipped_signature() -> str:
    """Names and sha256 of the shipped files, as text."""
    return canonical.dict_to_text({path.name: _sha256(path) for path in _shipped_files()})


def shipped() -> list[Record]:
    """The shipped winners, but for lines that this version of flashgen cannot read."""
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in _shipped_files())
    entries = (entry for text in texts for entry in records_of(text.splitlines(), origin="shipped"))
    return [entry for entry in entries if isinstance(entry, Record)]


def _shipped_files() -> list[Path]:
    folder = shipped_dir()
    try:
        return sorted(path for path in folder.glob("*.jsonl") if os.access(path, os.R_OK)) if folder else []
    except OSError:  # a folder that may not be read is as good as none
        return []


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _place(record: Record) -> tuple[object, ...]:
    problem, measurement = record.problem, record.measurement
    return (
        record.device.key,
        problem.direction,
        problem.dtype,
        problem.head_dim_qk,
        problem.head_dim_v,
        problem.mask,
        problem.seqlen_q,
        problem.seqlen_kv,
        problem.batch,
        problem.heads_q,
        problem.heads_kv,
        problem.key,
        measurement.median_us is None,
        measurement.median_us or 0.0,
        record.key,
    )
