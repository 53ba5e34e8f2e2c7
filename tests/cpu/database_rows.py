"""Records for the tests of the database: small, plausible, and different where a test says so."""

from dataclasses import replace
from typing import Any

from flashgen.candidate import Candidate, Config, Variant
from flashgen.device import Device
from flashgen.problem import Problem
from flashgen.record import Counters, Estimate, FunctionCounters, Measurement, Peer, Provenance, Record, Resources, Status

H200, H100, A100 = Device.named("h200"), Device.named("h100"), Device.named("a100")
PROBLEM = Problem(batch=4, heads_q=16, heads_kv=16, seqlen_q=4096, seqlen_kv=4096, head_dim_qk=128, head_dim_v=128, mask="causal")
SOURCE = "5" * 64


def candidate(block_m: int = 128, **numbers: Any) -> Candidate:
    config = Config(**{"block_m": block_m, "block_n": 64, "num_warps": 8, "num_stages": 3, **numbers})
    return Candidate(variant=Variant(mask="causal", load="tma"), config=config)


def record(
    median_us: float | None = 300.0,
    *,
    block_m: int = 128,
    problem: Problem = PROBLEM,
    device: Device = H200,
    status: Status = Status.OK,
    utc: str = "2026-11-29T12:00:00Z",
    origin: str = "local",
    peer: str | None = None,
    source: str = SOURCE,
    registers: int = 168,
    smem_bytes: int = 131072,
) -> Record:
    """A measured candidate; a failed one for any status but ok; a peer if named."""
    ok = status is Status.OK
    resources = Resources(registers=registers, spill_bytes=0, smem_bytes=smem_bytes, binary_sha256="b" * 64, instructions={"HGMMA": 64})
    estimate = Estimate(
        **dict.fromkeys(("flops", "dram_bytes", "l2_bytes", "smem_bytes", "exp_ops"), 1e9),
        **dict.fromkeys(("tensor_s", "exp_s", "smem_s", "l2_s", "dram_s", "time_s", "bound_s"), 1e-4),
        programs_per_sm=1,
        waves=1.5,
        bound="tensor",
    )
    return Record(
        problem=problem,
        device=device,
        candidate=None if peer else candidate(block_m),
        peer=Peer(name=peer, version="9.10") if peer else None,
        estimate=None if peer else estimate,
        measurement=Measurement(
            status=status,
            times_us=(median_us, median_us + 0.1) if ok and median_us is not None else (),
            median_us=median_us if ok else None,
            error=1e-3 if ok else None,
            tolerance=1e-2 if ok else None,
            resources=None if peer else resources,
            message="" if ok else f"ended as {status.value}",
            counters=Counters(functions=(FunctionCounters(name="attention_forward", time_us=300.0, stalls={"wait": 1.5}),))
            if status is Status.COUNTED
            else None,
        ),
        provenance=Provenance(
            flashgen="0.1.0", torch="2.13.0", triton="3.6.0", cuda="13.0", driver="580.1", gpu="NVIDIA H200", utc=utc, origin=origin
        ),
        source_sha256="" if peer else source,
    )


def other_problem(number: int) -> Problem:
    return replace(PROBLEM, seqlen_q=1024 + number, seqlen_kv=1024 + number)
