"""The child process of a CompilePool: it imports Triton once and forks a compiler for each job.

Jobs come as JSON lines on stdin, answers go as JSON lines to stdout. The end of stdin, which is also what the death of the parent
looks like, kills every compiler. A compiler leads a process group, so that killing it reaches the ptxas it started.
"""

import contextlib
import gc
import json
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from dataclasses import dataclass
from typing import IO, Any

from flashgen import canonical
from flashgen.build.kernel import build
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.errors import BuildError
from flashgen.problem import Problem


@dataclass(kw_only=True, eq=False)
class _Compiler:
    """A forked process, the job it has, and what it has said so far."""

    job: int
    name: str
    pid: int
    pipe: int
    log: IO[bytes]
    deadline: float
    answer: bytes = b""


def main(arguments: list[str]) -> None:
    """Runs until stdin ends. arguments: how many compilers at once, and the seconds each may take."""
    workers, time_limit_s = int(arguments[0]), float(arguments[1])
    os.nice(5)  # whoever measures on the GPU needs a CPU without delay
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    jobs: deque[dict[str, Any]] = deque()
    running: dict[int, _Compiler] = {}
    unread = b""
    warm = False
    while True:
        while jobs and len(running) < workers:
            if not warm:
                _warm_up(jobs[0])
                warm = True
            compiler = _start(jobs.popleft(), time_limit_s)
            running[compiler.pipe] = compiler
            selector.register(compiler.pipe, selectors.EVENT_READ)
        next_deadline = min((each.deadline for each in running.values()), default=None)
        timeout = None if next_deadline is None else max(0.0, next_deadline - time.monotonic())
        ended = []
        for event, _ in selector.select(timeout):
            data = os.read(event.fd, 1 << 16)
            if event.fd != 0:
                running[event.fd].answer += data
                if not data:
                    ended.append(running[event.fd])
            elif data:
                *lines, unread = (unread + data).split(b"\n")
                jobs.extend(json.loads(line) for line in lines)
            else:
                for compiler in running.values():
                    _kill(compiler)
                return
        now = time.monotonic()
        late = [each for each in running.values() if each.deadline <= now and each not in ended]
        for compiler in ended + late:
            selector.unregister(compiler.pipe)
            del running[compiler.pipe]
            _say(_outcome(compiler, time_limit_s if compiler in late else None))


def _warm_up(job: dict[str, Any]) -> None:
    """Does once what every compiler would otherwise do for itself: imports, and Triton's hash of its own files."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.cache import triton_key

    from flashgen.build import modules

    with contextlib.suppress(RuntimeError, OSError):  # each job will meet the same error, and report it
        modules.modules_dir()
        modules.compiled_dir()
        triton_key()
        make_backend(GPUTarget("cuda", Device.from_dict(job["device"]).capability, 32)).hash()
    gc.freeze()  # a child's collections then leave the pages of the parent shared


def _start(job: dict[str, Any], time_limit_s: float) -> _Compiler:
    reading, writing = os.pipe()
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the compiler
    pid = os.fork()
    if pid == 0:
        _compile(job, writing, log.fileno())
    os.close(writing)
    with contextlib.suppress(OSError):  # the child does the same; whoever is first wins
        os.setpgid(pid, pid)
    name = str(Candidate.from_dict(job["candidate"]))
    return _Compiler(job=job["job"], name=name, pid=pid, pipe=reading, log=log, deadline=time.monotonic() + time_limit_s)


def _compile(job: dict[str, Any], pipe: int, log: int) -> None:
    """In the child: compiles, answers, and ends without any of the parent's clean-up."""
    status = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        # Triton prints the whole PTX, MLIR the whole module, where something fails.
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        os.dup2(log, 2)
        sys.stdout = open(1, "w")  # noqa: SIM115
        with open(pipe, "w") as answer:
            json.dump(_answer(job), answer)
        status = 0
    finally:
        os._exit(status)


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    candidate = Candidate.from_dict(job["candidate"])
    try:
        problem, device = Problem.from_dict(job["problem"]), Device.from_dict(job["device"])
        kernel = build(candidate, problem, device, wide_offsets=job["wide_offsets"])
        return {"resources": canonical.to_dict(kernel.resources)}
    except BuildError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(where.filename)}:{where.lineno}"
        return {"error": "BuildError", "message": f"{candidate} does not compile: unexpected {type(error).__name__} at {place}: {error}"}


def _outcome(compiler: _Compiler, overdue_s: float | None) -> dict[str, Any]:
    """Ends a compiler and everything it started, and says what came of its job."""
    status = _kill(compiler)
    compiler.log.seek(0)
    log = compiler.log.read().decode(errors="replace")
    compiler.log.close()
    if overdue_s is not None:
        message = f"{compiler.name} did not compile within {overdue_s:g} s"
        return {"job": compiler.job, "error": "BuildTimeoutError", "message": message}
    try:
        answer = json.loads(compiler.answer)
    except ValueError:
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        answer = {"error": "BuildError", "message": f"the compiler of {compiler.name} ended with {how}"}
    if "message" in answer:
        # MLIR's diagnosis ("error: ...") is on stderr only; what follows it is the module.
        diagnosis = [line.split("error: ", 1)[1].strip() for line in log.splitlines() if "error: " in line][:2]
        if diagnosis:
            answer["message"] += f" ({'; '.join(diagnosis)[:500]})"
    return {"job": compiler.job, **answer}


def _kill(compiler: _Compiler) -> int:
    """Kills the group, whose number stays taken until its leader is reaped. The leader's exit status."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(compiler.pid, signal.SIGKILL)
    os.close(compiler.pipe)
    return os.waitpid(compiler.pid, 0)[1]


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
