"""Finals: the fastest candidates of a search compared on fresh samples, and the winner validated."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from flashgen.candidate import Candidate
from flashgen.errors import LaunchError, NoWinnerError
from flashgen.record import Estimate, Record, Status
from flashgen.search.ledger import Ledger, time_us
from flashgen.search.measurer import Measurer
from flashgen.search.outcome import Listener, Staged
from flashgen.search.worker import Decide

log = logging.getLogger(__name__)

FINALISTS = 4  # besides the default
RATIO = 1.05  # nor is a finalist slower than this
MOST_COMPARISONS = 4
OTHER_SEEDS = 1000  # what is validated runs on inputs that no trial had


@dataclass(kw_only=True)
class Finals:
    """Who wins, of the candidates in a ledger that were measured.

    The fastest of many trials was partly lucky, so its time counts no more: finalists, default and peers are measured once more,
    together. Whoever looks faster than the winner by its old time becomes a finalist, too, so that the database, which knows only
    rows, names the same winner. And the winner must pass a harder check, in another process.
    """

    ledger: Ledger
    measurer: Measurer
    default: Candidate
    estimate: Callable[[Candidate], Estimate]
    seed: int
    on_event: Listener
    _sound: set[Candidate] = field(default_factory=set)

    def settle(self) -> None:
        """Compare and validate until the winner has passed both. Raises NoWinnerError if there is none."""
        self._validated()
        standing = self.ledger.standing()[:FINALISTS]
        compared = self._compare([row.candidate for row in standing if time_us(row) <= RATIO * time_us(standing[0])], peers=True)
        for _ in range(MOST_COMPARISONS - 1):
            winner = self._validated()
            if winner in compared:
                return
            best = next((row.candidate for row in self.ledger.standing() if row.candidate in compared), None)
            compared |= self._compare([winner, best], peers=False)
        self._validated()

    def _compare(self, candidates: Sequence[Candidate | None], *, peers: bool) -> set[Candidate]:
        """Measure these and the default together, and keep the new times; gives them. Where that fails the old times stand."""
        default = self.ledger.latest(self.default)
        sound = default is not None and default.measurement.status is Status.OK
        finalists = list(dict.fromkeys(each for each in (*candidates, self.default if sound else None) if each is not None))
        rows = [row for each in finalists if (row := self.ledger.latest(each)) is not None]
        reference = default if default is not None and sound else rows[0]
        assert reference.candidate is not None
        self.on_event(Staged(stage="deciding", message=f"{len(finalists)} finalists are measured together"))
        request = Decide(candidates=tuple(finalists), reference=reference.candidate, reference_us=time_us(reference), peers=peers)
        try:
            decision = self.measurer.decide(request)
        except LaunchError as error:
            log.warning("%s; the times of the trials stand", error)
            return set(finalists)
        self.ledger.gpu = self.measurer.gpu
        for candidate, row, measurement in zip(finalists, rows, decision.candidates):
            checked = replace(measurement, error=row.measurement.error, tolerance=row.measurement.tolerance)
            self.ledger.keep(candidate, checked, self.estimate(candidate))
        self.ledger.keep_peers(decision.peers)
        return set(finalists)

    def _validated(self) -> Candidate:
        """The winner, after it passed the harder check; those that do not pass are kept as wrong. Raises NoWinnerError."""
        while True:
            winner = winner_of(self.ledger)
            candidate = winner.candidate
            assert candidate is not None
            if candidate in self._sound:
                return candidate
            self.on_event(Staged(stage="validating", message=f"{candidate} on other inputs, in another process"))
            fault = self.measurer.stress(candidate, self.seed + OTHER_SEEDS)
            if fault is None:
                self._sound.add(candidate)
                return candidate
            log.warning("%s was the fastest, but %s", candidate, fault.message)
            self.ledger.keep(candidate, replace(fault, resources=winner.measurement.resources), self.estimate(candidate))


def winner_of(ledger: Ledger) -> Record:
    """The ledger's winner. Raises NoWinnerError, listing why candidates failed."""
    winner = ledger.winner()
    if winner is None:
        raise NoWinnerError(f"no candidate gave a right and measured result for {ledger.problem}: {ledger.reasons()}")
    return winner
