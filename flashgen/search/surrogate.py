"""A Gaussian process over candidates: the cost model as its mean, what was measured as its correction.

log(seconds) of a candidate is modelled as log(estimate) + offset of the problem + f(knobs). f has one random function for each
knob (how much slower is pointer loading, whatever the tile?) and one of all knobs together (for what only this combination does);
how much each knob matters is fitted to the measurements, by coordinate steps uphill on the marginal likelihood with a log-normal
prior. Rows of other problems on the same device take part, worth less the further their problem is ("task"). Duvenaud et al.,
"Additive Gaussian Processes", 2011; expected improvement: Jones et al., 1998.

Plain NumPy: a fit is a Cholesky factor of at most a few hundred rows.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from flashgen.candidate import CHOICES, Candidate, Config, Variant
from flashgen.record import Estimate

Array = npt.NDArray[np.float64]

# What the problem fixes, and so tells nothing about the candidate.
_FIXED = ("family", "mask", "padded", "scale_first", "store_lse")
_UNCAPPED_REGISTERS = 255  # maxnreg None
_LENGTH = 1.5  # steps of a knob (octaves of a number, one flip of a flag) over which its effect is forgotten
_OFFSET_VARIANCE = 0.5**2  # how far the cost model may be off for a problem as a whole
_MOST_ROWS = 160  # measurements that take part in a fit, the nearest problems' first


def knobs(candidate: Candidate, estimate: Estimate | None) -> list[float]:
    """The candidate as numbers: one step apart is one choice apart (an octave of a number, one flip of a flag)."""
    numbers: list[float] = []
    for part, cls in ((candidate.variant, Variant), (candidate.config, Config)):
        for each in fields(cls):
            if each.name not in (*_FIXED, "order", "num_stages"):
                numbers.append(_number(each.name, getattr(part, each.name)))
    variant, config = candidate.variant, candidate.config
    # Orders are names, each as far from every other one; stages are one thing in portable kernels, and slots of a ring in others.
    numbers.extend(0.5 * (variant.order == order) for order in CHOICES["order"] if order)
    ring = variant.backend == "hopper"
    numbers.extend(math.log2(config.num_stages) if ring is here else 0.0 for here in (False, True))
    # Registers a thread are what tile, warps and stages fight over: scores and accumulators of a thread.
    owned = config.block_m if variant.family == "forward" else config.block_n
    numbers.append(math.log2(config.block_m * config.block_n / config.num_warps))
    numbers.append(math.log2(owned / config.num_warps))
    numbers.append(math.log2(max(1, estimate.programs_per_sm)) if estimate else 0.0)
    numbers.append(2.0 * math.log2(math.ceil(estimate.waves) / estimate.waves) if estimate and estimate.waves > 0 else 0.0)
    return numbers


def _number(name: str, value: object) -> float:
    if isinstance(value, bool):
        return float(value)
    if value is None:
        return math.log2(_UNCAPPED_REGISTERS)
    if isinstance(value, int):
        return math.log2(value)
    if name == "backend":
        return float(value == "triton")
    return float(value == "tma")


@dataclass
class Rows:
    """Measurements to learn from: knobs, log estimate, task and log seconds of each; task 0 is the problem being searched."""

    knobs: list[Sequence[float]] = field(default_factory=list)
    prior: list[float] = field(default_factory=list)
    task: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def add(self, knobs: Sequence[float], prior: float, value: float, task: int = 0) -> None:
        """One more measurement."""
        self.knobs.append(knobs)
        self.prior.append(prior)
        self.task.append(task)
        self.value.append(value)

    def __len__(self) -> int:
        return len(self.value)


@dataclass(frozen=True)
class _Scales:
    """Hyperparameters, all as logarithms."""

    relevance: Array  # of each knob
    amplitude: float = math.log(0.25)  # the cost model is off by about a quarter
    pairs: float = math.log(0.5)  # what two knobs do together, relative to what each does alone
    interaction: float = math.log(0.1)  # what only a whole combination does
    noise: float = math.log(0.008)


class Surrogate:
    """What to expect of every candidate of a problem, given what was measured so far.

    knobs and prior describe the candidates: one row of `knobs()` each, and the logarithm of the estimated seconds.
    relatedness is the correlation between tasks, a square matrix; task 0 is this problem.
    """

    def __init__(self, knobs: Array, prior: Array, relatedness: Array | None = None) -> None:
        self.knobs, self.prior = knobs, prior
        self.relatedness = np.eye(1) if relatedness is None else relatedness
        self._scales = _Scales(np.zeros(knobs.shape[1]))
        self._fitted_at = 0
        self._columns: dict[bytes, Array] = {}

    def fit(self, rows: Rows) -> "Posterior":
        """The posterior after these measurements; hyperparameters are fitted anew when the data has grown by a quarter."""
        data = _Data.of(rows, self.relatedness)
        if len(rows) >= 4 and len(rows) >= 1.25 * self._fitted_at:
            self._scales = self._climb(data)
            self._columns.clear()
            self._fitted_at = len(rows)
        return Posterior(self, data, self._scales)

    def columns(self, rows: Array) -> Array:
        """Covariance of f of every candidate (down) with these rows of knobs (across)."""
        for row in rows:
            if row.tobytes() not in self._columns:
                self._columns[row.tobytes()] = _Pairs(self.knobs, row[None, :]).covariance(self._scales)[:, 0]
        return np.stack([self._columns[row.tobytes()] for row in rows], axis=1)

    def _climb(self, data: "_Data") -> _Scales:
        best = _Scales(np.zeros(self.knobs.shape[1]))
        score = _evidence(data, best)
        for step in (1.4, 0.7):
            for name in ("amplitude", "noise", "pairs", "interaction", *range(self.knobs.shape[1])):
                for sign in (step, -step):
                    while True:
                        trial = _moved(best, name, sign)
                        trial_score = _evidence(data, trial)
                        if trial_score <= score + 1e-3:
                            break
                        best, score = trial, trial_score
        return best


def _moved(scales: _Scales, name: str | int, by: float) -> _Scales:
    values = dict(vars(scales))
    if isinstance(name, int):
        values["relevance"] = scales.relevance.copy()
        values["relevance"][name] += by
    else:
        values[name] += by
    return _Scales(**values)


@dataclass(frozen=True)
class _Data:
    """The measurements of a fit."""

    knobs: Array
    pairs: "_Pairs"
    residual: Array
    related: Array  # correlation of tasks, row by row
    same: Array
    own: Array  # correlation of each row's task with task 0
    is_own: Array

    @classmethod
    def of(cls, rows: Rows, relatedness: Array) -> "_Data":
        task = np.asarray(rows.task, dtype=int)
        keep = np.argsort(-relatedness[0][task], kind="stable")[:_MOST_ROWS] if len(rows) else task
        task = task[keep]
        knobs = np.asarray(rows.knobs, dtype=float)[keep] if len(rows) else np.zeros((0, 1))
        residual = (np.asarray(rows.value) - np.asarray(rows.prior))[keep] if len(rows) else np.zeros(0)
        return cls(
            knobs=knobs,
            pairs=_Pairs(knobs, knobs),
            residual=residual,
            related=relatedness[np.ix_(task, task)],
            same=(task[:, None] == task[None, :]).astype(float),
            own=relatedness[0][task],
            is_own=(task == 0).astype(float),
        )


class _Pairs:
    """Rows of knobs held against other rows: all of their covariance that no hyperparameter changes."""

    def __init__(self, a: Array, b: Array) -> None:
        self._shape = (len(a), len(b))
        steps = np.abs(a.T[:, :, None] - b.T[:, None, :]).reshape(a.shape[1], -1)
        self._steps, self._alike = steps / (2 * _LENGTH), np.exp(-steps / _LENGTH)
        self._alike_squared = self._alike**2

    def covariance(self, scales: _Scales) -> Array:
        """Covariance of f, before tasks and offsets."""
        weights = np.exp(scales.relevance)
        count = len(weights)
        shares = np.exp([0.0, scales.pairs, scales.interaction])
        shares *= math.exp(2 * scales.amplitude) / shares.sum()
        each = weights @ self._alike
        both = (each * each - (weights * weights) @ self._alike_squared) / 2
        all_of_it = np.exp(-(np.sqrt(weights) @ self._steps))
        total = shares[0] / count * each + shares[1] * 2 / (count * (count - 1)) * both + shares[2] * all_of_it
        return np.asarray(total.reshape(self._shape))


def _covariance(data: _Data, scales: _Scales) -> Array:
    """Of measurements with one another."""
    covariance = data.related * data.pairs.covariance(scales) + _OFFSET_VARIANCE * data.same
    covariance[np.diag_indices_from(covariance)] += math.exp(2 * scales.noise)
    return np.asarray(covariance)


def _evidence(data: _Data, scales: _Scales) -> float:
    """Log marginal likelihood plus the log-normal prior of the scales."""
    try:
        factor = np.linalg.cholesky(_covariance(data, scales))
    except np.linalg.LinAlgError:
        return -math.inf
    whitened = np.linalg.solve(factor, data.residual)
    likelihood = -0.5 * float(whitened @ whitened) - float(np.log(np.diag(factor)).sum())
    default = _Scales(np.zeros_like(scales.relevance))
    off = [
        float(np.linalg.norm(scales.relevance)),
        (scales.amplitude - default.amplitude) / 0.7,
        scales.pairs - default.pairs,
        scales.interaction - default.interaction,
        (scales.noise - default.noise) / 0.7,
    ]
    return likelihood - 0.5 * sum(each * each for each in off)


class Posterior:
    """Mean and standard deviation of log(seconds) of every candidate, and what to try next."""

    def __init__(self, surrogate: Surrogate, data: _Data, scales: _Scales) -> None:
        self._surrogate, self._scales = surrogate, scales
        variance = _Pairs(surrogate.knobs[:1], surrogate.knobs[:1]).covariance(scales)[0, 0] + _OFFSET_VARIANCE
        self.mean, self._variance = surrogate.prior.copy(), np.full(len(surrogate.prior), variance)
        self._whitened: Array | None = None
        if len(data.residual):
            self._factor = np.linalg.cholesky(_covariance(data, scales))
            cross = data.own * surrogate.columns(data.knobs) + _OFFSET_VARIANCE * data.is_own
            self._whitened = np.asarray(np.linalg.solve(self._factor, cross.T))
            self.mean = self.mean + self._whitened.T @ np.linalg.solve(self._factor, data.residual)
            self._variance = self._variance - (self._whitened**2).sum(axis=0)

    def copy(self) -> "Posterior":
        """One that may believe other things; the arrays are never changed in place."""
        return copy.copy(self)

    @property
    def deviation(self) -> Array:
        """Standard deviation of log(seconds)."""
        return np.asarray(np.sqrt(np.maximum(self._variance, 1e-10)))

    def believe(self, index: int) -> None:
        """Take a candidate that is under way to turn out as expected: its neighbourhood then promises less that is new."""
        column = self._surrogate.columns(self._surrogate.knobs[index : index + 1])[:, 0] + _OFFSET_VARIANCE
        if self._whitened is not None:
            column = column - self._whitened.T @ self._whitened[:, index]
        noise = math.exp(2 * self._scales.noise)
        scaled = column / math.sqrt(max(self._variance[index], 0.0) + noise)
        self._variance = self._variance - scaled**2
        grown = scaled[None, :]
        self._whitened = grown if self._whitened is None else np.concatenate([self._whitened, grown])

    def improvement(self, best: float) -> Array:
        """Expected improvement over `best` (log seconds) of every candidate: by what fraction, times how likely."""
        deviation = self.deviation
        z = (best - self.mean) / deviation
        density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return np.asarray(deviation * (z * _normal_cdf(z) + density))


def _normal_cdf(z: Array) -> Array:
    """Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7."""
    x = np.abs(z) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    half = 0.5 * (1 - tail * np.exp(-x * x))
    return np.where(z >= 0, 0.5 + half, 0.5 - half)
