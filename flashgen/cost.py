"""Candidate -> Estimate: what a kernel does to every unit of the device, and how long that may take.

The model follows one program through its blocks of keys. For one block every unit of an SM has a number of cycles: tensor cores,
exponentials, instruction issue, shared memory, and the SM's share of L2. A program waits for its first product before its softmax,
and for its tiles where no pipeline fetches them in time, so alone it needs the sum of all that. Several programs on an SM fill each
other's waits, and only meet where two want the same unit at the same time, until the busiest unit is the limit. Blocks add up to
tiles, tiles to waves with an uneven end, and DRAM runs beside all of it. Only the constants in `Calibration` are fitted; everything
else is counted. See Estimate for what the results may be used for.
"""

import math
from dataclasses import dataclass

from flashgen import theory
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.problem import Problem
from flashgen.record import Estimate, Resources
from flashgen.resources import costly_spill, guess, resident, uses_warpgroups
from flashgen.schedule import WARPGROUP_ROWS, cuts, imbalance, shares, specialised_dims, tile_dim, unevenness, walk


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The fitted constants. Cycles are those of one SM, instructions those that one warp issues.

    Fitted to 215 kernels of head dims 64, 128 and 256, full and causal, over 1k to 16k keys, on an H200 (Triton 3.6, 2026-11-29):
    median error 6 %; fitted to three of the four problems, 7 to 9 % on the fourth. Rates without that note are of other measurements.

    Those of hopper kernels were fitted to 275 kernels that searches tried on 36 problems (head dims 64, 128 and 256, full and causal,
    over 512 to 16k keys), to 100 times of probes, and to a second run of the best kernels of 30 problems, on an H200 (torch 2.11,
    Triton 3.6, 2026-11-30): median error 4.1 % of the first run and 2.4 % of the second, 4.6 and 2.2 % for problems that were left out.
    The same kernels differed by -8 to 16 % between the runs; between candidates of one problem the median error is 0.6 %.
    """

    clock: float = 0.93  # sustained clock under load, of boost_hz
    tensor_rate: float = 0.95  # of the peak at that clock, while a product runs
    mma_sync_rate: float = 0.62  # of the peak, for mma.sync where the peak needs warpgroup products (Hopper)
    fma_rate: float = 0.35  # of the peak, for fp32 products on the ordinary cores, whose operands come through shared memory
    l2_rate: float = 1.9  # of l2_bytes_per_s: 64 bytes a clock and SM; tiles that SMs ask for in step are read once for several
    dram_rate: float = 0.88  # of dram_bytes_per_s: a copy ran at 4.3 of 4.8 TB/s on an H200
    l2_share: float = 0.5  # of L2 that holds K and V for re-use: it is two partitions, and other data passes through

    issue_per_score: float = 2.1  # softmax beside the exponent: scale, maximum, sum, conversion
    issue_per_output: float = 1.35  # rescale of one accumulator
    issue_per_cut_score: float = 6.5  # scale, compare and select where every score is masked
    issue_per_block: float = 65.0  # of each warp: loop, barriers, waits
    issue_per_row: float = 3.5  # running maximum and sum
    issue_per_copy: float = 13.0  # for 512 bytes (16 a thread) where pointers, not TMA, load a tile: addresses, bounds, copy

    block_latency: float = 70.0  # cycles of one block that nothing of the same program covers: barriers, reductions
    load_latency: float = 740.0  # cycles from asking for a tile to having it: with one stage a block waits for K, then for V
    drain_latency: float = 520.0  # cycles of a block with two stages: a tile is only asked for when the last product has let go of it
    tile_latency: float = 3850.0  # cycles of a tile outside its loop: start, Q, the first K and V, division, output
    loop_latency: float = 600.0  # filling the pipeline again where cut blocks have a loop of their own
    launch_s: float = 2.5e-6  # start and end of a kernel
    overlap_warps: float = 0.16  # of what another program would, four more warps of the same one fill its waits: they share barriers

    spill_wait: float = 500.0  # cycles of a block in whose loop registers spill: products no longer follow each other without a wait
    spill_latency: float = 6.5  # cycles of a block for each byte beyond those that cost nothing

    # Hopper kernels.
    warpgroup_meeting: float = 0.92  # of the time that a warpgroup would wait for units that others use, if they met by chance
    ping_pong_meeting: float = 0.89  # the same where warpgroups take turns
    issue_per_vote: float = 100.0  # of each warp, in a block: whether a rescale may be left out, and the rescales that may not
    own_overlap: float = 0.5  # of a warpgroup's P V that runs beside its own softmax, where the order allows it
    smem_contention: float = 10.0  # exponent: products and arrivals slow each other down before shared memory is at its limit
    hopper_tile_latency: float = 10.5  # cycles of a tile outside its loop for each column of Q and V: the first scores, the output
    hopper_q_latency: float = 1200.0  # more, where Q has one buffer: the next tile's Q comes when the last scores are done


CALIBRATION = Calibration()


@dataclass(frozen=True, kw_only=True)
class _Loop:
    """What a kernel's loop over keys does: so many blocks of so many scores, and the cycles of an SM for one of them.

    units         cycles by unit; issue is without the cut of a mask.
    loaded_bytes  from L2, smem_bytes in shared memory, for a block.
    beside        cycles of all SMs together outside of the loop.
    speed_up      of a program, when it is the last one on its SM.
    """

    blocks: int
    masked_blocks: int
    scores: int
    rows: int
    units: dict[str, float]
    cut_issue: float
    cycles: float
    cut_cycles: float
    beside: float
    loaded_bytes: float
    smem_bytes: float
    speed_up: float


def estimate(
    candidate: Candidate,
    problem: Problem,
    device: Device,
    resources: Resources | None = None,
    *,
    calibration: Calibration = CALIBRATION,
) -> Estimate:
    """What one call of this kernel does and takes. resources, where the kernel was compiled, replace guessed registers and memory.

    The candidate need not be legal, but its tiles must be powers of two, or rows of whole warpgroups in a hopper kernel. About 0.1 ms.
    """
    problem.require_forward("the cost model")
    fitted, variant, config = calibration, candidate.variant, candidate.config
    heads = problem.batch * problem.heads_q
    bound_s = theory.bound_s(problem, device)
    if problem.is_empty:
        return _nothing(bound_s)
    row_blocks = math.ceil(problem.seqlen_q / config.block_m)
    tiles = heads * row_blocks

    # Programs on an SM at one time.
    if resources is None:
        resources = guess(candidate, problem, device)
    at_once = resident(candidate, resources, device)
    programs = min(at_once, math.ceil(tiles / device.num_sms))
    slots = device.num_sms * programs

    hz = device.boost_hz * fitted.clock
    loop_of = _hopper_loop if variant.backend == "hopper" else _triton_loop
    loop = loop_of(candidate, problem, device, resources, programs, fitted)
    total = (loop.blocks - loop.masked_blocks) * loop.cycles + loop.masked_blocks * loop.cut_cycles + loop.beside
    compute_s = total / device.num_sms * _unevenness(candidate, problem, device, programs, tiles, loop.speed_up) / hz
    dram_bytes = float(theory.compulsory_bytes(problem) + _reread_bytes(fitted, candidate, problem, device, slots, row_blocks))
    dram_s = dram_bytes / (device.dram_bytes_per_s * fitted.dram_rate)
    time_s = max(bound_s, max(compute_s, dram_s) + fitted.launch_s)
    seconds = {name: loop.blocks * cycles / device.num_sms / hz for name, cycles in loop.units.items()}
    seconds["issue"] += loop.masked_blocks * loop.cut_issue / device.num_sms / hz
    seconds["dram"] = dram_s
    query_bytes = heads * problem.seqlen_q * problem.head_dim_qk * problem.itemsize
    columns = sum(_tile_dims(candidate, problem))
    busiest = max(seconds, key=lambda name: seconds[name])
    return Estimate(
        flops=2.0 * loop.scores * columns * loop.blocks,
        dram_bytes=dram_bytes,
        l2_bytes=float(loop.loaded_bytes * loop.blocks + query_bytes + theory.compulsory_write_bytes(problem)),
        smem_bytes=float(loop.smem_bytes * loop.blocks),
        exp_ops=float((loop.scores + loop.rows) * loop.blocks),
        tensor_s=seconds["tensor"],
        exp_s=seconds["exp"],
        smem_s=seconds["smem"],
        l2_s=seconds["l2"],
        dram_s=dram_s,
        programs_per_sm=at_once,
        waves=tiles / slots,
        time_s=time_s,
        bound_s=bound_s,
        bound=busiest if seconds[busiest] > 0.4 * time_s else "latency",
    )


def _tile_dims(candidate: Candidate, problem: Problem) -> tuple[int, int]:
    """Columns of the tiles of Q and K, and of V."""
    if candidate.variant.backend == "hopper":
        return specialised_dims(problem)
    return tile_dim(problem.head_dim_qk), tile_dim(problem.head_dim_v)


def _issue(rows: int, scores: int, dim_v: int, warps: int, fitted: Calibration) -> float:
    """Cycles in which the SM's four schedulers issue the softmax of a block."""
    return (
        scores * fitted.issue_per_score / 32
        + rows * dim_v * fitted.issue_per_output / 32
        + rows * fitted.issue_per_row
        + warps * fitted.issue_per_block
    ) / 4


def _spill_wait(candidate: Candidate, resources: Resources, fitted: Calibration) -> float:
    spilled = costly_spill(candidate, resources.spill_bytes)
    return fitted.spill_latency * spilled + (fitted.spill_wait if spilled else 0.0)


def _l2_bytes_per_cycle(device: Device, fitted: Calibration) -> float:
    """Of one SM."""
    return device.l2_bytes_per_s * fitted.l2_rate / device.num_sms / (device.boost_hz * fitted.clock)


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
    if size == 4:
        rate = fitted.fma_rate
    elif not warpgroups and 90 <= device.capability < 120:
        rate = fitted.mma_sync_rate * fitted.tensor_rate
    else:
        rate = fitted.tensor_rate
    flops_per_cycle = device.flops_per_s(problem.dtype) / device.num_sms / device.boost_hz * rate
    readers = max(1, block_m // 64) if warpgroups else num_warps
    read_first = (readers * block_n + (block_m if warpgroups else 0)) * dim_qk * size
    read_second = readers * block_n * dim_v * size
    tensor = max(2.0 * scores * dim_qk / flops_per_cycle, read_first / device.smem_bytes_per_clock)
    tensor += max(2.0 * scores * dim_v / flops_per_cycle, read_second / device.smem_bytes_per_clock)
    tile_bytes = block_n * (dim_qk + dim_v) * size
    smem_moved = tile_bytes + read_first + read_second
    loaded_bytes = block_n * (problem.head_dim_qk + problem.head_dim_v) * size
    copies = tile_bytes / 512 * fitted.issue_per_copy / 4 if variant.load == "pointer" else 0.0
    units = {
        "tensor": tensor,
        "exp": (scores + block_m) / device.exp_per_clock,
        "issue": _issue(block_m, scores, dim_v, num_warps, fitted) + copies,
        "smem": smem_moved / device.smem_bytes_per_clock,
        "l2": loaded_bytes / _l2_bytes_per_cycle(device, fitted),
    }
    cut_issue = scores * fitted.issue_per_cut_score / 32 / 4

    # What a program waits for in a block while it uses no unit.
    wait = fitted.block_latency + _spill_wait(candidate, resources, fitted)
    if stages == 1:
        wait += 2 * fitted.load_latency
    elif stages == 2:
        wait += fitted.drain_latency
    cycles = _cycles(fitted, units, wait, programs, num_warps)
    reentries = max(0, walked.loops - walked.row_blocks) * heads if variant.masked_apart else 0
    return _Loop(
        blocks=blocks,
        masked_blocks=heads * walked.cut if variant.masked_apart else blocks,
        scores=scores,
        rows=block_m,
        units=units,
        cut_issue=cut_issue,
        cycles=cycles,
        cut_cycles=_cycles(fitted, units | {"issue": units["issue"] + cut_issue}, wait, programs, num_warps),
        beside=(tiles * fitted.tile_latency + reentries * fitted.loop_latency) / programs,
        loaded_bytes=loaded_bytes,
        smem_bytes=smem_moved,
        speed_up=_cycles(fitted, units, wait, 1, num_warps) / (programs * cycles),
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
    heads = problem.batch * problem.heads_q
    dim_qk, dim_v = _tile_dims(candidate, problem)
    tiles = heads * math.ceil(problem.seqlen_q / config.block_m)
    loaded, walked = shares(problem, config.block_m, block_n)
    blocks = heads * walked
    masked_blocks = blocks - heads * walk(problem, WARPGROUP_ROWS, block_n).whole
    if cuts(problem, config.block_m, block_n):  # each tile's first block is masked, whether it is cut or not
        masked_blocks = max(masked_blocks, tiles * warpgroups)
    scores = WARPGROUP_ROWS * block_n
    flops_per_cycle = device.flops_per_s(problem.dtype) / device.num_sms / device.boost_hz
    read_first = (WARPGROUP_ROWS + block_n) * dim_qk * size
    read_second = block_n * dim_v * size
    first = max(2.0 * scores * dim_qk / flops_per_cycle, read_first / device.smem_bytes_per_clock)
    second = max(2.0 * scores * dim_v / flops_per_cycle, read_second / device.smem_bytes_per_clock)
    smem_moved = read_first + read_second + block_n * (dim_qk + dim_v) * size * loaded / walked
    loaded_bytes = block_n * (problem.head_dim_qk + problem.head_dim_v) * size * loaded / walked
    issue = _issue(WARPGROUP_ROWS, scores, dim_v, 4, fitted)
    if variant.lazy_rescale:
        issue += fitted.issue_per_vote - WARPGROUP_ROWS * dim_v * fitted.issue_per_output / 32 / 4
    units = {
        "tensor": first + second,
        "exp": (scores + WARPGROUP_ROWS) / device.exp_per_clock,
        "issue": issue,
        "smem": smem_moved / device.smem_bytes_per_clock,
        "l2": loaded_bytes / _l2_bytes_per_cycle(device, fitted),
    }
    cut_issue = scores * fitted.issue_per_cut_score / 32 / 4
    wait = _spill_wait(candidate, resources, fitted)
    if config.num_stages == 1:
        wait += fitted.load_latency
    power = fitted.smem_contention
    products = math.pow(math.pow(units["tensor"], power) + math.pow(units["smem"], power), 1 / power)
    meeting = fitted.ping_pong_meeting if variant.ping_pong else fitted.warpgroup_meeting
    sharing = walked / loaded  # warpgroups at a block, in the mean: fewer where some of them skip it, and wait for the others

    def cycles(issue: float) -> float:
        """As in `_cycles`, but a warpgroup may multiply beside its own softmax."""
        softmax = units["exp"] + issue
        beside = fitted.own_overlap * min(second, softmax) if variant.order == "qk_first" else 0.0
        alone = products + softmax - beside + wait
        met = meeting * (products**2 + softmax**2) / alone
        return max(*units.values(), (alone + (sharing - 1) * met) / sharing)

    return _Loop(
        blocks=blocks,
        masked_blocks=max(0, min(blocks, masked_blocks)),
        scores=scores,
        rows=WARPGROUP_ROWS,
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


def _cycles(fitted: Calibration, units: dict[str, float], wait: float, programs: int, num_warps: int) -> float:
    """Cycles of an SM for one block of one of so many programs.

    A program alone has its products, then its softmax (exponentials and instructions depend on each other), then its waits. With n
    of them a block takes the nth part; but a program finds a unit busy as often as each of the others uses it, and then waits as
    long again (mean value analysis for small queues). No block is faster than the busiest unit.
    """
    quarters = 4 / min(4, num_warps)  # parts of the SM that the warps leave idle, for other programs to run in side by side
    side_by_side = min(programs, quarters)
    used = [units["tensor"] * quarters, (units["exp"] + units["issue"]) * quarters]
    alone = sum(used) + wait
    together = programs / side_by_side * (1 + fitted.overlap_warps * max(0.0, num_warps / 4 - 1))
    met = sum(cycles * cycles for cycles in used) / alone
    return max(*units.values(), (alone + (together - 1) * met) / together / side_by_side)


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
        return max(1.0, imbalance(problem, config.block_m, config.block_n, variant.longest_first, config.head_group, slots))
    by_program, by_sm = unevenness(
        problem, config.block_m, variant.longest_first, config.head_group, device.num_sms, programs, config.persistent
    )
    return max(1.0, by_sm, 1 + (by_program - 1) * speed_up)


def _reread_bytes(fitted: Calibration, candidate: Candidate, problem: Problem, device: Device, slots: int, row_blocks: int) -> float:
    """Bytes of K and V read from DRAM beyond the first time.

    Programs that run together walk K and V in step, so a head is read once a wave at most; again in the next wave only as far as the
    heads that are walked together do not fit into L2.
    """
    heads = problem.batch * problem.heads_q
    heads_per_kv = problem.heads_q // problem.heads_kv
    head_bytes = problem.seqlen_kv * (problem.head_dim_qk + problem.head_dim_v) * problem.itemsize
    group = min(candidate.config.head_group, heads)
    together = min(heads, max(group, math.ceil(slots / max(1, row_blocks))))
    kv_heads_together = math.ceil(together / heads_per_kv)
    working = kv_heads_together * head_bytes
    kept = device.l2_bytes * fitted.l2_share
    missed = max(0.0, working - kept) / working if working else 0.0
    waves = max(1.0, together * row_blocks / slots)
    return missed * (waves - 1) * head_bytes * problem.batch * problem.heads_kv


def _nothing(bound_s: float) -> Estimate:
    return Estimate(
        flops=0.0,
        dram_bytes=0.0,
        l2_bytes=0.0,
        smem_bytes=0.0,
        exp_ops=0.0,
        tensor_s=0.0,
        exp_s=0.0,
        smem_s=0.0,
        l2_s=0.0,
        dram_s=0.0,
        programs_per_sm=0,
        waves=0.0,
        time_s=bound_s,
        bound_s=bound_s,
        bound="latency",
    )
