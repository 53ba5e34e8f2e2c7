"""The measuring processes seen from outside: crashes, hangs, broken devices. The worker is a stand-in without a GPU."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen import space
from flashgen.candidate import Candidate
from flashgen.errors import LaunchError
from flashgen.record import Status
from flashgen.search import measurer
from flashgen.search.measurer import GpuMeasurer, Lost, Process
from flashgen.search.worker import Decide, Prepare
from tests.cpu.search_world import H200, SMALL

# Does as the number of stages of the candidate says. argv: import path, socket, index.
PROGRAM = """
import json, os, signal, subprocess, sys, time
sys.path[:] = json.loads(sys.argv[1])
from multiprocessing.connection import Connection
from flashgen.record import Measurement, Peer, Status
from flashgen.search.worker import Decide, Decision, Failed, Measure, Passed, Prepare, Ready
connection = Connection(int(sys.argv[2]))
ok = Measurement(status=Status.OK, times_us=(1.0,), median_us=1.0, spread_us=0.1)
folder = os.environ["STAND_IN"]
open(f"{folder}/started-{os.getpid()}", "w").close()
while True:
    try:
        request = connection.recv()
    except EOFError:
        break
    answer, broken = ok, False
    if isinstance(request, Prepare):
        connection.send(("note", "begun"))
        if os.path.exists(f"{folder}/cannot-start"):
            print("no device", file=sys.stderr, flush=True)
            os._exit(1)
        answer = Failed(message="out of memory") if os.path.exists(f"{folder}/no-memory") else Ready(gpu="NVIDIA H200")
    else:
        connection.send(("note", "built"))
        connection.send(("note", "begun"))
        if isinstance(request, Decide):
            answer = Decision(candidates=(ok,) * len(request.candidates), peers=((Peer(name="cudnn", version="9"), ok),))
        else:
            stages = request.candidate.config.num_stages
            if stages == 11:
                os.kill(os.getpid(), signal.SIGSEGV)
            if stages == 12:
                print("terminate called", file=sys.stderr, flush=True)
                os._exit(134)
            if stages == 13:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                child = subprocess.Popen(["sleep", "600"])
                open(f"{folder}/hangs", "w").write(f"{os.getpid()} {child.pid}")
                time.sleep(600)
            if stages == 14:
                answer, broken = Measurement(status=Status.LAUNCH_ERROR, message="an illegal memory access"), True
            if not isinstance(request, Measure) and stages != 14:
                answer = Passed()
    connection.send(("answer", answer, broken))
    if broken:
        os._exit(0)
"""

GOOD = space.default(SMALL, H200)


def acting(stages: int) -> Candidate:
    return replace(GOOD, config=replace(GOOD.config, num_stages=stages))


SEGFAULT, ABORT, HANG, BREAK = (acting(stages) for stages in (11, 12, 13, 14))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    return tmp_path


@pytest.fixture
def bench(folder: Path) -> Iterator[GpuMeasurer]:
    made = GpuMeasurer(0, lambda index: Process(index, PROGRAM))
    made.open(SMALL, H200, 0)
    yield made
    made.close()


def status(bench: GpuMeasurer, candidate: Candidate) -> tuple[Status, str]:
    bench.begin(candidate, None, None, 1e-3)
    while (measurement := bench.poll(0.5)) is None:
        pass
    return measurement.status, measurement.message


def started(folder: Path) -> int:
    return len(list(folder.glob("started-*")))


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split(")")[1].split()[0] != "Z"


def test_measures_and_stands_by(bench: GpuMeasurer, folder: Path) -> None:
    """One process serves; once it is up, another one stands by."""
    assert status(bench, GOOD) == (Status.OK, "")
    assert bench.gpu == "NVIDIA H200"
    assert status(bench, GOOD) == (Status.OK, "")
    assert bench.stress(GOOD, 7) is None
    assert started(folder) == 2


def test_a_crash_is_its_candidates_own(bench: GpuMeasurer, folder: Path) -> None:
    """T05: the candidate that kills the process is CRASHED, with the last words; the next ones are measured by another process."""
    assert status(bench, GOOD)[0] is Status.OK
    crashed, message = status(bench, SEGFAULT)
    assert crashed is Status.CRASHED and "SIGSEGV" in message
    assert status(bench, GOOD)[0] is Status.OK
    crashed, message = status(bench, ABORT)
    assert crashed is Status.CRASHED and "status 134" in message and "terminate called" in message
    assert [status(bench, GOOD)[0] for _ in range(2)] == [Status.OK] * 2


def test_a_broken_device_is_replaced(bench: GpuMeasurer) -> None:
    """T05: after an error that stays in the CUDA context, a fresh process measures; nothing later is mislabelled."""
    assert status(bench, BREAK) == (Status.LAUNCH_ERROR, "an illegal memory access")
    assert [status(bench, GOOD)[0] for _ in range(3)] == [Status.OK] * 3
    fault = bench.stress(BREAK, 7)
    assert fault is not None and fault.status is Status.LAUNCH_ERROR
    assert bench.stress(GOOD, 7) is None


def test_a_hang_is_killed_with_all_it_started(bench: GpuMeasurer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T04: the trial is TIMEOUT, wall time is bounded, and neither the process nor its child lives on."""
    monkeypatch.setattr(measurer, "LEAST_LIMIT_S", 1.0)
    assert status(bench, GOOD)[0] is Status.OK
    began = time.monotonic()
    timeout, message = status(bench, HANG)
    assert timeout is Status.TIMEOUT and "killed" in message
    assert time.monotonic() - began < 10
    pids = [int(pid) for pid in (folder / "hangs").read_text().split()]
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
    assert status(bench, GOOD)[0] is Status.OK


def test_a_hanging_winner_is_found_out(bench: GpuMeasurer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurer, "PREPARE_S", 1.0)
    fault = bench.stress(HANG, 7)
    assert fault is not None and fault.status is Status.TIMEOUT
    assert bench.stress(GOOD, 7) is None


def test_no_candidate_is_blamed_for_a_device_that_does_not_start(folder: Path) -> None:
    """Processes that are lost before they measure anything end the search with the reason, after a few tries."""
    (folder / "cannot-start").touch()
    bench = GpuMeasurer(0, lambda index: Process(index, PROGRAM))
    with pytest.raises(LaunchError, match="no device"):
        bench.open(SMALL, H200, 0)
        status(bench, GOOD)
    bench.close()
    assert started(folder) == measurer.MOST_LOST


def test_no_memory_for_the_oracle_ends_the_search(folder: Path) -> None:
    (folder / "no-memory").touch()
    bench = GpuMeasurer(0, lambda index: Process(index, PROGRAM))
    bench.open(SMALL, H200, 0)
    with pytest.raises(LaunchError, match="out of memory"):
        status(bench, GOOD)
    bench.close()


def test_finalists_are_compared(bench: GpuMeasurer) -> None:
    request = Decide(candidates=(GOOD, acting(1)), reference=GOOD, reference_us=1.0, peers=True)
    decision = bench.decide(request)
    assert len(decision.candidates) == 2 and decision.peers[0][0].name == "cudnn"


def test_the_next_problem_is_prepared_once(bench: GpuMeasurer, folder: Path) -> None:
    """One process serves several problems in a row."""
    assert status(bench, GOOD)[0] is Status.OK
    bench.open(replace(SMALL, batch=2), H200, 0)
    assert status(bench, GOOD)[0] is Status.OK
    assert started(folder) <= 2


def test_an_interrupted_question_is_not_answered_later(bench: GpuMeasurer) -> None:
    """After Ctrl-C within a measurement, the next search does not take the old answer for its own."""
    assert status(bench, GOOD)[0] is Status.OK
    bench.begin(BREAK, None, None, 1e-3)
    bench.open(replace(SMALL, batch=2), H200, 0)
    assert status(bench, GOOD)[0] is Status.OK


def test_closing_leaves_no_process(folder: Path) -> None:
    bench = GpuMeasurer(0, lambda index: Process(index, PROGRAM))
    bench.open(SMALL, H200, 0)
    assert status(bench, GOOD)[0] is Status.OK
    bench.close()
    pids = [int(path.name.split("-")[1]) for path in folder.glob("started-*")]
    assert pids and not any(map(is_alive, pids))


def test_a_killed_process_says_so(folder: Path) -> None:
    """Also one that somebody else kills, such as the kernel for want of memory."""
    process = Process(0, PROGRAM)
    process.send(Prepare(problem=SMALL, device=H200, seed=0, warm_up_s=1.0), 10.0)
    assert process.receive(60.0) is not None
    (path,) = folder.glob("started-*")
    os.kill(int(path.name.split("-")[1]), signal.SIGKILL)
    with pytest.raises(Lost, match="SIGKILL"):
        process.receive(5.0)


def test_the_real_worker_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's own program starts, finds no device, and the search is told why."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.setattr(measurer, "MOST_LOST", 1)
    bench = GpuMeasurer(0)
    bench.open(SMALL, H200, 0)
    with pytest.raises(LaunchError, match=r"(?i)cuda|nvidia"):
        status(bench, GOOD)
    bench.close()
