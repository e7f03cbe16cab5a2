"""A schedule is played: each visit in a greenlet of its own, at the server's own pace."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import gevent
from gevent.event import Event

from harness.client.live_stream import LiveStream, join_all
from harness.conform.bench import Bench
from harness.conform.bystanders import start_greedy
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S, SLOWER
from harness.records import RequestRow, Way
from harness.search.requests import spec_of, text_of
from harness.search.schedule import Leave, Phase, Schedule

_BYSTANDER_TOKENS: Final = (8, 64)  # at least and at most
_OWN_BUG: Final = "a bug of the client"
_ENDS_IN: Final = 4  # times its typical time, and the time for a slot: of an answer
_SLOTS_FOR_ONE: Final = 4  # that runs at the least, if memory and not slots is the limit
_NOTICED_STEPS: Final = 8.0  # from a leave to the visits that follow it, at most, if nothing ends


@dataclass(frozen=True, slots=True)
class Played:
    """`visits`: a row each, in order; None: not answered in time. `bystanders`: likewise."""

    schedule: Schedule
    visits: Sequence[RequestRow | None]
    bystanders: Sequence[RequestRow | None]


def play(bench: Bench, schedule: Schedule) -> Played:
    """Raises CannotDecideError if our own client cannot do what the schedule asks for."""
    tokens = bystander_tokens(bench)
    stays = start_greedy(bench, range(1, schedule.bystanders + 1), tokens)
    for one in stays:
        one.wait_tokens(1, bench.patience.filler_s)
    players = [_Player(bench, schedule, number) for number in range(len(schedule.visits))]
    playing = [gevent.spawn(player.run, players) for player in players]
    longest_s = longest_of(bench, schedule)
    with gevent.Timeout(longest_s, False):  # noqa: FBT003  gevent's signature
        for player in players:
            player.over.wait()
    rows = [player.row(longest_s) for player in players]
    gevent.killall(playing)  # a visit that hangs starts no other any more
    for row in rows:
        if row is not None and (row.error or "").startswith(_OWN_BUG):
            raise CannotDecideError(f"the schedule cannot be played: {row.error}")
    stays_s = READY_S + _ENDS_IN * (bench.ttft_s + tokens * bench.step_s)
    return Played(schedule, rows, join_all(stays, stays_s))


def bystander_tokens(bench: Bench) -> int:
    """Of a greedy stream that stays: of a slow server so few that it ends in READY_S when nothing
    else runs."""
    least, most = _BYSTANDER_TOKENS
    in_time = int((READY_S / SLOWER - bench.ttft_s) / bench.step_s)
    return max(least, min(most, in_time))


def longest_of(bench: Bench, schedule: Schedule) -> float:
    """The seconds in which a server that works has answered all visits, though its memory may let
    only a quarter of those that find a slot run at once; where slots are not known, one by one."""
    at_once = max(1, min(bench.facts.slots or 1, len(schedule.visits)) // _SLOTS_FOR_ONE)
    together = sum(one.n * one.answer for one in schedule.visits)
    tokens = min(together, together / at_once + _longest_chain(schedule))
    waits = sum(one.at for one in schedule.visits)
    prompts = len(schedule.visits) * bench.ttft_s + sum(
        one.prompt / 32 * bench.facts.turn_steps * bench.step_s for one in schedule.visits
    )
    return READY_S + _ENDS_IN * ((tokens + waits) * bench.step_s + prompts)


def _longest_chain(schedule: Schedule) -> int:
    """The tokens of visits that follow one another, where they are the most."""
    until = list[int]()
    for one in schedule.visits:
        before = 0 if one.after is None else until[one.after]
        until.append(before + one.n * one.answer)
    return max(until)


class _Player:
    """One visit. `over`: its client has left, or its answer has ended."""

    def __init__(self, bench: Bench, schedule: Schedule, number: int) -> None:
        self._bench = bench
        self._schedule = schedule
        self._number = number
        self._visit = schedule.visits[number]
        self.stream: LiveStream | None = None
        self.over = Event()

    def run(self, players: Sequence["_Player"]) -> None:
        try:
            self._run(players)
        finally:
            self.over.set()

    def _run(self, players: Sequence["_Player"]) -> None:
        visit, bench = self._visit, self._bench
        if visit.after is not None:
            players[visit.after].over.wait()
        bench.pause(visit.at * bench.step_s)
        request_id = ""
        if visit.same_id and visit.repeats is not None:
            earlier = players[visit.repeats].stream
            request_id = "" if earlier is None else earlier.spec.request_id
        spec = spec_of(bench, visit, self._number, request_id=request_id)
        self.stream = bench.start(spec, text_of(bench, self._schedule, self._number))
        if visit.leave is None:
            self.stream.join()
        else:
            self._await(self.stream, visit.leave)
            self.stream.leave(visit.leave.way)
            bench.pause(0)
            if visit.leave.way is Way.CANCEL:  # what follows may have the same id
                self.stream.join(bench.settle_s)

    def _await(self, stream: LiveStream, leave: Leave) -> None:
        bench, visit = self._bench, self._visit
        match leave.phase:
            case Phase.SENT:
                bench.pause(leave.at * bench.step_s)
            case Phase.PREFILL:
                bench.pause(min(leave.at, 1.0) * bench.ttft_s)
            case Phase.TOKEN:
                stream.wait_tokens(max(1, int(leave.at)), None)
            case Phase.LAST:
                whole = visit.n * visit.answer
                stream.wait_tokens(max(1, whole - int(leave.at)), None)
        if leave.late and not stream.has_ended:
            bench.pause(leave.late * bench.step_s)

    def row(self, longest_s: float) -> RequestRow | None:
        """A client that left and reads on, or keeps its connection, is not waited for. One that was
        to leave, and has never got what it was to read before, is cut."""
        if self.stream is None:
            return None
        if self._visit.leave is None:
            return self.stream.join(longest_s if self.over.is_set() else 0.0)
        if not self.over.is_set():
            self.stream.cut()
        return self.stream.join(_NOTICED_STEPS * self._bench.step_s)
