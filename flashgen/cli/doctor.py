"""flashgen doctor: what is installed, which device and database, and what to do next."""

import contextlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flashgen.cli.answer import Answer, say
from flashgen.cli.options import DatabaseOptions
from flashgen.device import Device
from flashgen.errors import DatabaseError, UnsupportedError

PACKAGES = ("torch", "triton", "numpy", "jinja2", "optuna", "sqlalchemy", "alembic", "typer", "rich", "platformdirs", "plotly")
TUNE = "flashgen tune --seqlen 4096 --head-dim 128 --heads 16 --causal"


def doctor(
    database: DatabaseOptions,
    clear_cache: Annotated[bool, typer.Option("--clear-cache", help="Delete generated modules first.")] = False,
) -> Answer:
    """What is installed, which device, which database, how large the caches are, and what to do next."""
    cleared = _clear_cache() if clear_cache else None
    packages, device, rows, cache = _packages(), _device(), _database(database), _cache()
    advice = list(_advice(packages, device, rows))
    data = {
        "python": platform.python_version(),
        "packages": packages,
        "gluon": _has_gluon(),
        "device": device,
        "database": rows,
        "cache": cache,
        "cleared_bytes": cleared,
        "next": advice,
    }
    return Answer(data=data, show=lambda console: _show(data, console))


def _packages() -> dict[str, dict[str, Any]]:
    """Version, what flashgen needs, and whether that fits (None: not known), of each package."""
    needs = _requirements()
    found: dict[str, dict[str, Any]] = {}
    for name in PACKAGES:
        version, need = None, needs.get(name)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
        supported = None if need is None else version is not None and need.contains(version, prereleases=True)
        found[name] = {"version": version, "needs": None if need is None else str(need), "supported": supported}
    return found


def _requirements() -> dict[str, Any]:
    """Version specifiers from flashgen's own metadata, by package; empty if flashgen is not installed."""
    from packaging.requirements import Requirement  # Optuna brings it

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        requirements = [Requirement(text) for text in importlib.metadata.requires("flashgen") or ()]
        chosen = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": "interpreter"})]
        return {each.name: each.specifier for each in chosen}
    return {}


def _has_gluon() -> bool:
    """Whether Triton's lower-level language, which Hopper kernels are written in, is there."""
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec("triton.experimental.gluon") is not None
    return False


def _device() -> dict[str, Any]:
    import torch

    try:
        part = Device.current()
    except UnsupportedError as error:
        return {"name": None, "reason": str(error), "cuda": torch.version.cuda}
    name = torch.cuda.get_device_name()
    return {
        "name": name,
        "matched": part.name,
        "key": part.key,
        "arch": part.arch,
        "cuda": torch.version.cuda,
        "gpus": torch.cuda.device_count(),
    }


def _database(options: DatabaseOptions) -> dict[str, Any]:
    from flashgen.render import render

    try:
        opened = options.open()
        variants = {record.candidate.variant for record in opened.records(peers=False) if record.candidate is not None}
        return opened.info({render(variant).sha256 for variant in variants})
    except DatabaseError as error:
        return {"error": str(error)}


def _cache() -> dict[str, Any]:
    from flashgen.build import cache_info

    info = cache_info()
    return {
        "modules_path": str(info.modules_path),
        "modules": info.modules,
        "modules_bytes": info.modules_bytes,
        "compiled_path": str(info.compiled_path),
        "compiled_bytes": info.compiled_bytes,
    }


def _clear_cache() -> int:
    from flashgen.build import clear_cache

    return clear_cache()


def _advice(packages: dict[str, dict[str, Any]], device: dict[str, Any], rows: dict[str, Any]) -> Iterator[str]:
    for name, found in packages.items():
        if found["supported"] is False and name != "numpy":
            have = found["version"] or "not installed"
            yield f'{name} is {have}, flashgen needs {found["needs"]}: pip install "{name}{found["needs"]}"'
    if packages["numpy"]["supported"] is False and device["name"] is None:
        yield f'checking kernels without a GPU needs numpy {packages["numpy"]["needs"]}: pip install "numpy{packages["numpy"]["needs"]}"'
    if "error" in rows:
        yield "the database cannot be used: name another with --database or FLASHGEN_DATABASE, or move the file away"
        return
    if rows["broken"]:
        yield "some rows cannot be read by this version: flashgen db prune --broken"
    if rows["stale"]:
        yield "stale rows were measured with kernels whose source has changed since: tune again to renew their winners"
    if not rows["writable"]:
        yield "the database cannot be written, so tuning keeps nothing: name another with --database or FLASHGEN_DATABASE"
    if device["name"] is None:
        yield "no GPU: flashgen demo shows what the model predicts for an H200; --device names the device for the other commands"
    elif device["key"] not in rows["devices"]:
        yield f"nothing was tuned for this device yet: {TUNE}"
    else:
        yield f"all is set: flashgen winners lists what is tuned, and more is: {TUNE}, with --direction backward for gradients"


def _show(data: dict[str, Any], console: Console) -> None:
    from flashgen.report.units import quantity

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("python", data["python"])
    for name, found in data["packages"].items():
        mark = {True: "[green]supported[/]", False: f"[red]needs {found['needs']}[/]", None: ""}[found["supported"]]
        table.add_row(name, f"{found['version'] or 'not installed'}  {mark}")
    table.add_row("gluon", "available" if data["gluon"] else "not in this Triton")
    device = data["device"]
    table.add_row("device", device["reason"] if device["name"] is None else f"{device['name']} ({device['key']}), CUDA {device['cuda']}")
    rows = data["database"]
    if "error" in rows:
        table.add_row("database", rows["error"], style="red")
    else:
        broken = sum(rows["broken"].values())
        table.add_row("database", f"{rows['path'] or 'in memory'} ({quantity(rows['size_bytes'] or 0, 'B')})")
        table.add_row(
            "",
            f"{rows['records']} rows of {rows['problems']} problems, {rows['winners']} winners, {rows['stale']} stale, {broken} unreadable",
        )
        for reason, count in rows["broken"].items():
            table.add_row("", f"  {count}: {reason}")
    cache = data["cache"]
    table.add_row(
        "modules", f"{cache['modules']} in {cache['modules_path']} ({quantity(cache['modules_bytes'], 'B')}); --clear-cache deletes them"
    )
    table.add_row(
        "compiled", f"{cache['compiled_path']} ({quantity(cache['compiled_bytes'], 'B')}), Triton's own; delete the folder to clear it"
    )
    if data["cleared_bytes"] is not None:
        table.add_row("cleared", quantity(data["cleared_bytes"], "B"))
    console.print(table, highlight=False)
    for line in data["next"]:
        say(console, f"→ {line}")
