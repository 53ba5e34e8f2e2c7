"""Oracle, check and bench on a real GPU."""

import time

import pytest
import torch

from flashgen import bench, check, reference
from flashgen.problem import Problem

pytestmark = pytest.mark.gpu


def test_the_oracle_is_quick_and_small():
    """16384 tokens of 16 heads in a second or so on an H200, and in less than 2 GB beyond inputs and result."""
    problem = Problem(batch=1, heads_q=16, heads_kv=16, seqlen_q=16384, seqlen_kv=16384, head_dim_qk=128, head_dim_v=128)
    tensors = check.inputs(problem, "cuda", 0)
    reference.attention(*(tensor[:, :1, :2048] for tensor in tensors))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    out, _ = reference.attention(*tensors)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    scratch = torch.cuda.max_memory_allocated() - before - out.numel() * out.itemsize
    print(f"oracle: {seconds:.2f} s, {scratch / 1e9:.2f} GB of scratch")
    assert scratch < 2e9
    if torch.cuda.get_device_capability() == (9, 0):
        assert seconds < 2


def test_small_kernels_are_told_apart():
    """O11, O15: copies that take a few microseconds, behind launches that take the host as long, with a cold L2."""
    source = torch.randn(2**24, device="cuda")  # 64 MB
    target = torch.empty_like(source)
    copies = {f"{size}": lambda size=size: target[:size].copy_(source[:size]) for size in (2**20, 2**21, 2**22)}
    a_bench = bench.Bench(torch.cuda.current_device())
    times = a_bench.compare(copies, policy=bench.Policy(drop_ratio=100))
    medians = [times[name].median_us for name in copies]
    print("copies of 4, 8 and 16 MB:", medians, "us;", a_bench.conditions(), "busy", a_bench.busy)
    assert medians == sorted(medians) and medians[2] > 1.25 * medians[1]  # 13.2 and 8.8 us were seen
    assert medians[2] > 2 * 4 * 2**22 / 5e12 * 1e6  # faster than that would be a warm L2
    assert medians[0] < 20  # the launch alone takes the host about as long


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_peers_pass_the_check(mask, layout):
    """The tolerance has room for PyTorch's own kernels, and none for a result that is 1 % too large."""
    problem = Problem(
        batch=2, heads_q=8, heads_kv=8, seqlen_q=1024, seqlen_kv=1024, head_dim_qk=128, head_dim_v=128, mask=mask, layout=layout
    )
    case = check.prepare(problem, "cuda", 0)
    calls = bench.peers(problem, case.query, case.key, case.value, case.scale)
    assert {"flash", "math"} <= set(calls)
    for name, call in calls.items():
        out = call()
        assert check.judge(out, None, case).ok, (name, check.judge(out, None, case).message)
        assert not check.judge(out * 1.01, None, case).ok
