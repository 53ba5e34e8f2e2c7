"""How good is a strategy? Searches replayed on candidates whose times are all known."""

from collections.abc import Callable, Mapping, Sequence

from optuna.samplers import BaseSampler

from flashgen import cost, space
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.problem import Problem
from flashgen.record import Record, Status
from flashgen.search.proposals import Experience, Landscape, Proposals


def times_of(records: Sequence[Record]) -> dict[Candidate, float]:
    """Seconds of each candidate that was measured, its last time; records are of one problem and device, oldest first."""
    return {
        record.candidate: 1e-6 * record.measurement.median_us
        for record in records
        if record.candidate is not None and record.measurement.status is Status.OK and record.measurement.median_us is not None
    }


def replay(
    seconds: Mapping[Candidate, float],
    problem: Problem,
    device: Device,
    *,
    trials: int = 24,
    seed: int = 0,
    sampler: Callable[[int], BaseSampler] | None = None,
    noise: Callable[[], float] = lambda: 1.0,
    ahead: int = 1,
    nearest: Sequence[Candidate] = (),
    experience: Sequence[Experience] = (),
) -> list[float]:
    """Time of the best candidate after each trial, relative to the best there is: a search that may only try these candidates.

    sampler   makes another sampler than the surrogate's from the seed: `proposals.tpe`, or Optuna's RandomSampler.
    noise     factor on each time that the search is told; what is returned has none.
    ahead     proposals that are asked for before the first of them is told, as a search that compiles ahead does.
    """
    candidates = list(seconds)
    landscape = Landscape(candidates, [cost.estimate(each, problem, device) for each in candidates], experience)
    proposals = Proposals(landscape, seed, None if sampler is None else sampler(seed))
    proposals.enqueue(space.default(problem, device), "default")
    for candidate in nearest:
        adapted = space.adapt(candidate, problem, device)
        if adapted is not None:
            proposals.enqueue(adapted, "nearest")
    least = min(seconds.values())
    curve: list[float] = []
    waiting = [proposals.ask()]
    while len(curve) < trials and waiting:
        while len(waiting) < ahead and (proposal := proposals.ask()) is not None:
            waiting.append(proposal)
        proposal = waiting.pop(0)
        if proposal is not None:
            taken = seconds[proposal.candidate]
            proposals.tell(proposal, taken * noise())
            curve.append(min(taken / least, curve[-1] if curve else float("inf")))
        if not waiting and (proposal := proposals.ask()) is not None:
            waiting.append(proposal)
    return curve


def trials_to(curve: Sequence[float], ratio: float = 1.02) -> int | None:
    """How many trials it took to come within this ratio of the best; None if that never happened."""
    return next((number for number, reached in enumerate(curve, 1) if reached <= ratio), None)
