"""The README is true: its code runs, its commands run, the files it names exist, and the changelog knows the version."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import flashgen

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"(?P<gpu><!-- needs a GPU -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """One fenced block."""

    language: str
    text: str
    gpu: bool

    @property
    def id(self) -> str:
        return self.text.splitlines()[-1].removeprefix("$ ")[:60]


EXAMPLES = [Example(block["language"], block["text"], block["gpu"] is not None) for block in BLOCK.finditer(README)]


def examples(language: str) -> list[object]:
    """The blocks in a language, as parameters of a test; those that need a GPU carry its mark."""
    return [pytest.param(each, id=each.id, marks=[pytest.mark.gpu] if each.gpu else []) for each in EXAMPLES if each.language == language]


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLASHGEN_TUNING_DB": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_block_is_looked_at() -> None:
    """A block in a language that no test here knows would go untested."""
    assert {each.language for each in EXAMPLES} == {"console", "python", "sh", "text"}


@pytest.mark.parametrize("example", examples("python"))
def test_python(example: Example, tmp_path: Path) -> None:
    assert run([sys.executable, "-c", example.text], tmp_path).strip()


@pytest.mark.parametrize("example", examples("console"))
def test_console(example: Example, tmp_path: Path) -> None:
    for line in example.text.splitlines():
        prompt, program, *arguments = shlex.split(line, comments=True)
        assert (prompt, program) == ("$", "flashgen")
        assert run([sys.executable, "-c", "from flashgen.cli import app; app()", *arguments], tmp_path).strip()


@pytest.mark.parametrize("example", examples("sh"))
def test_make_targets_exist(example: Example) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in example.text.splitlines():
        program, target = shlex.split(line, comments=True)
        assert program == "make" and target in targets


def test_paths_exist() -> None:
    """Whatever looks like a path of the repository, in backticks or as a link, is there."""
    named = re.findall(r"`((?:flashgen|templates|tests|tuning_db|\.ci)/[\w./-]*)`", README) + re.findall(r"\]\(([\w.]+)\)", README)
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_pipeline_names_modules() -> None:
    """Each file of the pipeline table is a module or a folder of the package."""
    rows = re.findall(r"^\| \w+ \| [^|]+ \| [^|]+ \| ([\w, ]+) \|$", README, re.MULTILINE)
    names = [name for row in rows for name in row.split(", ") if name != "file"]
    assert len(names) > 9
    package = ROOT / "flashgen"
    assert [name for name in names if not ((package / f"{name}.py").exists() or (package / name).is_dir())] == []


def test_one_version() -> None:
    """The changelog begins with the version of the package."""
    newest = re.search(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == flashgen.__version__
