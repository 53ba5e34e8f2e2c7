"""Source -> compiled kernel: writes the module, imports it, compiles it, and reads what came out.

    kernel      Candidate -> Kernel, here and now
    modules     the generated modules, on disk and imported
    binary      registers, spills, shared memory, instructions
    pool        many candidates in parallel processes, which may hang or crash; foreman is what they run
    standalone  a Candidate as a module that needs no flashgen

No module here initialises CUDA, but for Kernel.on, which loads a kernel on a device.
"""

from flashgen.build.binary import ptxas_log, sass_mix
from flashgen.build.kernel import Function, Kernel, build, constants_of
from flashgen.build.modules import CacheInfo, cache_info, clear_cache
from flashgen.build.pool import CompilePool
from flashgen.build.standalone import export, stated

__all__ = [
    "CacheInfo",
    "CompilePool",
    "Function",
    "Kernel",
    "build",
    "cache_info",
    "clear_cache",
    "constants_of",
    "export",
    "ptxas_log",
    "sass_mix",
    "stated",
]
