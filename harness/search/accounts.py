"""The server's own account at rest: its gauges read as before, and its counters do not lie."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from harness.conform.bench import Bench
from harness.conform.cases.counts import how_ended
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.formatting import quantity
from harness.records import Delivery, Outcome, RequestRow, Way
from harness.search.broken import WAITED_S, Broken, Violation
from harness.search.play import Played
from harness.search.schedule import Feature, Visit

_REQUEST_GAUGES: Final = ("running", "waiting")  # blocks that a cache keeps are no leak
_LONGEST_LATE_S: Final = 45.0  # some servers write their gauges twice a minute when they are idle
_LOOKS: Final = 3  # at how late they are: that depends on when an answer ends between two writings
_LOOK_TOKENS: Final = 32
_POLL_S: Final = 0.1
_STILL_TO_COME: Final = 64  # tokens of an answer that was surely not whole, at least
_QUICKER: Final = 2.0  # times the usual pace, which no server is
_LEAVES: Final = (Way.FIN, Way.RST, Way.CANCEL)  # that no server can take for a slow reader
_END_THEMSELVES: Final = {Feature.SCHEMA, Feature.TOOLS, Feature.STOP}  # the answers with these
Values = Mapping[str, float]


class Gauges:
    """`late_s`: how long after the end of an answer they read as on the idle server, at most."""

    def __init__(self, bench: Bench, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._bench = bench
        self._clock_s = clock_s
        self._rest: dict[str, float] = {}
        self.late_s = 0.0

    def learn(self) -> None:
        """On a server that nobody else uses. Raises CannotDecideError if it does not answer."""
        for _ in range(_LOOKS if self._read() else 0):
            self._bench.whole(self._bench.short(_LOOK_TOKENS))
            began_s = self._clock_s()
            self._rest = self._read_until(lambda now: not any(now.values()), _LONGEST_LATE_S)
            self.late_s = max(self.late_s, self._clock_s() - began_s)
            if any(self._rest.values()):  # it never reads 0
                break

    def broken(self) -> Violation | None:
        rest, longest_s = self._rest, max(self._bench.settle_s, 2 * self.late_s)
        if not rest:
            return None
        now = self._read_until(
            lambda now: all(0 <= now.get(role, 0) <= value for role, value in rest.items()),
            longest_s,
        )
        wrong = {role: is_ for role, is_ in now.items() if not 0 <= is_ <= rest.get(role, is_)}
        if not wrong:
            return None
        said = "; ".join(
            f"the gauge `{role}` was {rest.get(role, 0):g} and reads {value:g} at rest"
            for role, value in wrong.items()
        )
        evidence = {**wrong, WAITED_S: longest_s}
        return Violation(broken=Broken.GAUGES, said=said, evidence=evidence)

    def _read_until(self, is_final: Callable[[Values], bool], longest_s: float) -> dict[str, float]:
        until_s = self._clock_s() + longest_s
        while (now := self._read()) and not is_final(now) and self._clock_s() < until_s:
            self._bench.pause(_POLL_S)
        return now

    def _read(self) -> dict[str, float]:
        with suppress(CannotDecideError, RefusedError):
            now = self._bench.pages.counters()
            return {role: now[role] for role in _REQUEST_GAUGES if role in now}
        return {}


class Counts(NamedTuple):
    """How far counters moved; None: the server has no such counter, or it is known to lie.
    `well`: requests that ended well."""

    aborted: float | None = None
    well: float | None = None
    generated: float | None = None


class Pace(NamedTuple):
    """A server makes a token each `step_s`, and may make some for nobody for `settle_s`."""

    step_s: float
    settle_s: float


class Counters:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._before: Counts | None = None

    def begin(self) -> None:
        """Call it before a schedule."""
        self._before = self._read()

    def forget(self) -> None:
        """Call it where more is asked than the schedule's requests, before `broken`."""
        self._before = None

    def broken(self, played: Played) -> Violation | None:
        """Call it when nothing runs any more, and before anything else is asked."""
        before, after = self._before, self._read()
        self._before = None
        if before is None or after is None:
            return None
        pace = Pace(self._bench.step_s, self._bench.settle_s)
        said = wrong_counts(moved := _moved(before, after), played, pace)
        if said is not None:  # some servers count when the next request comes
            self._bench.start(self._bench.short(1)).join(self._bench.settle_s)
            after = self._read() or after
            well = None if after.well is None else after.well - 1
            moved = _moved(before, after._replace(well=well))
            said = wrong_counts(moved, played, pace)
        if said is None:
            return None
        evidence = {name: value for name, value in moved._asdict().items() if value is not None}
        return Violation(broken=Broken.COUNTERS, said=said, evidence=evidence)

    def _read(self) -> Counts | None:
        pages, target = self._bench.pages, self._bench.session.plan.target
        if len(pages.judged) != 1 or target.disconnect != "cancel":
            return None
        with suppress(CannotDecideError, RefusedError):
            known, samples = pages.counters(), pages.samples()
            exact = {
                role: known[role]
                for role, source in target.metrics.items()
                if role in known and source.trust.startswith("exact")
            }
            ended = target.metrics.get("ended")
            well = [
                one.value
                for one in samples
                if ended is not None
                and one.name == ended.name
                and how_ended(one.name, json.loads(one.labels)) == "well"
            ]
            has_ended = "ended" in exact
            return Counts(
                exact.get("aborted"),
                sum(well) if has_ended else None,
                exact.get("generated_tokens") if target.continuous_usage else None,
            )
        return None


def _moved(before: Counts, after: Counts) -> Counts:
    pairs = zip(before, after, strict=True)
    return Counts(*(None if one is None or now is None else now - one for one, now in pairs))


def wrong_counts(moved: Counts, played: Played, pace: Pace) -> str | None:
    """What cannot be, in words. A request that leaves before its first token, or as its last is
    made, may or may not be counted as aborted; and the first token of an answer, which its prefill
    makes, may be counted with its prompt."""
    pairs = list(zip(played.schedule.visits, played.visits, strict=True))
    cut_short = [
        row for visit, row in pairs if is_cut_short(visit, row, pace) and not _may_end_itself(visit)
    ]
    sure = sum(row is not None and row.tokens_read > 0 for row in cut_short)
    ended_early = sum(not _is_whole(row) for row in played.bystanders)
    left = ended_early + sum(visit.n for visit, row in pairs if visit.leave or not _is_whole(row))
    answers = sum(visit.n for visit, _ in pairs) + len(played.bystanders)
    if moved.aborted is not None and not sure <= moved.aborted <= left:
        return (
            f"the server counts {quantity(moved.aborted, 'requests')} as aborted, though "
            f"{quantity(len(played.schedule.leaves), 'clients')} left, {sure} in the middle of an "
            "answer"
        )
    if moved.well is not None and moved.well > answers - len(cut_short):
        return (
            f"the server counts {quantity(moved.well, 'answers')} as whole, though of {answers} "
            f"clients left {len(cut_short)} long before the end"
        )
    rows = [row for row in (*played.visits, *played.bystanders) if row is not None]
    read = sum(row.tokens_read for row in rows)
    if moved.generated is not None and moved.generated < read - answers:
        made = quantity(moved.generated, "tokens")
        return f"the server counts {made} as generated, and clients read {read}"
    return None


def _is_whole(row: RequestRow | None) -> bool:
    """walkaway has closed the connection of an answer that is not whole."""
    return row is not None and row.outcome is Outcome.COMPLETED


def _may_end_itself(visit: Visit) -> bool:
    """One of its answers may, long before its last token."""
    return visit.n > 1 or not _END_THEMSELVES.isdisjoint(visit.features)


def is_cut_short(visit: Visit, row: RequestRow | None, pace: Pace) -> bool:
    """Its client has left for good, with more of each answer still to come than the server makes
    until it must have stopped."""
    if row is None or row.abandoned_ns is None or visit.leave is None:
        return False
    made: float = row.tokens_read
    if visit.delivery is Delivery.UNARY:
        made = _QUICKER * (row.abandoned_ns - row.sent_ns) / 1e9 / pace.step_s
    still = max(_STILL_TO_COME, _QUICKER * pace.settle_s / pace.step_s)
    return visit.leave.way in _LEAVES and made + still <= row.max_tokens
