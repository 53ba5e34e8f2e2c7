"""flashgen demo: the whole line once, on the GPU here, or by the model alone where there is none."""

import os
from dataclasses import replace
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
BACKWARD = replace(PROBLEM, direction="backward")


def demo(
    database: DatabaseOptions,
    seconds: Annotated[float, typer.Option(metavar="S", help="How long to search, in all.")] = 75.0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("report/index.html"),
) -> Answer:
    """Tunes a kernel and that of its gradients, compares them, calls them, checks them, and writes a report page; about two minutes.

    Without a GPU nothing is measured, and gradients are left out: candidates for an H200 are ranked by the model, compiled, and tried
    small in Triton's interpreter.
    """
    from flashgen.cli.progress import Live
    from flashgen.report.files import write
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
    problems = (PROBLEM, BACKWARD) if measured else (PROBLEM,)
    budget = Budget(seconds=seconds / len(problems))
    with Live(console(stderr=True), len(problems)) as live, Session(part, rows) as session:
        outcomes = [session.tune(each, budget=budget, on_event=live.listen) for each in problems]
    # Without a GPU only what this run predicted: a winner that shipped was measured, and is not what is shown here.
    records = [record for each in outcomes for record in (rows.records(each.problem, part) if measured else each.records)]
    write(out, records)
    if database.database is not None:
        os.environ["FLASHGEN_DATABASE"] = str(database.database)  # which attention reads
    calls = {each.direction: call(each, "cuda") for each in problems} if measured else {}

    def show(console: Console) -> None:
        for outcome in outcomes:
            terminal([record for record in records if record.problem == outcome.problem], console, warn=False)
        for note in dict.fromkeys(note for outcome in outcomes for note in outcome.notes):
            say(console, note)
        for direction, called in calls.items():
            verdict = f"right, error {called['error']:.1e}, allowed {called['tolerance']:.1e}" if called["ok"] else called["message"]
            say(console, f"{_CALLS[direction]} ran the {called['how']} choice: {verdict}")
        say(console, f"Wrote {out}")

    forward, *others = outcomes
    data = {
        "measured": forward.measured,
        "outcome": outcome_data(forward),
        "attention": calls.get("forward"),
        "backward": {"outcome": outcome_data(others[0]), "attention": calls["backward"]} if others else None,
        "report": str(out),
    }
    return Answer(data=data, show=show, code=0 if all(called["ok"] for called in calls.values()) else 1)


_CALLS = {
    "forward": "flashgen.attention(query, key, value, causal=True)",
    "backward": "flashgen.attention(query, key, value, causal=True).backward(dout)",
}


def call(problem: Problem, place: str) -> dict[str, Any]:
    """What flashgen.attention gives for a causal problem on fresh inputs, or its gradients, held against the oracle."""
    import torch

    import flashgen
    from flashgen import check

    device = torch.device(place, torch.cuda.current_device()) if place == "cuda" else torch.device(place)
    if problem.direction == "forward":
        case = check.prepare(problem, device, seed=1)
        out = flashgen.attention(case.query, case.key, case.value, causal=True)
        verdict = check.judge(out, None, case)
        how = flashgen.explain(case.query, case.key, case.value, causal=True).how
    else:
        given = check.prepare_backward(problem, device, seed=1)
        query, key, value = leaves = [tensor.requires_grad_() for tensor in given.given[:3]]
        out = flashgen.attention(query, key, value, causal=True)
        dq, dk, dv = torch.autograd.grad(out, leaves, given.given.dout)
        verdict = check.judge_backward(dq, dk, dv, given)
        how = flashgen.explain(problem, device=None if place == "cuda" else "h200").how
    return {"ok": verdict.ok, "error": verdict.error, "tolerance": verdict.tolerance, "message": verdict.message, "how": how}
