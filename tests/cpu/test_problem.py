"""A problem states what is computed, and what cannot answer a backward problem yet says so."""

from dataclasses import replace

import pytest

from flashgen import Problem, canonical, space
from flashgen.build import standalone
from flashgen.device import Device
from flashgen.errors import ArgumentError, UnsupportedError

H200 = Device.named("h200")
FORWARD = Problem(batch=4, heads_q=16, heads_kv=16, seqlen_q=4096, seqlen_kv=4096, head_dim_qk=128, head_dim_v=128, mask="causal")
BACKWARD = replace(FORWARD, direction="backward")


def test_keys_of_forward_problems_are_what_they_were():
    """Fields that were added later are not part of the stored form where they are at their default."""
    assert FORWARD.key == "07614b477e80c709842b3acfc49e308e1fd7feea9cfe3f3f20760909b583601c"
    assert set(canonical.to_dict(BACKWARD)) == set(canonical.to_dict(FORWARD)) | {"direction"}
    others = BACKWARD, replace(BACKWARD, deterministic=True), replace(BACKWARD, float16_dq=True)
    assert len({each.key for each in (FORWARD, *others)}) == 4
    for each in others:
        assert Problem.from_dict(canonical.to_dict(each)) == each


def test_flops_of_both_directions():
    odd = Problem(batch=2, heads_q=6, heads_kv=3, seqlen_q=5, seqlen_kv=2, head_dim_qk=48, head_dim_v=80, mask="causal")
    assert odd.visible_pairs == 1 + 2
    assert odd.flops == 2 * 2 * 6 * 3 * (48 + 80)
    assert replace(odd, direction="backward").flops == 2 * 2 * 6 * 3 * (3 * 48 + 2 * 80)


def test_keys_without_a_query_have_gradients_to_store():
    for changes, forward, backward in (
        ({"batch": 0}, True, True),
        ({"seqlen_q": 0}, True, False),
        ({"seqlen_q": 0, "seqlen_kv": 0}, True, True),
        ({"seqlen_kv": 0}, False, False),
    ):
        assert replace(FORWARD, **changes).is_empty == forward
        assert replace(BACKWARD, **changes).is_empty == backward


def test_directions_are_named():
    with pytest.raises(ArgumentError, match="direction is 'sideways'; it must be one of forward, backward"):
        replace(FORWARD, direction="sideways")
    with pytest.raises(ArgumentError, match="deterministic is 1; it must be True or False"):
        replace(BACKWARD, deterministic=1)
    with pytest.raises(ArgumentError, match="deterministic is True and direction is 'forward'"):
        replace(FORWARD, deterministic=True)
    with pytest.raises(ArgumentError, match="float16_dq is 1; it must be True or False"):
        replace(BACKWARD, float16_dq=1)
    for problem, words in (
        (FORWARD, "direction is 'forward'"),
        (replace(BACKWARD, deterministic=True), "deterministic is True"),
        (replace(BACKWARD, dtype="float32"), "dtype is 'float32'"),
    ):
        with pytest.raises(ArgumentError, match=f"float16_dq is True and {words}"):
            replace(problem, float16_dq=True)
    assert str(replace(BACKWARD, float16_dq=True)) == f"{BACKWARD}, float16 dq"
    assert str(FORWARD).startswith("forward, ") and str(BACKWARD) == str(FORWARD).replace("forward", "backward")
    words = str(replace(BACKWARD, deterministic=True, return_lse=True)).split(", ")
    assert words[-2:] == ["with dlse", "deterministic"]


def test_what_cannot_answer_a_backward_problem_says_so(tmp_path):
    with pytest.raises(UnsupportedError, match="direction is 'backward'; export takes forward problems only"):
        standalone.export(space.portable_default(FORWARD, H200), BACKWARD, H200, tmp_path)
