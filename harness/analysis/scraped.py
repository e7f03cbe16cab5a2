"""Scraped values by role: a gauge or a counter over time, and how old its values can be.

A value on a metrics page is that of the last refresh, by the target's rule. So a change that a
scrape shows had happened before the scrape. A change that a scrape does not show may have happened
up to the rule's lag before it.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd

from harness.analysis.run_facts import RunFacts
from harness.analysis.tokens import token_gaps
from harness.records import SHARES, has_labels, page_of
from harness.stats import Floats, Ints
from harness.store.frames import RunFrames


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapedReadings:
    """Values at ascending times (ns). A change had happened up to `lag_ns` before it shows.

    A time is the middle of a reading; it was begun at `began_ns` and took `took_ns`.
    """

    t_ns: Ints
    began_ns: Ints
    took_ns: Ints
    level: Floats
    lag_ns: int

    @property
    def n(self) -> int:
        return len(self.t_ns)


def readings_of(frames: RunFrames, facts: RunFacts, role: str) -> ScrapedReadings | None:
    """All scrapes of a role, summed over its series (of a share: their mean), or of one page alone
    if each page repeats it; None if the target never showed it.

    Pages of several URLs that were read in one turn count as one reading, at their mean time. A
    series that is not there yet counts as 0; in a later turn without it, its last value stands.
    """
    name = facts.metric_names.get(role)
    samples = frames.server_metrics
    if name is None or samples.empty:
        return None
    turns = _turns(frames)
    wanted = facts.metric_labels.get(role, {})
    labels = samples["labels"]
    matching = {text: has_labels(text, wanted) for text in labels.unique()}
    is_role = (samples["name"] == name).to_numpy() & labels.map(matching).to_numpy(dtype=bool)
    is_role &= np.isfinite(samples["value"].to_numpy())
    if not is_role.any():
        return None
    if role in facts.repeated:
        page = labels.map({text: page_of(text) for text in labels.unique()})
        is_role &= (page == page[is_role].iloc[0]).to_numpy()
    shown = samples[is_role].assign(turn=turns[is_role]).groupby("turn")["value"]
    of_turns = shown.mean() if role in SHARES else shown.sum()
    values = of_turns.reindex(np.unique(turns)).ffill().fillna(0.0)
    began_ns = (samples["t_ns"] - samples["duration_ns"] // 2).groupby(turns).min()
    return ScrapedReadings(
        t_ns=scrape_times_ns(frames),
        began_ns=began_ns.to_numpy().astype(np.int64),
        took_ns=samples["duration_ns"].groupby(turns).max().to_numpy().astype(np.int64),
        level=values.to_numpy(dtype=float),
        lag_ns=lag_ns(frames, facts, role),
    )


def scrape_times_ns(frames: RunFrames) -> Ints:
    samples = frames.server_metrics
    if samples.empty:
        return np.empty(0, dtype=np.int64)
    return samples["t_ns"].groupby(_turns(frames)).mean().to_numpy().astype(np.int64)


def lag_ns(frames: RunFrames, facts: RunFacts, role: str) -> int:
    """How old a role's value can be by its target's refresh rule, plus half the time of a scrape:
    the page is made at some moment during it. Without a known step, a rule in steps adds nothing:
    see `why_no_lag`."""
    steps, seconds = facts.lags.get(role, (0.0, 0.0))
    step_s = met_step_s(frames) or 0.0
    durations = frames.server_metrics["duration_ns"]
    half_ns = 0 if durations.empty else int(durations.median()) // 2
    return half_ns + int((steps * step_s + seconds) * 1e9)


def why_no_lag(frames: RunFrames, facts: RunFacts, role: str) -> str | None:
    steps, _ = facts.lags.get(role, (0.0, 0.0))
    if not steps or met_step_s(frames) is not None:
        return None
    return (
        f"{facts.metric_names[role]} can be {steps:g} steps old, and how long a step takes was not "
        "seen: no client read two tokens one after the other"
    )


def met_step_s(frames: RunFrames) -> float | None:
    """The mean length of the step that a scrape meets: sum of squares / sum.

    A long step meets more scrapes, and more arrivals, than a short one, in proportion to its
    length. Without a step log, gaps between tokens that the clients saw stand for steps. Source:
    Cox, Renewal Theory, section 5.4 (length-biased sampling).
    """
    return _met_and_typical(frames)[0]


def typical_step_s(frames: RunFrames) -> float | None:
    return _met_and_typical(frames)[1]


@lru_cache(maxsize=1)  # asked again and again of one run
def _met_and_typical(frames: RunFrames) -> tuple[float | None, float | None]:
    steps = frames.steps
    if steps.empty:
        lengths = token_gaps(frames.requests)[0]
    else:
        lengths = (steps["ended_ns"] - steps["started_ns"]).to_numpy(dtype=float) / 1e9
    if not len(lengths):
        return None, None
    total = float(lengths.sum())
    met = float(lengths @ lengths) / total if total > 0 else None
    return met, float(np.median(lengths, overwrite_input=True))


@lru_cache(maxsize=1)  # each role asks for it
def _turns(frames: RunFrames) -> Ints:
    samples = frames.server_metrics
    labels = samples["labels"]
    url_of = {text: page_of(text) for text in labels.unique()}
    ranks: pd.Series = samples["t_ns"].groupby(labels.map(url_of)).rank(method="dense")
    return ranks.to_numpy().astype(np.int64)
