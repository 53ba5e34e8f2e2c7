"""Kernel + tensors -> enqueued: the one launch path that check, bench and dispatch share.

`prepare` binds everything that the shapes and strides decide; a call of the Launch it gives then only fills in addresses and the
scale. Triton's own launcher looks at every argument again on each call and encodes every TMA descriptor anew; a Launch calls
the C function beneath it, with descriptors kept by address.
"""

import functools
import inspect
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.build.kernel import TENSORS, Kernel, block_of, build, constants_of
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.errors import ArgumentError, LaunchError
from flashgen.problem import Problem
from flashgen.resources import programs_per_sm
from flashgen.schedule import blocks_seen, tile_lists
from flashgen.space import MOST_GRID

MAX_BLOCK = 512  # rows of the largest tile
KEPT_MAPS = 256  # encoded TMA descriptors a Launch keeps, each for one address of one tensor: 0.5 KB


def needs_wide_offsets(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a kernel needs 64-bit strides for these tensors.

    Kernels count batch, head and the first row of a tile in 64 bits in any case; what must fit 32 is a stride, and the rows of
    one tile times theirs. Rows are dimension 1 or 2, by layout; both are taken for rows here. Beyond the end, where addresses
    are not used, they may wrap around.
    """
    for tensor in tensors:
        if 0 in tensor.shape:
            continue
        for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
            rows = min(size, MAX_BLOCK) if dimension in (1, 2) else 1
            if size > 1 and rows * stride >= 2**31:
                return True
    return False


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Launch:
    """A kernel bound to shapes and strides. Call it with tensors of just these, in the problem's layout.

    enqueue       (stream, arguments) -> None: puts the kernel on a raw CUDA stream.
    arguments     values of the kernel's parameters, in order; those that change with each call are filled in.
    slots         where in them q, k, v, out and the scale go.
    lse_slot      where the log-sum-exp goes; None if the kernel stores none.
    encode        (which of q, k, v, out; address) -> TMA descriptor; None where the kernel takes addresses.
    unaligned     bits of an address that must be 0.
    index         of the CUDA device.
    """

    kernel: Kernel
    enqueue: Callable[[int, list[Any]], object]
    arguments: list[Any]
    slots: tuple[int, int, int, int, int]
    lse_slot: int | None
    encode: Callable[[int, int], Any] | None
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
            q, k, v, o = encode(0, q), encode(1, k), encode(2, v), encode(3, o)
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
    describe: Callable[[int, torch.Tensor], Any] | None

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
        if self.describe is not None:
            tensors = {name: self.describe(which, tensor) for which, (name, tensor) in enumerate(tensors.items())}
        given = {**self.arguments, **tensors, "lse": lse, "scale": scale}
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
    tensors = (query, key, value, out)
    _require_fit(kernel, problem, tensors, lse)
    shapes, strides = _shapes(problem), [_strides(tensor, problem.layout) for tensor in tensors]
    values: dict[str, Any] = {**_numbers(problem), **kernel.constants}
    for letter, (batch, heads, seqlen) in zip("qkvo", strides):
        values |= {f"stride_{letter}b": batch, f"stride_{letter}h": heads, f"stride_{letter}s": seqlen}
    describe = _describer(kernel, shapes, strides, query) if kernel.candidate.variant.load == "tma" else None

    config = kernel.candidate.config
    grid = values["num_heads"] * -(-problem.seqlen_q // config.block_m)
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
        table = _schedule(kernel.candidate, problem, grid, index)
        values |= {"schedule": table.data_ptr(), "schedule_width": table.shape[1]}
    enqueue, encodes = _enqueuer(loaded, grid)
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
        if describe is not None and encodes and name in TENSORS:
            # The C function takes a descriptor as its encoded map, its shape and its strides.
            blank = describe(TENSORS.index(name), query)
            arguments += [*blank.shape, *blank.strides]
    return Launch(
        kernel=kernel,
        enqueue=enqueue,
        arguments=arguments,
        slots=(places["q"], places["k"], places["v"], places["out"], places["scale"]),
        lse_slot=places.get("lse"),
        encode=None if describe is None else _encoder(kernel, loaded, describe, query, encodes),
        unaligned=15 if kernel.problem.aligned_16 else 0,
        index=index,
        current_device=torch._C._cuda_getDevice,
        current_stream=torch._C._cuda_getCurrentRawStream,
    )


def _schedule(candidate: Candidate, problem: Problem, programs: int, index: int) -> torch.Tensor:
    """(programs, width, 8) int32 on a CUDA device: how many tiles a program computes; then of each the batch item, the heads of Q and
    of K and V, the first row, the first block of keys, how many blocks, and the head of Q counted through the batch."""
    block_m, block_n = candidate.config.block_m, candidate.config.block_n
    lists = tile_lists(candidate, problem, programs)
    width = 1 + max(len(tiles) for tiles in lists)
    walks = []
    for row in range(0, problem.seqlen_q, block_m):
        first, end = blocks_seen(problem, row, block_m, block_n)
        walks.append((row, first, max(1, end - first)))
    group = problem.heads_q // problem.heads_kv
    numbers = array("i")
    for tiles in lists:
        numbers.extend((len(tiles), *[0] * 7))
        for tile in tiles:
            heads, row_block = divmod(tile, len(walks))
            item, head = divmod(heads, problem.heads_q)
            numbers.extend((item, head, head // group, *walks[row_block], heads, 0))
        numbers.extend([0] * 8 * (width - 1 - len(tiles)))
    return _copied(numbers.tobytes(), width, index)


@functools.cache
def _copied(numbers: bytes, width: int, index: int) -> torch.Tensor:
    """A schedule on a CUDA device. Equal ones are one, and it stays for the life of the process: a CUDA graph may hold its address
    when no Launch does."""
    with torch.cuda.device(index):
        if torch.cuda.is_current_stream_capturing():
            raise LaunchError("a schedule cannot be copied to the device while a CUDA graph is captured; call once before capturing")
        return torch.frombuffer(bytearray(numbers), dtype=torch.int32).view(-1, width, 8).cuda()


def _numbers(problem: Problem) -> dict[str, int]:
    """The kernel's integers. An unbounded side of the mask lies beyond every pair of query and key."""
    low, high = problem.band
    beyond = problem.seqlen_q + problem.seqlen_kv
    return {
        "num_heads": problem.batch * problem.heads_q,
        "heads_q": problem.heads_q,
        "heads_per_kv": problem.heads_q // problem.heads_kv,
        "seqlen_q": problem.seqlen_q,
        "seqlen_kv": problem.seqlen_kv,
        "band_low": -beyond if low is None else low,
        "band_high": beyond if high is None else high,
    }


def _shapes(problem: Problem) -> list[tuple[int, int, int, int]]:
    """(batch, heads, seqlen, head_dim) of q, k, v and out."""
    batch, heads_q, heads_kv = problem.batch, problem.heads_q, problem.heads_kv
    return [
        (batch, heads_q, problem.seqlen_q, problem.head_dim_qk),
        (batch, heads_kv, problem.seqlen_kv, problem.head_dim_qk),
        (batch, heads_kv, problem.seqlen_kv, problem.head_dim_v),
        (batch, heads_q, problem.seqlen_q, problem.head_dim_v),
    ]


def _strides(tensor: torch.Tensor, layout: str) -> tuple[int, int, int]:
    """Strides of (batch, heads, seqlen), in elements; 0 where there is but one, whatever PyTorch says then."""
    sizes, strides = list(tensor.shape[:3]), list(tensor.stride()[:3])
    order = (0, 1, 2) if layout == "bhsd" else (0, 2, 1)
    batch, heads, seqlen = (strides[place] if sizes[place] > 1 else 0 for place in order)
    return batch, heads, seqlen


def _require_fit(kernel: Kernel, problem: Problem, tensors: Sequence[torch.Tensor], lse: torch.Tensor | None) -> None:
    """ArgumentError naming the first tensor that is not what the problem says, or what the kernel was built for."""
    built = kernel.problem
    for name in ("dtype", "head_dim_qk", "head_dim_v"):
        if getattr(problem, name) != getattr(built, name):
            raise ArgumentError(f"{name} is {getattr(problem, name)}; the kernel was built for {getattr(built, name)}")
    for name, number in constants_of(kernel.candidate, problem).items():
        if kernel.constants.get(name, number) != number:
            raise ArgumentError(f"{name} is {number} for {problem}; the kernel was built with {kernel.constants[name]}")
    multiple = 16 // problem.itemsize if built.aligned_16 else 1
    for name, tensor, shape in zip(("query", "key", "value", "out"), tensors, _shapes(problem)):
        if problem.layout == "bshd":
            shape = (shape[0], shape[2], shape[1], shape[3])
        if tuple(tensor.shape) != shape or tensor.dtype != getattr(torch, problem.dtype):
            raise ArgumentError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}; the problem says {shape} {problem.dtype}")
        if tensor.device != tensors[0].device:
            raise ArgumentError(f"{name} is on {tensor.device}; query is on {tensors[0].device}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ArgumentError(f"{name} has a stride of {tensor.stride(-1)} in its last dimension; it must be 1")
        if any(stride % multiple for stride in _strides(tensor, problem.layout)):
            raise ArgumentError(f"{name} has strides {tensor.stride()}; the kernel was built for multiples of {multiple}")
    if kernel.candidate.variant.load == "pointer" and not kernel.wide_offsets and needs_wide_offsets(tensors):
        raise ArgumentError("a tensor needs 64-bit strides; the kernel was built without wide_offsets")
    if "lse" in kernel.arg_names:
        expected = (problem.batch, problem.heads_q, problem.seqlen_q)
        if lse is None or tuple(lse.shape) != expected or lse.dtype != torch.float32 or not lse.is_contiguous():
            raise ArgumentError(f"lse must be a contiguous float32 tensor of shape {expected}")


# ---- TMA descriptors -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Address:
    """Stands for a tensor in a TensorDescriptor that outlives it."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def _describer(
    kernel: Kernel, shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]], query: torch.Tensor
) -> Callable[[int, Any], Any]:
    """(which of q, k, v, out; tensor) -> Triton's TensorDescriptor of it as (batch, heads, seqlen, head_dim)."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    blocks = [block_of(name, kernel.candidate, kernel.problem) for name in TENSORS]
    # TMA wants sizes above 0 and strides that are multiples of 16 bytes also where a tensor is empty, or has one of something.
    multiple = 16 // query.element_size()
    sizes, steps = [], []
    for shape, each in zip(shapes, strides):
        unused = -(-shape[3] // multiple) * multiple
        sizes.append([max(1, size) for size in shape])
        steps.append([stride if size > 1 and 0 not in shape else unused for size, stride in zip(shape, each)] + [1])

    def describe(which: int, tensor: Any) -> Any:
        return TensorDescriptor(tensor, sizes[which], steps[which], blocks[which])

    return describe


def _encoder(
    kernel: Kernel, loaded: Any, describe: Callable[[int, Any], Any], query: torch.Tensor, encodes: bool
) -> Callable[[int, int], Any]:
    """(which of q, k, v, out; address) -> what the kernel takes for it; the most recent are kept.

    An encoded map depends on nothing but the address, so it stays right whichever tensor comes to lie there.
    """
    from triton.backends.nvidia.driver import make_tensordesc_arg

    names = [name for name in kernel.arg_names if name in TENSORS]
    layouts = dict(zip(names, loaded.metadata.tensordesc_meta))
    rest = (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)  # one more parameter since Triton 3.8
    dtype = query.dtype
    somewhere = query.new_empty(512)  # an empty tensor has no address

    @functools.lru_cache(maxsize=KEPT_MAPS)
    def encode(which: int, address: int) -> Any:
        descriptor = describe(which, _Address(address or somewhere.data_ptr(), dtype))
        if not encodes:
            return descriptor
        try:
            return make_tensordesc_arg(descriptor, layouts[TENSORS[which]], *rest)[0]
        except RuntimeError:
            # A thread that never used the GPU has no CUDA context yet, and the driver's encoder, unlike a launch, does not bind one.
            # To record an event does, and is allowed while a graph is captured.
            torch.cuda.Event().record()  # type: ignore[no-untyped-call]
            return make_tensordesc_arg(descriptor, layouts[TENSORS[which]], *rest)[0]

    return encode


# ---- Triton's launchers ---------------------------------------------------------------------------------------------------


def _enqueuer(loaded: Any, grid: int) -> tuple[Callable[[int, list[Any]], object], bool]:
    """(function that puts a loaded kernel on a stream, whether it takes encoded descriptors).

    Where Triton's C function is known (3.6 to 3.9) and the kernel needs no scratch memory, that is called; else Triton's launcher.
    """
    import triton
    from triton.runtime.driver import driver

    run, function, packed = loaded.run, loaded.function, loaded.packed_metadata
    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False) or release > (3, 9):

        def through_triton(stream: int, arguments: list[Any]) -> None:
            run(grid, 1, 1, stream, function, packed, None, None, None, *arguments)

        return through_triton, False

    cooperative, dependent = run.launch_cooperative_grid, run.launch_pdl
    if release >= (3, 7):  # one C function for all kernels; what it needs to know of the parameters is passed to it
        launch = driver.active.utils.launch
        annotations, signature = run.arg_annotations, run.kernel_signature

        def shared(stream: int, arguments: list[Any]) -> None:
            head = (grid, 1, 1, stream, function, cooperative, dependent, packed, None, None, None, None, None)
            launch(*head, annotations, signature, arguments)

        return shared, True

    # A C function of its own for each signature, inside a Python one where there are descriptors.
    own = run.launch
    if inspect.isfunction(own):
        own = inspect.getclosurevars(own).nonlocals["launcher"]

    def single(stream: int, arguments: list[Any]) -> None:
        own(grid, 1, 1, stream, function, cooperative, dependent, None, None, packed, None, None, None, *arguments)

    return single, True
