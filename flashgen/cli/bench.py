"""flashgen bench: what attention runs against SDPA's backends and other libraries, measured in turn."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flashgen import canonical
from flashgen.cli.answer import Answer
from flashgen.cli.options import DatabaseOptions, ProblemOptions
from flashgen.device import Device
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.problem import Problem

if TYPE_CHECKING:
    from flashgen.bench import Bench
    from flashgen.candidate import Candidate
    from flashgen.record import Record


def bench(
    problem: ProblemOptions,
    database: DatabaseOptions,
    seconds: Annotated[float, typer.Option(metavar="S", help="How long to measure each problem.")] = 2.0,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="fa4 (FlashAttention-4), flex (FlexAttention): these, too. They compile first, for up to a minute.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Add the measurements to the database.")] = True,
) -> Answer:
    """Times what flashgen.attention runs, the default candidate, SDPA's backends and named peers in turn, on the GPU here.

    Comma lists bench several problems. Of a backward problem the backward pass alone is timed, everything that it launches.
    """
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ArgumentError(f"--seconds is {seconds}; it must be above 0")
    stated = problem.problems()
    named = [] if peers is None else [word.strip() for word in peers.split(",")]
    from flashgen import space
    from flashgen.bench import Bench, require_libraries
    from flashgen.dispatch.explanation import explained

    require_libraries(named, "--peers")
    part, rows = _gpu(), database.open()
    on_gpu = Bench()
    measured: list[Record] = []
    for each in stated:
        explanation = explained(each, part, rows.winners())
        if explanation.candidate is None:
            raise ArgumentError(f"there is nothing to measure: {each}")
        found = compare(each, part, (explanation.candidate, space.default(each, part)), on_gpu, seconds, named)
        measured += found
        if keep:
            rows.add(found)

    def show(console: Console) -> None:
        from flashgen.report import tables

        tables.terminal(measured, console)

    return Answer(data=[canonical.to_dict(record) for record in measured], show=show)


def _gpu() -> Device:
    try:
        return Device.current()
    except UnsupportedError:
        raise UnsupportedError("bench measures on the GPU here, and there is none that flashgen supports") from None


def compare(
    problem: Problem,
    device: Device,
    candidates: "Iterable[Candidate]",
    on_gpu: "Bench",
    seconds: float,
    named: Sequence[str] = (),
) -> "list[Record]":
    """Candidates, each checked first, SDPA's backends that compute the problem, and other peers by name, measured in turn: one row each.

    A candidate that is wrong is not measured; its row says so. Raises BuildError, LaunchError, and what `bench.libraries` raises.
    """
    import torch

    from flashgen import cost
    from flashgen.bench import Policy, library, peer
    from flashgen.record import Measurement, Record, Status
    from flashgen.search import provenance
    from flashgen.search.directions import direction_of

    place = on_gpu.device or torch.device("cpu")  # with a stand-in for the GPU, kernels are interpreted
    direction = direction_of(problem)
    case = direction.prepare(problem, place, 0)
    calls: dict[str, Callable[[], object]] = {}
    kernels, checks = {}, {}
    for name, candidate in {str(candidate): candidate for candidate in candidates}.items():
        launch = direction.bind(candidate, case, device)
        kernels[name] = launch.kernel
        checks[name] = direction.check(launch, case)
        if checks[name].ok:
            calls[name] = case.bind(launch)
    others = direction.peers(case, named)
    times = on_gpu.compare({**calls, **others}, policy=Policy(seconds=seconds))
    now = on_gpu.conditions()
    state: dict[str, Any] = dict(sm_clock_mhz=now.sm_clock_mhz, power_w=now.power_w)
    where = replace(provenance.now(provenance.here()), gpu=torch.cuda.get_device_name(place) if place.type == "cuda" else "")
    rows = []
    for name, kernel in kernels.items():
        resources = None if kernel.interpreted else kernel.resources
        verdict = checks[name]
        seen = dict(error=verdict.error, tolerance=verdict.tolerance, resources=resources, message=verdict.message, **state)
        measurement = times[name].measurement(**seen) if name in times else Measurement(status=Status.WRONG_RESULT, **seen)
        rows.append(
            Record(
                problem=problem,
                device=device,
                candidate=kernel.candidate,
                estimate=cost.estimate(kernel.candidate, problem, device, resources),
                measurement=measurement,
                source_sha256=kernel.source.sha256,
                provenance=where,
            )
        )
    for name in others:
        other = library(name) if name in named else peer(name)
        rows.append(Record(problem=problem, device=device, peer=other, measurement=times[name].measurement(**state), provenance=where))
    return rows
