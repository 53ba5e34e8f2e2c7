"""Source -> compiled kernel: writes the module, imports it, compiles it, and reads what came out.

    kernel      Candidate -> Kernel, here and now
    modules     the generated modules, on disk and imported
    binary      registers, spills, shared memory, instructions
    pool        many candidates in parallel processes that may hang or crash
    standalone  a Candidate as a module that needs no flashgen
"""

from flashgen.build.binary import ptxas_log, sass_mix
from flashgen.build.kernel import Kernel, build
from flashgen.build.modules import CacheInfo, cache_info, clear_cache

__all__ = ["CacheInfo", "Kernel", "build", "cache_info", "clear_cache", "ptxas_log", "sass_mix"]
