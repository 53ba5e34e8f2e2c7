"""The search's policy, over the real legal space with made-up times: see search_world."""

import math
from dataclasses import replace

import pytest

from flashgen import cost, space
from flashgen.candidate import Candidate
from flashgen.database import Database
from flashgen.errors import ArgumentError, BuildError, BuildTimeoutError, NoWinnerError, OutOfResourcesError
from flashgen.problem import Problem
from flashgen.record import Measurement, Record, Status
from flashgen.render import render
from flashgen.search.outcome import Budget, Ended, Started, Tried
from tests.cpu.search_world import BACKWARD, H200, HERE, SMALL, World, estimated, resources

TRUE = estimated(SMALL)
LEGAL = space.candidates(SMALL, H200)
DEFAULT = space.default(SMALL, H200)
BEST = min(LEGAL, key=TRUE)
ENDLESS = Budget(trials=None, patience=None, near_bound=None)


def statuses(database: Database, problem: Problem = SMALL) -> dict[Candidate | None, Status]:
    return {row.candidate: row.measurement.status for row in database.records(problem, H200, peers=False)}


def test_finds_the_best_and_keeps_every_row() -> None:
    """Default first; at most one trial a candidate; rows, provenance, peers and events tell the whole story."""
    world, database = World(seconds=TRUE), Database.memory()
    outcome = world.tune(SMALL, database, Budget(trials=24, patience=None)).run()
    assert world.measured[0] == DEFAULT
    assert len(world.measured) == len(set(world.measured)) == 24 == outcome.trials
    assert TRUE(outcome.winner.candidate) <= 1.02 * TRUE(BEST)
    assert outcome.winner == database.winner(SMALL, H200)
    assert outcome.default is not None and outcome.default.candidate == DEFAULT
    assert outcome.speedup == pytest.approx(TRUE(DEFAULT) / TRUE(outcome.winner.candidate))
    stored = database.records(SMALL, H200)
    assert set(outcome.records) == set(stored)
    assert all(row.provenance.gpu == "NVIDIA H200" and row.provenance.utc for row in stored if row.measurement.status is Status.OK)
    assert all(row.estimate is not None and row.source_sha256 for row in stored if row.candidate is not None)
    assert [row.peer.name for row in outcome.peers if row.peer] == ["cudnn"]
    tried = [event for event in world.events if isinstance(event, Tried)]
    assert isinstance(world.events[0], Started) and world.events[0].legal == len(LEGAL)
    assert isinstance(world.events[-1], Ended) and world.events[-1].outcome == outcome
    assert tried[0].source == "default" and tried[-1].trials == 24 and tried[-1].remaining_s == 0.0


def test_finds_the_best_backward_kernel() -> None:
    """The same search over backward candidates; it starts from the winner of a similar backward problem, and of no forward one."""
    true = estimated(BACKWARD)
    world, database = World(seconds=true), Database.memory()
    legal = space.candidates(BACKWARD, H200)
    taught = World(seconds=lambda each: 1e-3 * (0.5 if each == legal[-1] else 1.0), workers=16)
    taught.tune(replace(BACKWARD, direction="forward"), database, Budget(trials=3)).run()
    taught.tune(replace(BACKWARD, seqlen_q=2048, seqlen_kv=2048, batch=8), database, ENDLESS).run()
    outcome = world.tune(BACKWARD, database, Budget(trials=20, patience=None)).run()
    assert world.measured[:2] == [space.default(BACKWARD, H200), legal[-1]]
    assert {each.variant.family for each in world.measured} == {"backward"} and len(set(world.measured)) == 20
    assert true(outcome.winner.candidate) <= 1.03 * true(min(legal, key=true))
    assert outcome.winner == database.winner(BACKWARD, H200)
    assert all(row.estimate is not None and row.source_sha256 for row in outcome.records if row.candidate is not None)


def test_the_gpu_does_not_wait() -> None:
    """Compilers start while the measuring process does, and run ahead of it: 24 trials cost little more than the measurements."""
    world = World(seconds=TRUE, workers=14)
    world.tune(SMALL, Database.memory(), Budget(trials=24, patience=None)).run()
    assert world.now < world.start_s + 24 * world.measure_s + 6


def test_interrupted_search_goes_on() -> None:
    """Ctrl-C keeps all rows; the next search measures nothing twice (O04) and replays nothing (O06)."""
    world, database = World(seconds=TRUE), Database.memory()

    def interrupt(event: object) -> None:
        if isinstance(event, Tried) and event.trials == 7:
            raise KeyboardInterrupt

    budget = Budget(trials=20, patience=None)
    with pytest.raises(KeyboardInterrupt):
        replace(world.tune(SMALL, database, budget), on_event=interrupt).run()
    assert len(database.records(SMALL, H200, Status.OK)) == 7
    outcome = world.tune(SMALL, database, budget).run()
    assert outcome.trials == 20 == len(world.measured) == len(set(world.measured))


def test_settled_search_starts_nothing() -> None:
    """The same call again answers from the database."""
    world, database = World(seconds=TRUE), Database.memory()
    budget = Budget(trials=10, patience=None)
    first = world.tune(SMALL, database, budget).run()
    count, now = len(database.records()), world.now
    again = world.tune(SMALL, database, budget).run()
    assert (again.winner, again.peers, again.default) == (first.winner, first.peers, first.default)
    assert len(database.records()) == count and world.now == now
    assert len(world.measured) == 10


def test_more_budget_goes_on_and_force_begins_anew() -> None:
    world, database = World(seconds=TRUE), Database.memory()
    world.tune(SMALL, database, Budget(trials=6, patience=None)).run()
    assert world.tune(SMALL, database, Budget(trials=9, patience=None)).run().trials == 9
    assert len(world.measured) == len(set(world.measured)) == 9
    world.tune(SMALL, database, Budget(trials=6, patience=None), force=True).run()
    assert world.measured[9] == DEFAULT and len(world.measured) == 15


def test_a_space_that_is_smaller_than_the_budget() -> None:
    """Each point is measured once, then the search ends and says why (O04)."""
    world = World(seconds=TRUE, workers=16)
    outcome = world.tune(SMALL, Database.memory(), ENDLESS).run()
    assert sorted(map(str, world.measured)) == sorted(map(str, LEGAL))
    assert "every legal candidate" in outcome.reason
    assert outcome.winner.candidate is not None and TRUE(outcome.winner.candidate) <= 1.01 * TRUE(BEST)


def test_failures_are_rows_with_reasons() -> None:
    """T01 to T05: whatever becomes of a candidate is its own row, and the winner comes from the rest."""
    bad = sorted(LEGAL, key=TRUE)[:7]
    world = World(
        seconds=TRUE,
        workers=16,
        build_errors={
            bad[0]: OutOfResourcesError("shared memory: needs 300000 bytes, h200 has 232448"),
            bad[1]: BuildError("ptxas died"),
            bad[2]: BuildTimeoutError("did not compile within 60 s"),
        },
        faults={
            bad[3]: Measurement(status=Status.LAUNCH_ERROR, message="an illegal memory access"),
            bad[4]: Measurement(status=Status.WRONG_RESULT, error=1.0, tolerance=0.01, message="out error 1 is above 0.01"),
            bad[5]: Measurement(status=Status.TIMEOUT, message="no end within 20 s"),
            bad[6]: Measurement(status=Status.CRASHED, message="the measuring process was killed by SIGSEGV"),
        },
    )
    database = Database.memory()
    outcome = world.tune(SMALL, database, ENDLESS).run()
    seen = statuses(database)
    assert [seen[each].value for each in bad] == [
        "out_of_resources", "compile_error", "timeout", "launch_error", "wrong_result", "timeout", "crashed",
    ]  # fmt: skip
    assert all(row.measurement.message for row in database.records(SMALL, H200, [seen[each] for each in bad]))
    assert outcome.winner.candidate not in bad
    again = world.tune(SMALL, database, ENDLESS).run()
    assert again.winner == outcome.winner and len(world.measured) == len(LEGAL) - 3


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_no_right_candidate(seconds: float) -> None:
    """O09: a time that is no time is a failure; without a winner there is an error that lists reasons."""
    failed = Measurement(status=Status.WRONG_RESULT, message="out error 1 is above 0.01")
    world = World(seconds=TRUE, faults=dict.fromkeys(LEGAL, failed))
    world.faults[DEFAULT] = _timed(1e6 * seconds) if math.isinf(seconds) else failed
    with pytest.raises(NoWinnerError, match="out error 1 is above"):
        world.tune(SMALL, Database.memory(), Budget(trials=5)).run()


def test_infinite_time_is_no_time() -> None:
    """O09: inf never counts as best."""
    world, database = World(seconds=TRUE), Database.memory()
    world.faults[DEFAULT] = _timed(math.inf)
    outcome = world.tune(SMALL, database, Budget(trials=4)).run()
    assert statuses(database)[DEFAULT] is Status.LAUNCH_ERROR and outcome.winner.candidate != DEFAULT


def _timed(median_us: float) -> Measurement:
    return Measurement(status=Status.OK, times_us=(1.0,), median_us=median_us, spread_us=0.0)


def test_wrong_winner_is_found_out() -> None:
    """T07: the fastest passes its trial but not the harder check; it is a WRONG_RESULT row, and the next one wins."""
    wrong = Measurement(status=Status.WRONG_RESULT, message="run 3 of 20 on the same inputs gave another result")
    fastest = sorted(LEGAL, key=TRUE)[:2]
    world, database = World(seconds=TRUE, workers=16, unsound=dict.fromkeys(fastest, wrong)), Database.memory()
    outcome = world.tune(SMALL, database, ENDLESS).run()
    assert outcome.winner.candidate not in fastest
    assert TRUE(outcome.winner.candidate) <= 1.01 * TRUE(sorted(LEGAL, key=TRUE)[2])
    assert [statuses(database)[each] for each in fastest] == [Status.WRONG_RESULT] * 2
    assert database.winner(SMALL, H200) == outcome.winner


def test_luck_is_not_reported() -> None:
    """O14: where all are equal and times noisy, nothing is claimed; one that is 3 % better is found."""
    gains, found = [], 0
    for run in range(3):
        special = LEGAL[(7 * run + 3) % len(LEGAL)]
        for fast in (1.0, 0.97):
            world = World(seconds=lambda each: 1e-3 * (fast if each == special else 1.0), noise=0.005, workers=16)  # noqa: B023
            world.random.seed(run)
            outcome = world.tune(SMALL, Database.memory(), ENDLESS).run()
            assert outcome.speedup is not None
            if fast == 1.0:
                gains.append(outcome.speedup - 1)
            else:
                found += outcome.winner.candidate == special or special == DEFAULT
    # Among equals the one with least shared memory wins, which may have been measured once only: a lucky time by one deviation.
    assert abs(sum(gains) / len(gains)) < 0.006 and max(gains) < 0.012
    assert found == 3


def test_doubles_are_measured_once() -> None:
    """Two candidates with the same machine code are one kernel."""
    world, database = World(seconds=TRUE, binary=lambda each: f"{each.config.block_m} {each.config.block_n}"), Database.memory()
    outcome = world.tune(SMALL, database, ENDLESS).run()
    kernels = {(each.config.block_m, each.config.block_n) for each in LEGAL}
    assert len(world.measured) == len(kernels)
    skipped = [row for row in outcome.records if row.measurement.status is Status.SKIPPED]
    assert len(skipped) == outcome.skipped == len(LEGAL) - len(kernels)
    assert all("same machine code as" in row.measurement.message for row in skipped)


def test_the_bound_ends_the_search() -> None:
    """Within the chosen fraction of the bound there is nothing left to gain."""
    bound_s = cost.estimate(DEFAULT, SMALL, H200).bound_s
    world = World(seconds=lambda each: bound_s * (1.04 if each == DEFAULT else 1.5))
    outcome = world.tune(SMALL, Database.memory()).run()
    assert outcome.winner.candidate == DEFAULT and outcome.trials == 1 and "96%" in outcome.reason


def test_candidates_that_cannot_win_are_skipped() -> None:
    """With near_bound off, candidates whose bound is not below the best are skipped, with a row that says so."""
    bound_s = cost.estimate(DEFAULT, SMALL, H200).bound_s
    world = World(seconds=lambda each: bound_s)
    outcome = world.tune(SMALL, Database.memory(), ENDLESS).run()
    assert "cannot beat" in next(row.measurement.message for row in outcome.records if row.measurement.status is Status.SKIPPED)
    assert outcome.trials < len(LEGAL) / 2


def test_a_plateau_ends_the_search() -> None:
    world = World(seconds=lambda each: 1e-3)
    outcome = world.tune(SMALL, Database.memory(), Budget(trials=60, patience=9)).run()
    assert outcome.trials == 10 and "the last 9 trials" in outcome.reason


def test_the_time_budget_ends_the_search() -> None:
    """However long the start of the measuring process takes, about as many trials fit in: during a long one more gets compiled."""
    budget = Budget(trials=None, seconds=4.0, patience=None)
    outcomes = [World(seconds=TRUE, start_s=start_s).tune(SMALL, Database.memory(), budget).run() for start_s in (1.0, 30.0)]
    for outcome in outcomes:
        assert outcome.reason == "the budget of 4 s is spent" and 4 < outcome.trials < 16
    assert abs(outcomes[0].trials - outcomes[1].trials) <= 3


def test_rows_of_other_sources_are_measured_anew() -> None:
    """A row whose generated source or compiler has changed says nothing about today's kernel; nor does a shipped one."""
    for change in (
        {"source_sha256": "old"},
        {"provenance": replace(HERE, triton="3.7.1")},
        {"provenance": replace(HERE, origin="shipped")},
    ):
        database = Database.memory()
        row = Record(
            problem=SMALL,
            device=H200,
            candidate=BEST,
            estimate=cost.estimate(BEST, SMALL, H200),
            measurement=_timed(1.0),
            provenance=HERE,
            source_sha256=render(BEST.variant).sha256,
        )
        database.add(replace(row, **change))  # type: ignore[arg-type]
        world = World(seconds=TRUE)
        outcome = world.tune(SMALL, database, Budget(trials=3)).run()
        assert BEST in world.measured[:2], "what won before is tried early"
        assert outcome.winner.candidate in world.measured and outcome.winner.measurement.median_us >= 1e6 * TRUE(BEST)


def test_similar_problems_teach() -> None:
    """The winner of a similar problem is tried right after the default."""
    other = replace(SMALL, seqlen_q=2048, seqlen_kv=2048, batch=8)
    database = Database.memory()
    special = sorted(LEGAL, key=TRUE)[20]
    taught = World(seconds=lambda each: 1e-3 * (0.5 if each == special else 1.0), workers=16)
    first = taught.tune(other, database, ENDLESS).run()
    world = World(seconds=TRUE)
    world.tune(SMALL, database, Budget(trials=4)).run()
    assert first.winner.candidate == special
    assert world.measured[1] == space.adapt(special, SMALL, H200)


def test_a_comparison_that_fails_changes_nothing() -> None:
    """Where the finalists cannot be compared, the times of the trials stand."""
    from flashgen.errors import LaunchError

    world = World(seconds=TRUE)
    search = world.tune(SMALL, Database.memory(), Budget(trials=8))

    def broken(request: object) -> None:
        raise LaunchError("the finalists could not be compared")

    search.measurer.decide = broken  # type: ignore[method-assign, assignment]
    outcome = search.run()
    assert outcome.winner.measurement.status is Status.OK and outcome.peers == ()


@pytest.mark.parametrize("name", ["trials", "patience"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", math.nan])
def test_counts_of_a_budget(name: str, value: object) -> None:
    """O24: usage errors at once, naming the argument."""
    with pytest.raises(ArgumentError, match=f"{name} is"):
        Budget(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"), [("seconds", each) for each in (0, -1, math.nan, math.inf, True, "9")] + [("near_bound", 0), ("near_bound", 1.5)]
)
def test_numbers_of_a_budget(name: str, value: object) -> None:
    """O24, the same for seconds and the fraction of the bound."""
    with pytest.raises(ArgumentError, match=f"{name} is"):
        Budget(**{name: value})  # type: ignore[arg-type]


def test_resources_refine_the_estimate() -> None:
    """Rows carry the estimate with the resources that the compiler reported, not the guess before it."""
    world, database = World(seconds=TRUE), Database.memory()
    world.tune(SMALL, database, Budget(trials=3)).run()
    row = database.records(SMALL, H200, Status.OK)[0]
    assert row.candidate is not None and row.measurement.resources == resources(row.candidate, SMALL, row.candidate.key)
    assert row.estimate == cost.estimate(row.candidate, SMALL, H200, row.measurement.resources)


def test_leftovers_of_another_search_are_not_mixed_up() -> None:
    """What a compiler still had from the problem before is not taken for this problem's."""
    world, database = World(seconds=TRUE, workers=16), Database.memory()
    other = replace(SMALL, batch=2)
    first = world.tune(other, database, Budget(trials=3))
    first.run()
    assert sum(first.leftovers.values()) > 0
    world.build_errors = dict.fromkeys(first.leftovers, BuildError("of the other problem"))
    second = replace(world.tune(SMALL, database, Budget(trials=3)), compiler=first.compiler, leftovers=first.leftovers)
    world.build_errors.pop(DEFAULT, None)
    outcome = second.run()
    assert outcome.trials == 3 and sum(first.leftovers.values()) >= 0
    assert Status.OK in {row.measurement.status for row in outcome.records}


def test_a_random_sample() -> None:
    """As many as the budget says, drawn from everywhere, also over several runs; searches can then be replayed on them."""
    world, database = World(seconds=TRUE, workers=16), Database.memory()
    budget = Budget(trials=20, patience=None, near_bound=None)
    world.tune(SMALL, database, replace(budget, trials=12), sample=True).run()
    outcome = world.tune(SMALL, database, budget, sample=True).run()
    assert outcome.trials == 20 == len(set(world.measured))
    sources = [event.source for event in world.events if isinstance(event, Tried)]
    assert sources == ["default"] + ["random"] * 19
    places = sorted(sorted(LEGAL, key=TRUE).index(each) / len(LEGAL) for each in world.measured)
    assert places[-1] > 0.75 and 0.3 < sum(places) / len(places) < 0.7
