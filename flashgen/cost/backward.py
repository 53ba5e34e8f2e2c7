"""What the functions of a backward kernel do: bounds of keys and values, where dq is added up in float16; delta; dk and dv; dq, by a loop
of its own, or converted from what the loop before added up.

Shared memory is the wall of a warp-specialised one: of five products two read both operands from there, the score gradients go through it
on their way to dq, and so does each step's dq.
"""

import math
from dataclasses import dataclass

from flashgen.candidate import Candidate
from flashgen.cost.calibration import Calibration
from flashgen.cost.work import Work, contended, cycles_of_block, dram_s, flops_per_cycle, hz, l2_bytes_per_cycle, missed, spill_wait
from flashgen.device import Device
from flashgen.problem import DTYPES, Problem
from flashgen.record import Resources
from flashgen.resources import dq_columns, dq_sum_dtype, resident, uses_warpgroups
from flashgen.schedule import (
    DQ_KEYS,
    DQ_ROWS,
    WARPGROUP_ROWS,
    Walk,
    imbalance_of_keys,
    specialised_dims,
    tile_dim,
    unevenness,
    unevenness_of_keys,
    walk,
    walk_queries,
)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A program's work on one block of what it walks: so many pairs of query and key, cycles of an SM by unit (issue without the cut of a
    mask), cycles that it waits besides, and the rest as in `Work`."""

    pairs: int
    flops: float
    smem_bytes: float
    l2_bytes: float
    units: dict[str, float]
    wait: float


@dataclass(frozen=True, kw_only=True)
class _Loop:
    """A function whose programs each own a block of rows of a head, and walk the others.

    heads, rounds  how many own rows, and how many times each walks.
    own_bytes      of DRAM, once for each head; walked_bytes once if L2 holds them.
    programs       on an SM at one time.
    busiest        (program, SM): their time relative to the mean of all SMs.
    """

    step: _Step
    walked: Walk
    heads: int
    rounds: int
    own_bytes: float
    walked_bytes: float
    programs: int
    busiest: tuple[float, float]


def works(candidate: Candidate, problem: Problem, device: Device, resources: Resources, fitted: Calibration) -> list[Work]:
    """Of each function, in launch order."""
    model = _Model(candidate, problem, device, resources, fitted)
    last = model.converted() if candidate.variant.fused else model.work(model.dq())
    bounds = [model.bounds()] if candidate.variant.float16_dq else []
    return [*bounds, model.delta(), model.work(model.dkdv()), last]


class _Model:
    def __init__(self, candidate: Candidate, problem: Problem, device: Device, resources: Resources, fitted: Calibration) -> None:
        self.candidate, self.problem, self.device, self.resources, self.fitted = candidate, problem, device, resources, fitted
        self.hopper = candidate.variant.backend == "hopper"
        self.dims = specialised_dims(problem) if self.hopper else (tile_dim(problem.head_dim_qk), tile_dim(problem.head_dim_v))
        self.heads_q, self.heads_kv = problem.batch * problem.heads_q, problem.batch * problem.heads_kv
        self.resident = resident(candidate, resources, device)

    # ---- functions ---------------------------------------------------------------------------------------------------------

    def bounds(self) -> Work:
        """K and V once."""
        return self._streamed(self._row_bytes * self.heads_kv * self.problem.seqlen_kv)

    def delta(self) -> Work:
        """out and dout once; a row's delta, and its log-sum-exp in the form that the loops need; zeros where dq is added up."""
        problem = self.problem
        row_bytes = 2 * problem.head_dim_v * problem.itemsize + 4 + 4 * problem.return_lse + 8 * self.hopper
        return self._streamed((row_bytes + self._scratch_row_bytes) * self._rows)

    def converted(self) -> Work:
        """dq from the type of its sums to that of the inputs."""
        return self._streamed((self._scratch_row_bytes + self.problem.head_dim_qk * self.problem.itemsize) * self._rows)

    def dkdv(self) -> _Loop:
        problem, config, device = self.problem, self.candidate.config, self.device
        walked = walk_queries(problem, config.block_m, config.block_n)
        heads_per_kv = problem.heads_q // problem.heads_kv
        query_bytes = problem.seqlen_q * heads_per_kv * (self._row_bytes + 8)
        if self.candidate.variant.fused:  # zeros out of L2 or not, and what was added to them
            query_bytes += 2 * problem.seqlen_q * heads_per_kv * self._scratch_row_bytes
        blocks = self.heads_kv * walked.row_blocks
        programs = self._programs(blocks)
        if self.hopper:  # a program walks several blocks of keys, one after another
            busy = max(1, min(device.num_sms, blocks))
            even = imbalance_of_keys(problem, config.block_m, config.block_n, config.head_group, busy) * device.num_sms / busy
            busiest = even, even
        else:
            busiest = unevenness_of_keys(problem, config.block_n, config.head_group, device.num_sms, programs)
        return _Loop(
            step=self._dkdv_step(),
            walked=walked,
            heads=self.heads_kv,
            rounds=heads_per_kv,
            own_bytes=2 * problem.seqlen_kv * self._row_bytes,  # K and V, dk and dv
            walked_bytes=query_bytes,
            programs=programs,
            busiest=busiest,
        )

    def dq(self) -> _Loop:
        problem, config, device = self.problem, self.candidate.config, self.device
        rows, keys = (DQ_ROWS, DQ_KEYS) if self.hopper else (config.block_n, config.block_m)
        walked = walk(problem, rows, keys)
        programs = self._programs(self.heads_q * walked.row_blocks)
        group = config.head_group if self.hopper else 1
        return _Loop(
            step=self._dq_step(rows, keys),
            walked=walked,
            heads=self.heads_q,
            rounds=1,
            own_bytes=problem.seqlen_q * (self._row_bytes + problem.head_dim_qk * problem.itemsize + 8),  # Q and dO, dq
            walked_bytes=problem.seqlen_kv * self._row_bytes * problem.heads_kv / problem.heads_q,
            programs=programs,
            busiest=unevenness(problem, rows, self.hopper, group, device.num_sms, programs, False),
        )

    # ---- steps of loops ----------------------------------------------------------------------------------------------------

    def _dkdv_step(self) -> _Step:
        config, variant, size = self.candidate.config, self.candidate.variant, self.problem.itemsize
        block_m, block_n, (dim_qk, dim_v) = config.block_m, config.block_n, self.dims
        if not self.hopper:
            return self._portable_step((dim_qk, dim_v))
        # Each of two warpgroups: S^T = K Q^T and dP^T = V dO^T from shared memory, dv += P^T dO and dk += dS^T Q from registers.
        pairs = block_m * block_n
        if variant.split_roles:  # one S^T and dv, the other dP^T and dk, both for all keys
            read = (block_n + block_m + block_m) * (dim_qk + dim_v) * size
            handed = 2 * pairs * 4
        else:
            warpgroups = block_n // WARPGROUP_ROWS
            read = warpgroups * (WARPGROUP_ROWS + block_m + block_m) * (dim_qk + dim_v) * size
            handed = 0
        columns = 2 * (dim_qk + dim_v)
        issue = pairs * self.fitted.issue_per_pair / 32
        wait = 2 * self.fitted.load_latency if config.num_stages == 1 else 0.0  # for Q, then for dO
        if variant.fused or variant.split_roles:
            wait += self.fitted.exchange_latency
        reduced, adding = 0, 0.0
        if variant.fused:
            columns += dim_qk
            part = dq_columns(block_m, dim_qk)
            handed += pairs * size
            read += 2 * block_n * (WARPGROUP_ROWS + part) * size  # dS^T and K, of both warpgroups
            reduced = 2 * WARPGROUP_ROWS * part * self._sum_itemsize
            adding = reduced / self.fitted.reduce_rate / l2_bytes_per_cycle(self.device, self.fitted)
            handed += 2 * reduced  # into a buffer, and out of it
            wait += adding  # out of one buffer, which the next step wants to write
            if variant.float16_dq:  # each element times its row's scale
                issue += 2 * WARPGROUP_ROWS * part / 32
        loaded = block_m * (dim_qk + dim_v) * size
        l2_bytes = block_m * (self._row_bytes + 8)
        l2 = l2_bytes / l2_bytes_per_cycle(self.device, self.fitted) + adding
        return self._hopper_step(pairs, 2.0 * pairs * columns, read + handed + loaded, l2_bytes + reduced, l2, issue, wait)

    def _dq_step(self, rows: int, keys: int) -> _Step:
        if not self.hopper:
            return self._portable_step(self.dims[:1])
        # Each warpgroup: S = Q K^T and dP = dO V^T from shared memory, dq += dS K from registers.
        dim_qk, dim_v = self.dims
        size, pairs = self.problem.itemsize, rows * keys
        read = rows // WARPGROUP_ROWS * ((WARPGROUP_ROWS + keys) * (dim_qk + dim_v) + keys * dim_qk) * size
        loaded = keys * (dim_qk + dim_v) * size
        l2_bytes = keys * self._row_bytes
        l2 = l2_bytes / l2_bytes_per_cycle(self.device, self.fitted)
        issue = pairs * self.fitted.issue_per_pair / 32
        return self._hopper_step(pairs, 2.0 * pairs * (2 * dim_qk + dim_v), read + loaded, l2_bytes, l2, issue, 0.0)

    def _hopper_step(self, pairs: int, flops: float, smem_bytes: float, l2_bytes: float, l2: float, issue: float, wait: float) -> _Step:
        """Of two warpgroups; issue: of one of four schedulers, but for what each warp does besides."""
        device, fitted = self.device, self.fitted
        units = {
            "tensor": flops / (device.flops_per_s(self.problem.dtype) / device.num_sms / device.boost_hz),
            "exp": pairs / device.exp_per_clock,
            "issue": (issue + 8 * fitted.issue_per_block) / 4,
            "smem": smem_bytes / device.smem_bytes_per_clock,
            "l2": l2,
        }
        return _Step(pairs=pairs, flops=flops, smem_bytes=smem_bytes, l2_bytes=l2_bytes, units=units, wait=wait)

    def _portable_step(self, gathered: tuple[int, ...]) -> _Step:
        """block_n rows that a program owns, and block_m others: scores and their gradients, and a sum for each of the gathered columns."""
        config, device, fitted, size = self.candidate.config, self.device, self.fitted, self.problem.itemsize
        own, other, (dim_qk, dim_v) = config.block_n, config.block_m, self.dims
        pairs = own * other
        warpgroups = uses_warpgroups(self.candidate, self.problem, device)
        rate = flops_per_cycle(self.problem.dtype, device, warpgroups, fitted)
        # Groups of rows read what is walked once each; beside each other they read what is owned once each.
        groups = max(1, own // WARPGROUP_ROWS) if warpgroups else max(1, min(config.num_warps, own // 16))
        beside = max(1, (config.num_warps // 4 if warpgroups else config.num_warps) // groups)
        tensor = smem_bytes = 0.0
        for columns in (dim_qk, dim_v):
            read = (groups * other + beside * own) * columns * size
            tensor += max(2.0 * pairs * columns / rate, read / device.smem_bytes_per_clock)
            smem_bytes += read
        for columns in gathered:
            read = groups * other * columns * size
            tensor += max(2.0 * pairs * columns / rate, read / device.smem_bytes_per_clock)
            smem_bytes += read
            if beside > 1 or size == 4:  # weights reach those that need them through shared memory
                smem_bytes += (1 + beside) * pairs * size
        loaded = other * (dim_qk + dim_v) * size
        l2_bytes = other * (self._row_bytes + 8)
        smem_bytes += loaded
        issue = pairs * fitted.issue_per_pair / 32 + loaded / 512 * fitted.issue_per_copy + config.num_warps * fitted.issue_per_block
        units = {
            "tensor": tensor,
            "exp": pairs / device.exp_per_clock,
            "issue": issue / 4,
            "smem": smem_bytes / device.smem_bytes_per_clock,
            "l2": l2_bytes / l2_bytes_per_cycle(device, fitted),
        }
        flops = 2.0 * pairs * (dim_qk + dim_v + sum(gathered))
        wait = fitted.portable_backward_latency
        if warpgroups and beside > 1:
            wait += loaded / fitted.beside_rate
        return _Step(pairs=pairs, flops=flops, smem_bytes=smem_bytes, l2_bytes=l2_bytes, units=units, wait=wait)

    def _cycles(self, step: _Step, programs: int, cut_issue: float) -> float:
        """Of an SM, for one step of one program."""
        fitted, units = self.fitted, step.units | {"issue": step.units["issue"] + cut_issue}
        wait = step.wait + spill_wait(self.candidate, self.resources, fitted)
        if not self.hopper:
            return cycles_of_block(fitted, units, wait, programs, self.candidate.config.num_warps)
        # As in a forward hopper kernel two warpgroups fill each other's waits; here they also wait for each other.
        products = contended(units["tensor"], units["smem"], fitted.backward_smem_contention) / 2
        softmax = (units["exp"] + units["issue"]) / 2
        alone = products + softmax + wait
        return max(*units.values(), alone + fitted.warpgroup_meeting * (products**2 + softmax**2) / alone)

    # ---- sums --------------------------------------------------------------------------------------------------------------

    def work(self, loop: _Loop) -> Work:
        fitted, config, masked_apart = self.fitted, self.candidate.config, self.candidate.variant.masked_apart
        step, walked, programs = loop.step, loop.walked, loop.programs
        blocks = loop.heads * loop.rounds * (walked.whole + walked.cut)
        masked = loop.heads * loop.rounds * walked.cut if masked_apart else blocks
        cut_issue = step.pairs * fitted.issue_per_cut_score / 32 / 4
        plain, cut = self._cycles(step, programs, 0.0), self._cycles(step, programs, cut_issue)
        tiles, slots = loop.heads * walked.row_blocks, self.device.num_sms * programs
        latency = fitted.backward_tile_latency * sum(self.dims) if self.hopper else fitted.tile_latency
        if masked_apart:
            latency += max(0.0, walked.loops / max(1, walked.row_blocks) - 1) * fitted.loop_latency
        total = (blocks - masked) * plain + masked * cut + tiles * latency / programs
        # The last program on an SM runs faster than it did among others.
        by_program, by_sm = loop.busiest
        uneven = max(1.0, by_sm, 1 + (by_program - 1) * self._cycles(step, 1, 0.0) / (programs * plain))
        # Heads that are walked together stay in L2 from wave to wave as far as they fit.
        together = min(loop.heads, max(config.head_group, math.ceil(slots / max(1, walked.row_blocks))))
        again = missed(together * loop.walked_bytes, self.device, fitted) * (max(1.0, together * walked.row_blocks / slots) - 1)
        reread_bytes = loop.heads * loop.walked_bytes * again
        dram_bytes = loop.heads * (loop.own_bytes + loop.walked_bytes) + reread_bytes
        sm_hz = self.device.num_sms * hz(self.device, fitted)
        seconds = {unit: blocks * cycles / sm_hz for unit, cycles in step.units.items()}
        seconds["issue"] += masked * cut_issue / sm_hz
        seconds["dram"] = dram_s(dram_bytes, self.device, fitted)
        return Work(
            flops=step.flops * blocks,
            exp_ops=float(step.pairs * blocks),
            smem_bytes=step.smem_bytes * blocks,
            l2_bytes=step.l2_bytes * blocks + loop.heads * loop.own_bytes,
            dram_bytes=dram_bytes,
            seconds=seconds,
            compute_s=total / sm_hz * uneven + fitted.reread_wait * dram_s(reread_bytes, self.device, fitted),
            uneven=uneven,
            waves=tiles / slots,
        )

    def _streamed(self, moved: int) -> Work:
        """So many bytes, each once."""
        return Work(l2_bytes=float(moved), dram_bytes=float(moved), seconds={"dram": dram_s(moved, self.device, self.fitted)})

    def _programs(self, tiles: int) -> int:
        return max(1, min(self.resident, math.ceil(tiles / self.device.num_sms)))

    @property
    def _row_bytes(self) -> int:
        """Of Q and dO, of K and V, or of dk and dv."""
        return (self.problem.head_dim_qk + self.problem.head_dim_v) * self.problem.itemsize

    @property
    def _rows(self) -> int:
        return self.heads_q * self.problem.seqlen_q

    @property
    def _sum_itemsize(self) -> int:
        """Of the sums of dq of a fused kernel."""
        return DTYPES[dq_sum_dtype(self.candidate.variant)]

    @property
    def _scratch_row_bytes(self) -> int:
        """Of these, and of their scale where they are float16."""
        variant = self.candidate.variant
        return self._sum_itemsize * self.dims[0] + 4 * variant.float16_dq if variant.fused else 0
