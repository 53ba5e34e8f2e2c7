"""The closed forms: how much data attention moves, how long it takes by the roofline, and the time no kernel can beat.

Conventions of the model, in elements for one head of one sequence:

    forward    standard attention   4 N d + 4 N^2           Q, K, V, O once; the scores written and read, and again as probabilities
               FlashAttention       4 N d + 2 N^2 d^2 / M   K and V once for each block of Q rows that fits on chip
    backward   standard attention   7 N d + 7 N^2           Q, K, V, dO, dQ, dK, dV once; the probabilities read twice, their gradients
                                                            written and read, the scores' written and read twice
               FlashAttention       8 N d + 4 N^2 d^2 / M   O, too; Q and dO read, dQ read and written for each block of K rows that fits

N is the sequence length, d the head size and M the on-chip memory in elements. The orders are Dao, Fu, Ermon, Rudra and Re,
"FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness" (2022), Theorems 2 and 5, which hold for d <= M <= N d; the
constants are this model's. Under a causal mask FlashAttention leaves out half of what grows with N^2, while standard attention computes
all scores before it masks them. Forward both do 4 N^2 d floating-point operations. Backward the standard does 8 N^2 d, four products, and
FlashAttention 10 N^2 d, with the scores anew.
"""

from dataclasses import dataclass

from flashgen.device import Device
from flashgen.errors import ArgumentError
from flashgen.problem import DIRECTIONS, Problem


def standard_elements(seqlen: int, head_dim: int, direction: str = "forward") -> int:
    """Elements that standard attention moves between DRAM and the chip, per head: 4 N d + 4 N^2, backward 7 N d + 7 N^2."""
    passes = 4 if direction == "forward" else 7
    return passes * seqlen * head_dim + passes * seqlen**2


def flash_elements(seqlen: int, head_dim: int, sram_elements: float, direction: str = "forward", causal: bool = False) -> float:
    """Elements that FlashAttention moves between DRAM and the chip, per head: 4 N d + 2 N^2 d^2 / M, backward 8 N d + 4 N^2 d^2 / M
    (M: elements on chip); causal half of the second term."""
    once, again = (4, 2) if direction == "forward" else (8, 4)
    if causal:
        again //= 2
    return once * seqlen * head_dim + again * seqlen**2 * head_dim**2 / sram_elements


def standard_flops(seqlen: int, head_dim: int, direction: str = "forward") -> int:
    """Floating-point operations of standard attention's matrix products, per head: 4 N^2 d, backward 8 N^2 d."""
    return (4 if direction == "forward" else 8) * seqlen**2 * head_dim


def flash_flops(seqlen: int, head_dim: int, direction: str = "forward", causal: bool = False) -> int:
    """The same of FlashAttention, which computes the scores once more on the way back: 4 N^2 d, backward 10 N^2 d; causal half of it."""
    return (4 if direction == "forward" else 10) * seqlen**2 * head_dim // (2 if causal else 1)


def score_bytes(seqlen: int, element_bytes: int = 2) -> int:
    """Bytes of one head's N x N matrix of scores, which standard attention stores."""
    return seqlen**2 * element_bytes


def roofline(flops: float, moved_bytes: float, device: Device, dtype: str = "bfloat16") -> float:
    """Seconds for this work at the device's datasheet peaks, if arithmetic and DRAM traffic overlap perfectly."""
    return max(flops / device.flops_per_s(dtype), moved_bytes / device.dram_bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class LayerModel:
    """The model's figures for one layer: elements per head, times and score bytes over all heads."""

    standard_elements: int
    flash_elements: float
    traffic_ratio: float
    standard_time_s: float
    flash_time_s: float
    time_ratio: float
    score_bytes: int


def layer(
    seqlen: int,
    head_dim: int,
    heads: int,
    device: Device,
    sram_bytes: float | None = None,
    element_bytes: int = 2,
    direction: str = "forward",
    causal: bool = False,
) -> LayerModel:
    """The model for one layer of `heads` heads over one sequence of `seqlen` tokens, in one direction.

    sram_bytes is the on-chip memory that FlashAttention may fill, by default one SM's shared memory (228 KiB on an H100, which is
    M = 116 736 elements of 2 bytes). Elements of 4 bytes run at the device's fp32 rate, smaller ones at its tensor rate. Raises
    ArgumentError naming the argument.
    """
    sram_bytes = device.smem_per_sm_bytes if sram_bytes is None else sram_bytes
    given = {"seqlen": seqlen, "head_dim": head_dim, "heads": heads, "sram_bytes": sram_bytes, "element_bytes": element_bytes}
    for name, value in given.items():
        if not value > 0:
            raise ArgumentError(f"{name} is {value!r}; it must be above 0")
    if direction not in DIRECTIONS:
        raise ArgumentError(f"direction is {direction!r}; it must be one of {', '.join(DIRECTIONS)}")
    standard = standard_elements(seqlen, head_dim, direction)
    flash = flash_elements(seqlen, head_dim, sram_bytes / element_bytes, direction, causal)
    dtype = "float32" if element_bytes >= 4 else "bfloat16"
    standard_time = roofline(heads * standard_flops(seqlen, head_dim, direction), heads * standard * element_bytes, device, dtype)
    flash_time = roofline(heads * flash_flops(seqlen, head_dim, direction, causal), heads * flash * element_bytes, device, dtype)
    return LayerModel(
        standard_elements=standard,
        flash_elements=flash,
        traffic_ratio=standard / flash,
        standard_time_s=standard_time,
        flash_time_s=flash_time,
        time_ratio=standard_time / flash_time,
        score_bytes=heads * score_bytes(seqlen, element_bytes),
    )


def compulsory_read_bytes(problem: Problem) -> int:
    """Bytes that every kernel must read: queries that see a key, and keys and values that some query sees, once.

    Backward reads out, dout, the log-sum-exp and dlse of those queries, too.
    """
    low, high = problem.band
    seqlen_q, seqlen_kv = problem.seqlen_q, problem.seqlen_kv
    # Query i sees keys i + low .. i + high, so both the queries with a key and the keys with a query are one range.
    first_query = 0 if high is None else max(0, -high)
    last_query = seqlen_q - 1 if low is None else min(seqlen_q - 1, seqlen_kv - 1 - low)
    first_key = 0 if low is None else max(0, low)
    last_key = seqlen_kv - 1 if high is None else min(seqlen_kv - 1, seqlen_q - 1 + high)
    if problem.visible_pairs == 0:
        return 0
    row_bytes = problem.head_dim_qk * problem.itemsize
    if problem.direction == "backward":
        row_bytes += 2 * problem.head_dim_v * problem.itemsize + (8 if problem.return_lse else 4)
    queries = problem.heads_q * (last_query - first_query + 1) * row_bytes
    keys_and_values = problem.heads_kv * (last_key - first_key + 1) * (problem.head_dim_qk + problem.head_dim_v) * problem.itemsize
    return problem.batch * (queries + keys_and_values)


def compulsory_write_bytes(problem: Problem) -> int:
    """Bytes that every kernel must write: the output, and 4 a row for the log-sum-exp where it is asked for; backward: dq, dk and dv."""
    if problem.direction == "backward":
        queries = problem.heads_q * problem.seqlen_q * problem.head_dim_qk
        keys_and_values = problem.heads_kv * problem.seqlen_kv * (problem.head_dim_qk + problem.head_dim_v)
        return problem.batch * (queries + keys_and_values) * problem.itemsize
    lse_bytes = 4 if problem.return_lse else 0
    return problem.batch * problem.heads_q * problem.seqlen_q * (problem.head_dim_v * problem.itemsize + lse_bytes)


def compulsory_bytes(problem: Problem) -> int:
    """Bytes that every kernel must read or write once."""
    return compulsory_read_bytes(problem) + compulsory_write_bytes(problem)


def bound_s(problem: Problem, device: Device) -> float:
    """Seconds that no kernel can beat on a cold L2: the visible pairs' flops at the highest clock, or the inputs through DRAM.

    Writes do not count: an output may still lie in L2 when the kernel ends. Never above the truth, so it may rule a candidate out.
    """
    highest_rate = device.flops_per_s(problem.dtype) * max(1.0, device.max_hz / device.boost_hz)
    return max(problem.flops / highest_rate, compulsory_read_bytes(problem) / device.dram_bytes_per_s)
