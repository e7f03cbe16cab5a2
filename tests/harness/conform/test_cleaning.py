"""What a case left behind, by the streams that it began."""

import time
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.conform.cleaning import Cleaning
from harness.experiments.idle_server import ServerFacts
from harness.experiments.occupancy import Occupancy
from harness.experiments.streams import Streams
from harness.records import Outcome
from harness.store.conform_result import Aftermath
from tests.made_up.rows import request_row

SETTLE_S = 2.0
PLAN = SimpleNamespace(prompt_scale=SimpleNamespace(num_bytes=lambda tokens: tokens))


@dataclass
class Stream:
    """`silent_s`: since its last token; None: it has none."""

    silent_s: float | None
    has_ended: bool = False
    is_unread: bool = False

    @property
    def last_token_ns(self) -> int | None:
        if self.silent_s is None:
            return None
        return time.perf_counter_ns() - int(1e9 * self.silent_s)


def cleaning(*opened: Stream) -> Cleaning:
    return cleaning_of(opened=list(opened))


def cleaning_of(
    *,
    settle_s: float = SETTLE_S,
    flush_tokens: float = 1.0,
    facts: dict[str, Any] | None = None,
    **more: Any,
) -> Cleaning:
    streams: Any = SimpleNamespace(
        settle_s=settle_s,
        ttft_s=0.02,
        step_s=0.02,
        facts=ServerFacts(4, 0.02, 0.02, None, flush_tokens=flush_tokens, **(facts or {})),
        ghosts=lambda: 0,
        **more,
    )
    return Cleaning(cast(Streams, streams), cast(Occupancy, None))


@pytest.mark.parametrize(
    ("opened", "still"),
    [
        ([Stream(7.0), Stream(9.0)], True),
        ([Stream(5.0)], False),  # no longer than a stall may last
        ([Stream(7.0), Stream(0.1)], False),
        ([Stream(7.0), Stream(0.1, has_ended=True)], True),
        ([Stream(None)], False),  # it may queue
        ([Stream(7.0, is_unread=True)], False),  # nobody looks at what it gets
        ([], False),
    ],
)
def test_a_server_stands_still_whose_running_streams_all_have_no_token(
    opened: list[Stream], *, still: bool
) -> None:
    assert cleaning(*opened).stand_still() is still


@pytest.mark.parametrize(("settle_s", "flush_tokens"), [(0.6, 1.0), (0.6, 200.0), (2.0, 1.0)])
def test_neither_a_hurried_wait_nor_large_flushes_make_a_server_stand_still(
    settle_s: float, flush_tokens: float
) -> None:
    """A stall of 4 s, or of two flushes."""
    silent = Stream(max(4.0, 2 * flush_tokens * 0.02))
    one = cleaning_of(settle_s=settle_s, flush_tokens=flush_tokens, opened=[silent])
    assert not one.stand_still()


@pytest.mark.parametrize(("refusals", "found"), [(4, Aftermath.RESTARTED), (None, Aftermath.DEAD)])
def test_a_server_that_serves_again_is_not_dead(refusals: int | None, found: Aftermath) -> None:
    looks = count()

    def start(*_: object) -> SimpleNamespace:
        is_away = refusals is None or next(looks) < refusals
        row = request_row(
            "canary",
            sent_ns=0,
            ended_ns=1,
            outcome=Outcome.FAILED if is_away else Outcome.COMPLETED,
            error="connection refused" if is_away else None,
        )
        return SimpleNamespace(join=lambda _: row)

    one = cleaning_of(
        settle_s=0.0,
        session=SimpleNamespace(plan=PLAN),
        start=start,
        short=lambda *_, **__: None,
        pause=lambda _: None,
    )
    assert one.aftermath(restart_s=30.0 if refusals else 0.01)[0] is found


def test_what_was_left_is_outlasted_before_a_server_is_called_wedged() -> None:
    tries = count()
    row = request_row("canary", sent_ns=0, ended_ns=1, outcome=Outcome.COMPLETED)

    def start(*_: object) -> SimpleNamespace:
        return SimpleNamespace(join=lambda _: row if next(tries) >= 3 else None)

    one = cleaning_of(session=SimpleNamespace(plan=PLAN), start=start, short=lambda *_, **__: None)
    assert one.aftermath()[0] is Aftermath.WEDGED
    assert one.aftermath_of_left()[0] is Aftermath.CLEAN
    assert next(tries) == 4


def refused_first(refusals: int, **facts: Any) -> Cleaning:
    """It refuses so many short requests, and then answers."""
    looks = count()

    def start(*_: object) -> SimpleNamespace:
        is_full = next(looks) < refusals
        outcome = Outcome.REJECTED if is_full else Outcome.COMPLETED
        row = request_row("canary", sent_ns=0, ended_ns=1, outcome=outcome, error="429")
        return SimpleNamespace(join=lambda _: row)

    return cleaning_of(
        settle_s=0.0,
        facts=facts,
        session=SimpleNamespace(plan=PLAN),
        start=start,
        short=lambda *_, **__: None,
        pause=lambda _: None,
    )


def test_refusals_that_end_by_themselves_are_a_limit_and_no_lost_slot() -> None:
    found, reason = refused_first(4, refuses=True).aftermath_of_refusals()
    assert found is Aftermath.REFUSING
    assert "in a minute" in reason


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({}, Aftermath.REFUSING),
        ({"refuses": True}, Aftermath.WEDGED),
        ({"queue": 0}, Aftermath.WEDGED),
    ],
)
def test_a_refusal_where_requests_used_to_wait_is_a_limit(
    facts: dict[str, Any], found: Aftermath
) -> None:
    assert refused_first(1 << 30, **facts).aftermath()[0] is found
