"""flashgen bench: what attention runs against SDPA's backends, measured in turn."""

import math
from collections.abc import Callable, Iterable
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
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Add the measurements to the database.")] = True,
) -> Answer:
    """Times what flashgen.attention runs, the default candidate and SDPA's backends in turn, on the GPU here.

    Comma lists bench several problems. Of a backward problem the backward pass alone is timed, everything that it launches.
    """
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ArgumentError(f"--seconds is {seconds}; it must be above 0")
    stated = problem.problems()
    part, rows = _gpu(), database.open()
    from flashgen import space
    from flashgen.bench import Bench
    from flashgen.dispatch.explanation import explained

    on_gpu = Bench()
    measured: list[Record] = []
    for each in stated:
        explanation = explained(each, part, rows.winners())
        if explanation.candidate is None:
            raise ArgumentError(f"there is nothing to measure: {each}")
        found = compare(each, part, (explanation.candidate, space.default(each, part)), on_gpu, seconds)
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


def compare(problem: Problem, device: Device, candidates: "Iterable[Candidate]", on_gpu: "Bench", seconds: float) -> "list[Record]":
    """Candidates, each checked first, and every peer that computes the problem, measured in turn: one row each.

    A candidate that is wrong is not measured; its row says so. Raises BuildError, LaunchError.
    """
    import torch

    from flashgen import cost
    from flashgen.bench import Policy, peer
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
    others = direction.peers(case)
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
        measurement = times[name].measurement(**state)
        rows.append(Record(problem=problem, device=device, peer=peer(name), measurement=measurement, provenance=where))
    return rows
