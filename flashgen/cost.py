"""Candidate -> Estimate: what a kernel does to every unit of the device, and how long that may take.

The model follows one program through its blocks of keys. For one block every unit of an SM has a number of cycles: tensor cores,
exponentials, instruction issue, shared memory, and the SM's share of L2. A program waits for its first product before its softmax,
and for its tiles where no pipeline fetches them in time, so alone it needs the sum of all that. Several programs on an SM fill each
other's waits, and only meet where two want the same unit at the same time, until the busiest unit is the limit. Blocks add up to
tiles, tiles to waves with an uneven end, and DRAM runs beside all of it. Only the constants in `Calibration` are fitted; everything
else is counted. See Estimate for what the results may be used for.
"""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from flashgen import theory
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.problem import Problem
from flashgen.record import Estimate, Resources
from flashgen.schedule import tile_dim


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The fitted constants. Cycles are those of one SM, instructions those that one warp issues.

    Fitted to 215 kernels of head dims 64, 128 and 256, full and causal, over 1k to 16k keys, on an H200 (Triton 3.6, 2026-11-29):
    median error 6 %; fitted to three of the four problems, 7 to 9 % on the fourth. Rates without that note are of other measurements.
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

    registers: int = 15  # of a thread, beside accumulators, scores and probabilities
    registers_pipeline: int = 18  # more, with more than one stage or a mask
    registers_mask: int = 6  # more, with a mask
    registers_pointer: int = 50  # more, for addresses and bounds where pointers load the tiles, and one for each element of a K tile
    spill_wait: float = 500.0  # cycles of a block in whose loop registers spill: products no longer follow each other without a wait
    spill_free: float = 60.0  # spilled bytes that cost nothing: they lie outside the loop
    spill_free_pointer: float = 500.0  # more of them where pointers load the tiles: addresses
    spill_latency: float = 6.5  # cycles of a block for each byte beyond


CALIBRATION = Calibration()


def uses_warpgroups(candidate: Candidate, problem: Problem, device: Device) -> bool:
    """Whether products run as warpgroup (wgmma, tcgen05) instructions, which need 4 warps, 64 rows and 16-bit elements."""
    return _warpgroups(candidate, problem, device.capability)


def _warpgroups(candidate: Candidate, problem: Problem, capability: int) -> bool:
    config = candidate.config
    return 90 <= capability < 120 and problem.itemsize == 2 and config.num_warps % 4 == 0 and config.block_m >= 64


def smem_bytes(candidate: Candidate, problem: Problem, device: Device | None = None) -> int:
    """Shared memory that the kernel will ask for, as Triton 3.6 to 3.9 lay it out; without a device as for Hopper.

    Q stays for the whole loop; K and V have num_stages buffers each, or one less where products read registers (mma.sync) and a tile
    is free once it was read. With one stage V takes K's place. Found by compiling for sm_80 and sm_90a; exact to about 128 bytes.
    """
    config, size = candidate.config, problem.itemsize
    k_bytes = config.block_n * tile_dim(problem.head_dim_qk) * size
    v_bytes = config.block_n * tile_dim(problem.head_dim_v) * size
    total = q_bytes = config.block_m * tile_dim(problem.head_dim_qk) * size
    capability = 90 if device is None else device.capability
    from_smem = _warpgroups(candidate, problem, capability)
    if config.num_stages == 1:
        total += max(k_bytes, v_bytes)
    else:
        total += (config.num_stages if from_smem else config.num_stages - 1) * (k_bytes + v_bytes)
    if size == 4:
        total += config.block_m * config.block_n * size + 4 * config.block_m  # probabilities and row statistics change layout
    elif not from_smem and config.num_warps > 1 and (capability >= 90 or tile_dim(problem.head_dim_v) > 128):
        total += config.block_m * config.block_n * size
    if candidate.variant.load == "tma":
        # Barriers come last, or before tiles that are aligned to 1024 bytes if K (or with one stage V) has more room than Q.
        tiles_bytes = max(k_bytes, v_bytes) if config.num_stages == 1 else config.num_stages * k_bytes
        total += 1024 if tiles_bytes > q_bytes else 16 * config.num_stages
    return total


def register_limit(candidate: Candidate, device: Device) -> int:
    """Most registers a thread may have: the architecture's 255, its share of the file, and the candidate's own cap."""
    threads = 32 * candidate.config.num_warps
    return min(255, device.registers_per_sm // threads // 8 * 8, candidate.config.maxnreg or 255)


def guess(candidate: Candidate, problem: Problem, device: Device, calibration: Calibration = CALIBRATION) -> Resources:
    """What the compiler may say of this kernel. For 16-bit elements by TMA, registers are mostly right to 10 and spills to a factor of 2.

    A thread holds its accumulators, its scores, and the probabilities in the inputs' type; in need, half of these take the place of
    scores. A register that is still missing is spilled about twice.
    """
    config, size = candidate.config, problem.itemsize
    threads = 32 * config.num_warps
    scores = config.block_m * config.block_n / threads
    probabilities = scores * size / 4
    wanted = config.block_m * tile_dim(problem.head_dim_v) / threads + scores + probabilities + calibration.registers
    masked = candidate.variant.mask != "full"
    if config.num_stages > 1 or masked:
        wanted += calibration.registers_pipeline
    if masked:
        wanted += calibration.registers_mask
    if candidate.variant.load == "pointer":
        wanted += calibration.registers_pointer + config.block_n * tile_dim(problem.head_dim_qk) / threads
    if not uses_warpgroups(candidate, problem, device):
        wanted += config.block_m * tile_dim(problem.head_dim_qk) * size / 4 / threads  # Q
    least = wanted - probabilities / 2
    if size == 4:  # ordinary cores take both operands from registers
        wanted, least = wanted * 1.5, least * 1.5
    limit = register_limit(candidate, device)
    return Resources(
        registers=max(1, math.ceil(min(wanted, limit))),
        spill_bytes=math.ceil(8 * max(0.0, least - limit)),
        smem_bytes=smem_bytes(candidate, problem, device),
        binary_sha256="",
    )


def costly_spill(candidate: Candidate, spill_bytes: float, calibration: Calibration = CALIBRATION) -> float:
    """Spilled bytes that the loop pays for: the first ones are values that it hardly needs."""
    free = calibration.spill_free + (calibration.spill_free_pointer if candidate.variant.load == "pointer" else 0.0)
    return max(0.0, spill_bytes - free)


def programs_per_sm(num_warps: int, registers_per_thread: float, smem: int, device: Device) -> int:
    """How many programs fit on an SM at once: registers come 8 a thread at a time, shared memory with 1 KiB a program on top."""
    threads = 32 * num_warps
    by_registers = device.registers_per_sm // (threads * 8 * math.ceil(registers_per_thread / 8))
    by_smem = device.smem_per_sm_bytes // (smem + 1024)
    return min(by_registers, by_smem, device.threads_per_sm // threads, device.blocks_per_sm)


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Blocks of keys that one head's row blocks walk: without a cut, and cut by the mask or the end; sums over the row blocks."""

    row_blocks: int
    whole: int
    cut: int
    most: int  # blocks of the longest row block
    loops: int  # not empty loops, where whole and cut blocks are walked apart
    spans: tuple[int, ...]  # keys a row block sees; one entry if all see the same


@lru_cache(maxsize=4096)
def walk(problem: Problem, block_m: int, block_n: int) -> Walk:
    """How the template walks this problem with these tiles."""
    low, high = problem.band
    seqlen_q, seqlen_kv = problem.seqlen_q, problem.seqlen_kv
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


# A tile costs as much outside its loop as about this many keys inside it.
_KEYS_OF_A_TILE = 96


@lru_cache(maxsize=16384)
def unevenness(
    problem: Problem, block_m: int, longest_first: bool, head_group: int, num_sms: int, programs: int, persistent: bool
) -> tuple[float, float]:
    """Time of the busiest program, and of the busiest SM of `programs` each, relative to the mean: 1 is a perfect balance.

    Tiles go to the next free program in launch order, or in turn if persistent. Only so many tiles are simulated as decide the
    outcome: the last ones of a grid, which decide how it ends, or the first of a persistent one, whose imbalance repeats.
    """
    heads = problem.batch * problem.heads_q
    row_blocks = -(-problem.seqlen_q // block_m)
    tiles, slots = heads * row_blocks, num_sms * programs
    weights = [span + _KEYS_OF_A_TILE for span in walk(problem, block_m, block_m).spans]
    if len(weights) == 1 or max(weights) == min(weights):
        return math.ceil(tiles / slots) * slots / tiles, math.ceil(tiles / num_sms) * num_sms / tiles
    if longest_first:
        weights.reverse()
    groups = [head_group] * (heads // head_group) + [heads % head_group] * (heads % head_group > 0)

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


def estimate(
    candidate: Candidate,
    problem: Problem,
    device: Device,
    resources: Resources | None = None,
    *,
    calibration: Calibration = CALIBRATION,
) -> Estimate:
    """What one call of this kernel does and takes. resources, where the kernel was compiled, replace guessed registers and memory.

    The candidate need not be legal, but its tiles must be powers of two. About 0.1 ms.
    """
    fitted, variant, config = calibration, candidate.variant, candidate.config
    heads = problem.batch * problem.heads_q
    bound_s = theory.bound_s(problem, device)
    if problem.is_empty:
        return _nothing(bound_s)
    block_m, block_n, stages, num_warps = config.block_m, config.block_n, config.num_stages, config.num_warps
    dim_qk, dim_v = tile_dim(problem.head_dim_qk), tile_dim(problem.head_dim_v)
    warpgroups = uses_warpgroups(candidate, problem, device)
    walked = walk(problem, block_m, block_n)
    tiles = heads * walked.row_blocks
    blocks = heads * (walked.whole + walked.cut)
    masked_blocks = heads * walked.cut if variant.masked_apart else blocks

    # Programs on an SM at one time.
    if resources is None:
        resources = guess(candidate, problem, device, fitted)
    resident = max(1, programs_per_sm(num_warps, max(1, resources.registers), resources.smem_bytes, device))
    programs = min(resident, math.ceil(tiles / device.num_sms))
    slots = device.num_sms * programs

    # Cycles of an SM for one block of one program, unit by unit. Each group of 64 rows (warpgroup products) or 16 rows a warp
    # (mma.sync) reads K and V once; warpgroups read Q again each time, which makes narrow blocks wait for shared memory.
    hz, size = device.boost_hz * fitted.clock, problem.itemsize
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
    exp = (scores + block_m) / device.exp_per_clock
    tile_bytes = block_n * (dim_qk + dim_v) * size
    smem_moved = tile_bytes + read_first + read_second
    loaded_bytes = block_n * (problem.head_dim_qk + problem.head_dim_v) * size
    issue = (
        scores * fitted.issue_per_score / 32
        + block_m * dim_v * fitted.issue_per_output / 32
        + block_m * fitted.issue_per_row
        + num_warps * fitted.issue_per_block
        + (tile_bytes / 512 * fitted.issue_per_copy if variant.load == "pointer" else 0.0)
    ) / 4
    cut_issue = scores * fitted.issue_per_cut_score / 32 / 4
    units = {
        "tensor": tensor,
        "exp": exp,
        "issue": issue,
        "smem": smem_moved / device.smem_bytes_per_clock,
        "l2": loaded_bytes / (device.l2_bytes_per_s * fitted.l2_rate / device.num_sms / hz),
    }

    # What a program waits for in a block while it uses no unit.
    spilled = costly_spill(candidate, resources.spill_bytes, fitted)
    wait = fitted.block_latency + fitted.spill_latency * spilled + (fitted.spill_wait if spilled else 0.0)
    if stages == 1:
        wait += 2 * fitted.load_latency
    elif stages == 2:
        wait += fitted.drain_latency
    block = _cycles(fitted, units, wait, programs, num_warps)
    block_alone = _cycles(fitted, units, wait, 1, num_warps)
    cut_block = _cycles(fitted, units | {"issue": issue + cut_issue}, wait, programs, num_warps)

    # From blocks to the kernel.
    reentries = max(0, walked.loops - walked.row_blocks) * heads if variant.masked_apart else 0
    total = (
        (blocks - masked_blocks) * block
        + masked_blocks * cut_block
        + tiles * fitted.tile_latency / programs
        + reentries * fitted.loop_latency / programs
    )
    speed_up = block_alone / (programs * block)  # of a program when it is the last one on its SM
    uneven = _unevenness(candidate, problem, device, programs, tiles, speed_up)
    compute_s = total / device.num_sms * uneven / hz

    dram_bytes = float(theory.compulsory_bytes(problem) + _reread_bytes(fitted, candidate, problem, device, slots, walked.row_blocks))
    dram_s = dram_bytes / (device.dram_bytes_per_s * fitted.dram_rate)
    time_s = max(bound_s, max(compute_s, dram_s) + fitted.launch_s)
    seconds = {name: blocks * cycles / device.num_sms / hz for name, cycles in units.items()}
    seconds["issue"] += masked_blocks * cut_issue / device.num_sms / hz
    seconds["dram"] = dram_s
    query_bytes = heads * problem.seqlen_q * problem.head_dim_qk * problem.itemsize
    busiest = max(seconds, key=lambda name: seconds[name])
    return Estimate(
        flops=2.0 * scores * (dim_qk + dim_v) * blocks,
        dram_bytes=dram_bytes,
        l2_bytes=float(loaded_bytes * blocks + query_bytes + theory.compulsory_write_bytes(problem)),
        smem_bytes=float(smem_moved * blocks),
        exp_ops=float((scores + block_m) * blocks),
        tensor_s=seconds["tensor"],
        exp_s=seconds["exp"],
        smem_s=seconds["smem"],
        l2_s=seconds["l2"],
        dram_s=dram_s,
        programs_per_sm=resident,
        waves=tiles / slots,
        time_s=time_s,
        bound_s=bound_s,
        bound=busiest if seconds[busiest] > 0.4 * time_s else "latency",
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
