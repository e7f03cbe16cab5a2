"""What must hold after any schedule, whatever it was: looked at as it ends, and at rest.

A server owes each client that stays its answer: whole, of the right length, with the text that it
has alone. It owes each client that has left nothing, and so it must hold nothing for it: after the
settle time its slots are free, its gauges read as before, and it serves the next request.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from harness.client.exchange import StreamClient
from harness.conform.bench import Bench
from harness.conform.bystanders import one_by_one
from harness.conform.cases.counts import settled
from harness.experiments.held import Count
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.records import Outcome, RequestRow
from harness.search.play import BYSTANDER_TOKENS, Played
from harness.search.schedule import Visit
from harness.store.conform_result import Aftermath

_MOST_BYSTANDERS: Final = 2
_MORE_HANDLES: Final = 16  # of the server's process, which pools may take
_LOG_SIGNS: Final = re.compile(
    r"Traceback \(most recent|panicked at|[Ss]egmentation fault|core dumped|AssertionError|"
    r"CUDA error|EngineDeadError|double free|heap-use-after-free"
)
_SHOWN: Final = 200  # characters
_NOT_TAKEN: Final = frozenset({400, 404, 405, 409, 413, 415, 422, 501})  # such a request
_REQUEST_GAUGES: Final = ("running", "waiting")  # blocks that a cache keeps are no leak
_AFTERMATHS: Final = {
    Aftermath.DEAD: "dead",
    Aftermath.RESTARTED: "dead",
    Aftermath.WEDGED: "wedged",
    Aftermath.WRONG_TEXT: "text",
    Aftermath.SLOW: "slow",
}


class Broken(StrEnum):
    """Which invariant is broken, the worst first."""

    DEAD = "dead"
    WEDGED = "wedged"
    LOST = "lost"  # slots, or requests by a gauge, after every answer must have ended
    HELD = "held"  # the same after the settle time
    CUT = "cut"  # an answer whose client stays
    HUNG = "hung"
    TEXT = "text"
    LENGTH = "length"
    GAUGES = "gauges"
    LOG = "log"
    HANDLES = "handles"
    SLOW = "slow"


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    broken: Broken
    said: str
    evidence: dict[str, Any] = {}


_OF_ANSWERS: Final = (Broken.CUT, Broken.HUNG, Broken.LENGTH)


class Invariants:
    """`learn` is called once, on the idle server; `begin` after each fresh start."""

    def __init__(
        self,
        bench: Bench,
        *,
        log: Path | None = None,
        pid: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._bench = bench
        self._log = log
        self._pid = pid
        self._texts: dict[int, str] = {}
        self._gauges: dict[str, float] = {}
        self._handles: int | None = None
        self._read_log = 0

    def learn(self) -> None:
        """Raises CannotDecideError if the server does not answer."""
        numbers = range(1, _MOST_BYSTANDERS + 1)
        first, second = (
            {number: row.answer or "" for number, row in zip(numbers, rows, strict=True)}
            for rows in (
                one_by_one(self._bench, numbers, BYSTANDER_TOKENS),
                one_by_one(self._bench, numbers, BYSTANDER_TOKENS),
            )
        )
        self._texts = {number: text for number, text in first.items() if text == second[number]}
        self.begin()

    def begin(self) -> None:
        self._bench.pause(2 * self._bench.step_s)  # gauges show the step before
        self._gauges = self._read_gauges()
        self._handles = self._count_handles()
        self._read_log = 0 if self._log is None else self._size_of_log()

    def broken_by(self, played: Played) -> list[Violation]:
        """The worst first."""
        found = [*self._found(played)]
        self._bench.forget()
        order = list(Broken)
        return sorted(found, key=lambda one: order.index(one.broken))

    def breach_of(self, broken: Broken, played: Played) -> Violation | None:
        """Of this invariant alone: nothing is looked at that comes later."""
        found = next((one for one in self._found(played, broken) if one.broken is broken), None)
        self._all_leave()
        self._bench.forget()
        return found

    def _found(self, played: Played, only: Broken | None = None) -> Iterator[Violation]:
        yield from self._of_visits(played)
        yield from self._of_bystanders(played)
        self._all_leave()
        if only in _OF_ANSWERS:
            return
        yield from self._after_settling(only)
        if only is not Broken.HELD:
            yield from self._at_rest()

    def _all_leave(self) -> None:
        """Also those that read on, and those that no server can know to have left."""
        bench = self._bench
        bench.end()
        for stream in bench.opened:
            if not stream.has_ended:
                stream.cut()
        if isinstance(bench.session.client, StreamClient):
            bench.session.client.reset_lingering()

    def _of_visits(self, played: Played) -> Iterator[Violation]:
        can_refuse = self._bench.facts.may_refuse or not self._bench.facts.can_fill
        for number, (visit, row) in enumerate(
            zip(played.schedule.visits, played.visits, strict=True)
        ):
            if (found := of_visit(visit, row, can_refuse=can_refuse)) is not None:
                broken, said = found
                yield Violation(broken=broken, said=f"visit {number}: {said}")

    def _of_bystanders(self, played: Played) -> Iterator[Violation]:
        for number, row in enumerate(played.bystanders, start=1):
            if row is None or row.outcome is Outcome.TIMED_OUT:
                yield Violation(broken=Broken.HUNG, said="a stream that stayed got no end")
            elif row.outcome is Outcome.REJECTED:
                continue  # it found no slot
            elif row.outcome is not Outcome.COMPLETED:
                yield Violation(
                    broken=Broken.CUT, said=f"a stream that stayed was cut: {row.error}"
                )
            elif row.answer != self._texts.get(number, row.answer):
                yield Violation(
                    broken=Broken.TEXT,
                    said="a greedy stream that stayed has not the text that it has alone",
                    evidence={
                        "alone": self._texts[number][:_SHOWN],
                        "seen": (row.answer or "")[:_SHOWN],
                    },
                )

    def _after_settling(self, only: Broken | None) -> Iterator[Violation]:
        """Twice, if anything is held. A server that declares that answers run on owes only their
        ends."""
        bench = self._bench
        bench.pause(bench.settle_s)
        if self._held_now() is None or (count := self._held_now()) is None:
            return
        if bench.session.plan.target.disconnect == "cancel":
            said = f"{bench.settle_s:.1f} s after the last leave {count.said}"
            yield Violation(broken=Broken.HELD, said=said, evidence={"held": count.held})
        if only is Broken.HELD:
            return
        bench.wait_for_ghosts(lambda: self._held_now() is None)
        if (count := self._held_now()) is not None:
            said = f"though every answer must have ended, {count.said}"
            yield Violation(broken=Broken.LOST, said=said, evidence={"held": count.held})

    def _held_now(self) -> Count | None:
        """None: nothing is held, or nobody can say."""
        with suppress(CannotDecideError, RefusedError):
            count = self._bench.held.at_once()
            return count if count.held else None
        return None

    def _at_rest(self) -> Iterator[Violation]:
        bench = self._bench
        aftermath, why = bench.cleaning.aftermath_of_left()
        if (name := _AFTERMATHS.get(aftermath)) is not None:
            yield Violation(broken=Broken(name), said=why)
        if aftermath in (Aftermath.DEAD, Aftermath.WEDGED, Aftermath.RESTARTED):
            yield from self._of_log()
            return
        yield from self._of_gauges()
        yield from self._of_handles()
        yield from self._of_log()

    def _of_gauges(self) -> Iterator[Violation]:
        before = self._gauges
        if not before:
            return
        after = settled(
            self._bench,
            self._read_gauges,
            lambda now: all(0 <= now.get(role, 0) <= value for role, value in before.items()),
        )
        wrong = {role: now for role, now in after.items() if now > before.get(role, now) or now < 0}
        if wrong:
            said = "; ".join(
                f"the gauge `{role}` was {before[role]:g} and reads {now:g} at rest"
                for role, now in wrong.items()
            )
            yield Violation(broken=Broken.GAUGES, said=said, evidence=wrong)

    def _read_gauges(self) -> dict[str, float]:
        with suppress(CannotDecideError, RefusedError):
            now = self._bench.pages.counters()
            return {role: now[role] for role in _REQUEST_GAUGES if role in now}
        return {}

    def _of_handles(self) -> Iterator[Violation]:
        now, before = self._count_handles(), self._handles
        if now is not None and before is not None and now > before + _MORE_HANDLES:
            said = (
                f"the server's process had {before} open files and sockets, and has {now} at rest"
            )
            yield Violation(broken=Broken.HANDLES, said=said, evidence={"handles": now})

    def _count_handles(self) -> int | None:
        with suppress(psutil.Error):
            if (pid := self._pid()) is not None:
                return int(psutil.Process(pid).num_fds())
        return None

    def _of_log(self) -> Iterator[Violation]:
        if self._log is None:
            return
        with suppress(OSError), self._log.open("rb") as file:
            file.seek(min(self._read_log, self._size_of_log()))
            new = file.read()
            self._read_log = file.tell()
            lines = new.decode("utf-8", "replace").splitlines()
            if (sign := next(filter(_LOG_SIGNS.search, lines), None)) is not None:
                said = f"the server's log says: {sign.strip()[:_SHOWN]}"
                yield Violation(broken=Broken.LOG, said=said)

    def _size_of_log(self) -> int:
        assert self._log is not None
        try:
            return self._log.stat().st_size
        except OSError:
            return 0


def of_visit(
    visit: Visit, row: RequestRow | None, *, can_refuse: bool
) -> tuple[Broken, str] | None:
    """What is wrong with how the visit ended. `can_refuse`: the server refuses beyond its slots."""
    has_left = row is not None and row.abandoned_ns is not None
    if row is None or row.outcome is Outcome.TIMED_OUT:
        may_last = has_left or (row is None and visit.leave is not None)
        return None if may_last else (Broken.HUNG, "it has no end")
    if has_left or row.outcome is Outcome.ABANDONED or row.status_code in _NOT_TAKEN:
        return None
    if row.outcome is Outcome.REJECTED:
        said = f"the server, which has a queue, refused it: {row.error}"
        return None if can_refuse else (Broken.CUT, said)
    if row.outcome is not Outcome.COMPLETED:
        return Broken.CUT, f"it was cut before its client left: {row.error or row.outcome}"
    return _wrong_length(visit, row)


def _wrong_length(visit: Visit, row: RequestRow) -> tuple[Broken, str] | None:
    """Only an answer that says it ended for its length has a length to be held to."""
    if row.finish_reason != "length" or visit.n > 1 or row.completion_tokens is None:
        return None
    if row.completion_tokens == row.max_tokens:
        return None
    said = f"it ended for its length with {row.completion_tokens} tokens, not {row.max_tokens}"
    return Broken.LENGTH, said
