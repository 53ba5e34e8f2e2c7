"""The stored form of flashgen's values: canonical JSON of a frozen dataclass, and the sha256 of it.

Fields at their default are left out, so that a field added later keeps the keys of everything stored before.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from flashgen.errors import ArgumentError

T = TypeVar("T")


def to_dict(value: Any) -> dict[str, Any]:
    """Plain JSON types of a dataclass's fields, without those at their default."""
    return {
        field.name: _plain(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if field.default is dataclasses.MISSING or getattr(value, field.name) != field.default
    }


def to_text(value: Any) -> str:
    """Canonical JSON: sorted names, no spaces; equal values give equal text."""
    return dict_to_text(to_dict(value))


def dict_to_text(data: Mapping[str, Any]) -> str:
    """Canonical JSON of a stored form."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def key(value: Any) -> str:
    """sha256 of the canonical JSON, 64 hexadecimal digits."""
    return hashlib.sha256(to_text(value).encode()).hexdigest()


def from_dict(cls: type[T], data: object) -> T:
    """The dataclass that `to_dict` was given.

    Raises ArgumentError for unknown or missing names, wrong types, and values the class itself refuses.
    """
    if not isinstance(data, Mapping):
        raise ArgumentError(f"{cls.__name__}: expected a mapping of its fields, got {type(data).__name__}")
    hints = _hints(cls)  # type: ignore[arg-type]
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise ArgumentError(f"{cls.__name__}: unknown fields {', '.join(map(str, unknown))}")
    missing = sorted(
        name
        for name, field in fields.items()
        if name not in data and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )
    if missing:
        raise ArgumentError(f"{cls.__name__}: missing fields {', '.join(missing)}")
    return cls(**{name: _restored(hints[name], value, f"{cls.__name__}.{name}") for name, value in data.items()})


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} has no stored form")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _restored(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (hint,) = [argument for argument in arguments if argument is not type(None)]
        return _restored(hint, value, where)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError as error:
            raise ArgumentError(f"{where}: {error}") from None
    if origin is tuple and isinstance(value, (list, tuple)):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) == len(value):
            return tuple(_restored(kind, item, where) for kind, item in zip(kinds, value))
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {str(name): _restored(arguments[1], item, where) for name, item in value.items()}
    raise ArgumentError(f"{where}: {value!r} is not of type {getattr(hint, '__name__', hint)}")
