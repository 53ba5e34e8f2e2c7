"""Commands that measure."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashgen.cli import app
from flashgen.database import Database
from flashgen.report.tables import NOTHING_MEASURED

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_bench_keeps_rows_of_what_runs_and_of_peers(own_database: Path, direction: str) -> None:
    arguments = ["bench", "--seqlen", "1024", "--heads", "8", "--head-dim", "64", "--causal", "--seconds", "0.5", "--json"]
    arguments += ["--direction", direction]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert {row["peer"]["name"] for row in rows if "peer" in row} >= {"flash", "math"}
    assert all(row["measurement"]["status"] == "ok" for row in rows)
    assert len(Database.open(own_database).records()) >= len(rows)


def test_demo(tmp_path: Path) -> None:
    """Tunes, compares, calls, checks and reports."""
    page = tmp_path / "report" / "index.html"
    result = CliRunner().invoke(app, ["demo", "--seconds", "15", "--out", str(page), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["measured"]
    assert data["attention"]["ok"]
    assert data["attention"]["how"] == "exact"
    assert {row["peer"]["name"] for row in data["outcome"]["peers"]} >= {"flash"}
    backward = data["backward"]
    assert backward["attention"]["ok"] and backward["attention"]["how"] == "exact"
    assert {row["peer"]["name"] for row in backward["outcome"]["peers"]} >= {"flash"}
    assert NOTHING_MEASURED not in page.read_text()
