"""Reports: the numbers, the tables, and the page."""

import io
import itertools
import json
import math
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flashgen import report, space
from flashgen.candidate import Candidate, Config
from flashgen.database import Database
from flashgen.record import Status
from flashgen.report import files, page
from flashgen.report.braille import Plot
from flashgen.report.data import data_of
from flashgen.report.summary import label, rank_correlation, summarize
from flashgen.report.units import quantity, times
from tests.cpu import rows


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
