"""From options to Problem, Device and Database: the one place where the command line's words get their meaning."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.cli.answer import notice
from flashgen.device import DEVICES, Device
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.problem import DIRECTIONS, DTYPES, FLAGS, LAYOUTS, MASKS, Problem

if TYPE_CHECKING:
    from flashgen.database import Database

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
PAIRS = {"seqlen": ("seqlen_q", "seqlen_kv"), "heads": ("heads_q", "heads_kv"), "head_dim": ("head_dim_qk", "head_dim_v")}
STAND_IN = "h200"  # for commands that only reckon, where there is no GPU


# No metavar is its option's name in capitals: typer 0.27.0 then takes it for the option's name.
def _option(help: str, metavar: str = "N[,N...]", panel: str = "Problem", **more: Any) -> Any:
    return typer.Option(metavar=metavar, help=help, show_default=False, rich_help_panel=panel, **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """Options that state one problem, or with comma lists every combination of them."""

    seqlen: Annotated[str | None, _option("Length of queries and of keys.")] = None
    seqlen_q: Annotated[str | None, _option("Length of queries, where it differs.")] = None
    seqlen_kv: Annotated[str | None, _option("Length of keys and values, where it differs.")] = None
    heads: Annotated[str | None, _option("Query heads and key/value heads.")] = None
    heads_q: Annotated[str | None, _option("Query heads, where they differ (GQA).")] = None
    heads_kv: Annotated[str | None, _option("Key/value heads, where they differ (GQA).")] = None
    hidden: Annotated[str | None, _option("Heads x head dim, instead of --heads.", "N")] = None
    head_dim: Annotated[str | None, _option("Head dim of queries, keys and values.")] = None
    head_dim_qk: Annotated[str | None, _option("Head dim of queries and keys, where it differs.")] = None
    head_dim_v: Annotated[str | None, _option("Head dim of values, where it differs.")] = None
    batch: Annotated[str | None, _option("Batch size; 1 by default.")] = None
    tokens: Annotated[str | None, _option("Batch x length of queries, instead of --batch.", "N")] = None
    dtype: Annotated[str | None, _option("bf16 (default), fp16 or fp32; bfloat16, float16, float32.", "TYPE")] = None
    mask: Annotated[str | None, _option(f"{', '.join(MASKS)}; full by default.", "KIND")] = None
    causal: Annotated[bool, typer.Option("--causal", help="Short for --mask causal.", rich_help_panel="Problem")] = False
    window: Annotated[str | None, _option("Keys seen before and after the diagonal; -1 is unbounded.", "LEFT,RIGHT")] = None
    layout: Annotated[str | None, _option(f"{' or '.join(LAYOUTS)}; bhsd by default.", "ORDER")] = None
    direction: Annotated[str | None, _option(f"{' or '.join(DIRECTIONS)} (gradients); forward by default.", "NAME[,NAME]")] = None
    return_lse: Annotated[
        bool, typer.Option("--return-lse", help="Store the log-sum-exp too; backward: it has a gradient.", rich_help_panel="Problem")
    ] = False
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Backward: the same bits every time.", rich_help_panel="Problem")
    ] = False
    float16_dq: Annotated[
        bool, typer.Option("--float16-dq", help="Backward: dq may be added up in float16.", rich_help_panel="Problem")
    ] = False

    def problem(self) -> Problem:
        """The one problem that is stated. Raises ArgumentError for several."""
        first, *others = self.problems()
        if others:
            raise ArgumentError(f"the options state {len(others) + 1} problems; this command takes one, so give each option one value")
        return first

    def problems(self) -> list[Problem]:
        """Every combination of the values. Raises ArgumentError naming the option."""
        texts = {"dtype": self.dtype or "bfloat16", "mask": self._mask() or "full", "layout": self.layout or "bhsd"}
        choices: list[list[dict[str, Any]]] = [
            [{"dtype": SHORT_DTYPES.get(name, name)} for name in _words(texts["dtype"])],
            self._pair("head_dim"),
            [{"mask": name} for name in _words(texts["mask"])],
            self._pair("seqlen"),
            [{}] if self._given("hidden", instead_of="heads") else self._pair("heads"),
            [{}] if self._given("tokens", instead_of="batch") else [{"batch": number} for number in _numbers("batch", self.batch or "1")],
            [{"layout": name} for name in _words(texts["layout"])],
            [{"direction": name} for name in _words(self.direction or "forward")],
        ]
        fixed = {"window": _window(self.window)} | {name: getattr(self, name) for name in FLAGS}
        stated = ({name: value for part in parts for name, value in part.items()} for parts in itertools.product(*choices))
        return list(dict.fromkeys(Problem(**self._filled(values | fixed)) for values in stated))

    def matches(self, problem: Problem) -> bool:
        """Whether a stored problem has the values that are given; options that are not given match everything."""
        for name, value in self._wanted():
            if getattr(problem, name) not in value:
                return False
        return all(getattr(problem, name) >= getattr(self, name) for name in FLAGS)

    def _wanted(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for name, both in PAIRS.items():
            for side in both:
                text = getattr(self, side) or getattr(self, name)
                if text is not None:
                    yield side, tuple(_numbers(side if getattr(self, side) else name, text))
        if self.batch is not None:
            yield "batch", tuple(_numbers("batch", self.batch))
        for name, allowed, text in (
            ("dtype", DTYPES, self.dtype),
            ("mask", MASKS, self._mask()),
            ("layout", LAYOUTS, self.layout),
            ("direction", DIRECTIONS, self.direction),
        ):
            if text is not None:
                words = tuple(SHORT_DTYPES.get(word, word) for word in _words(text))
                for word in words:
                    if word not in allowed:
                        raise ArgumentError(f"--{name} is {word!r}; it must be one of {', '.join(allowed)}")
                yield name, words
        if self.window is not None:
            yield "window", (_window(self.window),)
        for name in ("hidden", "tokens"):
            if getattr(self, name) is not None:
                raise ArgumentError(f"--{name} cannot choose among stored problems; use --heads, --batch")

    def _mask(self) -> str | None:
        if self.causal and self.mask not in (None, "causal"):
            raise ArgumentError(f"--causal is short for --mask causal, and --mask is {self.mask!r}; give one of them")
        return "causal" if self.causal else self.mask

    def _given(self, name: str, *, instead_of: str) -> bool:
        if getattr(self, name) is None:
            return False
        for other in (instead_of, *PAIRS.get(instead_of, ())):
            if getattr(self, other) is not None:
                raise ArgumentError(f"--{name} stands instead of {_spelled(other)}; give one of them")
        return True

    def _pair(self, name: str) -> list[dict[str, Any]]:
        """Values of both sides; a side's own option goes before the one for both."""
        sides = PAIRS[name]
        own = [getattr(self, side) for side in sides]
        both = getattr(self, name)
        for side, text in zip(sides, own):
            if text is None and both is None:
                raise ArgumentError(f"{_spelled(name)} is missing" + (f" ({_spelled(side)} is too)" if any(own) else ""))
        if own == [None, None]:
            return [dict.fromkeys(sides, number) for number in _numbers(name, both)]
        first, second = (_numbers(name if text is None else side, both if text is None else text) for side, text in zip(sides, own))
        return [dict(zip(sides, numbers)) for numbers in itertools.product(first, second)]

    def _filled(self, values: dict[str, Any]) -> dict[str, Any]:
        """Values with heads worked out from --hidden, and batch from --tokens."""
        if self.hidden is not None:
            heads = _share("hidden", self.hidden, "head_dim", values["head_dim_qk"])
            values |= {"heads_q": heads, "heads_kv": heads}
        if self.tokens is not None:
            values["batch"] = _share("tokens", self.tokens, "seqlen", values["seqlen_q"])
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatabaseOptions:
    """Which database."""

    database: Annotated[Path | None, _option("The database; else FLASHGEN_DATABASE, else one in your data folder.", "FILE", "Place")] = None

    def open(self) -> "Database":
        """The database, made if it is missing. Raises DatabaseError."""
        from flashgen.database import Database

        return Database.open(self.database)

    def open_existing(self) -> "Database":
        """For reading: as open, but a file named with --database must exist. Raises DatabaseError."""
        from flashgen.database import Database

        return Database.open(self.database, read_only=self.database is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Which device."""

    device: Annotated[str | None, _option(f"{', '.join(DEVICES)}; by default the GPU here.", "NAME", "Place")] = None

    def get(self) -> Device:
        """The named device, else the GPU here. Raises ArgumentError, or UnsupportedError where there is none."""
        return Device.current() if self.device is None else Device.named(self.device)

    def get_or_stand_in(self) -> Device:
        """As get, but where there is no GPU that flashgen supports an H200, with a notice on stderr."""
        try:
            return self.get()
        except UnsupportedError as error:
            if self.device is not None:
                raise
            notice(f"{error}; taking {STAND_IN}")
            return Device.named(STAND_IN)


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()] or [text]


def _numbers(name: str, text: str) -> list[int]:
    return [_number(name, word) for word in _words(text)]


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(f"{_spelled(name)} is {text!r}; it must be whole numbers, separated by commas") from None


def _share(name: str, text: str, divisor_name: str, divisor: int) -> int:
    number = _number(name, text)
    if number < 1 or divisor < 1 or number % divisor:
        raise ArgumentError(f"{_spelled(name)} is {number}, which is not a multiple of {_spelled(divisor_name)}, {divisor}")
    return number // divisor


def _window(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    words = [word.strip().lower() for word in text.split(",")]
    if len(words) != 2:
        raise ArgumentError(f"--window is {text!r}; it must be LEFT,RIGHT such as 256,0, with -1 for unbounded")
    left, right = (None if word in ("-1", "none") else _number("window", word) for word in words)
    return left, right
