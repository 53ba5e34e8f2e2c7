"""Problem: what is computed."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flashgen import canonical
from flashgen.errors import ArgumentError, UnsupportedError

DIRECTIONS = ("forward", "backward")
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes an element
MASKS = ("full", "causal", "causal_top_left")
LAYOUTS = ("bhsd", "bshd")
FLAGS = ("return_lse", "deterministic", "float16_dq")  # what a caller may ask for, beside shapes and masks


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention call: softmax(scale * Q K^T + mask) V for every batch item and query head, or the gradients of it.

    Query head h reads key/value head h // (heads_q // heads_kv). The softmax scale is a run-time argument of the kernel,
    not part of the problem.

    direction   forward: q, k, v become out. backward: q, k, v, out, its log-sum-exp and dout become dq, dk, dv, which have the
                shapes of q, k, v; dk and dv are sums over the query heads that share a key/value head.
    mask        full, causal (bottom-right: the last query sees the last key; FlashAttention's convention) or
                causal_top_left (the first query sees the first key only; SDPA's convention).
    window      (left, right): how many keys a query sees before and after its diagonal; None or -1 is unbounded. The
                diagonal is the mask's: bottom-right, or top-left for causal_top_left. Causal masks clamp right to 0.
    layout      order of the tensors' dimensions: bhsd is (batch, heads, seqlen, head_dim), bshd (batch, seqlen, heads, ...).
    return_lse  the kernel also stores the natural logarithm of each row's sum of exponentials, float32; backward: that has a
                gradient too, dlse, float32.
    deterministic  backward only: the same inputs give the same bits every time.
    float16_dq  backward only: a kernel may add up dq in float16 instead of float32; it need not.
    aligned_16  every base address and stride (but the last, which is 1) is a multiple of 16 bytes, as TMA needs.

    Spellings of one and the same mask (a causal mask that hides nothing, a window wider than the sequence, a full mask with
    window (None, 0), top-left where both lengths agree) become equal problems. Raises ArgumentError naming the argument.
    """

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim_qk: int
    head_dim_v: int
    dtype: str = "bfloat16"
    mask: str = "full"
    window: tuple[int | None, int | None] = (None, None)
    layout: str = "bhsd"
    direction: str = "forward"
    return_lse: bool = False
    aligned_16: bool = True
    deterministic: bool = False
    float16_dq: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("batch", 0),
            ("heads_q", 1),
            ("heads_kv", 1),
            ("seqlen_q", 0),
            ("seqlen_kv", 0),
            ("head_dim_qk", 1),
            ("head_dim_v", 1),
        ):
            object.__setattr__(self, name, _whole_number(name, getattr(self, name), least))
        for name, allowed in (("dtype", DTYPES), ("mask", MASKS), ("layout", LAYOUTS), ("direction", DIRECTIONS)):
            if getattr(self, name) not in allowed:
                raise ArgumentError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        for name in (*FLAGS, "aligned_16"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.deterministic and self.direction == "forward":
            raise ArgumentError("deterministic is True and direction is 'forward'; every forward kernel is, so it must be False")
        if self.float16_dq:
            for name, wrong in (("direction", "forward"), ("deterministic", True), ("dtype", "float32")):
                if getattr(self, name) == wrong:
                    raise ArgumentError(f"float16_dq is True and {name} is {wrong!r}, which adds up no dq in float16; it must be False")
        if self.heads_q % self.heads_kv:
            raise ArgumentError(f"heads_q is {self.heads_q}, which is not a multiple of heads_kv, {self.heads_kv}")
        left, right = self._checked_window()
        if self.mask != "full":
            right = 0
        top_left = self.mask == "causal_top_left" and self.seqlen_q != self.seqlen_kv
        diagonal = 0 if top_left else self.seqlen_kv - self.seqlen_q
        # A side that hides nothing from any query is unbounded.
        if left is not None and left >= self.seqlen_q - 1 + diagonal:
            left = None
        if right is not None and right >= self.seqlen_kv - 1 - diagonal:
            right = None
        if (left, right) == (None, None):
            mask = "full"
        elif top_left:
            mask = "causal_top_left"
        else:
            mask = "causal" if right == 0 else "full"
        object.__setattr__(self, "mask", mask)
        object.__setattr__(self, "window", (left, right if mask == "full" else None))

    def _checked_window(self) -> tuple[int | None, int | None]:
        window = (None, None) if self.window is None else self.window
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise ArgumentError(f"window is {self.window!r}; it must be a pair (left, right)")
        sides = []
        for name, side in zip(("left", "right"), window):
            if side is not None and (isinstance(side, bool) or not hasattr(side, "__index__")):
                raise ArgumentError(f"window ({name}) is {side!r}; it must be a whole number, or -1 or None for unbounded")
            number = -1 if side is None else operator.index(side)
            if number < -1:
                raise ArgumentError(f"window ({name}) is {number}; it must be at least 0, or -1 or None for unbounded")
            sides.append(None if number == -1 else number)
        return sides[0], sides[1]

    @cached_property
    def key(self) -> str:
        """sha256 of the canonical JSON: the identity under which everything about this problem is stored."""
        return canonical.key(self)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """(low, high): query i sees key j exactly if low <= j - i <= high; None is unbounded."""
        left, right = self.window
        diagonal = 0 if self.mask == "causal_top_left" else self.seqlen_kv - self.seqlen_q
        if self.mask != "full":
            right = 0
        return None if left is None else diagonal - left, None if right is None else diagonal + right

    @property
    def visible_pairs(self) -> int:
        """How many (query, key) pairs the mask leaves, for one head of one batch item."""
        low, high = self.band
        before = 0 if low is None else _sum_clamped(low, self.seqlen_q, self.seqlen_kv)
        upto = self.seqlen_q * self.seqlen_kv if high is None else _sum_clamped(high + 1, self.seqlen_q, self.seqlen_kv)
        return max(0, upto - before)

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products over the visible pairs.

        Forward has two, 2 (head_dim_qk + head_dim_v) a pair; backward has five, scores anew among them, 2 (3 head_dim_qk + 2 head_dim_v).
        """
        qk, v = (1, 1) if self.direction == "forward" else (3, 2)
        return 2 * self.batch * self.heads_q * self.visible_pairs * (qk * self.head_dim_qk + v * self.head_dim_v)

    @property
    def itemsize(self) -> int:
        """Bytes of one element of q, k, v and out, and of their gradients."""
        return DTYPES[self.dtype]

    @property
    def is_empty(self) -> bool:
        """Nothing is stored: no batch item or no query (backward: no query and no key, for dk and dv of keys without a query are 0)."""
        return self.batch == 0 or (self.seqlen_q == 0 and (self.direction == "forward" or self.seqlen_kv == 0))

    def gradients(self, *, deterministic: bool, float16_dq: bool, **changes: Any) -> "Problem":
        """The backward problem of this forward one, with such changes. float16_dq is passed on where a problem can allow it."""
        float16_dq = float16_dq and not deterministic and self.dtype != "float32"
        return replace(self, direction="backward", deterministic=deterministic, float16_dq=float16_dq, **changes)

    def require_forward(self, what: str) -> None:
        """Raise UnsupportedError naming direction where this is a backward problem, which `what` cannot answer yet."""
        if self.direction != "forward":
            raise UnsupportedError(f"direction is {self.direction!r}; {what} takes forward problems only")

    def __str__(self) -> str:
        words = [
            self.direction,
            self.dtype,
            f"batch {self.batch}",
            f"heads {_pair(self.heads_q, self.heads_kv)}",
            f"seqlen {_pair(self.seqlen_q, self.seqlen_kv)}",
            f"head_dim {_pair(self.head_dim_qk, self.head_dim_v)}",
            self.mask,
        ]
        if self.window != (None, None):
            words.append(f"window {self.window}")
        if self.layout != "bhsd":
            words.append(self.layout)
        if self.return_lse:
            words.append("with LSE" if self.direction == "forward" else "with dlse")
        if not self.aligned_16:
            words.append("unaligned")
        if self.deterministic:
            words.append("deterministic")
        if self.float16_dq:
            words.append("float16 dq")
        return ", ".join(words)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Problem":
        """The problem whose stored form is data. Raises ArgumentError."""
        return canonical.from_dict(cls, data)


def _whole_number(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(f"{name} is {value!r}; it must be a whole number")
    number = operator.index(value)
    if number < least:
        raise ArgumentError(f"{name} is {number}; it must be at least {least}")
    return number


def _pair(first: int, second: int) -> str:
    return f"{first}" if first == second else f"{first}/{second}"


def _sum_clamped(start: int, count: int, most: int) -> int:
    """Sum of min(max(start + i, 0), most) for i in range(count)."""
    rising_from = min(count, max(0, -start))  # terms before it are 0
    rising_to = min(count, max(rising_from, most - start))  # terms from it on are `most`
    rising = rising_to - rising_from
    return rising * (2 * start + rising_from + rising_to - 1) // 2 + (count - rising_to) * most
