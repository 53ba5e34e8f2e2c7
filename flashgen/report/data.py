"""The report as plain JSON types: for machines, and for the page's script to draw."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from flashgen import canonical, cost, space, theory
from flashgen.counters.comparison import paper_bytes
from flashgen.device import Device
from flashgen.record import Estimate, Record
from flashgen.render import render
from flashgen.report.commands import commands
from flashgen.report.comparison import Comparison
from flashgen.report.limits import NAMES
from flashgen.report.summary import Summary, describe, label, summarize, time_us

SEQLENS = tuple(2**power for power in range(8, 18))


def data(records: Iterable[Record], comparison: Comparison | None = None) -> dict[str, Any]:
    """An entry for each problem, and the comparison, if there is one; units are in the names."""
    return data_of(summarize(records), comparison)


def data_of(summaries: Sequence[Summary], comparison: Comparison | None = None) -> dict[str, Any]:
    """The same of rows that are summarized already."""
    return {
        "problems": [_problem(summary, summaries) for summary in summaries],
        "comparison": None if comparison is None else _comparison(comparison),
    }


def place(summary: Summary) -> str:
    """The identity of a problem on a device, short enough for an address."""
    return f"{summary.problem.key[:12]}-{summary.device.key}"


def provenance(summaries: Sequence[Summary]) -> dict[str, str]:
    """Where the rows come from: every GPU and version among them, and the first and last day."""
    records = [record for summary in summaries for record in (*summary.trials, *summary.peers)]
    seen = {
        name: ", ".join(sorted({getattr(record.provenance, name) for record in records} - {""}))
        for name in ("gpu", "flashgen", "torch", "triton", "cuda", "driver")
    }
    days = sorted({record.provenance.utc[:10] for record in records})
    seen["date"] = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else ""
    return {name: value for name, value in seen.items() if value}


def _problem(summary: Summary, summaries: Sequence[Summary]) -> dict[str, Any]:
    problem = summary.problem
    return {
        "id": place(summary),
        "title": str(problem),
        "problem": canonical.to_dict(problem),
        "direction": problem.direction,
        "device": summary.device.name,
        "predicted_only": summary.is_predicted_only,
        "flops": problem.flops,
        "seqlen": problem.seqlen_kv,
        "roofline_us": summary.roofline_us,
        "roofline_tflops": summary.roofline_tflops,
        "winner": None if summary.winner is None else _winner(summary, summary.winner),
        "why_not_faster": summary.why_not_faster,
        "limit": _limit(summary),
        "contenders": [
            {"name": name, "us": time_us(record), "tflops": summary.tflops(record), "what": describe(record)}
            for name, record in summary.contenders()
        ],
        "rank_correlation": summary.rank_correlation,
        "importances": [
            {
                "name": each.name,
                "share": each.share,
                "best": each.best,
                "values": [
                    {"value": value, "trials": trials, "fastest_us": _short(each.fastest_us[value])}
                    for value, trials in each.trials.items()
                ],
            }
            for each in summary.importances
        ],
        "failures": [
            {"status": row.status.value, "reason": row.reason, "count": row.count, "example": row.example} for row in summary.failures
        ],
        "excluded": summary.excluded,
        "levels": _levels(summary),
        "counters": None if summary.counted is None else canonical.to_dict(summary.counted.measurement.counters),
        "roofs": _roofs(summary),
        "theory": _theory(summary),
        "points": _points(summary, summaries),
        "trials": _trials(summary),
    }


def _winner(summary: Summary, winner: Record) -> dict[str, Any]:
    assert winner.candidate is not None
    measurement, where = winner.measurement, winner.provenance
    return {
        "label": label(winner.candidate),
        "candidate": canonical.to_dict(winner.candidate),
        "variant": winner.candidate.variant.name,
        "median_us": time_us(winner),
        "spread_us": measurement.spread_us,
        "error": measurement.error,
        "tolerance": measurement.tolerance,
        "registers": measurement.resources.registers if measurement.resources else None,
        "spill_bytes": measurement.resources.spill_bytes if measurement.resources else None,
        "smem_bytes": measurement.resources.smem_bytes if measurement.resources else None,
        "sm_clock_mhz": measurement.sm_clock_mhz,
        "power_w": measurement.power_w,
        "provenance": canonical.to_dict(where),
        "source_sha256": winner.source_sha256,
        "is_todays_source": winner.source_sha256 == render(winner.candidate.variant).sha256,
        "commands": commands(winner),
    }


def _limit(summary: Summary) -> dict[str, Any] | None:
    if summary.limit is None:
        return None
    lift = summary.lift
    return {
        "bound": summary.limit.bound,
        "name": NAMES[summary.limit.bound],
        "share": summary.limit.share,
        "shares": dict(summary.limit.shares),
        "counted_shares": summary.counted_shares,
        "waves": summary.limit.waves,
        "lift": None
        if lift is None
        else {
            "label": label(lift.candidate),
            "candidate": canonical.to_dict(lift.candidate),
            "bound": lift.bound,
            "distance": lift.distance,
            "slowdown": lift.slowdown,
            "measured_us": None if lift.measured is None else time_us(lift.measured),
        },
    }


def _estimate(record: Record) -> Estimate | None:
    if record.candidate is None:
        return None
    return record.estimate or cost.estimate(record.candidate, record.problem, record.device, record.measurement.resources)


def _levels(summary: Summary) -> list[dict[str, Any]]:
    """Bytes moved on each level by one call of the winner, or of the model's favourite; and what the paper's model says."""
    problem, device = summary.problem, summary.device
    shown = summary.winner or summary.favourite
    estimate = None if shown is None else _estimate(shown)
    rows = [("DRAM, least possible", float(theory.compulsory_bytes(problem)), "least")]
    if estimate is not None:
        rows += [
            ("DRAM", estimate.dram_bytes, "predicted"),
            ("L2", estimate.l2_bytes, "predicted"),
            ("shared memory", estimate.smem_bytes, "predicted"),
        ]
    counters = None if summary.counted is None else summary.counted.measurement.counters
    if counters is not None:
        counted = {"DRAM": counters.dram_bytes, "L2": counters.l2_bytes}
        rows += [(name, moved, "counted") for name, moved in counted.items() if moved is not None]
    flash = paper_bytes(problem, device)
    if flash:
        heads_bytes = problem.batch * problem.heads_q * problem.itemsize
        standard = theory.standard_elements(problem.seqlen_kv, problem.head_dim_qk, problem.direction) * heads_bytes
        rows += [("DRAM, FlashAttention", flash, "paper"), ("DRAM, standard attention", float(standard), "paper")]
    rates = _bytes_per_s(device)
    return [
        {"name": name, "bytes": moved, "kind": kind, "us": _short(moved / rates.get(name, rates["DRAM"]) * 1e6)}
        for name, moved, kind in rows
    ]


def _bytes_per_s(device: Device) -> dict[str, float]:
    """Bandwidths by level."""
    return {
        "DRAM": device.dram_bytes_per_s,
        "L2": device.l2_bytes_per_s,
        "shared memory": device.num_sms * device.smem_bytes_per_clock * device.boost_hz,
    }


def _roofs(summary: Summary) -> dict[str, Any]:
    """Of the roofline: bandwidths, the peak, and each contender at FLOP a byte of DRAM; the winner at those of L2 and shared memory, too.
    What peers move is not known: they stand at the least possible."""
    problem, device = summary.problem, summary.device
    points = []
    for name, record in summary.contenders() if problem.flops else ():
        estimate = _estimate(record)
        moved = {"DRAM": float(theory.compulsory_bytes(problem)) if estimate is None else estimate.dram_bytes}
        if name == "winner" and estimate is not None:
            moved |= {"L2": estimate.l2_bytes, "shared memory": estimate.smem_bytes}
        points += [
            {"name": name, "level": level, "flop_per_byte": _short(problem.flops / bytes_), "tflops": summary.tflops(record)}
            for level, bytes_ in moved.items()
            if bytes_
        ]
    return {
        "peak_tflops": device.flops_per_s(problem.dtype) / 1e12,
        "bytes_per_s": _bytes_per_s(device),
        "points": points,
    }


def _theory(summary: Summary) -> dict[str, list[float]]:
    """The paper's model of one layer with this problem's heads (batch x heads), and the roofline with its mask, over sequence length."""
    problem, device = summary.problem, summary.device
    layers = [
        theory.layer(seqlen, problem.head_dim_qk, problem.batch * problem.heads_q or 1, device, direction=problem.direction)
        for seqlen in SEQLENS
    ]
    bounds = [theory.bound_s(replace(problem, seqlen_q=seqlen, seqlen_kv=seqlen), device) for seqlen in SEQLENS]
    return {
        "seqlen": list(SEQLENS),
        "standard_elements": [layer.standard_elements for layer in layers],
        "flash_elements": [layer.flash_elements for layer in layers],
        "standard_ms": [layer.standard_time_s * 1e3 for layer in layers],
        "flash_ms": [layer.flash_time_s * 1e3 for layer in layers],
        "roofline_ms": [bound * 1e3 for bound in bounds],
    }


def _points(summary: Summary, summaries: Sequence[Summary]) -> dict[str, list[list[float]]]:
    """Measured (seqlen, ms) of each contender in this problem's family, scaled to its batch x heads."""
    points: dict[str, list[list[float]]] = {}
    for other in summaries:
        if other.device.key != summary.device.key or _family(other) != _family(summary) or not other.problem.batch:
            continue
        scale = summary.problem.batch * summary.problem.heads_q / (other.problem.batch * other.problem.heads_q)
        for name, record in other.contenders():
            points.setdefault(name, []).append([other.problem.seqlen_kv, time_us(record) * scale / 1e3])
    return points


def _family(summary: Summary) -> tuple[object, ...]:
    problem = summary.problem
    kind = problem.direction, problem.deterministic, problem.float16_dq, problem.dtype
    return *kind, problem.head_dim_qk, problem.head_dim_v, problem.mask, problem.window


def _trials(summary: Summary) -> dict[str, list[Any]]:
    """The rows as columns, in the order in which they ran."""
    rows = summary.trials
    resources = [record.measurement.resources for record in rows]
    default = space.default(summary.problem, summary.device)
    return {
        "candidate": [describe(record) + " (default)" * (record.candidate == default) for record in rows],
        "status": [record.measurement.status.value for record in rows],
        "predicted_us": [_short(record.estimate.time_s * 1e6) if record.estimate else None for record in rows],
        "limited_by": [record.estimate.bound if record.estimate else "" for record in rows],
        "measured_us": [_short(record.measurement.median_us) for record in rows],
        "spread_us": [_short(record.measurement.spread_us) for record in rows],
        "registers": [each.registers if each else None for each in resources],
        "spill_bytes": [each.spill_bytes if each else None for each in resources],
        "smem_bytes": [each.smem_bytes if each else None for each in resources],
        "error": [_short(record.measurement.error) for record in rows],
        "tolerance": [_short(record.measurement.tolerance) for record in rows],
        "message": [record.measurement.message[:500] for record in rows],
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "before": comparison.before,
        "after": comparison.after,
        "sentence": str(comparison),
        "speedup": comparison.speedup,
        "peers_speedup": comparison.peers_speedup,
        "only_before": comparison.only_before,
        "only_after": comparison.only_after,
        "changes": [
            {
                "id": place(change.after),
                "title": str(change.after.problem),
                "devices": [change.before.device.name, change.after.device.name],
                "us": [time_us(winner) for winner in change.winners],
                "of_roofline": [side.roofline_us / time_us(winner) for side, winner in zip((change.before, change.after), change.winners)],
                "what": [describe(winner) for winner in change.winners],
                "speedup": change.speedup,
                "peers_speedup": change.peers_speedup,
                "is_same_candidate": change.is_same_candidate,
            }
            for change in comparison.changes
        ],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
