"""What the driver makes of a Launch: addresses that come again, threads, devices, figures of the loaded kernel, and the cost of a call."""

import dataclasses
import importlib.util
import threading
import time

import pytest
import torch

from flashgen.build import build, export
from flashgen.candidate import Candidate, Config, Variant
from flashgen.device import Device
from flashgen.launch import Launch, prepare
from flashgen.problem import Problem

pytestmark = pytest.mark.gpu
LOADS = [pytest.param("pointer"), pytest.param("tma", marks=pytest.mark.hopper)]
PROBLEM = Problem(
    batch=2, heads_q=4, heads_kv=2, seqlen_q=300, seqlen_kv=420, head_dim_qk=64, head_dim_v=128, mask="causal", return_lse=True
)


def candidate(load: str, **numbers: int) -> Candidate:
    config = Config(**{"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2, **numbers})
    return Candidate(variant=Variant(mask="causal", load=load, store_lse=True), config=config)


def inputs(device: str = "cuda:0") -> list[torch.Tensor]:
    """query, key, value, out and lse."""
    make = lambda heads, seqlen, dim: torch.randn(2, heads, seqlen, dim, device=device, dtype=torch.bfloat16)  # noqa: E731
    out = torch.full((2, 4, 300, 128), float("nan"), device=device, dtype=torch.bfloat16)
    return [make(4, 300, 64), make(2, 420, 64), make(2, 420, 128), out, torch.full((2, 4, 300), float("nan"), device=device)]


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = (tensor.repeat_interleave(2, 1).double() for tensor in (key, value))
    distance = torch.arange(420, device=query.device)[None, :] - torch.arange(300, device=query.device)[:, None]
    scores = (query.double() @ key.mT * scale).masked_fill(distance > 120, float("-inf"))
    return torch.softmax(scores, -1) @ value, torch.logsumexp(scores, -1)


def assert_right(tensors: list[torch.Tensor], scale: float) -> None:
    out, lse = expected(*tensors[:3], scale)
    torch.testing.assert_close(tensors[3].double(), out, rtol=0, atol=2e-2)
    torch.testing.assert_close(tensors[4].double(), lse, rtol=0, atol=2e-3)


def launch_for(load: str, tensors: list[torch.Tensor], **numbers: int) -> Launch:
    device = Device.current(tensors[0].device.index)
    return prepare(build(candidate(load, **numbers), PROBLEM, device), PROBLEM, *tensors, device)


@pytest.mark.parametrize("load", LOADS)
def test_other_contents_at_the_same_addresses(load):
    """A kept descriptor names an address, not what lay there."""
    tensors = inputs()
    launch = launch_for(load, tensors)
    for step in range(3):
        for tensor in tensors[:3]:
            tensor.normal_()
        tensors[3].fill_(float("nan"))
        launch(*tensors, 0.1 * (step + 1))
        assert_right(tensors, 0.1 * (step + 1))
    elsewhere = inputs()
    launch(*elsewhere, 0.125)
    assert_right(elsewhere, 0.125)


@pytest.mark.parametrize("load", LOADS)
def test_from_a_thread_that_never_used_the_gpu(load):
    tensors = inputs()
    launch = launch_for(load, tensors)
    failures = []

    def run() -> None:
        try:
            launch(*tensors, 0.125)
            torch.cuda.synchronize()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert failures == []
    assert_right(tensors, 0.125)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_current(load):
    """I08"""
    kernel = build(candidate(load), PROBLEM, Device.current(1))
    for index in (1, 0):
        tensors = inputs(f"cuda:{index}")
        launch = prepare(kernel, PROBLEM, *tensors, Device.current(index))
        with torch.cuda.device(1 - index):
            launch(*tensors, 0.125)
            assert torch.cuda.current_device() == 1 - index
        assert_right(tensors, 0.125)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("num_sms", [1, 7, 200])
def test_a_persistent_grid_of_any_size(load, num_sms):
    """T25"""
    tensors = inputs()
    device = dataclasses.replace(Device.current(0), num_sms=num_sms)
    prepare(build(candidate(load, persistent=True), PROBLEM, device), PROBLEM, *tensors, device)(*tensors, 0.125)
    assert_right(tensors, 0.125)


@pytest.mark.parametrize("load", LOADS)
def test_the_driver_counts_what_build_counted(load):
    kernel = build(candidate(load, maxnreg=128), PROBLEM, Device.current(0))
    loaded = kernel.on(0)
    assert kernel.resources.registers == loaded.n_regs
    assert kernel.resources.spill_bytes // 4 == loaded.n_spills


@pytest.mark.parametrize("load", LOADS)
def test_a_standalone_file_computes(load, tmp_path):
    tensors = inputs()
    (path,) = export(candidate(load, persistent=True), PROBLEM, Device.current(0), tmp_path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tensors[3], tensors[4] = module.attention(*tensors[:3], scale=0.2)
    assert_right(tensors, 0.2)


@pytest.mark.parametrize("load", LOADS)
def test_a_call_costs_little(load):
    """T18: host time of a call; the limit leaves room for a slow host."""
    tensors = inputs()
    launch = launch_for(load, tensors)
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            launch(*tensors, 0.125)
        best = min(best, time.perf_counter() - begin)
    print(f"{load}: {best / 100 * 1e6:.1f} us a call")
    assert best / 100 < 15e-6
