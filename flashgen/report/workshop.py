"""The workshop: one self-contained HTML page in which the paper's model, the cost model and what was measured can be played with.

The page computes in the browser: templates/report/workshop_model.js.jinja has the formulas of `theory` and `cost`. Devices, constants,
hand-picked candidates and measured times are data from here.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from flashgen import __version__, cost, resources, schedule, space
from flashgen.candidate import Candidate
from flashgen.device import DEVICES, Device
from flashgen.problem import DIRECTIONS, Problem
from flashgen.record import Counters, Record
from flashgen.report import document
from flashgen.report.summary import describe, peer_name, summarize, time_us
from flashgen.space import hopper_backward, triton

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
SEQLEN = 8192  # of the problems that the hand-picked candidates are for
HEADS = 32


def html(made: Mapping[str, Any]) -> str:
    """A page that needs no network: style, script, plotly.js and what `data` made are inside."""
    return (
        document.environment()
        .get_template("workshop.html.jinja")
        .render(data=document.script_json(made), plotly_js=document.plotly_js(), version=__version__, head_dims=HEAD_DIMS)
    )


def data(records: Iterable[Record]) -> dict[str, Any]:
    """What the page's script computes with.

    devices     by short name, or by key for a device of the records that has none; fields as in Device.
    defaults    place in candidates of the hand-picked one, by "device head_dim dtype mask direction backend"; for N 8192 and 32 heads.
    measured    a row for each winner and peer of a problem with one length, one head dim, and as many heads of keys as of queries.
    counted     a row for each kernel that ran under a profiler with cold caches, of such problems; bytes of all heads.
    """
    rows = list(records)
    timed, counted = _timed(rows), _counted(rows)
    devices = dict(DEVICES) | {
        _name(record.device): record.device for _, record in [*timed, *counted] if _name(record.device) not in DEVICES
    }
    candidates: dict[Candidate, int] = {}
    defaults = {
        f"{name} {which}": candidates.setdefault(each, len(candidates))
        for name, device in devices.items()
        for which, each in _defaults(device).items()
    }

    def row(record: Record, **more: Any) -> dict[str, Any]:
        candidate = record.candidate
        return _place(record) | {"candidate": None if candidate is None else candidates.setdefault(candidate, len(candidates))} | more

    return {
        "devices": {name: dataclasses.asdict(device) for name, device in devices.items()},
        "calibration": dataclasses.asdict(cost.CALIBRATION),
        "constants": _constants(schedule) | _constants(resources) | _constants(triton),
        "hopper_backward_tiles": hopper_backward.TILES,
        "defaults": defaults,
        "measured": [row(record, name=name, us=time_us(record)) for name, record in timed],
        "counted": [row(record, dram_bytes=each.dram_bytes, l2_bytes=each.l2_bytes) for each, record in counted],
        "candidates": [dataclasses.asdict(each.variant) | dataclasses.asdict(each.config) for each in candidates],
    }


def _constants(module: ModuleType) -> dict[str, Any]:
    """A module's numbers, by name."""
    return {name: value for name, value in vars(module).items() if name.isupper() and isinstance(value, (int, float, dict))}


@cache
def _defaults(device: Device) -> dict[str, Candidate]:
    """The hand-picked candidates of a device, by "head_dim dtype mask direction backend"."""
    picked = {}
    for dim, dtype, mask, direction in itertools.product(HEAD_DIMS, ("bfloat16", "float32"), ("full", "causal"), DIRECTIONS):
        problem = Problem(
            direction=direction,
            batch=1,
            heads_q=HEADS,
            heads_kv=HEADS,
            seqlen_q=SEQLEN,
            seqlen_kv=SEQLEN,
            head_dim_qk=dim,
            head_dim_v=dim,
            dtype=dtype,
            mask=mask,
        )
        for candidate in (space.default(problem, device), space.portable_default(problem, device)):
            picked[f"{dim} {dtype} {mask} {direction} {candidate.variant.backend}"] = candidate
    return picked


def _timed(records: Sequence[Record]) -> list[tuple[str, Record]]:
    """Winners and peers, by name."""
    found = []
    for summary in summarize(records):
        if _is_plain(summary.problem):
            found += [("flashgen", summary.winner)] if summary.winner is not None else []
            found += [(peer_name(peer), peer) for peer in summary.peers]
    return found


def _counted(records: Sequence[Record]) -> list[tuple[Counters, Record]]:
    """The newest count of each kernel."""
    found: dict[tuple[str, str, Candidate | None], tuple[Counters, Record]] = {}
    for record in sorted(records, key=lambda record: record.provenance.utc):
        counters = record.measurement.counters
        if counters is not None and counters.cache == "cold" and _is_plain(record.problem):
            found[record.device.key, record.problem.key, record.candidate] = counters, record
    return list(found.values())


def _name(device: Device) -> str:
    return next((name for name, known in DEVICES.items() if known.key == device.key), device.key)


def _place(record: Record) -> dict[str, Any]:
    """Of which choice of the controls a row is, and where it comes from."""
    problem = record.problem
    return {
        "device": _name(record.device),
        "direction": problem.direction,
        "dtype": problem.dtype,
        "causal": problem.mask == "causal",
        "head_dim": problem.head_dim_qk,
        "seqlen": problem.seqlen_q,
        "heads": problem.batch * problem.heads_q,
        "what": describe(record),
        "gpu": record.provenance.gpu,
        "date": record.provenance.utc[:10],
    }


def _is_plain(problem: Problem) -> bool:
    """Whether the page's controls can state it, but for the batch: its items count as heads."""
    return (
        problem.batch > 0
        and problem.heads_q == problem.heads_kv
        and problem.seqlen_q == problem.seqlen_kv
        and problem.head_dim_qk == problem.head_dim_v
        and problem.window == (None, None)
        and problem.mask in ("full", "causal")
        and not (problem.return_lse or problem.float16_dq)
    )
