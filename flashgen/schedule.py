"""How a candidate divides a problem: blocks of keys that tiles walk, tiles that programs compute, and how evenly."""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from flashgen.candidate import Candidate, Config
from flashgen.problem import Problem

WARPGROUP_ROWS = 64  # of a product of one warpgroup
DQ_ROWS, DQ_KEYS = 128, 64  # that a program of a backward hopper kernel owns, and walks at a time, where dq has a loop of its own
EARLY_DIM = 64  # up to so many columns of V a forward hopper kernel that issues scores first waits for P V together with them
MOST_PART = 128  # columns of the output that a warpgroup of a hopper kernel writes at once
_BLOCKS_OF_A_TILE = 0.7  # a tile of a hopper kernel costs as much outside its loop as about so many blocks of keys
_TILES_OF_A_KEY_BLOCK = 1.0  # and a block of keys of a backward hopper kernel as much as about so many row tiles
_KEYS_OF_A_TILE = 96  # a tile of any kernel costs as much outside its loop as about this many keys inside it
_QUERIES_OF_A_TILE = 160  # and a block of keys of a backward kernel as this many queries


def tile_dim(head_dim: int) -> int:
    """Columns of a tile that holds this head dim: the power of two not below it, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tile_rows(seqlen: int) -> int:
    """Rows of the smallest tile that holds a whole sequence."""
    return max(16, 1 << max(0, seqlen - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Blocks of keys that one head's row blocks walk: without a cut, and cut by the mask or the end; sums over the row blocks. Or blocks
    of queries that blocks of keys walk: then row blocks are of keys, and a row block sees queries."""

    row_blocks: int
    whole: int
    cut: int
    most: int  # blocks of the longest row block
    loops: int  # not empty loops, where whole and cut blocks are walked apart
    spans: tuple[int, ...]  # keys a row block sees; one entry if all see the same


@lru_cache(maxsize=4096)
def walk(problem: Problem, block_m: int, block_n: int) -> Walk:
    """How the template walks this problem with these tiles."""
    return _walk(*problem.band, problem.seqlen_q, problem.seqlen_kv, block_m, block_n)


@lru_cache(maxsize=4096)
def walk_queries(problem: Problem, block_m: int, block_n: int) -> Walk:
    """The other way round, for the sums over queries of a backward kernel: blocks of block_n keys walk blocks of block_m queries."""
    low, high = problem.band
    opposite = None if high is None else -high, None if low is None else -low
    return _walk(*opposite, problem.seqlen_kv, problem.seqlen_q, block_n, block_m)


def _walk(low: int | None, high: int | None, seqlen_q: int, seqlen_kv: int, block_m: int, block_n: int) -> Walk:
    row_blocks = -(-seqlen_q // block_m)
    if low is None and high is None:
        whole, cut = seqlen_kv // block_n, int(seqlen_kv % block_n > 0)
        loops = int(whole > 0) + cut
        return Walk(
            row_blocks=row_blocks,
            whole=whole * row_blocks,
            cut=cut * row_blocks,
            most=whole + cut if row_blocks else 0,
            loops=loops * row_blocks,
            spans=(seqlen_kv,),
        )
    all_whole = all_cut = most = loops = 0
    spans = []
    for row in range(0, seqlen_q, block_m):
        last = seqlen_kv if high is None else min(max(min(row + block_m, seqlen_q) + high, 0), seqlen_kv)
        first = 0 if low is None else max(row + low, 0)
        spans.append(max(0, last - first))
        if last <= first:
            continue
        blocks = -(-last // block_n) - first // block_n
        whole_last = (seqlen_kv if high is None else min(max(row + high + 1, 0), seqlen_kv)) // block_n
        whole_first = 0 if low is None else -(-max(row + block_m - 1 + low, 0) // block_n)
        whole = max(0, whole_last - whole_first)
        all_whole += whole
        all_cut += blocks - whole
        most = max(most, blocks)
        left = low is not None and first // block_n < whole_first
        loops += int(whole > 0) + int(left) + int(blocks - whole > int(left))
    return Walk(row_blocks=row_blocks, whole=all_whole, cut=all_cut, most=most, loops=loops, spans=tuple(spans))


@lru_cache(maxsize=16384)
def unevenness(
    problem: Problem, block_m: int, longest_first: bool, head_group: int, num_sms: int, programs: int, persistent: bool
) -> tuple[float, float]:
    """Time of the busiest program of a portable kernel, and of the busiest SM, relative to the mean: 1 is a perfect balance.

    An SM has `programs` of them. Tiles go to the next free one in launch order, or in turn if persistent. Only so many are simulated
    as decide the outcome: the last ones of a grid, which decide how it ends, or the first of a persistent one, whose imbalance repeats.
    """
    walked = walk(problem, block_m, block_m)
    weights = [span + _KEYS_OF_A_TILE for span in walked.spans]
    return _unevenness(
        weights, walked.row_blocks, problem.batch * problem.heads_q, longest_first, head_group, num_sms, programs, persistent
    )


@lru_cache(maxsize=16384)
def unevenness_of_keys(problem: Problem, block_n: int, head_group: int, num_sms: int, programs: int) -> tuple[float, float]:
    """The same for a portable backward kernel's blocks of keys, each of which walks the queries of all heads that read its keys. They are
    launched from the first to the last: under a causal mask the first one is the longest."""
    walked = walk_queries(problem, block_n, block_n)
    heads_per_kv = problem.heads_q // problem.heads_kv
    weights = [span * heads_per_kv + _QUERIES_OF_A_TILE for span in walked.spans]
    return _unevenness(weights, walked.row_blocks, problem.batch * problem.heads_kv, False, head_group, num_sms, programs, False)


def _unevenness(
    weights: list[int], row_blocks: int, heads: int, longest_first: bool, head_group: int, num_sms: int, programs: int, persistent: bool
) -> tuple[float, float]:
    tiles, slots = heads * row_blocks, num_sms * programs
    if tiles == 0:
        return 1.0, 1.0
    if len(weights) == 1 or max(weights) == min(weights):
        return math.ceil(tiles / slots) * slots / tiles, math.ceil(tiles / num_sms) * num_sms / tiles
    if longest_first:
        weights.reverse()
    groups = _groups(heads, head_group)

    def in_order(groups: list[int]) -> Iterator[int]:
        return (weight for here in groups for weight in weights for _ in range(here))

    if persistent:
        first = list(itertools.islice(in_order(groups), 32 * slots))
        loads = [sum(first[slot::slots]) for slot in range(slots)]
        sms = [sum(loads[sm::num_sms]) for sm in range(num_sms)]
        return max(loads) * slots / sum(loads), max(sms) * num_sms / sum(loads)
    total = sum(weights) * heads
    tail: list[int] = []
    while groups and len(tail) < 6 * slots:
        tail = [*in_order([groups.pop()]), *tail]

    def end(slots: int) -> float:
        last = tail[-(8 * slots) :]
        free = [(total - sum(last)) / slots] * slots
        for weight in last:
            heapq.heapreplace(free, free[0] + weight)
        return max(free) * slots / total

    return end(slots), end(num_sms)


def specialised_dims(problem: Problem) -> tuple[int, int]:
    """Columns of the tiles of Q and K, and of V, in a hopper kernel: at least 64, one swizzled TMA box."""
    return max(64, tile_dim(problem.head_dim_qk)), max(64, tile_dim(problem.head_dim_v))


def most_packed(problem: Problem) -> int:
    """Most query heads that may share a warpgroup's rows: a power of two, of the heads that share K and V. Backward kernels pack none."""
    group = problem.heads_q // problem.heads_kv if problem.direction == "forward" else 1
    return min(group & -group, WARPGROUP_ROWS)


def head_packs(problem: Problem, config: Config) -> int:
    """Packs of query heads, counted through the batch: see `Config.packed_heads`."""
    return problem.batch * problem.heads_q // config.packed_heads


def warpgroup_queries(config: Config) -> int:
    """Queries of a warpgroup, of each head that has rows in it."""
    return WARPGROUP_ROWS // config.packed_heads


def forward_tiles(problem: Problem, config: Config) -> int:
    """Tiles of a forward kernel, each of which a program computes."""
    return head_packs(problem, config) * math.ceil(problem.seqlen_q / config.queries)


def skips(problem: Problem, config: Config) -> bool:
    """Whether the warpgroups of a hopper kernel skip a tile's last blocks of keys, which only others of them see."""
    return problem.band[1] is not None and config.block_n < config.queries


def queries_together(problem: Problem, config: Config) -> int:
    """Queries that walk the same blocks of keys in a hopper kernel: those of a warpgroup if it skips some, else those of a tile."""
    return warpgroup_queries(config) if skips(problem, config) else config.queries


def cut_once(problem: Problem, config: Config) -> bool:
    """Whether the right side of the mask and the end of the keys cut only the first block that a warpgroup walks."""
    high, together = problem.band[1], queries_together(problem, config)
    return high is None or (high % together == 0 and config.block_n % together == 0)


def cuts(problem: Problem, config: Config) -> int:
    """In which of the blocks that a warpgroup walks something is looked for that the right side of the mask or the end of the keys
    cuts: 0 in none, 1 in the first one, 2 in several. The left side of a window has a loop of its own, but may reach the first block."""
    if problem.band == (None, None) and problem.seqlen_kv % config.block_n == 0:
        return 0
    return 1 if cut_once(problem, config) else 2


def least_stages(problem: Problem, config: Config) -> int:
    """Slots that a hopper kernel needs at least, each for K of a block and V of the block before it.

    A warpgroup that skips blocks holds the last V of a tile until it has met the first K of the next one that it sees.
    """
    return 1 + math.ceil((config.queries - queries_together(problem, config)) / config.block_n)


def head_groups(heads: int, head_group: int, tiles_of_head: int, programs: int) -> list[int]:
    """How many heads are walked together, group after group, by the programs of a hopper kernel: head_group, but the last groups are one,
    so that it has two tiles for each program, and with its short ones all end alike."""
    groups = _groups(heads, head_group)
    while len(groups) > 1 and groups[-1] * tiles_of_head < 2 * programs:
        last = groups.pop()
        groups[-1] += last
    return groups


def _groups(heads: int, head_group: int) -> list[int]:
    """Sizes of groups of head_group heads; the last has what is left."""
    return [head_group] * (heads // head_group) + [heads % head_group] * (heads % head_group > 0)


@lru_cache(maxsize=256)
def tile_lists(candidate: Candidate, problem: Problem, programs: int) -> tuple[tuple[int, ...], ...]:
    """Tiles of each program of a hopper kernel: the next one in launch order goes to the program with the least work so far.

    A tile is pack * num_row_blocks + row_block, with a pack of `head_packs`. Launch order walks `head_groups` row block by row block.
    """
    config = candidate.config
    works = _works(problem, config.queries, config.block_n)
    order = range(len(works))[::-1] if candidate.variant.longest_first else range(len(works))
    return _dealt(works, order, head_packs(problem, config), config.head_group, programs)


@lru_cache(maxsize=256)
def key_block_lists(candidate: Candidate, problem: Problem, programs: int) -> tuple[tuple[int, ...], ...]:
    """The same for a backward hopper kernel: blocks of keys of each program, those first that most queries see. A block is
    head * num_key_blocks + key_block, with the head of K and V counted through the batch."""
    config = candidate.config
    works = _works_of_keys(problem, config.block_m, config.block_n)
    order = sorted(range(len(works)), key=lambda block: -works[block])
    return _dealt(works, order, problem.batch * problem.heads_kv, config.head_group, programs)


def _dealt(works: Sequence[float], order: Sequence[int], heads: int, head_group: int, programs: int) -> tuple[tuple[int, ...], ...]:
    lists: list[list[int]] = [[] for _ in range(programs)]
    loads = [(0.0, program) for program in range(programs)]
    first = 0
    for group in head_groups(heads, head_group, len(works), programs):
        for block in order:
            for head in range(first, first + group):
                load, program = loads[0]
                lists[program].append(head * len(works) + block)
                heapq.heapreplace(loads, (load + works[block], program))
        first += group
    return tuple(tuple(tiles) for tiles in lists)


def imbalance(candidate: Candidate, problem: Problem, programs: int) -> float:
    """Work of the busiest program of `tile_lists`, relative to the mean. Of many groups of heads only the last ones are simulated."""
    config = candidate.config
    packs = head_packs(problem, config)
    return _imbalance_of_tiles(problem, config.queries, config.block_n, candidate.variant.longest_first, packs, config.head_group, programs)


@lru_cache(maxsize=4096)
def _imbalance_of_tiles(
    problem: Problem, queries: int, block_n: int, longest_first: bool, packs: int, head_group: int, programs: int
) -> float:
    works = _works(problem, queries, block_n)
    if longest_first:
        works.reverse()
    return _imbalance(works, packs, head_group, programs)


@lru_cache(maxsize=4096)
def imbalance_of_keys(problem: Problem, block_m: int, block_n: int, head_group: int, programs: int) -> float:
    """The same of `key_block_lists`."""
    works = sorted(_works_of_keys(problem, block_m, block_n), reverse=True)
    return _imbalance(works, problem.batch * problem.heads_kv, head_group, programs)


def _imbalance(works: Sequence[float], heads: int, head_group: int, programs: int) -> float:
    if not works:
        return 1.0
    if min(works) == max(works):
        tiles = heads * len(works)
        return math.ceil(tiles / programs) * programs / tiles
    groups = head_groups(heads, head_group, len(works), programs)
    first = len(groups)
    while first and sum(groups[first:]) * len(works) < 8 * programs:
        first -= 1
    loads = [sum(groups[:first]) * sum(works) / programs] * programs
    for group in groups[first:]:
        for work in works:
            for _ in range(group):
                heapq.heapreplace(loads, loads[0] + work)
    return max(loads) * programs / (heads * sum(works))


def _works(problem: Problem, queries: int, block_n: int) -> list[float]:
    """Work of each tile of a pack of heads, in blocks of keys."""
    starts = range(0, problem.seqlen_q, queries)
    return [blocks_walked(problem, start, queries, block_n)[1] + _BLOCKS_OF_A_TILE for start in starts]


def _works_of_keys(problem: Problem, block_m: int, block_n: int) -> list[float]:
    """Work of each block of keys of a head, in row tiles of all query heads that read it."""
    group = problem.heads_q // problem.heads_kv
    parts = (row_tiles_walked(problem, start, block_m, block_n) for start in range(0, problem.seqlen_kv, block_n))
    return [group * (end - first) + _TILES_OF_A_KEY_BLOCK for first, _, _, end in parts]


def shares(problem: Problem, config: Config) -> tuple[int, int]:
    """(blocks of keys that a hopper kernel loads, blocks that its warpgroups walk): sums over the tiles of one pack of heads."""
    together = queries_together(problem, config)
    loaded, walked = _shares(problem, config.queries, together, config.block_n)
    return loaded, walked * (config.block_m // WARPGROUP_ROWS) * together // config.queries


@lru_cache(maxsize=1024)
def _shares(problem: Problem, queries: int, together: int, block_n: int) -> tuple[int, int]:
    """(blocks that tiles of so many queries load, blocks that each part of them walks): sums over the tiles."""
    if problem.band == (None, None):
        loaded = math.ceil(problem.seqlen_q / queries) * math.ceil(problem.seqlen_kv / block_n)
        return loaded, loaded
    loaded = walked = 0
    for start in range(0, problem.seqlen_q, queries):
        first, count = blocks_walked(problem, start, queries, block_n)
        loaded += count
        for own in range(start, start + queries, together):
            walked += min(count, max(1, blocks_seen(problem, own, together, block_n)[1] - first))
    return loaded, walked


def blocks_walked(problem: Problem, start: int, queries: int, block_n: int) -> tuple[int, int]:
    """(first block of keys, how many) that a hopper kernel walks in a tile with these queries: one, even if no key is visible."""
    first, end = blocks_seen(problem, start, queries, block_n)
    return first, max(1, end - first)


def blocks_seen(problem: Problem, start: int, queries: int, block_n: int) -> tuple[int, int]:
    """(first, end) of the blocks of keys that some of so many queries from the first one on see."""
    low, high = problem.band
    end = problem.seqlen_kv if high is None else min(max(min(start + queries, problem.seqlen_q) + high, 0), problem.seqlen_kv)
    return 0 if low is None else max(start + low, 0) // block_n, math.ceil(end / block_n)


def key_blocks(problem: Problem, block_n: int) -> int:
    """Blocks of keys of all heads, each of which one program of a backward kernel owns."""
    return problem.batch * problem.heads_kv * math.ceil(problem.seqlen_kv / block_n)


def dq_v_slots(problem: Problem) -> int:
    """Slots for V, beside two for K, where dq has a loop of its own in a backward hopper kernel: two where they fit."""
    return 1 if sum(specialised_dims(problem)) > 384 else 2


def row_tiles_walked(problem: Problem, key: int, block_m: int, block_n: int) -> tuple[int, int, int, int]:
    """(first, whole_from, whole_to, end) of the tiles of block_m queries that see some of the keys from this one on, block_n of them at
    most: those from whole_from to whole_to see all block_n."""
    low, high = problem.band
    seqlen_q, keys_end = problem.seqlen_q, min(key + block_n, problem.seqlen_kv)
    end = math.ceil((seqlen_q if low is None else min(max(keys_end - low, 0), seqlen_q)) / block_m)
    first = 0 if high is None else min(max(key - high, 0) // block_m, end)
    whole_from = first if high is None else min(max(math.ceil(max(key + block_n - 1 - high, 0) / block_m), first), end)
    whole_to = end if low is None else min(max(max(key + 1 - low, 0) // block_m, whole_from), end)
    if key + block_n > problem.seqlen_kv:
        whole_from = whole_to
    return first, whole_from, whole_to, end
