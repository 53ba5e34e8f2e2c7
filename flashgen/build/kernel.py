"""Candidate -> Kernel: compiled by Triton for a device, which need not be here."""

import copy
import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashgen import resources
from flashgen.build import binary, modules
from flashgen.candidate import Candidate, Variant
from flashgen.device import Device
from flashgen.errors import BuildError, LaunchError, OutOfResourcesError
from flashgen.problem import DTYPES, Problem
from flashgen.record import Resources
from flashgen.render import Source, render
from flashgen.schedule import (
    DQ_KEYS,
    MOST_PART,
    WARPGROUP_ROWS,
    cuts,
    dq_v_slots,
    least_stages,
    most_packed,
    skips,
    specialised_dims,
    tile_dim,
    warpgroup_queries,
)

TENSORS = ("q", "k", "v", "out")  # of forward kernels, in the order in which they are given
GRADIENTS = ("dout", "dq", "dk", "dv")
STATISTICS = ("lse", "dlse")  # of rows, float32
SCRATCH = ("delta", "rows", "bounds", "dq_scales", "dq_sum")  # for what one function of a backward kernel leaves to the next
SCRATCH_TILES = {"rows_tiles": "rows", "scales_tiles": "dq_scales", "dq_tiles": "dq_sum"}  # the same as TMA moves it
INTEGERS = ("num_heads", "heads_q", "heads_per_kv", "seqlen_q", "seqlen_kv", "band_low", "band_high", "schedule_width", "dq_beyond")
ELEMENTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}  # Triton's names, and the command line's
FIRST_WARPS = 4  # of a hopper kernel when it starts: its first warpgroup, which then asks for the others

_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True, eq=False)
class Function:
    """One kernel function of a generated module, as machine code, or as Triton's interpreter runs it (`compiled` is then None).

    jit        the jit function.
    constants  the values of its constexpr parameters.
    described  parameters that are TMA descriptors, in order, and the block in which each moves its tensor.
    """

    candidate: Candidate
    jit: Any
    compiled: Any | None
    constants: Mapping[str, int]
    described: Mapping[str, list[int]]
    _loaded: dict[int, Any] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return str(self.jit.__name__)

    @property
    def arg_names(self) -> tuple[str, ...]:
        """Its parameters, in order; whoever binds arguments looks them up by name."""
        return tuple(self.jit.arg_names)

    def on(self, index: int) -> Any:
        """Triton's CompiledKernel, loaded on the CUDA device with this index; each device has a handle of its own.

        Raises OutOfResourcesError or LaunchError if the driver refuses it.
        """
        with _lock:
            if index not in self._loaded:
                self._loaded[index] = self._load(index)
            return self._loaded[index]

    def _load(self, index: int) -> Any:
        import torch
        import triton
        from triton.runtime.errors import OutOfResources

        # The original is never loaded, so every copy starts without handles.
        loaded: Any = copy.copy(self.compiled)
        try:
            with torch.cuda.device(index):
                loaded.run  # noqa: B018 - the first access loads the module on the current device
        except OutOfResources as error:
            raise OutOfResourcesError(f"{self.candidate} cannot be loaded: {error}") from error
        except (RuntimeError, OSError) as error:
            versions = f"triton {triton.__version__}, torch {torch.__version__}"
            raise LaunchError(f"{self.candidate} cannot be loaded on cuda:{index} ({versions}): {error}") from error
        return loaded


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """A candidate, built: the functions of its module, in the order in which they are launched. A forward kernel has one, and
    `function`, `compiled`, `arg_names`, `constants` and `on` are that one's.

    problem    what it was compiled for: its dtype, head dims and alignment are in the code, and all that `constants_of` says of it.
    """

    candidate: Candidate
    problem: Problem
    source: Source
    functions: tuple[Function, ...]
    wide_offsets: bool

    @property
    def only(self) -> Function:
        """Its only function. Raises ValueError for a kernel that has several."""
        if len(self.functions) > 1:
            raise ValueError(f"{self.candidate} has {len(self.functions)} functions: {', '.join(each.name for each in self.functions)}")
        return self.functions[0]

    @property
    def interpreted(self) -> bool:
        return self.functions[0].compiled is None

    @property
    def function(self) -> Any:
        return self.only.jit

    @property
    def compiled(self) -> Any | None:
        return self.only.compiled

    @property
    def arg_names(self) -> tuple[str, ...]:
        return self.only.arg_names

    @property
    def constants(self) -> Mapping[str, int]:
        return self.only.constants

    def on(self, index: int) -> Any:
        return self.only.on(index)

    @functools.cached_property
    def resources(self) -> Resources:
        """What the compiler says of the machine code; of several functions, the most registers and shared memory, and all spills.

        Raises BuildError for an interpreted kernel, which has none, and for a hopper kernel whose products ptxas let run one at a time
        only.
        """
        if self.interpreted:
            raise BuildError(f"{self.candidate} is interpreted and has no machine code")
        config, variant = self.candidate.config, self.candidate.variant
        # Equal code is the same kernel only if it is launched alike: grid and schedule follow from these.
        if variant.family == "backward":
            launched_as: tuple[Any, ...] = (config.block_n, config.head_group)
        else:
            launched_as = (config.block_m, config.persistent)
            if variant.backend == "hopper":
                launched_as += (config.block_n, config.head_group, variant.longest_first, config.packed_heads)
        return binary.total(
            [binary.resources(each.compiled, launched_as, specialised=variant.backend == "hopper") for each in self.functions]
        )


def build(candidate: Candidate, problem: Problem, device: Device, *, wide_offsets: bool = False) -> Kernel:
    """The candidate compiled for the device; no GPU is needed. Interpreted if TRITON_INTERPRET is set.

    wide_offsets: strides are 64-bit (see launch.needs_wide_offsets). Triton's cache on disk makes a second compilation, also in
    another process, a look-up. Raises BuildError with what the compiler said, OutOfResourcesError naming the resource, what the
    kernel needs and what the device has.
    """
    from triton import knobs

    if candidate.variant.backend == "hopper":
        if knobs.runtime.interpret:
            raise BuildError(f"{candidate}: Gluon kernels are not interpreted; unset TRITON_INTERPRET")
        _require_launchable_on_hopper(candidate, problem, device)
    else:
        _require_launchable(candidate)
    source = render(candidate.variant)
    module = modules.load(source)
    constants = constants_of(candidate, problem)
    functions = []
    for entry in source.entries:
        function = getattr(module, entry)
        described = _described(function, candidate, problem)
        compiled = None
        if not knobs.runtime.interpret:
            compiled = _compiled(function, candidate, problem, device, constants, described, wide_offsets)
            _require_resources(compiled, candidate, device)
        own = {name: value for name, value in constants.items() if name in function.arg_names}
        functions.append(Function(candidate=candidate, jit=function, compiled=compiled, constants=own, described=described))
    return Kernel(candidate=candidate, problem=problem, source=source, functions=tuple(functions), wide_offsets=wide_offsets)


def block_of(tensor: str, candidate: Candidate, problem: Problem, entry: str = "attention_forward") -> list[int]:
    """The block in which a function's TMA descriptor moves a tensor (batch, heads, seqlen, head_dim), or scratch memory."""
    numbers = constants_of(candidate, problem)
    block_m, dim_qk, dim_v = numbers["BLOCK_M"], numbers["BLOCK_D_QK"], numbers["BLOCK_D_V"]
    columns = dim_qk if tensor.removeprefix("d") in ("q", "k") else dim_v
    if tensor == "rows_tiles":
        return [2 * block_m]
    if tensor == "scales_tiles":
        return [block_m]
    if tensor == "dq_tiles":  # a warpgroup's share of a tile, 64 rows, in the order of its registers
        columns = dq_sum_columns(candidate.variant)
        return [WARPGROUP_ROWS * resources.dq_columns(block_m, dim_qk) // columns, columns]
    if entry == "attention_backward_dkdv":
        if tensor in ("dk", "dv"):  # through the memory of v, or each through that of its own
            return [1, 1, WARPGROUP_ROWS, min(dim_qk, dim_v, MOST_PART)]
        return [1, 1, {"k": numbers["BLOCK_N"], "v": WARPGROUP_ROWS}.get(tensor, block_m), columns]
    if entry == "attention_forward":
        if tensor in ("k", "v"):
            return [1, 1, numbers["BLOCK_N"], columns]
        if candidate.variant.backend == "triton":
            return [1, 1, block_m, columns]
    if tensor in ("k", "v"):
        return [1, 1, DQ_KEYS, columns]
    # A warpgroup of a hopper kernel reads and writes its own rows, of several heads if these are packed, and wide ones in parts.
    config = candidate.config
    columns = min(columns, MOST_PART) if tensor in ("out", "dq") else columns
    return [1, config.packed_heads, warpgroup_queries(config), columns]


def dq_sum_columns(variant: Variant) -> int:
    """Of the matrix as which TMA sees the sums of dq: 128 bytes."""
    return 128 // DTYPES[resources.dq_sum_dtype(variant)]


def scratch_dtype(name: str, variant: Variant) -> str:
    """Of the elements of scratch memory, by the name that it has itself or as TMA moves it."""
    return resources.dq_sum_dtype(variant) if SCRATCH_TILES.get(name, name) == "dq_sum" else "float32"


def constants_of(candidate: Candidate, problem: Problem) -> dict[str, int]:
    """Numbers of a kernel by the names that its constexpr parameters have. Problems with the same ones, dtype, head dims and alignment
    share a kernel of the candidate."""
    config = candidate.config
    hopper = candidate.variant.backend == "hopper"
    dim_qk, dim_v = specialised_dims(problem) if hopper else (tile_dim(problem.head_dim_qk), tile_dim(problem.head_dim_v))
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "NUM_STAGES": config.num_stages,
        "BLOCK_D_QK": dim_qk,
        "BLOCK_D_V": dim_v,
    }
    if hopper and candidate.variant.family == "forward":
        return constants | {
            "WARPGROUPS": config.block_m // WARPGROUP_ROWS,
            "Q_STAGES": config.q_stages,
            "CUTS": cuts(problem, config),
            "SKIPS": int(skips(problem, config)),
            "REGISTERS": resources.consumer_registers(config),
        }
    constants |= {"HEAD_DIM_QK": problem.head_dim_qk, "HEAD_DIM_V": problem.head_dim_v, "HEAD_GROUP": config.head_group}
    return constants | ({"V_SLOTS": dq_v_slots(problem)} if hopper else {})


def options_of(candidate: Candidate) -> dict[str, int]:
    """What Triton is told of how to compile and launch the kernel's functions."""
    config = candidate.config
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.maxnreg, "enable_fp_fusion": True}
    if candidate.variant.backend == "hopper":
        options = {"num_warps": FIRST_WARPS, "enable_fp_fusion": True}
    return {name: value for name, value in options.items() if value is not None}


def _is_gluon(function: Any, variant: Variant) -> bool:
    """A hopper module has functions of both kinds, others have none."""
    if variant.backend != "hopper":
        return False
    from triton.experimental.gluon._runtime import GluonJITFunction

    return isinstance(function, GluonJITFunction)


def _described(function: Any, candidate: Candidate, problem: Problem) -> dict[str, list[int]]:
    """Parameters that are TMA descriptors, and their blocks."""
    variant = candidate.variant
    if variant.load != "tma" or (variant.backend == "hopper" and not _is_gluon(function, variant)):
        return {}
    names = (name for name in function.arg_names if name in (*TENSORS, *GRADIENTS, *SCRATCH_TILES))
    return {name: block_of(name, candidate, problem, function.__name__) for name in names}


def _compiled(
    function: Any,
    candidate: Candidate,
    problem: Problem,
    device: Device,
    constants: Mapping[str, int],
    described: Mapping[str, list[int]],
    wide_offsets: bool,
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.errors import TritonError
    from triton.runtime.errors import OutOfResources

    modules.compiled_dir()
    source = ASTSource
    gluon = _is_gluon(function, candidate.variant)
    if gluon:
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource
    types = {name: _type(name, candidate, problem, constants, wide_offsets) for name in function.arg_names}
    for name, block in described.items():
        dtype = scratch_dtype(name, candidate.variant) if name in SCRATCH_TILES else problem.dtype
        types[name] = _descriptor(block, dtype, gluon)
    multiples: dict[str, int] = {}
    if problem.aligned_16:
        # What autograd gives as the gradient of a log-sum-exp, and what a caller has kept of it, may begin anywhere.
        anywhere = ("lse", "dlse") if candidate.variant.family == "backward" else ()
        for name, kind in types.items():
            if kind.startswith("*") and name not in anywhere:
                multiples[name] = 16  # a pointer counts bytes
            elif name.startswith("stride_"):
                multiples[name] = 16 // problem.itemsize  # a stride counts elements
    places = {name: (place,) for place, name in enumerate(function.arg_names)}
    try:
        return triton.compile(
            source(
                function,
                types,
                {places[name]: constants[name] for name, kind in types.items() if kind == "constexpr"},
                {places[name]: [["tt.divisibility", multiple]] for name, multiple in multiples.items()},
            ),
            target=GPUTarget("cuda", device.capability, 32),
            options=options_of(candidate),
        )
    except OutOfResources as error:
        raise OutOfResourcesError(f"{candidate} does not fit {device.name}: {error}") from error
    except (TritonError, RuntimeError, OSError, IndexError) as error:
        # RuntimeError: a pass failed. IndexError: how libtriton's std::out_of_range arrives. OSError: ptxas or the cache folder.
        raise BuildError(f"{candidate} does not compile: {_reason(error)}") from error


def _type(name: str, candidate: Candidate, problem: Problem, constants: Mapping[str, int], wide_offsets: bool) -> str:
    """Triton's name for the type of a parameter."""
    if name in constants:
        return "constexpr"
    if name in TENSORS or name in GRADIENTS:
        return f"*{ELEMENTS[problem.dtype]}"
    if name in STATISTICS:
        return "*fp32"
    if name in (*SCRATCH, *SCRATCH_TILES):
        return f"*{ELEMENTS[scratch_dtype(name, candidate.variant)]}"
    if name == "schedule":
        return "*i32"
    if name == "scale":
        return "fp32"
    if name.startswith("stride_"):
        return "i64" if wide_offsets else "i32"
    if name in INTEGERS:
        return "i32"
    raise TypeError(f"the kernel of {candidate.variant.name} has a parameter {name}, of which build knows nothing")


def _descriptor(block: list[int], dtype: str, gluon: bool) -> str:
    """Triton's name for the type of a TMA descriptor; Gluon's has the layout of a block in shared memory, as TMA writes it and products
    read it."""
    if not gluon:
        return f"tensordesc<{ELEMENTS[dtype]}{block}>"
    from triton.experimental.gluon import language as gl

    if len(block) == 1:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    else:
        layout = gl.NVMMASharedLayout.get_default_for(block, getattr(gl, dtype))
    return f"tensordesc<{ELEMENTS[dtype]}{block},{layout!r}>"


def _require_launchable(candidate: Candidate) -> None:
    """Refuses numbers that no device launches, before the compiler dies of them."""
    config = candidate.config
    for name in ("num_warps", "block_m", "block_n"):
        value = getattr(config, name)
        if value & (value - 1):
            raise BuildError(f"{candidate}: {name} is {value}; it must be a power of two")
    if config.packed_heads > 1:
        raise BuildError(f"{candidate}: packed_heads is {config.packed_heads}; a tile of a portable kernel is of 1 head")
    if config.num_warps > 32:
        raise OutOfResourcesError(f"{candidate}: {config.num_warps} warps are {config.num_warps * 32} threads; a block has at most 1024")
    if config.maxnreg is not None and config.maxnreg > 255:
        raise OutOfResourcesError(f"{candidate}: maxnreg is {config.maxnreg}; a thread has at most 255 registers")


def _require_launchable_on_hopper(candidate: Candidate, problem: Problem, device: Device) -> None:
    """The same for a hopper kernel, which is written for certain tiles, and waits for ever if it has too few slots."""
    if device.capability != 90:
        raise BuildError(f"{candidate}: a hopper kernel needs sm_90; {device.name} is {device.arch}")
    config, variant = candidate.config, candidate.variant
    backward = variant.family == "backward"
    packed = tuple(1 << bits for bits in range(most_packed(problem).bit_length()))
    choices = {"block_m": (64, 128, 192), "block_n": (64, 128), "q_stages": (1, 2), "num_warps": (config.block_m // 16,)}
    if backward:
        choices = {"block_m": (64, 128), "block_n": (64 if variant.split_roles else 128,), "q_stages": (1,), "num_warps": (8,)}
    choices["packed_heads"] = (1,) if backward else packed
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise BuildError(f"{candidate}: {name} is {getattr(config, name)}; it must be {' or '.join(map(str, allowed))}")
    if variant.fused and variant.split_roles:
        raise BuildError(f"{candidate}: fused and split_roles are both set; at most one may be")
    if variant.float16_dq and not variant.fused:
        raise BuildError(f"{candidate}: float16_dq is set and fused is not; the one needs the other")
    if config.maxnreg is not None:
        raise BuildError(f"{candidate}: maxnreg is {config.maxnreg}; a hopper kernel divides the registers itself, so it must be None")
    if problem.itemsize != 2 or not problem.aligned_16:
        raise BuildError(f"{candidate}: a hopper kernel needs 16-bit elements and 16-byte aligned tensors, which {problem} does not have")
    if max(problem.head_dim_qk, problem.head_dim_v) > 256:
        raise BuildError(f"{candidate}: a hopper kernel has head dims of at most 256; {problem} has more")
    least = 1 if backward else least_stages(problem, config)
    if config.num_stages < least:
        raise BuildError(f"{candidate}: num_stages is {config.num_stages}; {problem} needs at least {least} slots")


def _require_resources(compiled: Any, candidate: Candidate, device: Device) -> None:
    """Triton itself asks for these only when it loads a kernel, on a device."""
    if compiled.metadata.shared > device.smem_per_block_bytes:
        needed, there_is = compiled.metadata.shared, device.smem_per_block_bytes
        raise OutOfResourcesError(f"{candidate} needs {needed} bytes of shared memory; a block of {device.name} has {there_is}")
    if compiled.metadata.num_warps > 32:
        raise OutOfResourcesError(f"{candidate} needs {compiled.metadata.num_warps * 32} threads; a block has at most 1024")


def _reason(error: BaseException) -> str:
    """The informative end of what the compiler said: ptxas's own words, else the last lines of the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error)
    if "`ptxas` stderr:" in text:
        head, _, rest = text.partition("`ptxas` stderr:")
        text = head + rest.partition("Repro command:")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[-6:])[-1000:] or type(error).__name__
