"""Schedules of hopper kernels: what each program does, as a table on the device."""

import functools
from array import array
from collections.abc import Iterable, Sequence

import torch

from flashgen.candidate import Candidate
from flashgen.errors import LaunchError
from flashgen.problem import Problem
from flashgen.schedule import blocks_walked, key_block_lists, row_tiles_walked, tile_lists


def tile_schedule(candidate: Candidate, problem: Problem, programs: int, index: int) -> torch.Tensor:
    """(programs, width, 8) int32 on a CUDA device: how many tiles a program of a forward kernel computes; then of each the batch item, the
    heads of Q and of K and V, the first query, the first block of keys, how many blocks, and the head of Q counted through the batch. Of
    heads that are packed it names the first."""
    config = candidate.config
    starts = range(0, problem.seqlen_q, config.queries)
    walks = [(start, *blocks_walked(problem, start, config.queries, config.block_n)) for start in starts]
    group = problem.heads_q // problem.heads_kv

    def entry(tile: int) -> tuple[int, ...]:
        pack, row_block = divmod(tile, len(walks))
        counted = pack * config.packed_heads
        item, head = divmod(counted, problem.heads_q)
        return item, head, head // group, *walks[row_block], counted, 0

    return _table((map(entry, tiles) for tiles in tile_lists(candidate, problem, programs)), index)


def key_schedule(candidate: Candidate, problem: Problem, programs: int, index: int) -> torch.Tensor:
    """The same of a backward kernel: how many blocks of keys a program owns; then of each the batch item, the head of K and V, the first
    key, and the parts of the row tiles that see these keys."""
    block_m, block_n = candidate.config.block_m, candidate.config.block_n
    walks = [(key, *row_tiles_walked(problem, key, block_m, block_n)) for key in range(0, problem.seqlen_kv, block_n)]

    def entry(tile: int) -> tuple[int, ...]:
        heads, key_block = divmod(tile, len(walks))
        return *divmod(heads, problem.heads_kv), *walks[key_block], 0

    return _table((map(entry, tiles) for tiles in key_block_lists(candidate, problem, programs)), index)


def _table(programs: Iterable[Iterable[Sequence[int]]], index: int) -> torch.Tensor:
    lists = [list(entries) for entries in programs]
    width = 1 + max(map(len, lists))
    numbers = array("i")
    for entries in lists:
        numbers.extend((len(entries), *[0] * 7))
        for entry in entries:
            numbers.extend(entry)
        numbers.extend([0] * 8 * (width - 1 - len(entries)))
    return _copied(numbers.tobytes(), width, index)


@functools.cache
def _copied(numbers: bytes, width: int, index: int) -> torch.Tensor:
    """A schedule on a CUDA device. Equal ones are one, and it stays for the life of the process: a CUDA graph may hold its address
    when no launch does."""
    with torch.cuda.device(index):
        if torch.cuda.is_current_stream_capturing():
            raise LaunchError("a schedule cannot be copied to the device while a CUDA graph is captured; call once before capturing")
        return torch.frombuffer(bytearray(numbers), dtype=torch.int32).view(-1, width, 8).cuda()
