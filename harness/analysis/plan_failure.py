"""Could the load do what its plan says? Users must be able to leave, and tokens must be seen.

A run in which nobody could leave, or in which no token was seen although the server counts some,
shows nothing of what it is for. The rows say why: how the answers ended, and how their text came.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from harness.analysis.open_requests import RACE
from harness.analysis.stats import Bools
from harness.analysis.tokens import tokens_read
from harness.records import Delivery, Outcome
from harness.workload.tasks import parse_text

NOTHING_SHOWN = "no request was abandoned: the run says nothing about cancellation"


def why_plan_failed(requests: pd.DataFrame) -> Iterator[str]:
    """Why the plan of the load could not be carried out, in sentences; none if it was."""
    planned = planned_to_leave(requests)
    left = requests["outcome"] == Outcome.ABANDONED
    if planned.any() and not left[planned].any() and _ended_by_itself(requests)[planned].any():
        fates = requests.loc[planned, "outcome"].value_counts()
        what = ", ".join(f"{n} {str(name).replace('_', ' ')}" for name, n in fates.items())
        why = "".join(f"; {text}" for text in _why_answered(requests[planned]))
        yield (
            f"none of the {int(planned.sum())} requests that were to be abandoned could be: they "
            f"ended as {what}{why}"
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
    remedy = ""
    if "stop" in finishes:
        remedy = "; does the target know `ignore_eos`?"
    elif "length" in finishes and (rows["max_tokens"] > most).all():
        remedy = f"; the server itself ends answers at {most} tokens"
    return (
        f"{len(rows)} had no more tokens than the plan wanted read (at most {most}; finish reasons "
        f"{said}){remedy}"
    )
