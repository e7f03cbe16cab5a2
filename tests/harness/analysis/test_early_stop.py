"""Figures of early stopping from requests whose every token is known."""

from pathlib import Path

import pytest

from harness.analysis.early_stop import (
    EARLY_STOP_FIGURES,
    answered_tasks,
    early_stop_figures,
    savings_by_task,
    whole_answers_rate,
)
from harness.analysis.figure import Figures
from harness.analysis.run_facts import run_facts
from harness.records import TaskSavings
from harness.workload.tasks import TaskText, WorkloadTask
from tests.harness.told import metric, reason, warnings
from tests.made_up.run import RunBuilder

FIRST, SECOND = (
    TaskText(WorkloadTask.CODE, 0, 0.5),
    TaskText(WorkloadTask.CODE, 1, 0.5),
)  # of 24 and 47 tokens


def asked(
    run: RunBuilder, text: TaskText, generated: int, *, outcome: str = "completed", sent: float = 0
) -> None:
    name = f"r{len(run.requests)}"
    run.request(
        name, sent=sent, tokens=[], outcome=outcome, end=950, plan=text.plan, max_tokens=100
    )
    run.events(name, removed=900, finished=901, generated=generated)


@pytest.fixture
def run(tmp_path: Path) -> RunBuilder:
    made = RunBuilder(tmp_path)
    made.target.config = {"teacher": "texts.jsonl"}
    return made


def judged(run: RunBuilder) -> tuple[Figures, list[TaskSavings]]:
    frames = run.frames()
    tasks, facts = answered_tasks(frames), run_facts(frames)
    figures = early_stop_figures(tasks, facts) | whole_answers_rate(tasks, facts)
    return figures, savings_by_task(tasks, facts).get("early_stop_by_task", [])


def mean(figures: Figures, name: str) -> float | None:
    return metric(figures[name]).mean


def test_every_text_counts_once_however_often_it_was_asked_for(run: RunBuilder) -> None:
    for generated in (12, 12, 12, 24):  # 24 tokens: 15 on average
        asked(run, FIRST, generated)
    asked(run, SECOND, 23)
    figures, (code,) = judged(run)
    assert mean(figures, "early_stop_saved_share") == pytest.approx(1 - (15 + 23) / (24 + 47))
    assert mean(figures, "early_stop_saved_of_max") == pytest.approx(1 - (15 + 23) / 200)
    assert mean(figures, "whole_answers_rps") == 5  # in a second
    assert (code.task, code.n, code.after_answer, code.stops_early) == ("code", 5, 0.5, True)
    assert code.saved == mean(figures, "early_stop_saved_share")
    assert code.source_saved == 0.40


def test_an_answer_that_lacks_its_last_token_is_cut_short(run: RunBuilder) -> None:
    assert (FIRST.num_answer, SECOND.num_answer) == (12, 23)
    asked(run, FIRST, 11)
    asked(run, FIRST, 12)
    asked(run, SECOND, 22)
    figures, _ = judged(run)
    assert mean(figures, "early_stop_cut_short") == pytest.approx(2 / 3)
    assert mean(figures, "whole_answers_rps") == 1


def test_what_did_not_end_is_left_out_and_an_abandoned_chat_is_not(run: RunBuilder) -> None:
    chat = TaskText(WorkloadTask.CHAT, 0, 0.5)
    asked(run, chat, 13, outcome="abandoned")  # one more than it read
    for outcome in ("cut_off", "failed", "timed_out", "rejected"):
        asked(run, chat, 5, outcome=outcome)
    figures, (one,) = judged(run)
    assert (one.n, one.cut_short) == (1, 0)
    assert mean(figures, "early_stop_saved_share") == pytest.approx(1 - 13 / 24)


def test_without_early_stopping_the_saved_share_is_0(run: RunBuilder) -> None:
    asked(run, TaskText(WorkloadTask.CODE, 0, 0.5, stops_early=False), 24)
    figures, (code,) = judged(run)
    assert mean(figures, "early_stop_saved_share") == 0
    assert (code.stops_early, code.cut_short) == (False, 0)


@pytest.mark.parametrize("generated", [12, 25])
def test_a_server_with_texts_of_its_own_is_not_measurable(run: RunBuilder, generated: int) -> None:
    if generated == 12:
        run.target.config = None
    asked(run, FIRST, generated)
    figures, savings = judged(run)
    assert savings == []
    why = "reference says texts of its own, not those of plan `task`"
    assert all(reason(figures[name]).startswith(why) for name in EARLY_STOP_FIGURES)
    names = ", ".join(EARLY_STOP_FIGURES)
    assert warnings(run, why) == [
        f"{names}: not measurable: {why}: what early stopping left unsaid is not known"
    ]


def test_a_run_without_known_texts_has_no_such_figure(run: RunBuilder) -> None:
    run.request("a", sent=0, tokens=[5], outcome="completed", end=9)
    assert judged(run) == ({}, [])
