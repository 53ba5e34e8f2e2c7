"""Check: a kernel against the oracle, with a tolerance derived from what an honest implementation of the same dtype gets.

Kernels write to outputs filled with NaN; what lies between and around the rows of inputs and outputs is NaN, too. Errors are measured
several ways, each against a limit of its own, so that no kind of fault can hide behind another: see `measures`.
"""

from flashgen.check.backward import (
    BACKWARD_SCALES,
    BackwardCase,
    BackwardLaunch,
    Gradients,
    check_backward,
    judge_backward,
    prepare_backward,
    stress_backward,
)
from flashgen.check.forward import STRESS_SCALES, Case, Launch, check, judge, prepare, stress
from flashgen.check.measures import BLOCK_ROWS, FACTOR, Check, Errors
from flashgen.check.tensors import GUARD, inputs

__all__ = [
    "BACKWARD_SCALES",
    "BLOCK_ROWS",
    "FACTOR",
    "GUARD",
    "STRESS_SCALES",
    "BackwardCase",
    "BackwardLaunch",
    "Case",
    "Check",
    "Errors",
    "Gradients",
    "Launch",
    "check",
    "check_backward",
    "inputs",
    "judge",
    "judge_backward",
    "prepare",
    "prepare_backward",
    "stress",
    "stress_backward",
]
