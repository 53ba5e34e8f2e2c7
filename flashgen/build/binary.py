"""What a compiled kernel is made of: registers, spills, shared memory, a hash of the code, and the mix of instructions.

Registers and the stack frame are read from the cubin with `cuobjdump --dump-resource-usage` (10 to 40 ms, where compiling takes
1 to 5 s; running `ptxas -v` again would take another second). A Triton without cuobjdump falls back to that second run. The frame
stands for spills: Triton's kernels keep nothing else there, and the driver's own count of spills is the same number.
"""

import contextlib
import hashlib
import io
import re
import struct
import subprocess
import tempfile
from collections import Counter
from typing import Any

from flashgen.errors import BuildError
from flashgen.record import Resources


def resources(compiled: Any, launched_as: tuple[Any, ...] = ()) -> Resources:
    """Resources of Triton's CompiledKernel. Two that are launched alike and have equal code have equal binary_sha256."""
    metadata, cubin = compiled.metadata, compiled.asm["cubin"]
    text = _tool("cuobjdump", "--dump-resource-usage", cubin=cubin)
    if text is None:
        text = ptxas_log(compiled)
    registers = re.search(r"REG:(\d+)|Used (\d+) registers", text)
    frame = re.search(r"STACK:(\d+)|(\d+) bytes stack frame", text)
    if registers is None or frame is None:
        raise BuildError(f"the tools name no registers of {metadata.name}: {text[-500:].strip()!r}")
    num_registers = int(registers[1] or registers[2])
    digest = hashlib.sha256(repr((launched_as, metadata.num_warps, metadata.shared, num_registers)).encode())
    for name, data in _sections(cubin):
        # Line tables and paths differ between modules with one and the same code.
        if name.startswith((".text.", ".nv.constant")):
            digest.update(data)
    return Resources(
        registers=num_registers,
        spill_bytes=int(frame[1] or frame[2]),
        smem_bytes=metadata.shared,
        binary_sha256=digest.hexdigest(),
    )


def sass_mix(kernel: Any) -> dict[str, int]:
    """How many instructions of each kind a Kernel has (HGMMA, MUFU, LDGSTS ...), most frequent first; takes 1 to 3 s.

    Raises BuildError where there is no disassembler, or no machine code.
    """
    if kernel.compiled is None:
        raise BuildError(f"{kernel.candidate} is interpreted and has no machine code")
    mnemonics = re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", sass(kernel.compiled))
    return dict(Counter(mnemonics).most_common())


def sass(compiled: Any) -> str:
    """The machine code of Triton's CompiledKernel as text. Raises BuildError where there is no disassembler."""
    text = _tool("nvdisasm", "-c", cubin=compiled.asm["cubin"])
    if text is None:
        raise BuildError("this Triton comes without nvdisasm, so machine code cannot be read")
    return text


def ptxas_log(compiled: Any) -> str:
    """What `ptxas -v` says of Triton's CompiledKernel: registers, spills, and warnings such as C7510 (wgmma serialised).

    Triton's own step is run again, so the flags are those that the kernel was built with, whatever the release.
    """
    from triton import knobs
    from triton.compiler import make_backend

    target = compiled.metadata.target
    backend = make_backend(target)
    given = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "ptx_options")
    options = backend.parse_options({name: getattr(compiled.metadata, name) for name in given if hasattr(compiled.metadata, name)})
    printed = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(printed):
        knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(compiled.asm["ptx"], {}, options, target.arch)
    return printed.getvalue()


def _tool(name: str, *arguments: str, cubin: bytes) -> str | None:
    """What one of Triton's tools prints of a cubin; None if this Triton comes without it."""
    from triton import knobs

    try:
        path = getattr(knobs.nvidia, name).path
    except RuntimeError:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([path, *arguments, file.name], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def _sections(elf: bytes) -> list[tuple[str, bytes]]:
    """(name, content) of each section of a 64-bit little-endian ELF file that has content."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + index * entry_size) for index in range(count)]
    names = headers[names_index][4]
    found = []
    for name, kind, _, _, offset, size in headers:
        if kind != 8:  # SHT_NOBITS occupies no bytes of the file
            start = names + name
            found.append((elf[start : elf.index(b"\0", start)].decode(), elf[offset : offset + size]))
    return found
