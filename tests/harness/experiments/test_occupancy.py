"""What is held after leaves, by requests that start at once."""

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
            row=row, token_times_ns=times if is_served else [], join=lambda _: row
        )

    streams: Any = SimpleNamespace(
        slots=SLOTS,
        facts=ServerFacts(SLOTS, 0.02, 0.02, None, refuses=True),
        step_s=0.02,
        ttft_s=0.02,
        settle_s=0.0,
        patience=Patience(0.0, 64, 0.0, 1.0),
        short=lambda tokens, **_: tokens,
        start=start,
        pause=lambda _: None,
    )
    return Occupancy(cast(Streams, streams))


@pytest.mark.parametrize("held", [0, 3])
def test_where_requests_are_refused_those_are_held_that_are_refused(held: int) -> None:
    occupancy = refusing(held)
    assert occupancy.held(lambda: 0) == held
    assert occupancy.refused == held


def test_one_more_than_the_slots_that_is_served_after_another_runs_beside_none() -> None:
    assert refusing(0).running_at_once(extra=1) <= SLOTS
