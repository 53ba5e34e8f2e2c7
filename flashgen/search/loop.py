"""The search of one problem: what is compiled, what is measured next, and when to stop.

    propose -> compile ahead on all cores -> measure what promises most among what is compiled -> tell -> propose ...

The policy is here, and all it touches (compilers, GPU, clock, database) is given to it, so that tests run it with made-up times.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from flashgen import cost, space
from flashgen.candidate import Candidate
from flashgen.database import Database
from flashgen.device import Device
from flashgen.dispatch.choice import distance
from flashgen.errors import BuildError, BuildTimeoutError, OutOfResourcesError
from flashgen.problem import Problem
from flashgen.record import Estimate, Measurement, Provenance, Record, Resources, Status
from flashgen.search import provenance
from flashgen.search.finals import Finals, winner_of
from flashgen.search.ledger import RAN, Ledger, time_us
from flashgen.search.measurer import Measurer
from flashgen.search.outcome import Budget, Ended, Listener, Outcome, Staged, Started, Tried
from flashgen.search.proposals import Experience, Landscape, Proposal, Proposals

NEAREST = 4  # winners of similar problems that are tried
FAR = 4.0  # problems further away than this have nothing to say
TEACHERS = 6  # similar problems whose measurements are learned from
RELATED = 2.0  # distance at which a similar problem's measurements are worth exp(-1)
WORTH_IT = 0.25  # a compiled candidate with less than this share of the best promise waits for better ones
LEAST_AHEAD = 6  # candidates that are kept compiling or compiled, at least
MOST_SKIPPED = 200  # SKIPPED rows of one search, at most: they say little
PLATEAU = 0.01
PAUSE_S = 0.005


class Compiler(Protocol):
    """What a search needs of a CompilePool."""

    workers: int

    @property
    def pending(self) -> int:
        """Submitted candidates without a result."""

    def submit(self, candidate: Candidate, problem: Problem, device: Device, *, wide_offsets: bool = False) -> None:
        """Queue a candidate; does not wait."""

    def results(self, *, wait: bool = True) -> Iterator[tuple[Candidate, Resources | BuildError]]:
        """Each candidate with what came of it."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Time, and how to let it pass."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(kw_only=True)
class Search:
    """One search. `run` gives its outcome; what it saw until then is in the database, however it ends."""

    problem: Problem
    device: Device
    database: Database
    compiler: Compiler
    measurer: Measurer
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    force: bool = False  # measure everything anew, as if the database knew nothing of this problem
    sample: bool = False  # run a random sample of as many candidates as the budget has trials, and propose nothing
    wide_offsets: bool = False
    on_event: Listener = lambda event: None
    clock: Clock = field(default_factory=Clock)
    here: Callable[[], Provenance] = provenance.here
    leftovers: Counter[Candidate] = field(default_factory=Counter)  # other searches' candidates that the compiler still has

    def __post_init__(self) -> None:
        self._ledger = Ledger(self.problem, self.device, self.database, self.here)
        self._compiling: dict[Candidate, Proposal] = {}
        self._compiled: list[Proposal] = []
        self._resources: dict[Candidate, Resources] = {}
        self._binaries: dict[str, Candidate] = {}
        self._history: list[float] = []  # best microseconds after each trial
        self._measuring_since = math.inf  # when the first trial of this search ended
        self._spent_measuring: list[float] = []
        self._promises: dict[Candidate, float] = {}  # of what is compiled, as shares of the best
        self._skipped = 0
        self._submitted = 0

    # ---- the whole of it ---------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Search, decide and validate. Raises NoWinnerError listing reasons, LaunchError if the GPU cannot be measured on."""
        self._began = self.clock.now()
        space.require_supported(self.problem, self.device)
        self._open()
        self.on_event(
            Started(
                problem=self.problem,
                device=self.device,
                legal=len(self._landscape.candidates),
                known=self._trials,
                budget=self.budget,
            )
        )
        reason = self._stop_reason()
        if reason is None or not self._ledger.is_settled():
            self.on_event(Staged(stage="starting", message="starting the measuring process"))
            self.measurer.open(self.problem, self.device, self.seed)
            try:
                reason = self._search() if reason is None else reason
            finally:
                self.leftovers.update(list(self._compiling))
            Finals(
                ledger=self._ledger,
                measurer=self.measurer,
                default=self._default,
                estimate=self._estimate,
                seed=self.seed,
                on_event=self.on_event,
            ).settle()
        outcome = Outcome(
            problem=self.problem,
            device=self.device,
            winner=winner_of(self._ledger),
            default=self._ledger.latest(self._default),
            records=tuple(self._ledger.kept),
            peers=self._ledger.peers(),
            measured=True,
            trials=self._trials,
            skipped=self._skipped,
            seconds=self.clock.now() - self._began,
            reason=reason,
        )
        self.on_event(Ended(outcome=outcome))
        return outcome

    def _open(self) -> None:
        """Enumerate, estimate, tell what is known, and line up what to try first."""
        self._default = space.default(self.problem, self.device)
        candidates = space.candidates(self.problem, self.device)
        estimates = [cost.estimate(candidate, self.problem, self.device) for candidate in candidates]
        near = self._near()
        self._landscape = Landscape(candidates, estimates, self._experience(near))
        self._proposals = Proposals(self._landscape, self.seed)
        if not self.force:
            self._resume()
        self._proposals.enqueue(self._default, "default")
        if self.sample:
            self._line_up_sample()
            return
        lined_up = 0
        for record in [*self.database.ranked(self.problem, self.device, most=NEAREST), *(record for record, _ in near)]:
            assert record.candidate is not None
            adapted = space.adapt(record.candidate, self.problem, self.device)
            if adapted is not None and lined_up < NEAREST:
                lined_up += self._proposals.enqueue(adapted, "nearest")

    def _line_up_sample(self) -> None:
        count = len(self._landscape.candidates)
        wanted = count if self.budget.trials is None else self.budget.trials - self._trials
        for index in np.random.default_rng(self.seed).permutation(count):
            if wanted > 0:
                wanted -= self._proposals.enqueue(self._landscape.candidates[index], "random")

    def _resume(self) -> None:
        """Take over what earlier searches saw: the last row of each candidate counts."""
        best = math.inf
        for row in self._ledger.resume():
            assert row.candidate is not None
            resources, median_us = row.measurement.resources, row.measurement.median_us
            if resources is not None and row.candidate in self._landscape.index:
                self._know(row.candidate, resources)
            self._proposals.told(row.candidate, None if median_us is None else 1e-6 * median_us)
            compiled = row.measurement.status is not Status.TIMEOUT or resources is not None  # else the compiler hung
            if row.measurement.status in RAN and compiled:
                best = min(best, time_us(row))
                self._history.append(best)

    def _near(self) -> list[tuple[Record, float]]:
        """Winners of other problems with their distances, nearest first."""
        winners = [record for record in self.database.near(self.problem, self.device.arch) if record.problem != self.problem]
        away = [(record, distance(record, self.problem, self.device)) for record in winners]
        return sorted((each for each in away if each[1] <= FAR), key=lambda each: (each[1], each[0].key))

    def _experience(self, near: Sequence[tuple[Record, float]]) -> list[Experience]:
        """Measurements of the nearest problems on this device, by which the surrogate starts wiser."""
        here = [(winner.problem, away) for winner, away in near if winner.device.key == self.device.key]
        experience = []
        for problem, away in here[:TEACHERS]:
            for row in self.database.records(problem, self.device, Status.OK, peers=False):
                if row.candidate is not None:
                    estimate = cost.estimate(row.candidate, problem, self.device, row.measurement.resources)
                    experience.append(Experience(problem.key, row.candidate, estimate, 1e-6 * time_us(row), math.exp(-away / RELATED)))
        return experience

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def _search(self) -> str:
        """Propose, compile, measure, until there is a reason to stop; gives it."""
        measuring: Proposal | None = None
        began = 0.0
        self.on_event(Staged(stage="searching", message=f"up to {self.budget.trials or 'all'} trials"))
        while True:
            if measuring is None:
                reason = self._stop_reason()
                if reason is not None:
                    return reason
            self._submit()
            self._collect()
            if measuring is None:
                measuring = self._pick()
                if measuring is not None:
                    began = self.clock.now()
                    incumbent = self._ledger.incumbent()
                    self.measurer.begin(
                        measuring.candidate,
                        None if incumbent is None else incumbent.candidate,
                        None if incumbent is None else incumbent.measurement.median_us,
                        self._estimate(measuring.candidate).time_s,
                    )
                else:
                    self.clock.sleep(PAUSE_S)
            if measuring is not None:
                measurement = self.measurer.poll(PAUSE_S)
                if measurement is not None:
                    self._spent_measuring.append(self.clock.now() - began)
                    self._measuring_since = min(self._measuring_since, self.clock.now())
                    self._tried(measuring, measurement)
                    measuring = None

    def _stop_reason(self) -> str | None:
        budget, incumbent = self.budget, self._ledger.incumbent()
        if self._proposals.left == 0 and not self._compiling and not self._compiled:
            return "every legal candidate is known"
        if budget.trials is not None and self._trials >= budget.trials:
            return f"the budget of {budget.trials} trials is spent"
        if budget.seconds is not None and self.clock.now() - self._measuring_since >= budget.seconds:
            return f"the budget of {budget.seconds:g} s is spent"
        if incumbent is not None and incumbent.measurement.median_us is not None:
            best_s = 1e-6 * incumbent.measurement.median_us
            least_s = min(estimate.bound_s for estimate in self._landscape.estimates)
            if budget.near_bound is not None and least_s >= budget.near_bound * best_s:
                return f"the best is at {least_s / best_s:.0%} of what the device could do at most"
        patience = budget.patience
        if patience is not None and len(self._history) > patience:
            before, now = self._history[-1 - patience], self._history[-1]
            if now < math.inf and before < now * (1 + PLATEAU):
                return f"the last {patience} trials gained less than {PLATEAU:.0%}"
        return None

    def _submit(self) -> None:
        """Keep the compilers busy, but not with more than will be looked at."""
        most_ahead = max(LEAST_AHEAD, 2 * self.compiler.workers)
        left = math.inf if self.budget.trials is None else self.budget.trials - self._trials
        while (
            self._proposals.left > 0
            and len(self._compiling) < self.compiler.workers
            and len(self._compiling) + self._worthy <= min(most_ahead, 4 * left)
        ):
            proposal = self._proposals.ask()
            if proposal is None:
                return
            incumbent = self._ledger.incumbent()
            estimate = self._estimate(proposal.candidate)
            if incumbent is not None and estimate.bound_s >= 1e-6 * (incumbent.measurement.median_us or math.inf):
                self._skip(proposal, f"its bound, {1e6 * estimate.bound_s:.4g} us, cannot beat the best")
                continue
            self._compiling[proposal.candidate] = proposal
            self._submitted += 1
            self.compiler.submit(proposal.candidate, self.problem, self.device, wide_offsets=self.wide_offsets)

    def _collect(self) -> None:
        """Take what was compiled."""
        for candidate, result in self.compiler.results(wait=False):
            if self.leftovers[candidate] > 0:
                self.leftovers[candidate] -= 1
                continue
            proposal = self._compiling.pop(candidate)
            if isinstance(result, BuildError):
                self._tried(proposal, Measurement(status=build_status(result), message=str(result)), ran=False)
                continue
            double = self._binaries.get(result.binary_sha256)
            if double is not None:
                self._skip(proposal, f"it is the same machine code as {double}", double)
                continue
            self._know(candidate, result)
            self._compiled.append(proposal)

    def _pick(self) -> Proposal | None:
        """The compiled candidate to measure: the first lined up, else the one that promises most, if none better is being compiled."""
        for each in self._compiled:
            if each.source == "default":
                return self._taken(each)
        if self._history == [] and any(each.source == "default" for each in self._compiling.values()):
            return None  # the default comes first: all else is held against it
        for each in self._compiled:
            if each.source in ("nearest", "random"):
                return self._taken(each)
        open_proposals = [*self._compiled, *self._compiling.values()]
        if not self._compiled:
            return None
        promises = self._proposals.promise(open_proposals)
        most = max(promises)
        self._promises = {each.candidate: promise / most if most > 0 else 1.0 for each, promise in zip(open_proposals, promises)}
        best = max(self._compiled, key=lambda each: self._promises[each.candidate])
        return self._taken(best) if self._promises[best.candidate] >= WORTH_IT or not self._compiling else None

    def _taken(self, proposal: Proposal) -> Proposal:
        self._compiled.remove(proposal)
        return proposal

    @property
    def _worthy(self) -> int:
        """Compiled candidates that are likely to be measured."""
        return sum(self._promises.get(each.candidate, 1.0) >= WORTH_IT for each in self._compiled)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _tried(self, proposal: Proposal, measurement: Measurement, *, ran: bool = True) -> None:
        """Keep a row of what became of a proposal, tell the sampler, and say so. ran: on the GPU, so that it counts as a trial."""
        if measurement.median_us is not None and not math.isfinite(measurement.median_us):
            measurement = Measurement(status=Status.LAUNCH_ERROR, message=f"its time came out as {measurement.median_us}")
        if measurement.resources is None and proposal.candidate in self._resources:
            measurement = replace(measurement, resources=self._resources[proposal.candidate])
        median_us = measurement.median_us
        self._proposals.tell(proposal, None if median_us is None else 1e-6 * median_us)
        if ran:
            self._history.append(min(median_us or math.inf, self._history[-1] if self._history else math.inf))
        self._say(proposal, self._keep(proposal.candidate, measurement))

    def _skip(self, proposal: Proposal, message: str, double: Candidate | None = None) -> None:
        """Keep a row that a proposal is not worth measuring. What is known of a double holds for it, too."""
        known = None if double is None else self._ledger.latest(double)
        median_us = None if known is None else known.measurement.median_us
        self._proposals.tell(proposal, None if median_us is None else 1e-6 * median_us, bad=False)
        self._skipped += 1
        if self._skipped <= MOST_SKIPPED:
            self._say(proposal, self._keep(proposal.candidate, Measurement(status=Status.SKIPPED, message=message)))

    def _keep(self, candidate: Candidate, measurement: Measurement) -> Record:
        self._ledger.gpu = self.measurer.gpu
        return self._ledger.keep(candidate, measurement, self._estimate(candidate))

    def _say(self, proposal: Proposal, row: Record) -> None:
        incumbent, default = self._ledger.incumbent(), self._ledger.latest(self._default)
        self.on_event(
            Tried(
                record=row,
                source=proposal.source,
                trials=self._trials,
                of_trials=self.budget.trials,
                compiled=self._submitted - len(self._compiling),
                best_us=None if incumbent is None else incumbent.measurement.median_us,
                best=None if incumbent is None else incumbent.candidate,
                default_us=None if default is None else default.measurement.median_us,
                elapsed_s=self.clock.now() - self._began,
                remaining_s=self._remaining_s(),
            )
        )

    def _remaining_s(self) -> float | None:
        guesses = []
        if self.budget.seconds is not None:
            guesses.append(self.budget.seconds - max(0.0, self.clock.now() - self._measuring_since))
        if self.budget.trials is not None and self._spent_measuring:
            per_trial_s = statistics.median(self._spent_measuring[-8:])
            guesses.append((self.budget.trials - self._trials) * per_trial_s)
        return max(0.0, min(guesses)) if guesses else None

    def _know(self, candidate: Candidate, resources: Resources) -> None:
        self._resources[candidate] = resources
        self._binaries.setdefault(resources.binary_sha256, candidate)
        self._landscape.refine(candidate, cost.estimate(candidate, self.problem, self.device, resources))

    def _estimate(self, candidate: Candidate) -> Estimate:
        return self._landscape.estimates[self._landscape.index[candidate]]

    @property
    def _trials(self) -> int:
        return len(self._history)


def build_status(error: BuildError) -> Status:
    """How a candidate ended that did not compile."""
    if isinstance(error, OutOfResourcesError):
        return Status.OUT_OF_RESOURCES
    return Status.TIMEOUT if isinstance(error, BuildTimeoutError) else Status.COMPILE_ERROR
