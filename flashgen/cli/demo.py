"""flashgen demo: the whole line once, on the GPU here, or by the model alone where there is none."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flashgen.cli.answer import Answer, console, say
from flashgen.cli.options import STAND_IN, DatabaseOptions
from flashgen.cli.tune import outcome_data
from flashgen.device import Device
from flashgen.errors import UnsupportedError
from flashgen.problem import Problem

# 16k tokens in all, as in the README's figures.
PROBLEM = Problem(batch=4, heads_q=16, heads_kv=16, seqlen_q=4096, seqlen_kv=4096, head_dim_qk=128, head_dim_v=128, mask="causal")


def demo(
    database: DatabaseOptions,
    seconds: Annotated[float, typer.Option(metavar="S", help="How long to search.")] = 75.0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("report/index.html"),
) -> Answer:
    """Tunes one kernel, compares it, calls it, checks it, and writes a report page; about two minutes.

    Without a GPU nothing is measured: candidates for an H200 are ranked by the model, compiled, and tried small in Triton's
    interpreter.
    """
    from flashgen.cli.progress import Live
    from flashgen.report.page import write
    from flashgen.report.tables import NOTHING_MEASURED, terminal
    from flashgen.search import Budget, Session

    try:
        part, measured = Device.current(), True
    except UnsupportedError as error:
        part, measured = Device.named(STAND_IN), False
        # The first line of all output, not to be missed; the work that follows takes a while.
        say(console(), NOTHING_MEASURED)
        say(console(), f"The target is the {part.name}, since {str(error).partition(';')[0]}.")
    rows = database.open()
    with Live(console(stderr=True)) as live, Session(part, rows) as session:
        outcome = session.tune(PROBLEM, budget=Budget(seconds=seconds), on_event=live.listen)
    # Without a GPU only what this run predicted: a winner that shipped was measured, and is not what is shown here.
    records = rows.records(PROBLEM, part) if measured else list(outcome.records)
    write(out, records)
    if database.database is not None:
        os.environ["FLASHGEN_DATABASE"] = str(database.database)  # which attention reads
    called = call(PROBLEM, "cuda") if measured else None

    def show(console: Console) -> None:
        terminal(records, console, warn=False)
        for note in outcome.notes:
            say(console, note)
        if called is not None:
            verdict = f"right, error {called['error']:.1e}, allowed {called['tolerance']:.1e}" if called["ok"] else called["message"]
            say(console, f"flashgen.attention(query, key, value, causal=True) ran the {called['how']} choice: {verdict}")
        say(console, f"Wrote {out}")

    data = {"measured": outcome.measured, "outcome": outcome_data(outcome), "attention": called, "report": str(out)}
    return Answer(data=data, show=show, code=1 if called is not None and not called["ok"] else 0)


def call(problem: Problem, place: str) -> dict[str, Any]:
    """What flashgen.attention gives for a causal problem on fresh inputs, held against the oracle."""
    import torch

    import flashgen
    from flashgen import check

    device = torch.device(place, torch.cuda.current_device()) if place == "cuda" else torch.device(place)
    case = check.prepare(problem, device, seed=1)
    out = flashgen.attention(case.query, case.key, case.value, causal=True)
    verdict = check.judge(out, None, case)
    how = flashgen.explain(case.query, case.key, case.value, causal=True).how
    return {"ok": verdict.ok, "error": verdict.error, "tolerance": verdict.tolerance, "message": verdict.message, "how": how}
