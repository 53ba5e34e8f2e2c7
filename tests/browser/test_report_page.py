"""The report in a browser: fast with many trials, searched, sorted and read by keyboard, in light and dark, on a phone."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen import report
from flashgen.candidate import Candidate, Config, Variant
from flashgen.database import lines
from flashgen.record import Counters, FunctionCounters, Measurement, Record, Status
from flashgen.report import document
from flashgen.report.comparison import compare
from flashgen.report.summary import describe, summarize
from tests.browser.conftest import PHONE
from tests.cpu import rows

SHIPPED = Path(__file__).resolve().parents[2] / "tuning_db" / "nvidia_h200.jsonl"
Open = Callable[..., Any]


def many(count: int) -> list[Record]:
    """So many different trials of one problem, a tenth of them failed."""
    grid = itertools.product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4, 5), (None, *range(96, 256, 8)), (1, 2, 4, 8, 16), (False, True))
    draw = random.Random(0)
    found = []
    for second, (m, n, warps, stages, maxnreg, group, persistent) in enumerate(itertools.islice(grid, count)):
        config = Config(block_m=m, block_n=n, num_warps=warps, num_stages=stages, maxnreg=maxnreg, head_group=group, persistent=persistent)
        candidate = Candidate(variant=Variant(mask="causal", load="tma"), config=config)
        us = draw.uniform(500, 2000)
        made: dict[str, Any] = dict(candidate=candidate, predicted_us=us * draw.uniform(0.7, 1.2), second=second)
        if draw.random() < 0.1:
            found.append(rows.record(status=Status.OUT_OF_RESOURCES, message="smem: needs 262144 bytes, h200 has 232448", **made))
        else:
            found.append(rows.record(us, **made))
    assert len({record.candidate for record in found}) == count
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forward and backward searches, a counted winner, predictions, what ships, and a comparison."""
    shipped = [record for record in lines.records_of(SHIPPED.read_text().splitlines(), origin="shipped") if isinstance(record, Record)]
    backward = rows.search(30, rows.problem(direction="backward"))
    records = [*rows.search(60), *backward, *shipped, *rows.predictions(5, rows.problem(batch=1))]
    (best,) = [summary.winner for summary in summarize(records) if summary.problem == rows.problem()]
    assert best is not None
    function = FunctionCounters(name="attention_forward", time_us=400.0, dram_read_bytes=2e8, dram_write_bytes=1e8, tensor_share=0.7)
    records.append(replace(best, measurement=Measurement(status=Status.COUNTED, counters=Counters(functions=(function,)))))
    file = tmp_path_factory.mktemp("report") / "report.html"
    document.write(file, report.html(records, compare(rows.search(50, seed=1) + backward, records, names=("main", "this"))))
    return file


def until(page: Any, expression: str) -> None:
    page.wait_for_function(expression)


def visible_rows(page: Any) -> list[str]:
    return page.eval_on_selector_all(".overview tbody tr:not([hidden]) a", "all => all.map(each => each.textContent)")  # type: ignore[no-any-return]


def test_ten_thousand_trials_open_in_under_two_seconds(open_page: Open, tmp_path: Path) -> None:
    """Loaded, painted, and the first figure drawn; then sorted and filtered while one waits."""
    file = tmp_path / "report.html"
    records = many(10_000)
    document.write(file, report.html(records))
    page = open_page(file)
    until(page, "performance.timing.loadEventEnd > 0 && performance.getEntriesByType('paint').length > 0")
    loaded, painted = page.evaluate(
        "[performance.timing.loadEventEnd - performance.timing.navigationStart, performance.getEntriesByType('paint').at(-1).startTime]"
    )
    print(f"loaded after {loaded:.0f} ms, painted after {painted:.0f} ms")
    assert max(loaded, painted) < 2000
    until(page, "document.querySelector('#contenders .main-svg') !== null")
    assert page.inner_text("#shown") == "10000 of 10000 rows"
    assert page.locator("#trials tbody tr").count() < 100, "only rows in view are in the page"
    started = page.evaluate("performance.now()")
    page.click("#trials th[data-name=predicted_us] button")
    page.fill("#trials input", "128x64 persistent")
    assert page.evaluate("performance.now()") - started < 1500
    wanted = sum(all(word in describe(record) for word in ("128x64", "persistent")) for record in records)
    assert page.inner_text("#shown") == f"{wanted} of 10000 rows"
    page.eval_on_selector("#trials .scroll", "each => each.scrollTop = each.scrollHeight")
    until(page, f"document.querySelector('#trials tr[aria-rowindex=\"{wanted + 1}\"]') !== null")


def test_index_is_searched_filtered_and_sorted(open_page: Open, path: Path) -> None:
    page = open_page(path)
    every = visible_rows(page)
    assert page.inner_text("#listed") == f"{len(every)} of {len(every)}"
    page.fill("#index input", "head_dim 64 causal")
    some = visible_rows(page)
    assert 0 < len(some) < len(every) and all("head_dim 64" in row and "causal" in row for row in some)
    page.select_option("#index select[aria-label=direction]", "backward")
    assert all(row.startswith("backward") for row in visible_rows(page))
    page.fill("#index input", "")
    page.select_option("#index select[aria-label=direction]", "")
    head = page.locator(".overview th", has_text="time")
    for order, sign in (("ascending", 1), ("descending", -1)):
        head.locator("button").press("Enter")
        assert head.get_attribute("aria-sort") == order
        times = page.eval_on_selector_all(
            ".overview tbody tr", "all => all.map(row => row.cells[1].dataset.value).filter(Boolean).map(Number)"
        )
        assert times == sorted(times, reverse=sign < 0)


def test_a_problem_has_everything(open_page: Open, path: Path) -> None:
    """Every figure, the reason why it is not faster, its source and commands, for both directions; and what is missing is not shown."""
    page = open_page(path)
    for direction in ("forward", "backward"):
        link = page.locator(".overview tr", has_text=f"{direction}, bfloat16, batch 4, heads 16, seqlen 4096").locator("a")
        link.first.click()
        until(page, f"document.querySelector('#chosen').textContent.startsWith('{direction}')")
        figures = ("contenders", "roofline", "levels", "predicted", "history", "importances", "failures", "excluded", "traffic", "time")
        for name in figures:
            page.locator(f"#{name}").scroll_into_view_if_needed()
            until(page, f"document.querySelector('#{name} .main-svg') !== null")
        assert page.inner_text("#why p").startswith("Held by ")
        assert page.locator("#why .meter").count() == 8 and page.locator("#why .meter.bound").count() == 1
        assert f"flashgen bench {'--direction backward ' * (direction == 'backward')}--batch 4" in page.inner_text("#commands")
        page.locator("#source summary").press("Enter")
        assert "def attention_" in page.inner_text("#source pre")
        assert ("Nsight" in page.inner_text("#counters")) == (direction == "forward")
    page.locator(".overview tr", has_text="predicted only").locator("a").click()
    until(page, "document.querySelector('#chosen').textContent.includes('predicted only')")
    assert page.is_hidden("#winner") and page.is_hidden("#why") and page.is_hidden("#history")


def test_keyboard(open_page: Open, path: Path) -> None:
    """From the index to a problem, along its trials, and on to the next one, without a mouse."""
    page = open_page(path)
    page.locator(".overview a").nth(2).focus()
    page.keyboard.press("Enter")
    until(page, "document.activeElement.id === 'chosen'")
    first = page.inner_text("#chosen")
    page.locator("#trials .scroll").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("#trials tr[aria-selected=true]").count() == 1
    assert page.inner_text("#trial").startswith("candidate")
    page.keyboard.press("End")
    assert page.locator("#trials tr[aria-selected=true]").is_visible()
    page.locator("#next").press("Enter")
    until(page, f"document.querySelector('#chosen').innerText !== {first!r}")
    assert page.locator(".overview tr.chosen a[aria-current]").count() == 1


def test_an_address_names_a_problem(open_page: Open, path: Path) -> None:
    page = open_page(path)
    ids = page.eval_on_selector_all(".overview tr[data-id]", "all => all.map(row => row.dataset.id)")
    assert len(set(ids)) == len(ids)
    again = open_page(path, f"#{ids[5]}")
    assert again.locator(".overview tr.chosen").get_attribute("data-id") == ids[5]


def test_comparison(open_page: Open, path: Path) -> None:
    page = open_page(path)
    assert "this against main: " in page.inner_text("#comparison")
    assert page.locator("#comparison tbody tr").count() == 2
    page.locator("#comparison tbody a").last.click()
    until(page, "document.querySelector('#chosen').textContent.startsWith('backward')")


@pytest.mark.parametrize(
    "options", [dict(), dict(color_scheme="dark"), PHONE, dict(PHONE, color_scheme="dark")], ids=["light", "dark", "phone", "phone dark"]
)
def test_it_fits_and_is_legible(open_page: Open, path: Path, options: dict[str, Any]) -> None:
    """No sideways scrolling of the page, text against its background at 4.5 to 1 at least."""
    page = open_page(path, **options)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    contrast = page.evaluate(
        """() => {
            const rgb = (name, of) => { const probe = document.createElement('i'); probe.style.color = `var(--${name})`; of.append(probe);
                const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(Number); probe.remove(); return parts; };
            const light = (parts) => parts.map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
                .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
            const card = light(rgb('card', document.body));
            return ['ink', 'muted', 'first', 'bad'].map((name) => { const text = light(rgb(name, document.body));
                return (Math.max(text, card) + 0.05) / (Math.min(text, card) + 0.05); });
        }"""
    )
    assert min(contrast) > 4.5
