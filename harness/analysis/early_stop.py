"""Savings of early stopping: texts whose length and whose answer's end are known, against the
tokens that the engine generated of them.

A run without early stopping generates every text to its end, so its saved share is 0: the check of
the measure. Every text counts once, by the mean of its requests: a load that is cut off has fewer
of the long ones, and runs are compared text by text.
"""

from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.figure import Figures, NotMeasurable, proportion, reading, same_reason
from harness.analysis.run_facts import RunFacts
from harness.analysis.tokens import without_tokens
from harness.records import Outcome, TaskSavings
from harness.stats import Ints, ratio_ci95
from harness.store.frames import RunFrames
from harness.workload.tasks import WorkloadTask, parse_text

EARLY_STOP_FIGURES = SAVED, SAVED_OF_MAX, CUT_SHORT, ANSWERS = (
    "early_stop_saved_share",
    "early_stop_saved_of_max",
    "early_stop_cut_short",
    "whole_answers_rps",
)
# Average tokens saved against max_tokens, as published:
# "vLLM v1 Request Cancellation and Early Stopping: Freeing Resources Mid-Generation".
SOURCE_SAVED: Final = {
    WorkloadTask.CHAT: 0.35,
    WorkloadTask.SUMMARIZATION: 0.60,
    WorkloadTask.CLASSIFICATION: 0.95,
    WorkloadTask.EXTRACTION: 0.70,
    WorkloadTask.CODE: 0.40,
}


def answered_tasks(frames: RunFrames) -> pd.DataFrame:
    """One row for each request of a known text that was answered or left.

    plan, which names the text; task, after_answer, stops_early; whole and answer, the tokens of the
    text and up to the end of its answer; generated, by the log; max_tokens.
    """
    requests = without_tokens(frames.requests)
    is_over = requests["outcome"].isin([Outcome.COMPLETED, Outcome.ABANDONED])
    generated = frames.lifecycle.groupby("client_request_id")["num_generated"].max()
    found = requests.loc[is_over, ["request_id", "plan", "max_tokens"]]
    found = found.assign(text=found["plan"].map(parse_text)).dropna(subset="text")
    texts = found["text"].to_list()
    return pd.DataFrame(
        {
            "plan": found["plan"],
            "task": [text.task.value for text in texts],
            "after_answer": [text.after_answer for text in texts],
            "stops_early": [text.stops_early for text in texts],
            "whole": np.array([text.num_tokens for text in texts], dtype=np.int64),
            "answer": np.array([text.num_answer for text in texts], dtype=np.int64),
            "max_tokens": found["max_tokens"],
            "generated": found["request_id"].map(generated).astype(float),
        }
    )


def early_stop_figures(tasks: pd.DataFrame, facts: RunFacts) -> Figures:
    if tasks.empty:
        return {}
    if (why := _why_unknown(tasks, facts)) is not None:
        return same_reason((SAVED, SAVED_OF_MAX, CUT_SHORT), why)
    found: Figures = {CUT_SHORT: proportion(CUT_SHORT, _is_cut_short(tasks), "", method="exact")}
    for name, of in ((SAVED, "whole"), (SAVED_OF_MAX, "max_tokens")):
        saved, ci95 = _saved(tasks, of)
        found[name] = reading(name, saved, method="exact", n=len(tasks), mean_ci95=ci95)
    return found


def whole_answers_rate(tasks: pd.DataFrame, facts: RunFacts) -> Figures:
    if tasks.empty:
        return {}
    if (why := _why_unknown(tasks, facts) or facts.lacks("load")) is not None:
        return {ANSWERS: NotMeasurable(why)}
    num_whole = int((~_is_cut_short(tasks)).sum())
    return {ANSWERS: reading(ANSWERS, num_whole / facts.load_s, method="exact", n=num_whole)}


def savings_by_task(tasks: pd.DataFrame, facts: RunFacts) -> dict[str, list[TaskSavings]]:
    """An entry of a summary's breakdown; empty if there is nothing to say."""
    if tasks.empty or _why_unknown(tasks, facts) is not None:
        return {}
    savings = [
        TaskSavings(
            task=task,
            n=len(rows),
            after_answer=_only(rows["after_answer"]),
            stops_early=bool(rows["stops_early"].all()),
            saved=_saved(rows, "whole")[0],
            saved_of_max=_saved(rows, "max_tokens")[0],
            cut_short=float(_is_cut_short(rows).mean()),
            source_saved=SOURCE_SAVED[task],
        )
        for task in WorkloadTask
        if len(rows := tasks[tasks["task"] == task])
    ]
    return {"early_stop_by_task": savings}


def _why_unknown(tasks: pd.DataFrame, facts: RunFacts) -> str | None:
    if not facts.says_known_texts or (tasks["generated"] > tasks["whole"]).any():
        return (
            f"{facts.engine} says texts of its own, not those of plan `task`: what early stopping "
            "left unsaid is not known"
        )
    return facts.lacks("lifecycle")


def _is_cut_short(tasks: pd.DataFrame) -> pd.Series:
    return tasks["generated"] < tasks["answer"]


def _saved(tasks: pd.DataFrame, of: str) -> tuple[float, tuple[float, float] | None]:
    """The share of `of` that was not generated, and its interval; texts are the sample."""
    texts = tasks.groupby("plan")[["generated", of]].mean()
    most: Ints = texts[of].to_numpy(dtype=np.int64)
    saved = most - texts["generated"].to_numpy(dtype=float)
    return float(saved.sum() / most.sum()), ratio_ci95(saved, most)


def _only(values: pd.Series) -> float | None:
    first, *others = values.unique()
    return None if others else float(first)
