"""How long a schedule is waited for, and how long the streams are that stay."""

from types import SimpleNamespace
from typing import Any

import pytest

from harness.experiments.patience import READY_S
from harness.search.play import bystander_tokens, longest_of
from harness.search.schedule import Schedule, Visit


@pytest.mark.parametrize(
    ("slots", "visits", "tokens"),
    [
        (None, [Visit(answer=300)] * 3, 900),
        (4, [Visit(answer=300), Visit(answer=100, n=2)], 500),
        (40, [Visit(answer=300)] * 40, 12_000 / 10 + 300),
        (256, [Visit(answer=300)] * 40, 12_000 / 10 + 300),
        (40, [Visit(answer=300), Visit(answer=300, after=0)], 600),
    ],
)
def test_a_schedule_is_waited_for_as_long_as_a_quarter_at_once_needs(
    slots: int | None, visits: list[Visit], tokens: float
) -> None:
    facts = SimpleNamespace(slots=slots, turn_steps=0.0)
    bench: Any = SimpleNamespace(facts=facts, step_s=0.01, ttft_s=0.0)
    schedule = Schedule(seed=1, visits=tuple(visits))
    assert longest_of(bench, schedule) == pytest.approx(READY_S + 4 * tokens * 0.01)


@pytest.mark.parametrize(
    ("step_s", "ttft_s", "tokens"), [(0.02, 0.1, 64), (0.45, 0.5, 43), (0.9, 1.0, 21), (1, 25, 8)]
)
def test_streams_that_stay_are_short_enough_to_end_in_time_on_a_slow_server(
    step_s: float, ttft_s: float, tokens: int
) -> None:
    bench: Any = SimpleNamespace(step_s=step_s, ttft_s=ttft_s)
    assert bystander_tokens(bench) == tokens
