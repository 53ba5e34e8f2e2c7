"""The wheel, as a user gets it: built, installed into a clean folder, and used from there, far from the checkout."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flashgen import __version__

ROOT = Path(__file__).parents[2]
SHAPE = ["--seqlen", "256", "--heads", "2", "--head-dim", "64", "--dtype", "float16", "--causal", "--device", "h200"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, made by the build backend itself: no isolated environment, no package index."""
    folder = tmp_path_factory.mktemp("wheel")
    run = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    run = subprocess.run(pip, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder


def python(site: Path, tmp_path: Path, *arguments: str) -> str:
    """What `python arguments` prints with the installed wheel first on its path."""
    environment = {**os.environ, "PYTHONPATH": str(site), "FLASHGEN_TUNING_DB": "", "PYTHONWARNINGS": "error::ResourceWarning"}
    run = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def flashgen(site: Path, tmp_path: Path, *arguments: str) -> str:
    """What the command prints, run from the installed wheel."""
    return python(site, tmp_path, "-c", "import flashgen.cli, sys; sys.exit(flashgen.cli.app())", *arguments)


def test_contents(wheel: Path) -> None:
    """Every template and every shipped winner is inside; tests, caches and a checkout's own folders are not."""
    assert wheel.name == f"flashgen-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (("templates", "flashgen/_templates"), ("tuning_db", "flashgen/_tuning_db")):
        files = [path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert files
        assert {f"{inside}/{file}" for file in files} <= names
    assert "flashgen/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"flashgen", next(name.split("/")[0] for name in names if "dist-info" in name)}
    assert not [name for name in names if "__pycache__" in name]


def test_finds_its_templates_and_winners(site: Path, tmp_path: Path) -> None:
    script = """
import json, flashgen
from flashgen import render
from flashgen.candidate import Variant
print(json.dumps([
    flashgen.__file__, str(render.templates_dir()), str(render.shipped_dir("tuning_db")), len(render.render(Variant()).text),
    len(flashgen.Database.open().winners()),
]))
"""
    package, templates, shipped, length, winners = json.loads(python(site, tmp_path, "-c", script))
    assert Path(package).parent == site / "flashgen"
    assert Path(templates) == site / "flashgen" / "_templates"
    assert Path(shipped) == site / "flashgen" / "_tuning_db"
    assert length > 0
    assert bool(winners) == any((ROOT / "tuning_db").glob("*.jsonl"))


def test_model(site: Path, tmp_path: Path) -> None:
    told = flashgen(site, tmp_path, "model", "--seqlen", "8192", "--head-dim", "128", "--heads", "32", "--device", "h100", "--json")
    assert round(json.loads(told)["traffic_ratio"], 1) == 11.8


def test_generate(site: Path, tmp_path: Path) -> None:
    """The standalone kernel and its launcher import without flashgen."""
    flashgen(site, tmp_path, "generate", *SHAPE, "--out", "kernel")
    sources = sorted((tmp_path / "kernel").glob("*.py"))
    assert sources
    for source in sources:
        assert not re.search(r"^\s*(import|from) flashgen", source.read_text(), re.MULTILINE)


def test_tune_without_a_gpu(site: Path, tmp_path: Path) -> None:
    """A predicted tuning of a small problem: renders, cross-compiles, checks in the interpreter, and keeps rows."""
    flashgen(site, tmp_path, "tune", *SHAPE, "--trials", "2")
    assert json.loads(flashgen(site, tmp_path, "explain", *SHAPE, "--json"))
