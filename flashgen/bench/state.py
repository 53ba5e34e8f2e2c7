"""The state of a GPU while it is measured, and the lock that keeps it to one flashgen process at a time."""

import contextlib
import fcntl
import functools
import importlib
import logging
import os
import subprocess
import tempfile
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Bits of nvmlDeviceGetCurrentClocksEventReasons, but for idle (1), which is no throttling.
THROTTLE_REASONS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}
SMI_FIELDS = ("clocks.sm", "power.draw", "temperature.gpu", "utilization.gpu", "clocks_event_reasons.active")
SMI_TIMEOUT_S = 5


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What the driver reports; None is what it does not."""

    sm_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    utilization_percent: float | None = None
    throttle: tuple[str, ...] | None = None


def conditions(index: int) -> Conditions:
    """Conditions of the CUDA device with this index: by NVML's Python binding where it is installed, else by nvidia-smi."""
    uuid = gpu_uuid(index)
    if uuid is None:
        return Conditions()
    nvml = _nvml()
    return _by_smi(uuid) if nvml is None else _by_nvml(nvml, uuid)


def gpu_uuid(index: int) -> str | None:
    """The identity of a GPU whatever CUDA_VISIBLE_DEVICES says, such as GPU-6f2a...; None where torch does not know it."""
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


class Lock:
    """Exclusive use of something among processes: a file lock, which also ends when its process is killed. May be nested."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._threads = threading.RLock()
        self._depth = 0
        self._file: int | None = None

    @classmethod
    def of_gpu(cls, index: int) -> "Lock":
        """The lock of a GPU, one and the same for all users of the machine."""
        return cls(Path(tempfile.gettempdir(), f"flashgen-{gpu_uuid(index) or f'GPU-{index}'}.lock"))

    def __enter__(self) -> "Lock":
        self._threads.acquire()
        try:
            if self._depth == 0:
                self._file = self._locked()
            self._depth += 1
        except BaseException:
            self._threads.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0 and self._file is not None:
            os.close(self._file)
            self._file = None
        self._threads.release()

    def _locked(self) -> int | None:
        """An open and locked file; None where it cannot be had, which is no reason not to measure."""
        try:
            file = _opened(self.path)
        except OSError as error:
            logger.warning("no lock on %s (%s): other processes may measure at the same time", self.path, error.strerror)
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that measures on this GPU (%s)", self.path)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except BaseException:
                os.close(file)
                raise
        except OSError as error:
            os.close(file)
            logger.warning("no lock on %s (%s): other processes may measure at the same time", self.path, error.strerror)
            return None
        return file


def _opened(path: Path) -> int:
    """Other users' files in a sticky directory may be opened, but not with O_CREAT."""
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with contextlib.suppress(OSError):
        os.fchmod(file, 0o644)
    return file


@functools.cache
def _nvml() -> Any:
    """The initialised module pynvml, or None."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # not installed, or no driver: any error of that package
        logger.debug("NVML is not available: %s", error)
        return None
    return nvml


def _by_nvml(nvml: Any, uuid: str) -> Conditions:
    def read(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):  # not supported by this GPU, driver or binding
            return None

    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        logger.debug("NVML does not know %s: %s", uuid, error)
        return Conditions()
    clock, power, load = (
        read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        read("nvmlDeviceGetPowerUsage"),
        read("nvmlDeviceGetUtilizationRates"),
    )
    temperature = read("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
    reasons = read("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = read("nvmlDeviceGetCurrentClocksThrottleReasons")
    return Conditions(
        sm_clock_mhz=None if clock is None else float(clock),
        power_w=None if power is None else power / 1000,
        temperature_c=None if temperature is None else float(temperature),
        utilization_percent=None if load is None else float(load.gpu),
        throttle=None if reasons is None else _reasons(reasons),
    )


def _by_smi(uuid: str) -> Conditions:
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("nvidia-smi did not answer: %s", error)
        return Conditions()
    return _parsed(answer)


def _parsed(answer: str) -> Conditions:
    """Conditions of one line of nvidia-smi's table; fields that are not supported read [N/A]."""
    fields = [field.strip() for field in answer.strip().split(",")]
    if len(fields) != len(SMI_FIELDS):
        return Conditions()

    def number(text: str) -> float | None:
        with contextlib.suppress(ValueError):
            return float(text)
        return None

    clock, power, temperature, load = map(number, fields[:4])
    reasons = None
    with contextlib.suppress(ValueError):
        reasons = _reasons(int(fields[4], 16))
    return Conditions(sm_clock_mhz=clock, power_w=power, temperature_c=temperature, utilization_percent=load, throttle=reasons)


def _reasons(bits: int) -> tuple[str, ...]:
    return tuple(words for bit, words in THROTTLE_REASONS.items() if bits & bit)
