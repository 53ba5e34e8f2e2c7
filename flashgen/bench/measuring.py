"""Bench: the policy of comparison on a real GPU."""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from flashgen.bench import comparison, state
from flashgen.bench.comparison import DEFAULT, FINAL, Call, Gpu, Policy, Times

logger = logging.getLogger(__name__)
cuda: Any = torch.cuda  # its events and sleeping kernel carry no types

POLICY = (
    "Each call alone between two CUDA events, L2 cold (three times its size is written before every call), launch cost hidden; "
    "the GPU warmed up to its steady state; calls interleaved in changing order; medians, corrected for drift by the reference."
)
FLUSH_FACTOR = 3
QUEUE = 32  # calls queued at a time: with flush and events some hundred operations, which the driver takes without blocking
LEAD_S = 100e-6  # least time that the GPU is kept busy while the first calls are queued
LEAD_MOST_S = 20e-3
SLEEP_HZ = 2e9  # a little above any clock, so that sleeps are never shorter than asked
IDLE_S, REHEAT_S = 0.1, 0.03
BUSY_PERCENT = 20.0


class CudaGpu:
    """Times calls on one CUDA device, on torch's current stream of it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        properties = cuda.get_device_properties(device)
        self._flush = torch.empty(FLUSH_FACTOR * properties.L2_cache_size, dtype=torch.int8, device=device)
        side = 8192 if properties.total_memory > 30e9 else 4096
        self._heat = tuple(torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(3))
        self._host_s = 40e-6  # what queueing a call takes, with a margin: as it was last time

    def clock(self) -> float:
        return time.perf_counter()

    def measure(self, calls: Sequence[Call]) -> list[float]:
        times_us: list[float] = []
        with cuda.device(self.device):
            for start in range(0, len(calls), QUEUE):
                times_us += self._measure(calls[start : start + QUEUE])
        return times_us

    def _measure(self, calls: Sequence[Call]) -> list[float]:
        """All calls are queued behind a sleeping kernel, so that the GPU never waits for the host between them.

        That held if the first call had not begun when the last was queued; else the sleep was too short and all is done again.
        """
        events = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in calls]
        for _ in range(4):
            lead_s = min(LEAD_S + self._host_s * len(calls), LEAD_MOST_S)
            began = self.clock()
            cuda._sleep(int(lead_s * SLEEP_HZ))
            for call, (start, end) in zip(calls, events):
                self._flush.zero_()
                start.record()
                call()
                end.record()
            hidden = not events[0][0].query()
            host_s = (self.clock() - began) / len(calls)
            cuda.synchronize(self.device)
            self._host_s = 1.5 * host_s
            if hidden:
                break
        else:
            logger.warning("the GPU had to wait for the host: a time below %.0f us is that of the launch", 1e6 * host_s)
        return [1e3 * start.elapsed_time(end) for start, end in events]

    def burst(self, seconds: float) -> float:
        a, b, c = self._heat
        products, began = 0, self.clock()
        while (spent := self.clock() - began) < seconds or not products:
            for _ in range(4):
                torch.mm(a, b, out=c)
            cuda.synchronize(self.device)
            products += 4
        return products / spent


class Bench:
    """Measures on one GPU. Tuners of other processes on the same GPU wait their turn.

    device  a CUDA device (None: torch's current one). Memory is taken and heat made with the first comparison, not before.
    gpu     what to measure with instead, for tests.
    """

    def __init__(self, device: torch.device | int | None = None, *, gpu: Gpu | None = None, lock: state.Lock | None = None) -> None:
        index = device.index if isinstance(device, torch.device) else device
        if index is None and gpu is None:
            index = cuda.current_device()
        self.device = None if index is None else torch.device("cuda", index)
        self.busy: bool | None = None  # whether another process kept the GPU busy before the first comparison; None: not known
        self._gpu = gpu
        self._lock = state.Lock.of_gpu(self.device.index or 0) if lock is None and self.device is not None else lock
        self._last_s: float | None = None  # when the GPU was last known to be warm

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """The GPU to ourselves, among flashgen's processes of this machine; may be nested. Comparisons take it by themselves."""
        with self._lock or contextlib.nullcontext():
            yield

    def warm_up(self, most_s: float = 10.0) -> None:
        """Heat the GPU to its steady state. The first comparison does so by itself."""
        with self.exclusive():
            gpu = self._ready_gpu()
            comparison.warm_up(gpu, most_s)
            self._last_s = gpu.clock()

    def compare(
        self,
        calls: Mapping[str, Call],
        *,
        reference: str | None = None,
        reference_us: float | None = None,
        policy: Policy = DEFAULT,
    ) -> dict[str, Times]:
        """Times of calls that ran in turn; see `comparison.compare`. Each runs once untimed before.

        Whatever a call raises goes through, errors of the device included; they leave the CUDA context of this process unusable.
        """
        with self.exclusive():
            gpu = self._ready_gpu()
            if self._last_s is None:
                self.warm_up()
            elif gpu.clock() - self._last_s > IDLE_S:
                gpu.burst(REHEAT_S)
            for call in calls.values():
                call()
            times = comparison.compare(gpu, calls, reference=reference, reference_us=reference_us, policy=policy)
            self._last_s = gpu.clock()
        return times

    def decide(self, calls: Mapping[str, Call], *, default: str, policy: Policy = FINAL) -> tuple[str, dict[str, Times]]:
        """The best of the finalists of a search, and its times and the default's from rounds that no choice depended on.

        All are measured afresh, for the times of the fastest of many trials are partly luck. Ties go to the default, then to the
        order of calls.
        """
        with self.exclusive():
            times = self.compare(calls, reference=default, policy=policy)
            winner = comparison.best(times, [default])
            return winner, self.compare({name: calls[name] for name in dict.fromkeys((default, winner))}, reference=default, policy=policy)

    def conditions(self) -> state.Conditions:
        """Clock, power, temperature and throttling of the GPU now; read right after a comparison it tells of that.

        Takes up to a second where only nvidia-smi can be asked.
        """
        return state.Conditions() if self.device is None else state.conditions(self.device.index or 0)

    def _ready_gpu(self) -> Gpu:
        if self._gpu is None:
            assert self.device is not None
            self.busy = self._is_busy()
            if self.busy:
                logger.warning("another process keeps %s busy: times will be too long and scatter", self.device)
            self._gpu = CudaGpu(self.device)
        return self._gpu

    def _is_busy(self) -> bool | None:
        """Whether the GPU works though we leave it alone; the driver averages over up to a second."""
        cuda.synchronize(self.device)
        for wait_s in (0.2, 1.0):
            time.sleep(wait_s)
            percent = self.conditions().utilization_percent
            if percent is None:
                return None
            if percent < BUSY_PERCENT:
                return False
        return True
