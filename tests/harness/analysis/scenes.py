"""Small runs that several tests judge, and what is found in them."""

from typing import Any

import pandas as pd

from harness.analysis.black_box import Outside, seen_from_outside
from harness.analysis.cancel_figures import cancel_figures
from harness.analysis.cancellations import cancellations
from harness.analysis.figure import Figures
from harness.analysis.run_facts import run_facts
from tests.harness.told import summary_of
from tests.made_up.run import RunBuilder

# A few steps of 10 ms, and requests that are left in them.


def only_row(run: RunBuilder) -> "pd.Series[Any]":
    cancels = cancellations(run.frames())
    assert len(cancels) == 1
    return cancels.iloc[0]


def figures_of(run: RunBuilder) -> Figures:
    frames = run.frames()
    return cancel_figures(cancellations(frames), run_facts(frames))


def leave_in_decode(
    run: RunBuilder, name: str = "a", *, t0: float = 33, reason: str = "abort", **more: Any
) -> None:
    """Read 2 tokens, left at 33 in the step that samples the third, removed at its end."""
    run.abandon(name, t0=t0, tokens=[21, 31], **{"planned_abandon": 2, **more})
    run.events(name, arrived=1, admitted=10.1, first_token=20)
    if reason == "abort":
        run.events(name, disconnected=34, abort_received=35.5, generated=2)
    run.events(name, reason, removed=40.1, blocks_freed=40.2, finished=40.3, generated=3)


def four_steps(run: RunBuilder, *names: str) -> None:
    """A prefill of 5 tokens, two more tokens, and a step of somebody else."""
    run.step(10, 20, sampled=names, **dict.fromkeys(names, 5))
    run.steps(2, 3, *names)
    run.steps(4, 5, "other")


# A server without logs.


def seen(run: RunBuilder) -> Outside:
    frames = run.frames()
    return seen_from_outside(frames, run_facts(frames))


# A run whose every count is known, and the verdicts on its counters.


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
