"""Requests that come after another of their user: the same once more, or the next of a session.

What of a prompt was computed again is known from the engine's log, else from the server's own count
of cached tokens. A turn whose history the client had cut is left out: no prefix is left to find.
"""

from collections.abc import Iterator
from typing import Final

import pandas as pd

from harness.analysis.figure import Figure, Figures, NotMeasurable, reading, sampled
from harness.analysis.latency import ttft_sample
from harness.analysis.run_facts import RunFacts
from harness.analysis.timeline import computed_tokens
from harness.analysis.tokens import without_tokens
from harness.records import Metric, Outcome, Role
from harness.store.frames import RunFrames

_NONE_ACCEPTED: Final = "none of these requests was accepted"
_TURNS: Final = {"stop": Outcome.ABANDONED, "answer": Outcome.COMPLETED}
_SPOKEN: Final = {"stop": "a stop", "answer": "a whole answer"}


def asking_again_figures(requests: pd.DataFrame) -> Figures:
    repeats = _repeats(requests)
    if repeats.empty:
        return {}
    users = requests[requests["role"] == Role.USER]
    name = "ttft_again_s"
    again, first = (
        sampled(name, ttft_sample(rows), _NONE_ACCEPTED, method="client")
        for rows in (repeats, users[users["repeats"].isna()])
    )
    if isinstance(again, Metric) and isinstance(first, Metric):
        again.of = "requests that repeat another"
        again.others["asked_first"] = first
    return {name: again, "attempts_per_answer": _attempts(users)}


def cached_again_figures(frames: RunFrames, facts: RunFacts) -> Figures:
    name, repeats = "cached_again", _repeats(frames.requests)
    if repeats.empty:
        return {}
    method, found = _with_computed(repeats, frames, facts)
    if isinstance(found, NotMeasurable):
        return {name: found}
    if found.empty:
        return {name: NotMeasurable("no repeated request had a token")}
    prompts = found["prompt_tokens"].astype(float)
    share = float((prompts - found["computed"]).clip(lower=0).sum() / prompts.sum())
    return {name: reading(name, share, method=method, n=len(found))}


def turn_figures(requests: pd.DataFrame) -> Figures:
    """First tokens of the turns after a stop, and after a whole answer."""
    turns = _turns(requests)
    if turns.empty:
        return {}
    return {
        (name := f"ttft_after_{what}_s"): sampled(
            name,
            ttft_sample(turns[turns["follows"] == outcome]),
            f"no turn came after {_SPOKEN[what]}",
            method="client",
        )
        for what, outcome in _TURNS.items()
    }


def recomputed_history_figures(frames: RunFrames, facts: RunFacts) -> Figures:
    turns = _turns(frames.requests)
    if turns.empty:
        return {}
    names = {f"recomputed_after_{what}": outcome for what, outcome in _TURNS.items()}
    method, found = _with_computed(turns, frames, facts)
    if isinstance(found, NotMeasurable):
        return dict.fromkeys(names, found)
    new = (found["prompt_tokens"] - found["history_tokens"]).clip(lower=0)
    again = (found["computed"] - new).clip(lower=0)
    figures: Figures = {}
    for name, outcome in names.items():
        own = again[found["follows"] == outcome]
        empty = NotMeasurable("no such turn had a token and a known number of cached tokens")
        mean = None if own.empty else reading(name, float(own.mean()), method=method, n=len(own))
        figures[name] = empty if mean is None else mean
    return figures


def session_remarks(requests: pd.DataFrame) -> Iterator[str]:
    cut = requests[requests["history_cut"] > 0]
    if len(cut):
        tokens = int(cut["history_cut"].sum())
        yield (
            "turns that did not fit into the longest of `load.prompt_tokens`: "
            f"{len(cut)}; {tokens:,} tokens of their sessions' oldest turns were left out"
        )
    again = requests[requests["follows"].notna() & requests["repeats"].notna()]
    if len(again):
        yield (
            f"turns that named a response which the server no longer had: {len(again)}; it refused "
            "them, and they were sent again with the whole context"
        )


def _turns(requests: pd.DataFrame) -> pd.DataFrame:
    plain = without_tokens(requests)
    return plain[plain["follows"].notna() & (plain["history_cut"] == 0)]


def _with_computed(
    rows: pd.DataFrame, frames: RunFrames, facts: RunFacts
) -> tuple[str, pd.DataFrame | NotMeasurable]:
    """The method, and the rows for which it is known how many tokens of their prompts were
    `computed`."""
    known = rows[rows["prompt_tokens"].notna()].astype({"prompt_tokens": float})
    if (why := facts.lacks("steps", "lifecycle", "token lists")) is None:
        return "exact", _computed_by_log(known, frames)
    said = known[known["cached_tokens"].notna()]
    if said.empty:
        more = "the server does not say how much of a prompt was cached"
        return "client", NotMeasurable(f"{why}; {more}")
    return "client", said.assign(computed=said["prompt_tokens"] - said["cached_tokens"])


def _computed_by_log(rows: pd.DataFrame, frames: RunFrames) -> pd.DataFrame:
    """The tokens that were computed until the first token came."""
    ids = frames.lifecycle.drop_duplicates("client_request_id").set_index("client_request_id")
    known = rows.assign(server_id=rows["request_id"].map(ids["request_id"]))
    known = known.dropna(subset="server_id").reset_index(drop=True)
    steps = computed_tokens(frames.steps, pd.Index(known["server_id"], dtype=object))
    before = steps.groupby("request")["sampled"].cumsum() - steps["sampled"]
    computed = steps[before == 0].groupby("request")["scheduled"].sum()
    return known.loc[computed.index].assign(computed=computed)


def _repeats(requests: pd.DataFrame) -> pd.DataFrame:
    return without_tokens(requests)[requests["repeats"].notna()]


def _attempts(users: pd.DataFrame) -> Figure:
    completed = int((users["outcome"] == Outcome.COMPLETED).sum())
    if not completed:
        return NotMeasurable("no answer was completed")
    return reading("attempts_per_answer", len(users) / completed, method="client", n=completed)
