"""Where and when rows are made: versions, driver, GPU, time."""

import datetime
import functools
import importlib.metadata
import re
from dataclasses import replace
from pathlib import Path

import flashgen
from flashgen.record import Provenance


@functools.cache
def here() -> Provenance:
    """This process's versions and driver, without a time. gpu is empty: the process that measures knows it."""
    return Provenance(
        flashgen=flashgen.__version__,
        torch=_version("torch"),
        triton=_version("triton"),
        cuda=_cuda(),
        driver=_driver(),
        gpu="",
        utc="",
    )


def now(provenance: Provenance) -> Provenance:
    """The same at this time, or at the one that it has."""
    if provenance.utc:
        return provenance
    utc = datetime.datetime.now(datetime.timezone.utc)
    return replace(provenance, utc=utc.isoformat(timespec="seconds"))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cuda() -> str:
    try:
        import torch
    except ImportError:
        return ""
    return torch.version.cuda or ""


def _driver(version_file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The kernel module's version, such as 580.65.06; empty without a driver. Reading a file is faster than asking nvidia-smi."""
    try:
        text = version_file.read_text()
    except OSError:
        return ""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else ""
