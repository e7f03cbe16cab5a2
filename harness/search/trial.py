"""One try of a schedule on the live server, and the server made as it was at the beginning."""

from typing import Any, Final

from harness.conform.bench import Bench
from harness.experiments.outcome import CannotDecideError
from harness.search.invariants import Broken, Invariants, Violation
from harness.search.keeper import ServerKeeper
from harness.search.play import play
from harness.search.schedule import Schedule
from harness.search.wire_requests import wire_of

_AFRESH: Final = "a command that starts it afresh lets the search go on (--restart COMMAND)"


class Trial:
    def __init__(self, bench: Bench, invariants: Invariants, keeper: ServerKeeper) -> None:
        self._bench = bench
        self._invariants = invariants
        self._keeper = keeper

    @property
    def is_fresh(self) -> bool:
        """The server can be started afresh for each try."""
        return self._keeper.can_start

    def broken_by(self, schedule: Schedule) -> list[Violation]:
        """The worst first."""
        return self._invariants.broken_by(play(self._bench, schedule))

    def breach_of(self, broken: Broken, schedule: Schedule) -> Violation | None:
        """Of this invariant, on a server as at the beginning. Raises CannotDecideError."""
        self.refresh()
        return self._invariants.breach_of(broken, play(self._bench, schedule))

    def refresh(self) -> None:
        """The server is as at the beginning. Raises CannotDecideError if that cannot be."""
        bench = self._bench
        if self._keeper.can_start:
            self._keeper.start()
            bench.asked.pid = self._keeper.pid or bench.asked.pid
            bench.forget()
            bench.forget_ghosts()
        elif not bench.serves():
            raise CannotDecideError(f"the server no longer serves: {_AFRESH}")
        else:
            self._wait_for_rest()
        self._invariants.begin()

    def _wait_for_rest(self) -> None:
        bench = self._bench
        bench.cleaning.rest()
        running, facts = bench.cleaning.running, bench.facts
        if running is not None and facts.can_fill and running < bench.slots:
            raise CannotDecideError(f"of {bench.slots} slots only {running} came back: {_AFRESH}")

    def as_requests(self, schedule: Schedule) -> dict[str, Any]:
        return wire_of(self._bench, schedule)
