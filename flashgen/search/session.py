"""A Session: searches on one device, one after another; and `tune`, which is one of them."""

from collections import Counter
from dataclasses import replace
from types import TracebackType

from flashgen import dispatch
from flashgen.build import CompilePool
from flashgen.candidate import Candidate
from flashgen.database import Database
from flashgen.device import Device
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.problem import Problem
from flashgen.search.loop import Search
from flashgen.search.measurer import GpuMeasurer
from flashgen.search.outcome import Budget, Listener, Outcome
from flashgen.search.predicted import predict

TOP = 8  # candidates that predicted mode compiles, if the budget does not say


def tune(
    problem: Problem,
    *,
    device: Device | str | int | None = None,
    database: Database | None = None,
    budget: Budget | None = None,
    on_event: Listener | None = None,
    seed: int = 0,
    force: bool = False,
) -> Outcome:
    """Search the fastest right kernel for a problem, keep all that is seen in the database, and say what came of it.

    device    a CUDA device's index (None: torch's current one), or a Device or its name. A device that is not in this machine is
              not measured on: see `predict` for what is done instead, with as many candidates as the budget has trials, 8 at most.
    database  None opens the user's.
    budget    when to stop; None is Budget().
    on_event  called with each Event, for a display of the progress.
    seed      of inputs and ties. With one seed, one database and one set of times the search takes the same way.
    force     measure anew what earlier searches measured.

    Each row is stored as it comes: after Ctrl-C or a crash the same call goes on where it stopped, and measures nothing twice.
    Raises NoWinnerError listing reasons if no candidate is right, UnsupportedError, ArgumentError, DatabaseError, and LaunchError
    if the GPU cannot be measured on. For several problems in a row a Session is faster.
    """
    with Session(device, database) as session:
        return session.tune(problem, budget=budget, on_event=on_event, seed=seed, force=force)


class Session:
    """Searches on one device, one after another, with compilers and measuring process kept warm; a context manager.

    Arguments are those of `tune`. Not for several threads.
    """

    def __init__(self, device: Device | str | int | None = None, database: Database | None = None) -> None:
        self.device, self.index = _resolved(device)
        self.database = Database.open() if database is None else database
        self._compiler = CompilePool()
        self._leftovers: Counter[Candidate] = Counter()
        self._measurer: GpuMeasurer | None = None

    @property
    def measures(self) -> bool:
        """The device is here. If not, only predictions are made."""
        return self.index is not None

    def tune(
        self,
        problem: Problem,
        *,
        budget: Budget | None = None,
        on_event: Listener | None = None,
        seed: int = 0,
        force: bool = False,
        sample: bool = False,
    ) -> Outcome:
        """See `tune`.

        sample: run a random sample of the legal candidates, as many as the budget has trials, to judge searches and the model by:
        see `replay`. The default and all that earlier searches ran are part of it, and only trials and seconds end it.
        """
        budget = Budget() if budget is None else budget
        if sample:
            budget = replace(budget, patience=None, near_bound=None)
        on_event = (lambda event: None) if on_event is None else on_event
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ArgumentError(f"seed is {seed!r}; it must be a whole number of at least 0")
        for name in ("batch", "seqlen_q", "seqlen_kv"):
            if getattr(problem, name) == 0:
                raise ArgumentError(f"{name} is 0: there is nothing to tune")
        if self.index is None:
            top = min(TOP, budget.trials or TOP)
            return predict(problem, self.device, self.database, top=top, seed=seed, on_event=on_event, compiler=self._compiler)
        if self._measurer is None:
            self._measurer = GpuMeasurer(self.index)
        if force or self.database.winner(problem, self.device) is None:
            self._measurer.start()  # it needs several seconds, in which the first candidates are compiled
        search = Search(
            problem=problem,
            device=self.device,
            database=self.database,
            compiler=self._compiler,
            measurer=self._measurer,
            budget=budget,
            seed=seed,
            force=force,
            sample=sample,
            leftovers=self._leftovers,
            wide_offsets=_needs_wide_offsets(problem),
            on_event=on_event,
        )
        try:
            return search.run()
        finally:
            dispatch.reset()  # calls of this process see the new winner

    def close(self) -> None:
        """Ends all processes."""
        self._compiler.close()
        if self._measurer is not None:
            self._measurer.close()
            self._measurer = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _resolved(device: Device | str | int | None) -> tuple[Device, int | None]:
    """(device, CUDA index): the index is None where the device is not in this machine."""
    if device is None or (isinstance(device, int) and not isinstance(device, bool)):
        current = Device.current(device)
        import torch

        return current, torch.cuda.current_device() if device is None else device
    named = Device.named(device) if isinstance(device, str) else device
    if not isinstance(named, Device):
        raise ArgumentError(f"device is {device!r}; it must be a Device, a device's name, or the index of a CUDA device")
    try:
        current = Device.current()
    except UnsupportedError:
        return named, None
    import torch

    return (named, torch.cuda.current_device()) if current.key == named.key else (named, None)


def _needs_wide_offsets(problem: Problem) -> bool:
    """As for the tensors that the check will make."""
    import torch

    from flashgen.launch import needs_wide_offsets

    sizes = ((problem.heads_q, problem.seqlen_q), (problem.heads_kv, problem.seqlen_kv))
    head_dim = max(problem.head_dim_qk, problem.head_dim_v)
    orders = (size if problem.layout == "bhsd" else size[::-1] for size in sizes)
    return needs_wide_offsets(torch.empty((problem.batch, *order, head_dim), device="meta") for order in orders)
