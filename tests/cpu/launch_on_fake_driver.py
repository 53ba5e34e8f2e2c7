"""Run by test_launch.py: launches compiled kernels through Triton's own C launcher on a CUDA driver that only looks.

Prints one JSON object. fake_libcuda.c takes the driver's place before Triton looks for it, so everything between a Launch and the
driver is what runs on a GPU: the launcher that Triton compiles for 3.6, and the shared one of later releases.
"""

import contextlib
import ctypes
import dataclasses
import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import torch
import triton

folder = Path(sys.argv[1])
library = folder / "libcuda.so.1"
include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
source = Path(__file__).with_name("fake_libcuda.c")
compiler = os.environ.get("CC", "cc")
subprocess.run([compiler, "-shared", "-fPIC", "-w", f"-I{include}", source, "-o", library, "-Wl,-soname,libcuda.so.1"], check=True)
os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
driver_library = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)

ON_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)
U64, U32 = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)
ON_ENCODE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, U64, U64, U32)
FORMATS = {"*": ("<Q", 8), "i32": ("<i", 4), "i64": ("<q", 8), "fp32": ("<f", 4)}

launches, encoded, guarded = [], [], []
types: list[str] = []
types_of: dict[int, list[str]] = {}  # of functions that are launched among others
refuse = 0


def read(address, kind):
    form, size = FORMATS["*" if kind[0] in "*t" else kind]
    return struct.unpack(form, ctypes.string_at(address, size))[0]


def on_launch(grid, threads, smem, stream, function, parameters):
    launches.append(
        {"grid": grid, "threads": threads, "stream": stream, "function": function}
        | {"parameters": [read(parameters[place], kind) for place, kind in enumerate(types_of.get(function, types))]}
    )
    return refuse


def on_encode(map, address, sizes, strides, box):
    encoded.append({"address": address, "sizes": sizes[:4], "strides": strides[:3], "box": box[:4]})
    return 0


watching = (ON_LAUNCH(on_launch), ON_ENCODE(on_encode))
driver_library.fake_watch(*watching)

# What a CUDA build of PyTorch answers, on a machine with two GPUs of which the first is current.
current = 0


@contextlib.contextmanager
def guard(index):
    global current
    before, current = current, index
    guarded.append(index)
    yield
    current = before


torch._C._cuda_getDevice = lambda: current
torch._C._cuda_getCurrentRawStream = lambda index: 100 + index
torch.cuda.current_device = lambda: current
torch.cuda.get_device_capability = lambda *device: (9, 0)
torch.cuda.device = guard
capturing = False
torch.cuda.is_current_stream_capturing = lambda: capturing
copies = []  # of schedules to the device, which stay where they are
torch.Tensor.cuda = lambda tensor: copies.append(tensor) or tensor

from triton.backends.nvidia.driver import CudaDriver  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

driver.set_active(CudaDriver())

from flashgen.build import build, export  # noqa: E402
from flashgen.candidate import Candidate, Config, Variant  # noqa: E402
from flashgen.device import Device  # noqa: E402
from flashgen.errors import FlashgenError  # noqa: E402
from flashgen.launch import KEPT_MAPS, BackwardInputs, prepare, prepare_backward  # noqa: E402
from flashgen.problem import Problem  # noqa: E402

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@dataclasses.dataclass
class FakeTensor:
    """A tensor that says it is on a GPU; nothing reads its elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = SECOND
    is_cuda = requires_grad = False

    @classmethod
    def contiguous(cls, *shape, address, **more):
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        return cls(shape, tuple(strides), address, **more)

    def stride(self, dimension=None):
        return self.strides if dimension is None else self.strides[dimension]

    def data_ptr(self):
        return self.address

    def element_size(self):
        return self.dtype.itemsize

    def is_contiguous(self):
        return True

    def numel(self):
        return math.prod(self.shape)

    def new_empty(self, *shape, dtype=None):
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        return FakeTensor.contiguous(*shape, address=0x5000, dtype=dtype or self.dtype, device=self.device)


def moved(tensor, address):
    return dataclasses.replace(tensor, address=address)


H200 = Device.named("h200")
problem = Problem(
    batch=2, heads_q=6, heads_kv=3, seqlen_q=130, seqlen_kv=200, head_dim_qk=64, head_dim_v=64, mask="causal", return_lse=True
)
query = FakeTensor.contiguous(2, 6, 130, 64, address=0x10000)
key = FakeTensor((2, 3, 200, 64), (200 * 256, 64, 256, 1), 0x20000)  # rows of a longer buffer
value = FakeTensor.contiguous(2, 3, 200, 64, address=0x30000)
out = FakeTensor.contiguous(2, 6, 130, 64, address=0x40000)
lse = FakeTensor.contiguous(2, 6, 130, address=0x50000, dtype=torch.float32)


def kernel_of(load, for_problem=problem, mask="causal", wide=False, **config):
    config = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2} | config
    variant = Variant(mask=mask, load=load, store_lse=for_problem.return_lse)
    return build(Candidate(variant=variant, config=Config(**config)), for_problem, H200, wide_offsets=wide)


def rank_of(kind):
    return kind.partition("[")[2].partition("]")[0].count(",") + 1


def expanded(function):
    """Types of a function's parameters; a descriptor comes with its sizes and strides."""
    kinds = []
    for kind in function.compiled.src.signature.values():
        if kind.startswith("tensordesc"):
            kinds.extend([kind, *["i32"] * rank_of(kind), *["i64"] * rank_of(kind)])
        elif kind != "constexpr":
            kinds.append(kind)
    return kinds


def watch(kernel, expand):
    """Reads parameters by the kernel's signature."""
    kinds = kernel.compiled.src.signature.values()
    types[:] = expanded(kernel) if expand else [kind for kind in kinds if kind != "constexpr"]


def named(kernel, launch):
    """Parameters of a launch by name; a descriptor's by its address."""
    values = iter(launch["parameters"])
    found = {}
    for name, kind in kernel.compiled.src.signature.items():
        if kind != "constexpr":
            found[name] = next(values)
            if kind.startswith("tensordesc"):
                found[f"{name}_sizes"] = [next(values) for _ in range(rank_of(kind))]
                found[f"{name}_strides"] = [next(values) for _ in range(rank_of(kind))]
    return {**launch, "parameters": found}


def refused(call, *arguments):
    try:
        call(*arguments)
    except FlashgenError as error:
        return f"{type(error).__name__}: {error}"
    return ""


seen: dict[str, object] = {"triton": triton.__version__}
for load in ("pointer", "tma"):
    kernel = kernel_of(load)
    watch(kernel, expand=True)
    launch = prepare(kernel, problem, query, key, value, out, lse, H200)
    launch(query, key, value, out, lse, 0.125)
    seen[load] = named(kernel, launches[-1])
    seen[f"{load}_guarded"] = list(guarded)
    current = 1
    guarded.clear()
    launch(query, key, value, moved(out, 0x60000), moved(lse, 0x70000), 0.25)
    seen[f"{load}_again"] = named(kernel, launches[-1])
    seen[f"{load}_again_guarded"] = list(guarded)
    current = 0
    seen[f"{load}_unaligned"] = refused(launch, moved(query, 0x10002), key, value, out, lse, 1.0)
    refuse = 999
    seen[f"{load}_refused"] = refused(launch, query, key, value, out, lse, 1.0)
    refuse = 0
    on_first = [dataclasses.replace(each, device=FIRST) for each in (query, key, value, out, lse)]
    prepare(kernel, problem, *on_first, H200)(*on_first, 1.0)
    seen[f"{load}_on_first"] = named(kernel, launches[-1])
    if load == "tma":
        seen["encoded"] = list(encoded)
        encoded.clear()
        for step in range(2 * KEPT_MAPS):
            launch(moved(query, 0x100000 + 0x1000 * step), key, value, out, lse, 1.0)
        seen["encoded_for_many"] = len([each for each in encoded if each["address"] >= 0x100000])
        seen["encoded_again"] = len(encoded) - seen["encoded_for_many"]
        seen["kept"] = launch.encode[0].cache_info().currsize
    current = 1
    driver_library.fake_watch(None, None)
    best = float("inf")
    for _ in range(10):
        begin = time.process_time()
        for _ in range(500):
            launch(query, key, value, out, lse, 1.0)
        best = min(best, time.process_time() - begin)
    seen[f"{load}_us"] = best / 500 * 1e6
    driver_library.fake_watch(*watching)
    current = 0

for load in ("pointer", "tma"):
    empty_problem = dataclasses.replace(problem, seqlen_kv=0, mask="full", return_lse=False)
    kernel = kernel_of(load, empty_problem, mask="full")
    watch(kernel, expand=True)
    nothing = FakeTensor.contiguous(2, 3, 0, 64, address=0)
    encoded.clear()
    prepare(kernel, empty_problem, query, nothing, nothing, out, None, H200)(query, nothing, nothing, out, None, 1.0)
    seen[f"{load}_empty"] = named(kernel, launches[-1])
    if load == "tma":
        seen["encoded_empty"] = list(encoded)

big = Problem(batch=64, heads_q=32, heads_kv=32, seqlen_q=512, seqlen_kv=512, head_dim_qk=64, head_dim_v=64, window=(100, 0))
tensors = [FakeTensor.contiguous(64, 32, 512, 64, address=0x10000 * (1 + place)) for place in range(4)]
for num_sms in (1, 7, 132):
    kernel = kernel_of("pointer", big, mask="window", persistent=True)
    watch(kernel, expand=True)
    device = dataclasses.replace(H200, num_sms=num_sms)
    prepare(kernel, big, *tensors, None, device)(*tensors, None, 1.0)
    seen[f"persistent_{num_sms}"] = named(kernel, launches[-1])

wide = kernel_of("pointer", big, mask="window", wide=True)
watch(wide, expand=True)
far = [dataclasses.replace(each, strides=(2**33, 512 * 64, 64, 1)) for each in tensors]
prepare(wide, big, *far, None, H200)(*far, None, 1.0)
seen["wide"] = named(wide, launches[-1])
narrow = kernel_of("pointer", big, mask="window")
seen["narrow"] = refused(prepare, narrow, big, *far, None, H200)

long = dataclasses.replace(problem, seqlen_q=520, seqlen_kv=520)
tensors = [FakeTensor.contiguous(2, heads, 520, 64, address=0x10000 * (1 + place)) for place, heads in enumerate((6, 3, 3, 6))]
long_lse = FakeTensor.contiguous(2, 6, 520, address=0x50000, dtype=torch.float32)
few = dataclasses.replace(H200, num_sms=7)


def hopper_kernel_of(for_problem, **config):
    config = {"block_m": 192, "block_n": 128, "num_warps": 12, "num_stages": 4, "persistent": True} | config
    variant = Variant(backend="hopper", mask="causal", load="tma", order="pv_first", longest_first=True, store_lse=for_problem.return_lse)
    return build(Candidate(variant=variant, config=Config(**config)), for_problem, H200)


kernel = hopper_kernel_of(long)
watch(kernel, expand=True)
encoded.clear()
capturing = True
seen["hopper_captured"] = refused(prepare, kernel, long, *tensors, long_lse, few)
capturing = False
launch = prepare(kernel, long, *tensors, long_lse, few)
capturing = True  # the second one finds the schedule on the device
prepare(hopper_kernel_of(long, num_stages=5), long, *tensors, long_lse, few)(*tensors, long_lse, 0.125)
capturing = False
launch(*tensors, long_lse, 0.125)
seen["hopper"] = named(kernel, launches[-1])
seen["hopper_encoded"] = list(encoded)
(copied,) = copies
seen["hopper_schedule"] = copied.tolist()
seen["hopper_schedule_address"] = copied.data_ptr()
seen["hopper_other_heads"] = refused(prepare, hopper_kernel_of(long, head_group=5), long, *tensors, long_lse, few) or len(copies)
ragged = dataclasses.replace(long, seqlen_kv=521)
longer = [FakeTensor.contiguous(2, heads, 520 + (heads == 3), 64, address=0x10000) for heads in (6, 3, 3, 6)]
seen["hopper_other_constants"] = refused(prepare, kernel, ragged, *longer, long_lse, few)

# Two heads that share K and V in a tile.
packed = hopper_kernel_of(long, block_m=128, num_warps=8, packed_heads=2)
watch(packed, expand=True)
encoded.clear()
prepare(packed, long, *tensors, long_lse, few)(*tensors, long_lse, 0.125)
seen["packed"] = named(packed, launches[-1])
seen["packed_encoded"] = list(encoded)
seen["packed_schedule"] = copies[-1].tolist()
apart = dataclasses.replace(long, heads_kv=6)
seen["packed_apart"] = refused(prepare, packed, apart, tensors[0], tensors[3], tensors[3], tensors[3], long_lse, few)


def standalone_of(candidate):
    """The module of a standalone file."""
    (path,) = export(candidate, long, H200, folder)
    spec = importlib.util.spec_from_file_location("standalone", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What a standalone file hands to Triton. There are as many programs as tiles: no GPU says how many run at once.
standalone = standalone_of(kernel.candidate)
calls = []


class Watched:
    def __getitem__(self, grid):
        return lambda *arguments, **more: calls.append((grid, arguments, more))


standalone.attention_forward = Watched()
standalone.attention(*[dataclasses.replace(each, device=torch.device("cpu")) for each in tensors[:3]], scale=0.125)
((grid, arguments, more),) = calls
given = dict(zip(kernel.arg_names, arguments))
seen["standalone"] = {
    "grid": grid,
    "parameters": list(given),
    "numbers": {name: value for name, value in given.items() if isinstance(value, int | float)},
    "layouts": {name: [list(given[name].shape), given[name].strides, given[name].block_shape] for name in ("q", "k", "v", "out")},
    "more": more,
    "schedule": standalone.scheduled(12, 6, 3, 520, 520, -1040, 0, 7, "cpu").tolist(),
}
seen["hopper_constants"] = dict(kernel.constants)
standalone = standalone_of(packed.candidate)
standalone.attention_forward = Watched()
standalone.attention(*[dataclasses.replace(each, device=torch.device("cpu")) for each in tensors[:3]], scale=0.125)
grid, arguments, more = calls[-1]
seen["standalone_packed"] = {
    "grid": grid,
    "blocks": [each.block_shape for each in arguments[:4]],
    "constants": {name: more[name] for name in packed.constants},
    "schedule": standalone.scheduled(12, 6, 3, 520, 520, -1040, 0, 7, "cpu").tolist(),
}
seen["packed_constants"] = dict(packed.constants)

# A backward kernel: three functions, of which those run that a gradient needs. A call looks at the strides of the gradients.
backward_problem = dataclasses.replace(problem, direction="backward")
config = Config(block_m=32, block_n=64, num_warps=4, num_stages=2)
kernel = build(Candidate(variant=Variant(family="backward", mask="causal", store_lse=True), config=config), backward_problem, H200)
dout = FakeTensor((2, 6, 130, 64), (0, 0, 0, 1), 0x80000)
dlse = FakeTensor.contiguous(2, 6, 130, address=0x90004, dtype=torch.float32)
dq = FakeTensor.contiguous(2, 6, 130, 64, address=0xA0000)
dk, dv = moved(key, 0xB0000), moved(value, 0xC0000)
torch.empty, empty = lambda shape, dtype, device: FakeTensor.contiguous(*shape, address=0xD0000, dtype=dtype), torch.empty
launch = prepare_backward(kernel, backward_problem, BackwardInputs(query, key, value, out, lse, dout, dlse), H200)
functions = {function.on(1).function: function for function in kernel.functions}
for handle, function in functions.items():
    types_of[handle] = [kind for kind in function.compiled.src.signature.values() if kind != "constexpr"]
for wanted in ((dq, dk, dv), (dq, None, None), (None, dk, None)):
    launches.clear()
    launch(query, key, value, out, lse, dout, dlse, *wanted, 0.125)
    words = [name for name, gradient in zip(("dq", "dk", "dv"), wanted) if gradient is not None]
    seen["_".join(["backward", *words])] = {functions[each["function"]].name: named(functions[each["function"]], each) for each in launches}
seen["backward_unaligned"] = refused(launch, query, key, value, out, lse, moved(dout, 0x80002), dlse, dq, dk, dv, 1.0)

# Sums of dq in float16: what is allocated between the functions of a hopper kernel, and where each finds it.
allocated = []


def allocate(shape, dtype, device):
    allocated.append(FakeTensor.contiguous(*shape, address=0x1000000 * (1 + len(allocated)), dtype=dtype))
    return allocated[-1]


torch.empty = allocate
variant = Variant(family="backward", backend="hopper", load="tma", mask="causal", store_lse=True, fused=True, float16_dq=True)
kernel = build(Candidate(variant=variant, config=Config(block_m=64, block_n=128, num_warps=8, num_stages=2)), backward_problem, H200)
dout = FakeTensor.contiguous(2, 6, 130, 64, address=0x80000)
launch = prepare_backward(kernel, backward_problem, BackwardInputs(query, key, value, out, lse, dout, dlse), H200)
functions = {function.on(1).function: function for function in kernel.functions}
types_of |= {handle: expanded(function) for handle, function in functions.items()}
launches.clear()
launch(query, key, value, out, lse, dout, dlse, dq, dk, dv, 0.125)
seen["float16_dq"] = {functions[each["function"]].name: named(functions[each["function"]], each) for each in launches}
seen["float16_dq_scratch"] = [(str(each.dtype), each.numel(), each.address) for each in allocated]
torch.empty = empty

# A release of Triton whose C function is not known goes through its Python launcher.
for load in ("pointer", "tma"):
    kernel = kernel_of(load)
    watch(kernel, expand=True)
    version, triton.__version__ = triton.__version__, "4.0.0"
    launch = prepare(kernel, problem, query, key, value, out, lse, H200)
    triton.__version__ = version
    launch(query, key, value, out, lse, 0.125)
    seen[f"{load}_unknown"] = named(kernel, launches[-1])
kernel = hopper_kernel_of(long)
watch(kernel, expand=True)
version, triton.__version__ = triton.__version__, "4.0.0"
launch = prepare(kernel, long, *tensors, long_lse, few)
triton.__version__ = version
launch(*tensors, long_lse, 0.125)
seen["hopper_unknown"] = named(kernel, launches[-1])

print(json.dumps(seen))
