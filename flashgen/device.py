"""Device: limits and peak rates of the GPUs that flashgen targets, with their sources.

Sources. Rates, memory and bandwidth: NVIDIA's datasheets (H100 Tensor Core GPU, 2023; H100 NVL, 2024; H200, 2024; A100, 2021),
dense figures. Per-SM limits: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability". Special-function
and shared-memory rates: the same guide's "Arithmetic Instructions" table (16 results of the exp2 unit, 32 banks of 4 bytes a
clock). H200's L2 size: what the driver reports (60 MB). L2 bandwidths: Chips and Cheese's measurements on the H100 PCIe
(5.5-7 TB/s, 2023) and A100, scaled by SMs and clock; no vendor states them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flashgen import canonical
from flashgen.errors import ArgumentError, UnsupportedError

KIB, MIB, GB = 1024, 1024**2, 10**9


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of GPU. Peak rates hold at boost_hz, the clock of the datasheet; max_hz is the highest clock the part can run at.

    tensor_flops_per_s is for bf16 and fp16 with fp32 accumulation, dense; fp32_flops_per_s for the ordinary cores, which is
    what IEEE fp32 products run on. smem_bytes_per_clock and exp_per_clock are per SM.
    """

    name: str
    arch: str
    num_sms: int
    smem_per_block_bytes: int
    smem_per_sm_bytes: int
    registers_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    l2_bytes: int
    dram_bytes: int
    dram_bytes_per_s: float
    l2_bytes_per_s: float
    tensor_flops_per_s: float
    fp32_flops_per_s: float
    boost_hz: float
    max_hz: float
    exp_per_clock: int = 16
    smem_bytes_per_clock: int = 128

    @cached_property
    def key(self) -> str:
        """The identity under which measurements are stored: architecture, SMs, and classes of memory; the name only informs."""
        dram_gb = round(self.dram_bytes / GB / 8) * 8
        dram_tb_per_s = round(self.dram_bytes_per_s / 1e11) / 10
        return f"{self.arch}-{self.num_sms}sm-{dram_gb}gb-{dram_tb_per_s:g}tbs-{self.smem_per_block_bytes // KIB}kib"

    @property
    def capability(self) -> int:
        """The architecture as a number: 90 for sm_90."""
        return int(self.arch.removeprefix("sm_").rstrip("a"))

    @property
    def has_tma(self) -> bool:
        """The bulk tensor copy engine exists from sm_90 on."""
        return self.capability >= 90

    def flops_per_s(self, dtype: str) -> float:
        """Peak rate of the unit that multiplies matrices of this dtype, FLOP/s at boost_hz (fp32 in IEEE precision)."""
        return self.fp32_flops_per_s if dtype == "float32" else self.tensor_flops_per_s

    @classmethod
    def named(cls, name: str) -> "Device":
        """A device of the table below by its short name (h100, h200, a100 ...). Raises ArgumentError listing the names."""
        short = name.lower().replace("-", "_")
        if short not in DEVICES:
            raise ArgumentError(f"device is {name!r}; it must be one of {', '.join(DEVICES)}")
        return DEVICES[short]

    @classmethod
    def current(cls, index: int | None = None) -> "Device":
        """The CUDA device with this index (None: torch's current one), matched to the table by its properties.

        Raises UnsupportedError where there is none, or it is not a CUDA device of sm_80 or later.
        """
        import torch

        if not torch.cuda.is_available():
            raise UnsupportedError("there is no CUDA device here; name a device to work without one, such as h200")
        if torch.version.hip is not None:
            raise UnsupportedError("flashgen needs an NVIDIA GPU, and this PyTorch drives an AMD one")
        properties = torch.cuda.get_device_properties(index)
        if (properties.major, properties.minor) < (8, 0):
            raise UnsupportedError(f"{properties.name} is sm_{properties.major}{properties.minor}; flashgen needs sm_80 or later")
        return from_properties(
            name=properties.name,
            arch=f"sm_{properties.major}{properties.minor}",
            num_sms=properties.multi_processor_count,
            dram_bytes=properties.total_memory,
            l2_bytes=properties.L2_cache_size,
            smem_per_block_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
            smem_per_sm_bytes=properties.shared_memory_per_multiprocessor,
            threads_per_sm=properties.max_threads_per_multi_processor,
            clock_hz=getattr(properties, "clock_rate", 1_500_000) * 1e3,
            dram_bytes_per_s=2.0 * getattr(properties, "memory_clock_rate", 0) * 1e3 * getattr(properties, "memory_bus_width", 0) / 8,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Device":
        """The device whose stored form is data. Raises ArgumentError."""
        return canonical.from_dict(cls, data)


def _hopper(name: str, **figures: Any) -> Device:
    limits: dict[str, Any] = dict(
        arch="sm_90",
        num_sms=132,
        smem_per_block_bytes=227 * KIB,
        smem_per_sm_bytes=228 * KIB,
        registers_per_sm=65536,
        threads_per_sm=2048,
        blocks_per_sm=32,
        l2_bytes=50 * MIB,
        l2_bytes_per_s=7.0e12,
        tensor_flops_per_s=989e12,
        fp32_flops_per_s=67e12,
        boost_hz=1.83e9,
        max_hz=1.98e9,
    )
    return Device(name=name, **(limits | figures))


def _a100(name: str, dram_bytes: int, dram_bytes_per_s: float) -> Device:
    return Device(
        name=name,
        arch="sm_80",
        num_sms=108,
        smem_per_block_bytes=163 * KIB,
        smem_per_sm_bytes=164 * KIB,
        registers_per_sm=65536,
        threads_per_sm=2048,
        blocks_per_sm=32,
        l2_bytes=40 * MIB,
        dram_bytes=dram_bytes,
        dram_bytes_per_s=dram_bytes_per_s,
        l2_bytes_per_s=4.5e12,
        tensor_flops_per_s=312e12,
        fp32_flops_per_s=19.5e12,
        boost_hz=1.41e9,
        max_hz=1.41e9,
    )


# h100 means the SXM part.
DEVICES: dict[str, Device] = {
    "h100": _hopper("NVIDIA H100 80GB HBM3", dram_bytes=80 * GB, dram_bytes_per_s=3.35e12),
    "h100_pcie": _hopper(
        "NVIDIA H100 PCIe",
        num_sms=114,
        dram_bytes=80 * GB,
        dram_bytes_per_s=2.04e12,
        l2_bytes_per_s=5.7e12,
        tensor_flops_per_s=756e12,
        fp32_flops_per_s=51e12,
        boost_hz=1.62e9,
        max_hz=1.755e9,
    ),
    "h100_nvl": _hopper(
        "NVIDIA H100 NVL",
        dram_bytes=94 * GB,
        dram_bytes_per_s=3.94e12,
        tensor_flops_per_s=835e12,
        fp32_flops_per_s=60e12,
        boost_hz=1.545e9,
        max_hz=1.785e9,
    ),
    "h200": _hopper("NVIDIA H200", l2_bytes=60 * MIB, dram_bytes=144 * GB, dram_bytes_per_s=4.8e12),
    "a100": _a100("NVIDIA A100-SXM4-80GB", 80 * GB, 2.039e12),
    "a100_40gb": _a100("NVIDIA A100-SXM4-40GB", 40 * GB, 1.555e12),
}


def from_properties(
    *,
    name: str,
    arch: str,
    num_sms: int,
    dram_bytes: int,
    l2_bytes: int,
    smem_per_block_bytes: int,
    smem_per_sm_bytes: int,
    threads_per_sm: int,
    clock_hz: float,
    dram_bytes_per_s: float,
) -> Device:
    """The device of the table with these properties, else one made of what the driver reports.

    A part matches by architecture, SM count and memory size (within 12 %): names change between drivers, boards and clouds. A
    partition of a GPU (MIG) has fewer SMs and so never matches. dram_bytes_per_s of 0 means that the driver does not say.
    """
    for known in DEVICES.values():
        same_memory = abs(dram_bytes - known.dram_bytes) <= 0.12 * known.dram_bytes
        if (arch, num_sms) == (known.arch, known.num_sms) and same_memory and not _names_another(name, known):
            return known
    # Of parts of one architecture the faster (GeForce halves fp32 accumulation on sm_86 to sm_120), of unknown ones the fastest known:
    # bounds that follow from these rates must not be above the truth.
    capability = int(arch.removeprefix("sm_").rstrip("a"))
    tensor_flops_per_clock = {80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 103: 8192, 120: 2048}.get(capability, 8192)
    fp32_flops_per_clock = 128 if capability == 80 else 256
    return Device(
        name=name,
        arch=arch,
        num_sms=num_sms,
        smem_per_block_bytes=smem_per_block_bytes,
        smem_per_sm_bytes=smem_per_sm_bytes,
        registers_per_sm=65536,
        threads_per_sm=threads_per_sm,
        blocks_per_sm={80: 32, 86: 16, 89: 24}.get(capability, 32),
        l2_bytes=l2_bytes,
        dram_bytes=dram_bytes,
        dram_bytes_per_s=dram_bytes_per_s or 8e12,  # of a B200
        l2_bytes_per_s=num_sms * 32 * clock_hz,
        tensor_flops_per_s=float(tensor_flops_per_clock) * num_sms * clock_hz,
        fp32_flops_per_s=float(fp32_flops_per_clock) * num_sms * clock_hz,
        boost_hz=clock_hz,
        max_hz=clock_hz,
    )


def _names_another(name: str, known: Device) -> bool:
    """NVL and SXM boards of one memory size differ in clocks and bandwidth, and only the name tells them apart."""
    return ("NVL" in name) != ("NVL" in known.name) and known.arch == "sm_90"
