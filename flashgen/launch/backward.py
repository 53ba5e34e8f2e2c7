"""A backward Kernel + tensors -> BackwardLaunch: one function of the kernel after another."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from flashgen.build.kernel import SCRATCH, SCRATCH_TILES, Function, Kernel, build, dq_sum_columns, scratch_dtype
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.errors import ArgumentError, LaunchError
from flashgen.launch.descriptors import describer, encoder, expanded
from flashgen.launch.enqueue import enqueuer
from flashgen.launch.schedules import key_schedule
from flashgen.launch.tensors import (
    integers_of,
    needs_wide_offsets,
    require_built_for,
    require_fit,
    require_rows,
    shape_of,
    stride_arguments,
    strides_of,
)
from flashgen.problem import Problem
from flashgen.schedule import DQ_ROWS, key_blocks, specialised_dims
from flashgen.space import MOST_GRID

# Tensors that change from call to call, by the names of parameters, scratch memory last.
CALLED_WITH = ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv", *SCRATCH)
MOST_STRIDES = 16  # of gradients, for which a BackwardLaunch keeps bound functions

Strides = tuple[tuple[int, ...] | None, ...]
View = tuple[Sequence[int], Sequence[int]]  # shape, and strides of all dimensions but the last


class BackwardInputs(NamedTuple):
    """What a backward kernel reads. The last dimension of each tensor is contiguous; the other strides are free.

    lse and dlse are float32 (batch, heads_q, seqlen_q) and contiguous; dlse is None where nothing depends on the LSE.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None

    @property
    def strided(self) -> tuple[torch.Tensor, ...]:
        """Those whose strides are free."""
        return self.query, self.key, self.value, self.out, self.dout

    def strided_with(self, gradients: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
        """The same, with the gradients that are computed."""
        return [*self.strided, *(gradient for gradient in gradients if gradient is not None)]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Step:
    """One function of a kernel, bound to shapes and strides.

    enqueue    (stream, arguments) -> None: puts it on a raw CUDA stream.
    arguments  values of its parameters, in order; those that change with each call are filled in.
    scale      where in them the scale goes, if it does.
    slots      (place in arguments, place in CALLED_WITH, what makes an address or tensor a TMA descriptor, or None) of the others.
    """

    enqueue: Callable[[int, list[Any]], object]
    arguments: list[Any]
    scale: int | None
    slots: tuple[tuple[int, int, Callable[[Any], Any] | None], ...]

    def __call__(self, stream: int, given: Sequence[Any], scale: float) -> None:
        arguments = self.arguments.copy()
        for place, which, describe in self.slots:
            arguments[place] = given[which] if describe is None else describe(given[which])
        if self.scale is not None:
            arguments[self.scale] = scale
        self.enqueue(stream, arguments)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class BackwardLaunch:
    """A backward kernel bound to the shapes and strides of its inputs; those of the gradients are looked at when they come. Call it with
    tensors of just these, in the problem's layout.

    values     the kernel's parameters that the inputs decide, by name.
    views      (shape, strides) of what TMA descriptors describe of the inputs and of scratch memory, by name.
    scratch    how many elements each kind of scratch memory holds, and of what type.
    unaligned  bits of an address that must be 0.
    programs   of functions that have a schedule.
    index      of the CUDA device; None where Triton's interpreter runs the kernel.
    steps      functions to launch, by the strides of dq, dk and dv.
    """

    kernel: Kernel
    problem: Problem
    device: torch.device
    values: Mapping[str, int]
    views: Mapping[str, View]
    scratch: Mapping[str, tuple[int, torch.dtype]]
    unaligned: int
    programs: int
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
        # One function writes both, and where kernels are fused all three.
        if self.kernel.candidate.variant.fused or (dk is None) != (dv is None):
            dk = torch.empty(key.shape, dtype=key.dtype, device=key.device) if dk is None else dk
            dv = torch.empty(value.shape, dtype=value.dtype, device=value.device) if dv is None else dv
        if self.kernel.candidate.variant.fused and dq is None:
            dq = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        strides = tuple(None if gradient is None else gradient.stride() for gradient in (dq, dk, dv))
        steps = self.steps.get(strides)
        if steps is None:
            steps = self._bound(strides, {"dq": dq, "dk": dk, "dv": dv})
        # The caching allocator gives scratch memory to others only for what comes later on this stream.
        device, kinds = lse.device, (self.scratch.get(name) for name in SCRATCH)
        scratch = (None if kind is None else torch.empty((kind[0],), dtype=kind[1], device=device) for kind in kinds)
        tensors = (query, key, value, out, lse, dout, dlse, dq, dk, dv, *scratch)
        if index is None:
            for step in steps:
                step(0, tensors, scale)
            return
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        q, k, v, o, _, do, _, gradient_q, gradient_k, gradient_v, *_ = addresses
        if (q | k | v | o | do | gradient_q | gradient_k | gradient_v) & self.unaligned:
            raise LaunchError(f"{self.kernel.candidate} was built for 16-byte aligned tensors, and one begins elsewhere")
        stream = torch._C._cuda_getCurrentRawStream(index)
        try:
            for step in steps:
                step(stream, addresses, scale)
        except RuntimeError as error:
            raise LaunchError(f"{self.kernel.candidate} was not launched: {error}") from error

    def _bound(self, strides: Strides, gradients: Mapping[str, torch.Tensor | None]) -> list[Step]:
        """The functions that write these gradients, bound to their strides."""
        problem = self.problem
        given = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        require_fit(self.kernel, problem, given, self.device)
        values, views = dict(self.values), dict(self.views)
        for name, gradient in given.items():
            values |= stride_arguments(name, gradient, problem.layout)
            views[name] = (shape_of(name, problem), strides_of(gradient, problem.layout))
        steps = []
        for function in self.kernel.functions:
            writes = [name for name in gradients if name in function.arg_names]
            grid = self._grid(function)
            if grid > MOST_GRID:
                raise ArgumentError(f"{problem} is {grid} programs of {function.name}; a grid has at most {MOST_GRID}")
            if grid and given and all(name in given for name in writes):
                steps.append(_step(function, grid, values, views, next(iter(given.values())), self.index))
        if len(self.steps) >= MOST_STRIDES:
            self.steps.pop(next(iter(self.steps)), None)
        self.steps[strides] = steps
        return steps

    def _grid(self, function: Function) -> int:
        """How many programs a function has."""
        if "schedule" in function.arg_names:
            return self.programs
        config, problem = self.kernel.candidate.config, self.problem
        if function.name.endswith(("dkdv", "bounds")):
            return key_blocks(problem, config.block_n)
        rows = config.block_n
        if self.kernel.candidate.variant.backend == "hopper":
            rows = DQ_ROWS if function.name.endswith("dq") else config.block_m
        shares = 2 if function.name.endswith("dq_convert") else 1
        return problem.batch * problem.heads_q * math.ceil(problem.seqlen_q / rows) * shares


def bind_backward(candidate: Candidate, problem: Problem, inputs: BackwardInputs, device: Device) -> BackwardLaunch:
    """Builds a candidate as these tensors and contiguous gradients need it, and prepares it for them: see `build` and
    `prepare_backward`, whose errors it raises."""
    gradients = [torch.empty(tensor.shape, device="meta") for tensor in inputs[:3]]
    kernel = build(candidate, problem, device, wide_offsets=needs_wide_offsets(inputs.strided_with(gradients)))
    return prepare_backward(kernel, problem, inputs, device)


def prepare_backward(kernel: Kernel, problem: Problem, inputs: BackwardInputs, device: Device) -> BackwardLaunch:
    """Binds the kernel to these tensors' shapes and strides, and loads it on their device.

    Tensors are in the problem's layout. device says how many programs of a kernel with a schedule run at once. Raises ArgumentError for
    tensors that are not what the problem says or the kernel was built for, OutOfResourcesError or LaunchError if the driver refuses to
    load it, LaunchError if a schedule is needed while a CUDA graph is captured.
    """
    if kernel.candidate.variant.family != "backward":
        raise ArgumentError(f"{kernel.candidate} computes no gradients; it must be a backward kernel")
    where = inputs.query.device
    tensors = dict(zip(("q", "k", "v", "out", "dout"), inputs.strided))
    require_built_for(kernel, problem)
    require_fit(kernel, problem, tensors, where)
    require_rows("lse", inputs.lse, problem)
    if kernel.candidate.variant.store_lse:
        require_rows("dlse", inputs.dlse, problem)
    values = integers_of(problem)
    views: dict[str, View] = {}
    for name, tensor in tensors.items():
        values |= stride_arguments(name, tensor, problem.layout)
        views[name] = (shape_of(name, problem), strides_of(tensor, problem.layout))
    scratch = scratch_of(kernel.candidate, problem)
    views |= {tiles: ((scratch[name],), ()) for tiles, name in SCRATCH_TILES.items() if name in scratch}
    if "dq_sum" in scratch:
        columns = dq_sum_columns(kernel.candidate.variant)
        values["dq_beyond"] = scratch["dq_sum"] // columns
        views["dq_tiles"] = ((scratch["dq_sum"] // columns, columns), (columns,))
    index = None
    programs = 0
    if not kernel.interpreted:
        index = where.index
        for function in kernel.functions:
            function.on(index)
        programs = min(device.num_sms, key_blocks(problem, kernel.candidate.config.block_n))
        if programs and any("schedule" in function.arg_names for function in kernel.functions):
            table = key_schedule(kernel.candidate, problem, programs, index)
            values |= {"schedule": table.data_ptr(), "schedule_width": table.shape[1]}
    return BackwardLaunch(
        kernel=kernel,
        problem=problem,
        device=where,
        values=values,
        views=views,
        scratch={name: (count, _scratch_dtype(name, kernel.candidate)) for name, count in scratch.items()},
        unaligned=15 if kernel.problem.aligned_16 else 0,
        programs=programs,
        index=index,
    )


def scratch_of(candidate: Candidate, problem: Problem) -> dict[str, int]:
    """How many elements a backward kernel needs of each kind of scratch memory: never more than a few for each element of q."""
    rows = problem.batch * problem.heads_q
    if candidate.variant.backend == "triton":
        return {"delta": rows * problem.seqlen_q}
    tiled = rows * math.ceil(problem.seqlen_q / candidate.config.block_m) * candidate.config.block_m
    scratch = {"rows": 2 * tiled}
    if candidate.variant.float16_dq:
        scratch |= {"bounds": 2 * key_blocks(problem, candidate.config.block_n), "dq_scales": tiled}
    return scratch | ({"dq_sum": tiled * specialised_dims(problem)[0]} if candidate.variant.fused else {})


def _scratch_dtype(name: str, candidate: Candidate) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, scratch_dtype(name, candidate.variant))
    return dtype


def _step(
    function: Function, grid: int, values: Mapping[str, int], views: Mapping[str, View], like: torch.Tensor, index: int | None
) -> Step:
    values = {**values, **function.constants}
    if index is None:
        enqueue, loaded, encodes = _interpreter(function, grid), None, False
    else:
        loaded = function.on(index)
        enqueue, encodes = enqueuer(loaded, grid)
    arguments: list[Any] = []
    slots: list[tuple[int, int, Callable[[Any], Any] | None]] = []
    scale = None
    for name in function.arg_names:
        place, called_with = len(arguments), SCRATCH_TILES.get(name, name)
        arguments.append(values.get(name))
        if name == "scale":
            scale = place
        elif name in function.described:
            dtype = _scratch_dtype(name, function.candidate) if name in SCRATCH_TILES else like.dtype
            somewhere = like.new_empty(512, dtype=dtype)
            describe = describer(*views[name], function.described[name], somewhere.dtype)
            slots.append((place, CALLED_WITH.index(called_with), encoder(function, loaded, name, describe, somewhere, encodes)))
            arguments += expanded(describe, somewhere) if encodes else []
        elif called_with in CALLED_WITH:
            slots.append((place, CALLED_WITH.index(called_with), None))
        elif name not in values:
            raise TypeError(f"{function.name} has a parameter {name}, of which launch knows nothing")
    return Step(enqueue=enqueue, arguments=arguments, scale=scale, slots=tuple(slots))


def _interpreter(function: Function, grid: int) -> Callable[[int, list[Any]], object]:
    """What runs a function in Triton's interpreter, one program after the other."""

    def run(stream: int, arguments: list[Any]) -> None:
        function.jit[(grid,)](*arguments)

    return run
