"""flashgen finds, checks, keeps and launches the fastest attention kernel for your shapes and your GPU.

    import flashgen

    out = flashgen.attention(query, key, value, causal=True)
    print(flashgen.explain(query, key, value, causal=True))  # which kernel that was, and why

Names are loaded when they are first used: importing flashgen reads no file, touches no GPU, and loads neither torch nor triton.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgen.candidate import Candidate, Config, Variant
    from flashgen.database import Database
    from flashgen.device import Device
    from flashgen.dispatch import Choice, Explanation, attention, explain
    from flashgen.errors import (
        ArgumentError,
        ArgumentTypeError,
        BuildError,
        BuildTimeoutError,
        DatabaseError,
        FlashgenError,
        IllegalCandidateError,
        LaunchError,
        NoWinnerError,
        OutOfResourcesError,
        UnsupportedError,
    )
    from flashgen.problem import Problem
    from flashgen.record import Estimate, Measurement, Record, Status
    from flashgen.search import Budget, tune

__version__ = "0.1.0"

_MODULE_OF = {
    "attention": "dispatch",
    "explain": "dispatch",
    "Choice": "dispatch",
    "Explanation": "dispatch",
    "tune": "search",
    "Budget": "search",
    "Problem": "problem",
    "Device": "device",
    "Candidate": "candidate",
    "Variant": "candidate",
    "Config": "candidate",
    "Record": "record",
    "Estimate": "record",
    "Measurement": "record",
    "Status": "record",
    "Database": "database",
    "FlashgenError": "errors",
    "ArgumentError": "errors",
    "ArgumentTypeError": "errors",
    "UnsupportedError": "errors",
    "IllegalCandidateError": "errors",
    "BuildError": "errors",
    "OutOfResourcesError": "errors",
    "BuildTimeoutError": "errors",
    "LaunchError": "errors",
    "DatabaseError": "errors",
    "NoWinnerError": "errors",
}

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "Budget",
    "BuildError",
    "BuildTimeoutError",
    "Candidate",
    "Choice",
    "Config",
    "Database",
    "DatabaseError",
    "Device",
    "Estimate",
    "Explanation",
    "FlashgenError",
    "IllegalCandidateError",
    "LaunchError",
    "Measurement",
    "NoWinnerError",
    "OutOfResourcesError",
    "Problem",
    "Record",
    "Status",
    "UnsupportedError",
    "Variant",
    "__version__",
    "attention",
    "explain",
    "tune",
]


def __getattr__(name: str) -> Any:
    """A public name, loaded from its module and kept."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'flashgen' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"flashgen.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
