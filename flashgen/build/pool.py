"""Many candidates compiled at once, in processes that may hang or crash without harm."""

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from flashgen import canonical, errors
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.errors import BuildError
from flashgen.problem import Problem
from flashgen.record import Resources

# The foreman takes this process's import path, so that it finds the same flashgen and Triton, and never runs the caller's script.
_FOREMAN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from flashgen.build.foreman import main; main(sys.argv[2:])"


class CompilePool:
    """Compiles candidates in parallel processes; a context manager.

    workers       how many at once; by default as many as there are CPUs for this process. With more, sound ones would be late too.
    time_limit_s  a compilation that takes longer is killed, with everything it started, and is a BuildTimeoutError.

    One child, the foreman, imports Triton once and forks a process for each candidate, so a compiler that hangs or crashes takes
    nothing with it, and the first results come about a second after the first `submit`. No process of the pool initialises CUDA.
    What was compiled lies in Triton's cache: `build` then finds it there.
    """

    def __init__(self, workers: int | None = None, time_limit_s: float = 60.0) -> None:
        self.workers = workers or _cpus()
        self.time_limit_s = time_limit_s
        self._foreman: _Foreman | None = None
        self._waiting: dict[int, Candidate] = {}
        self._submitted = 0

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pending(self) -> int:
        """How many submitted candidates have no result yet."""
        return len(self._waiting)

    def submit(self, candidate: Candidate, problem: Problem, device: Device, *, wide_offsets: bool = False) -> None:
        """Queues a candidate; does not wait."""
        if self._foreman is None or not self._foreman.alive:
            self.close()
            self._foreman = _Foreman(self.workers, self.time_limit_s)
        self._submitted += 1
        self._waiting[self._submitted] = candidate
        self._foreman.send(
            {
                "job": self._submitted,
                "candidate": canonical.to_dict(candidate),
                "problem": canonical.to_dict(problem),
                "device": canonical.to_dict(device),
                "wide_offsets": wide_offsets,
            }
        )

    def results(self, *, wait: bool = True) -> Iterator[tuple[Candidate, Resources | BuildError]]:
        """Each candidate with what came of it, as they come, until none is pending; only those ready now if not wait.

        Equal Resources.binary_sha256 means that two candidates are one and the same kernel.
        """
        while self._waiting:
            assert self._foreman is not None
            # Candidates are started as others end, so none of them makes the next result later than its own limit.
            answer = self._foreman.receive(self.time_limit_s + 60 if wait else 0)
            if answer is not None:
                yield self._waiting.pop(answer["job"]), _result(answer)
            elif not wait and self._foreman.alive:
                return
            else:
                reason = self._foreman.last_words()
                self._foreman.kill()
                lost, self._waiting = self._waiting, {}
                for candidate in lost.values():
                    yield candidate, BuildError(f"{candidate} was not compiled: {reason}")

    def close(self) -> None:
        """Kills every process of the pool; what is pending is forgotten."""
        self._waiting.clear()
        if self._foreman is not None:
            self._foreman.kill()
            self._foreman = None


class _Foreman:
    """The child that forks compilers: JSON lines to it, JSON lines from it."""

    def __init__(self, workers: int, time_limit_s: float) -> None:
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
        environment.pop("TRITON_INTERPRET", None)
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FOREMAN, json.dumps(sys.path), str(workers), str(time_limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the caller to handle
        )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._ended = False
        self._reader = threading.Thread(target=self._read, name="flashgen-compile-pool", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        return not self._ended and self._process.poll() is None

    def send(self, job: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # results() will say what happened
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next answer; None if none came in time, or the foreman ended and all its answers were taken."""
        if self._ended:
            return None
        try:
            answer = self._answers.get(timeout=timeout_s) if timeout_s else self._answers.get_nowait()
        except queue.Empty:
            return None
        self._ended = answer is None
        return answer

    def last_words(self) -> str:
        """Why no more answers will come."""
        if self.alive:
            return "the compiling process stopped answering"
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"the compiling process ended with status {self._process.wait()}" + (f" ({words[-1][-500:]})" if words else "")

    def kill(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._ended = True
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # at which the foreman kills its compilers and ends
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()
        self._stderr.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)


def _cpus() -> int:
    """CPUs for this process: those it may run on, and no more than a container's quota of CPU time pays for."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no quota reads "max 100000"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, math.ceil(int(quota) / int(period)))
    return max(1, count)


def _result(answer: dict[str, Any]) -> Resources | BuildError:
    if "resources" in answer:
        return canonical.from_dict(Resources, answer["resources"])
    kind: type[BuildError] = getattr(errors, answer["error"])
    return kind(answer["message"])
