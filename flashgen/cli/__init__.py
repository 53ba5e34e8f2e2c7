"""The command line: one command a verb.

    answer   how every command is made: options from dataclasses, an answer as text or JSON, errors as one line
    options  from options to Problem, Device and Database
    the others hold the verbs

Nothing heavy is imported here: `flashgen --help` must come at once, and on machines without a GPU.
"""

from typing import Annotated, Any

import typer

from flashgen import __version__
from flashgen.cli import bench, counters, db, demo, doctor, kernels, model, results, tune, workshop
from flashgen.cli.answer import command

_settings: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(
    name="flashgen",
    help="Finds, checks, keeps and launches the fastest attention kernel for your shapes and your GPU.",
    epilog="Start with: flashgen doctor",
    **_settings,
)
database = typer.Typer(help="Rows out of the database, into it, and away.", epilog="Example: flashgen db path", **_settings)

PROBLEM = "--seqlen 4096 --head-dim 128 --heads 16 --causal"
command(app, example="flashgen model --seqlen 8192 --head-dim 128 --heads 32 --device h100")(model.model)
command(app, example="flashgen workshop --open")(workshop.workshop)
command(app, example=f"flashgen tune {PROBLEM} --trials 32 --seconds 60")(tune.tune)
command(app, example=f"flashgen generate {PROBLEM} --device h200 --out kernel --emit source,ptx")(kernels.generate)
command(app, example=f"flashgen explain {PROBLEM}")(kernels.explain)
command(app, example="flashgen winners --device h200 --head-dim 128")(results.winners)
command(app, example="flashgen report --out report/index.html")(results.report)
command(app, example=f"flashgen bench {PROBLEM}")(bench.bench)
command(app, example=f"flashgen counters {PROBLEM} --direction forward,backward")(counters.counters)
command(app, example="flashgen doctor")(doctor.doctor)
command(app, example="flashgen demo --out report/index.html")(demo.demo)
app.add_typer(database, name="db")
command(database, example="flashgen db export winners.jsonl --winners --compact")(db.export)
command(database, example="flashgen db import winners.jsonl", name="import")(db.import_)
command(database, example="flashgen db merge other.sqlite")(db.merge)
command(database, example="flashgen db prune --status timeout,crashed --older-than 30 --dry-run")(db.prune)
command(database, example="flashgen db path")(db.path)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashgen {__version__}")
        raise typer.Exit


@app.callback()
def main(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    pass
