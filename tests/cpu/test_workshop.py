"""The workshop's page, without a browser: what is embedded, and the command that writes it."""

import json
import re
import webbrowser
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashgen import space
from flashgen.candidate import Candidate, Config, Variant
from flashgen.cli import app
from flashgen.database import Database
from flashgen.device import DEVICES
from flashgen.problem import Problem
from flashgen.record import Counters, FunctionCounters, Measurement, Record, Status
from flashgen.report import workshop
from tests.cpu import rows


@pytest.fixture
def records(own_database: Path) -> list[Record]:
    """A search with peers; rows that the page's controls cannot state; another device; a problem of which nothing was measured."""
    found = rows.search(12)
    found.append(rows.record(500, of=rows.problem(heads_kv=4)))
    found.append(rows.record(500, of=rows.problem(seqlen_kv=8192)))
    found.append(rows.record(500, of=rows.problem(return_lse=True)))
    found.append(rows.record(500, of=rows.problem(window=(256, 0))))
    found.append(replace(rows.record(700), device=replace(DEVICES["h200"], name="NVIDIA Other", num_sms=100)))
    found += rows.predictions(3, rows.problem(batch=1))
    Database.open(own_database).add(found)
    return found


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["workshop", *arguments], catch_exceptions=False, env={"COLUMNS": "300", "NO_COLOR": "1"})
    return result.exit_code, result.stdout, result.stderr


def test_measured_rows_are_winners_and_peers_of_problems_that_the_controls_state(records: list[Record]) -> None:
    made = workshop.data(records)
    here = [row for row in made["measured"] if row["device"] == "h200"]
    assert {(row["seqlen"], row["heads"], row["head_dim"], row["causal"], row["direction"]) for row in here} == {
        (4096, 64, 128, True, "forward")
    }
    assert [row["name"] for row in here].count("flashgen") == 1 and len(here) > 1
    (other,) = (row for row in made["measured"] if row["device"] != "h200")
    assert made["devices"][other["device"]]["name"] == "NVIDIA Other"
    assert f"{other['device']} 128 bfloat16 causal forward hopper" in made["defaults"]


def test_counted_rows_are_the_newest_of_each_kernel_with_cold_caches(records: list[Record]) -> None:
    def counted(dram_bytes: float, second: int, cache: str = "cold") -> Record:
        functions = tuple(FunctionCounters(name=name, dram_read_bytes=dram_bytes, dram_write_bytes=1.0) for name in ("one", "other"))
        measurement = Measurement(status=Status.COUNTED, counters=Counters(functions=functions, cache=cache))
        return replace(rows.record(500, second=second), measurement=measurement)

    made = workshop.data([*records, counted(5.0, 2), counted(7.0, 1), counted(9.0, 3, "warm")])
    (row,) = made["counted"]
    assert (row["dram_bytes"], row["l2_bytes"], row["heads"]) == (12.0, None, 64)


def test_candidates_are_whole(records: list[Record]) -> None:
    """A field at its default is there too: the script knows no defaults."""
    made = workshop.data(records)
    names = set(Variant.__dataclass_fields__) | set(Config.__dataclass_fields__)
    assert all(set(each) == names for each in made["candidates"])
    places = list(made["defaults"].values()) + [row["candidate"] for row in made["measured"] if row["name"] == "flashgen"]
    assert {place for place in places if place is not None} == set(range(len(made["candidates"])))


def test_the_page_asks_for_nothing(records: list[Record]) -> None:
    text = workshop.html(workshop.data([*records, hostile()]))
    assert "<script>alert" not in text
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*\s(?:src|href)=", text) == []


def hostile() -> Record:
    name = "</script><script>alert(1)</script>"
    return replace(rows.record(700), device=replace(DEVICES["h200"], name=name, num_sms=99))


def test_the_command_writes_the_page(records: list[Record], tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    code, said, _ = run("--out", str(out))
    assert code == 0 and str(out) in said and "measured times" in said
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    code, text, _ = run("--out", str(out), "--json")
    answer = json.loads(text)
    assert code == 0 and answer["file"] == str(out) and answer["measured"] == workshop.data(records)["measured"]


def test_open_shows_it_or_says_that_it_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened: list[str] = []
    out = tmp_path / "page.html"
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(opened.append(address)))
    code, _, err = run("--out", str(out), "--open")
    assert code == 0 and opened == [out.as_uri()] and str(out) in err


def test_hand_picked_candidates_are_those_of_the_space() -> None:
    made = workshop.data([])
    fields = made["candidates"][made["defaults"]["h200 128 bfloat16 full forward hopper"]]
    variant = Variant(**{name: fields[name] for name in Variant.__dataclass_fields__})
    config = Config(**{name: fields[name] for name in Config.__dataclass_fields__})
    sizes = dict(heads_q=workshop.HEADS, heads_kv=workshop.HEADS, seqlen_q=workshop.SEQLEN, seqlen_kv=workshop.SEQLEN)
    problem = Problem(batch=1, head_dim_qk=128, head_dim_v=128, **sizes)
    assert Candidate(variant=variant, config=config) == space.default(problem, DEVICES["h200"])
