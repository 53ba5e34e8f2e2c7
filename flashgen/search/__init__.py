"""Search: Problem -> Records. Proposes, compiles ahead, measures in a process of its own, decides and validates.

    session     tune, and Session for several problems in a row
    outcome     Budget, Outcome and events: what goes in and comes out
    loop        the policy of one search
    ledger      its rows, and what they say by now
    finals      who wins: finalists compared on fresh samples, the winner validated
    proposals   what to try next; the only module that knows Optuna
    surrogate   the model behind it: estimate and measurements to expectations
    directions  what a trial is made of, forward and backward
    measurer    the processes that measure, from outside; worker is what runs in them
    predicted   what can be said without the device; numerics checks kernels there
    replay      how good a strategy is, on times that are all known

Names are loaded when they are first used: the measuring process imports its part from here, and must start fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgen.search.outcome import Budget, Ended, Event, Listener, Outcome, Staged, Started, Tried
    from flashgen.search.predicted import predict
    from flashgen.search.session import Session, tune

__all__ = ["Budget", "Ended", "Event", "Listener", "Outcome", "Session", "Staged", "Started", "Tried", "predict", "tune"]

_MODULE_OF = {name: "outcome" for name in __all__} | {"Session": "session", "tune": "session", "predict": "predicted"}


def __getattr__(name: str) -> Any:
    """A public name, loaded from its module."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
