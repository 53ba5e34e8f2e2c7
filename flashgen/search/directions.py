"""What a trial is made of, in either direction: inputs and oracle, a candidate bound to them, its check, its stress, and its peers."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from flashgen import bench, check
from flashgen.candidate import Candidate
from flashgen.check import BackwardCase, Case, Check
from flashgen.device import Device
from flashgen.launch import BackwardLaunch, InterpretedLaunch, Launch, bind, bind_backward
from flashgen.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Direction:
    """Those steps. A case is what prepare makes, of one problem; a launch what bind makes, of a candidate and a case.

    prepare  (problem, place, seed) -> case, on whose tensors `case.bind(launch)` is a call without arguments.
    bind     (candidate, case, device) -> launch, which has its kernel. Raises what launch.bind raises.
    check    (launch, case) -> Check.
    stress   (launch, case, place, seed, repeats) -> Check: see check.stress and check.stress_backward.
    peers    (case, names) -> calls by name: of SDPA's backends, and of the libraries so named.
    """

    prepare: Callable[[Problem, Any, int], Any]
    bind: Callable[[Candidate, Any, Device], Any]
    check: Callable[[Any, Any], Check]
    stress: Callable[[Any, Any, Any, int, int], Check]
    peers: Callable[[Any, Collection[str]], Mapping[str, Callable[[], object]]]


def direction_of(problem: Problem) -> Direction:
    """What a problem's direction is made of."""
    return BACKWARD if problem.direction == "backward" else FORWARD


def _bind(candidate: Candidate, case: Case, device: Device) -> Launch | InterpretedLaunch:
    return bind(candidate, case.problem, case.query, case.key, case.value, case.out, case.lse, device)


def _stress(launch: Launch | InterpretedLaunch, case: Case, place: str, seed: int, repeats: int) -> Check:
    return check.stress(launch, case.problem, place, seed=seed, repeats=repeats)


def _peers(case: Case, named: Collection[str]) -> Mapping[str, Callable[[], object]]:
    given = case.problem, case.query, case.key, case.value, case.scale
    return {**bench.peers(*given), **bench.libraries(named, *given)}


def _bind_backward(candidate: Candidate, case: BackwardCase, device: Device) -> BackwardLaunch:
    return bind_backward(candidate, case.problem, case.given, device)


def _stress_backward(launch: BackwardLaunch, case: BackwardCase, place: str, seed: int, repeats: int) -> Check:
    same_dq = not launch.kernel.candidate.variant.fused
    return check.stress_backward(launch, case.problem, place, seed=seed, repeats=repeats, same_dq=same_dq)


def _backward_peers(case: BackwardCase, named: Collection[str]) -> Mapping[str, Callable[[], object]]:
    given = case.problem, *case.given[:3], case.scale, case.given.dout
    return {**bench.peers(*given), **bench.libraries(named, *given)}


FORWARD = Direction(prepare=check.prepare, bind=_bind, check=check.check, stress=_stress, peers=_peers)
BACKWARD = Direction(
    prepare=check.prepare_backward, bind=_bind_backward, check=check.check_backward, stress=_stress_backward, peers=_backward_peers
)
