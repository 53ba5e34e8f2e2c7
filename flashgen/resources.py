"""Resources: registers and shared memory that a candidate will need of an SM, before a compiler was asked."""

import math

from flashgen.candidate import Candidate, Config, Variant
from flashgen.device import Device
from flashgen.problem import DTYPES, Problem
from flashgen.record import Resources
from flashgen.schedule import DQ_KEYS, DQ_ROWS, MOST_PART, WARPGROUP_ROWS, dq_v_slots, specialised_dims, tile_dim

# Registers of a thread, fitted to what Triton 3.6's compiler says for sm_90a.
_BESIDE = 15  # accumulators, scores and probabilities
_PIPELINE = 18  # more, with more than one stage or a mask
_MASK = 6  # more, with a mask
_POINTER = 50  # more, for addresses and bounds where pointers load the tiles, and one for each element of a K tile
# Of a portable backward kernel, fitted to 84 that Triton 3.6 compiled: right to 18 mostly, its spills to a factor of 3.
_BESIDE_BACKWARD = 65  # beside sums, scores and addresses
_BESIDE_BACKWARD_MMA_SYNC = 137  # products take both operands from registers
_BYTES_A_MISSING_REGISTER = 2.5
_BESIDE_BACKWARD_HOPPER = 45  # of a consumer of a hopper one: right to 30; only 128 x 128 spill, 24 to 56 bytes
_BESIDE_HOPPER = 25  # of a consumer of a hopper kernel, at least
_SPARE_HOPPER = 10  # more, that it takes if there are any

# Buffers of score gradients in a fused backward kernel, by block_m: dq of a step is multiplied one step later.
DSCORE_BUFFERS = {64: 4, 128: 3}
_BARRIERS = 512  # bytes of shared memory for barriers, and what the first warps pass on to the others

# Spilled bytes that cost nothing: they lie outside the loop.
_FREE_SPILL = 60.0
_FREE_SPILL_POINTER = 560.0  # where pointers load the tiles: addresses


def uses_warpgroups(candidate: Candidate, problem: Problem, device: Device) -> bool:
    """Whether products run as warpgroup (wgmma, tcgen05) instructions, which need 4 warps, 64 rows and 16-bit elements."""
    return _warpgroups(candidate, problem, device.capability)


def _warpgroups(candidate: Candidate, problem: Problem, capability: int) -> bool:
    config = candidate.config
    rows = config.block_n if candidate.variant.family == "backward" else config.block_m
    return 90 <= capability < 120 and problem.itemsize == 2 and config.num_warps % 4 == 0 and rows >= 64


def smem_bytes(candidate: Candidate, problem: Problem, device: Device | None = None) -> int:
    """Shared memory that the kernel will ask for, as Triton 3.6 to 3.9 lay it out; without a device as for Hopper.

    Found by compiling for sm_80 and sm_90a; exact to about 128 bytes.
    """
    if candidate.variant.family == "backward":
        return _backward_smem_bytes(candidate, problem, device)
    if candidate.variant.backend == "hopper":
        return _hopper_smem_bytes(candidate, problem)
    config, size = candidate.config, problem.itemsize
    # Q stays for the whole loop; K and V have num_stages buffers each, or one less where products read registers (mma.sync) and a
    # tile is free once it was read. With one stage V takes K's place.
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


def _hopper_smem_bytes(candidate: Candidate, problem: Problem) -> int:
    """Q's buffers, slots of K and V, up to 128 columns of the output, a pair of barriers for each buffer and slot."""
    config = candidate.config
    dim_qk, dim_v = specialised_dims(problem)
    tiles = config.q_stages * config.block_m * dim_qk + config.num_stages * config.block_n * (dim_qk + dim_v)
    tiles += config.block_m * min(MOST_PART, dim_v)
    barriers = 2 * (config.q_stages * config.block_m // WARPGROUP_ROWS + config.num_stages)
    return tiles * problem.itemsize + 8 * barriers + 256  # what the first warps pass on to the others


def _backward_smem_bytes(candidate: Candidate, problem: Problem, device: Device | None) -> int:
    """Of the hungriest function, that of dk and dv. Of a portable kernel right to 8 %, and never less, as Triton 3.6 lays it out."""
    variant, config, size = candidate.variant, candidate.config, problem.itemsize
    block_m, block_n = config.block_m, config.block_n
    if variant.backend == "hopper":
        dim_qk, dim_v = specialised_dims(problem)
        # K and V stay; Q and dO have slots, with two numbers a query beside them.
        total = block_n * (dim_qk + dim_v) * size + config.num_stages * block_m * ((dim_qk + dim_v) * size + 8)
        if variant.split_roles:  # one warpgroup hands the weights to the other, as float32
            total += 2 * block_n * block_m * 4
        elif variant.fused:  # both need all score gradients of a step for their half of dq, which leaves from a buffer of its own
            # dk and dv leave from there, too, for which half as many bytes would be too few.
            columns = dim_qk if variant.float16_dq else dq_columns(block_m, dim_qk)
            total += DSCORE_BUFFERS[block_m] * block_n * block_m * size + 2 * WARPGROUP_ROWS * columns * DTYPES[dq_sum_dtype(variant)]
            if variant.float16_dq:  # a scale for each row of dq, a step longer than the rest
                total += (config.num_stages + 1) * block_m * 4 + 64
        if variant.fused:
            return total + _BARRIERS
        # Of dq: Q and dO stay; K and V have slots.
        of_dq = (DQ_ROWS * (dim_qk + dim_v) + DQ_KEYS * (2 * dim_qk + dq_v_slots(problem) * dim_v)) * size
        return max(total, of_dq) + _BARRIERS
    row_bytes = (tile_dim(problem.head_dim_qk) + tile_dim(problem.head_dim_v)) * size
    # What is walked has num_stages buffers, or one less where products read registers (mma.sync) and a tile is free once it was read.
    from_smem = 90 <= (90 if device is None else device.capability) < 120 and size == 2 and block_n >= 64
    buffers = max(1, config.num_stages if from_smem else config.num_stages - 1)
    total = (block_n + buffers * block_m) * row_bytes + 8 * block_m * buffers
    if not from_smem:
        total += block_m * block_n * size  # weights change layout
        if size == 2 and config.num_stages == 1:
            total += block_m * row_bytes // 2  # and so do tiles that products read both ways
    return total


def dq_columns(block_m: int, dim_qk: int) -> int:
    """Columns of a step's dq of which a warpgroup of a fused kernel computes 64 rows: of 64 queries each has half of the columns, of 128
    all of them for half of the queries."""
    return dim_qk if block_m > WARPGROUP_ROWS else dim_qk // 2


def dq_sum_dtype(variant: Variant) -> str:
    """In which a fused kernel adds up dq."""
    return "float16" if variant.float16_dq else "float32"


def consumer_registers(config: Config) -> int:
    """Registers of a consumer's thread in a hopper kernel: three warpgroups share what two have."""
    return 240 if config.block_m <= 2 * WARPGROUP_ROWS else 160


def wanted_by_consumer(candidate: Candidate, problem: Problem) -> int:
    """Registers that a consumer's thread of a hopper kernel needs, for its accumulators, scores and weights. With more than it has, ptxas
    puts a wait behind every product (C7512), and spills."""
    block_n = candidate.config.block_n
    return specialised_dims(problem)[1] // 2 + block_n // 2 + block_n // 4 + _BESIDE_HOPPER


def register_limit(candidate: Candidate, device: Device) -> int:
    """Most registers a thread may have: the architecture's 255, its share of the file, and the candidate's own cap."""
    if candidate.variant.backend == "hopper":
        return consumer_registers(candidate.config)
    threads = 32 * candidate.config.num_warps
    return min(255, device.registers_per_sm // threads // 8 * 8, candidate.config.maxnreg or 255)


def guess(candidate: Candidate, problem: Problem, device: Device) -> Resources:
    """What the compiler may say of this kernel. For 16-bit elements by TMA, registers are mostly right to 10 and spills to a factor of 2.

    A thread holds its accumulators, its scores, and the probabilities in the inputs' type; in need, half of these take the place of
    scores. A register that is still missing is spilled about twice.
    """
    if candidate.variant.family == "backward":
        return _backward_guess(candidate, problem, device)
    config, size = candidate.config, problem.itemsize
    masked = candidate.variant.mask != "full"
    limit = register_limit(candidate, device)
    if candidate.variant.backend == "hopper":
        least = float(wanted_by_consumer(candidate, problem))
        wanted = least + _SPARE_HOPPER
    else:
        threads = 32 * config.num_warps
        scores = config.block_m * config.block_n / threads
        probabilities = scores * size / 4
        wanted = config.block_m * tile_dim(problem.head_dim_v) / threads + scores + probabilities + _BESIDE
        if config.num_stages > 1 or masked:
            wanted += _PIPELINE
        if masked:
            wanted += _MASK
        if candidate.variant.load == "pointer":
            wanted += _POINTER + config.block_n * tile_dim(problem.head_dim_qk) / threads
        if not uses_warpgroups(candidate, problem, device):
            wanted += config.block_m * tile_dim(problem.head_dim_qk) * size / 4 / threads  # Q
        least = wanted - probabilities / 2
        if size == 4:  # ordinary cores take both operands from registers
            wanted, least = wanted * 1.5, least * 1.5
    return Resources(
        registers=max(1, math.ceil(min(wanted, limit))),
        spill_bytes=math.ceil(8 * max(0.0, least - limit)),
        smem_bytes=smem_bytes(candidate, problem, device),
        binary_sha256="",
    )


def _backward_guess(candidate: Candidate, problem: Problem, device: Device) -> Resources:
    """A thread holds its part of dk and dv, scores, their gradients, and addresses of what it loads."""
    config, size = candidate.config, problem.itemsize
    limit, threads = register_limit(candidate, device), 32 * config.num_warps
    if candidate.variant.backend == "hopper":
        dims = specialised_dims(problem)
        gathered = max(dims) / 2 if candidate.variant.split_roles else sum(dims) / 2
        wanted = min(limit, gathered + 0.75 * config.block_m + _BESIDE_BACKWARD_HOPPER)
    else:
        columns = tile_dim(problem.head_dim_qk) + tile_dim(problem.head_dim_v)
        gathered = config.block_n * columns / threads
        scores = config.block_m * config.block_n / threads
        if uses_warpgroups(candidate, problem, device):
            wanted = gathered + 2 * scores + config.block_m * columns / threads + _BESIDE_BACKWARD
        else:
            wanted = gathered + size / 2 * scores + _BESIDE_BACKWARD_MMA_SYNC
    return Resources(
        registers=max(1, math.ceil(min(wanted, limit))),
        spill_bytes=math.ceil(_BYTES_A_MISSING_REGISTER * max(0.0, wanted - limit)),
        smem_bytes=smem_bytes(candidate, problem, device),
        binary_sha256="",
    )


def costly_spill(candidate: Candidate, spill_bytes: float) -> float:
    """Spilled bytes that the loop pays for: the first ones are values that it hardly needs."""
    of_addresses = candidate.variant.load == "pointer" and candidate.variant.family == "forward"
    return max(0.0, spill_bytes - (_FREE_SPILL_POINTER if of_addresses else _FREE_SPILL))


def resident(candidate: Candidate, needed: Resources, device: Device) -> int:
    """How many programs of this kernel an SM holds at once, at least one. A hopper kernel takes all its registers, and shares them out."""
    if candidate.variant.backend == "hopper":
        return 1
    return max(1, programs_per_sm(candidate.config.num_warps, max(1, needed.registers), needed.smem_bytes, device))


def programs_per_sm(num_warps: int, registers_per_thread: float, smem: int, device: Device) -> int:
    """How many programs fit on an SM at once: registers come 8 a thread at a time, shared memory with 1 KiB a program on top."""
    threads = 32 * num_warps
    by_registers = device.registers_per_sm // (threads * 8 * math.ceil(registers_per_thread / 8))
    by_smem = device.smem_per_sm_bytes // (smem + 1024)
    return min(by_registers, by_smem, device.threads_per_sm // threads, device.blocks_per_sm)
