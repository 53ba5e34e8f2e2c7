"""What runs under Nsight Compute: one candidate, checked, warmed up, then called once while counters run.

The request and the answer are JSON files: what the profiled program prints is mixed with nothing, and the profiler's exit code tells
little of it.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashgen import canonical
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.errors import FlashgenError, LaunchError
from flashgen.problem import Problem

WARM_UP_S = 1.0  # an idle GPU's clocks rise within that


def main(request: Mapping[str, Any]) -> None:
    """Serves a request as `ncu.Ncu` writes it, and exits."""
    try:
        answer = count(
            Candidate.from_dict(request["candidate"]),
            Problem.from_dict(request["problem"]),
            Device.from_dict(request["device"]),
        )
    except (FlashgenError, RuntimeError, MemoryError) as error:
        answer = {"error": " ".join(str(error).split())[:2000] or type(error).__name__}
    Path(request["answer"]).write_text(json.dumps(answer))
    sys.stdout.flush()
    sys.exit("error" in answer)


def count(candidate: Candidate, problem: Problem, device: Device, place: str = "cuda:0", warm_up_s: float = WARM_UP_S) -> dict[str, Any]:
    """Runs the candidate on fresh inputs, the last time between the profiler's start and stop. Gives its resources and the GPU's name.

    place: where tensors lie. Raises what check and launch raise, and LaunchError if the result is wrong.
    """
    import torch

    from flashgen.bench.state import Lock
    from flashgen.search.directions import direction_of

    profiler: Any = torch.cuda.profiler  # carries no types
    torch.cuda.set_device(torch.device(place))
    direction = direction_of(problem)
    with Lock.of_gpu(torch.cuda.current_device()):
        case = direction.prepare(problem, place, 0)
        launch = direction.bind(candidate, case, device)
        verdict = direction.check(launch, case)
        if not verdict.ok:
            raise LaunchError(f"{candidate} gives a wrong result, so that nothing was counted: {verdict.message}")
        call = case.bind(launch)
        torch.cuda.empty_cache()  # the profiler saves and restores memory for each of its passes
        until = time.monotonic() + warm_up_s
        while time.monotonic() < until:
            call()
            torch.cuda.synchronize()
        profiler.start()
        call()
        torch.cuda.synchronize()
        profiler.stop()
    return {
        "resources": canonical.to_dict(launch.kernel.resources),
        "gpu": torch.cuda.get_device_name(),
    }
