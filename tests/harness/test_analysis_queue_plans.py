"""Who was to leave a queue that there was not: the run says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.harness.told import summary_of

if TYPE_CHECKING:
    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]


@pytest.mark.parametrize(
    ("plan", "waiting", "said"),
    [
        ("queued", [0.0, 0.0, 0.0], "1 were to leave while queued, but its_waiting showed nobody"),
        ("queued", [0.0, 2.0, 0.0], None),
        ("queued", [], "1 were to leave while queued, but its_waiting was not scraped"),
        ("tokens:0", [0.0, 0.0, 0.0], None),
    ],
)
def test_a_queue_that_nobody_was_seen_in(
    make_run: MakeRun, plan: str, waiting: list[float], said: str | None
) -> None:
    run = make_run()
    run.another_engine()
    run.metrics(waiting="exact")
    run.abandon("a", t0=500, tokens=[], plan=plan)
    for number, value in enumerate(waiting):
        run.scrape(100.0 * number, "its_waiting", value)
    run.idle({"waiting": 0.0}, {"waiting": 0.0})
    texts = [one["text"] for one in summary_of(run.frames())["validity"]]
    found = [text for text in texts if "to leave while queued" in text]
    assert [text.startswith(said or "?") for text in found] == ([True] if said else [])
