"""Made-up rows for tests of what is done with rows."""

import random
from typing import Any

from flashgen import cost, space
from flashgen.candidate import Candidate, Config, Variant
from flashgen.device import Device
from flashgen.problem import Problem
from flashgen.record import Estimate, Measurement, Peer, Provenance, Record, Resources, Status

H200 = Device.named("h200")


def problem(**changes: Any) -> Problem:
    """A causal bf16 problem of 16k tokens."""
    values: dict[str, Any] = dict(
        batch=4, heads_q=16, heads_kv=16, seqlen_q=4096, seqlen_kv=4096, head_dim_qk=128, head_dim_v=128, mask="causal"
    )
    return Problem(**(values | changes))


def provenance(second: int = 0, **changes: str) -> Provenance:
    """This many seconds after the hour."""
    values = dict(flashgen="0.1.0", torch="2.11.0", triton="3.6.0", cuda="13.0", driver="580.1", gpu="NVIDIA H200")
    return Provenance(**values | {"utc": f"2026-11-29T{10 + second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}Z"} | changes)


def record(
    median_us: float | None = None,
    *,
    of: Problem | None = None,
    candidate: Candidate | None = None,
    status: Status = Status.OK,
    message: str = "",
    predicted_us: float | None = None,
    second: int = 0,
) -> Record:
    """One trial; OK with a time, or another status without one."""
    of = of or problem()
    return Record(
        problem=of,
        device=H200,
        candidate=candidate or space.default(of, H200),
        estimate=None if predicted_us is None else estimate(predicted_us),
        measurement=Measurement(
            status=status if median_us is None else Status.OK,
            median_us=median_us,
            times_us=() if median_us is None else (median_us,),
            spread_us=None if median_us is None else median_us / 100,
            error=1e-3,
            tolerance=4e-3,
            resources=Resources(registers=200, spill_bytes=0, smem_bytes=131072, binary_sha256="ab" * 32),
            message=message,
        ),
        provenance=provenance(second),
        source_sha256="cd" * 32,
    )


def peer(name: str, median_us: float, of: Problem | None = None, *, second: int = 0) -> Record:
    """A measured implementation that is not flashgen's."""
    return Record(
        problem=of or problem(),
        device=H200,
        peer=Peer(name=name, version="9.19"),
        measurement=Measurement(status=Status.OK, median_us=median_us, times_us=(median_us,)),
        provenance=provenance(second),
    )


def estimate(us: float) -> Estimate:
    """An estimate of this many microseconds; everything else is made up."""
    return Estimate(
        flops=1e12,
        dram_bytes=1e8,
        l2_bytes=1e9,
        smem_bytes=1e10,
        exp_ops=1e9,
        tensor_s=us * 0.9e-6,
        exp_s=us * 0.5e-6,
        smem_s=us * 0.4e-6,
        l2_s=us * 0.3e-6,
        dram_s=us * 0.2e-6,
        programs_per_sm=1,
        waves=3.9,
        time_s=us * 1e-6,
        bound_s=us * 0.3e-6,
        bound="tensor",
    )


def candidates(count: int) -> list[Candidate]:
    """Different candidates, the same every time."""
    configs = [
        Config(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages, head_group=group, persistent=persistent)
        for group in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for block_m in (64, 128)
        for block_n in (32, 64, 128)
        for num_warps in (4, 8)
        for num_stages in (1, 2, 3, 4, 5)
        for persistent in (False, True)
    ]
    variants = [Variant(mask="causal", load=load, longest_first=first) for load in ("pointer", "tma") for first in (False, True)]
    return [Candidate(variant=variant, config=config) for config in configs for variant in variants][:count]


def search(count: int, of: Problem | None = None, seed: int = 0) -> list[Record]:
    """The rows of a search: the default, good and failed trials, and SDPA's backends."""
    random_ = random.Random(seed)
    of = of or problem()
    least = cost.estimate(space.default(of, H200), of, H200).bound_s * 1e6
    rows = [record(least * 3, of=of, predicted_us=least * 2.5)]
    failures = (
        (Status.OUT_OF_RESOURCES, "smem: needs 262144 bytes, h200 has 232448"),
        (Status.COMPILE_ERROR, "ptxas said </script><script>alert(1)</script> & more"),
        (Status.TIMEOUT, "no answer in 20 s"),
    )
    for second, candidate in enumerate(candidates(count - 1), start=1):
        predicted = least * random_.uniform(1.5, 6)
        if random_.random() < 0.2:
            status, message = random_.choice(failures)
            rows.append(record(of=of, candidate=candidate, status=status, message=message, predicted_us=predicted, second=second))
        else:
            us = predicted * random_.uniform(1.1, 1.4)
            rows.append(record(us, of=of, candidate=candidate, predicted_us=predicted, second=second))
    return rows + [peer(name, least * factor, of) for name, factor in (("cudnn", 1.9), ("flash", 3.2), ("math", 60.0))]


def predictions(count: int, of: Problem | None = None) -> list[Record]:
    """What is stored where nothing could be measured."""
    return [
        record(of=of, candidate=candidate, status=Status.PREDICTED, predicted_us=100.0 + place)
        for place, candidate in enumerate(candidates(count))
    ]
