"""What to try next: an Optuna study over the legal candidates, and the sampler that fills it.

Why not TPE, Optuna's default? Two or three dozen trials among thousands of candidates leave it hardly better than a random
draw after its ten start-up trials, and it cannot be told what the cost model knows, nor what other problems showed. `ModelSampler`
is an Optuna sampler like any other, but picks among the legal candidates by expected improvement under `surrogate`. How both fare
is a test (tests/cpu/test_search_proposals.py), and `replay` shows it on measured samples. Optuna's own GPSampler needs SciPy and
PyTorch, models no prior and proposes illegal points.

The study lives in memory; the database is what lasts, and a resumed search tells its rows to a new study.
"""

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from flashgen.candidate import Candidate
from flashgen.record import Estimate
from flashgen.search.surrogate import Posterior, Rows, Surrogate, knobs

log = logging.getLogger(__name__)

_FAILED_FACTOR = math.log(1.5)  # a failure counts as this much slower than the slowest that worked
_MOST_TRIES = 40  # points that a foreign sampler may waste on illegal or known candidates, for one proposal


@dataclass(frozen=True)
class Proposal:
    """A candidate to try, and where it comes from: default, nearest, model, random, or another sampler."""

    number: int  # of the trial in the study
    candidate: Candidate
    source: str


@dataclass(frozen=True)
class Experience:
    """A measurement on another problem of this device. relatedness is between 0 (useless) and 1 (as good as our own)."""

    problem_key: str
    candidate: Candidate
    estimate: Estimate
    seconds: float
    relatedness: float


def axis_values(candidate: Candidate) -> dict[str, Any]:
    """Every knob of the candidate by its field's name, variant and config in one flat dict."""
    return {each.name: getattr(part, each.name) for part in (candidate.variant, candidate.config) for each in fields(part)}


class Landscape:
    """The legal candidates of one problem and device with their estimates, and the surrogate over them."""

    def __init__(self, candidates: Sequence[Candidate], estimates: Sequence[Estimate], experience: Sequence[Experience] = ()) -> None:
        self.candidates = list(candidates)
        self.estimates = list(estimates)
        self.index = {candidate: number for number, candidate in enumerate(self.candidates)}
        self.knobs = np.array([knobs(candidate, estimate) for candidate, estimate in zip(self.candidates, self.estimates)])
        self.prior = np.log([estimate.time_s for estimate in self.estimates])
        self.distributions = _distributions(self.candidates)
        self.rows = Rows()  # of other problems
        tasks: dict[str, int] = {}
        related = [1.0]
        for each in experience:
            if each.problem_key not in tasks:
                tasks[each.problem_key] = len(related)
                related.append(each.relatedness)
            seconds = (math.log(each.estimate.time_s), math.log(each.seconds))
            self.rows.add(knobs(each.candidate, each.estimate), *seconds, task=tasks[each.problem_key])
        # Two other problems are taken to be as related as the way from one to the other through this problem.
        relatedness = np.asarray(np.outer(related, related), dtype=np.float64)
        np.fill_diagonal(relatedness, 1.0)
        self.surrogate = Surrogate(self.knobs, self.prior, relatedness)
        self._refined = 0
        self._kept: tuple[object, Posterior, Posterior, list[int]] | None = None  # told, fitted, and what is believed on top

    def refine(self, candidate: Candidate, estimate: Estimate) -> None:
        """Take a better estimate of a candidate: its resources are known now."""
        index = self.index[candidate]
        self.estimates[index] = estimate
        self.prior[index] = math.log(estimate.time_s)
        self._refined += 1

    def posterior(self, seconds: Mapping[int, float], failed: Sequence[int] = (), pending: Sequence[int] = ()) -> tuple[Posterior, float]:
        """(posterior, best): what is expected of all candidates, and the log seconds to improve on.

        Kept from call to call as far as it still holds: fitting is what costs.
        """
        told = (tuple(seconds.items()), tuple(failed), self._refined)
        if self._kept is None or self._kept[0] != told:
            fitted = self._fit(seconds, failed)
            self._kept = (told, fitted, fitted.copy(), [])
        _, fitted, ahead, believed = self._kept
        if not set(believed) <= set(pending):
            ahead, believed = fitted.copy(), []
        for index in pending:
            if index not in believed:
                ahead.believe(index)
                believed.append(index)
        if len(pending) >= len(self._kept[3]):
            self._kept = (told, fitted, ahead, believed)
        known = [*seconds, *pending]
        return ahead, float(min(ahead.mean[known])) if known else float(ahead.mean.min())

    def _fit(self, seconds: Mapping[int, float], failed: Sequence[int]) -> Posterior:
        rows = Rows(list(self.rows.knobs), list(self.rows.prior), list(self.rows.task), list(self.rows.value))
        for index, value in seconds.items():
            rows.add(self.knobs[index].tolist(), float(self.prior[index]), math.log(value))
        if seconds:
            worst = max(math.log(value) - self.prior[index] for index, value in seconds.items())
            for index in failed:
                rows.add(self.knobs[index].tolist(), float(self.prior[index]), float(self.prior[index]) + worst + _FAILED_FACTOR)
        return self.surrogate.fit(rows)


class ModelSampler(BaseSampler):
    """Optuna sampler over the legal candidates: the untried one of largest expected improvement.

    Deterministic given the study's trials, but for ties, which are drawn with (seed, number of trials): a resumed search goes
    on where it stopped and replays nothing.
    """

    def __init__(self, landscape: Landscape, seed: int = 0) -> None:
        self._landscape, self._seed = landscape, seed

    def reseed_rng(self) -> None:
        """Nothing to do: ties depend on the number of trials."""

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The knobs of the legal candidates."""
        return dict(self._landscape.distributions)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """The knobs of the candidate with the largest expected improvement; none where the trial was enqueued, and so has its own."""
        if "fixed_params" in trial.system_attrs:
            return {}
        seconds, failed, pending = _sorted_trials(study, self._landscape, trial.number)
        posterior, best = self._landscape.posterior(seconds, failed, pending)
        gain = posterior.improvement(best)
        gain[[*seconds, *failed, *pending]] = -1.0
        ties = np.flatnonzero(gain >= gain.max() * (1 - 1e-9))
        choice = int(np.random.default_rng((self._seed, trial.number)).choice(ties))
        values = axis_values(self._landscape.candidates[choice])
        return {name: values[name] for name in search_space}

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        """Never needed: every knob is sampled together with the others."""
        raise NotImplementedError(f"{param_name} is not a knob of the candidates")


def _sorted_trials(study: optuna.Study, landscape: Landscape, but: int = -1) -> tuple[dict[int, float], list[int], list[int]]:
    """Indices of candidates with seconds, of those that failed, and of those under way."""
    seconds: dict[int, float] = {}
    failed: list[int] = []
    pending: list[int] = []
    for trial in study.get_trials(deepcopy=False):
        index = trial.user_attrs.get("candidate")
        if index is None or trial.number == but:
            continue
        if trial.state is TrialState.COMPLETE and trial.value is not None:
            seconds[index] = trial.value
        elif trial.state is TrialState.RUNNING:
            pending.append(index)
        elif trial.user_attrs.get("bad"):
            failed.append(index)
        else:  # never measured: skipped, or a double of another one
            pending.append(index)
    return seconds, failed, pending


def _distributions(candidates: Sequence[Candidate]) -> dict[str, BaseDistribution]:
    """Every knob with the choices that occur, in order of first occurrence; a knob with one choice stays in."""
    choices: dict[str, dict[Any, None]] = {}
    for candidate in candidates:
        for name, value in axis_values(candidate).items():
            choices.setdefault(name, {})[value] = None
    return {name: CategoricalDistribution(tuple(values)) for name, values in choices.items()}


def tpe(seed: int, done: int) -> BaseSampler:
    """Optuna's TPE as one would set it up for this job; the yardstick of `replay`. done is the number of trials told so far."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            seed=int(np.random.default_rng((seed, done)).integers(2**31)), multivariate=True, group=True, constant_liar=True
        )


class Proposals:
    """Hands out candidates to try, each at most once, and learns how they did.

    Enqueued candidates come first. sampler is ModelSampler unless another one is given.
    """

    def __init__(self, landscape: Landscape, seed: int = 0, sampler: BaseSampler | None = None) -> None:
        self.landscape = landscape
        self.left = len(landscape.candidates)
        self._sources: dict[int, str] = {}  # of enqueued candidates
        self._own = sampler is None
        if optuna.logging.get_verbosity() == optuna.logging.INFO:  # its default, which tells of every trial
            optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(direction="minimize", sampler=sampler or ModelSampler(landscape, seed))
        self._open: dict[int, optuna.Trial] = {}
        self._seen: set[int] = set()
        self._rng = np.random.default_rng(seed)
        names = list(landscape.distributions)
        self._by_values = {
            tuple(values[name] for name in names): index
            for index, values in enumerate(axis_values(candidate) for candidate in landscape.candidates)
        }

    def __contains__(self, candidate: Candidate) -> bool:
        """The candidate was handed out or told before."""
        return self.landscape.index.get(candidate) in self._seen

    @property
    def done(self) -> int:
        """How many trials the study holds."""
        return len(self._study.get_trials(deepcopy=False))

    def told(self, candidate: Candidate, seconds: float | None) -> None:
        """Tell what an earlier search saw of a candidate: seconds, or None for a failure. Illegal ones are ignored."""
        index = self.landscape.index.get(candidate)
        if index is None or index in self._seen:
            return
        self._take(index)
        self._study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.FAIL if seconds is None else TrialState.COMPLETE,
                value=seconds,
                params=axis_values(candidate),
                distributions=self.landscape.distributions,
                user_attrs={"candidate": index, "bad": seconds is None},
            )
        )

    def enqueue(self, candidate: Candidate, source: str) -> bool:
        """Put a legal candidate in front of the sampler's; False if it is illegal, known or enqueued already."""
        index = self.landscape.index.get(candidate)
        if index is None or index in self._seen or index in self._sources:
            return False
        self._sources[index] = source
        self._study.enqueue_trial(axis_values(candidate))
        return True

    def ask(self) -> Proposal | None:
        """The next candidate; None once all are known."""
        for _ in range(_MOST_TRIES):
            if self.left == 0:
                return None
            trial = self._study.ask(self.landscape.distributions)
            index = self._index_of(trial.params)
            if index is not None and index not in self._seen:
                return self._proposal(trial, index, self._sources.get(index, "model" if self._own else "sampler"))
            self._study.tell(trial, state=TrialState.FAIL)
        unseen = [index for index in range(len(self.landscape.candidates)) if index not in self._seen]
        index = int(self._rng.choice(unseen))
        self._study.enqueue_trial(axis_values(self.landscape.candidates[index]))
        return self._proposal(self._study.ask(self.landscape.distributions), index, "random")

    def tell(self, proposal: Proposal, seconds: float | None, *, bad: bool = True) -> None:
        """What became of a proposal: seconds, or None. bad: it failed; else nobody tried."""
        trial = self._open.pop(proposal.number)
        trial.set_user_attr("bad", seconds is None and bad)
        self._study.tell(trial, seconds, state=TrialState.FAIL if seconds is None else TrialState.COMPLETE)

    def promise(self, proposals: Sequence[Proposal]) -> list[float]:
        """Expected improvement of each of these open proposals by what is known now, as if none of them were under way."""
        seconds, failed, pending = _sorted_trials(self._study, self.landscape)
        free = {self.landscape.index[each.candidate] for each in proposals}
        posterior, best = self.landscape.posterior(seconds, failed, [index for index in pending if index not in free])
        gain = posterior.improvement(best)
        return [float(gain[self.landscape.index[each.candidate]]) for each in proposals]

    def _proposal(self, trial: optuna.Trial, index: int, source: str) -> Proposal:
        trial.set_user_attr("candidate", index)
        self._open[trial.number] = trial
        self._take(index)
        return Proposal(trial.number, self.landscape.candidates[index], source)

    def _take(self, index: int) -> None:
        self._seen.add(index)
        self.left -= 1

    def _index_of(self, params: Mapping[str, Any]) -> int | None:
        return self._by_values.get(tuple(params[name] for name in self.landscape.distributions))
