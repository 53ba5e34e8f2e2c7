"""The report as one self-contained HTML page: numbers are made here, figures are drawn from them by templates/report/page.js.jinja."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import plotly.offline

from flashgen import space, theory
from flashgen.record import Record
from flashgen.render import templates_dir
from flashgen.report.summary import Summary, describe, peer_name, summarize, time_us
from flashgen.report.tables import NOTHING_MEASURED
from flashgen.report.units import quantity, times

SEQLENS = tuple(2**power for power in range(8, 18))


def html(records: Iterable[Record]) -> str:
    """A page that needs no network: style, script, plotly.js and the rows as JSON are inside, each once."""
    summaries = summarize(records)
    measured = [summary for summary in summaries if not summary.is_predicted_only]
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            warning=NOTHING_MEASURED if not measured else "",
            summaries=summaries,
            provenance=_provenance(summaries),
            plotly_js=markupsafe.Markup(plotly.offline.get_plotlyjs()),
            data=_script_json(data(summaries)),
        )
    )


def write(path: Path, records: Iterable[Record]) -> None:
    """Writes the page whole or not at all, making the folder if there is none. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(html(records), encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def data(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """What the page's script draws, one entry a problem; times in microseconds and milliseconds as the names say."""
    return [_problem(summary, summaries) for summary in summaries]


def _problem(summary: Summary, summaries: Sequence[Summary]) -> dict[str, Any]:
    return {
        "title": str(summary.problem),
        "direction": summary.problem.direction,
        "device": summary.device.name,
        "predicted_only": summary.is_predicted_only,
        "roofline_tflops": summary.roofline_tflops,
        "contenders": [
            {"name": name, "us": time_us(record), "tflops": summary.tflops(record), "what": describe(record)}
            for name, record in summary.contenders()
        ],
        "rank_correlation": summary.rank_correlation,
        "failures": [
            {"status": row.status.value, "reason": row.reason, "count": row.count, "example": row.example} for row in summary.failures
        ],
        "excluded": summary.excluded if len(summaries) == 1 else {},
        "flops": summary.problem.flops,
        "seqlen": summary.problem.seqlen_kv,
        "theory": _theory(summary),
        "points": _points(summary, summaries),
        "trials": _trials(summary),
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
    return problem.direction, problem.deterministic, problem.dtype, problem.head_dim_qk, problem.head_dim_v, problem.mask, problem.window


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


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _provenance(summaries: Sequence[Summary]) -> dict[str, str]:
    """Where the rows come from: every GPU and version among them, and the first and last day."""
    records = [record for summary in summaries for record in (*summary.trials, *summary.peers)]
    seen = {
        name: ", ".join(sorted({getattr(record.provenance, name) for record in records} - {""}))
        for name in ("gpu", "flashgen", "torch", "triton", "cuda", "driver")
    }
    days = sorted({record.provenance.utc[:10] for record in records})
    seen["date"] = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else ""
    return {name: value for name, value in seen.items() if value}


def _script_json(value: Any) -> markupsafe.Markup:
    """JSON that cannot close the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return markupsafe.Markup(text)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir() / "report"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(describe=describe, quantity=quantity, times=times, peer_name=peer_name, time_us=time_us)
    return environment
