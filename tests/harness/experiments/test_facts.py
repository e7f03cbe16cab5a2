"""The slots of a server that refuses a request beyond them."""

from collections.abc import Callable

import pytest

from harness.experiments.flushes import step_of
from harness.experiments.idle_server import (
    MANY_WAIT,
    Answer,
    ServerFacts,
    Trial,
    _Count,
    _NotServedError,
    answer_flushes,
    count_slots,
    counted_queue,
    recounted,
    was_closed,
)
from harness.records import Outcome
from tests.made_up.rows import request_row

SLOTS = 6


def refusing(*, closes: bool = False, rate: int = SLOTS) -> Callable[[int, int], Trial]:
    """It answers as many of the requests that come at once as it has slots, or as its rate
    allows."""

    def trial(streams: int, tokens: int) -> Trial:
        served = min(streams, rate)
        refused = streams - served
        return Trial([range(tokens)] * served, refused, refused if closes else 0)

    return trial


@pytest.mark.parametrize("closes", [False, True])
def test_a_server_shows_its_slots_by_what_it_refuses(*, closes: bool) -> None:
    found = count_slots(refusing(closes=closes), 20.0)
    assert (found.number, found.refuses, found.closes) == (SLOTS, True, closes)


def test_connections_that_end_at_random_are_no_refusals() -> None:
    left = [4, 3, 2]

    def trial(streams: int, tokens: int) -> Trial:
        return refusing(closes=True, rate=left.pop(0))(streams, tokens)

    found = count_slots(trial, 20.0)
    assert (found.number, found.refuses) == (None, False)
    assert "the server closed the connection" in found.why


@pytest.mark.parametrize(
    ("status", "error", "is_refusal"),
    [
        (None, "the server closed the connection before the answer was complete", True),
        (None, "the connection broke: connection reset by peer", True),
        (200, "the server closed the connection before the answer was complete", False),
        (None, "no server listens at 127.0.0.1:80 (connection refused): is it running?", False),
    ],
)
def test_only_a_connection_that_ended_without_an_answer_may_be_a_refusal(
    status: int | None, error: str, *, is_refusal: bool
) -> None:
    row = request_row(
        "refused", sent_ns=0, ended_ns=1, outcome=Outcome.FAILED, status_code=status, error=error
    )
    assert was_closed(row) is is_refusal


def test_prompts_that_take_turns_are_counted_on_a_server_that_refuses_too() -> None:
    """Five prompts begin in a step: the first of 256 must last for 52 steps to meet the last."""

    def trial(streams: int, tokens: int) -> Trial:
        served = min(streams, 256)
        times = [[number + 5 * token for token in range(tokens)] for number in range(served)]
        return Trial(list(times), streams - served)

    found = count_slots(trial, 20.0)
    assert (found.number, found.refuses) == (256, True)
    assert found.turn_steps == pytest.approx(0.2)


def queueing(slots: int) -> Callable[[int, int], Trial]:
    def trial(streams: int, tokens: int) -> Trial:
        times = [
            range(one // slots * 2 * tokens, (one // slots * 2 + 1) * tokens)
            for one in range(streams)
        ]
        return Trial(list(times), 0)

    return trial


def test_where_prompts_take_turns_a_trial_costs_more_than_in_proportion() -> None:
    """Half a step lies between two first tokens, and a trial of 128 takes 4 s of the 60 s."""
    count = _Count(queueing(128), 60.0, clock=lambda: 0.0)
    count.most, count.turn_steps, count.took_s = 128, 0.5, 4.0
    assert 250 < count.more(128) < 270
    count.turn_steps = 0.0
    assert count.more(128) == 480
    count.took_s = 14.0
    with pytest.raises(_NotServedError, match="128 requests ran at once, and more take too long"):
        count.more(128)


@pytest.mark.parametrize(("slots_now", "found"), [(SLOTS, SLOTS), (9, 9), (5000, None)])
def test_a_server_that_has_other_slots_now_or_no_limit_is_known_by_them(
    slots_now: int, found: int | None
) -> None:
    now = recounted(queueing(slots_now), ServerFacts(SLOTS, 0.02, 0.02, None))
    assert now.slots == found


def test_a_count_that_finds_fewer_than_the_slots_shows_no_missing_limit() -> None:
    def trial(streams: int, tokens: int) -> Trial:
        return Trial([range(tokens)] * min(streams, 3), 0)

    facts = ServerFacts(SLOTS, 0.02, 0.02, None)
    assert recounted(trial, facts) == facts


@pytest.mark.parametrize(("waiting", "found"), [(0, 0), (3, 3), (13, MANY_WAIT)])
def test_a_short_queue_is_known_by_what_it_refuses(waiting: int, found: int) -> None:
    """Twice as many requests as slots, and one, are tried."""
    facts = ServerFacts(SLOTS, 0.02, 0.02, None)
    queue = counted_queue(refusing(rate=SLOTS + waiting), facts)
    assert queue == found
    assert facts._replace(queue=queue).lets_wait(waiting)
    assert facts._replace(queue=queue).lets_wait(waiting + 1) is (found == MANY_WAIT)


def test_reasoning_that_is_not_shown_makes_no_step_shorter() -> None:
    """10 events of a token, 20 ms apart, of an answer with 90 tokens that were not shown."""
    row = request_row(
        "one",
        sent_ns=0,
        ended_ns=200_000_000,
        outcome=Outcome.COMPLETED,
        completion_tokens=100,
        token_times_ns=range(10_000_000, 210_000_000, 20_000_000),
    )
    assert step_of(answer_flushes(Answer(row, (10, 10)))) == pytest.approx(0.02)
