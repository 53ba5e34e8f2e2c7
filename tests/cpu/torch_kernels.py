"""Kernels that compute attention and its gradients in PyTorch from an explicit boolean mask, in place of compiled ones; and a run with
generated ones."""

import dataclasses
import importlib
import math
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen import dispatch
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.dispatch import plan
from flashgen.problem import Problem

CAUSAL = {"full": False, "causal": True, "causal_top_left": "top_left"}


def visible_pairs(rows: int, keys: int, causal: Any, window: Any) -> Tensor:
    """(rows, keys) bool."""
    left, right = (None if side == -1 else side for side in (window or (None, None)))
    shift = 0 if causal == "top_left" else keys - rows
    visible = torch.zeros(rows, keys, dtype=torch.bool)
    for i in range(rows):
        for j in range(keys):
            seen = not causal or j <= i + shift
            seen = seen and (left is None or j >= i + shift - left) and (right is None or j <= i + shift + right)
            visible[i, j] = seen
    return visible


def expected(
    query: Tensor, key: Tensor, value: Tensor, *, causal: Any = False, window: Any = None, scale: Any = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64 for tensors in bhsd."""
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    visible = visible_pairs(query.shape[2], key.shape[2], causal, window)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None].clamp(min=-1e300))
    return weights @ value, lse


def expected_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: Any = False,
    window: Any = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in float64 for tensors in bhsd, written out: rows without a visible key have none."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, lse = expected(query, key, value, causal=causal, window=window, scale=scale)
    heads, kv_heads = query.shape[1], key.shape[1]
    query, key, value, dout = (each.double() for each in (query, key, value, dout))
    key, value = (each.repeat_interleave(heads // kv_heads, 1) for each in (key, value))
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~visible_pairs(query.shape[2], key.shape[2], causal, window), -math.inf)
    weights = torch.exp(scores - lse[..., None].clamp(min=-1e300))
    delta = (dout * out).sum(-1) - (0 if dlse is None else dlse.double())
    dscores = scale * weights * (dout @ value.transpose(-1, -2) - delta[..., None])
    by_group = lambda each: each.unflatten(1, (kv_heads, -1)).sum(2)  # noqa: E731
    return dscores @ key, by_group(dscores.transpose(-1, -2) @ query), by_group(weights.transpose(-1, -2) @ dout)


@dataclasses.dataclass
class Kernels:
    """Counts what dispatch asked of build and launch, and makes it fail on demand."""

    builds: list[tuple[Candidate, Problem, Device]] = dataclasses.field(default_factory=list)
    launches: list[tuple[Problem, float]] = dataclasses.field(default_factory=list)
    backward_launches: list[tuple[Problem, tuple[bool, ...]]] = dataclasses.field(default_factory=list)  # and which of dq, dk, dv
    build_error: Any = lambda candidate: None
    launch_error: Any = lambda candidate: None

    def build(self, candidate: Candidate, problem: Problem, device: Device, *, wide_offsets: bool = False) -> Any:
        self.builds.append((candidate, problem, device))
        if error := self.build_error(candidate):
            raise error
        return types.SimpleNamespace(candidate=candidate, wide_offsets=wide_offsets)

    def prepare(self, kernel: Any, problem: Problem, *tensors: Any) -> Any:
        strides = [tensor.stride() for tensor in tensors[:4]]

        def launch(query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None, scale: float) -> None:
            if error := self.launch_error(kernel.candidate):
                raise error
            self.launches.append((problem, scale))
            given = (query, key, value, out)
            assert strides == [tensor.stride() for tensor in given], "bound to other strides"
            assert all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in given)
            if problem.aligned_16:
                assert all(tensor.data_ptr() % 16 == 0 for tensor in given)
            assert scale >= 0 or kernel.candidate.variant.scale_first
            if problem.layout == "bshd":
                given = tuple(tensor.transpose(1, 2) for tensor in given)
            result, logsumexp = expected(*given[:3], causal=CAUSAL[problem.mask], window=problem.window, scale=scale)
            given[3].copy_(result)
            assert (lse is not None) == problem.return_lse == kernel.candidate.variant.store_lse
            if lse is not None:
                lse.copy_(logsumexp)

        return launch

    def prepare_backward(self, kernel: Any, problem: Problem, inputs: Any, device: Any) -> Any:
        strides = [tensor.stride() for tensor in inputs[:6]]

        def launch(*given: Any) -> None:
            if error := self.launch_error(kernel.candidate):
                raise error
            query, key, value, out, lse, dout, dlse, *gradients, scale = given
            self.backward_launches.append((problem, tuple(gradient is not None for gradient in gradients)))
            assert strides == [tensor.stride() for tensor in given[:6]], "bound to other strides"
            assert problem.direction == "backward" and kernel.candidate.variant.family == "backward"
            written = [gradient for gradient in gradients if gradient is not None]
            for tensor in (query, key, value, out, dout, *written):
                assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1
                assert not problem.aligned_16 or tensor.data_ptr() % 16 == 0
            assert lse.is_contiguous() and (dlse is None or dlse.is_contiguous()) and (dlse is not None) == problem.return_lse
            assert not any(tensor.requires_grad for tensor in written) and not torch.is_grad_enabled()
            if problem.layout == "bshd":
                query, key, value, dout = (tensor.transpose(1, 2) for tensor in (query, key, value, dout))
            right = expected_gradients(query, key, value, dout, dlse, causal=CAUSAL[problem.mask], window=problem.window, scale=scale)
            for gradient, result in zip(gradients, right):
                if gradient is not None:
                    gradient.copy_(result.transpose(1, 2) if problem.layout == "bshd" else result)

        return launch


def fresh_planner(monkeypatch: pytest.MonkeyPatch) -> plan.Planner:
    """A planner that has seen nothing, in a process whose tensors on the CPU are run by the interpreter."""
    planner = plan.Planner()
    monkeypatch.setattr(dispatch, "_planner", planner)
    monkeypatch.setattr(dispatch, "_plans", planner.plans)
    importlib.import_module("triton")  # first, or it would be an interpreter for all tests of this process
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("FLASHGEN_DATABASE", ":memory:")
    return planner


def torch_kernels(planner: plan.Planner, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Kernels that compute in PyTorch, and a database without winners."""
    stand_in = Kernels()
    monkeypatch.setattr(plan, "build", stand_in.build)
    monkeypatch.setattr(plan, "prepare", stand_in.prepare)
    monkeypatch.setattr(plan, "prepare_backward", stand_in.prepare_backward)
    planner._winners = ()
    return stand_in


def tensors(
    batch: int = 2,
    heads_q: int = 4,
    heads_kv: int = 2,
    seqlen_q: int = 5,
    seqlen_kv: int = 7,
    head_dim: int = 16,
    head_dim_v: int = 16,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch + 31 * seqlen_q + 7 * seqlen_kv)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(**({"dtype": torch.float16} | options))  # noqa: E731
    return (
        make(batch, heads_q, seqlen_q, head_dim),
        make(batch, heads_kv, seqlen_kv, head_dim),
        make(batch, heads_kv, seqlen_kv, head_dim_v),
    )


def close(out: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(out.double(), right, atol=4e-3 if out.dtype != torch.float32 else 1e-5, rtol=4e-3)


def run_interpreted(script: str, database: Path) -> None:
    """Runs a script beside this file with generated kernels, in a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "FLASHGEN_DATABASE": str(database), "PYTHONPATH": os.pathsep.join(sys.path)}
    path = Path(__file__).with_name(script)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all right" in done.stdout
