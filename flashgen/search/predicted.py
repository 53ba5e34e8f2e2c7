"""Predicted mode: what can be said of a problem on a device that is not here. Nothing is measured."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from flashgen import cost, space
from flashgen.build import CompilePool
from flashgen.candidate import Candidate
from flashgen.database import Database
from flashgen.device import Device
from flashgen.errors import ArgumentError, BuildError, NoWinnerError
from flashgen.problem import Problem
from flashgen.record import Measurement, Record, Status
from flashgen.search import numerics
from flashgen.search.ledger import Ledger
from flashgen.search.loop import Compiler, build_status
from flashgen.search.outcome import Budget, Ended, Listener, Outcome, Staged, Started, Tried
from flashgen.search.proposals import Landscape, Proposals

log = logging.getLogger(__name__)

Numerics = Callable[[Sequence[Candidate], Problem, Device], dict[Candidate, str]]

MOST_FAILURES = 3.0  # candidates that are compiled for each one wanted, where some do not compile


def predict(
    problem: Problem,
    device: Device,
    database: Database,
    *,
    top: int = 8,
    seed: int = 0,
    on_event: Listener = lambda event: None,
    compiler: Compiler | None = None,
    check: Numerics | None = numerics.check_numerics,
) -> Outcome:
    """The model's favourites for a device that need not be here, compiled for it, their numerics checked in Triton's interpreter.

    top candidates are compiled: the default, and those that promise most while differing from one another. The winner is the one
    with the best estimate after registers, spills and shared memory are known, and its row is PREDICTED, as all are.
    Raises NoWinnerError if none compiles and is right.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ArgumentError(f"top is {top!r}; it must be a whole number of at least 1")
    if compiler is None:
        with CompilePool() as pool:
            return predict(problem, device, database, top=top, seed=seed, on_event=on_event, compiler=pool, check=check)
    began = time.monotonic()
    space.require_supported(problem, device)
    candidates = space.candidates(problem, device)
    default = space.default(problem, device)
    estimates = {candidate: cost.estimate(candidate, problem, device) for candidate in candidates}
    on_event(Started(problem=problem, device=device, legal=len(candidates), known=0, budget=Budget(trials=top)))
    on_event(Staged(stage="predicting", message=f"nothing is measured: {device.name} is not here"))
    proposals = Proposals(Landscape(candidates, list(estimates.values())), seed)
    proposals.enqueue(default, "default")
    ledger = Ledger(problem, device, database)
    rows: dict[Candidate, Record] = {}
    asked = 0
    while (wanted := top - sum(row.measurement.status is Status.PREDICTED for row in rows.values())) > 0 and asked < MOST_FAILURES * top:
        batch = [proposal for _ in range(wanted) if (proposal := proposals.ask()) is not None]
        if not batch:
            break
        asked += len(batch)
        sources = {proposal.candidate: proposal for proposal in batch}
        for candidate in sources:
            compiler.submit(candidate, problem, device)
        for candidate, result in compiler.results():
            if candidate not in sources:
                continue
            if isinstance(result, BuildError):
                measurement = Measurement(status=build_status(result), message=str(result))
                proposals.tell(sources[candidate], None)
            else:
                estimates[candidate] = cost.estimate(candidate, problem, device, result)
                measurement = Measurement(status=Status.PREDICTED, resources=result, message="compiled, never run on the device")
            rows[candidate] = ledger.record(candidate, measurement, estimates[candidate])
            best = _best(rows)
            on_event(
                Tried(
                    record=rows[candidate],
                    source=sources[candidate].source if sources[candidate].source == "default" else "predicted",
                    trials=len(rows),
                    of_trials=top,
                    compiled=len(rows),
                    best_us=None,
                    best=None if best is None else best.candidate,
                    default_us=None,
                    elapsed_s=time.monotonic() - began,
                    remaining_s=None,
                )
            )
    notes = [f"Nothing was measured: every time is the model's guess for {device.name}."]
    if check is not None:
        ranked = sorted(
            (candidate for candidate, row in rows.items() if row.measurement.status is Status.PREDICTED),
            key=lambda candidate: estimates[candidate].time_s,
        )
        on_event(Staged(stage="checking", message=f"numerics in Triton's interpreter, on {numerics.sibling(problem)}"))
        verdicts, note = _verdicts(check, ranked, problem, device)
        notes.append(note)
        for candidate, verdict in verdicts.items():
            same = [other for other in ranked if other.variant == candidate.variant]
            for other in same if verdict else []:
                message = f"in Triton's interpreter, on a small sibling: {verdict}"
                wrong = Measurement(status=Status.WRONG_RESULT, resources=rows[other].measurement.resources, message=message)
                rows[other] = replace(rows[other], measurement=wrong)
    if problem.dtype == "bfloat16":
        notes.append("bfloat16 was not checked at all: Triton's interpreter computes its products wrongly.")
    database.add(rows.values())
    best = _best(rows)
    if best is None:
        reasons = "; ".join(sorted({row.measurement.message for row in rows.values()})[:5])
        raise NoWinnerError(f"no candidate compiles and is right for {problem} on {device.name}: {reasons}")
    outcome = Outcome(
        problem=problem,
        device=device,
        winner=best,
        default=rows.get(default),
        records=tuple(rows.values()),
        peers=(),
        measured=False,
        trials=0,
        skipped=0,
        seconds=time.monotonic() - began,
        reason=f"{len(rows)} of {len(candidates)} legal candidates were compiled",
        notes=tuple(notes),
    )
    on_event(Ended(outcome=outcome))
    return outcome


def _verdicts(check: Numerics, ranked: Sequence[Candidate], problem: Problem, device: Device) -> tuple[dict[Candidate, str], str]:
    """What is wrong with candidates ("" where nothing is), and a sentence on what was checked."""
    interpretable = [candidate for candidate in ranked if candidate.variant.backend == "triton"]
    if not interpretable:
        return {}, "Numerics were not checked: hopper kernels have no interpreter."
    try:
        verdicts = check(interpretable, problem, device)
    except RuntimeError as error:
        return {}, f"Numerics were not checked: {error}."
    wrong = sum(bool(verdict) for verdict in verdicts.values())
    checked = f"Kernels checked in Triton's interpreter on {numerics.sibling(problem)}: {len(verdicts)}"
    others = ", hopper kernels not at all" if len(interpretable) < len(ranked) else ""
    return verdicts, f"{checked}{others}, {wrong} of them wrong." if wrong else f"{checked}{others}, all right."


def _best(rows: dict[Candidate, Record]) -> Record | None:
    predicted = [row for row in rows.values() if row.measurement.status is Status.PREDICTED]
    return min(predicted, key=lambda row: row.estimate.time_s if row.estimate else math.inf, default=None)
