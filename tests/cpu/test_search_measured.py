"""The search and the cost model, held against real times: tests/measured/ has what random samples of four spaces took on an H200."""

import json
from pathlib import Path

import pytest

from flashgen import cost
from flashgen.candidate import Candidate
from flashgen.device import DEVICES
from flashgen.problem import Problem
from flashgen.report.summary import rank_correlation
from flashgen.search.replay import replay, trials_to

DEVICE = DEVICES["h200"]
MEASURED = Path(__file__).resolve().parent.parent / "measured" / "nvidia_h200.jsonl"


def samples() -> list[tuple[Problem, dict[Candidate, float]]]:
    """Problems with the seconds of each measured candidate."""
    rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    return [
        (Problem.from_dict(row["problem"]), {Candidate.from_dict(fields): 1e-6 * time_us for fields, time_us in row["measured"]})
        for row in rows
    ]


SAMPLES = pytest.mark.parametrize(
    ("problem", "seconds"),
    samples(),
    ids=lambda value: f"d{value.head_dim_qk} {value.mask} {value.seqlen_q}" if isinstance(value, Problem) else "",
)


@SAMPLES
def test_search_is_near_the_best_within_24_trials(problem: Problem, seconds: dict[Candidate, float]) -> None:
    """With no experience of other problems, and with four candidates always under way."""
    trials = trials_to(replay(seconds, problem, DEVICE, trials=24, ahead=4))
    assert trials is not None


@SAMPLES
def test_search_is_better_than_chance(problem: Problem, seconds: dict[Candidate, float]) -> None:
    """Drawn without replacement, the first of k good ones among n comes after (n + 1) / (k + 1) trials in the mean."""
    good = sum(time_s <= 1.02 * min(seconds.values()) for time_s in seconds.values())
    trials = trials_to(replay(seconds, problem, DEVICE, trials=60, ahead=4))
    assert trials is not None and trials < (len(seconds) + 1) / (good + 1) / 2


@SAMPLES
def test_model_ranks(problem: Problem, seconds: dict[Candidate, float]) -> None:
    """Nothing was compiled for these estimates: registers and shared memory are the model's guesses, too."""
    predicted = {candidate: cost.estimate(candidate, problem, DEVICE).time_s for candidate in seconds}
    correlation = rank_correlation(list(predicted.values()), list(seconds.values()))
    assert correlation is not None and correlation > 0.55
    best = min(seconds, key=lambda candidate: seconds[candidate])
    assert sorted(predicted.values()).index(predicted[best]) < 0.1 * len(seconds)
    assert all(cost.estimate(candidate, problem, DEVICE).bound_s < time_s for candidate, time_s in seconds.items())
