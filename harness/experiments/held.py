"""How many streams a server still holds after leaves, by the first way that can count them.

By occupancy where its slots can be filled. Else by its gauge of running requests, which counts each
one, or by the pace of another stream, which shows a part of many and no single one.
"""

from collections.abc import Callable
from typing import NamedTuple

from harness.experiments.facts import MOST_SLOTS
from harness.experiments.gauge import GaugeWatcher
from harness.experiments.occupancy import Occupancy
from harness.experiments.outcome import CannotDecideError
from harness.experiments.pace import PaceWatcher
from harness.experiments.streams import Streams
from harness.store.conform_result import Way


class Count(NamedTuple):
    """`held` streams, or slots, of `of`."""

    held: int
    of: int
    way: Way

    @property
    def said(self) -> str:
        match self.way:
            case "gauge":
                return f"{self.held} requests still run, by the server's gauge"
            case "pace":
                return f"about {self.held} of {self.of} streams that left are still computed"
            case _:
                return f"{self.held} of {self.of} slots are still held"

    @property
    def good(self) -> str:
        match self.way:
            case "gauge":
                return "no request runs any more, by the server's gauge"
            case "pace":
                return "none is computed any more, by the pace of another stream"
            case _:
                return "no slot is held"


class Held:
    def __init__(
        self, streams: Streams, occupancy: Occupancy, gauge: GaugeWatcher, pace: PaceWatcher
    ) -> None:
        self._streams = streams
        self._occupancy = occupancy
        self._gauge = gauge
        self._pace = pace

    def after(self, leave: Callable[[], int], *, sees_one: bool = False) -> Count:
        """`leave` makes some leave and returns how many. `sees_one`: a single one that is held must
        be seen. Raises CannotDecideError."""
        facts = self._streams.facts
        if facts.slots is not None and facts.slots <= MOST_SLOTS:
            return Count(self._occupancy.held(leave), facts.slots, "occupancy")
        left = 0

        def counted() -> int:
            nonlocal left
            left = leave()
            return left

        no_gauge = self._gauge.can_judge(facts)
        if no_gauge is None:
            return Count(self._gauge.held(counted), left, "gauge")
        why_not = f"the slots cannot be counted ({facts.why}), nor requests by a gauge ({no_gauge})"
        if sees_one:
            raise CannotDecideError(
                f"{why_not}; pace shows a part of many streams, and no single one"
            )
        try:
            return Count(self._pace.held(counted), left, "pace")
        except CannotDecideError as error:
            raise CannotDecideError(f"{why_not}; {error}") from error

    def now(self) -> Count:
        """What is held though all answers of this run must have ended. Raises CannotDecideError."""
        facts = self._streams.facts
        if facts.slots is not None and facts.slots <= MOST_SLOTS:
            running = self._occupancy.running_at_once()
            return Count(max(0, facts.slots - running), facts.slots, "occupancy")
        if self._gauge.can_judge(facts) is None:
            return Count(self._gauge.now(), 0, "gauge")
        self._pace.check_alone()
        return Count(0, 0, "pace")
