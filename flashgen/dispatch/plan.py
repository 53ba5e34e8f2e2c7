"""Plans: everything about a call that does not change while its signature stays the same."""

import logging
import math
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from flashgen import space
from flashgen.build import Kernel, build, constants_of
from flashgen.candidate import Candidate
from flashgen.device import Device
from flashgen.dispatch.arguments import Call, converted, interpreted
from flashgen.dispatch.choice import Choice, choices, has_nothing_to_compute
from flashgen.dispatch.gradients import DifferentiablePlan, Gradients, RunBackward
from flashgen.errors import BuildError, DatabaseError, LaunchError, UnsupportedError
from flashgen.launch import BackwardInputs, needs_wide_offsets, prepare, prepare_backward
from flashgen.problem import Problem
from flashgen.record import Record

MOST_PLANS = 4096  # a plan is some kilobytes; the oldest goes first
INTERPRETED_DEVICE = "h200"  # whose kernels Triton's interpreter runs for tensors on the CPU

_log = logging.getLogger("flashgen.dispatch")

T = TypeVar("T")
Result = Tensor | tuple[Tensor, Tensor]
Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, float], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """How calls of one signature are answered.

    run        enqueues the work: (query, key, value, out, lse, scale).
    out_shape  out is contiguous in it; lse_shape is None if no LSE is returned.
    like_query out has the shape and strides of query too, and is allocated in half the time.
    scale      the default one.
    convert    tensors are cast and made contiguous first, to cast where it is not None.
    """

    run: Run
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...] | None
    like_query: bool
    scale: float
    convert: bool
    cast: torch.dtype | None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Result:
        """out, or (out, lse)."""
        if self.convert:
            query, key, value = (converted(tensor, self.cast) for tensor in (query, key, value))
        if scale is None:
            scale = self.scale
        out = torch.empty_like(query) if self.like_query else query.new_empty(self.out_shape)
        lse = None if self.lse_shape is None else query.new_empty(self.lse_shape, dtype=torch.float32)
        self.run(query, key, value, out, lse, scale)
        return out if lse is None else (out, lse)


class Planner:
    """Makes plans, and remembers what a process needs once only: devices, winners, kernels, and candidates that failed.

    Its lock makes threads that call with one new signature wait for one plan. A forked child needs a planner of its own, because
    the lock may have been held when it was forked, and CUDA's handles are the parent's.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.plans: dict[Hashable, Plan | DifferentiablePlan] = {}
        self._lock = threading.RLock()
        self._winners: tuple[Record, ...] | None = None
        self._devices: dict[torch.device, Device] = {}
        self._kernels: dict[Hashable, Kernel] = {}
        self._failures: dict[Hashable, dict[Candidate, str]] = {}
        self._warned: set[str] = set()

    def first_call(self, signature: Hashable, call: Call, scale: float | None) -> Result:
        """The answer to a call, whose plan is kept under signature (unless that is None).

        Raises UnsupportedError where flashgen has no kernel for the problem, BuildError or LaunchError if every choice failed.
        """
        with self._lock:
            plan = self.plans.get(signature)
            if plan is not None:  # another thread was faster
                return plan(call.query, call.key, call.value, scale)
            plan, result = self._answered(call, scale)
            if signature is not None:
                while len(self.plans) >= MOST_PLANS:
                    self.plans.pop(next(iter(self.plans)))
                self.plans[signature] = plan
            return result

    def forget(self) -> None:
        """From now on winners are read and choices made anew, and failed candidates tried again. Kernels stay."""
        with self._lock:
            self.plans.clear()
            self._failures.clear()
            self._winners = None

    def device(self, place: torch.device) -> Device:
        """What is known of a torch device; of the CPU, the device whose kernels the interpreter runs."""
        with self._lock:
            if place not in self._devices:
                self._devices[place] = Device.current(place.index) if place.type == "cuda" else Device.named(INTERPRETED_DEVICE)
            return self._devices[place]

    def winners(self) -> tuple[Record, ...]:
        """The winners in the user's database, read once."""
        from flashgen.database import Database

        with self._lock:
            if self._winners is None:
                try:
                    self._winners = tuple(Database.open_for_reading().winners())
                except DatabaseError as error:
                    self._warn("database", "no winners are known: %s", error)
                    self._winners = ()
            return self._winners

    def failures(self, problem: Problem, device: Device) -> dict[Candidate, str]:
        """Candidates that failed here, for problems that compile to the same kernels, and why."""
        return self._failures.setdefault((_kernel_fields(problem), device), {})

    def _answered(self, call: Call, scale: float | None) -> tuple[Plan | DifferentiablePlan, Result]:
        problem, device = call.problem, self.device(call.device)
        space.require_supported(problem, device)

        def answer(run: Run) -> tuple[Plan | DifferentiablePlan, Result]:
            plan = self._plan(call, run, device)
            return plan, plan(call.query, call.key, call.value, scale)

        if has_nothing_to_compute(problem):
            return answer(_fill)
        negative = scale is not None and scale < 0
        return self._first_that_runs(problem, device, lambda choice: answer(self._launching(call, device, choice)), negative)

    def _first_backward(self, problem: Problem, device: Device, kept: BackwardInputs, gradients: Gradients, scale: float) -> RunBackward:
        """What computes the gradients of a backward problem; it is run once. Raises what `first_call` raises."""
        if kept.query.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "this signature's first backward pass is inside a CUDA graph capture, where nothing can be compiled; run it once before"
            )

        def run_once(choice: Choice) -> RunBackward:
            wide = needs_wide_offsets(kept.strided_with(gradients))
            run = prepare_backward(self._kernel(choice, problem, device, wide), problem, kept, device)
            run(*kept, *gradients, scale)
            return run

        with self._lock:
            return self._first_that_runs(problem, device, run_once)

    def _first_that_runs(self, problem: Problem, device: Device, attempt: Callable[[Choice], T], negative_scale: bool = False) -> T:
        """What attempt gives for the first choice for which it does not raise BuildError or LaunchError."""
        failures = self.failures(problem, device)
        first_error: BuildError | LaunchError | None = None
        for choice in choices(problem, device, self.winners(), negative_scale=negative_scale, portable=interpreted(), failures=failures):
            try:
                done = attempt(choice)
            except (BuildError, LaunchError) as error:
                first_error = first_error or error
                failures[choice.candidate] = str(error)
                self._warn(choice.candidate.key, "the next choice is used, because on %s %s", device.name, error)
                continue
            self._tell(choice, problem, device)
            return done
        kind = type(first_error) if first_error else BuildError
        reasons = "; ".join(dict.fromkeys(failures.values()))
        raise kind(f"no choice runs on {device.name} with torch {torch.__version__}, CUDA {torch.version.cuda}: {reasons}") from first_error

    def _launching(self, call: Call, device: Device, choice: Choice) -> Run:
        """What launches the choice's kernel."""
        problem = call.problem
        out, lse = call.new_outputs()
        kernel = self._kernel(choice, problem, device, needs_wide_offsets((call.query, call.key, call.value, out)))
        return prepare(kernel, problem, call.query, call.key, call.value, out, lse, device)

    def _kernel(self, choice: Choice, problem: Problem, device: Device, wide: bool) -> Kernel:
        """The choice's kernel, built once."""
        constants = tuple(constants_of(choice.candidate, problem).items())
        identity = (choice.candidate, _kernel_fields(problem), constants, device, wide)
        if identity not in self._kernels:
            self._kernels[identity] = build(choice.candidate, problem, device, wide_offsets=wide)
        return self._kernels[identity]

    def _plan(self, call: Call, run: Run, device: Device) -> Plan | DifferentiablePlan:
        """How calls like this one are answered by run."""
        out, lse = call.new_outputs()
        plan = Plan(
            run=run,
            out_shape=tuple(out.shape),
            lse_shape=None if lse is None else tuple(lse.shape),
            like_query=(out.shape, out.stride()) == (call.query.shape, call.query.stride()),
            scale=1 / math.sqrt(call.problem.head_dim_qk),
            convert=call.copied,
            cast=call.cast,
        )
        if not call.training:
            return plan
        return DifferentiablePlan(
            forward=plan,
            problem=call.problem,
            return_lse=call.return_lse,
            float16_dq=call.float16_dq,
            choose=lambda problem, kept, gradients, scale: self._first_backward(problem, device, kept, gradients, scale),
        )

    def _tell(self, choice: Choice, problem: Problem, device: Device) -> None:
        """Say which choice a signature got: a warning the first time that nothing measured was near, else at level info."""
        away = "" if choice.distance is None else f" (distance {choice.distance:.2f})"
        said = f"{choice.how} choice{away} for {problem} on {device.name}: {choice.candidate}"
        if choice.record is None:
            self._warn("unmeasured", "%s; no measured winner is near, tune this problem for one (more of this at level INFO)", said)
        _log.info("%s", said)

    def _warn(self, what: str, message: str, *values: object) -> None:
        """One warning a process for what."""
        if what not in self._warned:
            self._warned.add(what)
            _log.warning(message, *values)


def _kernel_fields(problem: Problem) -> tuple[Hashable, ...]:
    """What of a problem, besides the candidate, decides the machine code."""
    return problem.dtype, problem.head_dim_qk, problem.head_dim_v, problem.aligned_16


def _fill(query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None, scale: float) -> None:
    """Attention over no keys, or of no queries: zeros, and -inf as the LSE. No kernel is built for it."""
    out.zero_()
    if lse is not None:
        lse.fill_(-math.inf)
