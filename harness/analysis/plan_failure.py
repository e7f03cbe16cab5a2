"""Could the load do what its plan says? Users must be able to leave, and tokens must be seen.

A run in which nobody could leave, or in which no token was seen although the server counts some,
shows nothing of what it is for. The rows say why: how the answers ended, and how their text came.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.open_requests import RACE
from harness.analysis.tokens import tokens_read
from harness.formatting import error_kind, spoken_outcome, why_unanswered
from harness.records import WENT_WRONG, Delivery, Outcome
from harness.stats import Bools
from harness.workload.tasks import parse_text

NOTHING_SHOWN = "no request was abandoned: the run says nothing about cancellation"


def plan_failure(requests: pd.DataFrame) -> str | None:
    """Why the plan of the load could not be carried out, and what to change; None if it was."""
    why = "; ".join(_why_unanswered(requests) or why_plan_failed(requests))
    if not why:
        return None
    stop = "" if why.endswith(("?", "!", ".")) else "."
    return f"{why}{stop}{_TO_CHANGE}{_what_to_change(requests)}"


def without_advice(why: str) -> tuple[str, str]:
    """The reason of a plan's failure, and what to change ("": it is another sentence)."""
    reason, _, advice = why.partition(_TO_CHANGE)
    return reason.removesuffix("."), advice


def _why_unanswered(requests: pd.DataFrame) -> list[str]:
    outcomes = requests["outcome"].astype(str)
    is_wrong = outcomes.isin(WENT_WRONG)
    left = outcomes == Outcome.ABANDONED
    if (outcomes == Outcome.COMPLETED).any() or (left & (requests["tokens_read"] > 0)).any():
        return []
    is_due = requests["planned_abandon"].fillna(1) > 0  # others leave before the first token
    if not (is_wrong & is_due if left.any() else is_wrong).any():
        return []
    counts = {Outcome(str(name)): int(n) for name, n in outcomes.value_counts().items()}
    texts = requests["error"].dropna().astype(str)
    if texts.empty:
        return [why_unanswered(counts, None, int(is_wrong.sum()))]
    kinds = texts.map(error_kind)
    same, kind = max((int(n), str(kind)) for kind, n in kinds.value_counts().items())
    return [why_unanswered(counts, min(texts[kinds == kind]), same)]


def _what_to_change(requests: pd.DataFrame) -> str:
    """What to change, with a value taken from what the answers of this run were like."""
    completed = requests[requests["outcome"] == Outcome.COMPLETED]
    if not completed.empty:
        planned = max(1, round(100 * planned_to_leave(requests).mean()))
        half_s = float((completed["ended_ns"] - completed["sent_ns"]).median()) / 2e9
        return (
            "let users leave after seconds in place of tokens, half of a typical answer: "
            f"`--request-cancellation-rate {planned} --request-cancellation-delay {half_s:.2g}`"
        )
    if (requests["outcome"] == Outcome.REJECTED).any():
        fewer = max(1, requests["user"].nunique() // 2)
        return f"send fewer requests at once: `--set run.users={fewer}`"
    return "mend what the server's words name, then run again"


def why_plan_failed(requests: pd.DataFrame) -> Iterator[str]:
    """Why nobody could leave, or no token was seen, in sentences."""
    planned = planned_to_leave(requests)
    left = requests["outcome"] == Outcome.ABANDONED
    if planned.any() and not left[planned].any() and _ended_by_itself(requests)[planned].any():
        why = "".join(f"; {text}" for text in _why_answered(requests[planned]))
        yield (
            f"none of the {int(planned.sum())} requests that were to be abandoned could be: they "
            f"ended as {_fates(requests[planned])}{why}"
        )
    streams = _counted_streams(requests)
    if streams.any() and requests["first_token_ns"].isna().all():
        yield (
            f"no text was seen in any event, but the usage of {int(streams.sum())} answers counts "
            f"{number_of_tokens(requests[streams])}: their events have no text that walkaway "
            "knows, so nobody could leave after a token, and there are no times of tokens"
        )


def textless_answers(requests: pd.DataFrame) -> Iterator[str]:
    """Some answers showed no text, others did."""
    streams = _counted_streams(requests)
    empty = streams & requests["first_token_ns"].isna()
    if empty.any() and requests["first_token_ns"].notna().any():
        yield (
            f"in {int(empty.sum())} of {int(streams.sum())} completed streams no event had text, "
            f"but their usage counts {number_of_tokens(requests[empty])}: these are in no time of "
            "a token"
        )


def answered_too_soon(requests: pd.DataFrame) -> Iterator[str]:
    """Some left as planned, others were answered before they could."""
    planned = requests[planned_to_leave(requests)]
    over = planned[planned["outcome"] == Outcome.COMPLETED]
    if over.empty or not (planned["outcome"] == Outcome.ABANDONED).any():
        return
    why = "".join(f"; {text}" for text in _why_answered(over))
    yield (
        f"{len(over)} of {len(planned)} requests that were to be abandoned were answered before, "
        f"and count as completed{why}"
    )


def planned_to_leave(requests: pd.DataFrame) -> pd.Series:
    """Requests that race for the last token, or leave once an answer is complete, are left out:
    they may read all of it."""
    plans = requests["plan"]
    is_planned = requests["planned_abandon"].notna() | (requests["way"] != "")
    return is_planned & (plans != RACE) & plans.map(parse_text).isna()


def number_of_tokens(rows: pd.DataFrame) -> str:
    return f"{int(rows['completion_tokens'].sum()):,} tokens"


def _fates(rows: pd.DataFrame) -> str:
    fates = rows["outcome"].value_counts()
    return ", ".join(f"{n} {spoken_outcome(str(name))}" for name, n in fates.items())


_TO_CHANGE: Final = " To change that: "


def _ended_by_itself(requests: pd.DataFrame) -> pd.Series:
    return ~requests["outcome"].isin([Outcome.ABANDONED, Outcome.CUT_OFF])


def _counted_streams(requests: pd.DataFrame) -> pd.Series:
    is_stream = requests["delivery"] == Delivery.STREAM
    is_counted = (requests["completion_tokens"].fillna(0) > 0).astype(bool)
    return is_stream & is_counted & (requests["outcome"] == Outcome.COMPLETED)


def _why_answered(planned: pd.DataFrame) -> Iterator[str]:
    """Each reason with the number of answers that it holds for, the first that fits."""
    rows = planned[planned["outcome"] == Outcome.COMPLETED]
    if rows.empty:
        return
    tokens, plan = tokens_read(rows), rows["planned_abandon"].to_numpy(dtype=float, na_value=0.0)
    first, last = (rows[name].to_numpy(dtype=float, na_value=np.nan) for name in _STAMPS)
    is_stream = (rows["delivery"] == Delivery.STREAM).to_numpy(dtype=bool)
    left = np.ones(len(rows), dtype=bool)

    def take(found: Bools) -> Bools:
        taken: Bools = found & left
        left[taken] = False
        return taken

    if n := int(take(is_stream & np.isnan(first) & (tokens > 0)).sum()):
        yield f"in {n} no event had text"
    if (shorter := take(tokens <= plan)).any():
        yield _why_short(rows[shorter], int(tokens[shorter].max()))
    if n := int(take(is_stream & (first == last)).sum()):
        yield f"in {n} all text came at once, with the finish reason or just before it"
    if n := int(left.sum()):
        yield f"{n} ended before the moment to leave, or with several tokens at once"


_STAMPS = ("first_token_ns", "last_token_ns")


def _why_short(rows: pd.DataFrame, most: int) -> str:
    finishes = rows["finish_reason"].fillna("none").value_counts()
    said = ", ".join(f"`{name}`: {n}" for name, n in finishes.items())
    if most <= 0:
        return f"{len(rows)} had no token at all (finish reasons {said})"
    remedy = ""
    if "stop" in finishes:
        remedy = "; does the target know `ignore_eos`?"
    elif "length" in finishes and (rows["max_tokens"] > most).all():
        remedy = f"; the server itself ends answers at {most} tokens"
    return (
        f"{len(rows)} had no more tokens than the plan wanted read (at most {most}; finish reasons "
        f"{said}){remedy}"
    )
