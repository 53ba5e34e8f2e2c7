"""Candidate -> how it divides a problem: the parts that blocks travel in, and the tiles that each program of a hopper kernel computes."""

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache

from flashgen.candidate import Candidate
from flashgen.problem import Problem

WARPGROUP_ROWS = 64  # of a product of one warpgroup
MOST_PART = 128  # columns of K or V that travel together in a hopper kernel: two swizzled TMA boxes
_BLOCKS_OF_A_TILE = 0.7  # a tile costs as much outside its loop as about so many blocks of keys


def tile_dim(head_dim: int) -> int:
    """Columns of a tile that holds this head dim: the power of two not below it, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class Parts:
    """How the columns of K and V are cut in a hopper kernel: part columns each, so many parts."""

    part: int
    qk: int
    v: int


def parts(problem: Problem) -> Parts:
    """The parts of a problem's head dims. A head dim is padded to at least 64 columns, one swizzled TMA box."""
    dim_qk, dim_v = (max(64, tile_dim(dim)) for dim in (problem.head_dim_qk, problem.head_dim_v))
    part = min(dim_qk, dim_v, MOST_PART)
    return Parts(part=part, qk=dim_qk // part, v=dim_v // part)


def skips(problem: Problem, block_m: int, block_n: int) -> bool:
    """Whether the warpgroups of a hopper kernel skip a tile's last blocks of keys, which only others of them see."""
    return problem.band[1] is not None and block_n < block_m


def cut_once(problem: Problem, block_m: int, block_n: int) -> bool:
    """Whether the right side of the mask and the end of the keys cut only the first block that a warpgroup walks."""
    high = problem.band[1]
    if high is None:
        return True
    if skips(problem, block_m, block_n):
        return high % WARPGROUP_ROWS == 0
    return high % block_n == 0 and block_m <= block_n


def least_stages(problem: Problem, block_m: int, block_n: int) -> int:
    """Slots that the ring of a hopper kernel needs at least.

    A warpgroup that skips blocks holds the last V of a tile until it has met the first K of the next one that it sees.
    """
    cut = parts(problem)
    skipped = math.ceil((block_m - WARPGROUP_ROWS) / block_n) if skips(problem, block_m, block_n) else 0
    return cut.qk + cut.v + skipped * (cut.qk + cut.v)


@lru_cache(maxsize=256)
def tile_lists(candidate: Candidate, problem: Problem, programs: int) -> tuple[tuple[int, ...], ...]:
    """Tiles of each program of a hopper kernel: the next one in launch order goes to the program with the least work so far.

    A tile is head * num_row_blocks + row_block, with the head counted through the batch. Launch order walks groups of head_group
    heads row block by row block.
    """
    config = candidate.config
    heads = problem.batch * problem.heads_q
    works = [_blocks(problem, row, config.block_m, config.block_n) for row in range(0, problem.seqlen_q, config.block_m)]
    row_blocks = range(len(works))
    order = list(reversed(row_blocks)) if candidate.variant.longest_first else list(row_blocks)
    lists: list[list[int]] = [[] for _ in range(programs)]
    loads = [(0.0, program) for program in range(programs)]
    for first in range(0, heads, config.head_group):
        for row_block in order:
            for head in range(first, min(first + config.head_group, heads)):
                load, program = loads[0]
                lists[program].append(head * len(works) + row_block)
                heapq.heapreplace(loads, (load + works[row_block] + _BLOCKS_OF_A_TILE, program))
    return tuple(tuple(tiles) for tiles in lists)


def _blocks(problem: Problem, row: int, block_m: int, block_n: int) -> int:
    """Blocks of keys that the tile with this first row walks; at least one."""
    low, high = problem.band
    end = problem.seqlen_kv if high is None else min(max(min(row + block_m, problem.seqlen_q) + high, 0), problem.seqlen_kv)
    first = 0 if low is None else max(row + low, 0) // block_n
    return max(1, math.ceil(end / block_n) - first)
