"""Candidate -> Kernel: compiled by Triton for a device, which need not be here."""

import copy
import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashgen import cost
from flashgen.build import binary, modules
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.errors import BuildError, LaunchError, OutOfResourcesError
from flashgen.problem import Problem
from flashgen.record import Resources
from flashgen.render import Source, render

TENSORS = ("q", "k", "v", "out")
INTEGERS = ("num_heads", "heads_q", "heads_per_kv", "seqlen_q", "seqlen_kv", "band_low", "band_high")
ELEMENTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}  # Triton's names, and the command line's

_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """A candidate as machine code, or as a function that Triton's interpreter runs (`compiled` is then None).

    problem    what it was compiled for: its dtype, head dims and alignment are in the code.
    function   the jit function of the generated module.
    arg_names  its parameters, in order; whoever binds arguments looks them up by name.
    constants  the values of its constexpr parameters.
    """

    candidate: Candidate
    problem: Problem
    source: Source
    function: Any
    compiled: Any | None
    constants: Mapping[str, int]
    wide_offsets: bool
    _loaded: dict[int, Any] = field(default_factory=dict, repr=False)

    @property
    def arg_names(self) -> tuple[str, ...]:
        return tuple(self.function.arg_names)

    @functools.cached_property
    def resources(self) -> Resources:
        """What the compiler says of the machine code. Raises BuildError for an interpreted kernel, which has none."""
        if self.compiled is None:
            raise BuildError(f"{self.candidate} is interpreted and has no machine code")
        config = self.candidate.config
        # Equal code is the same kernel only if it is launched alike: the grid follows from block_m and persistent.
        return binary.resources(self.compiled, launched_as=(config.block_m, config.persistent))

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


def build(candidate: Candidate, problem: Problem, device: Device, *, wide_offsets: bool = False) -> Kernel:
    """The candidate compiled for the device; no GPU is needed. Interpreted if TRITON_INTERPRET is set.

    wide_offsets: strides are 64-bit (see launch.needs_wide_offsets). Triton's cache on disk makes a second compilation, also in
    another process, a look-up. Raises BuildError with what the compiler said, OutOfResourcesError naming the resource, what the
    kernel needs and what the device has.
    """
    from triton import knobs

    _require_launchable(candidate)
    source = render(candidate.variant)
    function = getattr(modules.load(source), source.entry)
    constants = _constants(candidate, problem)
    compiled = None
    if not knobs.runtime.interpret:
        compiled = _compiled(function, candidate, problem, device, constants, wide_offsets)
        _require_resources(compiled, candidate, device)
    return Kernel(
        candidate=candidate,
        problem=problem,
        source=source,
        function=function,
        compiled=compiled,
        constants={name: value for name, value in constants.items() if name in function.arg_names},
        wide_offsets=wide_offsets,
    )


def block_of(tensor: str, constants: Mapping[str, int]) -> list[int]:
    """The block in which a TMA descriptor of (batch, heads, seqlen, head_dim) moves q, k, v or out."""
    rows = constants["BLOCK_M"] if tensor in ("q", "out") else constants["BLOCK_N"]
    return [1, 1, rows, constants["BLOCK_D_QK"] if tensor in ("q", "k") else constants["BLOCK_D_V"]]


def _constants(candidate: Candidate, problem: Problem) -> dict[str, int]:
    config = candidate.config
    return {
        "HEAD_DIM_QK": problem.head_dim_qk,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D_QK": cost.tile_dim(problem.head_dim_qk),
        "BLOCK_D_V": cost.tile_dim(problem.head_dim_v),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "NUM_STAGES": config.num_stages,
        "HEAD_GROUP": config.head_group,
    }


def _compiled(
    function: Any, candidate: Candidate, problem: Problem, device: Device, constants: Mapping[str, int], wide_offsets: bool
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.errors import TritonError
    from triton.runtime.errors import OutOfResources

    modules.compiled_dir()
    config = candidate.config
    types = {name: _type(name, candidate, problem, constants, wide_offsets) for name in function.arg_names}
    multiples: dict[str, int] = {}
    if problem.aligned_16:
        for name, kind in types.items():
            if kind.startswith("*"):
                multiples[name] = 16  # a pointer counts bytes
            elif name.startswith("stride_"):
                multiples[name] = 16 // problem.itemsize  # a stride counts elements
    places = {name: (place,) for place, name in enumerate(function.arg_names)}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    if config.maxnreg is not None:
        options["maxnreg"] = config.maxnreg
    try:
        return triton.compile(
            ASTSource(
                function,
                types,
                {places[name]: constants[name] for name, kind in types.items() if kind == "constexpr"},
                {places[name]: [["tt.divisibility", multiple]] for name, multiple in multiples.items()},
            ),
            target=GPUTarget("cuda", device.capability, 32),
            options=options,
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
    if name in TENSORS:
        element = ELEMENTS[problem.dtype]
        return f"tensordesc<{element}{block_of(name, constants)}>" if candidate.variant.load == "tma" else f"*{element}"
    if name == "lse":
        return "*fp32"
    if name == "scale":
        return "fp32"
    if name.startswith("stride_"):
        return "i64" if wide_offsets else "i32"
    if name in INTEGERS:
        return "i32"
    raise TypeError(f"the kernel of {candidate.variant.name} has a parameter {name}, of which build knows nothing")


def _require_launchable(candidate: Candidate) -> None:
    """Refuses numbers that no device launches, before the compiler dies of them."""
    config = candidate.config
    for name in ("num_warps", "block_m", "block_n"):
        value = getattr(config, name)
        if value & (value - 1):
            raise BuildError(f"{candidate}: {name} is {value}; it must be a power of two")
    if config.num_warps > 32:
        raise OutOfResourcesError(f"{candidate}: {config.num_warps} warps are {config.num_warps * 32} threads; a block has at most 1024")
    if config.maxnreg is not None and config.maxnreg > 255:
        raise OutOfResourcesError(f"{candidate}: maxnreg is {config.maxnreg}; a thread has at most 255 registers")


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
