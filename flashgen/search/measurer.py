"""The caller's side of the processes that measure: starts, watches, kills and replaces them.

Two processes are kept. The first serves requests. The second, started once the first is up, stands by: where the first is lost to
a crash, a CUDA error or a hang, it takes over at once instead of after the 5 to 8 seconds that a start costs; and it judges winners,
being a process with a CUDA context of its own that ran none of the candidates of the search and loads the winner from disk anew.
A process started for each winner would be fresher still, but costs those seconds for every problem.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import IO, Protocol

from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.errors import LaunchError
from flashgen.problem import Problem
from flashgen.record import Measurement, Status
from flashgen.search.worker import Answer, Decide, Decision, Failed, Measure, Passed, Prepare, Ready, Request, Stress

log = logging.getLogger(__name__)

_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from flashgen.search.worker import main; main(*map(int, sys.argv[2:]))"

START_S, PREPARE_S, BUILD_S, WAIT_S = 180.0, 300.0, 90.0, 1800.0
LEAST_LIMIT_S = 20.0  # for a measurement of any kernel
RUNS = 400.0  # a kernel that takes this many times its expected time, in all its rounds, hangs
WARM_UP_S, REPLACEMENT_WARM_UP_S = 10.0, 2.5
MOST_LOST = 3  # processes in a row that may be lost before they are of any use


class Measurer(Protocol):
    """What a search needs of whoever measures. One request at a time: `begin`, then `poll` until there is an answer."""

    gpu: str  # its name, empty until it is known

    def open(self, problem: Problem, device: Device, seed: int) -> None:
        """From here on requests are about this problem. Does not wait."""

    def begin(self, candidate: Candidate, incumbent: Candidate | None, incumbent_us: float | None, expected_s: float) -> None:
        """Measure a candidate against the incumbent, which takes incumbent_us. Does not wait."""

    def poll(self, wait_s: float) -> Measurement | None:
        """The answer to `begin`; None if there is none yet. A crash or a hang is an answer. Raises LaunchError if nothing can be
        measured, whatever the candidate."""

    def decide(self, request: Decide) -> Decision:
        """Measure finalists and peers together. Raises LaunchError if that failed."""

    def stress(self, candidate: Candidate, seed: int) -> Measurement | None:
        """What a harder check of a winner, in a process that ran no other candidate of the search, has against it; None is nothing."""

    def close(self) -> None:
        """Ends every process."""


class Lost(Exception):
    """A process is gone, or was killed for taking too long; the message says how, and request what it was at."""

    def __init__(self, status: Status, message: str, request: Request | None) -> None:
        super().__init__(message)
        self.status, self.request = status, request


class Process:
    """One worker process on one GPU, in a session of its own, so that killing it reaches all it started, and Ctrl-C does not.

    program is run instead of the worker's by tests.
    """

    def __init__(self, index: int, program: str = _PROGRAM) -> None:
        ours, theirs = socket.socketpair()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill() and end()
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, json.dumps(sys.path), str(theirs.fileno()), str(index)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._open: list[tuple[Request, float]] = []  # requests without an answer, and seconds each may have the GPU
        self._until = 0.0
        self.prepared: Prepare | None = None

    def send(self, request: Request, limit_s: float) -> None:
        """Queue a request that may have the GPU for limit_s. Raises Lost."""
        if not self._open:
            self._until = time.monotonic() + START_S
        self._open.append((request, limit_s))
        if isinstance(request, Prepare):
            self.prepared = request
        try:
            self._connection.send(request)
        except OSError:
            raise self._lost() from None

    def receive(self, wait_s: float) -> tuple[Request, Answer, bool] | None:
        """(request, answer, broken) of the oldest request without one; None if it does not come within wait_s. Raises Lost."""
        end = time.monotonic() + wait_s
        while True:
            try:
                ready = self._connection.poll(max(0.0, min(end, self._until) - time.monotonic()))
                message = self._connection.recv() if ready else None
            except (EOFError, OSError):
                raise self._lost() from None
            now = time.monotonic()
            if message is not None and message[0] == "answer":
                request, _ = self._open.pop(0)
                self._until = now + BUILD_S
                return request, message[1], message[2]
            if message is not None:
                self._until = now + {"started": PREPARE_S, "built": WAIT_S, "begun": self._open[0][1]}[message[1]]
            elif now >= self._until:
                request, limit_s = self._open[0]
                self.kill()
                raise Lost(Status.TIMEOUT, f"no end within {limit_s:.0f} s, and the measuring process was killed", request)
            elif now >= end:
                return None

    def _lost(self) -> Lost:
        """Says how the process ended."""
        status = 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(5)
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        self.kill()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        said = f": {words[-1][-500:]}" if words else ""
        return Lost(Status.CRASHED, f"the measuring process {how}{said}", self._open[0][0] if self._open else None)

    @property
    def is_asked(self) -> bool:
        """It has a request to answer, preparations aside."""
        return any(not isinstance(request, Prepare) for request, _ in self._open)

    @property
    def closed(self) -> bool:
        """It was ended, killed, or lost."""
        return self._connection.closed

    def kill(self) -> None:
        """Kill it and what it started."""
        self._stop(patience_s=0.0)

    def end(self) -> None:
        """Let it end by itself; kill it if it does not soon."""
        self._stop(patience_s=2.0)

    def _stop(self, patience_s: float) -> None:
        if self._connection.closed:
            return
        self._connection.close()  # at which it ends, if it can
        if patience_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # One that is stuck in the driver is left to the kernel to bury.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._log.close()


class GpuMeasurer:
    """Measures on the CUDA device with this index, by worker processes."""

    def __init__(self, index: int, start: Callable[[int], Process] = Process) -> None:
        self.gpu = ""
        self._index, self._start = index, start
        self._process: Process | None = None
        self._spare: Process | None = None
        self._prepare: Prepare | None = None
        self._request: tuple[Request, float] | None = None
        self._lost = 0  # processes in a row that did nothing useful
        self._last_words = ""

    def start(self) -> None:
        """Start the first process now, and not only when it is asked something."""
        if self._process is None:
            self._process, self._spare = self._spare or self._start(self._index), None

    def open(self, problem: Problem, device: Device, seed: int) -> None:
        """See Measurer."""
        if self._process is not None and self._process.is_asked:  # an interrupted search left a question behind
            self._process.kill()
            self._process = None
        self._prepare = Prepare(problem=problem, device=device, seed=seed, warm_up_s=WARM_UP_S)
        self._ask(None)

    def begin(self, candidate: Candidate, incumbent: Candidate | None, incumbent_us: float | None, expected_s: float) -> None:
        """See Measurer."""
        limit_s = LEAST_LIMIT_S + RUNS * max(expected_s, 1e-6 * (incumbent_us or 0.0))
        self._ask((Measure(candidate=candidate, incumbent=incumbent, incumbent_us=incumbent_us), limit_s))

    def poll(self, wait_s: float) -> Measurement | None:
        """See Measurer."""
        try:
            answer = self._answer(wait_s)
        except Lost as lost:
            return Measurement(status=lost.status, message=str(lost))
        assert answer is None or isinstance(answer, Measurement)
        return answer

    def decide(self, request: Decide) -> Decision:
        """See Measurer."""
        try:
            answer = self._wait((request, LEAST_LIMIT_S + RUNS * 1e-6 * request.reference_us * len(request.candidates)))
        except Lost as lost:
            raise LaunchError(f"the finalists could not be compared: {lost}") from None
        assert isinstance(answer, Decision)
        return answer

    def stress(self, candidate: Candidate, seed: int) -> Measurement | None:
        """See Measurer. Where there is no room for a second process, the first one judges."""
        assert self._prepare is not None
        request = Stress(candidate=candidate, problem=self._prepare.problem, device=self._prepare.device, seed=seed)
        if self._spare is None:
            self._spare = self._start(self._index)
        try:
            self._spare.send(request, PREPARE_S)
            while (received := self._spare.receive(60.0)) is None:
                pass
            _, answer, broken = received
            if broken:
                self._spare.kill()
                self._spare = None
            if isinstance(answer, Failed):
                log.info("%s is judged by the process that measured it: %s", candidate, answer.message)
                answer = self._wait((request, PREPARE_S))
        except Lost as lost:
            if self._spare is not None and self._spare.closed:
                self._spare = None
            return Measurement(status=lost.status, message=str(lost))
        assert isinstance(answer, Passed | Measurement)
        return None if isinstance(answer, Passed) else answer

    def close(self) -> None:
        """See Measurer."""
        for process in (self._process, self._spare):
            if process is not None:
                process.end()
        self._process = self._spare = None

    def _wait(self, request: tuple[Request, float]) -> Answer:
        """The answer to a request, once it is there. Raises as `_answer`."""
        self._ask(request)
        while (answer := self._answer(60.0)) is None:
            pass
        return answer

    def _ask(self, request: tuple[Request, float] | None) -> None:
        """Send a request to the serving process, after the preparation it may need; the next process takes over from a lost one."""
        self._request = request
        while True:
            if self._process is None:
                if self._lost >= MOST_LOST:
                    raise LaunchError(f"{self._lost} measuring processes in a row were lost; the last one: {self._last_words}")
                self.start()
            assert self._process is not None
            try:
                if self._prepare is not None and self._process.prepared is not self._prepare:
                    self._process.send(self._prepare, PREPARE_S)
                if request is not None:
                    self._process.send(*request)
                return
            except Lost as lost:
                self._forget(lost)

    def _answer(self, wait_s: float) -> Answer | None:
        """The answer to the request; None if it did not come yet. Raises Lost if the process was lost at it, LaunchError if nothing
        can be measured."""
        assert self._process is not None
        try:
            received = self._process.receive(wait_s)
        except Lost as lost:
            self._forget(lost)
            if isinstance(lost.request, Prepare) or lost.request is None:  # no candidate is to blame
                self._ask(self._request)
                return None
            raise
        if received is None:
            return None
        _, answer, broken = received
        if broken:
            self._process.kill()
            self._process = None
        if isinstance(answer, Failed):
            raise LaunchError(f"nothing can be measured: {answer.message}")
        self._lost = 0
        if isinstance(answer, Ready):
            self.gpu = answer.gpu
            if self._spare is None:
                self._spare = self._start(self._index)
            return None
        return answer

    def _forget(self, lost: Lost) -> None:
        log.warning("%s; another one takes over", lost)
        self._process = None
        self._lost += 1
        self._last_words = str(lost)
        if self._prepare is not None:
            self._prepare = replace(self._prepare, warm_up_s=REPLACEMENT_WARM_UP_S)  # the GPU is warm already
