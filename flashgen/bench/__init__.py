"""Bench: kernels to times, under one policy for candidates, incumbents and peers alike.

Cold L2 before every call, CUDA events, launch cost hidden, a GPU warmed up to its steady state, rounds interleaved in an order
that chance changes, medians corrected for drift by the reference that ran in the same rounds. `POLICY` says so in a sentence for reports.
"""

from flashgen.bench.comparison import Call, Gpu, Policy, Times, best, compare, warm_up
from flashgen.bench.libraries import libraries, library, require_libraries
from flashgen.bench.measuring import POLICY, Bench, CudaGpu
from flashgen.bench.sdpa import peer, peers
from flashgen.bench.state import Conditions, Lock, conditions

__all__ = [
    "POLICY",
    "Bench",
    "Call",
    "Conditions",
    "CudaGpu",
    "Gpu",
    "Lock",
    "Policy",
    "Times",
    "best",
    "compare",
    "conditions",
    "libraries",
    "library",
    "peer",
    "peers",
    "require_libraries",
    "warm_up",
]
