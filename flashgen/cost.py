"""Candidate -> Estimate: what a kernel does to every unit of the device, and how long that may take.

The model follows one program through its blocks of keys. For one block every unit of an SM has a number of cycles: tensor cores,
exponentials, instruction issue, shared memory, and the SM's share of L2. A program waits for its first product before its softmax, so
alone it needs the sum of tensor and softmax time; other warps and other programs on the SM fill the gaps, until the busiest unit is
the limit. Blocks add up to tiles, tiles to waves with an uneven end, and DRAM runs beside all of it. Only the constants in
`Calibration` are fitted; everything else is counted. See Estimate for what the results may be used for.
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


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The fitted constants. Cycles are those of one SM, instructions those that one warp issues."""

    clock: float = 0.93  # sustained clock under load, of boost_hz
    tensor_rate: float = 0.88  # of the peak at that clock: a large bf16 product ran at 769-798 of 989 TFLOP/s on an H200
    mma_sync_rate: float = 0.62  # of the peak, for mma.sync where the peak needs warpgroup products (Hopper)
    fma_rate: float = 0.35  # of the peak, for fp32 products on the ordinary cores, whose operands come through shared memory
    l2_rate: float = 0.95  # of l2_bytes_per_s
    dram_rate: float = 0.88  # of dram_bytes_per_s: a copy ran at 4.3 of 4.8 TB/s on an H200
    l2_share: float = 0.5  # of L2 that holds K and V for re-use: it is two partitions, and other data passes through

    issue_per_score: float = 3.4  # softmax: scale, maximum, exponent, sum, conversion (SASS of a Hopper kernel, d 64 to 256)
    issue_per_output: float = 1.0  # rescale of one accumulator
    issue_per_cut_score: float = 2.5  # compare and select where the mask cuts
    issue_per_block: float = 110.0  # loop, barriers, waits
    issue_per_row: float = 4.0  # running maximum and sum
    issue_per_copy: float = 2.5  # instructions for 512 bytes (16 a thread) where pointers, not TMA, load a tile

    block_latency: float = 300.0  # cycles of one block that nothing of the same warps covers: barriers, reductions, first product
    load_latency: float = 800.0  # cycles from asking for a tile to having it
    tile_latency: float = 2600.0  # cycles of a tile outside its loop: start, Q, the first K and V, division, output
    persistent_latency: float = 2300.0  # the same in a persistent program, which need not be started anew
    loop_latency: float = 600.0  # filling the pipeline again where cut blocks have a loop of their own
    launch_s: float = 2.5e-6  # start and end of a kernel

    overlap_programs: float = 0.5  # how well another program on the SM fills a waiting program's gaps
    overlap_warps: float = 0.2  # how well four more warps of the same program do
    softness: float = 6.0  # exponent with which nearly equal limits add up (infinite: a pure maximum)

    registers: int = 36  # of a thread, beside accumulators, scores and probabilities
    registers_pointer: int = 44  # more, for addresses, where pointers load the tiles
    issue_per_spilled_byte: float = 0.5  # a block: a store and a load for 4 bytes


CALIBRATION = Calibration()


def tile_dim(head_dim: int) -> int:
    """Columns of a tile that holds this head dim: the power of two not below it, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def uses_warpgroups(candidate: Candidate, problem: Problem, device: Device) -> bool:
    """Whether products run as warpgroup (wgmma, tcgen05) instructions, which need 4 warps, 64 rows and 16-bit elements."""
    return _warpgroups(candidate, problem, device.capability)


def _warpgroups(candidate: Candidate, problem: Problem, capability: int) -> bool:
    config = candidate.config
    return 90 <= capability < 120 and problem.itemsize == 2 and config.num_warps % 4 == 0 and config.block_m >= 64


def smem_bytes(candidate: Candidate, problem: Problem, device: Device | None = None) -> int:
    """Shared memory that the kernel will ask for, as Triton 3.6 to 3.9 lay it out; without a device as for Hopper.

    Q stays for the whole loop; K and V have num_stages buffers each, or one less where products read registers (mma.sync) and a tile
    is free once it was read. With one stage V takes K's place. Found by compiling for sm_80 and sm_90a; exact to about 1 KiB.
    """
    config, size = candidate.config, problem.itemsize
    k_bytes = config.block_n * tile_dim(problem.head_dim_qk) * size
    v_bytes = config.block_n * tile_dim(problem.head_dim_v) * size
    total = config.block_m * tile_dim(problem.head_dim_qk) * size
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
        total += 1024  # barriers, and alignment of the tiles
    return total


def registers_held(candidate: Candidate, problem: Problem) -> float:
    """Registers a thread that one block cannot do without: accumulators, scores, and probabilities in the inputs' type."""
    config = candidate.config
    scores = config.block_m * config.block_n
    probabilities = scores * problem.itemsize / 4
    return (config.block_m * tile_dim(problem.head_dim_v) + scores + probabilities) / (32 * config.num_warps)


def register_limit(candidate: Candidate, device: Device) -> int:
    """Most registers a thread may have: the architecture's 255, its share of the file, and the candidate's own cap."""
    threads = 32 * candidate.config.num_warps
    return min(255, device.registers_per_sm // threads // 8 * 8, candidate.config.maxnreg or 255)


def registers(candidate: Candidate, problem: Problem, device: Device, calibration: Calibration = CALIBRATION) -> float:
    """Registers a thread that the compiler would like, guessed; beyond `register_limit` they spill."""
    wanted = registers_held(candidate, problem) + calibration.registers
    if candidate.variant.load == "pointer":
        wanted += calibration.registers_pointer
    if not uses_warpgroups(candidate, problem, device):
        wanted += candidate.config.block_m * tile_dim(problem.head_dim_qk) * problem.itemsize / 4 / (32 * candidate.config.num_warps)
    return wanted * 1.5 if problem.itemsize == 4 else wanted  # ordinary cores take both operands from registers


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
def unevenness(problem: Problem, block_m: int, longest_first: bool, head_group: int, slots: int, persistent: bool) -> float:
    """Time of the busiest of `slots` programs at a time, relative to the mean: 1 is a perfect balance.

    Tiles go to the next free slot in launch order, or in turn if persistent. Only so many tiles are simulated as decide the outcome:
    the last ones of a grid, which decide how it ends, or the first of a persistent one, whose imbalance repeats.
    """
    heads = problem.batch * problem.heads_q
    row_blocks = -(-problem.seqlen_q // block_m)
    tiles = heads * row_blocks
    weights = [span + _KEYS_OF_A_TILE for span in walk(problem, block_m, block_m).spans]
    if len(weights) == 1 or max(weights) == min(weights):
        return math.ceil(tiles / slots) * slots / tiles
    if longest_first:
        weights.reverse()
    groups = [head_group] * (heads // head_group) + [heads % head_group] * (heads % head_group > 0)

    def in_order(groups: list[int]) -> Iterator[int]:
        return (weight for here in groups for weight in weights for _ in range(here))

    if persistent:
        first = list(itertools.islice(in_order(groups), 16 * slots))
        loads = [sum(first[slot::slots]) for slot in range(min(slots, len(first)))]
        return max(loads) * slots / sum(loads)
    total = sum(weights) * heads
    tail: list[int] = []
    while groups and len(tail) < 6 * slots:
        tail = [*in_order([groups.pop()]), *tail]
    tail = tail[-(8 * slots) :]
    begun = (total - sum(tail)) / slots
    free = [begun] * slots
    for weight in tail:
        heapq.heapreplace(free, free[0] + weight)
    return max(free) * slots / total


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
        limit = register_limit(candidate, device)
        wanted = registers(candidate, problem, device, fitted)
        used, smem = min(wanted, limit), smem_bytes(candidate, problem, device)
        spilled_bytes = 4 * max(0.0, wanted - limit)
    else:
        used, smem, spilled_bytes = float(max(1, resources.registers)), resources.smem_bytes, float(resources.spill_bytes)
    resident = max(1, programs_per_sm(num_warps, used, smem, device))
    programs = min(resident, math.ceil(tiles / device.num_sms))
    slots = device.num_sms * programs

    # Cycles of an SM for one block of one program, unit by unit.
    hz = device.boost_hz * fitted.clock
    block_flops = 2.0 * block_m * block_n * (dim_qk + dim_v)
    if problem.itemsize == 4:
        rate = fitted.fma_rate
    elif not warpgroups and 90 <= device.capability < 120:
        rate = fitted.mma_sync_rate * fitted.tensor_rate
    else:
        rate = fitted.tensor_rate
    tensor = block_flops / (device.flops_per_s(problem.dtype) / device.num_sms / device.boost_hz * rate)
    scores = block_m * block_n
    exp = (scores + block_m) / device.exp_per_clock
    tile_bytes = block_n * (dim_qk + dim_v) * problem.itemsize
    issue = (
        scores * fitted.issue_per_score / 32
        + block_m * dim_v * fitted.issue_per_output / 32
        + block_m * fitted.issue_per_row
        + num_warps * fitted.issue_per_block
        + num_warps * spilled_bytes * fitted.issue_per_spilled_byte
    )
    if variant.load == "pointer":
        issue += tile_bytes / 512 * fitted.issue_per_copy
    issue /= 4
    cut_issue = scores * fitted.issue_per_cut_score / 32 / 4
    # Each group of 64 rows (warpgroup products) or 16 rows a warp (mma.sync) reads K and V once; warpgroups read Q again each time.
    readers = max(1, block_m // 64) if warpgroups else num_warps
    smem_moved = tile_bytes * (1 + readers) + (block_m * dim_qk * problem.itemsize if warpgroups else 0)
    smem_cycles = smem_moved / device.smem_bytes_per_clock
    loaded_bytes = block_n * (problem.head_dim_qk + problem.head_dim_v) * problem.itemsize
    l2 = loaded_bytes / (device.l2_bytes_per_s * fitted.l2_rate / device.num_sms / hz)

    # Alone, a program waits for its first product and at barriers, and with less than 4 warps leaves parts of the SM idle; and it
    # waits for tiles, which are asked for stages - 1 blocks ahead.
    parts = 4 / min(4, num_warps)
    cut_wait = (max(exp, issue + cut_issue) - max(exp, issue)) * parts
    alone = (tensor + max(exp, issue)) * parts + fitted.block_latency
    loading = fitted.load_latency + l2
    alone = max(alone, loading / (stages - 1)) if stages > 1 else alone + loading + fitted.load_latency
    units = {"tensor": tensor, "exp": exp, "issue": issue, "smem": smem_cycles, "l2": l2}
    block = _cycles(fitted, units, alone, programs, num_warps)
    block_alone = _cycles(fitted, units, alone, 1, num_warps)
    cut_block = _cycles(fitted, units | {"issue": issue + cut_issue}, alone + cut_wait, programs, num_warps)

    # From blocks to the kernel.
    per_tile = (fitted.persistent_latency if config.persistent else fitted.tile_latency) / programs
    reentries = max(0, walked.loops - walked.row_blocks) * heads if variant.masked_apart else 0
    total = (blocks - masked_blocks) * block + masked_blocks * cut_block + tiles * per_tile + reentries * fitted.loop_latency / programs
    speed_up = block_alone / (programs * block)  # of a program when it is the last one on its SM
    uneven = _unevenness(candidate, problem, device, programs, tiles, speed_up)
    compute_s = total / device.num_sms * uneven / hz

    dram_bytes = float(theory.compulsory_bytes(problem) + _reread_bytes(fitted, candidate, problem, device, slots, walked.row_blocks))
    dram_s = dram_bytes / (device.dram_bytes_per_s * fitted.dram_rate)
    time_s = max(bound_s, _soft_max(fitted.softness, compute_s, dram_s) + fitted.launch_s)
    seconds = {name: blocks * cycles / device.num_sms / hz for name, cycles in units.items()}
    seconds["issue"] += masked_blocks * cut_issue / device.num_sms / hz
    seconds["dram"] = dram_s
    query_bytes = heads * problem.seqlen_q * problem.head_dim_qk * problem.itemsize
    busiest = max(seconds, key=lambda name: seconds[name])
    return Estimate(
        flops=block_flops * blocks,
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


def _cycles(fitted: Calibration, units: dict[str, float], alone: float, programs: int, num_warps: int) -> float:
    """Cycles of an SM for one block of one of so many programs: between the busiest unit and one program's uncovered sum."""
    busy = _soft_max(fitted.softness, *units.values())
    side_by_side = min(programs, 4 / min(4, num_warps))  # in different parts of the SM
    helpers = fitted.overlap_programs * (programs / side_by_side - 1) + fitted.overlap_warps * max(0.0, num_warps / 4 - 1)
    return busy + max(0.0, alone / side_by_side - busy) / (1 + helpers)


def _soft_max(softness: float, *values: float) -> float:
    most = max(values)
    return most * sum((value / most) ** softness for value in values) ** (1 / softness) if most > 0 else 0.0


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
    by_program = unevenness(problem, config.block_m, variant.longest_first, config.head_group, slots, config.persistent)
    by_sm = unevenness(problem, config.block_m, variant.longest_first, config.head_group, device.num_sms, False)
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
