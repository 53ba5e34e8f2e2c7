"""What a compiled kernel is made of: registers, spills, shared memory, a hash of the code, and the mix of instructions.

Registers and the stack frame are read from the cubin with `cuobjdump --dump-resource-usage` (10 to 40 ms, where compiling takes
1 to 5 s; running `ptxas -v` again would take another second). A Triton without cuobjdump falls back to that second run. The frame
stands for spills: Triton's kernels keep nothing else there, and the driver's own count of spills is the same number.

A hopper kernel is judged by its machine code, disassembled in 0.4 s: the count of registers is only what its warps start with, and
that ptxas gave up on running its products asynchronously is said in a log that Triton does not keep, but plain to see.
"""

import contextlib
import hashlib
import io
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

from flashgen.errors import BuildError
from flashgen.record import Resources


def resources(compiled: Any, launched_as: tuple[Any, ...] = (), *, specialised: bool = False) -> Resources:
    """Resources of Triton's CompiledKernel. Two that are launched alike and have equal code have equal binary_sha256.

    specialised: its warps divide the registers among themselves; counted are those of the warp that uses most. Raises BuildError if
    such a kernel waits for each of its products.
    """
    metadata, cubin = compiled.metadata, compiled.asm["cubin"]
    text = _tool("cuobjdump", "--dump-resource-usage", cubin=cubin)
    if text is None:
        text = ptxas_log(compiled)
    registers = re.search(r"REG:(\d+)|Used (\d+) registers", text)
    frame = re.search(r"STACK:(\d+)|(\d+) bytes stack frame", text)
    if registers is None or frame is None:
        raise BuildError(f"the tools name no registers of {metadata.name}: {text[-500:].strip()!r}")
    num_registers = int(registers[1] or registers[2])
    if specialised:
        code = sass(compiled)
        if is_serialised(code):
            raise BuildError(f"ptxas serialised the products of {metadata.name}")
        num_registers = 1 + max(int(register) for register in re.findall(r"\bR(\d+)\b", code))
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


def total(parts: Sequence[Resources]) -> Resources:
    """Resources of a kernel whose functions have these: the most registers and shared memory that one of them needs, and all spills."""
    if len(parts) == 1:
        return parts[0]
    return Resources(
        registers=max(part.registers for part in parts),
        spill_bytes=sum(part.spill_bytes for part in parts),
        smem_bytes=max(part.smem_bytes for part in parts),
        binary_sha256=hashlib.sha256("".join(part.binary_sha256 for part in parts).encode()).hexdigest(),
    )


def sass_mix(kernel: Any) -> dict[str, int]:
    """How many instructions of each kind a Kernel has (HGMMA, MUFU, LDGSTS ...), most frequent first; takes 1 to 3 s.

    Raises BuildError where there is no disassembler, or no machine code.
    """
    if kernel.interpreted:
        raise BuildError(f"{kernel.candidate} is interpreted and has no machine code")
    code = "\n".join(sass(function.compiled) for function in kernel.functions)
    mnemonics = re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", code)
    return dict(Counter(mnemonics).most_common())


def sass(compiled: Any) -> str:
    """The machine code of Triton's CompiledKernel as text. Raises BuildError where there is no disassembler."""
    # Without -ndf, which leaves out where indirect branches go, it takes 1.5 to 2 times as long.
    text = _tool("nvdisasm", "-c", "-ndf", cubin=compiled.asm["cubin"])
    if text is None:
        raise BuildError("this Triton comes without nvdisasm, so machine code cannot be read")
    return text


def is_serialised(code: str) -> bool:
    """Whether ptxas made each warpgroup product wait for the one before it: seen with its warning C7512, on Triton 3.6 to 3.9. A wait
    that it adds elsewhere (C7517) does not show here, only in `ptxas_log`.

    The products of a tile are issued as a group of at least 4, and its last one alone ends it (gsb0) and can be waited for.
    """
    products = re.findall(r"HGMMA\.[^;]*", code)
    return 2 * sum("gsb0" in each for each in products) > len(products)


def spills_between_products(code: str) -> int:
    """How many instructions of the innermost loops with warpgroup products load or store spilled registers between two of those."""
    lines = code.splitlines()
    labels = {match[1]: place for place, line in enumerate(lines) if (match := re.match(r"\s*(\.L\w+):", line))}
    loops = []
    for end, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*?`\((\.L\w+)\)", line)
        if target and labels.get(target[1], end) < end:
            products = [place for place in range(labels[target[1]], end) if "HGMMA" in lines[place]]
            if products:
                loops.append((products[0], products[-1]))
    innermost = [loop for loop in loops if not any(loop != other and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)]
    return sum(bool(re.search(r"\b(LDL|STL)\b", line)) for first, last in set(innermost) for line in lines[first:last])


def ptxas_log(compiled: Any) -> str:
    """What `ptxas -v` says of Triton's CompiledKernel: registers, spills, and warnings such as C7510 (wgmma serialised).

    Triton's own step is run again, so the flags are those that the kernel was built with, whatever the release.
    """
    from triton import knobs
    from triton.compiler import make_backend

    target = compiled.metadata.target
    backend = make_backend(target)
    # The warps and the cap on registers are in the PTX; the metadata counts all warps of a hopper kernel, which is no valid option.
    options = backend.parse_options({name: getattr(compiled.metadata, name) for name in ("enable_fp_fusion", "ptx_options")})
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
