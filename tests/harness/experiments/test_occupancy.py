"""What is held after leaves, by requests that start at once."""

import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.experiments.idle_server import ServerFacts
from harness.experiments.occupancy import Occupancy
from harness.experiments.patience import Patience
from harness.experiments.streams import Streams
from harness.records import Outcome

SLOTS = 256
STEP_NS = 1000


WAIT_S = 1.0


def refusing(held: int) -> Occupancy:
    """One prompt begins in a step, so that short answers do not all run together."""
    sent = count()

    def start(tokens: int) -> SimpleNamespace:
        number = next(sent)
        is_served = number % SLOTS < SLOTS - held
        outcome = Outcome.COMPLETED if is_served else Outcome.REJECTED
        row = SimpleNamespace(outcome=outcome, status_code=200 if is_served else 429)
        times = [STEP_NS * (number + token) for token in range(tokens)]
        return SimpleNamespace(
            row=row, token_times_ns=times if is_served else [], sent_ns=0, join=lambda _: row
        )

    return occupancy_of(start, refuses=True)


def occupancy_of(start: Callable[[int], SimpleNamespace], *, refuses: bool) -> Occupancy:
    streams: Any = SimpleNamespace(
        slots=SLOTS,
        facts=ServerFacts(SLOTS, 0.02, 0.02, None, refuses=refuses),
        step_s=0.02,
        ttft_s=0.02,
        settle_s=0.0,
        patience=Patience(0.0, 64, 0.0, WAIT_S),
        short=lambda tokens, **_: tokens,
        start=start,
        pause=lambda _: None,
        check_ran_on=lambda: None,
    )
    return Occupancy(cast(Streams, streams))


@pytest.mark.parametrize("held", [0, 3])
def test_where_requests_are_refused_those_are_held_that_are_refused(held: int) -> None:
    occupancy = refusing(held)
    assert occupancy.held(lambda: 0) == held
    assert occupancy.refused == held


def test_one_more_than_the_slots_that_is_served_after_another_runs_beside_none() -> None:
    assert refusing(0).running_at_once(extra=1) <= SLOTS


def test_what_a_slow_client_sends_late_does_not_make_up_for_slots_that_were_held() -> None:
    """All slots are held until 1 ms after the first request has waited long enough."""
    sent_ns = count(0, 10_000)  # it takes 2.56 ms to send them all
    free_ns = int(WAIT_S * 1e9) + 1_000_000

    def start(tokens: int) -> SimpleNamespace:
        row = SimpleNamespace(outcome=Outcome.COMPLETED, status_code=200)
        times = [free_ns + STEP_NS * token for token in range(tokens)]
        return SimpleNamespace(
            row=row, token_times_ns=times, sent_ns=next(sent_ns), join=lambda _: row
        )

    assert occupancy_of(start, refuses=False).held(lambda: 0) > 0


@pytest.mark.parametrize(("late_s", "held"), [(0.01, 0), (WAIT_S - 0.1, 3)])
def test_slots_that_came_back_long_after_the_settle_time_were_held(
    late_s: float, held: int
) -> None:
    """The first count has found three that began later than the others, which had ended by then;
    the second one finds all slots free."""
    sent = count()

    def start(tokens: int) -> SimpleNamespace:
        number = next(sent)
        sent_ns = time.perf_counter_ns()
        first_ns = sent_ns + int(1e9 * (late_s if number < 3 else 0.001))
        row = SimpleNamespace(outcome=Outcome.COMPLETED, status_code=200)
        times = [first_ns + STEP_NS * token for token in range(tokens)]
        return SimpleNamespace(row=row, token_times_ns=times, sent_ns=sent_ns, join=lambda _: row)

    occupancy = occupancy_of(start, refuses=False)
    occupancy._streams.slots = 4  # type: ignore[misc]
    assert occupancy.held(lambda: 0) == held
