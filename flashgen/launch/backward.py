"""A backward Kernel + tensors -> BackwardLaunch: one function of the kernel after another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flashgen.build.kernel import Function, Kernel, build
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.errors import ArgumentError, LaunchError
from flashgen.launch.enqueue import enqueuer
from flashgen.launch.tensors import (
    integers_of,
    needs_wide_offsets,
    require_built_for,
    require_fit,
    require_rows,
    stride_arguments,
)
from flashgen.problem import Problem
from flashgen.space import MOST_GRID

# What changes from call to call, by the names of parameters.
CALLED_WITH = ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv", "delta", "scale")
MOST_STRIDES = 16  # of gradients, for which a BackwardLaunch keeps bound functions

Strides = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Step:
    """One function of a kernel, bound to shapes and strides.

    enqueue    (stream, arguments) -> None: puts it on a raw CUDA stream.
    arguments  values of its parameters, in order; those that change with each call are filled in.
    slots      (place in arguments, place in CALLED_WITH) of these.
    """

    enqueue: Callable[[int, list[Any]], object]
    arguments: list[Any]
    slots: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class BackwardLaunch:
    """A backward kernel bound to the shapes and strides of its inputs; those of the gradients are looked at when they come. Call it with
    tensors of just these, in the problem's layout.

    values     the kernel's parameters that the inputs decide, by name.
    unaligned  bits of an address that must be 0.
    index      of the CUDA device; None where Triton's interpreter runs the kernel.
    steps      functions to launch, by the strides of dq, dk and dv.
    """

    kernel: Kernel
    problem: Problem
    device: torch.device
    values: Mapping[str, int]
    unaligned: int
    index: int | None
    steps: dict[Strides, list[Step]] = field(default_factory=dict)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
        scale: float,
    ) -> None:
        """Enqueues the kernel's functions on the current stream of the tensors' device, which need not be the current device.

        dq, dk, dv: written where not None. Without dq its function is not launched, nor that of dk and dv without both. Raises
        ArgumentError for gradients that are not what the problem says or the kernel was built for, LaunchError if an address is not
        aligned as the kernel expects, or the driver refuses.
        """
        index = self.index
        if index is not None and torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self(query, key, value, out, lse, dout, dlse, dq, dk, dv, scale)
            return
        # One function writes both.
        if dk is None and dv is not None:
            dk = torch.empty(key.shape, dtype=key.dtype, device=key.device)
        elif dv is None and dk is not None:
            dv = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        # The caching allocator gives it to others only for what comes later on this stream.
        delta = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
        strides = tuple(None if gradient is None else gradient.stride() for gradient in (dq, dk, dv))
        steps = self.steps.get(strides)
        if steps is None:
            steps = self._bound(strides, {"dq": dq, "dk": dk, "dv": dv})
        tensors = (query, key, value, out, lse, dout, dlse, dq, dk, dv, delta)
        if index is None:
            for step in steps:
                step.enqueue(0, _filled(step, (*tensors, scale)))
            return
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        q, k, v, o, _, do, _, gradient_q, gradient_k, gradient_v, _ = addresses
        if (q | k | v | o | do | gradient_q | gradient_k | gradient_v) & self.unaligned:
            raise LaunchError(f"{self.kernel.candidate} was built for 16-byte aligned tensors, and one begins elsewhere")
        stream = torch._C._cuda_getCurrentRawStream(index)
        try:
            for step in steps:
                step.enqueue(stream, _filled(step, (*addresses, scale)))
        except RuntimeError as error:
            raise LaunchError(f"{self.kernel.candidate} was not launched: {error}") from error

    def _bound(self, strides: Strides, gradients: Mapping[str, torch.Tensor | None]) -> list[Step]:
        """The functions that write these gradients, bound to their strides."""
        problem = self.problem
        given = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        require_fit(self.kernel, problem, given, self.device)
        values = dict(self.values)
        for name, gradient in given.items():
            values |= stride_arguments(name, gradient, problem.layout)
        block = self.kernel.candidate.config.block_n
        row_blocks = problem.batch * problem.heads_q * -(-problem.seqlen_q // block)
        key_blocks = problem.batch * problem.heads_kv * -(-problem.seqlen_kv // block)
        steps = []
        for function in self.kernel.functions:
            writes = [name for name in gradients if name in function.arg_names]
            grid = key_blocks if "dk" in writes else row_blocks
            if grid > MOST_GRID:
                raise ArgumentError(f"{problem} is {grid} blocks of {block} rows; a grid has at most {MOST_GRID}")
            if grid and given and all(name in given for name in writes):
                steps.append(_step(function, grid, values, self.index))
        if len(self.steps) >= MOST_STRIDES:
            self.steps.pop(next(iter(self.steps)), None)
        self.steps[strides] = steps
        return steps


def bind_backward(
    candidate: Candidate,
    problem: Problem,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    device: Device,
) -> BackwardLaunch:
    """Builds a candidate as these tensors and contiguous gradients need it, and prepares it for them: see `build` and
    `prepare_backward`, whose errors it raises."""
    gradients = [torch.empty(tensor.shape, device="meta") for tensor in (query, key, value)]
    wide_offsets = needs_wide_offsets((query, key, value, out, dout, *gradients))
    kernel = build(candidate, problem, device, wide_offsets=wide_offsets)
    return prepare_backward(kernel, problem, query, key, value, out, lse, dout, dlse)


def prepare_backward(
    kernel: Kernel,
    problem: Problem,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> BackwardLaunch:
    """Binds the kernel to these tensors' shapes and strides, and loads it on their device.

    Tensors are in the problem's layout; lse, and dlse if the kernel reads it, are (batch, heads_q, seqlen_q) float32 and contiguous.
    Raises ArgumentError for tensors that are not what the problem says or the kernel was built for, OutOfResourcesError or LaunchError
    if the driver refuses to load it.
    """
    if kernel.candidate.variant.family != "backward":
        raise ArgumentError(f"{kernel.candidate} computes no gradients; it must be a backward kernel")
    tensors = {"q": query, "k": key, "v": value, "out": out, "dout": dout}
    require_built_for(kernel, problem)
    require_fit(kernel, problem, tensors, query.device)
    require_rows("lse", lse, problem)
    if kernel.candidate.variant.store_lse:
        require_rows("dlse", dlse, problem)
    values = integers_of(problem)
    for name, tensor in tensors.items():
        values |= stride_arguments(name, tensor, problem.layout)
    index = None
    if not kernel.interpreted:
        index = query.device.index
        for function in kernel.functions:
            function.on(index)
    return BackwardLaunch(
        kernel=kernel,
        problem=problem,
        device=query.device,
        values=values,
        unaligned=15 if kernel.problem.aligned_16 else 0,
        index=index,
    )


def _step(function: Function, grid: int, values: Mapping[str, int], index: int | None) -> Step:
    values = {**values, **function.constants}
    names = function.arg_names
    for name in names:
        if name not in values and name not in CALLED_WITH:
            raise TypeError(f"{function.name} has a parameter {name}, of which launch knows nothing")
    return Step(
        enqueue=_interpreter(function, grid) if index is None else enqueuer(function.on(index), grid)[0],
        arguments=[values.get(name) for name in names],
        slots=tuple((place, CALLED_WITH.index(name)) for place, name in enumerate(names) if name in CALLED_WITH),
    )


def _interpreter(function: Function, grid: int) -> Callable[[int, list[Any]], object]:
    """What runs a function in Triton's interpreter, one program after the other."""

    def run(stream: int, arguments: list[Any]) -> None:
        function.jit[(grid,)](*arguments)

    return run


def _filled(step: Step, given: tuple[Any, ...]) -> list[Any]:
    """The arguments of a call."""
    arguments = step.arguments.copy()
    for place, which in step.slots:
        arguments[place] = given[which]
    return arguments
