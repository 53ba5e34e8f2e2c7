"""Whether generated kernels compute the right thing, on a machine without a GPU: in Triton's interpreter, in a process of its own.

The interpreter must be chosen before Triton is imported, so this runs as a child with TRITON_INTERPRET=1. What it can say is
limited: it runs a small sibling of the problem, in float16 where the problem is 16-bit (its products of bfloat16 are wrong), and no
compiler, race or hardware instruction is involved.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from flashgen import canonical, space
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.problem import Problem

_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from flashgen.search.numerics import main; main()"
LIMIT_S = 180.0
_ROWS = 192  # of the sibling, and what the problem's lengths have beyond a multiple of 64


def sibling(problem: Problem) -> Problem:
    """A small problem with the same structure: mask, head dims, layout, tails; 2 heads, float16 in place of bfloat16."""
    lengths = {name: min(getattr(problem, name), _ROWS + getattr(problem, name) % 64) for name in ("seqlen_q", "seqlen_kv")}
    left, right = (None if side is None else min(side, _ROWS // 3) for side in problem.window)
    return replace(
        problem,
        batch=1,
        heads_q=2,
        heads_kv=2 if problem.heads_q == problem.heads_kv else 1,
        dtype="float16" if problem.dtype == "bfloat16" else problem.dtype,
        window=(left, right),
        **lengths,
    )


def check_numerics(candidates: Sequence[Candidate], problem: Problem, device: Device, limit_s: float = LIMIT_S) -> dict[Candidate, str]:
    """What the interpreter says of each candidate: "" is right, else what is wrong. Candidates without a verdict are left out:
    those that do not fit the sibling, whose variant was checked with another candidate, or whose time was up.

    Raises RuntimeError with the reason if the interpreter cannot be used here.
    """
    small = sibling(problem)
    chosen: dict[object, tuple[Candidate, Candidate]] = {}
    for candidate in candidates:
        adapted = space.adapt(candidate, small, device)
        if adapted is not None and candidate.variant not in (first.variant for first, _ in chosen.values()):
            chosen[candidate.variant] = (candidate, adapted)
    if not chosen:
        return {}
    request = {
        "problem": canonical.to_dict(small),
        "device": canonical.to_dict(device),
        "candidates": [canonical.to_dict(adapted) for _, adapted in chosen.values()],
    }
    environment = dict(os.environ, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    child = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        out, err = child.communicate(json.dumps(request), timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
    except BaseException:
        child.kill()
        child.wait()
        raise
    verdicts = {}
    for (candidate, _), line in zip(chosen.values(), out.splitlines()):
        with contextlib.suppress(ValueError):
            verdicts[candidate] = str(json.loads(line))
    if not verdicts:
        words = err.strip().splitlines()
        raise RuntimeError(words[-1] if words else f"Triton's interpreter gave no answer within {limit_s:g} s")
    return verdicts


def main() -> None:
    """The child: a line of JSON for each candidate, with what is wrong with it, empty if nothing is."""
    from flashgen.search.directions import direction_of

    request = json.loads(sys.stdin.read())
    answers, sys.stdout = sys.stdout, sys.stderr
    problem, device = Problem.from_dict(request["problem"]), Device.from_dict(request["device"])
    direction = direction_of(problem)
    case = direction.prepare(problem, "cpu", 1)
    for data in request["candidates"]:
        verdict = direction.check(direction.bind(Candidate.from_dict(data), case, device), case)
        print(json.dumps("" if verdict.ok else verdict.message), file=answers, flush=True)
