"""What a server owes a client that stays: its answer, whole, of the right length, and with the text
that it has alone, without a word of another's.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Final

from harness.client.live_stream import join_all
from harness.conform.bench import Bench
from harness.conform.bystanders import one_by_one, start_greedy
from harness.experiments.idle_server import ServerFacts
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S
from harness.records import Outcome, RequestRow
from harness.search.broken import Broken, Violation
from harness.search.play import BYSTANDER_TOKENS, Played
from harness.search.requests import is_greedy, spec_of, text_of
from harness.search.schedule import Schedule, Visit

_MOST_BYSTANDERS: Final = 2
_MOST_COMPARED: Final = 2  # visits of a schedule: each is asked for once more
_NOT_TAKEN: Final = frozenset({400, 404, 405, 409, 413, 415, 422, 501})  # such a request
_SEEN_QUEUE: Final = 2  # times the slots: as many were seen to wait when the queue was counted
_LIMITED: Final = (
    "the server refused a request with status 429, though it lets requests wait for a slot: it may "
    "limit how much is asked in a minute; raise that limit for this search"
)
_SHOWN: Final = 200  # characters
_CROWD: Final = 8
_PIECE: Final = 24  # characters that nobody says by chance


def of_visits(played: Played, *, can_refuse: bool) -> Iterator[Violation]:
    """How they ended. `can_refuse`: the server may have no place for one of them. Raises
    CannotDecideError if it seems to limit how much is asked."""
    pairs = zip(played.schedule.visits, played.visits, strict=True)
    for number, (visit, row) in enumerate(pairs):
        is_limited = row is not None and row.status_code == HTTPStatus.TOO_MANY_REQUESTS
        if is_limited and not can_refuse:
            raise CannotDecideError(_LIMITED)
        if (found := of_visit(visit, row, can_refuse=can_refuse)) is not None:
            broken, said = found
            yield Violation(broken=broken, said=f"visit {number}: {said}")


def may_refuse(facts: ServerFacts, schedule: Schedule) -> bool:
    """Whether all requests at once may be more than the server's slots and its queue hold."""
    if facts.slots is None or not facts.can_fill or facts.may_refuse:
        return True
    asked = schedule.bystanders + sum(one.n for one in schedule.visits)
    return asked > (1 + _SEEN_QUEUE) * facts.slots


def of_visit(
    visit: Visit, row: RequestRow | None, *, can_refuse: bool
) -> tuple[Broken, str] | None:
    has_left = row is not None and row.abandoned_ns is not None
    if row is None or row.outcome is Outcome.TIMED_OUT:
        may_last = has_left or (row is None and visit.leave is not None)
        return None if may_last else (Broken.HUNG, "it has no end")
    if has_left or row.outcome is Outcome.ABANDONED or row.status_code in _NOT_TAKEN:
        return None
    if visit.same_id and row.status_code not in (None, HTTPStatus.OK):
        return None  # its id may still be in use
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


class Texts:
    """Greedy answers, held to what the server says when nothing else runs. `learn` is called once,
    on the idle server. Of a server whose texts depend on what else is in a step, as on many
    devices, only another's words are a fault."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._alone: dict[int, str] = {}  # of the bystanders that repeat themselves
        self._is_steady = True

    def learn(self) -> None:
        """Raises CannotDecideError if the server does not answer."""
        numbers = range(1, _MOST_BYSTANDERS + 1)
        first, second = (
            [row.answer or "" for row in one_by_one(self._bench, numbers, BYSTANDER_TOKENS)]
            for _ in range(2)
        )
        looked = zip(numbers, first, second, strict=True)
        self._alone = {number: text for number, text, again in looked if text == again}
        in_a_crowd = list(self._in_a_crowd())
        self._is_steady = all(self._alone[number] == text for number, text in in_a_crowd)

    def _in_a_crowd(self) -> Iterator[tuple[int, str]]:
        """The same answers while others begin and end."""
        bench, numbers = self._bench, list(self._alone)
        more = max(0, bench.crowd(_CROWD) - len(numbers))
        lengths = (BYSTANDER_TOKENS * part // (more + 1) for part in range(1, more + 1))
        others = [bench.start(bench.short(max(1, tokens))) for tokens in lengths]
        for number, stream in zip(
            numbers, start_greedy(bench, numbers, BYSTANDER_TOKENS), strict=True
        ):
            row = stream.join(READY_S)
            if row is not None and row.outcome is Outcome.COMPLETED:
                yield number, row.answer or ""
        join_all(others, READY_S)

    def of_bystanders(self, played: Played) -> Iterator[Violation]:
        others = self._said(played.schedule)
        for number, row in enumerate(played.bystanders, start=1):
            if row is None or row.outcome is Outcome.TIMED_OUT:
                yield Violation(broken=Broken.HUNG, said="a stream that stayed got no end")
            elif row.outcome is Outcome.REJECTED:
                continue  # it found no slot
            elif row.outcome is not Outcome.COMPLETED:
                said = f"a stream that stayed was cut: {row.error}"
                yield Violation(broken=Broken.CUT, said=said)
            elif (seen := row.answer or "") != (alone := self._alone.get(number, seen)):
                yield from self._another("a greedy stream that stayed", seen, alone, others)

    def of_visits(self, played: Played) -> Iterator[Violation]:
        """Some that stayed are asked for again, alone; what shares its prompt with others first. A
        server that answers otherwise the second time, too, does not repeat itself."""
        schedule = played.schedule
        stayed = {
            number: row.answer
            for number, (visit, row) in enumerate(zip(schedule.visits, played.visits, strict=True))
            if visit.leave is None
            and is_greedy(visit)
            and row is not None
            and row.outcome is Outcome.COMPLETED
            and row.answer
        }
        visits = schedule.visits
        order = sorted(
            stayed, key=lambda one: visits[one].repeats is None and not visits[one].shared
        )
        for number in order[:_MOST_COMPARED]:
            seen, alone = stayed[number], self._asked_alone(schedule, number)
            if alone in (None, seen) or self._asked_alone(schedule, number) != alone:
                continue
            others = self._said(schedule)
            own = others.pop(f"client {number}")
            what = f"the greedy answer of client {number}"
            yield from self._another(what, seen, alone or "", others, own)

    def _said(self, schedule: Schedule) -> dict[str, str]:
        """What each client has said itself."""
        numbers = range(len(schedule.visits))
        return {f"client {one}": text_of(self._bench, schedule, one) for one in numbers}

    def _another(
        self, what: str, seen: str, alone: str, others: Mapping[str, str], own: str = ""
    ) -> Iterator[Violation]:
        said = f"{what} has not the text that it has alone"
        if (whose := whose_words(seen, alone, others, own)) is not None:
            said += f", but words of {whose}"
        elif not self._is_steady:
            return
        evidence = {"alone": alone[:_SHOWN], "seen": seen[:_SHOWN]}
        yield Violation(broken=Broken.TEXT, said=said, evidence=evidence)

    def _asked_alone(self, schedule: Schedule, number: int) -> str | None:
        bench = self._bench
        with suppress(CannotDecideError):
            spec = spec_of(bench, schedule.visits[number], number)
            row = bench.ask(spec, text_of(bench, schedule, number))
            return row.answer if row.outcome is Outcome.COMPLETED else None
        return None


def whose_words(seen: str, alone: str, others: Mapping[str, str], own: str = "") -> str | None:
    """Who else said what stands where the two texts part. `own`: the client's own words."""
    pairs = zip(seen, alone, strict=False)
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(alone))
    piece = seen[same : same + _PIECE]
    if len(piece) < _PIECE or piece in alone or piece in own:
        return None
    return next((name for name, text in others.items() if piece in text), None)
