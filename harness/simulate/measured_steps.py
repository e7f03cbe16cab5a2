"""The steps of a measured run, and the terms of a step's cost fitted to them.

Only steps after which requests were left count: the next one then began as soon as it could. The
terms are fitted, by non-negative least squares, to the time until a step's tokens were there. They
are then lowered alike until a twentieth of the steps were shorter. The error, of the time from one
beginning to the next, is that of fits to four fifths of the log on the fifth left out.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.simulate.machine import FitError
from harness.stats import Floats
from harness.store.frames import RunFrames

FOLDS: Final = 5
SHORTER: Final = 0.05  # the share of steps that may be shorter than their terms say
LEAST_FIXED_S: Final = 1e-6
TERMS: Final = ("fixed_s", "prefill_token_s", "decode_token_s", "context_token_s")


class MeasuredSteps(NamedTuple):
    """A row a step: the work (TERMS), the cost stated for it, and the time it took until its tokens
    were there, and until the next began."""

    work: Floats
    stated_s: Floats
    computed_s: Floats
    took_s: Floats
    running: Floats


class Fit(NamedTuple):
    terms: Floats
    beyond_s: Floats  # of each step, beyond its terms
    error: FitError


def step_work(frames: RunFrames) -> MeasuredSteps:
    parts = [_worker_steps(rows, frames) for _, rows in frames.steps.groupby("worker")]
    return pooled(parts) if parts else MeasuredSteps(np.empty((0, len(TERMS))), *[np.empty(0)] * 4)


def pooled(parts: Sequence[MeasuredSteps]) -> MeasuredSteps:
    return MeasuredSteps(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _worker_steps(steps: pd.DataFrame, frames: RunFrames) -> MeasuredSteps:
    """Steps after which requests were left: the next one then began as soon as it could."""
    steps = steps.sort_values("step", kind="stable").reset_index(drop=True)
    number = steps["step"].to_numpy(dtype=np.int64)
    started = steps["started_ns"].to_numpy(dtype=np.int64)
    computed = _computed(steps, frames)
    work = _by_step(computed, len(steps))
    is_followed = np.zeros(len(steps), dtype=bool)
    is_followed[:-1] = (number[1:] == number[:-1] + 1) & _has_more(computed, len(steps))[:-1]
    took_s = np.zeros(len(steps))
    took_s[:-1] = np.diff(started) / 1e9
    stated = _stated_cost(frames)
    stated_s = work @ stated
    computed_s = (steps["ended_ns"].to_numpy(dtype=np.int64) - started) / 1e9
    running = steps["num_running"].to_numpy(dtype=float)
    columns = (work, stated_s, computed_s, took_s, running)
    return MeasuredSteps(*(column[is_followed] for column in columns))


def _computed(steps: pd.DataFrame, frames: RunFrames) -> pd.DataFrame:
    """A row for each step and request: the tokens scheduled, whether one was sampled, and the
    tokens of context before them."""
    lengths = steps["request_ids"].map(len).to_numpy(dtype=np.int64)
    rows = pd.DataFrame(
        {
            "step": np.repeat(np.arange(len(steps)), lengths),
            "request": pd.factorize(np.concatenate(steps["request_ids"].to_list()))[0],
            "id": np.concatenate(steps["request_ids"].to_list()),
            "scheduled": np.concatenate(steps["scheduled_tokens"].to_list()).astype(np.int64),
            "sampled": np.concatenate(steps["sampled_tokens"].to_list()).astype(np.int64),
        }
    )
    by_request = rows.groupby("request")
    generated = by_request["sampled"].cumsum() - rows["sampled"]
    # A prompt computed in chunks ends with the chunk that samples; one that never got there counts
    # from its beginning.
    stretch = [rows["request"], generated]
    whole = rows.groupby(stretch)["sampled"].transform("max") > 0
    before = rows.groupby(stretch)["scheduled"].cumsum() - rows["scheduled"]
    in_all = rows.groupby(stretch)["scheduled"].transform("sum")
    prompt = rows["id"].map(prompt_tokens(frames))
    context = (prompt + generated - in_all + before).where(whole & prompt.notna(), before)
    return rows.drop(columns="id").assign(context=context.clip(lower=0))


def prompt_tokens(frames: RunFrames) -> pd.Series:
    """The tokens of each prompt, by the server's id."""
    known = frames.lifecycle.drop_duplicates("request_id").set_index("request_id")
    prompts = frames.requests.drop_duplicates("request_id").set_index("request_id")["prompt_tokens"]
    return known["client_request_id"].map(prompts.astype(float))


def _by_step(computed: pd.DataFrame, num_steps: int) -> Floats:
    """Sums as the runner counts: a request that is owed one token decodes, any other prefills."""
    decodes = (computed["scheduled"] == 1) & (computed["sampled"] == 1)

    def total(values: pd.Series) -> Floats:
        return np.bincount(computed["step"], values, num_steps).astype(float)

    columns = (
        np.ones(num_steps),
        total(computed["scheduled"].where(~decodes, 0)),
        total(decodes.astype(float)),
        total(computed["context"]),
    )
    return np.stack(columns, axis=1)


def _has_more(computed: pd.DataFrame, num_steps: int) -> npt.NDArray[np.bool_]:
    """Steps of which some request was computed again in the next one."""
    ordered = computed.sort_values(["request", "step"])
    again = ordered["request"].diff(-1).eq(0) & ordered["step"].diff(-1).eq(-1)
    return np.bincount(ordered.loc[again, "step"], minlength=num_steps) > 0


def _stated_cost(frames: RunFrames) -> Floats:
    config = frames.manifest["target"].get("config") or {}
    cost = config.get("step_cost") if config.get("runner") == "simulated" else None
    return np.array([(cost or {}).get(term, 0.0) for term in TERMS])


def fit_steps(steps: MeasuredSteps) -> Fit:
    terms = _terms(steps.work, steps.computed_s - steps.stated_s)
    return Fit(terms, _beyond(steps, terms), _cross_validated(steps))


def _beyond(steps: MeasuredSteps, terms: Floats) -> Floats:
    return np.maximum(0.0, steps.computed_s - steps.stated_s - steps.work @ terms)


def _terms(work: Floats, took_s: Floats) -> Floats:
    from scipy.optimize import nnls

    scale = np.maximum(work.max(axis=0), 1e-12)
    found, _ = nnls(work / scale, took_s)
    terms: Floats = found / scale
    expected = work @ terms
    lowered = np.quantile(took_s / np.maximum(expected, 1e-12), SHORTER)
    terms *= min(1.0, max(0.0, float(lowered)))
    terms[0] = max(terms[0], LEAST_FIXED_S)
    return terms


def _cross_validated(steps: MeasuredSteps) -> FitError:
    """Folds of steps that follow each other, so that none is judged by its neighbours."""
    fold = np.arange(len(steps.took_s)) * FOLDS // len(steps.took_s)
    expected = np.empty(len(steps.took_s))
    for number in range(FOLDS):
        own = fold == number
        rest = MeasuredSteps(*(column[~own] for column in steps))
        terms = _terms(rest.work, rest.computed_s - rest.stated_s)
        beyond_s = (_beyond(rest, terms) + rest.took_s - rest.computed_s).mean()
        expected[own] = steps.stated_s[own] + steps.work[own] @ terms + beyond_s
    off = expected / steps.took_s - 1
    return FitError(
        n=len(off),
        mape=float(np.abs(off).mean()),
        p99=float(np.quantile(np.abs(off), 0.99)),
        bias=float(off.mean()),
    )
