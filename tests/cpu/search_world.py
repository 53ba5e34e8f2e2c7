"""A made-up GPU, compiler and clock, for tests of the search over the real legal space: time passes only when someone waits."""

import datetime
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from flashgen import cost, space
from flashgen.candidate import Candidate
from flashgen.database import Database
from flashgen.device import Device
from flashgen.errors import BuildError
from flashgen.problem import Problem
from flashgen.record import Measurement, Peer, Provenance, Resources, Status
from flashgen.resources import guess
from flashgen.search.loop import Clock, Search
from flashgen.search.outcome import Budget, Event
from flashgen.search.worker import Decide, Decision

H200 = Device.named("h200")
SMALL = Problem(batch=4, heads_q=8, heads_kv=8, seqlen_q=4096, seqlen_kv=4096, head_dim_qk=256, head_dim_v=256)  # 76 candidates
BACKWARD = replace(SMALL, direction="backward", heads_kv=2, head_dim_qk=128, head_dim_v=128, mask="causal")
HERE = Provenance(flashgen="0", torch="2.13.0", triton="3.6.0", cuda="13.0", driver="580.1", gpu="", utc="")


def estimated(problem: Problem) -> Callable[[Candidate], float]:
    """True times that are what the model says, but for a fixed factor of up to 30 % for each candidate."""
    factors = random.Random(1)
    true = {each: cost.estimate(each, problem, H200).time_s * factors.uniform(1.0, 1.3) for each in space.candidates(problem, H200)}
    return true.__getitem__


@dataclass(kw_only=True)
class World:
    """What is so: the time each candidate takes in seconds, and what goes wrong with which."""

    seconds: Callable[[Candidate], float]
    noise: float = 0.0
    build_errors: dict[Candidate, BuildError] = field(default_factory=dict)
    faults: dict[Candidate, Measurement] = field(default_factory=dict)
    unsound: dict[Candidate, Measurement] = field(default_factory=dict)
    binary: Callable[[Candidate], str] = lambda candidate: candidate.key
    workers: int = 4
    compile_s: float = 2.0
    start_s: float = 8.0
    measure_s: float = 0.3
    now: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(0)
        self.ready_at = math.inf
        self.measured: list[Candidate] = []
        self.events: list[Event] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def here(self) -> Provenance:
        """Rows are as old as they would be: of rows in one and the same second another one counts."""
        utc = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc) + datetime.timedelta(seconds=self.now)
        return replace(HERE, utc=utc.isoformat(timespec="seconds"))

    def tune(self, problem: Problem, database: Database, budget: Budget | None = None, **more: object) -> "Search":
        """A search in this world; `run` it."""
        return Search(
            problem=problem,
            device=H200,
            database=database,
            compiler=FakeCompiler(self),
            measurer=FakeMeasurer(self),
            budget=Budget() if budget is None else budget,
            on_event=self.events.append,
            clock=Clock(now=lambda: self.now, sleep=self.sleep),
            here=self.here,
            **more,  # type: ignore[arg-type]
        )


class FakeCompiler:
    """Compiles `workers` candidates at a time."""

    def __init__(self, world: World) -> None:
        self.world, self.workers = world, world.workers
        self.jobs: list[tuple[float, Candidate, Problem]] = []
        self.free = [0.0] * world.workers

    @property
    def pending(self) -> int:
        return len(self.jobs)

    def submit(self, candidate: Candidate, problem: Problem, device: Device, *, wide_offsets: bool = False) -> None:
        slot = min(range(self.workers), key=self.free.__getitem__)
        self.free[slot] = max(self.free[slot], self.world.now) + self.world.compile_s
        self.jobs.append((self.free[slot], candidate, problem))

    def results(self, *, wait: bool = True) -> Iterator[tuple[Candidate, Resources | BuildError]]:
        while self.jobs and (wait or min(self.jobs, key=lambda job: job[0])[0] <= self.world.now):
            job = min(self.jobs, key=lambda each: each[0])
            self.jobs.remove(job)
            self.world.now = max(self.world.now, job[0])
            _, candidate, problem = job
            if candidate in self.world.build_errors:
                yield candidate, self.world.build_errors[candidate]
            else:
                yield candidate, resources(candidate, problem, self.world.binary(candidate))


def resources(candidate: Candidate, problem: Problem, binary: str) -> Resources:
    return replace(guess(candidate, problem, H200), binary_sha256=binary)


class FakeMeasurer:
    """Measures in measure_s, once it has started."""

    def __init__(self, world: World) -> None:
        self.world, self.gpu = world, ""
        self.current: tuple[float, Candidate] | None = None

    def open(self, problem: Problem, device: Device, seed: int) -> None:
        self.world.ready_at = min(self.world.ready_at, self.world.now + self.world.start_s)

    def begin(self, candidate: Candidate, incumbent: Candidate | None, incumbent_us: float | None, expected_s: float) -> None:
        assert self.current is None, "one request at a time"
        assert (incumbent is None) == (incumbent_us is None)
        self.current = (max(self.world.now, self.world.ready_at) + self.world.measure_s, candidate)

    def poll(self, wait_s: float) -> Measurement | None:
        assert self.current is not None
        done, candidate = self.current
        self.world.now = min(done, self.world.now + wait_s)
        if self.world.now < done:
            return None
        self.current, self.gpu = None, "NVIDIA H200"
        self.world.measured.append(candidate)
        return self.world.faults.get(candidate) or self._measurement(candidate, self.world.noise)

    def decide(self, request: Decide) -> Decision:
        self.world.now += 1.5
        peers = ((Peer(name="cudnn", version="torch"), self._measurement(request.reference, 0.0)),) if request.peers else ()
        return Decision(candidates=tuple(self._measurement(each, self.world.noise / 5) for each in request.candidates), peers=peers)

    def stress(self, candidate: Candidate, seed: int) -> Measurement | None:
        self.world.now += 1.0
        return self.world.unsound.get(candidate)

    def close(self) -> None:
        pass

    def _measurement(self, candidate: Candidate, noise: float) -> Measurement:
        median_us = 1e6 * self.world.seconds(candidate) * math.exp(self.world.random.gauss(0.0, noise))
        return Measurement(
            status=Status.OK, times_us=(median_us,) * 3, median_us=median_us, spread_us=0.01 * median_us, error=1e-3, tolerance=1e-2
        )
