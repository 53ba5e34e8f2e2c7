"""Candidate: one kernel that could solve a problem. Its Variant chooses the generated text, its Config the numbers in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from flashgen import canonical
from flashgen.errors import ArgumentError

CHOICES = {
    "family": ("forward", "backward"),
    "backend": ("triton", "hopper"),
    "mask": ("full", "causal", "window"),
    "load": ("pointer", "tma"),
    "order": ("", "qk_first", "pv_first"),
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Structure: what the generated module looks like. One variant, one module; numbers never change its text.

    family, backend  which template: templates/<backend>/<family>.py.jinja.
    mask             full: every key; causal: a bound on the right of the diagonal only; window: bounds on both sides.
    load             how tiles of Q, K and V are read: pointer arithmetic, or TMA tensor descriptors made on the host.
    order            in which order a warpgroup of a hopper kernel issues its two products. qk_first: the scores of a block, then the output
                     of the block before it, which runs on beside the softmax; pv_first: the other way round, and waits for both, so
                     that only other warpgroups fill its softmax. Empty for triton.
    ping_pong        the warpgroups of a hopper kernel take turns in issuing products, so that one multiplies while another takes a softmax.
    lazy_rescale     a block's exponentials are taken against the references of the blocks before it, without its maximum. Only in a warp
                     with a thread whose exponentials add up to more than 2^12 do references move to the maximum, are all taken anew, and
                     accumulators multiplied. Every forward hopper kernel does so.
    masked_apart     blocks that the mask or the end of the keys cuts have a loop of their own; else one loop masks every block.
    longest_first    row blocks are launched from the last to the first, so that causal work ends evenly.
    padded           a head dim is not a power of two: pointer loads mask the columns beyond it (TMA fills them with zeros).
    scale_first      scores are scaled before their row maximum is taken: right for negative scales too, one product an element
                     more. Without it the scale must be at least 0.
    store_lse        the kernel also writes the log-sum-exp of each row; a backward kernel reads its gradient.
    fused            the loop of a backward hopper kernel that sums dk and dv also adds to dq, through TMA, in the order in which programs
                     come along: five products a pair of query and key, and not deterministic. Else dq has a loop of its own: seven.
    split_roles      of two warpgroups of a backward hopper kernel one sums dv, the other dk, for the same keys, so that accumulators of
                     head dims above 128 fit. Else each has keys of its own, and sums both.
    float16_dq       a fused kernel adds up dq in float16, each row times a power of two with which no part of its sum overflows. Else in
                     float32.

    A backward module is right for scales of any sign, and has no scale_first. A portable one knows mask, masked_apart, padded and
    store_lse, and loads by pointers; a hopper one mask, store_lse, fused, split_roles and float16_dq, and loads by TMA.
    """

    family: str = "forward"
    backend: str = "triton"
    mask: str = "full"
    load: str = "pointer"
    order: str = ""
    ping_pong: bool = False
    lazy_rescale: bool = False
    masked_apart: bool = True
    longest_first: bool = False
    padded: bool = False
    scale_first: bool = False
    store_lse: bool = False
    fused: bool = False
    split_roles: bool = False
    float16_dq: bool = False

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ArgumentError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")

    @cached_property
    def name(self) -> str:
        """Words for the choices, then each flag that is set: forward_triton_causal_tma_masked_apart."""
        values = [(each.name, getattr(self, each.name)) for each in fields(self)]
        return "_".join(name if value is True else value for name, value in values if value)

    @classmethod
    def named(cls, name: str) -> "Variant":
        """The variant with this name. Raises ArgumentError where no variant has it."""
        words, rest = list(CHOICES), name + "_"
        values: dict[str, Any] = {}
        for word in words:
            for value in CHOICES[word]:
                if value == "":
                    values[word] = value  # unless another one follows
                elif rest.startswith(value + "_"):
                    values[word] = value
                    rest = rest.removeprefix(value + "_")
                    break
        flags: dict[str, Any] = {}
        for each in fields(cls):
            if each.name not in CHOICES:
                flags[each.name] = rest.startswith(each.name + "_")
                rest = rest.removeprefix(each.name + "_")
        if rest or len(values) < len(words):
            raise ArgumentError(f"variant is {name!r}, which names no variant; one would be {cls().name}")
        return cls(**values, **flags)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Numbers: they reach the kernel as constexpr arguments or launch options.

    block_m, block_n  rows of Q and of K/V in a tile. In a backward kernel a program owns block_n rows, keys for dk and dv and queries for
                      dq, and walks block_m of the others at a time.
    num_warps         warps a program that compute; a hopper kernel has 4 for each 64 rows of block_m, and its producer besides.
    num_stages        depth of the software pipeline over K/V tiles; in a hopper kernel slots, each for one tile of K and one of V.
    maxnreg           cap on registers a thread; None leaves it to the compiler.
    head_group        how many (batch, head) pairs are walked together, row block by row block; 1 finishes a head before the
                      next. More heads balance causal work better, and want more of L2. Packed heads count as one.
    persistent        the grid holds as many programs as fit on the device at once, and each walks over several row blocks;
                      else there is a program for each. The kernel is the same.
    q_stages          buffers for Q in a hopper kernel; with 2 the next tile's Q is loaded early.
    packed_heads      how many query heads that share K and V have rows in a tile of a forward hopper kernel, as many each. More fill a tile
                      where queries are few, and K and V are loaded once for all of them.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    head_group: int = 1
    persistent: bool = False
    q_stages: int = 1
    packed_heads: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.persistent, bool):
            raise ArgumentError(f"persistent is {self.persistent!r}; it must be True or False")
        for name in ("block_m", "block_n", "num_warps", "num_stages", "head_group", "q_stages", "packed_heads"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ArgumentError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.maxnreg is not None and (type(self.maxnreg) is not int or self.maxnreg < 1):
            raise ArgumentError(f"maxnreg is {self.maxnreg!r}; it must be a whole number of at least 1, or None")

    @property
    def queries(self) -> int:
        """Queries of a tile, of each of its heads."""
        return self.block_m // self.packed_heads

    def __str__(self) -> str:
        text = f"{self.block_m}x{self.block_n} warps {self.num_warps} stages {self.num_stages}"
        if self.maxnreg is not None:
            text += f" maxnreg {self.maxnreg}"
        if self.head_group != 1:
            text += f" heads {self.head_group}"
        if self.q_stages != 1:
            text += f" Q stages {self.q_stages}"
        if self.packed_heads != 1:
            text += f" packed heads {self.packed_heads}"
        return text + " persistent" * self.persistent


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A variant and a config."""

    variant: Variant = field(default_factory=Variant)
    config: Config

    @cached_property
    def key(self) -> str:
        """sha256 of the canonical JSON."""
        return canonical.key(self)

    def __str__(self) -> str:
        return f"{self.variant.name} {self.config}"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Candidate":
        """The candidate whose stored form is data. Raises ArgumentError for anything unknown."""
        return canonical.from_dict(cls, data)
