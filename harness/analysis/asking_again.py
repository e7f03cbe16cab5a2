"""What it costs to ask the same once more: who left or lost patience, and repeats the request.

A server that keeps a cancelled request's prompt answers the repetition sooner; a server that goes
on with what nobody waits for answers it later, and then it is left again.
"""

import pandas as pd

from harness.analysis.facts import Facts
from harness.analysis.figure import Figure, Figures, NotMeasurable, Sample, describe_or, reading
from harness.analysis.latency import ttft_sample
from harness.analysis.step_log import computed_tokens
from harness.analysis.tokens import without_tokens
from harness.records import Metric, Outcome, Role
from harness.store.frames import RunFrames


def asking_again_figures(requests: pd.DataFrame) -> Figures:
    """ttft_again_s: of the requests that repeat another (`others.asked_first`: of those that do
    not); attempts_per_answer: requests of users / their completed answers.

    None of both where nobody repeated anything.
    """
    repeats = _repeats(requests)
    if repeats.empty:
        return {}
    users = requests[requests["role"] == Role.USER]
    again = _ttft(repeats)
    first = _ttft(users[users["repeats"].isna()])
    if isinstance(again, Metric) and isinstance(first, Metric):
        again.of = "requests that repeat another"
        again.others["asked_first"] = first
    return {"ttft_again_s": again, "attempts_per_answer": _attempts(users)}


def cached_again_figures(frames: RunFrames, facts: Facts) -> Figures:
    """cached_again: of the requests that repeat another and had a token, the prompt tokens that
    were not computed / all prompt tokens.

    Computed are the tokens scheduled for it up to and with the step of its first token.
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
    """Runs from before there were repetitions have no such column."""
    if "repeats" not in requests:
        return requests.iloc[:0]
    return without_tokens(requests)[requests["repeats"].notna()]


def _ttft(requests: pd.DataFrame) -> Figure:
    why = "none of these requests was accepted"
    sample: Sample = ttft_sample(requests)
    return describe_or(sample, why, unit="s", method="client")


def _attempts(users: pd.DataFrame) -> Figure:
    completed = int((users["outcome"] == Outcome.COMPLETED).sum())
    if not completed:
        return NotMeasurable("no answer was completed")
    return reading(len(users) / completed, unit="requests", method="client", n=completed)
