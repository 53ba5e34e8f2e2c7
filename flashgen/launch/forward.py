"""A forward Kernel + tensors -> Launch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.build.kernel import TENSORS, Kernel, build
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.errors import ArgumentError, LaunchError
from flashgen.launch.descriptors import Describe, Encode, describer, encoder, expanded
from flashgen.launch.enqueue import enqueuer
from flashgen.launch.schedules import tile_schedule
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
from flashgen.resources import programs_per_sm
from flashgen.schedule import forward_tiles
from flashgen.space import MOST_GRID


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Launch:
    """A kernel bound to shapes and strides. Call it with tensors of just these, in the problem's layout.

    enqueue       (stream, arguments) -> None: puts the kernel on a raw CUDA stream.
    arguments     values of the kernel's parameters, in order; those that change with each call are filled in.
    slots         where in them q, k, v, out and the scale go.
    lse_slot      where the log-sum-exp goes; None if the kernel stores none.
    encode        of q, k, v and out, address -> TMA descriptor; None where the kernel takes addresses.
    unaligned     bits of an address that must be 0.
    index         of the CUDA device.
    """

    kernel: Kernel
    enqueue: Callable[[int, list[Any]], object]
    arguments: list[Any]
    slots: tuple[int, int, int, int, int]
    lse_slot: int | None
    encode: tuple[Encode, ...] | None
    unaligned: int
    index: int
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scale: float,
    ) -> None:
        """Enqueues the kernel on the current stream of the tensors' device, which need not be the current device.

        Raises LaunchError if an address is not aligned as the kernel expects, or the driver refuses.
        """
        index = self.index
        if self.current_device() != index:
            with torch.cuda.device(index):
                self(query, key, value, out, lse, scale)
            return
        q, k, v, o = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        if (q | k | v | o) & self.unaligned:
            raise LaunchError(f"{self.kernel.candidate} was built for 16-byte aligned tensors, and one begins elsewhere")
        encode = self.encode
        if encode is not None:
            q, k, v, o = encode[0](q), encode[1](k), encode[2](v), encode[3](o)
        arguments = self.arguments.copy()
        slots = self.slots
        arguments[slots[0]] = q
        arguments[slots[1]] = k
        arguments[slots[2]] = v
        arguments[slots[3]] = o
        arguments[slots[4]] = scale
        if self.lse_slot is not None:
            arguments[self.lse_slot] = lse.data_ptr()  # type: ignore[union-attr]
        try:
            self.enqueue(self.current_stream(index), arguments)
        except RuntimeError as error:
            raise LaunchError(f"{self.kernel.candidate} was not launched: {error}") from error


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class InterpretedLaunch:
    """The same for a kernel that Triton's interpreter runs."""

    kernel: Kernel
    grid: int
    arguments: Mapping[str, Any]
    describe: Mapping[str, Describe]

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scale: float,
    ) -> None:
        """Runs the kernel, one program after the other."""
        tensors: dict[str, Any] = dict(zip(TENSORS, (query, key, value, out)))
        described = {name: describe(tensors[name]) for name, describe in self.describe.items()}
        given = {**self.arguments, **tensors, **described, "lse": lse, "scale": scale}
        self.kernel.function[(self.grid,)](**{name: given[name] for name in self.kernel.arg_names})


def bind(
    candidate: Candidate,
    problem: Problem,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    device: Device,
) -> Launch | InterpretedLaunch:
    """Builds a candidate as these tensors need it, and prepares it for them: see `build` and `prepare`, whose errors it raises."""
    kernel = build(candidate, problem, device, wide_offsets=needs_wide_offsets((query, key, value, out)))
    return prepare(kernel, problem, query, key, value, out, lse, device)


def prepare(
    kernel: Kernel,
    problem: Problem,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    device: Device,
) -> Launch | InterpretedLaunch:
    """Binds the kernel to these tensors' shapes and strides, and loads it on their device.

    Tensors are in the problem's layout; lse, (batch, heads_q, seqlen_q) float32 and contiguous, is there if the kernel stores
    one. device says how many programs of a persistent kernel run at once. Raises ArgumentError for tensors that are not what the
    problem says or the kernel was built for, OutOfResourcesError or LaunchError if the driver refuses to load it, LaunchError if a
    schedule is needed while a CUDA graph is captured.
    """
    if kernel.candidate.variant.family != "forward":
        raise ArgumentError(f"{kernel.candidate} computes gradients; it must be a forward kernel")
    tensors = dict(zip(TENSORS, (query, key, value, out)))
    require_built_for(kernel, problem)
    require_fit(kernel, problem, tensors, query.device)
    if "lse" in kernel.arg_names:
        require_rows("lse", lse, problem)
    values: dict[str, Any] = {**integers_of(problem), **kernel.constants}
    describe: dict[str, Describe] = {}
    for name, tensor in tensors.items():
        values |= stride_arguments(name, tensor, problem.layout)
        if name in kernel.only.described:
            shape, strides = shape_of(name, problem), strides_of(tensor, problem.layout)
            describe[name] = describer(shape, strides, kernel.only.described[name], query.dtype)

    config = kernel.candidate.config
    grid = forward_tiles(problem, config)
    if kernel.compiled is None:
        if config.persistent:
            grid = min(grid, device.num_sms)
        return InterpretedLaunch(kernel=kernel, grid=grid, arguments=values, describe=describe)

    index = query.device.index
    loaded = kernel.on(index)
    if config.persistent:
        metadata = loaded.metadata
        at_once = programs_per_sm(metadata.num_warps, loaded.n_regs, metadata.shared, device)
        grid = min(grid, device.num_sms * max(1, at_once))
    if grid > MOST_GRID:
        raise ArgumentError(f"{problem} is {grid} blocks of {config.block_m} rows; a grid has at most {MOST_GRID}")
    if "schedule" in kernel.arg_names:
        table = tile_schedule(kernel.candidate, problem, grid, index)
        values |= {"schedule": table.data_ptr(), "schedule_width": table.shape[1]}
    enqueue, encodes = enqueuer(loaded, grid)
    somewhere = query.new_empty(512)  # an empty tensor has no address
    arguments: list[Any] = []
    places: dict[str, int] = {}
    for name in kernel.arg_names:
        places[name] = len(arguments)
        if name in TENSORS or name in ("lse", "scale"):
            arguments.append(None)
        elif name in values:
            arguments.append(values[name])
        else:
            raise TypeError(f"the kernel of {kernel.candidate.variant.name} has a parameter {name}, of which launch knows nothing")
        if encodes and name in describe:
            arguments += expanded(describe[name], somewhere)
    return Launch(
        kernel=kernel,
        enqueue=enqueue,
        arguments=arguments,
        slots=(places["q"], places["k"], places["v"], places["out"], places["scale"]),
        lse_slot=places.get("lse"),
        encode=tuple(encoder(kernel.only, loaded, name, each, somewhere, encodes) for name, each in describe.items()) or None,
        unaligned=15 if kernel.problem.aligned_16 else 0,
        index=index,
        current_device=torch._C._cuda_getDevice,
        current_stream=torch._C._cuda_getCurrentRawStream,
    )
