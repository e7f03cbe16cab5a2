"""Canaries: are those who never leave unharmed by those who do?

The first answer of a canary came when it was alone (`harness.load.canary`): that is the known one.
Any other of its completed answers must be the same, in every round and in every arm.
"""

from collections.abc import Mapping

import pandas as pd

from harness.analysis.figure import Figures, NotMeasurable, Sample, describe_or, rate
from harness.analysis.latency import ttft_sample
from harness.analysis.token_times import token_gaps, without_tokens
from harness.records import Remark
from harness.records import Outcome, Role

_NO_ANSWER = "no canary had a second answer"


def canary_figures(requests: pd.DataFrame) -> Figures:
    """canary_mismatch_rate = answers that differ from the known one / answers after it;
    canary_ttft_s and canary_itl_s. None of them without canaries.

    Of several runs, each canary's earliest answer of all is the known one.
    """
    is_canary = (requests["role"] == Role.CANARY).to_numpy(dtype=bool)
    canaries = without_tokens(requests)[is_canary]
    if canaries.empty:
        return {}
    answers = _answers(canaries)
    later = answers[answers.duplicated("user")]
    differs = later["answer"] != later["user"].map(known_answers(canaries))
    gaps, of_each = token_gaps(requests, is_canary)
    no_answer = NotMeasurable(_NO_ANSWER)
    return {
        "canary_mismatch_rate": (
            rate(int(differs.sum()), len(later), method="client") if len(later) else no_answer
        ),
        "canary_ttft_s": describe_or(ttft_sample(canaries), _NO_ANSWER, unit="s", method="client"),
        "canary_itl_s": describe_or(
            Sample(values=gaps, clusters=of_each), _NO_ANSWER, unit="s", method="client"
        ),
    }


def known_answers(requests: pd.DataFrame) -> dict[int, str]:
    """Of each canary, by its number, the earliest completed answer."""
    first = _answers(without_tokens(requests)[requests["role"] == Role.CANARY]).drop_duplicates(
        "user"
    )
    return dict(zip(first["user"].tolist(), first["answer"].tolist(), strict=True))


def canary_remarks(known: Mapping[str, Mapping[int, str]]) -> list[Remark]:
    """What must be said of the known answers of each arm: they are to be alike."""
    alone: dict[int, set[str]] = {}
    for of_arm in known.values():
        for canary, text in of_arm.items():
            alone.setdefault(canary, set()).add(text)
    torn = sorted(canary for canary, texts in alone.items() if len(texts) > 1)
    if torn:
        names = ", ".join(map(str, torn))
        text = f"asked alone, canaries had another answer in one arm than in another: {names}"
        return [Remark(level="invalid", text=text)]
    if not alone:
        return []
    text = f"asked alone, each of {len(alone)} canaries had the same answer in all arms"
    return [Remark(level="info", text=text)]


def _answers(canaries: pd.DataFrame) -> pd.DataFrame:
    completed = canaries[canaries["outcome"] == Outcome.COMPLETED]
    return completed.sort_values("sent_ns", kind="stable")
