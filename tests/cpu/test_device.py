"""A device that is not in the table gets rates that are not below the truth, so that bounds stay bounds."""

import pytest

from flashgen import theory
from flashgen.device import DEVICES, Device, from_properties
from flashgen.problem import Problem


def reported(**changes):
    values = dict(
        name="NVIDIA A10",
        arch="sm_86",
        num_sms=72,
        dram_bytes=24 * 10**9,
        l2_bytes=6 << 20,
        smem_per_block_bytes=99 << 10,
        smem_per_sm_bytes=100 << 10,
        threads_per_sm=1536,
        clock_hz=1.695e9,
        dram_bytes_per_s=0.0,
    )
    return from_properties(**(values | changes))


@pytest.mark.parametrize(
    ("arch", "num_sms", "clock_hz", "datasheet"),
    [
        ("sm_86", 72, 1.695e9, 125e12),  # A10, dense bf16
        ("sm_86", 84, 1.740e9, 149.7e12),  # A40
        ("sm_86", 84, 1.800e9, 154.8e12),  # RTX A6000
        ("sm_89", 142, 2.520e9, 362e12),  # L40S
        ("sm_120", 188, 2.617e9, 503.8e12),  # RTX PRO 6000
        ("sm_100", 148, 1.850e9, 2250e12),  # B200
    ],
)
def test_tensor_rates_are_at_least_the_datasheets(arch, num_sms, clock_hz, datasheet):
    device = reported(arch=arch, num_sms=num_sms, clock_hz=clock_hz)
    assert device.flops_per_s("bfloat16") >= 0.97 * datasheet


def test_unknown_parts_get_rates_that_no_part_exceeds():
    unknown = reported(arch="sm_130")
    assert unknown.dram_bytes_per_s >= 8e12
    rate_of = {device.name: device.tensor_flops_per_s / device.num_sms / device.max_hz for device in DEVICES.values()}
    assert unknown.tensor_flops_per_s / unknown.num_sms / unknown.max_hz >= max(rate_of.values())
    problem = Problem(batch=1, heads_q=8, heads_kv=8, seqlen_q=1, seqlen_kv=4096, head_dim_qk=128, head_dim_v=128, mask="full")
    assert theory.bound_s(problem, unknown) <= theory.bound_s(problem, Device.named("h200"))


def test_what_the_driver_says_of_memory_is_kept():
    assert reported(dram_bytes_per_s=600e9).dram_bytes_per_s == 600e9
