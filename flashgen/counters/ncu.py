"""Nsight Compute's command line, ncu: found, run on a candidate, and understood where it refuses.

It runs each launch between the profiler's start and stop again and again, a pass for every few metrics, and restores memory in between.
The GPU's clocks are left alone (--clock-control none): a figure in bytes or shares hardly depends on them, and a time comes with its clock.
"""

import contextlib
import functools
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashgen import canonical
from flashgen.candidate import Candidate
from flashgen.counters import metrics
from flashgen.device import Device
from flashgen.errors import ArgumentError, LaunchError, ProfilerError
from flashgen.problem import Problem
from flashgen.record import Counters, Resources

CACHES = {"cold": "all", "warm": "none"}  # what is done to caches before each pass, by ncu's words
FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute/*")  # where it lies if not on PATH
LIMIT_S = 300.0

# Takes over the caller's import path, and never runs its script.
_PROGRAM = (
    "import json, sys; request = json.load(open(sys.argv[1])); sys.path[:] = request['path']; "
    "from flashgen.counters.driver import main; main(request)"
)


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What came of one candidate."""

    counters: Counters
    resources: Resources
    gpu: str


@dataclass(kw_only=True)
class Ncu:
    """The program at path. unknown: metrics that it turned out not to know here, which are not asked for again."""

    path: str
    unknown: set[str] = field(default_factory=set)

    @classmethod
    def find(cls) -> "Ncu":
        """The one on PATH, else the newest where NVIDIA installs it. Raises ProfilerError."""
        installed = (file for folder in FOLDERS for file in sorted(glob.glob(f"{folder}/ncu"), key=_numbers, reverse=True))
        path = shutil.which("ncu") or next(installed, None)
        if path is None:
            raise ProfilerError("Nsight Compute's ncu is neither on PATH nor where NVIDIA installs it; it comes with the CUDA toolkit")
        return cls(path=path)

    @functools.cached_property
    def version(self) -> str:
        """Such as 2025.3.1.0; empty if it does not say."""
        try:
            said = subprocess.run([self.path, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise ProfilerError(f"{self.path} does not run: {error}") from None
        found = re.search(r"Version (\d+(?:\.\d+)+)", said)
        return found.group(1) if found else ""

    def count(self, candidate: Candidate, problem: Problem, device: Device, *, cache: str = "cold", limit_s: float = LIMIT_S) -> Counted:
        """Counters of one call of the candidate, on the first GPU that CUDA shows, which is to be of this kind.

        cache is cold or warm: see Counters. Raises ProfilerError where the counters of no candidate can be read, LaunchError for what is
        this candidate's fault: it does not build, gives a wrong result, crashes or takes longer than limit_s.
        """
        if cache not in CACHES:
            raise ArgumentError(f"cache is {cache!r}; it must be one of {', '.join(CACHES)}")
        request = {
            "path": sys.path,
            "candidate": canonical.to_dict(candidate),
            "problem": canonical.to_dict(problem),
            "device": canonical.to_dict(device),
        }
        while True:
            asked = metrics.wanted(self.unknown)
            with tempfile.TemporaryDirectory(prefix="flashgen-counters-") as folder:
                log, answer = self._run(Path(folder), request, CACHES[cache], asked, candidate, limit_s)
            unknown = _unknown(log, asked)
            if not unknown:
                break
            self.unknown |= unknown  # and again: a metric that it does not know keeps ncu from counting any
        self._require_permission(log)
        if "error" in answer:
            raise LaunchError(answer["error"])
        launches = metrics.parsed(log)
        if not launches:
            raise ProfilerError(f"ncu counted nothing: {_last_words(log)}")
        counters = Counters(
            functions=metrics.functions(launches),
            cache=cache,
            profiler=self.version,
            missing=(*metrics.missing(asked, launches), *sorted(self.unknown)),
        )
        return Counted(counters=counters, resources=canonical.from_dict(Resources, answer["resources"]), gpu=answer["gpu"])

    def _run(
        self, folder: Path, request: dict[str, Any], cache_control: str, asked: list[str], candidate: Candidate, limit_s: float
    ) -> tuple[str, dict[str, Any]]:
        """(what ncu said, what the driver answered)."""
        requested, answered, log = folder / "request.json", folder / "answer.json", folder / "log"
        requested.write_text(json.dumps({**request, "answer": str(answered)}))
        command = [self.path, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        command += ["--profile-from-start", "off", "--target-processes", "all", "--replay-mode", "kernel"]
        command += ["--clock-control", "none", "--cache-control", cache_control, "--metrics", ",".join(asked)]
        # In other locales numbers have other commas.
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"LC_ALL": "C"}
        with tempfile.TemporaryFile() as output:
            try:
                process = subprocess.Popen(
                    [*command, sys.executable, "-c", _PROGRAM, str(requested)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # killed with all that it started; Ctrl-C is for the caller to handle
                )
            except OSError as error:
                raise ProfilerError(f"{self.path} does not run: {error.strerror}") from None
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise LaunchError(f"{candidate} was not counted within {limit_s:.0f} s") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            said = output.read().decode(errors="replace")
        log_text = "\n".join([log.read_text(errors="replace") if log.exists() else "", *_errors(said)])
        if answered.exists():
            return log_text, json.loads(answered.read_text())
        self._require_permission(log_text)
        if _unknown(log_text, asked):
            return log_text, {}
        if _errors(log_text):
            raise ProfilerError(f"ncu failed: {_last_words(log_text)}")
        raise LaunchError(f"{candidate} ended under ncu without an answer: {_last_words(said or log_text)}")

    def _require_permission(self, log: str) -> None:
        if "ERR_NVGPUCTRPERM" in log:
            raise ProfilerError(
                "this user may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root, or allow it to all with the NVIDIA driver's "
                "option NVreg_RestrictProfilingToAdminUsers=0"
            )


def _unknown(log: str, asked: list[str]) -> set[str]:
    """Which of the metrics ncu says it cannot find. It names them whole or without what follows their first dot, as they were given or as
    a regular expression made of them."""
    unknown: set[str] = set()
    for line in _errors(log):
        if "find metric" in line:
            plain = line.replace("\\", "")
            named = [name for name in asked if name in plain] or [name for name in asked if name.partition(".")[0] in plain]
            if not named:
                raise ProfilerError(f"ncu failed: {_last_words(line)}")
            longest = max(map(len, named))
            unknown |= {name for name in named if len(name) == longest}
    return unknown


def _errors(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("==ERROR==")]


def _last_words(text: str) -> str:
    """Its errors, else its last line."""
    lines = _errors(text) or [line for line in text.splitlines() if line.strip()][-1:] or ["it said nothing"]
    return " ".join(" ".join(line.removeprefix("==ERROR==").split()) for line in lines)[:500]


def _numbers(path: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", path)]
