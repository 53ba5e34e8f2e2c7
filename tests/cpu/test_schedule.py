"""Tiles of hopper kernels: each is computed once, programs have equal work, and every claim about cut blocks holds pair by pair."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashgen import schedule
from flashgen.build.kernel import block_of
from flashgen.candidate import Candidate, Config, Variant
from flashgen.launch import schedules
from flashgen.problem import Problem

SMS = 132
ROWS = schedule.WARPGROUP_ROWS


def cell(head_dim, seqlen, mask="causal"):
    """16k tokens in all, 2048 columns over the heads, as in the published tables."""
    heads = 2048 // head_dim
    return Problem(
        batch=16384 // seqlen,
        heads_q=heads,
        heads_kv=heads,
        seqlen_q=seqlen,
        seqlen_kv=seqlen,
        head_dim_qk=head_dim,
        head_dim_v=head_dim,
        mask=mask,
    )


def specialised(block_m, block_n, packed_heads=1, head_group=8, longest_first=True):
    numbers = dict(block_m=block_m, block_n=block_n, num_warps=block_m // 16, num_stages=2, persistent=True)
    return Candidate(
        variant=Variant(backend="hopper", load="tma", order="qk_first", longest_first=longest_first),
        config=Config(**numbers, packed_heads=packed_heads, head_group=head_group),
    )


sides = st.none() | st.integers(0, 700)
problems = st.builds(
    Problem,
    batch=st.integers(1, 3),
    heads_q=st.sampled_from([1, 3, 8]),
    heads_kv=st.just(1),
    seqlen_q=st.integers(1, 700),
    seqlen_kv=st.integers(1, 700),
    head_dim_qk=st.just(64),
    head_dim_v=st.just(64),
    mask=st.sampled_from(["full", "causal", "causal_top_left"]),
    window=st.tuples(sides, sides),
)
aligned = st.builds(
    Problem,
    batch=st.just(1),
    heads_q=st.just(1),
    heads_kv=st.just(1),
    seqlen_q=st.sampled_from([64, 128, 192, 320, 512]),
    seqlen_kv=st.sampled_from([64, 128, 256, 448, 512]),
    head_dim_qk=st.just(64),
    head_dim_v=st.just(64),
    mask=st.sampled_from(["full", "causal", "causal_top_left"]),
    window=st.tuples(st.none() | st.sampled_from([64, 100, 128]), st.none() | st.sampled_from([0, 63, 64, 128])),
)
tiles = st.tuples(st.sampled_from([64, 128, 192]), st.sampled_from([64, 128]))
packs = st.sampled_from([1, 2, 8, 64])
few_queries = st.builds(
    Problem,
    batch=st.integers(1, 2),
    heads_q=st.sampled_from([1, 3]),
    heads_kv=st.just(1),
    seqlen_q=st.integers(1, 140),
    seqlen_kv=st.integers(1, 300),
    head_dim_qk=st.just(64),
    head_dim_v=st.just(64),
    mask=st.sampled_from(["full", "causal"]),
)


def fitted(problem, packed_heads, heads_kv=1):
    """The problem with heads to pack."""
    return replace(problem, heads_q=problem.heads_q * packed_heads * heads_kv, heads_kv=heads_kv)


def table(candidate, problem, programs):
    """What `tile_schedule` copies to the device."""
    with mock.patch.object(schedules, "_copied", lambda numbers, width, index: torch.frombuffer(bytearray(numbers), dtype=torch.int32)):
        return schedules.tile_schedule(candidate, problem, programs, 0).view(programs, -1, 8).tolist()


@settings(deadline=None)
@given(problems, tiles, packs, st.sampled_from([1, 4, 8]), st.booleans(), st.integers(1, 200))
def test_every_tile_is_computed_exactly_once(problem, tile, packed_heads, head_group, longest_first, programs):
    problem, candidate = fitted(problem, packed_heads), specialised(*tile, packed_heads, head_group, longest_first)
    count = schedule.forward_tiles(problem, candidate.config)
    lists = schedule.tile_lists(candidate, problem, min(programs, count))
    assert sorted(each for own in lists for each in own) == list(range(count))
    assert all(lists)  # every program has one


@settings(deadline=None)
@given(few_queries, tiles, packs, st.sampled_from([1, 3]), st.integers(1, 20))
def test_every_query_of_every_head_has_one_row(problem, tile, packed_heads, heads_kv, programs):
    """As the kernel places them: boxes of TMA begin at a tile's head and at its warpgroups' queries, and lie in a tile head by head."""
    problem, candidate = fitted(problem, packed_heads, heads_kv), specialised(*tile, packed_heads)
    block = block_of("q", candidate, problem)
    assert block[:2] == [1, packed_heads] and block_of("out", candidate, problem)[:3] == block[:3]
    rows = Counter()
    programs = min(programs, schedule.forward_tiles(problem, candidate.config))
    for (count, *_), *entries in table(candidate, problem, programs):
        for item, head_q, head_kv, first_query, _, _, head, _ in entries[:count]:
            assert head == item * problem.heads_q + head_q
            for warpgroup, row in itertools.product(range(tile[0] // ROWS), range(ROWS)):
                own, query = head_q + row // block[2], first_query + warpgroup * block[2] + row % block[2]
                assert own // (problem.heads_q // problem.heads_kv) == head_kv
                if query < problem.seqlen_q:
                    rows[item, own, query] += 1
    everything = itertools.product(range(problem.batch), range(problem.heads_q), range(problem.seqlen_q))
    assert rows == Counter(everything)


def loads(candidate, problem, programs=SMS):
    """Blocks of keys of each program, with what a tile costs beside them."""
    config = candidate.config
    row_blocks = math.ceil(problem.seqlen_q / config.queries)
    lists = schedule.tile_lists(candidate, problem, programs)

    def work(tile):
        first, end = schedule.blocks_seen(problem, tile % row_blocks * config.queries, config.queries, config.block_n)
        return max(1, end - first) + 0.7

    return [sum(map(work, own)) for own in lists]


CELLS = [(head_dim, seqlen) for head_dim in (64, 128, 256) for seqlen in (1024, 2048, 4096, 8192, 16384)]
TILES = {64: (192, 128), 128: (128, 128), 256: (128, 64)}


@pytest.mark.parametrize(("head_dim", "seqlen"), CELLS)
def test_causal_work_is_balanced(head_dim, seqlen):
    own = loads(specialised(*TILES[head_dim]), cell(head_dim, seqlen))
    assert max(own) * len(own) / sum(own) <= 1.07


@settings(deadline=None)
@given(problems, tiles, packs, st.sampled_from([1, 4, 8]), st.booleans(), st.sampled_from([1, 7, SMS]))
def test_the_imbalance_that_the_cost_model_sees_is_that_of_the_lists(problem, tile, packed_heads, head_group, longest_first, programs):
    problem, candidate = fitted(problem, packed_heads), specialised(*tile, packed_heads, head_group, longest_first)
    own = loads(candidate, problem, programs)
    seen = schedule.imbalance(candidate, problem, programs)
    tiles_of_program = schedule.forward_tiles(problem, candidate.config) / programs
    assert seen == pytest.approx(max(own) * programs / sum(own), abs=1e-9 if tiles_of_program < 8 else 0.1)


@pytest.mark.parametrize(
    ("heads", "head_group", "tiles_of_head", "groups"),
    [(32, 8, 64, [8, 8, 8, 8]), (32, 8, 16, [8, 24]), (20, 8, 64, [8, 12]), (3, 8, 1, [3]), (1, 1, 1, [1])],
)
def test_the_last_groups_of_heads_are_one_until_all_programs_share_it(heads, head_group, tiles_of_head, groups):
    assert schedule.head_groups(heads, head_group, tiles_of_head, SMS) == groups


def walked(problem, config):
    """(first query, blocks in the order of walking, how many its tile has more) of each warpgroup, as the kernel has it."""
    queries = ROWS // config.packed_heads
    for start in range(0, problem.seqlen_q, config.queries):
        first, end = schedule.blocks_seen(problem, start, config.queries, config.block_n)
        end = max(end, first + 1)
        for own in range(start, start + config.queries, queries):
            own_end = end
            if schedule.skips(problem, config):
                own_end = min(max(schedule.blocks_seen(problem, own, queries, config.block_n)[1], first + 1), end)
            yield own, list(range(own_end - 1, first - 1, -1)), end - own_end


@settings(deadline=None, max_examples=300)
@given(aligned | problems, tiles, packs)
def test_blocks_cut_on_the_right(problem, tile, packed_heads):
    """A key is hidden on the right by the mask or the end of the keys; where it is promised, only a warpgroup's first block has such keys.
    What it does not walk it does not see. There are slots for the blocks that it skips."""
    problem, config = fitted(problem, packed_heads), specialised(*tile, packed_heads).config
    block_n = config.block_n
    low, high = problem.band
    promised = schedule.cuts(problem, config)
    total = 0
    for own, blocks, skipped in walked(problem, config):
        total += len(blocks)
        assert skipped < schedule.least_stages(problem, config)
        rows = range(own, min(own + ROWS // packed_heads, problem.seqlen_q))
        ends = [problem.seqlen_kv if high is None else min(row + high + 1, problem.seqlen_kv) for row in rows]
        cut = [place for place, block in enumerate(blocks) if ends and min(ends) < (block + 1) * block_n]
        if promised < 2:
            assert cut in ([], [0])[: promised + 1]
        for row, end in zip(rows, ends):
            seen = range(0 if low is None else max(0, row + low), max(0, end))
            assert {key // block_n for key in seen} <= set(blocks)
    loaded, sum_of_walks = schedule.shares(problem, config)
    assert sum_of_walks == total
    assert loaded <= total


@pytest.mark.parametrize(
    ("mask", "seqlen_kv", "tile", "expected"),
    [
        ("full", 1024, (128, 128), 0),
        ("full", 1000, (128, 128), 1),
        ("causal", 1024, (128, 128), 1),
        ("causal", 1024, (192, 128), 1),
        ("causal", 1024, (128, 64), 1),
        ("causal", 1056, (128, 128), 2),  # the diagonal crosses two blocks
        ("causal", 1088, (128, 128), 2),
        ("causal", 1088, (192, 128), 1),
        ("causal", 1088, (64, 128), 1),
        ("causal", 1088, (128, 128, 2), 1),  # 64 queries
        ("causal", 1056, (192, 64, 2), 1),  # 32 of a warpgroup that skips
        ("causal", 1024, (192, 128, 2), 2),  # 96 queries lie across blocks
        ("causal", 1025, (64, 64, 64), 1),  # a warpgroup has one
    ],
)
def test_how_many_blocks_are_cut(mask, seqlen_kv, tile, expected):
    problem = Problem(batch=1, heads_q=64, heads_kv=1, seqlen_q=1024, seqlen_kv=seqlen_kv, head_dim_qk=128, head_dim_v=128, mask=mask)
    assert schedule.cuts(problem, specialised(*tile).config) == expected


@pytest.mark.parametrize(
    ("mask", "tile", "slots"),
    [
        ("full", (192, 64), 1),
        ("causal", (128, 128), 1),
        ("causal", (192, 128), 2),
        ("causal", (128, 64), 2),
        ("causal", (192, 64), 3),
        ("causal", (192, 64, 2), 2),
    ],
)
def test_a_warpgroup_that_skips_blocks_needs_slots_for_them(mask, tile, slots):
    assert schedule.least_stages(cell(64, 1024, mask), specialised(*tile).config) == slots


@pytest.mark.parametrize(("heads", "most"), [((8, 8), 1), ((12, 2), 2), ((32, 8), 4), ((24, 1), 8), ((128, 1), 64)])
def test_heads_that_may_be_packed(heads, most):
    assert schedule.most_packed(replace(cell(64, 1024), heads_q=heads[0], heads_kv=heads[1])) == most


@pytest.mark.parametrize(("seqlen", "rows"), [(0, 16), (1, 16), (17, 32), (64, 64), (100, 128), (1000, 1024)])
def test_the_smallest_tile_for_a_sequence(seqlen, rows):
    assert schedule.tile_rows(seqlen) == rows


@pytest.mark.parametrize(("dims", "columns"), [((64, 64), (64, 64)), ((24, 40), (64, 64)), ((192, 128), (256, 128)), ((72, 8), (128, 64))])
def test_columns_of_hopper_tiles(dims, columns):
    problem = Problem(batch=1, heads_q=1, heads_kv=1, seqlen_q=64, seqlen_kv=64, head_dim_qk=dims[0], head_dim_v=dims[1])
    assert schedule.specialised_dims(problem) == columns


@settings(max_examples=300, deadline=None)
@given(problem=problems, tile=st.sampled_from([(64, 128), (128, 128), (64, 64)]))
def test_row_tiles_that_see_a_block_of_keys(problem, tile):
    """A backward kernel leaves out no tile with a visible pair, and masks every tile of which some pair is hidden or does not exist. Rows
    beyond the last one need no mask: they weigh nothing."""
    block_m, block_n = tile
    low, high = problem.band
    low, high = -(10**9) if low is None else low, 10**9 if high is None else high
    for key in range(0, problem.seqlen_kv, block_n):
        first, whole_from, whole_to, end = schedule.row_tiles_walked(problem, key, *tile)
        assert 0 <= first <= whole_from <= whole_to <= end <= math.ceil(problem.seqlen_q / block_m)
        last = min(key + block_n, problem.seqlen_kv) - 1
        for tile_index in range(math.ceil(problem.seqlen_q / block_m)):
            row, row_end = tile_index * block_m, min(tile_index * block_m + block_m, problem.seqlen_q) - 1
            some = key - row_end <= high and last - row >= low
            every = last - row <= high and key - row_end >= low and last == key + block_n - 1
            assert not some or first <= tile_index < end
            assert every or not whole_from <= tile_index < whole_to


@settings(max_examples=60, deadline=None)
@given(problem=problems, head_group=st.sampled_from([1, 4]), programs=st.integers(1, 140))
def test_every_block_of_keys_is_owned_once(problem, head_group, programs):
    candidate = Candidate(
        variant=Variant(family="backward", backend="hopper", load="tma", fused=True),
        config=Config(block_m=64, block_n=128, num_warps=8, num_stages=2, head_group=head_group),
    )
    lists = schedule.key_block_lists(candidate, problem, programs)
    blocks = problem.batch * problem.heads_kv * math.ceil(problem.seqlen_kv / 128)
    assert len(lists) == programs
    assert sorted(block for each in lists for block in each) == list(range(blocks))


@settings(deadline=None)
@given(problem=problems, tile=st.sampled_from([(64, 128), (128, 128), (64, 64)]), head_group=st.sampled_from([1, 4]))
@example(problem=cell(128, 8192), tile=(64, 128), head_group=4)
@example(problem=cell(64, 1024), tile=(128, 128), head_group=1)
@example(problem=cell(256, 2048, "full"), tile=(64, 64), head_group=1)
def test_the_imbalance_of_key_blocks_that_the_cost_model_sees_is_that_of_the_lists(problem, tile, head_group):
    block_m, block_n = tile
    candidate = Candidate(
        variant=Variant(family="backward", backend="hopper", load="tma"),
        config=Config(block_m=block_m, block_n=block_n, num_warps=8, num_stages=2, head_group=head_group),
    )
    key_blocks = math.ceil(problem.seqlen_kv / block_n)
    programs = min(SMS, problem.batch * problem.heads_kv * key_blocks)

    def work(block):
        first, _, _, end = schedule.row_tiles_walked(problem, block % key_blocks * block_n, block_m, block_n)
        return problem.heads_q // problem.heads_kv * (end - first) + 1.0

    own = [sum(map(work, blocks)) for blocks in schedule.key_block_lists(candidate, problem, programs)]
    seen = schedule.imbalance_of_keys(problem, block_m, block_n, head_group, programs)
    assert seen == pytest.approx(max(own) * programs / sum(own), abs=0.01)
