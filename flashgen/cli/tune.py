"""flashgen tune: searches for the fastest kernels, with live progress."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flashgen import canonical
from flashgen.cli.answer import Answer, console, notice, say
from flashgen.cli.options import DatabaseOptions, DeviceOptions, ProblemOptions

if TYPE_CHECKING:
    from flashgen.search.outcome import Outcome


def tune(
    problem: ProblemOptions,
    device: DeviceOptions,
    database: DatabaseOptions,
    trials: Annotated[int, typer.Option(metavar="N", help="Candidates to run for each problem, earlier searches included.")] = 32,
    seconds: Annotated[
        float | None, typer.Option(metavar="S", help="How long to search for each problem; no limit by default.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of inputs and of the search.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Measure again what earlier searches measured.")] = False,
) -> Answer:
    """Searches for the fastest kernel of a problem, and keeps every trial in the database.

    Comma lists tune every combination, so --direction forward,backward what training needs; what is in the database already is not
    measured again, so the same command goes on where it was stopped. Ctrl-C keeps what was found. With --device naming another GPU
    nothing is measured: the model's favourites are compiled, and stored as predicted.
    """
    from flashgen.cli.progress import Live
    from flashgen.search import Budget, Session

    stated, budget = problem.problems(), Budget(trials=trials, seconds=seconds)
    part, rows = device.get(), database.open()
    outcomes: list[Outcome] = []
    interrupted = False
    with Live(console(stderr=True), len(stated)) as live, Session(part, rows) as session:
        try:
            for each in stated:
                outcomes.append(session.tune(each, budget=budget, on_event=live.listen, seed=seed, force=force))
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        kept = sum(len(rows.records(each, part)) for each in stated)
        notice(f"interrupted; the database keeps {kept} rows of {len(stated)} problems, and the same command goes on from there")

    def show(console: Console) -> None:
        from flashgen.report import tables

        # Where a run could only predict, measured rows came from elsewhere, and are not what is shown.
        predicted = [record for outcome in outcomes if not outcome.measured for record in outcome.records]
        shown = predicted or [record for each in stated for record in rows.records(each, part)]
        tables.terminal(shown, console)
        for note in dict.fromkeys(note for outcome in outcomes for note in outcome.notes):
            say(console, note)

    return Answer(data=[outcome_data(outcome) for outcome in outcomes], show=show, code=130 if interrupted else 0)


def outcome_data(outcome: "Outcome") -> dict[str, Any]:
    """An outcome in plain JSON types."""
    return {
        "problem": canonical.to_dict(outcome.problem),
        "device": outcome.device.name,
        "measured": outcome.measured,
        "winner": canonical.to_dict(outcome.winner),
        "default": None if outcome.default is None else canonical.to_dict(outcome.default),
        "peers": [canonical.to_dict(record) for record in outcome.peers],
        "speedup": outcome.speedup,
        "trials": outcome.trials,
        "skipped": outcome.skipped,
        "seconds": outcome.seconds,
        "reason": outcome.reason,
        "notes": list(outcome.notes),
    }
