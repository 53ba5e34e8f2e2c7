"""flashgen explain and flashgen generate: which kernel a problem gets, and its source."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flashgen import canonical
from flashgen.cli.answer import Answer, say
from flashgen.cli.options import DatabaseOptions, DeviceOptions, ProblemOptions
from flashgen.errors import ArgumentError, UnsupportedError

EMIT = ("source", "ttgir", "ptx", "sass")
MOST_INSTRUCTIONS = 12  # kinds that are shown


def explain(problem: ProblemOptions, device: DeviceOptions, database: DatabaseOptions) -> Answer:
    """Which kernel flashgen.attention runs for a problem, forward or backward, from which row of the database, and why."""
    from flashgen.dispatch.explanation import explained

    explanation = explained(problem.problem(), device.get_or_stand_in(), database.open_existing().winners())

    def show(console: Console) -> None:
        say(console, str(explanation))

    return Answer(data=explanation.to_dict(), show=show)


def generate(
    problem: ProblemOptions,
    device: DeviceOptions,
    database: DatabaseOptions,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write to.", show_default=False)],
    emit: Annotated[
        str, typer.Option(metavar="KIND[,...]", help=f"{', '.join(EMIT)}; all but source are compiled for the device.")
    ] = "source",
    variant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only the module of this variant, which serves every problem and size.", show_default=False),
    ] = None,
) -> Answer:
    """Writes the kernel that explain names as a module with its launcher, which need torch and triton but not flashgen."""
    if variant is not None:
        if problem != ProblemOptions() or emit != "source":
            raise ArgumentError("--variant names a module that holds no numbers; it goes with --out alone")
        return _variant(variant, out)
    from flashgen.build import build, export, sass_mix
    from flashgen.dispatch.explanation import explained

    kinds = tuple(dict.fromkeys(word.strip() for word in emit.split(",")))
    for kind in kinds:
        if kind not in EMIT:
            raise ArgumentError(f"--emit is {kind!r}; it must be among {', '.join(EMIT)}")
    stated, part = problem.problem(), device.get_or_stand_in()
    explanation = explained(stated, part, database.open_existing().winners())
    if explanation.candidate is None:
        raise ArgumentError("this problem has no queries or no keys, so there is no kernel to generate")
    if stated.direction != "forward":
        name = explanation.candidate.variant.name
        raise UnsupportedError(f"launchers are written for forward kernels only; --variant {name} alone writes the module of this one")
    files = export(explanation.candidate, stated, part, out, emit=kinds)
    kernel = build(explanation.candidate, stated, part)  # a look-up, after the export
    resources = None if kernel.compiled is None else kernel.resources
    instructions = sass_mix(kernel) if "sass" in kinds else {}

    def show(console: Console) -> None:
        say(console, f"{explanation.candidate} ({explanation.how})")
        if resources is not None:
            say(console, f"{resources.registers} registers, {resources.spill_bytes} bytes spilled, {resources.smem_bytes} of shared memory")
        if instructions:
            say(console, "instructions: " + ", ".join(f"{count} {name}" for name, count in list(instructions.items())[:MOST_INSTRUCTIONS]))
        for file in files:
            say(console, f"  {file}")

    data = {
        "problem": canonical.to_dict(stated),
        "device": part.name,
        "candidate": canonical.to_dict(explanation.candidate),
        "how": explanation.how,
        "resources": None if resources is None else canonical.to_dict(resources),
        "instructions": instructions,
        "files": [str(file) for file in files],
    }
    return Answer(data=data, show=show)


def _variant(name: str, out: Path) -> Answer:
    """Writes the generated module of a variant."""
    from flashgen.candidate import Variant
    from flashgen.render import render

    source = render(Variant.named(name))
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{name}.py"
    file.write_text(source.text)
    data = {"variant": canonical.to_dict(source.variant), "source_sha256": source.sha256, "files": [str(file)]}
    return Answer(data=data, show=lambda console: say(console, str(file)))
