"""Reports: the numbers, the tables, and the page."""

import io
import itertools
import json
import math
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import flashgen.cli
from flashgen import cost, report, space
from flashgen.candidate import Candidate, Config
from flashgen.cli.answer import Answer, command
from flashgen.cli.options import ProblemOptions
from flashgen.database import Database, lines
from flashgen.device import Device
from flashgen.problem import Problem
from flashgen.record import Counters, FunctionCounters, Measurement, Record, Status
from flashgen.report import files, limits, page
from flashgen.report.braille import Plot
from flashgen.report.commands import commands
from flashgen.report.comparison import compare
from flashgen.report.data import data_of
from flashgen.report.knobs import importances
from flashgen.report.markdown import markdown
from flashgen.report.summary import label, rank_correlation, summarize
from flashgen.report.units import quantity, times
from tests.cpu import rows

SHIPPED = Path(__file__).resolve().parents[2] / "tuning_db" / "nvidia_h200.jsonl"


def terminal(records: Any, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    report.terminal(records, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


class Page(HTMLParser):
    """What a test wants to know of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.words: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif "body" in self._open and data.strip() and self._open[-1] != "style":
            self.words.append(" ".join(data.split()))

    @property
    def data(self) -> list[dict[str, Any]]:
        (text,) = (text for attributes, text in self.scripts if attributes.get("type") == "application/json")
        return json.loads(text)["problems"]  # type: ignore[no-any-return]


# ---- units -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0052084, "s", "5.21 ms"),
        (4294967296, "B", "4.29 GB"),
        (1.0995e12, "B", "1.1 TB"),
        (999.9, "", "1 k"),
        (999.4, "", "999"),
        (0, "s", "0 s"),
        (3e-7, "s", "300 ns"),
        (-1500, "", "-1.5 k"),
        (1e-12, "s", "0.001 ns"),
        (math.inf, "s", "inf s"),
    ],
)
def test_quantity(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_times() -> None:
    assert (times(11.837), times(0.957), times(4.685)) == ("11.8x", "0.96x", "4.68x")


# ---- rank correlation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 400], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4, 5], [5, 6, 7, 8, 7], 0.8207826816681233),  # scipy.stats.spearmanr, ties
        ([106, 86, 100, 101, 99, 103, 97, 113, 112, 110], [7, 0, 27, 50, 28, 29, 20, 12, 6, 17], -0.17575757575757575),
        ([1, 2], [1, 2], None),
        ([1, 1, 1], [1, 2, 3], None),
        ([], [], None),
    ],
)
def test_rank_correlation(first: list[float], second: list[float], expected: float | None) -> None:
    got = rank_correlation(first, second)
    assert got is None if expected is None else got == pytest.approx(expected, abs=1e-12)


# ---- summary ---------------------------------------------------------------------------------------------------------


def test_summary_agrees_with_the_database() -> None:
    """A candidate measured again is judged by its last trial, and near medians are ties: the winner is the database's. Beside it
    stand the peers that were measured when it was, not those of a day with better clocks."""
    lucky, steady, other = rows.candidates(3)
    records = [
        rows.record(90.0, candidate=lucky, second=1),
        rows.record(120.0, candidate=lucky, second=5),
        rows.record(100.0, candidate=steady, second=2),
        rows.record(100.4, candidate=other, second=3),
        rows.record(status=Status.TIMEOUT, candidate=other, second=4),
        rows.peer("cudnn", 97.0, second=3),
        rows.peer("cudnn", 95.0, second=60),
        rows.peer("math", 900.0),
    ]
    (summary,) = summarize(records)
    database = Database.memory()
    database.add(records)
    assert summary.winner is not None
    assert summary.winner.candidate == steady
    assert summary.winner == database.winner(rows.problem(), rows.H200)
    assert [(name, record.measurement.median_us) for name, record in summary.contenders()] == [
        ("winner", 100.0),
        ("SDPA cudnn", 97.0),
        ("SDPA math", 900.0),
    ]
    assert [record.measurement.median_us for record in summary.measured] == [120.0, 100.0]
    assert summary.tflops(summary.winner) == pytest.approx(rows.problem().flops / 100e-6 / 1e12)


def test_default_is_found_and_predicted_rows_never_win() -> None:
    fast = rows.candidates(1)[0]
    (summary,) = summarize(
        [
            rows.record(200.0),
            rows.record(150.0, candidate=fast),
            rows.record(status=Status.PREDICTED, candidate=fast, predicted_us=1.0, second=9),
        ]
    )
    assert summary.default is not None
    assert summary.default.measurement.median_us == 200.0
    assert summary.winner is not None
    assert summary.winner.measurement.median_us == 150.0
    (only_predicted,) = summarize(rows.predictions(5))
    assert only_predicted.winner is None
    assert only_predicted.is_predicted_only
    assert only_predicted.favourite is not None
    assert only_predicted.favourite.estimate == rows.estimate(100.0)


def test_failures_are_grouped_by_reason() -> None:
    ends = [
        (Status.OUT_OF_RESOURCES, "smem: needs 262144 bytes, h200 has 232448"),
        (Status.OUT_OF_RESOURCES, "smem: needs 300000 bytes, h200 has 232448"),
        (Status.OUT_OF_RESOURCES, "registers: needs 300, h200 has 255"),
        (Status.SKIPPED, "its bound cannot beat the incumbent"),
        (Status.CRASHED, ""),
    ]
    records = [
        rows.record(status=status, message=message, candidate=candidate) for (status, message), candidate in zip(ends, rows.candidates(5))
    ]
    (summary,) = summarize(records)
    assert [(row.status, row.reason, row.count) for row in summary.failures] == [
        (Status.OUT_OF_RESOURCES, "smem", 2),
        (Status.CRASHED, "crashed", 1),
        (Status.OUT_OF_RESOURCES, "registers", 1),
    ]


def test_order_is_the_same_however_rows_come() -> None:
    records = [
        rows.record(100.0, of=rows.problem(seqlen_q=n, seqlen_kv=n, mask=mask)) for n in (512, 128, 4096) for mask in ("full", "causal")
    ]
    orders = [[summary.problem for summary in summarize(some)] for some in itertools.islice(itertools.permutations(records), 0, 720, 97)]
    assert all(order == orders[0] for order in orders)
    assert [(problem.mask, problem.seqlen_q) for problem in orders[0]] == [
        (mask, n) for mask in ("causal", "full") for n in (128, 512, 4096)
    ]


def test_labels_tell_candidates_apart() -> None:
    backward = space.candidates(rows.problem(direction="backward"), rows.H200)
    for every in (rows.candidates(1000), backward):
        assert len({label(candidate) for candidate in every}) == len(every)
    assert not any(", ," in label(candidate) for candidate in backward)
    config = Config(block_m=128, block_n=64, num_warps=8, num_stages=3)
    assert label(Candidate(config=config)) == "128x64 warps 8 stages 3, pointer, masked apart"


# ---- why not faster ---------------------------------------------------------------------------------------------------


def winner(of: Problem, candidate: Candidate | None = None, us: float = 300.0, clock: float | None = None) -> Record:
    made = rows.record(us, of=of, candidate=candidate)
    return replace(made, measurement=replace(made.measurement, resources=None, sm_clock_mhz=clock))


def test_limits_are_those_of_the_estimate() -> None:
    """At the model's own clock a unit takes as long as the Estimate says, and the bound is its own, but for waves and launches."""
    for of in (rows.problem(), rows.problem(direction="backward"), rows.problem(head_dim_qk=64, head_dim_v=64, mask="full")):
        for candidate in space.candidates(of, rows.H200)[::97]:
            estimate = cost.estimate(candidate, of, rows.H200)
            found = limits.account(candidate, of, rows.H200, None, None)
            for unit in ("tensor", "exp", "smem", "l2", "dram"):
                assert found.seconds[unit] == pytest.approx(getattr(estimate, f"{unit}_s"))
            assert found.time_s == pytest.approx(estimate.time_s) or estimate.time_s == estimate.bound_s
            if found.bound not in ("waves", "launch"):
                assert found.bound == estimate.bound


def test_units_of_an_sm_follow_its_clock() -> None:
    slow, fast = (limits.limit_of(winner(rows.problem(), clock=clock)) for clock in (1000.0, 2000.0))
    assert slow is not None and fast is not None
    assert slow.shares["exp"] == pytest.approx(2 * fast.shares["exp"])
    assert slow.shares["dram"] == pytest.approx(fast.shares["dram"])


@pytest.mark.parametrize(
    ("of", "bound", "words"),
    [
        (dict(batch=8, seqlen_q=64, seqlen_kv=64), "launch", "1 kernel starts and ends"),
        (
            dict(batch=1, heads_q=17, heads_kv=17, seqlen_q=1024, seqlen_kv=8192, mask="full"),
            "waves",
            "waves of programs leave SMs without",
        ),
        (dict(seqlen_q=1, batch=64), "dram", "DRAM: busy for"),
        (dict(), "tensor", "tensor cores: busy for"),
    ],
)
def test_bounds_have_their_names(of: dict[str, Any], bound: str, words: str) -> None:
    problem = rows.problem(**of)
    default = space.default(problem, rows.H200)
    (summary,) = summarize([winner(problem, default, cost.estimate(default, problem, rows.H200).time_s * 1e6)])
    assert summary.limit is not None
    assert (summary.limit.bound, words in summary.why_not_faster) == (bound, True), summary.why_not_faster


def test_lift_is_the_nearest_that_is_held_by_something_else() -> None:
    problem, here = rows.problem(), space.default(rows.problem(), rows.H200)
    (summary,) = summarize([winner(problem, here)])
    assert summary.limit is not None and summary.lift is not None
    bound, own = summary.limit.bound, limits.account(here, problem, rows.H200, None, None)
    assert summary.lift.bound != bound
    for other in space.candidates(problem, rows.H200):
        if space.distance(here, other) < summary.lift.distance:
            its = limits.account(other, problem, rows.H200, None, None)
            assert its.bound == bound or its.lost_s(bound) >= 0.99 * own.lost_s(bound)
    tried = rows.record(450.0, candidate=summary.lift.candidate)
    (summary,) = summarize([winner(problem, here), replace(tried, measurement=replace(tried.measurement, resources=None))])
    assert "and 1.50x measured" in summary.why_not_faster


def test_where_nothing_would_lift_a_bound_it_says_so() -> None:
    shipped = [record for record in lines.records_of(SHIPPED.read_text().splitlines(), origin="shipped") if isinstance(record, Record)]
    sentences = [summary.why_not_faster for summary in summarize(shipped)]
    assert all(sentence.startswith("Held by ") for sentence in sentences)
    assert any("none of the legal candidates would lift that" in sentence for sentence in sentences)
    assert any("Nearest candidate that would lift it" in sentence for sentence in sentences)


# ---- importances -----------------------------------------------------------------------------------------------------


def test_importances_name_the_knob_that_matters() -> None:
    """One knob makes all the difference, another none."""
    configs = [Config(block_m=m, block_n=64, num_warps=8, num_stages=stages) for m in (64, 128) for stages in (1, 2, 3, 4, 5)]
    records = [rows.record(100.0 * (1 + (each.block_m == 64)), candidate=Candidate(config=each)) for each in configs]
    first, second = importances(records)
    assert (first.name, first.best, first.share) == ("block_m", "128", pytest.approx(1.0))
    assert (second.name, second.share) == ("num_stages", 0.0)
    assert first.trials == {"64": 5, "128": 5} and first.fastest_us == {"64": 200.0, "128": 100.0}


def test_chance_is_no_importance() -> None:
    """Times at random: a knob with many values explains much of few trials' variance, but not by epsilon squared."""
    means = []
    for seed in range(40):
        draw = random.Random(seed)
        some = draw.sample(rows.candidates(400), 24)
        found = importances([rows.record(draw.uniform(90, 110), candidate=each) for each in some])
        means.append(sum(each.share for each in found) / len(found))
    assert sum(means) / len(means) < 0.05
    assert importances([rows.record(1.0 + n, candidate=each) for n, each in enumerate(rows.candidates(7))]) == []


# ---- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(mask="full", dtype="float16", layout="bshd", return_lse=True),
        dict(heads_kv=4, seqlen_q=7, seqlen_kv=100, head_dim_v=64, mask="causal_top_left"),
        dict(mask="full", window=(256, -1), dtype="float32"),
        dict(window=(128, 0)),
        dict(mask="full", window=(-1, 300)),
        dict(direction="backward", deterministic=True),
        dict(direction="backward", float16_dq=True),
    ],
)
def test_commands_state_the_very_problem(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed as they stand, they are parsed to the problem they were made from."""
    problem = rows.problem(**changes)
    got: list[Problem] = []

    def bench(problem: ProblemOptions) -> Answer:
        got.append(problem.problem())
        return Answer(data=None, show=lambda console: None)

    app = typer.Typer()
    command(app, example="bench")(bench)
    (summary,) = summarize([rows.record(100.0, of=problem)])
    assert summary.winner is not None
    words = commands(summary.winner)["measure"].split()
    assert words[:2] == ["flashgen", "bench"]
    result = CliRunner().invoke(app, words[2:], catch_exceptions=False)
    assert (result.exit_code, got) == (0, [problem]), result.output


def test_unaligned_problems_have_no_options() -> None:
    found = commands(rows.record(100.0, of=rows.problem(aligned_16=False)))
    assert list(found) == ["source"] and "--variant" in found["source"]


# ---- counters --------------------------------------------------------------------------------------------------------


def test_counted_rows_are_no_trials() -> None:
    """They stand beside the winner they belong to, cold ones first."""
    best, other = rows.record(100.0), rows.candidates(1)[0]

    def counted(second: int, cache: str = "cold", candidate: Candidate | None = None) -> Record:
        function = FunctionCounters(name="attention_forward", dram_read_bytes=2e8, dram_write_bytes=1e8, time_us=125.0, tensor_share=0.6)
        measurement = Measurement(status=Status.COUNTED, counters=Counters(functions=(function,), cache=cache))
        return replace(rows.record(100.0, candidate=candidate, second=second), measurement=measurement)

    records = [best, counted(1), counted(2, "warm"), counted(3, candidate=other)]
    (summary,) = summarize(records)
    assert (len(summary.trials), summary.failures, summary.winner) == (1, [], best)
    assert summary.counted == records[1]
    (problem,) = Page(report.html(records)).data
    assert {"name": "DRAM", "bytes": 3e8, "kind": "counted", "us": 62.5} in problem["levels"]
    assert problem["counters"]["functions"][0]["name"] == "attention_forward"
    assert summary.counted_shares == {"tensor": 0.6, "dram": 3e8 / 4.8e12 / 125e-6}
    assert summary.limit is not None and summary.limit.bound == "tensor"
    assert "The device counted 60%." in summary.why_not_faster


# ---- comparison ------------------------------------------------------------------------------------------------------


def test_comparison_is_of_winners_of_the_same_problem() -> None:
    first, second, third, fourth = (rows.problem(batch=batch) for batch in (1, 2, 3, 4))
    other = rows.candidates(1)[0]
    before = [rows.record(100.0, of=first), rows.record(100.0, of=second), rows.record(100.0, of=third), rows.peer("cudnn", 110.0, first)]
    after = [
        rows.record(80.0, of=first, candidate=other),
        rows.record(100.2, of=second),
        rows.record(90.0, of=fourth),
        rows.peer("cudnn", 100.0, first),
    ]
    found = compare(before, after, names=("old", "new"))
    assert [(change.speedup, change.peers_speedup, change.is_same_candidate) for change in found.changes] == [
        (pytest.approx(1.25), pytest.approx(1.1), False),
        (pytest.approx(1 / 1.002), None, True),
    ]
    assert (found.only_before, found.only_after) == (1, 1)
    assert found.speedup == pytest.approx((1.25 / 1.002) ** 0.5)
    sentence = str(found)
    for words in ("new against old", "1 faster, 0 slower, 1 within 1%", "1.100x", "1 only in old", "1 only in new"):
        assert words in sentence
    text = report.html(after, found)
    assert "1.250x" in text and text.count('class="n better"') == 1
    assert "no problem has a measured winner on both sides" in str(compare([], after))


def test_comparison_across_devices() -> None:
    fast = rows.record(80.0)
    slow = replace(rows.record(100.0), device=Device.named("h100"))
    assert compare([slow], [fast]).changes == ()
    (change,) = compare([slow], [fast], across_devices=True).changes
    assert change.speedup == 1.25


# ---- command line ----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str, str]:
    environment = {"COLUMNS": "300", "NO_COLOR": "1"}
    result = CliRunner().invoke(flashgen.cli.app, ["report", *arguments], catch_exceptions=False, env=environment)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def filled(own_database: Path) -> Path:
    """Two releases on an H200, and an H100."""
    newer = [replace(each, provenance=replace(each.provenance, triton="3.9.1")) for each in rows.search(12, seed=1)]
    h100 = [replace(each, device=Device.named("h100")) for each in rows.search(6)]
    Database.open(own_database).add(rows.search(12) + newer + h100)
    return own_database


def test_against_a_release_a_device_and_a_file(filled: Path, tmp_path: Path) -> None:
    code, out, _ = run("--against", "triton=3.6", "--triton", "3.9", "--device", "h200")
    assert code == 0 and out.startswith("NVIDIA H200, Triton 3.9 against Triton 3.6: ") and "over 1 problem;" in out
    code, out, _ = run("--device", "h200", "--against", "h100", "--triton", "3.6")
    assert code == 0 and "against NVIDIA H100 80GB HBM3" in out and "over 1 problem;" in out
    exported = tmp_path / "winners.jsonl"
    Database.open(filled).export(exported, winners=True)
    for file in (exported, filled):
        code, out, _ = run("--against", str(file), "--json")
        data = json.loads(out)["comparison"]
        assert (code, data["speedup"], len(data["changes"]), data["only_before"]) == (0, 1.0, 2, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--against", "nothing"), "a file, triton=RELEASE, or one of h100"), (("--out", "report.pdf"), "must end in .html, .md, .json")],
)
def test_what_cannot_be_compared_or_written_is_refused(arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and words in err


def test_against_a_file_that_holds_no_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    code, _, err = run("--against", str(file))
    assert code == 1 and "1 of 1 lines" in err


def test_formats_follow_the_name(filled: Path, tmp_path: Path) -> None:
    for suffix, start in ((".html", "<!DOCTYPE html>"), (".md", "# flashgen report"), (".json", "{")):
        file = tmp_path / f"report{suffix}"
        code, out, _ = run("--out", str(file))
        assert code == 0 and out.endswith(f"Wrote {file}\n")
        assert file.read_text().startswith(start)
    assert len(json.loads((tmp_path / "report.json").read_text())["problems"]) == 2


# ---- Markdown --------------------------------------------------------------------------------------------------------


def test_markdown_for_a_pull_request() -> None:
    records = rows.search(40) + rows.search(20, rows.problem(direction="backward"))
    text = markdown(records, compare(records, records, names=("main", "this")))
    for words in (
        "## Comparison",
        "this against main: 1.000x",
        "## Problems",
        "**Why not faster?** Held by",
        "flashgen bench --direction backward",
    ):
        assert words in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in tables} <= {4, 6, 7, 10}
    assert text.count("<details>") == text.count("</details>") == 2
    assert "</script>" not in text and len(text) < 65_536
    assert text.count("<details>") < len(markdown([row for n in range(1, 40) for row in rows.search(3, rows.problem(batch=n))])) < 65_536
    assert "There are no rows yet." in markdown([])
    assert "Nothing was measured" in markdown(rows.predictions(5))


# ---- terminal --------------------------------------------------------------------------------------------------------


def test_terminal_of_one_problem() -> None:
    text = terminal(rows.search(40))
    for words in ("winner", "default", "SDPA cudnn", "SDPA flash", "roofline", "Spearman", "smem", "timeout", "40 trials"):
        assert words in text
    assert "Nothing was measured" not in text


def test_terminal_of_several_problems() -> None:
    text = terminal(rows.search(10) + rows.search(10, rows.problem(mask="full")) + rows.predictions(3, rows.problem(batch=1)))
    assert text.count("seqlen 4096") == 3
    assert "predicted only" in text


def test_both_directions_are_shown() -> None:
    """Forward problems first; backward ones with their own work, bound, default, peers and model."""
    backward = rows.problem(direction="backward")
    records = rows.search(10, backward) + rows.search(10)
    summaries = summarize(records)
    assert [summary.problem.direction for summary in summaries] == ["forward", "backward"]
    text = terminal(records)
    assert text.index("forward, bfloat16") < text.index("backward, bfloat16")
    one = terminal(rows.search(10, backward))
    for words in ("winner", "default", "SDPA cudnn", "roofline", "Spearman", "Outside the legal space"):
        assert words in one
    first, second = Page(report.html(records)).data
    assert (first["direction"], second["direction"]) == ("forward", "backward")
    assert second["flops"] == 2.5 * first["flops"] and second["roofline_tflops"] == pytest.approx(first["roofline_tflops"])
    assert all(b > 1.5 * a for a, b in zip(first["theory"]["flash_ms"], second["theory"]["flash_ms"]))
    assert {name for name, _ in summaries[1].contenders()} >= {"winner", "default", "SDPA cudnn"}
    assert len(second["points"]["winner"]) == 1, "no points of the other direction"


def test_terminal_says_first_that_nothing_was_measured() -> None:
    text = terminal(rows.predictions(5))
    assert text.startswith("Nothing was measured, and bf16 was not checked")
    assert text.count("predicted only") == 5


def test_nothing_in_a_row_is_taken_for_markup() -> None:
    """Messages and versions come from compilers and files, and are shown as they are."""
    text = terminal(
        [
            rows.record(100.0),
            rows.record(status=Status.CRASHED, message="[/] [bold]x[/bold] [red]", candidate=rows.candidates(1)[0]),
            rows.peer("flex[3]", 50.0),
        ]
    )
    assert "[/] [bold]x[/bold] [red]" in text
    assert "flex[3]" in text


def test_terminal_without_rows() -> None:
    assert terminal([]) == ""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_plot_fits_and_uses_what_the_terminal_can_show(encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    plot = Plot(
        series={"standard": [(256, 1e5), (65536, 1e9)], "flash": [(256, 5e4), (65536, 1e8)]}, x_label="N", y_label="elements", mark_x=4096
    )
    Console(file=stream, width=60).print(plot)
    stream.flush()
    lines = stream.buffer.getvalue().decode(encoding).splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 60
    assert lines[1].rstrip().endswith("standard")
    assert any(line.rstrip().endswith("flash") for line in lines[2:])
    assert "256" in lines[-1]
    assert "65536" in lines[-1]


def test_plot_of_one_point_and_of_none() -> None:
    console = Console(file=io.StringIO(), width=60)
    console.print(Plot(series={"one": [(1, 1)]}, x_label="x", y_label="y"))
    console.print(Plot(series={}, x_label="x", y_label="y"))
    assert "one" in console.file.getvalue()  # type: ignore[attr-defined]


# ---- page ------------------------------------------------------------------------------------------------------------


def test_page_is_self_contained() -> None:
    """One document: no address to load from, plotly.js once, the rows once, light and dark, fit for a phone."""
    text = report.html(rows.search(40))
    parsed = Page(text)
    assert parsed.links and not [link for link in parsed.links if not link.startswith("#")]
    assert not {"link", "img", "iframe", "base"} & set(parsed.tags)
    assert "@import" not in text.split("<script", 1)[0]
    assert [attributes.get("type") for attributes, _ in parsed.scripts] == ["application/json", "text/plain", None]
    assert len(re.findall(r"plotly\.js v\d", text)) == 1
    assert len(parsed.data) == 1
    assert text.count(json.dumps(parsed.data[0]["trials"]["predicted_us"], separators=(",", ":"))) == 1
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_page_holds_the_numbers() -> None:
    records = rows.search(40)
    (summary,) = summarize(records)
    (problem,) = Page(report.html(records)).data
    trials = problem["trials"]
    assert {len(column) for column in trials.values()} == {40}
    assert [row["name"] for row in problem["contenders"]] == ["winner", "default", "SDPA cudnn", "SDPA flash", "SDPA math"]
    assert problem["rank_correlation"] == pytest.approx(summary.rank_correlation)
    assert problem["contenders"][0]["tflops"] <= problem["roofline_tflops"]
    assert sum(row["count"] for row in problem["failures"]) + len(summary.measured) == 40
    theory = problem["theory"]
    ratio = theory["standard_elements"][theory["seqlen"].index(8192)] / theory["flash_elements"][theory["seqlen"].index(8192)]
    assert ratio == pytest.approx(11.8, abs=0.05)


def test_points_are_scaled_to_the_problem() -> None:
    """Time per layer is shown for one number of heads: twice the batch at the same speed is twice the time."""
    long, short = rows.problem(), rows.problem(batch=8, seqlen_q=2048, seqlen_kv=2048)
    other = rows.problem(head_dim_qk=64, head_dim_v=64)
    records = [rows.record(1000.0, of=long), rows.record(600.0, of=short), rows.record(500.0, of=other)]
    summaries = summarize(records)
    (data,) = [each for each in data_of(summaries)["problems"] if each["seqlen"] == 4096 and "head_dim 128" in each["title"]]
    assert sorted(data["points"]["winner"]) == [[2048, 0.3], [4096, 1.0]]


def test_page_says_first_that_nothing_was_measured() -> None:
    parsed = Page(report.html(rows.predictions(5)))
    assert parsed.words[0].startswith("Nothing was measured, and bf16 was not checked")
    assert "predicted only" in parsed.words
    assert parsed.data[0]["predicted_only"] is True
    assert "Nothing was measured" not in " ".join(Page(report.html(rows.search(5))).words)


def test_page_marks_predicted_problems_among_measured_ones() -> None:
    parsed = Page(report.html(rows.search(5) + rows.predictions(5, rows.problem(batch=1))))
    assert [problem["predicted_only"] for problem in parsed.data] == [True, False]
    assert parsed.words.count("predicted only") == 1


def test_page_escapes_what_compilers_say() -> None:
    evil = "</script><script>alert(1)</script><img src=http://x.example/y> \u2028 & more"
    failed = rows.record(status=Status.COMPILE_ERROR, message=evil, candidate=rows.candidates(1)[0])
    parsed = Page(report.html([rows.record(100.0), failed]))
    assert parsed.data[0]["trials"]["message"][1] == evil
    assert len(parsed.scripts) == 3
    assert not [link for link in parsed.links if "example" in link]


def test_page_without_rows() -> None:
    parsed = Page(report.html([]))
    assert not parsed.scripts
    assert "There are no rows yet." in parsed.words


def test_page_of_ten_thousand_rows() -> None:
    """Written in seconds, and small enough to open at once: the rows are columns of numbers, not markup."""
    some = rows.search(1000)
    records = [record for _ in range(10) for record in some]
    start = time.perf_counter()
    text = report.html(records)
    assert time.perf_counter() - start < 20
    assert len(text) < len(report.html([])) + 9_000_000
    assert text.count("<tr") < 10


def test_page_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "new" / "index.html"
    files.write(file, [])
    before = file.read_text()

    def fail(records: Any, comparison: Any) -> str:
        raise RuntimeError

    monkeypatch.setattr(page, "html", fail)
    with pytest.raises(RuntimeError):
        files.write(file, [])
    assert file.read_text() == before
    assert list(file.parent.iterdir()) == [file]


def test_empty_problems_have_a_page() -> None:
    """No keys: zero operations are no reason to divide by zero."""
    empty = rows.problem(seqlen_kv=0, mask="full")
    text = report.html([rows.record(3.0, of=empty)])
    assert Page(text).data[0]["roofline_tflops"] == 0
    terminal([rows.record(3.0, of=empty)])


def test_terminal_loads_no_plotting_library() -> None:
    code = "import sys, flashgen.report.tables; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
