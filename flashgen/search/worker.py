"""The process that measures: it holds a problem's inputs, oracle and bench, and answers one request at a time.

A kernel may hang the GPU, crash the process or leave its CUDA context unusable. So nothing of this runs in the caller's process;
`measurer` starts this one, watches it, kills and replaces it. Requests and answers are pickled tuples on a socket. Before long
work there is a note that says so, and how long it may take counts from there: ("note", word).

The caller's script is never run again here: the process starts from a one-line program that takes over the caller's import path.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.errors import ArgumentError, BuildError, BuildTimeoutError, FlashgenError, OutOfResourcesError
from flashgen.problem import Problem
from flashgen.record import Measurement, Peer, Resources, Status

CONDITIONS_EVERY_S = 1.0  # asking nvidia-smi takes 0.1 s
STRESS_REPEATS = 20
KEPT_LAUNCHES = 64


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Make inputs and oracle of a problem; those of the one before are dropped. Answered by a Ready."""

    problem: Problem
    device: Device
    seed: int
    warm_up_s: float


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Check a candidate and time it against the incumbent, which is known to take incumbent_us. Answered by a Measurement."""

    candidate: Candidate
    incumbent: Candidate | None = None
    incumbent_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class Decide:
    """Time candidates, and peers if wanted, together in one interleaved comparison. Answered by a Decision.

    reference is among the candidates, and known to take reference_us.
    """

    candidates: tuple[Candidate, ...]
    reference: Candidate
    reference_us: float
    peers: bool


@dataclass(frozen=True, kw_only=True)
class Stress:
    """Check a candidate with other seeds and scales, and for the same bits again and again. Answered by Passed, or a Measurement that
    says what is wrong."""

    candidate: Candidate
    problem: Problem
    device: Device
    seed: int


Request = Prepare | Measure | Decide | Stress


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The worker has what a problem needs."""

    gpu: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A measurement of each candidate, in the order asked for, and of each peer."""

    candidates: tuple[Measurement, ...]
    peers: tuple[tuple[Peer, Measurement], ...]


@dataclass(frozen=True, kw_only=True)
class Passed:
    """Nothing is wrong with a candidate."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A request could not be answered, and that is not a candidate's fault: no memory for the oracle, say."""

    message: str


Answer = Ready | Measurement | Decision | Passed | Failed


def main(descriptor: int, index: int) -> None:
    """Serves requests that come on a socket until it is closed. index is that of the CUDA device."""
    connection = Connection(descriptor)
    bench = Worker(index, lambda word: connection.send(("note", word)))
    while True:
        try:
            request = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        answer, broken = bench.answer(request)
        try:
            connection.send(("answer", answer, broken))
        except (BrokenPipeError, ConnectionResetError):
            return
        if broken:
            # A broken CUDA context may hang while Python cleans up.
            sys.stderr.flush()
            os._exit(0)


@dataclass
class Worker:
    """What the process holds between requests."""

    index: int
    note: Callable[[str], None]
    place: str = ""  # where tensors lie; empty is the CUDA device
    _launches: dict[Candidate, Any] = field(default_factory=dict)
    _bench: Any = None
    _case: Any = None
    _direction: Any = None
    _warm: bool = False
    _device: Device | None = None
    _read: tuple[float, float | None, float | None] = (-1e9, None, None)

    def answer(self, request: Request) -> tuple[Answer, bool]:
        """(answer, broken): the answer to a request, and whether this process is of no more use."""
        try:
            if isinstance(request, Prepare):
                return self._prepare(request), False
            if isinstance(request, Measure):
                return self._measure(request), False
            if isinstance(request, Decide):
                return self._decide(request), False
            return self._stress(request), False
        except (FlashgenError, RuntimeError, MemoryError) as error:
            blameless = isinstance(request, (Prepare, Decide)) or _is_out_of_memory(error)
            answer = Failed(message=_sentence(error)) if blameless else Measurement(status=_status(error), message=_sentence(error))
            return answer, self._is_broken()

    def _prepare(self, request: Prepare) -> Ready:
        import torch

        from flashgen.search.directions import direction_of

        torch.cuda.set_device(self.index)
        self.note("started")
        self._launches.clear()
        self._case = None
        self._direction = direction_of(request.problem)
        self._device = request.device
        with self._exclusive():
            if not self._warm:
                self._gpu().warm_up(request.warm_up_s)
                self._warm = True
        with self._exclusive():
            self._case = self._direction.prepare(request.problem, self.place or f"cuda:{self.index}", request.seed)
            torch.cuda.synchronize()
        return Ready(gpu=torch.cuda.get_device_name(self.index))

    def _measure(self, request: Measure) -> Measurement:
        import torch

        launch, resources = self._launch(request.candidate)
        self.note("built")
        with self._exclusive():
            verdict = self._direction.check(launch, self._case)
            torch.cuda.synchronize()
            if not verdict.ok:
                return Measurement(
                    status=Status.WRONG_RESULT,
                    error=verdict.error,
                    tolerance=verdict.tolerance,
                    resources=resources,
                    message=verdict.message,
                )
            calls = {"candidate": self._case.bind(launch)}
            reference: dict[str, Any] = {}
            if request.incumbent is not None and request.incumbent != request.candidate:
                calls["incumbent"] = self._case.bind(self._launch(request.incumbent)[0])
                reference = {"reference": "incumbent", "reference_us": request.incumbent_us}
            times = self._gpu().compare(calls, **reference)["candidate"]
            clock, power = self._conditions()
        return self._measurement(times, clock, power, error=verdict.error, tolerance=verdict.tolerance, resources=resources)

    def _decide(self, request: Decide) -> Decision:
        from flashgen import bench

        built = {str(number): self._launch(candidate) for number, candidate in enumerate(request.candidates)}
        calls = {name: self._case.bind(launch) for name, (launch, _) in built.items()}
        self.note("built")
        with self._exclusive():
            peers: Mapping[str, Any] = {}
            if request.peers:
                peers = self._direction.peers(self._case, ())
                peers = {name: call for name, call in peers.items() if name != "math"}  # slower by an order of magnitude, and no rival
            times = self._gpu().compare(
                {**calls, **peers},
                reference=str(request.candidates.index(request.reference)),
                reference_us=request.reference_us,
                policy=replace(bench.comparison.FINAL, drop_ratio=4.0),
            )
            clock, power = self._conditions(fresh=True)
        return Decision(
            candidates=tuple(self._measurement(times[name], clock, power, resources=built[name][1]) for name in calls),
            peers=tuple((bench.peer(name), self._measurement(times[name], clock, power)) for name in peers),
        )

    def _stress(self, request: Stress) -> Passed | Measurement:
        import torch

        from flashgen.search.directions import direction_of

        torch.cuda.set_device(self.index)
        place, direction = self.place or f"cuda:{self.index}", direction_of(request.problem)
        with self._exclusive():
            case = direction.prepare(request.problem, place, request.seed)
            launch = direction.bind(request.candidate, case, request.device)
            verdict = direction.stress(launch, case, place, request.seed, STRESS_REPEATS)
            torch.cuda.synchronize()
        del case
        torch.cuda.empty_cache()  # another process measures with the rest of the memory
        if verdict.ok:
            return Passed()
        return Measurement(status=Status.WRONG_RESULT, error=verdict.error, tolerance=verdict.tolerance, message=verdict.message)

    def _launch(self, candidate: Candidate) -> tuple[Any, Resources]:
        """The candidate bound to the case's tensors, and its resources; kept for when it is the incumbent or a finalist."""
        if candidate not in self._launches:
            assert self._case is not None and self._device is not None
            while len(self._launches) >= KEPT_LAUNCHES:
                del self._launches[next(iter(self._launches))]
            launch = self._direction.bind(candidate, self._case, self._device)
            self._launches[candidate] = (launch, launch.kernel.resources)
        launch, resources = self._launches[candidate]
        return launch, resources

    def _gpu(self) -> Any:
        from flashgen import bench

        if self._bench is None:
            self._bench = bench.Bench(self.index)
        return self._bench

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """The GPU to ourselves; tells when that begins: the time limit counts from there."""
        with self._gpu().exclusive():
            self.note("begun")
            yield

    def _conditions(self, fresh: bool = False) -> tuple[float | None, float | None]:
        """SM clock and power, at most CONDITIONS_EVERY_S old unless fresh."""
        read_at, clock, power = self._read
        if fresh or time.monotonic() - read_at > CONDITIONS_EVERY_S:
            conditions = self._gpu().conditions()
            clock, power = conditions.sm_clock_mhz, conditions.power_w
            self._read = (time.monotonic(), clock, power)
        return clock, power

    def _measurement(self, times: Any, clock: float | None, power: float | None, **more: Any) -> Measurement:
        message = "others used the GPU at the same time: the samples scatter" if times.contended else ""
        measured: Measurement = times.measurement(sm_clock_mhz=clock, power_w=power, message=message, **more)
        return measured

    def _is_broken(self) -> bool:
        """Whether the CUDA context still answers; an error in a kernel stays in its context for good."""
        try:
            import torch

            torch.cuda.synchronize(self.index)
        except Exception:  # whatever it raises, the context is of no more use
            return True
        return False


def _status(error: BaseException) -> Status:
    if isinstance(error, OutOfResourcesError):
        return Status.OUT_OF_RESOURCES
    if isinstance(error, BuildTimeoutError):
        return Status.TIMEOUT
    if isinstance(error, BuildError):
        return Status.COMPILE_ERROR
    if isinstance(error, ArgumentError):
        return Status.INVALID
    return Status.LAUNCH_ERROR


def _is_out_of_memory(error: BaseException) -> bool:
    """The device has no room for what the check or the bench allocates; launches allocate little or nothing beside that."""
    return type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)


def _sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:2000] or type(error).__name__
