"""The workshop: its formulas are those of theory and cost, and a person can use it."""

import dataclasses
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from flashgen import cost, resources, space, theory
from flashgen.candidate import Candidate
from flashgen.device import DEVICES
from flashgen.problem import DIRECTIONS, Problem
from flashgen.record import Counters, FunctionCounters, Measurement, Record, Status
from flashgen.report import document, workshop
from tests.browser.conftest import PHONE
from tests.cpu import rows

FIGURES = ("scores", "bytes", "ratio", "bound", "words")


def stated(seqlen: int = 8192, heads: int = 32, **changes: Any) -> Problem:
    values: dict[str, Any] = dict(
        batch=1, heads_q=heads, heads_kv=heads, seqlen_q=seqlen, seqlen_kv=seqlen, head_dim_qk=128, head_dim_v=128
    )
    return Problem(**(values | changes))


def measured() -> list[Record]:
    """A winner, as measured and as counted, and a peer on an H200 at two lengths, forward and causal, in batches."""
    found = []
    for seqlen, us in ((4096, 410.0), (8192, 790.0)):
        problem = stated(seqlen, heads=16, batch=16384 // seqlen, mask="causal")
        winner = rows.record(us, of=problem)
        function = FunctionCounters(name="", dram_read_bytes=2e8, dram_write_bytes=1e8, l2_read_bytes=4e9, l2_write_bytes=2e8)
        counted = Measurement(status=Status.COUNTED, counters=Counters(functions=(function,)))
        found += [winner, rows.peer("cudnn", 1.2 * us, of=problem), replace(winner, measurement=counted)]
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("workshop") / "workshop.html"
    document.write(file, workshop.html(workshop.data(measured())))
    return file


@pytest.fixture(scope="module")
def chartless(path: Path) -> Path:
    """The page with a stand-in for plotly.js, which takes a second to load."""
    text = path.read_text(encoding="utf-8")
    assert document.plotly_js() in text
    file = path.with_name("chartless.html")
    document.write(file, text.replace(document.plotly_js(), "window.Plotly = { react() {} };"))
    return file


def same(first: Any, second: Any) -> bool:
    return first == second if isinstance(second, str) else first == pytest.approx(second, rel=1e-9, abs=0)


# ---- formulas --------------------------------------------------------------------------------------------------------------


def test_its_model_is_theory(open_page: Callable[..., Any], chartless: Path) -> None:
    grid = itertools.product(
        (512, 8192, 100_000, 1 << 20),
        (32, 96, 128, 256),
        (1, 32),
        ("h100", "a100"),
        (None, 64 * 1024, 5e6),
        (2, 4),
        DIRECTIONS,
        (False, True),
    )
    names = ("seqlen", "dim", "heads", "device", "sram_bytes", "element_bytes", "direction", "causal")
    cases = [dict(zip(names, case)) for case in grid]
    for case in cases:
        case["sram_bytes"] = case["sram_bytes"] or DEVICES[case["device"]].smem_per_sm_bytes
    got = open_page(chartless).evaluate("cases => cases.map(each => model.layer({...each, device: DATA.devices[each.device]}))", cases)
    for case, seen in zip(cases, got):
        given = dict(case, head_dim=case["dim"], device=DEVICES[case["device"]])
        del given["dim"]
        for name, value in dataclasses.asdict(theory.layer(**given)).items():
            assert same(seen[name], value), (case, name)


def changed(picked: Candidate, chance: random.Random) -> Candidate:
    """The candidate with other tiles, stages and warps."""
    config = replace(picked.config, num_stages=chance.choice([1, 2, 3]))
    if picked.variant.backend == "triton":
        config = replace(
            config,
            block_m=chance.choice([16, 32, 64, 128]),
            block_n=chance.choice([16, 32, 64, 128]),
            num_warps=chance.choice([1, 2, 4, 8]),
            persistent=picked.variant.family == "forward" and chance.random() < 0.5,
        )
    elif picked.variant.family == "forward":
        warpgroups, buffers = chance.choice([1, 2, 3]), chance.choice([1, 2])
        config = replace(config, block_m=64 * warpgroups, num_warps=4 * warpgroups, block_n=chance.choice([64, 128]), q_stages=buffers)
    return replace(picked, config=config)


def test_its_estimates_are_those_of_cost(open_page: Callable[..., Any], chartless: Path) -> None:
    chance, cases, wanted = random.Random(0), [], []
    for device, dim, dtype, mask, direction in itertools.product(
        ("h100_pcie", "h200", "a100"), (64, 96, 256), ("bfloat16", "float32"), ("full", "causal"), DIRECTIONS
    ):
        like, part = stated(head_dim_qk=dim, head_dim_v=dim, dtype=dtype, mask=mask, direction=direction), DEVICES[device]
        picked = {space.default(like, part), space.portable_default(like, part)}
        for candidate in [each for each in picked for _ in range(4)]:
            seqlen, heads = chance.choice([512, 1000, 4096, 8192, 30_000, 131_072]), chance.choice([1, 7, 32, 128])
            problem = replace(like, heads_q=heads, heads_kv=heads, seqlen_q=seqlen, seqlen_kv=seqlen)
            candidate = changed(candidate, chance)
            fields = dataclasses.asdict(candidate.variant) | dataclasses.asdict(candidate.config)
            choice = dict(direction=direction, heads=heads, seqlen=seqlen, dim=dim, dtype=dtype, causal=mask == "causal")
            cases.append([fields, choice, device])
            guess = resources.guess(candidate, problem, part)
            wanted.append((dataclasses.asdict(cost.estimate(candidate, problem, part, guess)), guess))
    got = open_page(chartless).evaluate(
        "cases => cases.map(([candidate, problem, device]) => model.estimate(candidate, problem, DATA.devices[device]))", cases
    )
    assert len(cases) > 300
    for case, seen, (estimate, guess) in zip(cases, got, wanted):
        for name, value in estimate.items():
            assert same(seen[name], value), (case, name, seen[name], value)
        for name in ("registers", "spill_bytes", "smem_bytes"):
            assert seen["resources"][name] == getattr(guess, name), (case, name)


def test_shared_memory_is_shown_whole(open_page: Callable[..., Any], chartless: Path) -> None:
    page = open_page(chartless, "#device=h200&d=64&dir=backward")
    total = page.evaluate("model.guess(chosen().candidate, problemAt(state.seqlen), device()).smem_bytes")
    parts = page.evaluate("model.smemParts(chosen().candidate, problemAt(state.seqlen), device())")
    assert sum(size * copies for _, size, copies in parts) == total
    assert page.inner_text("#smem_size") == page.evaluate(f"`${{kib({total})}} of 227 KB`")


# ---- what it says ----------------------------------------------------------------------------------------------------------


def test_the_figures_of_the_anchor_table(open_page: Callable[..., Any], path: Path) -> None:
    page = open_page(path)
    scores, moved, ratio, bound, words = (page.inner_text(f"#{name}") for name in FIGURES)
    assert (scores, moved, ratio, bound) == ("4.3 GB", "11.8x less", "4.7x faster", "HBM → arithmetic")
    assert "5.2 ms against 1.1 ms" in words
    for fragment, name, figure in (("d=64", "bytes", "39.7x less"), ("n=512", "bytes", "3.9x less"), ("n=131072", "scores", "1.1 TB")):
        page.evaluate(f"location.hash = '{fragment}'")
        page.wait_for_function(f"document.getElementById('{name}').textContent === '{figure}'")


def test_measured_times_are_scaled_to_the_heads(open_page: Callable[..., Any], chartless: Path) -> None:
    page = open_page(chartless, "#device=h200&mask=causal&h=16")
    bars = page.inner_text("#bars")
    assert "395 µs" in bars and "474 µs" in bars, bars  # of 2 x 16 heads
    assert "cuDNN" in bars and "flashgen is 1.20x as fast" in bars
    assert "winner" in page.inner_text("#base")
    assert "counted by the GPU" in page.inner_text("#traffic_legend")
    page.select_option("#base", "winner")
    page.wait_for_function("document.getElementById('levels').innerText.includes('counted')")
    assert "150.0 MB" in page.inner_text("#levels") or "150 MB" in page.inner_text("#levels")  # of 2 x 16 heads
    page.click("#lengths button")
    page.wait_for_function("location.hash.includes('n=4096')")
    assert "Nothing was measured on this device" in open_page(chartless, "#mask=causal").inner_text("#measured")


def test_what_does_not_fit_is_said(open_page: Callable[..., Any], chartless: Path) -> None:
    page = open_page(chartless, "#device=h200&d=256&kernel=hopper&tile=192x128&stages=4")
    assert "needs" in page.inner_text("#misfit")
    page.click("#kernel_reset")
    page.wait_for_function("document.getElementById('misfit').hidden")


# ---- how it is used --------------------------------------------------------------------------------------------------------


def test_the_address_keeps_the_view(open_page: Callable[..., Any], chartless: Path) -> None:
    page = open_page(chartless)
    page.fill("#seqlen", "100000")
    page.keyboard.press("Tab")
    page.check("input[name=dim][value='64']", force=True)
    page.select_option("#device", "a100")
    page.select_option("#tile", "64x32")
    page.wait_for_function("location.hash.includes('tile')")
    fragment = page.evaluate("location.hash")
    given = parse_qs(fragment[1:])
    assert given == {"n": ["100000"], "d": ["64"], "device": ["a100"], "tile": ["64x32"]}
    again = open_page(chartless, fragment)
    assert [again.inner_text(f"#{name}") for name in FIGURES] == [page.inner_text(f"#{name}") for name in FIGURES]
    assert again.input_value("#tile") == "64x32"
    again.evaluate("location.hash = '#n=512'")
    again.wait_for_function("document.getElementById('seqlen').value === '512'")


def test_nonsense_in_the_address_is_left_out(open_page: Callable[..., Any], chartless: Path) -> None:
    page = open_page(chartless, "#n=abc&d=7&h=99999999&device=toaster&kb=-3&tile=1x1&kernel=<b>&stages=x&dir=up")
    assert page.input_value("#seqlen") == "8192" and page.input_value("#device") == "h100" and page.input_value("#heads") == "1024"


def test_the_keyboard_is_enough(open_page: Callable[..., Any], chartless: Path) -> None:
    page = open_page(chartless)
    page.focus("#seqlen_slider")
    page.keyboard.press("End")
    page.wait_for_function("document.getElementById('seqlen').value === '1048576'")
    assert "it cannot run at all" in page.inner_text("#scores_note")
    page.focus("input[name=dim][value='128']")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.getElementById('words').textContent && location.hash.includes('d=192')")
    reached = set()
    page.evaluate("document.activeElement.blur()")
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.name || document.activeElement.tagName"))
    assert reached >= {"seqlen_slider", "seqlen", "sram_slider", "sram_kb", "dim", "heads", "direction", "mask", "dtype", "device"}
    assert reached >= {"base", "tile", "stages", "play", "step", "SUMMARY"}
    page.focus("#step")
    before = page.inner_text("#step_words")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#step_words") != before
    page.focus("#play")
    page.keyboard.press("Enter")
    step = page.input_value("#step")
    page.wait_for_function(f"document.getElementById('step').value !== '{step}'")


def test_a_phone_shows_it_without_scrolling_sideways(open_page: Callable[..., Any], path: Path) -> None:
    page = open_page(path, **PHONE)
    for fragment in ("", "n=700&dir=backward&device=h200&mask=causal", "n=1048576&dtype=float32&h=1024&device=a100"):
        page.evaluate(f"location.hash = '{fragment}'; read(); render()")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), fragment


def test_light_and_dark(open_page: Callable[..., Any], path: Path) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        page = open_page(path, color_scheme=scheme)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        ink, card = page.evaluate("[colour('ink'), colour('card')]")
        assert page.evaluate("getComputedStyle(document.querySelector('#traffic .xtick text')).fill") != card and ink != card
    assert grounds[0] != grounds[1]


def test_every_choice_draws(open_page: Callable[..., Any], chartless: Path) -> None:
    """No combination of the controls that are lists raises an error or writes a number that is none."""
    page = open_page(chartless)
    page.evaluate("""() => {
      const lists = [Object.keys(DATA.devices), ["bfloat16", "float32"]];
      lists.push(["forward", "backward"], ["full", "causal"], [32, 256], ["hopper", "triton"]);
      const all = lists.reduce((rows, list) => rows.flatMap((row) => list.map((value) => [...row, value])), [[]]);
      for (const [device, dtype, direction, mask, dim, base] of all) {
        Object.assign(state, { device, dtype, direction, mask, dim, base, seqlen: 1000, heads: 3 });
        render();
        const wrong = document.querySelector("main").textContent.match(/.{0,80}(NaN|undefined|Infinity|null)/);
        if (wrong) throw new Error(`${JSON.stringify(state)}: ${wrong[0]}`);
      }
    }""")
