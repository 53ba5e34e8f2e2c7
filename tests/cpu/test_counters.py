"""Counters: Nsight Compute's answer read, its refusals told apart, rows kept and shown. Its output here is made up, in the form that
ncu 2025 prints; no number comes from a GPU."""

import io
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flashgen import canonical, space, theory
from flashgen.cli import counters as command
from flashgen.counters import Ncu, compare, medians, metrics, ncu
from flashgen.counters.comparison import paper_bytes
from flashgen.database import Database
from flashgen.device import Device
from flashgen.errors import ArgumentError, LaunchError, ProfilerError
from flashgen.problem import Problem
from flashgen.record import Counters, FunctionCounters, Measurement, Record, Resources, Status
from flashgen.report import counters as tables
from flashgen.report.summary import summarize
from tests.cpu import rows
from tests.cpu.rows import H200
from tests.cpu.test_cli import answer, refused, run

OUTPUT = (Path(__file__).parent / "ncu_raw.txt").read_text()  # of a fused backward kernel
RESOURCES = Resources(registers=168, spill_bytes=0, smem_bytes=213_000, binary_sha256="ab" * 32)
BACKWARD = rows.problem(direction="backward")
OPTIONS = ["--seqlen", "4096", "--head-dim", "128", "--heads", "16", "--batch", "4"]


def counters(**changes: Any) -> Counters:
    launches = metrics.parsed(OUTPUT)
    return replace(Counters(functions=metrics.functions(launches), profiler="2025.3.1.0"), **changes)


def counted(problem: Problem = BACKWARD, second: int = 0, **changes: Any) -> Record:
    """A row that was counted."""
    made = rows.record(of=problem, status=Status.PREDICTED, predicted_us=1000.0, second=second)
    return replace(made, measurement=Measurement(status=Status.COUNTED, resources=RESOURCES, counters=counters(**changes)))


# ---- what ncu prints -------------------------------------------------------------------------------------------------


def test_figures_of_each_function() -> None:
    delta, dkdv, convert = metrics.functions(metrics.parsed(OUTPUT))
    assert [each.name for each in (delta, dkdv, convert)] == [f"attention_backward_{name}" for name in ("delta", "dkdv", "dq_convert")]
    assert dkdv.time_us == pytest.approx(1482.304) and dkdv.sm_clock_mhz == pytest.approx(1650)
    assert (dkdv.dram_read_bytes, dkdv.dram_write_bytes) == (331_350_016, 98_566_144)
    assert (dkdv.l2_read_bytes, dkdv.l2_write_bytes, dkdv.l2_slice_bytes) == (4_362_076_160, 2_281_701_376, 9_923_198_976)
    assert dkdv.tensor_share == pytest.approx(0.6137) and dkdv.exp_share == pytest.approx(0.2108)
    assert dkdv.occupancy == pytest.approx(0.1861) and dkdv.issue_share == pytest.approx(0.3825)
    assert (dkdv.smem_share, dkdv.bank_read_share) == (pytest.approx(0.0987), pytest.approx(0.447))
    assert dkdv.stalls is not None and dkdv.stalls["gmma"] == 3.35 and "misc" not in dkdv.stalls
    assert delta.tensor_share == 0.0  # counted, and none


def test_what_was_not_given_is_said() -> None:
    launches = metrics.parsed(OUTPUT)
    assert metrics.missing(metrics.wanted(), launches) == (metrics.STALLS["misc"],)
    assert metrics.missing(["new__metric.sum"], launches) == ("new__metric.sum",)
    without = metrics.functions(metrics.parsed(OUTPUT.replace("dram__bytes_read.sum", "dram__bytes_seen.sum")))
    assert without[0].dram_read_bytes is None and without[0].dram_write_bytes == 1_310_720
    assert metrics.parsed("==ERROR== none\n") == [] == metrics.parsed("")
    assert metrics.functions([("empty", {})]) == (FunctionCounters(name="empty"),)


@pytest.mark.parametrize(("unit", "value"), [("ns", 5e-9), ("msecond", 5e-3), ("Mbyte", 5e6), ("%", 0.05), ("inst", 5.0), ("", 5.0)])
def test_units(unit: str, value: float) -> None:
    """Other releases spell them otherwise, and scale them unless told not to."""
    text = f'"ID","Kernel Name","some__metric.sum"\n"","","{unit}"\n"0","kernel","5"\n'
    assert metrics.parsed(text) == [("kernel", {"some__metric.sum": pytest.approx(value)})]


def test_second_choices_are_asked_for_where_the_first_is_unknown() -> None:
    assert "dram__bytes_op_read.sum" not in metrics.wanted()
    without = metrics.wanted({"dram__bytes_read.sum", metrics.STALLS["gmma"]})
    assert "dram__bytes_op_read.sum" in without and metrics.STALLS["gmma"] not in without
    renamed = OUTPUT.replace("dram__bytes_read.sum", "dram__bytes_op_read.sum")
    assert metrics.functions(metrics.parsed(renamed)) == metrics.functions(metrics.parsed(OUTPUT))


def test_sums_and_means_over_functions() -> None:
    whole = counters()
    assert whole.time_us == pytest.approx(52.416 + 1482.304 + 60.480)
    assert whole.dram_bytes == 134_742_528 + 1_310_720 + 331_350_016 + 98_566_144 + 134_218_240 + 22_282_240
    assert whole.mean("tensor_share") == pytest.approx(0.6137 * 1482.304 / whole.time_us)
    partly = replace(whole, functions=(*whole.functions[1:], FunctionCounters(name="silent", time_us=1.0)))
    assert partly.dram_bytes is None and partly.mean("tensor_share") is None and partly.time_us is not None
    assert Counters(functions=(FunctionCounters(name="silent"),)).mean("occupancy") is None


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_exactly_counted_rows_have_counters() -> None:
    with pytest.raises(ArgumentError, match="exactly counted rows"):
        Measurement(status=Status.COUNTED)
    with pytest.raises(ArgumentError, match="exactly counted rows"):
        Measurement(status=Status.OK, median_us=1.0, counters=counters())


def test_rows_without_counters_are_stored_as_before() -> None:
    assert "counters" not in canonical.to_text(rows.record(300.0))


def test_counted_rows_are_kept_and_travel(tmp_path: Path) -> None:
    """Export, import and merge carry them; nothing that was counted is taken for a trial."""
    row, trial = counted(), rows.record(900.0, of=BACKWARD)
    here = Database.open(tmp_path / "here.sqlite")
    assert here.add([row, trial]) == 2 and here.add(row) == 0
    assert here.records(BACKWARD, H200, Status.COUNTED) == [row]
    assert here.winner(BACKWARD, H200) == trial and here.ranked(BACKWARD, H200) == [trial]
    assert here.export(tmp_path / "rows.jsonl", compact=True) == 2
    for other, source in (("imported.sqlite", "rows.jsonl"), ("merged.sqlite", "here.sqlite")):
        there = Database.open(tmp_path / other)
        assert there.merge(tmp_path / source).added == 2 and there.merge(tmp_path / source).added == 0
        (brought,) = there.records(status=Status.COUNTED)
        assert brought.key == row.key and brought.measurement == row.measurement
    assert here.info()["by_status"] == {"counted": 1, "ok": 1}
    assert here.prune(status=Status.COUNTED) == 1 and here.records() == [trial]


def test_reports_take_no_counted_row_for_a_trial() -> None:
    assert summarize([counted()]) == []
    (summary,) = summarize([rows.record(900.0, of=BACKWARD), counted(second=9)])
    assert [row.measurement.status for row in summary.trials] == [Status.OK]


# ---- predicted against counted ---------------------------------------------------------------------------------------


def test_ratios() -> None:
    row = counted()
    compared = compare(row)
    assert compared.time_ratio == pytest.approx(1000 / 1595.2)
    assert compared.dram_ratio == pytest.approx(1e8 / compared.counters.dram_bytes)  # type: ignore[operator]
    assert compared.compulsory_ratio == pytest.approx(compared.counters.dram_bytes / theory.compulsory_bytes(BACKWARD))  # type: ignore[operator]
    with pytest.raises(ArgumentError, match="status is ok"):
        compare(rows.record(900.0))


def test_medians_leave_out_what_is_not_known() -> None:
    silent = counted(functions=(FunctionCounters(name="silent", time_us=500.0),))
    found = medians([compare(counted()), compare(silent)])
    assert found.rows == 2 and found.dram_error == pytest.approx(abs(1e8 / 722_469_888 - 1))
    assert found.time_error == pytest.approx((1 - 1000 / 1595.2 + 1) / 2)
    assert medians([]).time_error is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_papers_traffic(direction: str) -> None:
    """The model's own of a whole square; of a causal one, half of what grows with its area; none where sides differ."""
    full = rows.problem(direction=direction, mask="full")
    once, whole = (theory.flash_elements(4096, 128, elements, direction) for elements in (1e30, H200.smem_per_sm_bytes / 2))
    assert paper_bytes(full, H200) == pytest.approx(4 * 16 * 2 * whole)
    assert paper_bytes(replace(full, mask="causal"), H200) == pytest.approx(4 * 16 * 2 * (once + whole) / 2, rel=1e-3)
    assert paper_bytes(replace(full, heads_kv=4), H200) is None


def test_tables_say_what_was_counted_and_how() -> None:
    console = Console(width=300, record=True, file=io.StringIO())
    found = [compare(counted(missing=("some__metric.sum",)))]
    tables.show(found, medians(found), console)
    text = console.export_text()
    assert "attention_backward_dkdv" in text and "gmma 3.4, barrier 2.1" in text
    assert "cold" in text and "some__metric.sum" in text and "Medians" not in text
    tables.show(2 * found, medians(2 * found), console)
    text = console.export_text()
    assert "over 2 kernels" in text and "attention_backward_dkdv" not in text
    silent = [compare(counted(functions=(FunctionCounters(name="silent"),)))]
    tables.show(silent, medians(silent), console)
    assert tables.UNKNOWN in console.export_text()


# ---- the program ncu -------------------------------------------------------------------------------------------------

FAKE = """#!{python}
import json, os, sys
if "--version" in sys.argv:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 36398880) (public-release)")
    sys.exit()
folder = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(folder, "calls"), "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
log = open(sys.argv[sys.argv.index("--log-file") + 1], "w")
request = json.load(open(sys.argv[-1]))
metrics = sys.argv[sys.argv.index("--metrics") + 1].split(",")
def answer(**said):
    json.dump(said, open(request["answer"], "w"))
def counted():
    answer(resources={resources}, gpu="NVIDIA H200")
    log.write(open({output}).read())
{behaviour}
"""
BEHAVIOURS = {
    "counts": "counted()",
    "denied": "log.write('==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on "
    "the target device 0.'); answer(resources={resources}, gpu='NVIDIA H200')",
    "unknown metric": r"""
unknown = [name for name in ('dram__bytes_read.sum', 'smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio') if name in metrics]
if unknown:
    spelled = unknown[0].replace('.', '\\.')
    print('==ERROR== Failed to find metric regex:^' + spelled + '$')
    sys.exit(1)
counted()""",
    "no profiler": "log.write('==ERROR== Failed to initialize the profiler: LibraryNotLoaded'); sys.exit(1)",
    "nothing": "log.write('==WARNING== No kernels were profiled.'); answer(resources={resources}, gpu='NVIDIA H200')",
    "driver fails": "answer(error='it gives a wrong result'); sys.exit(1)",
    "crashes": "print('CUDA error: an illegal memory access'); sys.exit(139)",
    "hangs": "import time; time.sleep(60)",
}

Fake = Callable[[str], Path]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts an ncu that behaves so on PATH, and gives the file in which it keeps how it was called."""

    def make(behaviour: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        resources = repr(canonical.to_dict(RESOURCES))
        output = repr(str(Path(__file__).parent / "ncu_raw.txt"))
        words = BEHAVIOURS[behaviour].replace("{resources}", resources)
        program = folder / "ncu"
        program.write_text(FAKE.format(python=sys.executable, resources=resources, output=output, behaviour=words))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        return folder / "calls"

    return make


def count(**more: Any) -> ncu.Counted:
    return Ncu.find().count(space.default(BACKWARD, H200), BACKWARD, H200, **more)


def test_a_candidate_is_counted(fake: Fake) -> None:
    calls = fake("counts")
    found = count()
    assert found.counters == counters(missing=(metrics.STALLS["misc"],)) and found.counters.profiler == "2025.3.1.0"
    assert found.resources == RESOURCES and found.gpu == "NVIDIA H200"
    assert count(cache="warm").counters.cache == "warm"
    cold, warm = (json.loads(line) for line in calls.read_text().splitlines())
    words = " ".join(cold)
    assert "--clock-control none --cache-control all" in words and "--profile-from-start off" in words
    assert "--csv --page raw --print-units base" in words and "--cache-control none" in " ".join(warm)
    with pytest.raises(ArgumentError, match="cache is 'hot'"):
        count(cache="hot")


def test_metrics_that_ncu_does_not_know_are_left_out_from_then_on(fake: Fake) -> None:
    """One at a time, as ncu names them; a second choice takes the place of the first."""
    calls = fake("unknown metric")
    found, program = [], Ncu.find()
    for _ in range(2):
        found.append(program.count(space.default(BACKWARD, H200), BACKWARD, H200).counters)
    assert len(calls.read_text().splitlines()) == 4
    assert found[0] == found[1] and program.unknown == {"dram__bytes_read.sum", metrics.STALLS["gmma"]}
    assert program.unknown < set(found[0].missing)


def test_a_metric_may_be_named_in_many_ways() -> None:
    asked = ["dram__bytes_read.sum", "sm__foo.avg", "sm__foo.avg.per_second"]
    for words, named in (
        ("Failed to find metric dram__bytes_read.sum", {"dram__bytes_read.sum"}),
        (r"Failed to find metric regex:^dram__bytes_read\.sum\.(sum|min)$", {"dram__bytes_read.sum"}),
        ("Failed to find metric regex:^sm__foo.avg.per_second$", {"sm__foo.avg.per_second"}),
        ("Failed to find metric dram__bytes_read", {"dram__bytes_read.sum"}),
        ("Profiling failed", set()),
    ):
        assert ncu._unknown(f"==PROF== Connected\n==ERROR== {words}\n", asked) == named
    with pytest.raises(ProfilerError, match="nobody__asked"):
        ncu._unknown("==ERROR== Failed to find metric nobody__asked.sum", asked)


@pytest.mark.parametrize(
    ("behaviour", "error", "words"),
    [
        ("denied", ProfilerError, "ERR_NVGPUCTRPERM.*root.*NVreg_RestrictProfilingToAdminUsers=0"),
        ("no profiler", ProfilerError, "ncu failed: Failed to initialize the profiler: LibraryNotLoaded"),
        ("nothing", ProfilerError, "counted nothing: ==WARNING== No kernels were profiled"),
        ("driver fails", LaunchError, "it gives a wrong result"),
        ("crashes", LaunchError, "without an answer: CUDA error: an illegal memory access"),
    ],
)
def test_refusals_are_one_sentence(fake: Fake, behaviour: str, error: type[Exception], words: str) -> None:
    """What no candidate would survive is told from what is this one's fault."""
    fake(behaviour)
    with pytest.raises(error, match=words) as raised:
        count()
    assert "\n" not in str(raised.value)


def test_a_hang_ends_with_everything_that_was_started(fake: Fake) -> None:
    fake("hangs")
    began = time.monotonic()
    with pytest.raises(LaunchError, match="not counted within 1 s"):
        count(limit_s=1)
    assert time.monotonic() - began < 10


def test_ncu_is_missing_or_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for folder in ("2024.10.0", "2025.3.1", "2024.9.2"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(ncu, "FOLDERS", (f"{tmp_path}/*",))
    with pytest.raises(ProfilerError, match="neither on PATH"):
        Ncu.find()
    for folder in ("2024.10.0", "2025.3.1", "2024.9.2"):
        (tmp_path / folder / "ncu").write_text("no program")
    assert Ncu.find().path == str(tmp_path / "2025.3.1" / "ncu")
    with pytest.raises(ProfilerError, match="does not run"):
        count()


# ---- what runs under it ----------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys
from dataclasses import replace
import torch
seen = []
torch.cuda.set_device = lambda index: None
torch.cuda.synchronize = lambda index=None: seen.append("synchronize")
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_name = lambda index=None: "made up"
torch.cuda.profiler.start = lambda: seen.append("start")
torch.cuda.profiler.stop = lambda: seen.append("stop")
from flashgen import bench, build, canonical, check, space
from flashgen.bench import state
from flashgen.counters import driver
from flashgen.device import Device
from flashgen.problem import Problem
from flashgen.record import Resources

state.gpu_uuid = lambda index: "none"
build.Kernel.resources = property(lambda self: Resources(registers=1, spill_bytes=0, smem_bytes=1, binary_sha256="x"))
driver.count.__defaults__ = ("cpu", 0.0)
binds = check.Case.bind
def bind(self, launch):
    call = binds(self, launch)
    return lambda: (seen.append("call"), call())
check.Case.bind = bind
sizes = dict(batch=1, heads_q=1, heads_kv=1, seqlen_q=16, seqlen_kv=16, head_dim_qk=16, head_dim_v=16)
problem, device = Problem(dtype="float16", **sizes), Device.named("h200")
request = dict(problem=canonical.to_dict(problem), device=canonical.to_dict(device), answer=sys.argv[1])
codes = []
sound = space.portable_default(problem, device)
for candidate in (sound, replace(sound, config=replace(sound.config, num_warps=3))):
    try:
        driver.main({**request, "candidate": canonical.to_dict(candidate)})
    except SystemExit as end:
        codes.append(int(end.code))
    print(open(sys.argv[1]).read())
print(json.dumps([codes, seen]))
"""


def test_driver_checks_then_calls_once_while_counters_run(tmp_path: Path) -> None:
    """In Triton's interpreter. Where that cannot be, the answer says why."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "answer")]
    child = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert child.returncode == 0, child.stderr
    first, second, (codes, seen) = (json.loads(line) for line in child.stdout.splitlines()[-3:])
    assert first["gpu"] == "made up" and canonical.from_dict(Resources, first["resources"]).registers == 1
    assert seen[: seen.index("stop")][-3:] == ["start", "call", "synchronize"] and seen.index("call") < seen.index("start")
    assert codes == [0, 1] and "error" in second and "\n" not in second["error"]


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has an H200, and kernels need not be compiled for it."""
    monkeypatch.setattr(Device, "current", classmethod(lambda cls, index=None: H200))
    monkeypatch.setattr(command, "_compile", lambda left, part: None)


def test_counters_are_stored_and_counted_once(fake: Fake, gpu: None, own_database: Path) -> None:
    calls = fake("counts")
    code, out, err = run("counters", *OPTIONS, "--mask", "full,causal", "--direction", "forward,backward")
    assert code == 0, err
    assert "[4/4]" in err and "Medians of |predicted / counted - 1| over 4 kernels" in out
    stored = Database.open(own_database).records(status=Status.COUNTED)
    assert len(stored) == 4 and len({row.problem for row in stored}) == 4
    row = stored[0]
    assert row.estimate is not None and row.candidate is not None and len(row.source_sha256) == 64
    assert row.measurement.sm_clock_mhz is not None and row.provenance.gpu == "NVIDIA H200"
    found = answer("counters", *OPTIONS, "--mask", "full,causal", "--direction", "forward,backward")
    assert len(found["counted"]) == found["medians"]["rows"] == 4 and found["failed"] == []
    assert found["counted"][0]["dram_bytes"]["counted"] == 722_469_888
    assert len(calls.read_text().splitlines()) == 4
    for more in (["--force"], ["--cache", "warm"]):
        run("counters", *OPTIONS, *more)
    assert len(calls.read_text().splitlines()) == 6


def test_kernels_of_both_kinds_are_chosen(fake: Fake, gpu: None, own_database: Path) -> None:
    """The best measured one of each; where one cannot compute the problem, that is said."""
    fake("counts")
    problem = rows.problem(mask="full")
    portable = [each for each in space.candidates(problem, H200) if each.variant.backend == "triton"][:2]
    Database.open(own_database).add([rows.record(us, of=problem, candidate=each) for us, each in zip((900.0, 800.0), portable)])
    found = answer("counters", *OPTIONS, "--backend", "hopper,triton")["counted"]
    first, second = (Record.from_dict(each["record"]).candidate for each in found)
    assert first is not None and first.variant.backend == "hopper" and second == portable[1]
    code, _, err = run("counters", *OPTIONS, "--dtype", "fp32", "--backend", "hopper,triton")
    assert code == 0 and "no hopper kernel" in err


def test_one_candidate_may_be_named(fake: Fake, gpu: None) -> None:
    fake("counts")
    wanted = space.portable_default(rows.problem(mask="full"), H200)
    (found,) = answer("counters", *OPTIONS, "--candidate", canonical.to_text(wanted))["counted"]
    assert Record.from_dict(found["record"]).candidate == wanted
    assert "explain --json" in refused("counters", *OPTIONS, "--candidate", "128x64")
    assert "one problem" in refused("counters", *OPTIONS, "--mask", "full,causal", "--candidate", canonical.to_text(wanted))
    illegal = replace(wanted, config=replace(wanted.config, num_warps=3))
    assert "illegal" in refused("counters", *OPTIONS, "--candidate", canonical.to_text(illegal))


def test_what_fails_is_said_and_the_rest_goes_on(fake: Fake, gpu: None) -> None:
    fake("driver fails")
    code, out, _ = run("counters", *OPTIONS, "--mask", "full,causal")
    assert code == 1 and out.count("it gives a wrong result") == 2
    fake("denied")
    code, _, err = run("counters", *OPTIONS)
    assert code == 1 and "ERR_NVGPUCTRPERM" in err.splitlines()[-1]


def test_usage(gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "--cache is 'hot'" in refused("counters", *OPTIONS, "--cache", "hot")
    assert "--backend is 'cuda'" in refused("counters", *OPTIONS, "--backend", "cuda")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ncu, "FOLDERS", ())
    code, _, err = run("counters", *OPTIONS)
    assert code == 1 and "neither on PATH" in err
    monkeypatch.undo()
    assert "counters are those of the GPU here" in refused("counters", *OPTIONS)


def test_everything_is_compiled_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = []

    class Pool:
        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def submit(self, *what: object) -> None:
            submitted.append(what)

        def results(self) -> list[object]:
            return []

    monkeypatch.setattr("flashgen.build.CompilePool", Pool)
    command._compile([command.Wanted(BACKWARD, space.default(BACKWARD, H200))], H200)
    assert submitted == [(space.default(BACKWARD, H200), BACKWARD, H200)]
