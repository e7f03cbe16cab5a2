"""What a server owes a client, seen in how its request ended."""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.conform.bench import Bench
from harness.experiments.idle_server import MANY_WAIT, ServerFacts, Trial, counted_queue
from harness.experiments.outcome import CannotDecideError
from harness.records import Outcome, RequestRow
from harness.search.answers import (
    Refusals,
    Texts,
    may_refuse,
    of_bystanders,
    of_visit,
    of_visits,
    taken_of,
    whose_words,
)
from harness.search.broken import Broken
from harness.search.play import Played
from harness.search.schedule import Leave, Schedule, Visit
from harness.workload.abandon import RequestSpec
from harness.workload.workload import load_target
from tests.made_up.rows import request_row

STAYS = Visit(answer=8)
LEAVES = Visit(answer=64, leave=Leave(at=2))


def broken(visit: Visit, *, can_refuse: bool = False, **row: Any) -> Broken | None:
    keys: dict[str, Any] = {
        "max_tokens": visit.answer,
        "sent_ns": 0,
        "ended_ns": 9,
        "outcome": Outcome.COMPLETED,
        **row,
    }
    found = of_visit(visit, request_row("r", **keys), can_refuse=can_refuse)
    return None if found is None else found[0]


def test_a_whole_answer_of_its_length_is_right() -> None:
    assert broken(STAYS, finish_reason="length", completion_tokens=8) is None
    assert broken(STAYS, finish_reason="stop", completion_tokens=3) is None
    wrong = broken(STAYS, finish_reason="length", completion_tokens=7)
    assert wrong is Broken.LENGTH


@pytest.mark.parametrize("visit", [STAYS, LEAVES])
def test_a_cut_counts_as_long_as_the_client_is_there(visit: Visit) -> None:
    assert broken(visit, outcome=Outcome.FAILED, error="500") is Broken.CUT
    assert broken(visit, outcome=Outcome.FAILED, abandoned_ns=5) is None


def test_a_server_with_a_queue_refuses_nobody_and_one_without_may() -> None:
    refused: Any = {"outcome": Outcome.REJECTED, "status_code": 503}
    assert broken(STAYS, **refused) is Broken.CUT
    assert broken(STAYS, can_refuse=True, **refused) is None


def test_a_queue_is_owed_to_as_many_as_were_seen_in_it() -> None:
    facts = ServerFacts(slots=2, step_s=0.01, ttft_s=0.01, context=None)
    schedule = Schedule(seed=1, visits=(STAYS,) * 5, bystanders=1)
    assert not may_refuse(facts, schedule)
    assert may_refuse(facts, schedule.with_visit(0, Visit(n=2)))
    assert may_refuse(facts._replace(queue=3), schedule)
    assert may_refuse(facts._replace(slots=None), schedule)


@pytest.mark.parametrize("slots", [2, 64, 65, 300])
def test_the_queue_was_counted_with_as_many_requests_as_are_owed_a_place(slots: int) -> None:
    sent = list[int]()

    def trial(streams: int, _tokens: int) -> Trial:
        sent.append(streams)
        return Trial([[1]] * streams, 0)

    facts = ServerFacts(slots=slots, step_s=0.01, ttft_s=0.01, context=None)
    assert counted_queue(trial, facts) == MANY_WAIT
    at_once = [Schedule(seed=1, visits=(Visit(n=sent[0] + more),)) for more in (-1, 1)]
    assert [may_refuse(facts, one) for one in at_once] == [False, True]


@pytest.mark.parametrize(
    ("status", "waiting", "waits", "is_limit"),
    [
        (429, [4, MANY_WAIT], ["rest", 65.0], True),
        (429, [4, 4], ["rest", 65.0], False),
        (429, [MANY_WAIT], ["rest"], False),
        (503, [], [], False),
    ],
)
def test_only_a_server_that_lets_as_many_wait_a_minute_later_has_a_limit(
    status: int, waiting: list[int], waits: list[Any], is_limit: bool
) -> None:
    """Places that never come back are a fault, and so are those that come back at rest."""
    row = request_row("r", sent_ns=0, ended_ns=9, outcome=Outcome.REJECTED, status_code=status)
    refused, seen = Played(Schedule(seed=1, visits=(STAYS,)), [row], []), list[Any]()
    bench: Any = SimpleNamespace(session=None, facts=None, pause=seen.append)
    refusals = Refusals(bench, lambda *_: waiting.pop(0))
    ends: AbstractContextManager[object] = nullcontext()
    if is_limit:
        ends = pytest.raises(CannotDecideError, match="it may limit how much is asked in a minute")
    with ends:
        refusals.check(refused, lambda: seen.append("rest"))
    assert (seen, waiting) == (waits, [])
    assert [one.broken for one in of_visits(refused, can_refuse=False)] == [Broken.CUT]
    assert not list(of_visits(refused, can_refuse=True))


def test_a_server_that_refuses_for_good_is_not_asked_again() -> None:
    row = request_row("r", sent_ns=0, ended_ns=9, outcome=Outcome.REJECTED, status_code=429)
    refused, asked = Played(Schedule(seed=1, visits=(STAYS,)), [row], []), list[int]()
    bench: Any = SimpleNamespace(session=None, facts=None, pause=lambda _: None)

    def count_places(*_: Any) -> int:
        asked.append(1)
        return 0

    refusals = Refusals(bench, count_places)
    for _ in range(3):
        refusals.check(refused, lambda: None)
    assert len(asked) == 2


def test_an_id_that_is_still_in_use_may_be_refused_but_not_cut() -> None:
    same: Any = {"repeats": 0, "after": 0, "same_id": True}
    again = Visit(answer=8, **same)
    assert broken(again, outcome=Outcome.FAILED, status_code=500) is None
    assert broken(again, outcome=Outcome.FAILED, status_code=200) is Broken.CUT
    assert broken(again, outcome=Outcome.FAILED) is Broken.CUT


def test_a_request_that_the_server_does_not_take_is_no_fault() -> None:
    assert broken(STAYS, outcome=Outcome.FAILED, status_code=400) is None


def test_a_request_that_the_server_does_not_take_covers_nothing() -> None:
    refused = request_row("r", sent_ns=0, ended_ns=9, outcome=Outcome.FAILED, status_code=400)
    both = Schedule(seed=1, visits=(LEAVES, STAYS, LEAVES))
    assert taken_of(Played(both, [refused, whole("one"), None], [])).visits == (STAYS, LEAVES)
    assert not taken_of(Played(both, [refused] * 3, [])).leaves


def test_only_a_client_that_stays_is_owed_an_end() -> None:
    assert of_visit(STAYS, None, can_refuse=False) is not None
    assert of_visit(LEAVES, None, can_refuse=False) is None
    assert broken(STAYS, outcome=Outcome.TIMED_OUT) is Broken.HUNG


def test_a_client_that_could_not_leave_for_want_of_an_answer_was_owed_one() -> None:
    assert broken(LEAVES, outcome=Outcome.CUT_OFF) is Broken.HUNG
    assert broken(LEAVES, outcome=Outcome.CUT_OFF, abandoned_ns=5) is None


def test_words_of_another_are_named() -> None:
    fox = "the quick brown fox jumps over the lazy dog"
    others = {"client 1": fox, "client 2": "something else"}
    alone = "one two three four five"
    assert whose_words(f"one two {fox}", alone, others) == "client 1"
    assert whose_words(f"one two {fox}", alone, others, own=fox) is None
    assert whose_words("one two nobody has said anything like this", alone, others) is None
    assert whose_words("one two the quick", alone, others) is None, "that may be chance"


class MadeUpBench:
    """A server that answers `text` to each prompt, and `beside` if others run, too."""

    ttft_s = step_s = 0.01

    def __init__(self, text: str = "one two", *, beside: str = "") -> None:
        self.text, self.beside = text, beside
        self.running = self.asked_for = 0
        self.session = SimpleNamespace(
            plan=SimpleNamespace(
                target=load_target("reference"),
                prompt_scale=SimpleNamespace(num_bytes=lambda tokens: tokens),
            )
        )
        self.asked = SimpleNamespace(adapter=None)

    def crowd(self, most: int) -> int:
        return min(4, most)

    def short(self, tokens: int, **more: Any) -> RequestSpec:
        return RequestSpec(**{"user": 0, "max_tokens": tokens, "prompt_tokens": 32, **more})

    def start(self, spec: RequestSpec, _text: str = "") -> Any:
        self.running += 1
        self.asked_for += 1
        return SimpleNamespace(spec=spec, join=self._join)

    def _join(self, _longest_s: float) -> RequestRow:
        text = self.beside if self.beside and self.running > 1 else self.text
        self.running -= 1
        return whole(text)


def whole(text: str) -> RequestRow:
    return request_row("r", sent_ns=0, ended_ns=9, outcome=Outcome.COMPLETED, answer=text)


@pytest.mark.parametrize(
    ("beside", "then", "is_found"),
    [("", "one two", True), ("one three", "one two", False), ("", "four", True)],
)
def test_a_text_that_changes_when_others_run_is_no_fault_and_one_that_is_wrong_for_good_is(
    beside: str, then: str, is_found: bool
) -> None:
    bench = MadeUpBench()
    texts = Texts(cast(Bench, bench))
    texts.learn()
    bench.beside, bench.text = beside, then
    played = Played(Schedule(seed=1, visits=(LEAVES,), bystanders=1), [None], [whole("one four")])
    assert bool(list(texts.of_bystanders(played))) is is_found
    bench.text, stays = then, Schedule(seed=1, visits=(STAYS,))
    found = list(texts.of_visits(Played(stays, [whole("one four")], [])))
    assert bool(found) is is_found
    assert not list(texts.of_visits(Played(stays, [whole(then)], [])))


def test_a_text_that_changes_among_others_once_is_looked_at_again_in_the_next_try() -> None:
    """On a server on which clients have left, that may be the damage."""
    bench = MadeUpBench()
    texts = Texts(cast(Bench, bench))
    texts.learn()
    stays = Schedule(seed=1, visits=(STAYS,), bystanders=1)
    other = Played(stays, [whole("one four")], [whole("one four")])
    bench.beside = "one three"
    assert not [*texts.of_bystanders(other), *texts.of_visits(other)]
    bench.beside = ""
    assert len([*texts.of_bystanders(other), *texts.of_visits(other)]) == 2


def test_a_visit_is_asked_for_twice_alone_and_once_among_others() -> None:
    bench = MadeUpBench()
    texts = Texts(cast(Bench, bench))
    texts.learn()
    bench.asked_for = 0
    assert list(texts.of_visits(Played(Schedule(seed=1, visits=(STAYS,)), [whole("four")], [])))
    assert bench.asked_for == 2 + bench.crowd(8)


def test_how_streams_that_stay_have_ended() -> None:
    cut, late = whole(""), whole("")
    cut.outcome, late.outcome = Outcome.FAILED, Outcome.TIMED_OUT
    stays = Schedule(seed=1, visits=(STAYS,), bystanders=3)
    found = of_bystanders(Played(stays, [None], [whole("one"), cut, late, None]))
    assert [one.broken for one in found] == [Broken.CUT, Broken.HUNG, Broken.HUNG]
