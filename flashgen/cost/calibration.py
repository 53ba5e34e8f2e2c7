"""The constants of the cost model that are fitted, and to what."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The fitted constants. Cycles are those of one SM, instructions those that one warp issues.

    Fitted to 215 kernels of head dims 64, 128 and 256, full and causal, over 1k to 16k keys, on an H200 (Triton 3.6, 2026-11-29):
    median error 6 %; fitted to three of the four problems, 7 to 9 % on the fourth. Rates without that note are of other measurements.

    Those of hopper kernels were fitted to 234 kernels that searches tried on 36 problems (head dims 64, 128 and 256, full and causal, over
    512 to 16k keys) on an H200 (torch 2.11, Triton 3.6, 2026-12-01): median error 4.1 %, 5.3 % for problems that were left out. From run
    to run the same kernels differ by -8 to 16 %, as clocks do; between candidates of one problem the median error is 1 %.

    Those of backward kernels were fitted to 196 kernels that searches tried on 30 problems (head dims 64, 128 and 256, full and causal,
    over 1k to 16k keys: 116 hopper and 80 portable ones), those of hopper kernels also to a run that took 52 kernels of 12 problems in
    turns, on an H200 (torch 2.11, Triton 3.6, 2026-11-30). Median error 4.4 %, of hopper kernels 3.5 %; for problems that were left out
    5.1 and 3.9 %. Between the two runs the same kernels differed by up to 12 %.
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
    warpgroup_meeting: float = 0.87  # of the time that a warpgroup would wait for units that others use, if they met by chance
    ping_pong_meeting: float = 0.83  # the same where warpgroups take turns
    own_overlap: float = 0.77  # of a warpgroup's P V that runs beside its own softmax, where the order allows it
    smem_contention: float = 4.8  # exponent: products and arrivals slow each other down before shared memory is at its limit
    hopper_tile_latency: float = 12.6  # cycles of a tile outside its loop for each column of Q and V: the first scores, the output
    hopper_q_latency: float = 1200.0  # more, where Q has one buffer: the next tile's Q comes when the last scores are done

    # Backward kernels.
    issue_per_pair: float = 3.65  # a score's exponential and its gradient: difference, product, two conversions
    backward_smem_contention: float = 4.5  # the same exponent where products come in pairs, and score gradients and dq pass by
    exchange_latency: float = 127.0  # cycles of a hopper kernel's step in which its warpgroups hand something over and wait for each other
    reduce_rate: float = 0.89  # of L2's rate, for float32 sums of dq that TMA adds to, and a warpgroup waits for
    backward_tile_latency: float = 15.2  # cycles outside of its loop for each column of Q and V: the first products, dk and dv, or dq
    reread_wait: float = 0.2  # of the time in which DRAM gives what L2 no longer held: nothing covers it
    portable_backward_latency: float = 640.0  # cycles of a portable kernel's step that nothing covers: five products, one after another
    beside_rate: float = 18.0  # bytes a cycle of walked tiles, for which warpgroups that share a block's rows wait


CALIBRATION = Calibration()
