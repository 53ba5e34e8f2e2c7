"""flashgen counters: what the GPU's counters say of kernels, beside what the model predicted."""

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flashgen import canonical
from flashgen.candidate import CHOICES, Candidate
from flashgen.cli.answer import Answer, notice, say
from flashgen.cli.options import DatabaseOptions, ProblemOptions
from flashgen.device import Device
from flashgen.errors import ArgumentError, BuildError, LaunchError, UnsupportedError
from flashgen.problem import Problem

if TYPE_CHECKING:
    from flashgen.counters import Comparison, Counted
    from flashgen.database import Database
    from flashgen.record import Record

BACKENDS = CHOICES["backend"]


def counters(
    problem: ProblemOptions,
    database: DatabaseOptions,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help=f"{', '.join(BACKENDS)}: the best known kernel of each; by default the one that attention runs.",
            show_default=False,
        ),
    ] = None,
    candidate: Annotated[
        str | None, typer.Option(metavar="JSON", help="This candidate instead, as explain --json prints one.", show_default=False)
    ] = None,
    cache: Annotated[
        str, typer.Option(metavar="STATE", help="cold: caches are emptied before each function; warm: they are not.")
    ] = "cold",
    force: Annotated[bool, typer.Option("--force", help="Count again what was counted.")] = False,
) -> Answer:
    """Runs kernels under Nsight Compute (ncu), and keeps what the GPU counted: traffic, utilisation, occupancy, stalls, clock and time.

    Comma lists count every combination. What was counted is in the database and is not counted again, so the same command goes on where
    it was stopped. Ctrl-C keeps what was counted. The GPU's clocks are left alone.
    """
    from flashgen.counters import CACHES, Ncu, compare, medians

    if cache not in CACHES:
        raise ArgumentError(f"--cache is {cache!r}; it must be one of {', '.join(CACHES)}")
    stated, part, rows = problem.problems(), _gpu(), database.open()
    wanted = list(dict.fromkeys(_wanted(stated, part, rows, backend, candidate)))
    counted = {each: None if force else _stored(each, part, rows, cache) for each in wanted}
    left = [each for each, row in counted.items() if row is None]
    failed: dict[Wanted, str] = {}
    interrupted = False
    if left:
        ncu = Ncu.find()
        try:
            _compile(left, part)
            for number, each in enumerate(left, start=1):
                began = time.monotonic()
                try:
                    row = _record(each, part, ncu.count(each.candidate, each.problem, part, cache=cache))
                except (BuildError, LaunchError) as error:
                    failed[each] = str(error)
                else:
                    rows.add(row)
                    counted[each] = row
                outcome = failed.get(each, f"counted in {time.monotonic() - began:.0f} s")
                notice(f"[{number}/{len(left)}] {each.problem}: {each.candidate}: {outcome}")
        except KeyboardInterrupt:
            interrupted = True
            notice("interrupted; the database keeps what was counted, and the same command goes on from there")
    found = [compare(row) for row in counted.values() if row is not None]
    summary = medians(found)

    def show(console: Console) -> None:
        from flashgen.report import counters as tables

        tables.show(found, summary, console)
        for each, message in failed.items():
            say(console, f"Not counted: {each.problem}: {message}")

    data = {
        "counted": [_data(each) for each in found],
        "medians": dataclasses.asdict(summary),
        "failed": [{"problem": canonical.to_dict(each.problem), "message": message} for each, message in failed.items()],
    }
    return Answer(data=data, show=show, code=130 if interrupted else 1 if failed else 0)


@dataclass(frozen=True)
class Wanted:
    """What is to be counted."""

    problem: Problem
    candidate: Candidate


def _gpu() -> Device:
    try:
        return Device.current()
    except UnsupportedError:
        raise UnsupportedError("counters are those of the GPU here, and there is none that flashgen supports") from None


def _wanted(stated: Sequence[Problem], part: Device, rows: "Database", backend: str | None, candidate: str | None) -> Iterator[Wanted]:
    """Of each problem the candidate that is named, or that attention would choose, among all or among those of each backend."""
    from flashgen import space
    from flashgen.dispatch.explanation import explained

    names = [None] if backend is None else list(dict.fromkeys(word.strip() for word in backend.split(",")))
    for name in names:
        if name is not None and name not in BACKENDS:
            raise ArgumentError(f"--backend is {name!r}; it must be among {', '.join(BACKENDS)}")
    named = None if candidate is None else _candidate(candidate)
    if named is not None and (backend is not None or len(stated) > 1):
        raise ArgumentError("--candidate names one kernel; it goes with one problem, and without --backend")
    winners = rows.winners()
    for each in stated:
        if named is not None:
            if problems := space.violations(named, each, part):
                raise ArgumentError(f"--candidate is illegal for {each} on {part.name}: {'; '.join(problems)}")
            yield Wanted(each, named)
            continue
        for name in names:
            own = [row for row in rows.ranked(each, part) if _is_of(row, name)][:1]
            others = [row for row in winners if _is_of(row, name) and row.problem != each]
            choice = explained(each, part, [*own, *others], portable=name == "triton").candidate
            if choice is None:
                raise ArgumentError(f"there is nothing to count: {each}")
            if name in (None, choice.variant.backend):
                yield Wanted(each, choice)
            else:
                notice(f"{each}: no {name} kernel computes it on {part.name}")


def _is_of(row: "Record", backend: str | None) -> bool:
    return backend is None or (row.candidate is not None and row.candidate.variant.backend == backend)


def _candidate(text: str) -> Candidate:
    try:
        return Candidate.from_dict(json.loads(text))
    except ValueError as error:  # ArgumentError is one, too
        raise ArgumentError(f"--candidate is not what explain --json prints as candidate: {error}") from None


def _stored(wanted: Wanted, part: Device, rows: "Database", cache: str) -> "Record | None":
    """The newest row that was counted with today's source."""
    from flashgen.record import Status
    from flashgen.render import render

    source = render(wanted.candidate.variant).sha256
    for row in reversed(rows.records(wanted.problem, part, Status.COUNTED)):
        counted = row.measurement.counters
        if row.candidate == wanted.candidate and row.source_sha256 == source and counted is not None and counted.cache == cache:
            return row
    return None


def _compile(left: Sequence[Wanted], part: Device) -> None:
    """Fills Triton's cache on all cores: one by one under ncu it would take far longer. What does not compile is said there."""
    from flashgen.build import CompilePool

    notice(f"compiling {len(left)} kernels")
    with CompilePool() as pool:
        for each in left:
            pool.submit(each.candidate, each.problem, part)
        for _ in pool.results():
            pass


def _record(wanted: Wanted, part: Device, counted: "Counted") -> "Record":
    from flashgen import cost
    from flashgen.record import Measurement, Record, Status
    from flashgen.render import render
    from flashgen.search import provenance

    return Record(
        problem=wanted.problem,
        device=part,
        candidate=wanted.candidate,
        estimate=cost.estimate(wanted.candidate, wanted.problem, part, counted.resources),
        measurement=Measurement(
            status=Status.COUNTED,
            resources=counted.resources,
            counters=counted.counters,
            sm_clock_mhz=counted.counters.mean("sm_clock_mhz"),
        ),
        source_sha256=render(wanted.candidate.variant).sha256,
        provenance=provenance.now(replace(provenance.here(), gpu=counted.gpu)),
    )


def _data(comparison: "Comparison") -> dict[str, Any]:
    from flashgen import theory
    from flashgen.counters.comparison import paper_bytes

    record, estimate, counted = comparison.record, comparison.estimate, comparison.counters
    return {
        "record": canonical.to_dict(record),
        "time_us": {"predicted": estimate.time_s * 1e6, "counted": counted.time_us, "ratio": comparison.time_ratio},
        "dram_bytes": {
            "predicted": estimate.dram_bytes,
            "counted": counted.dram_bytes,
            "ratio": comparison.dram_ratio,
            "compulsory": theory.compulsory_bytes(record.problem),
            "paper": paper_bytes(record.problem, record.device),
        },
        "l2_bytes": {"predicted": estimate.l2_bytes, "counted": counted.l2_bytes, "ratio": comparison.l2_ratio},
    }
