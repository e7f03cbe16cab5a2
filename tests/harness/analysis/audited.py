"""A run whose every count is known, and the verdicts on the counters that tell of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.harness.told import summary_of

if TYPE_CHECKING:
    from tests.made_up.run import RunBuilder


def accounts(run: RunBuilder) -> RunBuilder:
    """Two users: one reads 60 tokens, one leaves after 40; each prompt has 10 tokens."""
    run.another_engine()
    roles = ("running", "waiting", "generated_tokens", "prompt_tokens", "aborted", "ended")
    run.metrics(**dict.fromkeys(roles, "exact"))
    tokens = [10.0 * i for i in range(1, 61)]
    run.request(
        "s", sent=0, tokens=tokens, outcome="completed", end=605, max_tokens=60, prompt_tokens=10
    )
    run.abandon("a", t0=405, tokens=tokens[:40], prompt_tokens=10)
    for t in range(5, 1000, 20):
        there = sum(t < end for end in (605, 415))
        run.scrape(t, "its_running", there)
        run.scrape(t, "its_waiting", 0)
        run.scrape(t, "its_generated_tokens", min(t / 10, 60) + min(t / 10, 41))
    before = dict.fromkeys(roles, 0.0)
    due = {"generated_tokens": 101.0, "prompt_tokens": 20.0, "aborted": 1.0, "ended": 2.0}
    run.idle(before, before | due)
    return run


def verdicts(run: RunBuilder) -> dict[str, str]:
    counters = summary_of(run.frames())["audit"]["counters"]
    return {entry["role"]: entry["verdict"] for entry in counters}
