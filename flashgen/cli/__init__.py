"""The command line: one file a verb, or a few that belong together.

Nothing heavy is imported here: `flashgen --help` must come at once, and on machines without a GPU.
"""

from typing import Annotated

import typer

from flashgen import __version__
from flashgen.cli.command import command
from flashgen.cli.model import model

app = typer.Typer(
    name="flashgen",
    help="Finds, checks, keeps and launches the fastest attention kernel for your shapes and your GPU.",
    epilog="Start with: flashgen doctor",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

command(app, example="flashgen model --seqlen 8192 --head-dim 128 --heads 32 --device h100")(model)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashgen {__version__}")
        raise typer.Exit


@app.callback()
def main(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    pass
