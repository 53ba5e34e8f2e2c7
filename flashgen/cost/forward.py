"""What a forward kernel does: one loop over blocks of keys."""

import math
from dataclasses import dataclass

from flashgen import theory
from flashgen.candidate import Candidate
from flashgen.cost.calibration import Calibration
from flashgen.cost.work import Work, contended, cycles_of_block, dram_s, flops_per_cycle, hz, l2_bytes_per_cycle, missed, spill_wait
from flashgen.device import Device
from flashgen.problem import Problem
from flashgen.record import Resources
from flashgen.resources import resident, uses_warpgroups
from flashgen.schedule import (
    EARLY_DIM,
    WARPGROUP_ROWS,
    cuts,
    forward_tiles,
    head_packs,
    imbalance,
    shares,
    specialised_dims,
    tile_dim,
    unevenness,
    walk,
    warpgroup_queries,
)


@dataclass(frozen=True, kw_only=True)
class _Loop:
    """What a kernel's loop over keys does: so many blocks of so many scores and exponentials, and the cycles of an SM for one of them.

    units         cycles by unit; issue is without the cut of a mask.
    loaded_bytes  from L2, smem_bytes in shared memory, for a block.
    beside        cycles of all SMs together outside of the loop.
    speed_up      of a program, when it is the last one on its SM.
    """

    blocks: int
    masked_blocks: int
    scores: int
    exps: int
    units: dict[str, float]
    cut_issue: float
    cycles: float
    cut_cycles: float
    beside: float
    loaded_bytes: float
    smem_bytes: float
    speed_up: float


def works(candidate: Candidate, problem: Problem, device: Device, resources: Resources, fitted: Calibration) -> list[Work]:
    """Of the only function."""
    variant, config = candidate.variant, candidate.config
    tiles = forward_tiles(problem, config)
    programs = min(resident(candidate, resources, device), math.ceil(tiles / device.num_sms))  # on an SM at one time
    slots = device.num_sms * programs
    loop_of = _hopper_loop if variant.backend == "hopper" else _triton_loop
    loop = loop_of(candidate, problem, device, resources, programs, fitted)
    total = (loop.blocks - loop.masked_blocks) * loop.cycles + loop.masked_blocks * loop.cut_cycles + loop.beside
    sm_hz = device.num_sms * hz(device, fitted)
    dram_bytes = float(theory.compulsory_bytes(problem) + _reread_bytes(fitted, candidate, problem, device, slots))
    seconds = {name: loop.blocks * cycles / sm_hz for name, cycles in loop.units.items()}
    seconds["issue"] += loop.masked_blocks * loop.cut_issue / sm_hz
    seconds["dram"] = dram_s(dram_bytes, device, fitted)
    query_bytes = problem.batch * problem.heads_q * problem.seqlen_q * problem.head_dim_qk * problem.itemsize
    uneven = _unevenness(candidate, problem, device, programs, tiles, loop.speed_up)
    return [
        Work(
            flops=2.0 * loop.scores * sum(_tile_dims(candidate, problem)) * loop.blocks,
            exp_ops=float(loop.exps * loop.blocks),
            smem_bytes=float(loop.smem_bytes * loop.blocks),
            l2_bytes=float(loop.loaded_bytes * loop.blocks + query_bytes + theory.compulsory_write_bytes(problem)),
            dram_bytes=dram_bytes,
            seconds=seconds,
            compute_s=total / sm_hz * uneven,
            uneven=uneven,
            waves=tiles / slots,
        )
    ]


def _tile_dims(candidate: Candidate, problem: Problem) -> tuple[int, int]:
    """Columns of the tiles of Q and K, and of V."""
    if candidate.variant.backend == "hopper":
        return specialised_dims(problem)
    return tile_dim(problem.head_dim_qk), tile_dim(problem.head_dim_v)


def _issue(rows: int, scores: int, dim_v: int, warps: int, fitted: Calibration) -> float:
    """Cycles in which the SM's four schedulers issue the softmax of a block; `rows` of it take a maximum and rescale their output."""
    return (
        scores * fitted.issue_per_score / 32
        + rows * dim_v * fitted.issue_per_output / 32
        + rows * fitted.issue_per_row
        + warps * fitted.issue_per_block
    ) / 4


def _triton_loop(candidate: Candidate, problem: Problem, device: Device, resources: Resources, programs: int, fitted: Calibration) -> _Loop:
    """A block is one of a program: block_m rows. Each group of 64 rows (warpgroup products) or 16 rows a warp (mma.sync) reads K and V
    once; warpgroups read Q again each time, which makes narrow blocks wait for shared memory."""
    variant, config, size = candidate.variant, candidate.config, problem.itemsize
    block_m, block_n, stages, num_warps = config.block_m, config.block_n, config.num_stages, config.num_warps
    heads = problem.batch * problem.heads_q
    dim_qk, dim_v = _tile_dims(candidate, problem)
    warpgroups = uses_warpgroups(candidate, problem, device)
    walked = walk(problem, block_m, block_n)
    tiles = heads * walked.row_blocks
    blocks = heads * (walked.whole + walked.cut)
    scores = block_m * block_n
    rate = flops_per_cycle(problem.dtype, device, warpgroups, fitted)
    readers = max(1, block_m // 64) if warpgroups else num_warps
    read_first = (readers * block_n + (block_m if warpgroups else 0)) * dim_qk * size
    read_second = readers * block_n * dim_v * size
    tensor = max(2.0 * scores * dim_qk / rate, read_first / device.smem_bytes_per_clock)
    tensor += max(2.0 * scores * dim_v / rate, read_second / device.smem_bytes_per_clock)
    tile_bytes = block_n * (dim_qk + dim_v) * size
    smem_moved = tile_bytes + read_first + read_second
    loaded_bytes = block_n * (problem.head_dim_qk + problem.head_dim_v) * size
    copies = tile_bytes / 512 * fitted.issue_per_copy / 4 if variant.load == "pointer" else 0.0
    units = {
        "tensor": tensor,
        "exp": (scores + block_m) / device.exp_per_clock,
        "issue": _issue(block_m, scores, dim_v, num_warps, fitted) + copies,
        "smem": smem_moved / device.smem_bytes_per_clock,
        "l2": loaded_bytes / l2_bytes_per_cycle(device, fitted),
    }
    cut_issue = scores * fitted.issue_per_cut_score / 32 / 4

    # What a program waits for in a block while it uses no unit.
    wait = fitted.block_latency + spill_wait(candidate, resources, fitted)
    if stages == 1:
        wait += 2 * fitted.load_latency
    elif stages == 2:
        wait += fitted.drain_latency
    cycles = cycles_of_block(fitted, units, wait, programs, num_warps)
    reentries = max(0, walked.loops - walked.row_blocks) * heads if variant.masked_apart else 0
    return _Loop(
        blocks=blocks,
        masked_blocks=heads * walked.cut if variant.masked_apart else blocks,
        scores=scores,
        exps=scores + block_m,
        units=units,
        cut_issue=cut_issue,
        cycles=cycles,
        cut_cycles=cycles_of_block(fitted, units | {"issue": units["issue"] + cut_issue}, wait, programs, num_warps),
        beside=(tiles * fitted.tile_latency + reentries * fitted.loop_latency) / programs,
        loaded_bytes=loaded_bytes,
        smem_bytes=smem_moved,
        speed_up=cycles_of_block(fitted, units, wait, 1, num_warps) / (programs * cycles),
    )


def _hopper_loop(candidate: Candidate, problem: Problem, device: Device, resources: Resources, programs: int, fitted: Calibration) -> _Loop:
    """A block is one of a warpgroup: 64 rows. A program's warpgroups are to an SM what several programs are in `_triton_loop`: each goes
    from its products to its softmax, and the others fill the time. A producer of its own asks for K and V, so loads cost
    no time with two slots or more. Nor do the barriers of a block show; what a tile waits for is at its ends.

    A product m64nNk16 takes N / 2 cycles on the tensor cores, and reads N * 32 bytes of K or V from shared memory and, for scores, 2 KB
    of Q (at 128 bytes a cycle, blocks of 64 keys are at the limit of both).
    """
    variant, config, size = candidate.variant, candidate.config, problem.itemsize
    block_n, warpgroups = config.block_n, config.block_m // WARPGROUP_ROWS
    packs = head_packs(problem, config)
    dim_qk, dim_v = _tile_dims(candidate, problem)
    tiles = forward_tiles(problem, config)
    loaded, walked = shares(problem, config)
    blocks = packs * walked
    masked_blocks = blocks - packs * walk(problem, warpgroup_queries(config), block_n).whole
    if cuts(problem, config):  # each tile's first block is masked, whether it is cut or not
        masked_blocks = max(masked_blocks, tiles * warpgroups)
    scores = WARPGROUP_ROWS * block_n
    rate = device.flops_per_s(problem.dtype) / device.num_sms / device.boost_hz
    read_first = (WARPGROUP_ROWS + block_n) * dim_qk * size
    read_second = block_n * dim_v * size
    first = max(2.0 * scores * dim_qk / rate, read_first / device.smem_bytes_per_clock)
    second = max(2.0 * scores * dim_v / rate, read_second / device.smem_bytes_per_clock)
    smem_moved = read_first + read_second + block_n * (dim_qk + dim_v) * size * loaded / walked
    loaded_bytes = block_n * (problem.head_dim_qk + problem.head_dim_v) * size * loaded / walked
    units = {
        "tensor": first + second,
        "exp": scores / device.exp_per_clock,
        "issue": _issue(0, scores, dim_v, 4, fitted),  # no maxima, and no rescales, unless references move
        "smem": smem_moved / device.smem_bytes_per_clock,
        "l2": loaded_bytes / l2_bytes_per_cycle(device, fitted),
    }
    cut_issue = scores * fitted.issue_per_cut_score / 32 / 4
    wait = spill_wait(candidate, resources, fitted)
    if config.num_stages == 1:
        wait += fitted.load_latency
    products = contended(units["tensor"], units["smem"], fitted.smem_contention)
    meeting = fitted.ping_pong_meeting if variant.ping_pong else fitted.warpgroup_meeting
    sharing = walked / loaded  # warpgroups at a block, in the mean: fewer where some of them skip it, and wait for the others

    def cycles(issue: float) -> float:
        """As in `cycles_of_block`, but a warpgroup may multiply beside its own softmax, unless it waits for both products first."""
        softmax = units["exp"] + issue
        beside = fitted.own_overlap * min(second, softmax) if variant.order == "qk_first" and dim_v > EARLY_DIM else 0.0
        alone = products + softmax - beside + wait
        met = meeting * (products**2 + softmax**2) / alone
        return max(*units.values(), (alone + (sharing - 1) * met) / sharing)

    return _Loop(
        blocks=blocks,
        masked_blocks=max(0, min(blocks, masked_blocks)),
        scores=scores,
        exps=scores,
        units=units,
        cut_issue=cut_issue,
        cycles=cycles(units["issue"]),
        cut_cycles=cycles(units["issue"] + cut_issue),
        beside=tiles
        * (fitted.hopper_tile_latency * (dim_qk + dim_v) + (fitted.hopper_q_latency if config.q_stages == 1 else 0.0))
        / programs,
        loaded_bytes=loaded_bytes,
        smem_bytes=smem_moved,
        speed_up=1.0,
    )


def _unevenness(candidate: Candidate, problem: Problem, device: Device, programs: int, tiles: int, speed_up: float) -> float:
    """Time of the whole grid relative to a perfect balance. Where few programs are left on an SM at the end, each runs faster."""
    slots = device.num_sms * programs
    variant, config = candidate.variant, candidate.config
    if variant.mask == "full":
        full_waves, rest = divmod(tiles, slots)
        left = math.ceil(rest / device.num_sms)
        # Between one program alone and a full SM, a program's time grows evenly.
        share = 0.0 if rest == 0 else speed_up + (1 - speed_up) * (left - 1) / max(1, programs - 1)
        return max(1.0, (full_waves + share) * slots / tiles)
    if variant.backend == "hopper":
        return max(1.0, imbalance(candidate, problem, slots))
    by_program, by_sm = unevenness(
        problem, config.block_m, variant.longest_first, config.head_group, device.num_sms, programs, config.persistent
    )
    return max(1.0, by_sm, 1 + (by_program - 1) * speed_up)


def _reread_bytes(fitted: Calibration, candidate: Candidate, problem: Problem, device: Device, slots: int) -> float:
    """Bytes of K and V read from DRAM beyond the first time.

    Programs that run together walk K and V in step, so a head is read once a wave at most; again in the next wave only as far as the
    heads that are walked together do not fit into L2.
    """
    config = candidate.config
    packs = head_packs(problem, config)
    packs_per_kv = problem.heads_q // problem.heads_kv // config.packed_heads
    row_blocks = math.ceil(problem.seqlen_q / config.queries)
    head_bytes = problem.seqlen_kv * (problem.head_dim_qk + problem.head_dim_v) * problem.itemsize
    group = min(config.head_group, packs)
    together = min(packs, max(group, math.ceil(slots / max(1, row_blocks))))
    kv_heads_together = math.ceil(together / packs_per_kv)
    waves = max(1.0, together * row_blocks / slots)
    return missed(kv_heads_together * head_bytes, device, fitted) * (waves - 1) * head_bytes * problem.batch * problem.heads_kv
