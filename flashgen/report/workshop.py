"""The workshop: one self-contained HTML page in which the paper's model, the cost model and what was measured can be played with.

The page computes in the browser: templates/report/workshop_model.js.jinja has the formulas of `theory` and `cost`. Devices, constants,
hand-picked candidates and measured times are data from here.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from flashgen import __version__, cost, resources, schedule, space
from flashgen.candidate import Candidate
from flashgen.device import DEVICES, Device
from flashgen.problem import DIRECTIONS, Problem
from flashgen.record import Record
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
    """
    measured = _measured(records)
    devices = dict(DEVICES) | {name: device for name, (device, _) in measured.items() if name not in DEVICES}
    candidates: dict[Candidate, int] = {}
    defaults = {
        f"{name} {which}": candidates.setdefault(each, len(candidates))
        for name, device in devices.items()
        for which, each in _defaults(device).items()
    }
    rows = []
    for _, of_device in measured.values():
        for row, candidate in of_device:
            place = None if candidate is None else candidates.setdefault(candidate, len(candidates))
            rows.append(row | {"candidate": place})
    return {
        "devices": {name: dataclasses.asdict(device) for name, device in devices.items()},
        "calibration": dataclasses.asdict(cost.CALIBRATION),
        "constants": _constants(schedule) | _constants(resources) | _constants(triton),
        "hopper_backward_tiles": hopper_backward.TILES,
        "candidates": [dataclasses.asdict(each.variant) | dataclasses.asdict(each.config) for each in candidates],
        "defaults": defaults,
        "measured": rows,
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


def _measured(records: Iterable[Record]) -> dict[str, tuple[Device, list[tuple[dict[str, Any], Candidate | None]]]]:
    """By device: rows as the page draws them, and their candidates."""
    names = {device.key: name for name, device in DEVICES.items()}
    found: dict[str, tuple[Device, list[tuple[dict[str, Any], Candidate | None]]]] = {}
    for summary in summarize(records):
        problem = summary.problem
        if (summary.is_predicted_only and not summary.peers) or not _is_plain(problem):
            continue
        key = summary.device.key
        _, rows = found.setdefault(names.get(key, key), (summary.device, []))
        winner = [] if summary.winner is None else [("flashgen", summary.winner)]
        for name, record in (*winner, *((peer_name(peer), peer) for peer in summary.peers)):
            row = {
                "device": names.get(key, key),
                "name": name,
                "what": describe(record),
                "direction": problem.direction,
                "dtype": problem.dtype,
                "causal": problem.mask == "causal",
                "head_dim": problem.head_dim_qk,
                "seqlen": problem.seqlen_q,
                "heads": problem.batch * problem.heads_q,
                "us": time_us(record),
                "gpu": record.provenance.gpu,
                "date": record.provenance.utc[:10],
            }
            rows.append((row, record.candidate))
    return found


def _is_plain(problem: Problem) -> bool:
    """Whether the page's controls can state it, but for the batch: its items count as heads."""
    return (
        problem.batch > 0
        and problem.heads_q == problem.heads_kv
        and problem.seqlen_q == problem.seqlen_kv
        and problem.head_dim_qk == problem.head_dim_v
        and problem.window == (None, None)
        and problem.mask in ("full", "causal")
        and not problem.return_lse
    )
