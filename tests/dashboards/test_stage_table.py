"""The stages of a cancel as a table, in time and in steps."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from dashboards.source import Run, read_run
from dashboards.stage_table import stage_table, stages_in_steps

MakeRun = Callable[..., Path]


def run_of(path: Path) -> Run:
    run = read_run(path)
    assert isinstance(run, Run)
    return run


def test_a_stage_in_steps_is_the_boundaries_that_passed_in_it(make_run: MakeRun) -> None:
    run = run_of(make_run())
    steps = stages_in_steps(run.cancels, run.frames.steps)
    medians = {name: metric.p50 for name, metric in steps.items()}
    # Seen and heard within the step in which the user leaves; out of the batch at its end.
    assert medians == {"detect_s": 0, "signal_s": 0, "wait_s": 1, "free_s": 0}
    assert {metric.n for metric in steps.values()} == {30}


def test_a_ghost_is_censored_in_the_stage_that_it_never_left(make_run: MakeRun) -> None:
    run = run_of(make_run(ghosts=12))
    steps = stages_in_steps(run.cancels, run.frames.steps)
    assert (steps["detect_s"].n, steps["detect_s"].n_censored) == (
        30,
        9,
    )  # three of the twelve stay
    assert (steps["wait_s"].n, steps["wait_s"].n_censored) == (21, 0)
    assert steps["detect_s"].p99 is None


def test_without_a_step_log_there_are_times_only(make_run: MakeRun) -> None:
    run = run_of(make_run())
    assert stages_in_steps(run.cancels, pd.DataFrame()) == {}
    rows = stage_table(run.metrics, {}).rows
    assert [row[0] for row in rows] == [
        "the user leaves \N{RIGHTWARDS ARROW} the server sees it",
        "the server sees it \N{RIGHTWARDS ARROW} its worker hears of it",
        "the worker hears of it \N{RIGHTWARDS ARROW} out of the batch",
        "out of the batch \N{RIGHTWARDS ARROW} blocks reclaimed",
        "in all: cancel latency",
        "blocks reclaimed \N{RIGHTWARDS ARROW} refilled: the next one takes the slot",
    ]
    assert rows[2] == (rows[2][0], "30", "11 ms", "12 ms", "\N{EN DASH}", "\N{EN DASH}")
    assert rows[4][2:] == ("13.1 ms", "13.1 ms", "1", "1")
