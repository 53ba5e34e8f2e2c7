"""How every command is made: options from dataclasses, an answer as text or JSON, and errors as one line.

A command is a function that returns an Answer. A parameter whose type is a dataclass stands for an option per field, so that
what a problem is made of is written once (options.py) and each command takes it whole.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from flashgen.errors import ArgumentError, ArgumentTypeError, FlashgenError, IllegalCandidateError, UnsupportedError

if typing.TYPE_CHECKING:
    from rich.console import Console

USAGE_ERRORS = (ArgumentError, ArgumentTypeError, IllegalCandidateError, UnsupportedError)  # exit code 2; other failures 1

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command has to say: data for --json, how to show it to a person, and the exit code."""

    data: Any
    show: Callable[["Console"], None]
    code: int = 0


def command(app: typer.Typer, *, example: str, name: str | None = None) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Registers a function as a command of app, with its docstring and the example as help."""

    def register(function: Callable[..., Answer]) -> Callable[..., Answer]:
        groups, parameters = _parameters(function)

        @functools.wraps(function)
        def run(*, as_json: bool, **values: Any) -> None:
            with _errors_as_one_line():
                for each, group in groups.items():
                    values[each] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
                with _stdout_to_stderr() if as_json else contextlib.nullcontext():
                    answer = function(**values)
                if as_json:
                    typer.echo(json.dumps(answer.data, indent=2, allow_nan=False))
                else:
                    answer.show(console())
            if answer.code:
                raise typer.Exit(answer.code)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        paragraphs = inspect.getdoc(function) or ""
        help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs.split("\n\n"))
        app.command(name=name or function.__name__, help=help, epilog=f"Example: {example}")(run)
        return function

    return register


def console(*, stderr: bool = False) -> "Console":
    """Where text for people goes; stderr for progress and notices. Piped output is not cut to 80 columns."""
    from rich.console import Console

    made = Console(stderr=stderr)
    return made if made.is_terminal or "COLUMNS" in os.environ else Console(stderr=stderr, width=160)


def say(console: "Console", text: str) -> None:
    """A line as it is: no markup, no colours for numbers, not wrapped."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def notice(text: str) -> None:
    """One line on stderr."""
    say(console(stderr=True), text)


def _parameters(function: Callable[..., Answer]) -> tuple[dict[str, type[Any]], list[inspect.Parameter]]:
    """The function's dataclass parameters by name, and its parameters with those replaced by their fields, then --json."""
    hints = typing.get_type_hints(function, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if dataclasses.is_dataclass(hint):
            group = typing.cast(type[Any], hint)
            groups[parameter.name] = group
            fields = typing.get_type_hints(group, include_extras=True)
            parameters += [_option(field.name, fields[field.name], field.default) for field in dataclasses.fields(group)]
        else:
            parameters.append(_option(parameter.name, hint, parameter.default))
    return groups, [*parameters, _option("as_json", Json, False)]


def _option(name: str, hint: Any, default: Any) -> inspect.Parameter:
    missing = (inspect.Parameter.empty, dataclasses.MISSING)
    given = inspect.Parameter.empty if any(default is each for each in missing) else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=given, annotation=hint)


@contextlib.contextmanager
def _errors_as_one_line() -> Iterator[None]:
    try:
        yield
    except FlashgenError as error:
        _complain(str(error))
        raise typer.Exit(2 if isinstance(error, USAGE_ERRORS) else 1) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader left; nothing more can be said on stdout
        raise typer.Exit(1) from None
    except OSError as error:
        _complain(str(error))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        _complain("interrupted")
        raise typer.Exit(130) from None


def _complain(message: str) -> None:
    typer.echo(f"flashgen: {' '.join(message.split())}", err=True)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Whatever is printed meanwhile, by libraries, compilers and child processes too, goes to stderr."""
    sys.stdout.flush()
    with contextlib.redirect_stdout(sys.stderr):
        kept = os.dup(1)
        os.dup2(2, 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
