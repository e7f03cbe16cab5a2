"""Latency as the clients saw it: times of the requests that were read to the end.

A survivor is a user's request that was to be read to its end. A request that was to be abandoned is
none, even if the run ended or the answer was over first: the server's speed decides which of them
were left, so the others are a selection. A request that ended without a first token (cut off, timed
out) had waited for at least so long: its TTFT is right-censored, not missing.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.facts import Facts
from harness.analysis.figure import (
    Figure,
    Figures,
    NotMeasurable,
    Sample,
    describe_or,
    rate,
    reading,
    same_reason,
)
from harness.analysis.step_log import computed_tokens
from harness.analysis.tokens import token_gaps, tokens_read, without_tokens
from harness.records import Metric, Outcome, Remark, Role
from harness.store.frames import RunFrames

_LATENCY_FIGURES: Final = (
    "ttft_s",
    "itl_s",
    "tpot_s",
    "e2e_s",
    "goodput_rps",
    "start_delay_s",
)
_OPEN_LOOP_FIGURES: Final = ("ttft_from_intended_s", "e2e_from_intended_s")
_SENT: Final = "sent_ns"
_INTENDED: Final = "intended_start_ns"
_NO_SURVIVOR: Final = "no request that was to be read to its end had a token, or waited for one"
_NONE_COMPLETED: Final = "no survivor was completed"
_NONE_SENT: Final = "no request was sent"
_NONE_ACCEPTED: Final = "none of these requests was accepted"
_NO_USERS: Final = "this workload has no ordinary users, only fillers and probes"
_REFUSED: Final = (Outcome.REJECTED, Outcome.FAILED)


def latency_figures(requests: pd.DataFrame, facts: Facts) -> Figures:
    """TTFT, ITL, TPOT and E2E of survivors; goodput and start delay of all users.

    An open loop also has TTFT and E2E from the intended start: what a user felt who came when the
    schedule says, even if the request was sent late. They and the start delay include the requests
    that were due and never sent, right-censored: their users had waited until the load ended.

    With bystanders, each figure covers one kind of request and says which: TTFT the long prompts
    that were read, all else the bystanders.
    """
    if requests.empty:
        more = _OPEN_LOOP_FIGURES if facts.is_open_loop else ()
        return same_reason((*_LATENCY_FIGURES, *more), "no request ended")
    if (requests["role"] == Role.BYSTANDER).any():
        return _of_two_kinds(requests, facts)
    users = without_tokens(requests)[requests["role"] == Role.USER]
    if users.empty:
        return {**same_reason(_LATENCY_FIGURES, _NO_USERS), "itl_s": _of_fillers(requests)}
    survivors = users[users["planned_abandon"].isna()]
    figures = {
        "ttft_s": _ttft(users, survivors),
        "itl_s": _itl(requests, survivors),
        "tpot_s": _tpot(survivors),
        "e2e_s": _e2e(survivors),
        "goodput_rps": _goodput(users, facts),
        "start_delay_s": _start_delay(users),
    }
    if facts.is_open_loop:
        figures |= _from_intended(users, survivors, facts)
    return figures


def _from_intended(users: pd.DataFrame, survivors: pd.DataFrame, facts: Facts) -> Figures:
    to_stay = facts.unsent_to_stay_s
    everybody = to_stay + facts.unsent_to_leave_s
    ttft = _client(ttft_sample(survivors, since=_INTENDED).and_longer_than(to_stay), _NO_SURVIVOR)
    of_all = _client(ttft_sample(users, since=_INTENDED).and_longer_than(everybody), _NO_SURVIVOR)
    if isinstance(ttft, Metric) and isinstance(of_all, Metric):
        ttft.others["all_users"] = of_all
    e2e = _e2e_sample(survivors, since=_INTENDED).and_longer_than(to_stay)
    return {
        "ttft_from_intended_s": ttft,
        "e2e_from_intended_s": _client(e2e, _NONE_COMPLETED),
        "start_delay_s": _client(_delay_sample(users).and_longer_than(everybody), _NONE_SENT),
    }


def _of_fillers(requests: pd.DataFrame) -> Figure:
    """Fillers keep every slot busy, so their gaps are those of a full server."""
    figure = _itl(requests, without_tokens(requests)[requests["role"] == Role.FILLER])
    if isinstance(figure, Metric):
        figure.of = "fillers"
    return figure


def _of_two_kinds(requests: pd.DataFrame, facts: Facts) -> Figures:
    bystanders = without_tokens(requests)[requests["role"] == Role.BYSTANDER]
    long_prompts = without_tokens(requests)[requests["role"] == Role.LONG_PROMPT]
    ttft = _client(ttft_sample(long_prompts[long_prompts["planned_abandon"].isna()]), _NO_SURVIVOR)
    if isinstance(ttft, Metric):
        ttft.of = "long prompts that were read"
    figures = {
        "itl_s": _itl(requests, bystanders),
        "tpot_s": _tpot(bystanders),
        "e2e_s": _e2e(bystanders),
        "goodput_rps": _goodput(bystanders, facts),
    }
    for figure in figures.values():
        if isinstance(figure, Metric):
            figure.of = "bystanders"
    return {"ttft_s": ttft, **figures, "start_delay_s": _start_delay(requests)}


def _ttft(users: pd.DataFrame, survivors: pd.DataFrame) -> Figure:
    """First token event's arrival - request sent; `others.all_users` includes abandoned requests.

    The clock starts before the connection is opened: name look-up, TCP and TLS are included, unless
    a connection was kept.
    """
    figure = _client(ttft_sample(survivors), _NO_SURVIVOR)
    everybody = _client(ttft_sample(users), _NO_SURVIVOR)
    if isinstance(figure, Metric) and isinstance(everybody, Metric):
        figure.others["all_users"] = everybody
    return figure


def ttft_sample(requests: pd.DataFrame, *, since: str = _SENT) -> Sample:
    """Censored at the end of a request that was accepted, or waited for, but had no token yet. An
    answer that was complete and empty had none to wait for."""
    first = requests["first_token_ns"]
    is_waiting = first.isna() & ~requests["outcome"].isin((*_REFUSED, Outcome.COMPLETED))
    rows = requests[first.notna() | is_waiting]
    until = rows["first_token_ns"].fillna(rows["ended_ns"])
    return Sample(
        values=(until - rows[since]).to_numpy(dtype=float) / 1e9,
        censored=rows["first_token_ns"].isna().to_numpy(),
    )


def _itl(requests: pd.DataFrame, survivors: pd.DataFrame) -> Figure:
    """Gap between consecutive token events of one answer, all gaps of all survivors together."""
    gaps, of_each = token_gaps(requests, requests.index.isin(survivors.index))
    return _client(Sample(values=gaps, clusters=of_each), "no survivor had two token events")


def _tpot(survivors: pd.DataFrame) -> Figure:
    """(last token - first token) / (tokens - 1), of requests with two tokens or more. The n answers
    to one request grow in step, so it counts with the tokens of one of them."""
    tokens = tokens_read(survivors) / survivors["n"].to_numpy(dtype=float)
    span = (survivors["last_token_ns"] - survivors["first_token_ns"]).to_numpy(
        dtype=float, na_value=np.nan
    )
    is_long = (tokens >= 2) & ~np.isnan(span)
    values = span[is_long] / 1e9 / (tokens[is_long] - 1)
    return _client(Sample(values=values), "no survivor had two tokens")


def _e2e(survivors: pd.DataFrame) -> Figure:
    """Last token event - request sent, of completed requests."""
    return _client(_e2e_sample(survivors, since=_SENT), _NONE_COMPLETED)


def _e2e_sample(survivors: pd.DataFrame, *, since: str) -> Sample:
    completed = survivors[survivors["outcome"] == Outcome.COMPLETED]
    span = (completed["last_token_ns"] - completed[since]).dropna()
    return Sample(values=span.to_numpy(dtype=float) / 1e9)


def _goodput(users: pd.DataFrame, facts: Facts) -> Figure:
    """Requests completed in the load window / its length; abandoned ones do not count."""
    if facts.load_s <= 0:
        return NotMeasurable("the load window has no length")
    completed = users["outcome"] == Outcome.COMPLETED
    in_window = users["ended_ns"].between(facts.load_started_ns, facts.load_ended_ns)
    n = int((completed & in_window).sum())
    return reading(n / facts.load_s, unit="rps", method="client", n=n)


def _start_delay(users: pd.DataFrame) -> Figure:
    """Request sent - intended start: how late the harness itself was."""
    return _client(_delay_sample(users), _NONE_SENT)


def _delay_sample(users: pd.DataFrame) -> Sample:
    delay = users["sent_ns"] - users["intended_start_ns"]
    return Sample(values=delay.to_numpy(dtype=float) / 1e9)


def _client(sample: Sample, why_empty: str) -> Figure:
    return describe_or(sample, why_empty, unit="s", method="client")


_NO_ANSWER = "no canary had a second answer"


def canary_figures(requests: pd.DataFrame) -> Figures:
    """canary_mismatch_rate = answers that differ from the known one / answers after it;
    canary_ttft_s and canary_itl_s. Empty without canaries.

    Over several runs, each canary's earliest answer of all is the known one.
    """
    is_canary = (requests["role"] == Role.CANARY).to_numpy(dtype=bool)
    canaries = without_tokens(requests)[is_canary]
    if canaries.empty:
        return {}
    answers = _answers(canaries)
    later = answers[answers.duplicated("user")]
    differs = later["answer"] != later["user"].map(known_answers(canaries))
    gaps, of_each = token_gaps(requests, is_canary)
    return {
        "canary_mismatch_rate": (
            rate(int(differs.sum()), len(later), method="client")
            if len(later)
            else NotMeasurable(_NO_ANSWER)
        ),
        "canary_ttft_s": _client(ttft_sample(canaries), _NO_ANSWER),
        "canary_itl_s": _client(Sample(values=gaps, clusters=of_each), _NO_ANSWER),
    }


def known_answers(requests: pd.DataFrame) -> dict[int, str]:
    """The earliest completed answer of each canary, by its number."""
    first = _answers(without_tokens(requests)[requests["role"] == Role.CANARY]).drop_duplicates(
        "user"
    )
    return dict(zip(first["user"].tolist(), first["answer"].tolist(), strict=True))


def canary_remarks(known: Mapping[str, Mapping[int, str]]) -> list[Remark]:
    """`known`: the known answers of each arm, which must be alike."""
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


def asking_again_figures(requests: pd.DataFrame) -> Figures:
    """ttft_again_s: TTFT of requests that repeat another (`others.asked_first`: of the rest);
    attempts_per_answer: requests of users / their completed answers.

    Empty without repeated requests.
    """
    repeats = _repeats(requests)
    if repeats.empty:
        return {}
    users = requests[requests["role"] == Role.USER]
    again = _client(ttft_sample(repeats), _NONE_ACCEPTED)
    first = _client(ttft_sample(users[users["repeats"].isna()]), _NONE_ACCEPTED)
    if isinstance(again, Metric) and isinstance(first, Metric):
        again.of = "requests that repeat another"
        again.others["asked_first"] = first
    return {"ttft_again_s": again, "attempts_per_answer": _attempts(users)}


def cached_again_figures(frames: RunFrames, facts: Facts) -> Figures:
    """cached_again: prompt tokens that were not computed / all prompt tokens, of requests that
    repeat another and had a token.

    Tokens scheduled up to and with the step of the first token count as computed.
    """
    repeats = _repeats(frames.requests)
    if repeats.empty:
        return {}
    if not facts.has_lifecycle or not facts.has_steps:
        return {"cached_again": NotMeasurable(facts.needs_steps)}
    ids = frames.lifecycle.drop_duplicates("client_request_id").set_index("client_request_id")
    known = repeats[repeats["prompt_tokens"].notna()]
    known = known.assign(server_id=known["request_id"].map(ids["request_id"]))
    known = known.dropna(subset="server_id").reset_index(drop=True)
    computed = computed_tokens(frames.steps, pd.Index(known["server_id"], dtype=object))
    before = computed.groupby("request")["sampled"].cumsum() - computed["sampled"]
    prefill = computed[before == 0].groupby("request")["scheduled"].sum()
    prompts = known["prompt_tokens"].astype(float).reindex(prefill.index)
    if not len(prompts):
        return {"cached_again": NotMeasurable("no repeated request had a token")}
    share = float((prompts - prefill).clip(lower=0).sum() / prompts.sum())
    return {"cached_again": reading(share, unit="ratio", method="exact", n=len(prompts))}


def _repeats(requests: pd.DataFrame) -> pd.DataFrame:
    """Runs recorded before requests could repeat have no such column."""
    if "repeats" not in requests:
        return requests.iloc[:0]
    return without_tokens(requests)[requests["repeats"].notna()]


def _attempts(users: pd.DataFrame) -> Figure:
    completed = int((users["outcome"] == Outcome.COMPLETED).sum())
    if not completed:
        return NotMeasurable("no answer was completed")
    return reading(len(users) / completed, unit="requests", method="client", n=completed)
