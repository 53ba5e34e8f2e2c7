"""Counters: a candidate under Nsight Compute, and what the device counted held against what the model predicted.

metrics     which of Nsight Compute's metrics become which figure, and how its answer is read
ncu         its command line: found, run, and understood where it refuses
driver      what runs under it: one candidate, checked, warmed up, then called once while counters run
comparison  predicted against counted, and the paper's traffic against what DRAM moved
"""

from flashgen.counters.comparison import Comparison, Medians, compare, medians
from flashgen.counters.ncu import CACHES, Counted, Ncu

__all__ = ["CACHES", "Comparison", "Counted", "Medians", "Ncu", "compare", "medians"]
