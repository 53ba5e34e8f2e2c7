"""Problems that break pipelines and masks, for the tests of warp-specialised kernels."""

import random
from collections.abc import Iterable

from flashgen.build import CompilePool, constants_of
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.problem import Problem

# Around multiples of the tiles (64, 128 and 192 rows; 64 and 128 keys), and where rows see no key, or no row a key.
LENGTHS = [(1, 1), (1, 777), (63, 65), (64, 128), (129, 127), (191, 193), (300, 100), (520, 648), (577, 577), (1000, 1030)]
MASKS = {
    "full": dict(),
    "causal": dict(mask="causal"),
    "top left": dict(mask="causal_top_left"),
    "window": dict(mask="causal", window=(100, None)),
    "left side": dict(window=(90, None)),
    "both sides": dict(window=(70, 33)),
    "itself only": dict(window=(0, 0)),
}
DIMS = {"64": (64, 64), "128": (128, 128), "256": (256, 256), "odd": (80, 40), "192/128": (192, 128), "64/256": (64, 256)}


def problem(mask: str, dims: str, seqlen_q: int, seqlen_kv: int, *, direction: str, return_lse: bool) -> Problem:
    """Heads and layout differ from one problem to the next."""
    chance = random.Random(f"{mask} {dims} {seqlen_q}")
    heads_q, heads_kv = chance.choice([(2, 2), (6, 2), (4, 1)])
    return Problem(
        direction=direction,
        batch=2,
        heads_q=heads_q,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim_qk=DIMS[dims][0],
        head_dim_v=DIMS[dims][1],
        dtype="float16" if mask in ("top left", "window") else "bfloat16",
        layout=chance.choice(["bhsd", "bshd"]),
        return_lse=return_lse,
        **MASKS[mask],
    )


def compile_all(cases: Iterable[tuple[Candidate, Problem]]) -> None:
    """Compiles the kernels of all cases on all cores, each once, so that each test finds them in Triton's cache."""
    device = Device.current()
    wanted: dict[object, tuple[Candidate, Problem]] = {}
    for candidate, stated in cases:
        dims = stated.head_dim_qk, stated.head_dim_v
        wanted.setdefault((candidate, dims, tuple(constants_of(candidate, stated).items())), (candidate, stated))
    with CompilePool() as pool:
        for candidate, stated in wanted.values():
            pool.submit(candidate, stated, device)
        for _ in pool.results():
            pass
