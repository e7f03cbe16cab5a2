"""What a server owes a client that stays: its answer, whole, of the right length, and with the text
that it has alone, without a word of another's.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from typing import Final, NamedTuple

from harness.client.live_stream import LiveStream, join_all
from harness.client.session import LoadSession
from harness.client.stream import BUSY_STATUSES
from harness.conform.bench import Bench
from harness.conform.bystanders import one_by_one, start_greedy
from harness.experiments.idle_server import MANY_WAIT, MOST_WAITING, ServerFacts, count_queue
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S
from harness.records import Outcome, RequestRow
from harness.search.broken import Broken, Violation
from harness.search.play import Played, bystander_tokens
from harness.search.requests import is_greedy, spec_of, text_of
from harness.search.schedule import Schedule, Visit

_MOST_BYSTANDERS: Final = 2
_MOST_COMPARED: Final = 2  # visits of a schedule: each is asked for once more
_NOT_TAKEN: Final = frozenset({400, 404, 405, 409, 413, 415, 422, 501})  # such a request
_SEEN_QUEUE: Final = 2  # times the slots, up to MOST_WAITING, waited when the queue was counted
_MINUTE_S: Final = 65.0  # and a little
_LIMITED: Final = (
    "the server refused a request with status 429, though it lets requests wait for a slot, and a "
    "minute later it let as many wait again: it may limit how much is asked in a minute; raise "
    "that limit for this search"
)
_SHOWN: Final = 200  # characters
_CROWD: Final = 8
_SLOWLY: Final = 4  # times its typical time: of an answer in a crowd
_PIECE: Final = 24  # characters that nobody says by chance


def of_visits(played: Played, *, can_refuse: bool) -> Iterator[Violation]:
    """How they ended. `can_refuse`: the server may have no place for one of them."""
    pairs = zip(played.schedule.visits, played.visits, strict=True)
    for number, (visit, row) in enumerate(pairs):
        if (found := of_visit(visit, row, can_refuse=can_refuse)) is not None:
            broken, said = found
            yield Violation(broken=broken, said=f"visit {number}: {said}")


class Refusals:
    """Tells places in a queue that did not come back from a limit on how much is asked in a minute,
    which refuses whoever leaves. `count_places`: sends more requests at once than a server that
    queues owes a place, and returns how many waited."""

    def __init__(
        self, bench: Bench, count_places: Callable[[LoadSession, ServerFacts], int] = count_queue
    ) -> None:
        self._bench = bench
        self._count_places = count_places
        self._is_no_limit = False

    def check(self, played: Played, come_to_rest: Callable[[], object]) -> None:
        """Of a server that can have a place for all. `come_to_rest` is called before it is asked
        again. Raises CannotDecideError if it seems to have a limit."""
        is_limited = any(
            row is not None and row.status_code == HTTPStatus.TOO_MANY_REQUESTS
            for row in played.visits
        )
        if not is_limited or self._is_no_limit:
            return
        come_to_rest()
        if not self._refuses():
            return
        self._bench.pause(_MINUTE_S)
        if not self._refuses():
            raise CannotDecideError(_LIMITED)
        self._is_no_limit = True

    def _refuses(self) -> bool:
        return self._count_places(self._bench.session, self._bench.facts) < MANY_WAIT


def may_refuse(facts: ServerFacts, schedule: Schedule) -> bool:
    """Whether all requests at once may be more than the server's slots and its queue hold."""
    if facts.slots is None or not facts.can_fill or facts.may_refuse:
        return True
    asked = schedule.bystanders + sum(one.n for one in schedule.visits)
    return asked > facts.slots + min(_SEEN_QUEUE * facts.slots, MOST_WAITING)


def of_visit(
    visit: Visit, row: RequestRow | None, *, can_refuse: bool
) -> tuple[Broken, str] | None:
    has_left = row is not None and row.abandoned_ns is not None
    if row is None or row.outcome is Outcome.TIMED_OUT:
        may_last = has_left or (row is None and visit.leave is not None)
        return None if may_last else (Broken.HUNG, "it has no end")
    if not has_left and row.outcome is Outcome.CUT_OFF:
        return Broken.HUNG, "what its client was to read before it leaves has never come"
    if has_left or row.outcome is Outcome.ABANDONED:
        return None
    if re.fullmatch(excused_by(visit, can_refuse=can_refuse), str(row.status_code)):
        return None
    if row.outcome is Outcome.REJECTED:
        said = f"the server, which has a queue, refused it: {row.error}"
        return None if can_refuse else (Broken.CUT, said)
    if row.outcome is not Outcome.COMPLETED:
        return Broken.CUT, f"it was cut before its client left: {row.error or row.outcome}"
    return _wrong_length(visit, row)


def excused_by(visit: Visit, *, can_refuse: bool) -> str:
    """A pattern of the statuses with which the server may refuse it, here and in repro.py."""
    if visit.same_id:
        return "[345].."  # its id may still be in use
    return "|".join(map(str, sorted(_NOT_TAKEN | (BUSY_STATUSES if can_refuse else frozenset()))))


def taken_of(played: Played) -> Schedule:
    """The schedule without what the server is seen not to take, such as two features at once."""
    refused = frozenset(
        number
        for number, row in enumerate(played.visits)
        if row is not None and row.status_code in _NOT_TAKEN
    )
    return played.schedule.without(refused)


def _wrong_length(visit: Visit, row: RequestRow) -> tuple[Broken, str] | None:
    """Only an answer that says it ended for its length has a length to be held to."""
    if row.finish_reason != "length" or visit.n > 1 or row.completion_tokens is None:
        return None
    if row.completion_tokens == row.max_tokens:
        return None
    said = f"it ended for its length with {row.completion_tokens} tokens, not {row.max_tokens}"
    return Broken.LENGTH, said


def of_bystanders(played: Played) -> Iterator[Violation]:
    """How they ended."""
    for row in played.bystanders:
        if row is None or row.outcome is Outcome.TIMED_OUT:
            yield Violation(broken=Broken.HUNG, said="a stream that stayed got no end")
        elif row.outcome not in (Outcome.REJECTED, Outcome.COMPLETED):  # one may find no slot
            yield Violation(broken=Broken.CUT, said=f"a stream that stayed was cut: {row.error}")


class Texts:
    """Greedy answers, held to what the server says when nothing else runs. `learn` is called once,
    on the idle server; all else at rest. Of a server whose texts depend on what else is in a step,
    as on many devices, only another's words are a fault: an answer that differs is asked for once
    more while others run and nobody leaves. What that shows when clients have left before is said
    of this answer alone: it may be the damage that is looked for."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._alone: dict[int, str] = {}  # of the bystanders that repeat themselves
        self._is_steady = True

    def learn(self) -> None:
        """Raises CannotDecideError if the server does not answer."""
        numbers, tokens = range(1, _MOST_BYSTANDERS + 1), bystander_tokens(self._bench)
        first, second = (
            [row.answer or "" for row in one_by_one(self._bench, numbers, tokens)] for _ in range(2)
        )
        looked = zip(numbers, first, second, strict=True)
        self._alone = {number: text for number, text, again in looked if text == again}
        asked = [self._bystander(number, text) for number, text in self._alone.items()]
        self._is_steady = all(map(self._is_same_in_a_crowd, asked))

    def _bystander(self, number: int, alone: str) -> "_Asked":
        return _Asked(alone, partial(self._start_bystander, number))

    def _start_bystander(self, number: int) -> LiveStream:
        return start_greedy(self._bench, [number], bystander_tokens(self._bench))[0]

    def _is_same_in_a_crowd(self, asked: "_Asked") -> bool:
        """Whether the same answer has the same text while others begin and end."""
        bench = self._bench
        stream = asked.again()
        more, tokens = bench.crowd(_CROWD) - 1, stream.spec.max_tokens
        lengths = (tokens * part // (more + 1) for part in range(1, more + 1))
        others = [bench.start(bench.short(max(1, length))) for length in lengths]
        text = self._text_of(stream)
        join_all(others, READY_S)
        return text in (None, asked.alone)

    def _text_of(self, stream: LiveStream) -> str | None:
        """None: it is not answered whole."""
        bench, tokens = self._bench, stream.spec.max_tokens
        row = stream.join(READY_S + _SLOWLY * (bench.ttft_s + tokens * bench.step_s))
        return row.answer if row is not None and row.outcome is Outcome.COMPLETED else None

    def of_bystanders(self, played: Played) -> Iterator[Violation]:
        others = self._said(played.schedule)
        for number, row in enumerate(played.bystanders, start=1):
            alone = self._alone.get(number)
            if alone is None or row is None or row.outcome is not Outcome.COMPLETED:
                continue
            answer = row.answer or ""
            if answer == alone:
                continue
            asked, whose = self._bystander(number, alone), whose_words(answer, alone, others)
            if whose is not None or (self._is_steady and self._is_wrong(asked)):
                yield _another_text("a greedy stream that stayed", answer, alone, whose)

    def _is_wrong(self, asked: "_Asked") -> bool:
        """It is wrong for good; or nobody but the clients that left has changed it."""
        return self._text_of(asked.again()) != asked.alone or self._is_same_in_a_crowd(asked)

    def of_visits(self, played: Played) -> Iterator[Violation]:
        """Some that stayed are asked for again, alone; what shares its prompt with others first. A
        server that answers otherwise the second time, too, does not repeat itself."""
        schedule, stayed = played.schedule, _greedy_answers(played)
        visits = schedule.visits
        order = sorted(
            stayed, key=lambda one: visits[one].repeats is None and not visits[one].shared
        )
        for number in order[:_MOST_COMPARED]:
            again = partial(self._start_visit, schedule, number)
            answer, alone = stayed[number], self._text_of(again())
            if alone is None or alone == answer or self._text_of(again()) != alone:
                continue
            others = self._said(schedule)
            own = others.pop(f"client {number}")
            asked, whose = _Asked(alone, again), whose_words(answer, alone, others, own)
            if whose is not None or (self._is_steady and self._is_same_in_a_crowd(asked)):
                yield _another_text(f"the greedy answer of client {number}", answer, alone, whose)

    def _start_visit(self, schedule: Schedule, number: int) -> LiveStream:
        bench = self._bench
        spec = spec_of(bench, schedule.visits[number], number)
        return bench.start(spec, text_of(bench, schedule, number))

    def _said(self, schedule: Schedule) -> dict[str, str]:
        """What each client has said itself."""
        numbers = range(len(schedule.visits))
        return {f"client {one}": text_of(self._bench, schedule, one) for one in numbers}


class _Asked(NamedTuple):
    """An answer's text `alone`, and how the same is asked for `again`."""

    alone: str
    again: Callable[[], LiveStream]


def _greedy_answers(played: Played) -> dict[int, str]:
    """The whole answers of clients that stayed, by their number."""
    pairs = enumerate(zip(played.schedule.visits, played.visits, strict=True))
    return {
        number: row.answer
        for number, (visit, row) in pairs
        if visit.leave is None
        and is_greedy(visit)
        and row is not None
        and row.outcome is Outcome.COMPLETED
        and row.answer
    }


def _another_text(what: str, answer: str, alone: str, whose: str | None) -> Violation:
    said = f"{what} has not the text that it has alone"
    said += "" if whose is None else f", but words of {whose}"
    evidence = {"alone": alone[:_SHOWN], "seen": answer[:_SHOWN]}
    return Violation(broken=Broken.TEXT, said=said, evidence=evidence)


def whose_words(answer: str, alone: str, others: Mapping[str, str], own: str = "") -> str | None:
    """Who else said what stands where the answer parts from the same request's `alone`. `own`: the
    client's own words."""
    pairs = zip(answer, alone, strict=False)
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(alone))
    piece = answer[same : same + _PIECE]
    if len(piece) < _PIECE or piece in alone or piece in own:
        return None
    return next((name for name, text in others.items() if piece in text), None)
