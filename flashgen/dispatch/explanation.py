"""What `attention` runs for a problem on a device, in words and numbers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flashgen import canonical, cost, space
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.dispatch.choice import Choice, choices, choose, expected_us, has_nothing_to_compute
from flashgen.problem import Problem
from flashgen.record import Estimate, Record


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The choice for a problem on a device.

    choice       None where no kernel runs: no query, or no key.
    gradients    what computes the gradients, in a call with inputs that need them; None where there are none, or all failed, and for
                 a backward problem, whose choice does.
    estimate     the cost model's, for the chosen candidate.
    expected_us  the time measured for the row the choice came from; for a near row, times the ratio of the model's estimates.
    """

    problem: Problem
    device: Device
    choice: Choice | None
    gradients: Choice | None
    estimate: Estimate | None
    expected_us: float | None

    @property
    def how(self) -> str:
        """exact, nearest, predicted, default; or empty."""
        return self.choice.how if self.choice else "empty"

    @property
    def candidate(self) -> Candidate | None:
        """What runs."""
        return self.choice.candidate if self.choice else None

    @property
    def record(self) -> Record | None:
        """The row of the database that it came from."""
        return self.choice.record if self.choice else None

    @property
    def distance(self) -> float | None:
        """How far that row is; 0 is exact."""
        return self.choice.distance if self.choice else None

    @property
    def because(self) -> tuple[str, ...]:
        """Why nothing better was used; on devices that might run them, also why no warp-specialised kernel was."""
        if self.choice is None:
            return ()
        without = space.without_hopper(self.problem, self.device) if self.device.has_tma else ""
        return (*self.choice.because, without) if without else self.choice.because

    @property
    def measured_us(self) -> float | None:
        """The time measured for that row, on its own problem and device."""
        return self.record.measurement.median_us if self.record else None

    @property
    def predicted_us(self) -> float | None:
        """The cost model's time for the candidate here."""
        return self.estimate.time_s * 1e6 if self.estimate else None

    @property
    def bound_us(self) -> float | None:
        """No kernel can be faster."""
        return self.estimate.bound_s * 1e6 if self.estimate else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        row = self.record
        return {
            "problem": canonical.to_dict(self.problem),
            "problem_key": self.problem.key,
            "device": self.device.name,
            "device_key": self.device.key,
            "how": self.how,
            "candidate": canonical.to_dict(self.candidate) if self.candidate else None,
            "candidate_name": str(self.candidate) if self.candidate else None,
            "gradients": None
            if self.gradients is None
            else {
                "how": self.gradients.how,
                "candidate": canonical.to_dict(self.gradients.candidate),
                "candidate_name": str(self.gradients.candidate),
            },
            "row": None
            if row is None
            else {
                "key": row.key,
                "problem": canonical.to_dict(row.problem),
                "device": row.device.name,
                "source_sha256": row.source_sha256,
                "provenance": canonical.to_dict(row.provenance),
            },
            "distance": self.distance,
            "measured_us": self.measured_us,
            "expected_us": self.expected_us,
            "predicted_us": self.predicted_us,
            "bound_us": self.bound_us,
            "bound": self.estimate.bound if self.estimate else None,
            "because": list(self.because),
        }

    def __str__(self) -> str:
        lines = [("problem", str(self.problem)), ("device", f"{self.device.name} ({self.device.key})")]
        if self.candidate is None:
            lines.append(("kernel", "none: without queries or keys there is nothing to compute"))
        else:
            lines.append(("kernel", str(self.candidate)))
            lines.append(("source", _SOURCES[self.how]))
        row = self.record
        if row is not None:
            lines.append(
                (
                    "row",
                    f"{row.problem}; on {row.device.name}, {row.provenance.utc}, triton {row.provenance.triton}, {row.provenance.origin}",
                )
            )
            lines.append(("distance", f"{self.distance:.2f}"))
            lines.append(("measured", f"{_time(self.measured_us)} for that row"))
        if self.how == "nearest":
            lines.append(("expected", f"{_time(self.expected_us)}: measured, times the model's ratio of this problem to that row's"))
        if self.estimate is not None:
            lines.append(("predicted", f"{_time(self.predicted_us)} by the cost model, bound by {self.estimate.bound}"))
            lines.append(("bound", f"{_time(self.bound_us)}: no kernel can be faster"))
        if self.gradients is not None:
            stored = "" if self.problem.return_lse else ", which follows a forward kernel that stores the LSE"
            lines.append(("gradients", f"{self.gradients.candidate} ({self.gradients.how}){stored}"))
        lines.extend(("because" if place == 0 else "", sentence) for place, sentence in enumerate(self.because))
        return "\n".join(f"{name:<10}{text}" for name, text in lines)


_SOURCES = {
    "exact": "exact: the winner measured for this problem on this device",
    "nearest": "nearest: a winner measured elsewhere or otherwise, rendered anew for this problem",
    "predicted": "predicted: the cost model's favourite, never measured here",
    "default": "default: the hand-picked candidate, never measured here",
}


def explained(
    problem: Problem,
    device: Device,
    winners: Iterable[Record],
    *,
    negative_scale: bool = False,
    portable: bool = False,
    failures: Mapping[Candidate, str] | None = None,
    deterministic: bool = False,
    float16_dq: bool = False,
) -> Explanation:
    """The explanation of what is chosen from these winners.

    deterministic: of kernels for the gradients of a forward problem, one that is. float16_dq: one that may add up dq in float16.
    Raises UnsupportedError where flashgen has no kernel.
    """
    space.require_supported(problem, device)
    if has_nothing_to_compute(problem):
        return Explanation(problem=problem, device=device, choice=None, gradients=None, estimate=None, expected_us=None)
    known = list(winners)
    choice = choose(problem, device, known, negative_scale=negative_scale, portable=portable, failures=failures)
    gradients = None
    if problem.direction == "forward":
        backward = problem.gradients(deterministic=deterministic, float16_dq=float16_dq, return_lse=False)
        gradients = next(choices(backward, device, known, portable=portable, failures=failures), None)
    return Explanation(
        problem=problem,
        device=device,
        choice=choice,
        gradients=gradients,
        estimate=cost.estimate(choice.candidate, problem, device),
        expected_us=expected_us(choice, problem, device),
    )


def _time(us: float | None) -> str:
    if us is None:
        return "unknown"
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"
