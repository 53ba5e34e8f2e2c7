"""What runs in the measuring process, with real kernels, checks and comparisons: in Triton's interpreter, with a made-up timer."""

import json
import os
import subprocess
import sys

import pytest

from flashgen.errors import ArgumentError, BuildError, BuildTimeoutError, LaunchError, OutOfResourcesError
from flashgen.record import Status
from flashgen.search.worker import _sentence, _status

# The child: the worker on the CPU. The GPU's part is played by a timer that gives each launch its tile's time.
PROGRAM = """
import json, sys
import torch
torch.cuda.set_device = lambda index: None
torch.cuda.synchronize = lambda index=None: None
torch.cuda.get_device_name = lambda index: "made up"
from dataclasses import replace
from flashgen import bench, build, space
from flashgen.device import Device
from flashgen.problem import Problem
from flashgen.record import Resources
from flashgen.search import worker
from flashgen.search.worker import Decide, Failed, Measure, Passed, Prepare, Stress, Worker

resources = Resources(registers=1, spill_bytes=0, smem_bytes=1, binary_sha256="x")
build.Kernel.resources = property(lambda self: resources)

class Timer:
    now = 0.0
    def measure(self, calls):
        self.now += 0.01 * len(calls)
        return [100.0 + number for number, _ in enumerate(calls)]
    def burst(self, seconds):
        self.now += seconds
        return 1.0
    def clock(self):
        return self.now

notes = []
sizes = dict(batch=1, heads_q=2, heads_kv=2, seqlen_q=48, seqlen_kv=48, head_dim_qk=16, head_dim_v=16)
problem = Problem(direction=sys.argv[1], dtype="float16", mask="causal", **sizes)
device = Device.named("h200")
made = Worker(0, notes.append, place="cpu")
made._bench = bench.Bench(gpu=Timer())
default = space.portable_default(problem, device)
other = next(each for each in space.candidates(problem, device) if each.variant.backend == "triton" and each != default)
said = {}

def ask(name, request):
    answer, broken = made.answer(request)
    said[name] = [type(answer).__name__, getattr(getattr(answer, "status", None), "value", ""), getattr(answer, "message", ""), broken]
    return answer

ask("prepare", Prepare(problem=problem, device=device, seed=1, warm_up_s=3.0))
first = ask("measure", Measure(candidate=default))
assert first.error <= first.tolerance and first.resources == resources and first.median_us > 0, first
second = ask("against", Measure(candidate=other, incumbent=default, incumbent_us=50.0))
assert 40 < second.median_us < 60, second  # corrected to what the incumbent is known to take
decision = ask("decide", Decide(candidates=(default, other), reference=default, reference_us=50.0, peers=True))
assert decision.candidates[0].median_us == 50.0 and len(decision.candidates) == 2
assert all(peer.name != "math" and measured.median_us > 0 for peer, measured in decision.peers)
worker.STRESS_REPEATS = 2
ask("stress", Stress(candidate=other, problem=problem, device=device, seed=7))
class Off:
    def __init__(self, launch):
        self.launch = launch
    def __call__(self, *tensors):
        self.launch(*tensors)
        tensors[3 if problem.direction == "forward" else 8].mul_(1.01)  # out, or dk
made._launches[default] = (Off(made._launches[default][0]), resources)
ask("wrong", Measure(candidate=default))
class Fails:
    def __call__(self, *tensors):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\\nmore")
made._launches[default] = (Fails(), resources)
ask("fails", Measure(candidate=default))
def gone(index=None):
    raise RuntimeError("CUDA error")
torch.cuda.synchronize = gone
ask("broken", Measure(candidate=default))
torch.cuda.synchronize = lambda index=None: None
illegal = replace(default, config=replace(default.config, num_warps=3))
ask("illegal", Measure(candidate=illegal))
class NoRoom:
    def __call__(self, *tensors):
        raise torch.OutOfMemoryError("CUDA out of memory")
made._launches[default] = (NoRoom(), resources)
ask("memory", Measure(candidate=default))
print(json.dumps([said, notes]))
"""


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_worker_answers(direction: str) -> None:
    """Real kernels: measured against the incumbent, compared with peers, stressed; wrong results, errors of the device and a lack of
    memory are told apart (T05, T07, T18)."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, "-c", PROGRAM, direction], capture_output=True, text=True, env=environment, timeout=280)
    assert child.returncode == 0, child.stderr
    said, notes = json.loads(child.stdout.splitlines()[-1])
    assert said["prepare"] == ["Ready", "", "", False]
    assert said["measure"] == ["Measurement", "ok", "", False] == said["against"]
    assert said["decide"][0] == "Decision" and said["stress"][0] == "Passed"
    assert said["wrong"][:2] == ["Measurement", "wrong_result"] and "above" in said["wrong"][2]
    assert said["fails"] == ["Measurement", "launch_error", "CUDA error: an illegal memory access was encountered more", False]
    assert said["broken"][1] == "launch_error" and said["broken"][3] is True
    assert said["illegal"][1] in ("compile_error", "invalid", "out_of_resources")
    assert said["memory"] == ["Failed", "", "CUDA out of memory", False]
    assert set(notes) == {"started", "begun", "built"} and notes.index("built") < len(notes) - 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OutOfResourcesError("x"), Status.OUT_OF_RESOURCES),
        (BuildTimeoutError("x"), Status.TIMEOUT),
        (BuildError("x"), Status.COMPILE_ERROR),
        (LaunchError("x"), Status.LAUNCH_ERROR),
        (RuntimeError("CUDA error: invalid argument"), Status.LAUNCH_ERROR),
        (ArgumentError("x"), Status.INVALID),
    ],
)
def test_status_of_an_error(error: Exception, status: Status) -> None:
    assert _status(error) is status


def test_messages_are_one_line() -> None:
    assert _sentence(RuntimeError("a\n\n  b ")) == "a b"
    assert _sentence(MemoryError()) == "MemoryError"
