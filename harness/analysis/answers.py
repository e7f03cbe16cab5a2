"""Doubts about a run that its answers raise, in sentences: nothing here is a figure."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from harness.analysis.open_requests import RACE
from harness.analysis.tokens import tokens_read, without_tokens
from harness.records import Outcome

MOST_ERRORS = 3  # kinds of errors that are listed


def strange_answers(requests: pd.DataFrame) -> Iterator[str]:
    if requests.empty:
        return
    requests = without_tokens(requests)
    yield from _too_long(requests)
    yield from _empty(requests)
    yield from _errors(requests)
    yield from _over_too_soon(requests)
    yield from _sent_again(requests)


def why_nobody_left(requests: pd.DataFrame) -> str:
    planned = requests["planned_abandon"].notna() | (requests["way"] != "")
    if not planned.any():
        return "no request was abandoned: the run says nothing about cancellation"
    fates = requests.loc[planned, "outcome"].value_counts()
    what = ", ".join(f"{n} {str(name).replace('_', ' ')}" for name, n in fates.items())
    return (
        "no request was abandoned: the run says nothing about cancellation. "
        f"Planned to be abandoned: {int(planned.sum())}; they ended as: {what}"
    )


def _too_long(requests: pd.DataFrame) -> Iterator[str]:
    asked = (requests["max_tokens"] * requests["n"]).to_numpy(dtype=float)
    got = np.maximum(
        requests["tokens_read"].to_numpy(dtype=float),
        requests["completion_tokens"].to_numpy(dtype=float, na_value=0.0),
    )
    too_many = int((got > asked).sum())
    if too_many:
        yield (
            f"{too_many} of {len(requests)} answers were longer than their `max_tokens` (up to "
            f"{np.nanmax(got - asked):.0f} tokens more): the target ignores it, or counts "
            "otherwise; what a forgotten request costs is not bounded by it"
        )


def _empty(requests: pd.DataFrame) -> Iterator[str]:
    completed = requests[requests["outcome"] == Outcome.COMPLETED]
    empty = int((tokens_read(completed) == 0).sum()) if len(completed) else 0
    if empty:
        yield (
            f"{empty} of {len(completed)} completed answers held no token at all: their streams "
            "ended well, and empty"
        )


def _errors(requests: pd.DataFrame) -> Iterator[str]:
    failed = requests[requests["outcome"].isin([Outcome.FAILED, Outcome.REJECTED])]
    texts = failed["error"].dropna().astype(str)
    if texts.empty:
        return
    kinds = texts.str.replace(r"\d+", "#", regex=True)
    counts = kinds.value_counts()
    for kind, n in counts.head(MOST_ERRORS).items():
        example = texts[kinds == kind].iloc[0]
        yield f"{n} of {len(requests)} requests ended with: {example}"
    if len(counts) > MOST_ERRORS:
        yield f"and {len(counts) - MOST_ERRORS} more kinds of errors: see requests.parquet"


def _sent_again(requests: pd.DataFrame) -> Iterator[str]:
    resent = int(requests["resent"].sum())
    if not resent:
        return
    yield (
        f"{resent} of {len(requests)} requests were sent once more: the connection that was kept "
        "ended without a byte of an answer. A server that closes idle connections does that, and "
        "one that drops requests, too; without `run.keep_alive` the latter is an error of its own"
    )


def _over_too_soon(requests: pd.DataFrame) -> Iterator[str]:
    planned = requests[requests["planned_abandon"].notna() & (requests["plan"] != RACE)]
    over = planned[planned["outcome"] == Outcome.COMPLETED]
    if over.empty:
        return
    asked = over["max_tokens"].to_numpy(dtype=float)
    early = int((tokens_read(over) < asked).sum())
    why = (
        f"; {early} of these answers ended before `max_tokens`: does the target know `ignore_eos`?"
        if early
        else ""
    )
    yield (
        f"{len(over)} of {len(planned)} requests that were to be abandoned were answered before, "
        f"and count as completed{why}"
    )
