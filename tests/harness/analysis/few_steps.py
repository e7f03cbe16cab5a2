"""Runs of a few steps of 10 ms, and what is found of those who left them."""

from typing import Any

import pandas as pd

from harness.analysis.cancel import cancel_figures
from harness.analysis.cancellation import cancellations
from harness.analysis.facts import run_facts
from harness.analysis.figure import Figures
from tests.made_up.run import RunBuilder


def only_row(run: RunBuilder) -> "pd.Series[Any]":
    cancels = cancellations(run.frames())
    assert len(cancels) == 1
    return cancels.iloc[0]


def figures_of(run: RunBuilder) -> Figures:
    frames = run.frames()
    return cancel_figures(cancellations(frames), run_facts(frames))


def leave_in_decode(run: RunBuilder, name: str = "a", **more: Any) -> None:
    """Read 2 tokens, left at 33 in the step that samples the third, removed at its end."""
    run.abandon(name, t0=33, tokens=[21, 31], planned_abandon=2, **more)
    run.events(name, arrived=1, admitted=10.1, first_token=20)
    run.events(name, disconnected=34, abort_received=35.5, generated=2)
    run.events(name, removed=40.1, blocks_freed=40.2, finished=40.3, generated=3)


def four_steps(run: RunBuilder, *names: str) -> None:
    """A prefill of 5 tokens, two more tokens, and a step of somebody else."""
    run.step(10, 20, sampled=names, **dict.fromkeys(names, 5))
    run.steps(2, 3, *names)
    run.steps(4, 5, "other")
