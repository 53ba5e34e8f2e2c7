"""The policy of comparison under made-up times and clocks, the lock, the driver's answers, and PyTorch's backends on the CPU."""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import logging
import os
import random
import statistics
import subprocess
import sys
import threading
import time
import types

import pytest
import torch

from flashgen import bench, check
from flashgen.bench import comparison, measuring, state
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.problem import Problem
from flashgen.record import Peer


class FakeGpu:
    """A GPU whose times are known: a call's time_us, times noise, times what `drift` says of the clock's seconds."""

    def __init__(self, *, noise=0.0, drift=lambda seconds: 1.0, seed=0):
        self.noise, self.drift, self.random = noise, drift, random.Random(seed)
        self.seconds, self.log, self.bursts = 0.0, [], []

    def clock(self):
        return self.seconds

    def measure(self, calls):
        times = []
        for call in calls:
            time_us = call.time_us * self.drift(self.seconds) * max(0.5, self.random.gauss(1.0, self.noise))
            self.seconds += (time_us + 40) * 1e-6
            self.log.append(call)
            times.append(time_us)
        return times

    def burst(self, seconds):
        self.bursts.append(seconds)
        self.seconds += seconds
        return 1 / self.drift(self.seconds)


class FakeCall:
    def __init__(self, time_us):
        self.time_us, self.untimed = time_us, 0

    def __call__(self):
        self.untimed += 1


# ---- comparison --------------------------------------------------------------------------------------------------------


def test_rounds_are_interleaved_in_changing_order():
    """O12: each round has every call once, and each call comes after each other one about as often."""
    calls = {name: FakeCall(100 + number) for number, name in enumerate("abc")}
    gpu = FakeGpu()
    times = bench.compare(gpu, calls, policy=bench.Policy(least_rounds=200, most_rounds=200))
    log = "".join(next(name for name, call in calls.items() if call is entry) for entry in gpu.log)
    rounds = [log[start : start + 3] for start in range(0, 600, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    for first, second in itertools.permutations("abc", 2):
        assert 45 <= sum(first + second in each for each in rounds) <= 90  # 67 of 200, if by chance
    assert {name: each.median_us for name, each in times.items()} == {"a": 100, "b": 101, "c": 102}
    assert all(len(each.times_us) == 200 and each.spread_us == 0 and not each.dropped for each in times.values())


def test_median_and_spread():
    samples = iter([1.0, 2.0, 3.0, 4.0, 100.0])
    gpu = types.SimpleNamespace(measure=lambda calls: [next(samples) for _ in calls], clock=lambda: 0.0)
    (times,) = bench.compare(gpu, {"a": FakeCall(0)}, policy=bench.Policy(most_rounds=5, precision=0)).values()
    assert (times.median_us, times.spread_us, times.times_us) == (3.0, 1.0, (1.0, 2.0, 3.0, 4.0, 100.0))
    assert times.contended and times.standard_error_us == pytest.approx(0.831, abs=1e-3)


def test_nothing_to_compare():
    assert bench.compare(FakeGpu(), {}) == {}


@pytest.mark.parametrize("time_us", [20, 1000, 8000])
def test_a_comparison_keeps_to_its_time(time_us):
    """From a few microseconds to several milliseconds, with noise that no number of rounds would settle."""
    gpu = FakeGpu(noise=0.2)
    times = bench.compare(gpu, {"a": FakeCall(time_us), "b": FakeCall(time_us)}, reference="a", policy=bench.Policy(most_rounds=10**6))
    assert 0.15 < gpu.seconds < 0.26
    assert len(times["a"].times_us) == len(times["b"].times_us) >= 3


def test_slow_kernels_get_three_rounds():
    gpu = FakeGpu(noise=0.01)
    times = bench.compare(gpu, {"a": FakeCall(400_000), "b": FakeCall(410_000)}, reference="a")
    assert len(times["b"].times_us) == 3


def test_a_calm_gpu_needs_few_rounds():
    gpu = FakeGpu(noise=0.003)
    times = bench.compare(gpu, {"a": FakeCall(3000), "b": FakeCall(3000)}, reference="a")
    assert 8 <= len(times["a"].times_us) <= 20 and gpu.seconds < 0.13


def test_clearly_slower_calls_are_dropped_at_once():
    calls = {"incumbent": FakeCall(100), "slow": FakeCall(170), "close": FakeCall(140), "fast": FakeCall(60)}
    gpu = FakeGpu(noise=0.02)
    times = bench.compare(gpu, calls, reference="incumbent")
    assert {name: each.dropped for name, each in times.items()} == {"incumbent": False, "slow": True, "close": False, "fast": False}
    assert len(times["slow"].times_us) == 2 and times["slow"].median_us == pytest.approx(170, rel=0.1)
    gpu = FakeGpu(noise=0.02)
    times = bench.compare(gpu, {"incumbent": FakeCall(100), "slow": FakeCall(5000)}, reference="incumbent")
    assert len(gpu.log) == 4 and len(times["incumbent"].times_us) == 2  # alone, the incumbent has nobody to be compared with
    without = bench.compare(FakeGpu(), calls)
    assert {name for name, each in without.items() if each.dropped} == {"incumbent", "slow", "close"}


def test_the_reference_corrects_for_drift():
    """O12: everything is 20 % slower after the first comparison; results still compare with the old ones."""
    incumbent, worse, better = FakeCall(100.0), FakeCall(110.0), FakeCall(90.0)
    gpu = FakeGpu(drift=lambda seconds: 1.0 if seconds < 0.01 else 1.2)
    first = bench.compare(gpu, {"incumbent": incumbent}, policy=bench.Policy(most_rounds=10))
    gpu.seconds = 1.0
    for call, expected in ((worse, 110), (better, 90)):
        times = bench.compare(gpu, {"incumbent": incumbent, "call": call}, reference="incumbent", reference_us=first["incumbent"].median_us)
        assert times["call"].median_us == pytest.approx(expected)
        assert times["incumbent"].median_us == pytest.approx(100)
        assert times["call"].times_us[0] == pytest.approx(1.2 * expected)


@pytest.mark.parametrize("seed", range(5))
def test_the_true_best_wins_on_a_slowing_gpu(seed):
    """O12: 20 % slower from the tenth trial on, and a slope within; the fastest kernel comes last."""
    gpu = FakeGpu(noise=0.01, seed=seed, drift=lambda seconds: (1.2 if seconds > 1.0 else 1.0) * (1 + 0.1 * (seconds % 0.2)))
    calls = {f"c{number}": FakeCall(100 + 5 * abs(number - 18)) for number in range(20)}
    standing_us = bench.compare(gpu, {"c0": calls["c0"]})["c0"].median_us
    incumbent = "c0"
    for name, call in list(calls.items())[1:]:
        times = bench.compare(gpu, {incumbent: calls[incumbent], name: call}, reference=incumbent, reference_us=standing_us)
        if bench.best(times) == name:
            incumbent, standing_us = name, times[name].median_us
        gpu.seconds += 0.05
    assert incumbent == "c18" and standing_us == pytest.approx(100, rel=0.03)


# ---- choosing ----------------------------------------------------------------------------------------------------------


def times_of(median_us, spread_us=0.1, count=20, **fields):
    return bench.Times(times_us=(median_us,) * count, median_us=median_us, spread_us=spread_us, **fields)


def test_ties_go_by_the_fixed_order():
    times = {"a": times_of(100.3), "b": times_of(100.0), "c": times_of(100.2), "d": times_of(95, dropped=True)}
    assert bench.best(times) == "a"
    assert bench.best(times, ["c", "a"]) == "c"
    assert bench.best(times, ["nobody"]) == "a"
    assert bench.best({"a": times_of(101), "b": times_of(100)}, ["a"]) == "b"
    noisy = {"a": times_of(101, 2.0), "b": times_of(100, 2.0)}
    assert bench.best(noisy) == "a" and bench.best(dict(reversed(noisy.items()))) == "b"


def search(seed, true_us):
    """What a search does: every candidate against the default, then the fastest dozen among each other on fresh samples."""
    gpu = FakeGpu(noise=0.05, seed=seed)
    a_bench = bench.Bench(gpu=gpu)
    calls = {name: FakeCall(time_us) for name, time_us in true_us.items()}
    medians = {}
    for name, call in calls.items():
        if name != "default":
            pair = a_bench.compare({"default": calls["default"], name: call}, reference="default", reference_us=100.0)
            medians[name] = pair[name].median_us
    finalists = ["default", *sorted(medians, key=medians.__getitem__)[:12]]
    winner, times = a_bench.decide({name: calls[name] for name in finalists}, default="default")
    return winner, times["default"].median_us / times[winner].median_us


def test_no_winner_among_equals():
    """O14: 200 candidates like the default, 5 % noise. The default is kept; the reported speed-up is not the luckiest trial's."""
    outcomes = [search(seed, {"default": 100.0, **{f"c{number}": 100.0 for number in range(200)}}) for seed in range(8)]
    assert sum(winner == "default" for winner, _ in outcomes) >= 7
    assert statistics.fmean(speedup for _, speedup in outcomes) == pytest.approx(1.0, abs=0.005)


def test_a_small_true_gain_is_found():
    """O14: one of 200 takes 3 % less."""
    outcomes = [search(seed, {"default": 100.0, **{f"c{n}": 97.0 if n == 123 else 100.0 for n in range(200)}}) for seed in range(10)]
    found = [speedup for winner, speedup in outcomes if winner == "c123"]
    assert len(found) >= 9
    assert statistics.fmean(found) == pytest.approx(100 / 97, abs=0.006)


# ---- warming up --------------------------------------------------------------------------------------------------------


def test_warm_up_ends_when_the_rate_falls_no_more():
    cooling = bench.warm_up(FakeGpu(drift=lambda seconds: min(1.1, 1 + 0.02 * seconds)))
    assert len(cooling) * comparison.BURST_S == pytest.approx(6, abs=1.5)
    assert len(bench.warm_up(FakeGpu())) == 8
    assert len(bench.warm_up(FakeGpu(drift=lambda seconds: 1 + 0.1 * seconds), most_s=4)) == 16


def test_the_first_comparison_warms_up_and_later_ones_reheat():
    gpu = FakeGpu()
    a_bench, call = bench.Bench(gpu=gpu), FakeCall(100)
    a_bench.compare({"a": call})
    assert len(gpu.bursts) == 8 and call.untimed == 1
    a_bench.compare({"a": call})
    assert len(gpu.bursts) == 8
    gpu.seconds += 5  # the compiler was at work
    a_bench.compare({"a": call})
    assert gpu.bursts[8:] == [measuring.REHEAT_S]
    assert a_bench.conditions() == bench.Conditions() and a_bench.busy is None


def test_errors_of_a_call_go_through():
    def broken():
        raise RuntimeError("illegal address")

    a_bench = bench.Bench(gpu=FakeGpu())
    with pytest.raises(RuntimeError, match="illegal address"):
        a_bench.compare({"a": broken})


# ---- launch cost -------------------------------------------------------------------------------------------------------


class FakeCuda:
    """A host and one stream, each with its own time in microseconds: what is queued starts when both have come to it."""

    def __init__(self, launch_us):
        self.launch_us, self.host_us, self.stream_us, self.sleeps = launch_us, 0.0, 0.0, []

    def queue(self, duration_us, host_us=None):
        self.host_us += self.launch_us if host_us is None else host_us
        self.stream_us = max(self.stream_us, self.host_us) + duration_us

    def clock(self):
        return self.host_us * 1e-6

    def device(self, device):
        return contextlib.nullcontext()

    def synchronize(self, device):
        self.host_us = max(self.host_us, self.stream_us)

    def _sleep(self, cycles):
        self.sleeps.append(cycles)
        self.queue(1e6 * cycles / measuring.SLEEP_HZ)

    def zero_(self):
        self.queue(20)

    def Event(self, enable_timing):
        assert enable_timing
        event = types.SimpleNamespace(at_us=None)

        def record():
            self.queue(0, host_us=1)
            event.at_us = self.stream_us

        event.record = record
        event.query = lambda: self.host_us >= event.at_us
        event.elapsed_time = lambda end: (end.at_us - event.at_us) / 1e3
        return event


@pytest.fixture
def fake_cuda(monkeypatch):
    def make(launch_us):
        cuda = FakeCuda(launch_us)
        gpu = measuring.CudaGpu.__new__(measuring.CudaGpu)
        gpu.device, gpu._flush, gpu._host_s, gpu.clock = torch.device("cuda", 0), cuda, 40e-6, cuda.clock
        monkeypatch.setattr(measuring, "cuda", cuda)
        return cuda, gpu

    return make


@pytest.mark.parametrize("launch_us", [1, 10, 50, 300])
def test_launch_cost_is_not_measured(fake_cuda, launch_us):
    """O15: kernels of 3 and 6 us behind launches that take the host longer."""
    cuda, gpu = fake_cuda(launch_us)
    kernels = [lambda: cuda.queue(3), lambda: cuda.queue(6)] * 40
    assert gpu.measure(kernels) == pytest.approx([3.0, 6.0] * 40)
    sleeps = len(cuda.sleeps)
    assert gpu.measure(kernels) == pytest.approx([3.0, 6.0] * 40)
    assert len(cuda.sleeps) - sleeps == 3  # the length of the sleep is known by now: one for each part of the queue


def test_launches_that_cannot_be_hidden_are_reported(fake_cuda, caplog):
    """O15: a call that waits for the GPU is measured with its launch, and the log says so."""
    cuda, gpu = fake_cuda(10)

    def waiting():
        cuda.queue(5)
        cuda.synchronize(None)

    assert len(gpu.measure([waiting] * 3)) == 3
    assert "wait for the host" in caplog.text


# ---- one at a time -----------------------------------------------------------------------------------------------------


def test_the_lock_serialises_processes(tmp_path, caplog):
    """O10: a second tuner on the same GPU waits, and says so; a killed one does not block it. Importing touches no GPU."""
    path = tmp_path / "gpu.lock"
    code = """if True:
        import pathlib, sys, time, torch
        from flashgen import bench, check
        assert not torch.cuda.is_initialized()
        with bench.Lock(pathlib.Path(sys.argv[1])):
            print("held", flush=True)
            time.sleep(120)
    """
    holder = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        killer = threading.Timer(0.3, holder.kill)
        killer.start()
        lock, began = state.Lock(path), time.monotonic()
        with caplog.at_level(logging.INFO, "flashgen"), lock, lock:
            assert time.monotonic() - began >= 0.25
        assert "waiting for another process" in caplog.text
        assert lock._file is None
    finally:
        holder.kill()
        holder.communicate()


def test_a_comparison_holds_the_lock(tmp_path):
    """O10: from the warm-up to the last round."""
    lock, gpu, depths = state.Lock(tmp_path / "gpu.lock"), FakeGpu(), []
    measure, burst = gpu.measure, gpu.burst
    gpu.measure = lambda calls: depths.append(lock._depth) or measure(calls)
    gpu.burst = lambda seconds: depths.append(lock._depth) or burst(seconds)
    a_bench = bench.Bench(gpu=gpu, lock=lock)
    a_bench.compare({"a": FakeCall(100)})
    assert len(depths) > 8 and min(depths) >= 1 and lock._depth == 0
    with a_bench.exclusive(), a_bench.exclusive():
        assert lock._depth == 2


def test_no_place_for_a_lock_is_no_reason_to_stop(tmp_path, caplog):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "missing" / "gpu.lock", tmp_path / "link"):
        caplog.clear()
        with state.Lock(path):
            pass
        assert "no lock on" in caplog.text and not (tmp_path / "elsewhere").exists()


# ---- what the driver says ----------------------------------------------------------------------------------------------


def test_nvidia_smi_is_read(monkeypatch):
    """O12: clock, power, temperature and the reasons for a lower clock."""
    answers = iter(["1665, 699.41, 62, 100, 0x0000000000000004\n", "[N/A], [N/A], 40, 0, [N/A]\n", "No devices were found\n"])
    asked = []

    def run(command, **options):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, next(answers), "")

    monkeypatch.setattr(state.subprocess, "run", run)
    monkeypatch.setattr(state, "_nvml", lambda: None)
    monkeypatch.setattr(state, "gpu_uuid", lambda index: "GPU-1")
    assert bench.conditions(0) == bench.Conditions(
        sm_clock_mhz=1665, power_w=699.41, temperature_c=62, utilization_percent=100, throttle=("power cap",)
    )
    assert bench.conditions(0) == bench.Conditions(temperature_c=40, utilization_percent=0)
    assert bench.conditions(0) == bench.Conditions()
    assert "--id=GPU-1" in asked[0]
    monkeypatch.setattr(state.subprocess, "run", lambda *ignored, **options: (_ for _ in ()).throw(FileNotFoundError("nvidia-smi")))
    assert bench.conditions(0) == bench.Conditions()


def test_nvml_is_read(monkeypatch):
    class Failure(Exception):
        pass

    def refuse(*ignored):
        raise Failure("not supported")

    nvml = types.SimpleNamespace(
        NVMLError=Failure,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1700,
        nvmlDeviceGetPowerUsage=lambda handle: 700_000,
        nvmlDeviceGetTemperature=refuse,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=97),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x24 | 1,
    )
    assert state._by_nvml(nvml, "GPU-1") == bench.Conditions(
        sm_clock_mhz=1700, power_w=700, utilization_percent=97, throttle=("power cap", "temperature (software)")
    )
    nvml.nvmlDeviceGetHandleByUUID = refuse
    assert state._by_nvml(nvml, "GPU-1") == bench.Conditions()


@pytest.mark.parametrize("percents, busy", [([3], False), ([80, 5], False), ([80, 95], True), ([None], None)])
def test_a_foreign_process_on_the_gpu_is_noticed(monkeypatch, caplog, percents, busy):
    """O10: the GPU works though this process leaves it alone."""
    answers = iter(percents)
    monkeypatch.setattr(measuring, "cuda", types.SimpleNamespace(synchronize=lambda device: None))
    monkeypatch.setattr(measuring, "CudaGpu", lambda device: FakeGpu())
    monkeypatch.setattr(measuring.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(state, "conditions", lambda index: bench.Conditions(utilization_percent=next(answers)))
    monkeypatch.setattr(state, "gpu_uuid", lambda index: f"GPU-test-{os.getpid()}")
    a_bench = bench.Bench(torch.device("cuda", 0))
    try:
        assert a_bench.compare({"a": FakeCall(100)})["a"].median_us == 100
        assert a_bench.busy is busy and ("keeps cuda:0 busy" in caplog.text) == bool(busy)
    finally:
        a_bench._lock.path.unlink()


# ---- peers -------------------------------------------------------------------------------------------------------------


def problem(**fields):
    sizes = dict(batch=2, heads_q=4, heads_kv=4, seqlen_q=32, seqlen_kv=32, head_dim_qk=16, head_dim_v=16, dtype="float32")
    return Problem(**(sizes | fields))


@pytest.mark.parametrize(
    "of",
    [
        problem(),
        problem(mask="causal"),
        problem(mask="causal", layout="bshd", heads_kv=2),
        problem(seqlen_q=5, seqlen_kv=40, head_dim_v=8),
        problem(mask="causal_top_left"),
    ],
    ids=str,
)
def test_peers_compute_the_problem(of):
    """On the same tensors, in the same layout, with the same mask and scale."""
    case = check.prepare(of, "cpu", 0, 0.3)
    calls = bench.peers(of, case.query, case.key, case.value, case.scale)
    assert "math" in calls and not {"cudnn", "efficient"} & set(calls)  # those two need a GPU
    for name, call in calls.items():
        result = check.judge(call(), None, case)
        assert result.ok, (name, result.message)


@pytest.mark.parametrize(
    "of", [problem(), problem(mask="causal", layout="bshd", heads_kv=2), problem(seqlen_q=5, seqlen_kv=40, head_dim_v=8)], ids=str
)
def test_peers_compute_gradients(of):
    """The backward pass alone, as often as it is called."""
    of = dataclasses.replace(of, direction="backward")
    case = check.prepare_backward(of, "cpu", 0, -0.3)
    calls = bench.peers(of, *case.given[:3], case.scale, case.given.dout)
    assert "math" in calls
    for name, call in calls.items():
        call()
        result = check.judge_backward(*call(), case)
        # PyTorch 2.13's flash backend for CPUs leaves out most of dq where heads are grouped.
        assert result.ok or (name == "flash" and of.heads_q != of.heads_kv), (name, result.message)
    with pytest.raises(ArgumentError, match="dout is None and direction is 'backward'"):
        bench.peers(of, *case.given[:3])
    with pytest.raises(ArgumentError, match="dout is given and direction is 'forward'"):
        bench.peers(problem(), *case.given[:3], dout=case.given.dout)


@pytest.mark.parametrize(
    "fields", [dict(mask="causal", seqlen_q=5), dict(mask="causal_top_left", seqlen_q=5), dict(window=(3, 3)), dict(window=(3, 0))]
)
def test_no_peer_where_pytorch_means_another_mask(fields):
    """N03: causal masks of unequal lengths, and windows."""
    of = problem(**fields)
    assert bench.peers(of, *check.inputs(of, "cpu", 0)) == {}


def test_math_is_left_out_where_its_scores_are_too_large(monkeypatch):
    of = problem()
    tensors = check.inputs(of, "cpu", 0)
    monkeypatch.setattr(bench.sdpa, "MATH_SCORES_BYTES", 4 * 2 * 4 * 32 * 32)
    assert "math" in bench.peers(of, *tensors)
    monkeypatch.setattr(bench.sdpa, "MATH_SCORES_BYTES", 4 * 2 * 4 * 32 * 32 - 1)
    assert "math" not in bench.peers(of, *tensors)


def test_a_failed_device_is_not_a_missing_backend(monkeypatch):
    """T05: after a CUDA error every call fails, and no row may say that the backend does not support the problem."""
    of = problem()

    def broken(*ignored, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", broken)
    with pytest.raises(RuntimeError, match="CUDA error"):
        bench.peers(of, *check.inputs(of, "cpu", 0))


def test_peers_have_versions(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert bench.peer("cudnn").version == f"torch {torch.__version__}, cuDNN 9.19.0"
    assert bench.peer("flash").version == f"torch {torch.__version__}"
    assert bench.library("flex") == Peer(name="flex", version=f"torch {importlib.metadata.version('torch')}")


class FakeFlashAttention(types.ModuleType):
    """FlashAttention-4's function, as its package has it: (batch, seqlen, heads, head_dim), diagonals to the last query and key."""

    def flash_attn_func(self, q, k, v, softmax_scale=None, causal=False, window_size=(None, None)):
        self.asked = causal, window_size
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        if causal:
            visible = visible.tril(k.shape[1] - q.shape[1])
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, scale=softmax_scale, enable_gqa=True)
        return out.transpose(1, 2), None


@pytest.fixture
def installed(monkeypatch) -> FakeFlashAttention:
    """FlashAttention-4 is a fake, and FlexAttention is not compiled."""
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fake := FakeFlashAttention("cute"))
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setattr(torch, "compile", lambda function, **ignored: function)
    return fake


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["fa4", "flex"])
@pytest.mark.parametrize(
    "of", [problem(), problem(mask="causal", layout="bshd", heads_kv=2), problem(mask="causal", seqlen_q=20, seqlen_kv=40)], ids=str
)
def test_libraries_compute_the_problem(of, name, installed):
    """Causal masks of unequal lengths, too, as flashgen means them."""
    case = check.prepare(of, "cpu", 0, 0.3)
    (call,) = bench.libraries([name], of, case.query, case.key, case.value, case.scale).values()
    assert check.judge(call(), None, case).ok


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_knows_windows_and_both_diagonals(installed):
    for fields in (dict(window=(3, 5)), dict(mask="causal_top_left", seqlen_q=30, seqlen_kv=9), dict(mask="causal", window=(4, None))):
        of = problem(**fields)
        case = check.prepare(of, "cpu", 0)
        (call,) = bench.libraries(["flex"], of, case.query, case.key, case.value, case.scale).values()
        assert check.judge(call(), None, case).ok, str(of)
    of = problem(mask="causal", window=(4, None))
    bench.libraries(["fa4"], of, *check.inputs(of, "cpu", 0))
    assert installed.asked == (True, (4, None))


def test_libraries_compute_gradients(installed):
    of = dataclasses.replace(problem(mask="causal"), direction="backward")
    case = check.prepare_backward(of, "cpu", 0, 0.3)
    (call,) = bench.libraries(["fa4"], of, *case.given[:3], case.scale, case.given.dout).values()
    call()
    assert check.judge_backward(*call(), case).ok


def test_libraries_that_are_not_there(monkeypatch):
    of = problem()
    tensors = check.inputs(of, "cpu", 0)
    with pytest.raises(ArgumentError, match="peers is 'fa5'; it must be among fa4, flex"):
        bench.libraries(["fa5"], of, *tensors)
    with pytest.raises(UnsupportedError, match="peer fa4 is not here: .* it comes with the package flash-attn-4"):
        bench.libraries(["fa4"], of, *tensors)
    monkeypatch.setattr(torch, "compile", lambda function, **ignored: lambda *given, **more: 1 / 0)
    with pytest.raises(UnsupportedError, match="peer flex does not compute forward, .*: division by zero"):
        bench.libraries(["flex"], of, *tensors)
