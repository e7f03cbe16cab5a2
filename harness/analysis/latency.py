"""Latency as the clients saw it: times of the requests that were read to the end.

A survivor is a user's request that was to be read to its end. A request that was to be abandoned is
none, even if its answer was over first, or the server's speed would select the sample. A request
that ended without a first token waited at least that long: its TTFT is right-censored, not missing.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.figure import (
    Figure,
    Figures,
    NotMeasurable,
    Sample,
    proportion,
    reading,
    same_reason,
    sampled,
)
from harness.analysis.run_facts import RunFacts
from harness.analysis.tokens import token_gaps, tokens_shown, without_tokens
from harness.records import Delivery, Metric, Outcome, Remark, Role
from harness.stats import Bools

_OF_USERS: Final = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "goodput_rps", "start_delay_s")
_FROM_INTENDED: Final = ("ttft_from_intended_s", "e2e_from_intended_s")
_SENT: Final = "sent_ns"
_INTENDED: Final = "intended_start_ns"
_NO_SURVIVOR: Final = "no request that was to be read to its end had a token, or waited for one"
_NONE_COMPLETED: Final = "no survivor was completed"
_NO_ANSWER: Final = "no canary had a second answer"
_WHY_EMPTY: Final = {
    "itl_s": "no survivor had two token events",
    "tpot_s": "no survivor had tokens at two moments",
    "e2e_s": _NONE_COMPLETED,
    "e2e_from_intended_s": _NONE_COMPLETED,
    "e2e_urgent_s": _NONE_COMPLETED,
    "unary_s": _NONE_COMPLETED,
    "start_delay_s": "no request was sent",
    "canary_ttft_s": _NO_ANSWER,
    "canary_itl_s": _NO_ANSWER,
}


def latency_figures(requests: pd.DataFrame, facts: RunFacts) -> Figures:
    """TTFT, ITL, TPOT and E2E of survivors; goodput and start delay of all users.

    An open loop also has TTFT and E2E from the intended start: what a user felt who came when the
    schedule says, even if the request was sent late. They and the start delay include the requests
    that were due and never sent, right-censored: their users had waited until the load ended.

    With bystanders, each figure covers one kind of request and says which: TTFT the long prompts
    that were read, all else the bystanders.
    """
    if requests.empty:
        more = _FROM_INTENDED if facts.is_open_loop else ()
        return same_reason((*_OF_USERS, *more), "no request ended")
    plain, role = without_tokens(requests), requests["role"]
    is_user = role == Role.USER
    if (role == Role.BYSTANDER).any():
        long_prompts = _survivors(plain[role == Role.LONG_PROMPT])
        bystanders = plain[role == Role.BYSTANDER]
        return {
            "ttft_s": _of(
                "long prompts that were read", _figure("ttft_s", ttft_sample(long_prompts))
            ),
            **{
                name: _of("bystanders", one)
                for name, one in _while_read(requests, bystanders, bystanders, facts).items()
            },
            "start_delay_s": _figure("start_delay_s", _delay(plain)),
        }
    if not is_user.any():
        # Fillers keep every slot busy, so their gaps are those of a full server.
        why = "this workload has no ordinary users, only fillers and probes"
        gaps = _figure("itl_s", _gaps(requests, role == Role.FILLER))
        return {**same_reason(_OF_USERS, why), "itl_s": _of("fillers", gaps)}
    users = plain[is_user]
    survivors = _survivors(users)
    figures = {
        "ttft_s": _beside(
            _figure("ttft_s", ttft_sample(survivors)),
            "all_users",
            _figure("ttft_s", ttft_sample(users)),
        ),
        **_while_read(requests, survivors, users, facts),
        "start_delay_s": _figure("start_delay_s", _delay(users)),
    }
    figures |= _of_unary(survivors) | _of_urgent(survivors)
    return figures | (_from_intended(users, survivors, facts) if facts.is_open_loop else {})


def _of_unary(survivors: pd.DataFrame) -> Figures:
    unary = survivors[survivors["delivery"] == Delivery.UNARY]
    if unary.empty:
        return {}
    completed = unary[unary["outcome"] == Outcome.COMPLETED]
    spans = (completed["ended_ns"] - completed[_SENT]).to_numpy(dtype=float)
    return {"unary_s": _figure("unary_s", Sample(values=spans / 1e9))}


def _of_urgent(survivors: pd.DataFrame) -> Figures:
    """Figures of the most urgent priority, if there are several. A request without one has 0."""
    priorities = survivors["priority"].astype(float).fillna(0)
    if priorities.nunique() < 2:
        return {}
    urgent = survivors[priorities == priorities.min()]
    samples = {"ttft_urgent_s": ttft_sample(urgent), "e2e_urgent_s": e2e_sample(urgent)}
    return {name: _figure(name, sample) for name, sample in samples.items()}


def _survivors(requests: pd.DataFrame) -> pd.DataFrame:
    return requests[requests["planned_abandon"].isna()]


def _while_read(
    requests: pd.DataFrame, survivors: pd.DataFrame, users: pd.DataFrame, facts: RunFacts
) -> Figures:
    is_survivor = requests.index.to_series().isin(survivors.index)
    why = facts.lacks("token lists")
    return {
        "itl_s": NotMeasurable(why) if why else _figure("itl_s", _gaps(requests, is_survivor)),
        "tpot_s": _figure("tpot_s", _times_a_token(survivors)),
        "e2e_s": _figure("e2e_s", e2e_sample(survivors)),
        "goodput_rps": _goodput(users, facts),
    }


def _from_intended(users: pd.DataFrame, survivors: pd.DataFrame, facts: RunFacts) -> Figures:
    to_stay = facts.missed_to_stay_s
    everybody = to_stay + facts.missed_to_leave_s
    samples = {
        "ttft_from_intended_s": ttft_sample(survivors, since=_INTENDED).and_longer_than(to_stay),
        "e2e_from_intended_s": e2e_sample(survivors, since=_INTENDED).and_longer_than(to_stay),
        "start_delay_s": _delay(users).and_longer_than(everybody),
    }
    figures = {name: _figure(name, sample) for name, sample in samples.items()}
    of_all = ttft_sample(users, since=_INTENDED).and_longer_than(everybody)
    name = "ttft_from_intended_s"
    figures[name] = _beside(figures[name], "all_users", _figure(name, of_all))
    return figures


def _figure(name: str, sample: Sample) -> Figure:
    return sampled(name, sample, _WHY_EMPTY.get(name, _NO_SURVIVOR), method="client")


def _of(kind: str, figure: Figure) -> Figure:
    if isinstance(figure, Metric):
        figure.of = kind
    return figure


def _beside(figure: Figure, name: str, other: Figure) -> Figure:
    if isinstance(figure, Metric) and isinstance(other, Metric):
        figure.others[name] = other
    return figure


def ttft_sample(requests: pd.DataFrame, *, since: str = _SENT) -> Sample:
    """Times to the first token event, censored at the end of a request that was accepted, or waited
    for, but had no token yet. An answer that was complete and empty had none to wait for.

    The clock starts before the connection is opened: name look-up, TCP and TLS are included, unless
    a connection was kept.
    """
    no_wait = (Outcome.REJECTED, Outcome.FAILED, Outcome.COMPLETED)
    first = requests["first_token_ns"]
    rows = requests[first.notna() | ~requests["outcome"].isin(no_wait)]
    until = rows["first_token_ns"].fillna(rows["ended_ns"])
    return Sample(
        values=(until - rows[since]).to_numpy(dtype=float) / 1e9,
        censored=rows["first_token_ns"].isna().to_numpy(),
    )


def _gaps(requests: pd.DataFrame, wanted: pd.Series) -> Sample:
    is_wanted: Bools = wanted.to_numpy(dtype=bool)
    gaps, of_each = token_gaps(requests, is_wanted)
    return Sample(values=gaps, clusters=of_each)


def _times_a_token(survivors: pd.DataFrame) -> Sample:
    """The time a token of each answer that came at more than one moment."""
    tokens = tokens_shown(survivors) / survivors["n"].to_numpy(dtype=float)
    span = survivors["last_token_ns"] - survivors["first_token_ns"]
    span_s = span.to_numpy(dtype=float, na_value=np.nan) / 1e9
    is_long = (tokens >= 2) & (span_s > 0)
    return Sample(values=span_s[is_long] / (tokens[is_long] - 1))


def e2e_sample(survivors: pd.DataFrame, *, since: str = _SENT) -> Sample:
    completed = survivors[survivors["outcome"] == Outcome.COMPLETED]
    span = (completed["last_token_ns"] - completed[since]).dropna()
    return Sample(values=span.to_numpy(dtype=float) / 1e9)


def _delay(users: pd.DataFrame) -> Sample:
    return Sample(values=(users["sent_ns"] - users[_INTENDED]).to_numpy(dtype=float) / 1e9)


def _goodput(users: pd.DataFrame, facts: RunFacts) -> Figure:
    if (why := facts.lacks("load")) is not None:
        return NotMeasurable(why)
    in_window = users["ended_ns"].between(facts.load_started_ns, facts.load_ended_ns)
    n = int(((users["outcome"] == Outcome.COMPLETED) & in_window).sum())
    return reading("goodput_rps", n / facts.load_s, method="client", n=n)


def canary_figures(requests: pd.DataFrame) -> Figures:
    is_canary = requests["role"] == Role.CANARY
    canaries = without_tokens(requests)[is_canary]
    if canaries.empty:
        return {}
    answers = _answers(canaries)
    later = answers[answers.duplicated("user")]
    differs = later["answer"] != later["user"].map(known_answers(canaries))
    name = "canary_mismatch_rate"
    return {
        name: proportion(name, differs, _NO_ANSWER, method="client"),
        "canary_ttft_s": _figure("canary_ttft_s", ttft_sample(canaries)),
        "canary_itl_s": _figure("canary_itl_s", _gaps(requests, is_canary)),
    }


def known_answers(requests: pd.DataFrame) -> dict[int, str]:
    canaries = without_tokens(requests)[requests["role"] == Role.CANARY]
    first = _answers(canaries).drop_duplicates("user")
    return dict(zip(first["user"].tolist(), first["answer"].tolist(), strict=True))


def canary_remarks(known: Mapping[str, Mapping[int, str]]) -> list[Remark]:
    texts: dict[int, set[str]] = {}
    for of_arm in known.values():
        for canary, text in of_arm.items():
            texts.setdefault(canary, set()).add(text)
    if not texts:
        return []
    torn = sorted(canary for canary, answers in texts.items() if len(answers) > 1)
    if torn:
        names = ", ".join(map(str, torn))
        said = f"asked alone, canaries had another answer in one arm than in another: {names}"
        return [Remark(level="invalid", text=said)]
    said = f"asked alone, each of {len(texts)} canaries had the same answer in all arms"
    return [Remark(level="info", text=said)]


def _answers(canaries: pd.DataFrame) -> pd.DataFrame:
    completed = canaries[canaries["outcome"] == Outcome.COMPLETED]
    return completed.sort_values("sent_ns", kind="stable")
