"""How many streams a server still holds after leaves, by the first way that can count them.

By occupancy where its slots can be filled. Else by its gauge of running requests, which counts each
one; by whether its processor is at rest, which shows that there are any; or by the pace of another
stream, which shows a part of many and no single one.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from harness.experiments.gauge import GaugeWatcher
from harness.experiments.occupancy import Occupancy
from harness.experiments.outcome import CannotDecideError
from harness.experiments.pace import PaceWatcher
from harness.experiments.quiet import QuietWatcher
from harness.experiments.streams import Streams
from harness.store.conform_result import JudgingWay


class Count(NamedTuple):
    """`held` streams, or slots, of `of`."""

    held: int
    of: int
    way: JudgingWay

    @property
    def said(self) -> str:
        match self.way:
            case "gauge":
                runs = "request still runs" if self.held == 1 else "requests still run"
                return f"{self.held} {runs}, by the server's gauge"
            case "quiet":
                whom = f"one of {self.of} that left" if self.of else "one that left"
                return f"the server still computes for at least {whom}"
            case "pace":
                return f"about {self.held} of {self.of} streams that left are still computed"
            case _:
                return f"{self.held} of {self.of} slots are still held"

    @property
    def good(self) -> str:
        match self.way:
            case "gauge":
                return "no request runs any more, by the server's gauge"
            case "quiet":
                return "the server is at rest"
            case "pace":
                return "none is computed any more, by the pace of another stream"
            case _:
                return "no slot is held"


class Held:
    """`_idle`: the requests that the gauge shows on the idle server."""

    def __init__(
        self,
        streams: Streams,
        occupancy: Occupancy,
        gauge: GaugeWatcher,
        quiet: QuietWatcher,
        pace: PaceWatcher,
    ) -> None:
        self._streams = streams
        self._occupancy = occupancy
        self._gauge = gauge
        self._quiet = quiet
        self._pace = pace
        self._idle = 0

    def learn_idle(self) -> None:
        """Call it before the first case, where no slots can be counted."""
        if self._asks_gauge:
            with suppress(CannotDecideError):  # others use the server: nothing is taken off
                self._idle = self._gauge.now()
        elif not self._streams.facts.can_fill:
            self._why_no_rest()

    @property
    def _asks_gauge(self) -> bool:
        facts = self._streams.facts
        return not facts.can_fill and self._gauge.can_judge(facts) is None

    def _why_no_rest(self) -> str | None:
        """Why the server's processor does not show it; None: it does."""
        why_not = self._quiet.can_judge(self._streams.facts)
        if why_not is None and self._quiet.rest is None:
            try:
                self._quiet.learn_rest()
            except CannotDecideError as error:
                why_not = str(error)
        return why_not

    def after(self, leave: Callable[[], int], *, sees_one: bool = False) -> Count:
        """`leave` makes some streams leave and returns their number; it may be called twice.
        `sees_one`: a single held stream must be seen. Raises CannotDecideError."""
        facts = self._streams.facts
        if facts.can_fill:
            return Count(self._occupancy.held(leave), self._streams.slots, "occupancy")
        left = 0

        def counted() -> int:
            nonlocal left
            left = leave()
            return left

        if (no_gauge := self._gauge.can_judge(facts)) is None:
            return self._checked(Count(self._gauge.held(counted), left, "gauge"))
        if (no_rest := self._why_no_rest()) is None:
            return self._checked(Count(int(self._quiet.held(counted)), left, "quiet"))
        why_not = (
            f"the slots cannot be counted ({facts.why}), nor requests by a gauge ({no_gauge}), nor "
            f"is a rest seen ({no_rest})"
        )
        if sees_one:
            raise CannotDecideError(
                f"{why_not}; pace shows a part of many streams, and no single one"
            )
        try:
            return Count(self._pace.held(counted), left, "pace")
        except CannotDecideError as error:
            raise CannotDecideError(f"{why_not}; {error}") from error

    def _checked(self, count: Count) -> Count:
        if count.of and not count.held:
            self._streams.check_ran_on()
        return count

    def at_once(self) -> Count:
        """What is held at this moment, without other traffic but requests that count slots. Raises
        CannotDecideError, also where the answers that were left may have ended by themselves."""
        count = self._at_once()
        if not count.held and count.way != "occupancy" and not self._streams.could_run():
            raise CannotDecideError("the answers that were left have ended by themselves by now")
        if not count.held:
            self._streams.check_ran_on()
        return count

    def _at_once(self) -> Count:
        if self._streams.facts.can_fill:
            slots = self._streams.slots
            running = self._occupancy.running_at_once()
            return Count(max(0, slots - running), slots, "occupancy")
        if self._asks_gauge:
            return Count(max(0, self._gauge.reading() - self._idle), 0, "gauge")
        if (no_rest := self._why_no_rest()) is not None:
            raise CannotDecideError(f"neither slots nor a gauge nor a rest can be seen: {no_rest}")
        return Count(int(self._quiet.is_busy()), 0, "quiet")

    def now(self) -> Count:
        """What is held though all answers of this run must have ended; twice, if anything is.
        Raises CannotDecideError."""
        count = self._when_ended()
        if count.held:
            self._streams.pause(self._streams.settle_s)
            count = self._when_ended()
        return count

    def _when_ended(self) -> Count:
        streams = self._streams
        if self._asks_gauge:
            return Count(max(0, self._gauge.now() - self._idle), 0, "gauge")
        if streams.facts.can_fill:
            return self._at_once()
        if self._quiet.rest is not None:
            streams.wait_for_ghosts(lambda: False)
            return self._at_once()
        self._pace.check_alone()
        return Count(0, 0, "pace")
