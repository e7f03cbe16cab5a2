"""What must hold at rest: how long answers that were left may hold slots by themselves, and what
they may change meanwhile."""

from types import SimpleNamespace
from typing import Any

import pytest

from harness.experiments.held import Count
from harness.experiments.patience import SLOWER
from harness.search.broken import Broken
from harness.search.invariants import Invariants, longest_run_s
from harness.search.play import Played
from harness.search.schedule import Leave, Schedule, Visit
from harness.store.conform_result import Aftermath


@pytest.mark.parametrize(
    ("left", "slots", "steps"),
    [
        ([], 4, 0),
        ([100], 4, 125),
        ([100] * 8, 4, 300),
        ([10, 10, 10, 400], 2, 615),
    ],
)
def test_answers_that_find_no_slot_run_after_those_that_have_one(
    left: list[int], slots: int, steps: int
) -> None:
    longest_s = longest_run_s(left, slots=slots, step_s=0.01, ttft_s=0.0)
    assert longest_s == pytest.approx(SLOWER * steps * 0.01)
    turns = -(-len(left) // slots)
    with_prompts_s = longest_run_s(left, slots=slots, step_s=0.01, ttft_s=2.0)
    assert with_prompts_s - longest_s == pytest.approx(SLOWER * turns * 2.0)


@pytest.mark.parametrize(("can_fill", "is_found"), [(True, True), (False, False)])
def test_a_text_that_is_wrong_once_is_a_fault_unless_answers_that_were_left_may_still_run(
    can_fill: bool, is_found: bool
) -> None:
    afterwards = [(Aftermath.WRONG_TEXT, "a greedy answer has changed"), (Aftermath.CLEAN, "")]
    plan = SimpleNamespace(
        target=SimpleNamespace(disconnect="cancel"),
        prompt_scale=SimpleNamespace(num_bytes=lambda tokens: tokens),
    )
    bench: Any = SimpleNamespace(
        session=SimpleNamespace(client=None, plan=plan),
        facts=SimpleNamespace(slots=4, can_fill=can_fill, may_refuse=False),
        pages=SimpleNamespace(judged=[]),
        held=SimpleNamespace(at_once=lambda: Count(0, 4, "occupancy")),
        cleaning=SimpleNamespace(aftermath_of_left=lambda: afterwards.pop(0)),
        opened=[],
        settle_s=0.01,
        step_s=0.01,
        ttft_s=0.01,
        ghosts=lambda: 1,
        end=lambda: None,
        forget=lambda: None,
        pause=lambda _: None,
    )
    left = Played(Schedule(seed=1, visits=(Visit(leave=Leave()),)), [None], [])
    found = [one.broken for one in Invariants(bench).broken_by(left)]
    assert found == ([Broken.TEXT] if is_found else [])
