"""Predicted mode: what is said of a device that is not here."""

from dataclasses import replace

import pytest

from flashgen import cost, space
from flashgen.candidate import Candidate
from flashgen.database import Database
from flashgen.device import Device
from flashgen.errors import ArgumentError, BuildError, NoWinnerError, UnsupportedError
from flashgen.problem import Problem
from flashgen.record import Status
from flashgen.search import Budget, Session, numerics, predict, tune
from flashgen.search.outcome import Ended, Event, Staged, Tried
from tests.cpu.search_world import BACKWARD, H200, SMALL, FakeCompiler, World, estimated

PORTABLE = replace(SMALL, aligned_16=False)  # no warp-specialised kernel takes it, and the interpreter runs all others
TINY = Problem(batch=1, heads_q=4, heads_kv=2, seqlen_q=300, seqlen_kv=300, head_dim_qk=32, head_dim_v=32, mask="causal")


def right(candidates: object, problem: Problem, device: Device) -> dict[Candidate, str]:
    return dict.fromkeys(list(candidates)[:3], "")  # type: ignore[call-overload]


def test_ranks_compiles_and_stores() -> None:
    """The default and favourites that differ, with resources; the winner has the best estimate, and is PREDICTED."""
    world, database = World(seconds=estimated(SMALL)), Database.memory()
    events: list[Event] = []
    outcome = predict(SMALL, H200, database, top=6, on_event=events.append, compiler=FakeCompiler(world), check=right)
    assert not outcome.measured and outcome.speedup is None and outcome.trials == 0
    rows = database.records(SMALL, H200)
    assert set(rows) == set(outcome.records) and len(rows) == 6
    assert {row.measurement.status for row in rows} == {Status.PREDICTED}
    assert all(row.measurement.resources is not None and row.estimate is not None and row.provenance.gpu == "" for row in rows)
    assert outcome.winner.estimate is not None
    assert outcome.winner.estimate.time_s == min(row.estimate.time_s for row in rows if row.estimate is not None)
    assert outcome.default is not None and outcome.default.candidate == space.default(SMALL, H200)
    assert len({(row.candidate.config.block_m, row.candidate.config.block_n) for row in rows if row.candidate}) > 1
    assert "Nothing was measured" in outcome.notes[0] and "bfloat16 was not checked" in outcome.notes[-1]
    assert sum(isinstance(event, Tried) for event in events) == 6 and isinstance(events[-1], Ended)
    assert any(isinstance(event, Staged) and "nothing is measured" in event.message for event in events)
    assert database.winner(SMALL, H200) is None, "a predicted row never wins"


def test_what_does_not_compile_or_is_wrong_does_not_win() -> None:
    world, database = World(seconds=estimated(SMALL)), Database.memory()
    best = predict(SMALL, H200, Database.memory(), top=4, compiler=FakeCompiler(world), check=None).winner.candidate
    assert best is not None
    world.build_errors[best] = BuildError("ptxas died")
    outcome = predict(SMALL, H200, database, top=4, compiler=FakeCompiler(world), check=None)
    assert outcome.winner.candidate != best
    assert [row.candidate for row in outcome.records if row.measurement.status is Status.COMPILE_ERROR] == [best]
    assert sum(row.measurement.status is Status.PREDICTED for row in outcome.records) == 4, "another one takes its place"

    def all_wrong(candidates: object, problem: Problem, device: Device) -> dict[Candidate, str]:
        return dict.fromkeys(candidates, "out error 1 is above 0.01")  # type: ignore[call-overload]

    with pytest.raises(NoWinnerError, match="out error 1"):
        predict(PORTABLE, H200, database, top=2, compiler=FakeCompiler(world), check=all_wrong)


def test_what_has_no_interpreter_is_said() -> None:
    """Gluon kernels are not interpreted; others beside them are."""
    world = World(seconds=estimated(SMALL))
    asked: list[Candidate] = []

    def check(candidates: object, problem: Problem, device: Device) -> dict[Candidate, str]:
        asked.extend(candidates)  # type: ignore[call-overload]
        return dict.fromkeys(asked, "")

    notes = predict(SMALL, H200, Database.memory(), top=8, compiler=FakeCompiler(world), check=check).notes
    assert asked and {each.variant.backend for each in asked} == {"triton"}
    assert any("hopper kernels not at all, all right" in note for note in notes)
    notes = predict(SMALL, H200, Database.memory(), top=1, compiler=FakeCompiler(world), check=check).notes
    assert "Numerics were not checked: hopper kernels have no interpreter." in notes


def test_an_interpreter_that_cannot_run_is_said() -> None:
    def broken(candidates: object, problem: Problem, device: Device) -> dict[Candidate, str]:
        raise RuntimeError("only 0-dimensional arrays can be converted")

    outcome = predict(PORTABLE, H200, Database.memory(), top=1, compiler=FakeCompiler(World(seconds=estimated(SMALL))), check=broken)
    assert any("Numerics were not checked: only 0-dimensional" in note for note in outcome.notes)


@pytest.mark.parametrize("top", [0, -1, 1.5, True])
def test_top_is_checked(top: object) -> None:
    """O24."""
    with pytest.raises(ArgumentError, match="top is"):
        predict(SMALL, H200, Database.memory(), top=top)  # type: ignore[arg-type]


def test_the_sibling_is_small_and_alike() -> None:
    """2 heads, at most 256 tokens; mask, window, head dims, layout, tails and grouping stay."""
    problem = replace(TINY, seqlen_q=5003, seqlen_kv=8001, window=(700, None), layout="bshd", return_lse=True)
    small = numerics.sibling(problem)
    assert (small.batch, small.heads_q, small.heads_kv, small.dtype) == (1, 2, 1, "float16")
    assert small.seqlen_q <= 256 and small.seqlen_q % 64 == 5003 % 64 and small.seqlen_kv % 64 == 8001 % 64
    assert space.required(small)["mask"] == space.required(problem)["mask"] == "window"
    assert (small.layout, small.return_lse, small.head_dim_qk) == ("bshd", True, 32)
    assert numerics.sibling(replace(problem, dtype="float32")).dtype == "float32"
    assert numerics.sibling(replace(TINY, seqlen_q=1)).seqlen_q == 1


def test_numerics_for_real() -> None:
    """Triton's interpreter in a process of its own runs real generated kernels: one candidate for each variant."""
    order = sorted(space.candidates(TINY, H200), key=lambda each: cost.estimate(each, TINY, H200).time_s)
    tma = next(each for each in order if each.variant.load == "tma" and each.variant.backend == "triton")
    pointer = next(each for each in order if each.variant.load == "pointer")
    verdicts = numerics.check_numerics([tma, pointer, tma], TINY, H200)
    assert verdicts == {tma: "", pointer: ""}


def test_numerics_of_backward_kernels() -> None:
    """A wrong one would be found: the same check as on a GPU."""
    problem = replace(TINY, direction="backward")
    candidate = space.default(problem, H200)
    portable = candidate if candidate.variant.backend == "triton" else space.portable_default(problem, H200)
    assert numerics.check_numerics([portable], problem, H200) == {portable: ""}


def test_predictions_of_backward_kernels() -> None:
    """Favourites of the space of backward kernels, whose numerics are looked at on a backward sibling."""
    asked: list[tuple[Candidate, Problem]] = []

    def check(candidates: object, problem: Problem, device: Device) -> dict[Candidate, str]:
        asked.extend((each, problem) for each in candidates)  # type: ignore[attr-defined]
        return dict.fromkeys((each for each, _ in asked), "")

    outcome = predict(BACKWARD, H200, Database.memory(), top=6, compiler=FakeCompiler(World(seconds=lambda each: 1.0)), check=check)
    assert {row.candidate.variant.family for row in outcome.records if row.candidate} == {"backward"}
    assert outcome.default is not None and outcome.winner.measurement.status is Status.PREDICTED
    assert all(problem == BACKWARD for _, problem in asked)
    assert numerics.sibling(BACKWARD).direction == "backward"


def test_numerics_out_of_time() -> None:
    with pytest.raises(RuntimeError, match="no answer within 0.01 s"):
        numerics.check_numerics([space.default(TINY, H200)], TINY, H200, limit_s=0.01)


def test_tune_for_a_device_that_is_not_here() -> None:
    """The whole of it: tune with a named device compiles for real and checks numerics, and says that nothing was measured."""
    database = Database.memory()
    unaligned = replace(TINY, aligned_16=False)  # has portable kernels only
    outcome = tune(unaligned, device="h200", database=database, budget=Budget(trials=2))
    assert not outcome.measured and outcome.winner.measurement.status is Status.PREDICTED
    assert outcome.winner.measurement.resources is not None and outcome.winner.measurement.resources.registers > 16
    assert len(database.records(unaligned, H200)) == 2
    assert any("all right" in note for note in outcome.notes), outcome.notes


def test_arguments_are_checked_before_anything_starts() -> None:
    with pytest.raises(ArgumentError, match="device is 'h300'"):
        Session("h300", Database.memory())
    with pytest.raises(ArgumentError, match="device is True"):
        Session(True, Database.memory())
    with Session(H200, Database.memory()) as session:
        assert not session.measures
        with pytest.raises(ArgumentError, match="batch is 0"):
            session.tune(replace(TINY, batch=0))
        with pytest.raises(ArgumentError, match="seed is -1"):
            session.tune(TINY, seed=-1)
        with pytest.raises(UnsupportedError, match="head_dim"):
            session.tune(replace(TINY, head_dim_qk=512, head_dim_v=512))
