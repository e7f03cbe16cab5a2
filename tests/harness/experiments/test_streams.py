"""Slots are kept full by streams that last, and by no others."""

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.client.lag import LagWatch
from harness.client.live_stream import LiveStream
from harness.client.session import LoadSession
from harness.experiments.idle_server import ServerFacts
from harness.experiments.outcome import CannotDecideError
from harness.experiments.streams import Streams, refill
from harness.records import Outcome, RequestRow, Way


class Filler(LiveStream):
    """`lasts_for`: tokens it has to go. `served`: it gets its first token when waited for."""

    def __init__(self, lasts_for: int = 100, *, served: bool = True, ended: bool = False) -> None:
        self.lasts_for, self.served, self.ended = lasts_for, served, ended
        self.has_left = False

    @property
    def has_ended(self) -> bool:
        return self.ended

    @property
    def tokens(self) -> int:
        return int(self.served)

    def wait_tokens(self, tokens: int, timeout_s: float | None) -> bool:
        return self.served

    def leave(self, way: Way | None = None) -> None:
        self.has_left = True


def test_streams_that_last_stay_and_all_others_are_replaced() -> None:
    lasting, near_end, ended = Filler(50), Filler(5), Filler(50, ended=True)
    new = [Filler(), Filler(served=False)]
    to_come = iter(new)
    running, waiting = refill(
        [lasting, near_end, ended],
        3,
        start=lambda: next(to_come),
        lasts=lambda one: isinstance(one, Filler) and one.lasts_for > 10,
        longest_s=1.0,
    )
    assert running == [lasting, new[0]]
    assert waiting == [new[1]]
    assert [one.has_left for one in (lasting, near_end, *new)] == [False, True, False, True]


def test_more_streams_than_wanted_are_left_to_the_caller() -> None:
    fillers = [Filler(), Filler()]
    running, waiting = refill(fillers, 1, start=Filler, lasts=lambda _: True, longest_s=1.0)
    assert (running, waiting) == (fillers, [])
    assert not any(one.has_left for one in fillers)


def test_where_a_leave_stops_the_server_an_answer_that_nears_its_end_is_not_left() -> None:
    near_end, ended = Filler(5), list[LiveStream]()
    refill([near_end], 1, start=Filler, lasts=lambda _: False, longest_s=1.0, retire=ended.append)
    assert (ended, near_end.has_left) == ([near_end], False)


def test_a_stream_that_nears_its_end_while_others_are_retired_is_replaced_too() -> None:
    near_end, lasting, ended = Filler(5), Filler(50), list[LiveStream]()

    def retire(one: LiveStream) -> None:
        ended.append(one)
        lasting.lasts_for = 5

    running, _ = refill(
        [near_end, lasting],
        2,
        start=Filler,
        lasts=lambda one: isinstance(one, Filler) and one.lasts_for > 10,
        longest_s=1.0,
        retire=retire,
    )
    assert ended == [near_end, lasting]
    assert len(running) == 2
    assert lasting not in running


def streams_of(facts: ServerFacts) -> Streams:
    session: Any = SimpleNamespace(plan=SimpleNamespace(target=SimpleNamespace(settle_steps=None)))
    return Streams(cast(LoadSession, session), facts, 2.0, lag=cast(LagWatch, None))


def ended(
    streams: Streams,
    tokens: int,
    reason: str | None,
    *,
    left_ago_s: float = 0.0,
    most: int = 0,
    choices: int = 1,
) -> None:
    """An answer with a token each 20 ms has ended by this reason; None: its client left it. `most`:
    the tokens that were asked for, if not many."""
    spec = streams.long(n=choices, **({"max_tokens": most} if most else {}))
    end_ns = time.perf_counter_ns() - int(left_ago_s * 1e9)
    row: Any = SimpleNamespace(
        outcome=Outcome.COMPLETED if reason else Outcome.ABANDONED,
        finish_reason=reason,
        tokens_read=tokens,
        first_token_ns=end_ns - tokens * 20_000_000,
        ended_ns=end_ns,
        abandoned_ns=None if reason else end_ns,
    )
    streams.opened.append(cast(LiveStream, SimpleNamespace(spec=spec, row=row)))
    streams._note_end(spec, cast(RequestRow, row))


@pytest.mark.parametrize(
    ("answers", "is_known"),
    [
        ([(60, "stop")], False),  # they are all over after 1.2 s, kept or not
        ([(60, "stop"), (200, "length"), (200, "length")], True),
        ([(8, "length"), (200, None)], True),
    ],
)
def test_what_is_not_held_shows_nothing_where_answers_end_by_themselves(
    answers: list[tuple[int, str | None]], *, is_known: bool
) -> None:
    streams = streams_of(ServerFacts(4, 0.02, 0.02, None))
    for tokens, reason in answers:
        ended(streams, tokens, reason, left_ago_s=3.0)
    ended(streams, 5, None, left_ago_s=2.0)  # the settle time ago
    if is_known:
        streams.check_ran_on()
    else:
        with pytest.raises(CannotDecideError, match="end after 60 tokens or fewer"):
            streams.check_ran_on()


def test_a_short_request_does_not_show_how_long_answers_last() -> None:
    """Such as a canary that ends after four words."""
    streams = streams_of(ServerFacts(4, 0.02, 0.02, None))
    ended(streams, 4, "stop", most=12)
    assert not streams._lengths


def test_answers_to_one_request_run_at_once() -> None:
    streams = streams_of(ServerFacts(4, 0.02, 0.02, None))
    ended(streams, 8 * 5, None, left_ago_s=2.0, choices=8)
    assert streams.could_run()
    assert not streams.could_run(100)  # tokens, of which 5 were read: over after 1.9 s
