"""Live progress of a search on stderr: what was tried, the best so far, predicted against measured, how long it may take."""

from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from flashgen.cli.answer import say
from flashgen.problem import Problem
from flashgen.record import Record
from flashgen.report.units import quantity, times

if TYPE_CHECKING:
    from flashgen.search.outcome import Event, Tried


class Live:
    """Shows searches while the context is open: on a terminal one line is kept up to date, elsewhere each new best is a line."""

    def __init__(self, console: Console, searches: int = 1) -> None:
        self._console = console
        self._searches, self._begun = searches, 0
        self._shown_us: float | None = None
        self._problem: Problem | None = None
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("[bold green]{task.fields[best]}"),
            TextColumn("[dim]{task.fields[last]}"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[left]}"),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, best="", last="", left="", visible=False)

    def __enter__(self) -> "Live":
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def listen(self, event: "Event") -> None:
        """What a search reports."""
        from flashgen.search.outcome import Ended, Staged, Started, Tried

        if isinstance(event, Started):
            self._problem, self._shown_us = event.problem, None
            self._progress.reset(self._task, total=None, description="", best="", last="", left="", visible=True)
            self._begun += 1
            place = f"[{self._begun}/{self._searches}] " if self._searches > 1 else ""
            known = f", {event.known} known" if event.known else ""
            self._say(f"{place}{event.problem} on {event.device.name}: {event.legal} candidates{known}")
        elif isinstance(event, Staged):
            self._progress.update(self._task, description=event.stage, last=event.message)
            if not self._console.is_terminal:
                self._say(f"{event.stage}: {event.message}")
        elif isinstance(event, Tried):
            self._tried(event)
        elif isinstance(event, Ended):
            self._progress.update(self._task, visible=False)
            outcome = event.outcome
            counts = f"{outcome.trials} trials, {outcome.skipped} skipped, " if outcome.measured else ""
            self._say(f"{counts}{outcome.seconds:.0f} s: {outcome.reason}")

    def _tried(self, event: "Tried") -> None:
        best = ""
        if event.best_us is not None and self._problem is not None:
            best = f"best {quantity(self._problem.flops / event.best_us * 1e6, 'FLOP/s')}"
            if event.default_us is not None:
                best += f", default x {event.default_us / event.best_us:.2f}"
        last = f"{event.record.candidate.config if event.record.candidate else ''} {_outcome(event.record)}"
        if not self._console.is_terminal:
            if event.best_us is not None and (self._shown_us is None or event.best_us < self._shown_us):
                self._shown_us = event.best_us
                self._say(f"trial {event.trials}: {best}; {last}")
            return
        left_s = event.remaining_s
        self._progress.update(
            self._task,
            total=None if left_s is None else event.elapsed_s + left_s,
            completed=event.elapsed_s,
            description=f"trial {event.trials}" + (f"/{event.of_trials}" if event.of_trials else ""),
            best=best,
            last=last,
            left="" if left_s is None else f"at most {left_s:.0f} s left",
        )

    def _say(self, text: str) -> None:
        say(self._console, text)


def _outcome(record: Record) -> str:
    """Predicted and measured time, or why there is none."""
    measurement, estimate = record.measurement, record.estimate
    if measurement.median_us is None:
        words = measurement.status.value.replace("_", " ")
        return words if estimate is None else f"{words} {quantity(estimate.time_s, 's')}"
    measured = f"measured {quantity(measurement.median_us * 1e-6, 's')}"
    if estimate is None:
        return measured
    return f"predicted {quantity(estimate.time_s, 's')}, {measured} ({times(measurement.median_us * 1e-6 / estimate.time_s)})"
