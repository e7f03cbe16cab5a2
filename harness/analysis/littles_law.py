"""Cancel latency of a server that shows nothing of single requests: from totals, under any load.

    in the system   ──────┐                 what the server's gauges show
                          │░░░░░┐           ░ held after its client left
    held by clients ──────┴─────┴───

By Little's law the area under the number of requests in a system is the sum of the times that they
spend in it, over a span at whose ends the system is empty:

    mean cancel latency = area / number of requests left.

The area is a sum over scrapes of (difference at the scrape) * (time that the scrape stands for). An
old page biases it: with the mean delays of what it shows

    area = sum of latencies + left * (delay of leaving) + ended * (delay of ending)
           - all * (delay of coming).

If the target's file knows these delays in steps (`late_steps`), their part is taken out, and `bias`
is half a step for each change; else `bias` is the longest lag of the refresh rule.

The interval accounts for

    chance   blocks of time differ, see `stats.ratio_ci95`
    grain    few scrapes met anything: no narrower than if the number met is Poisson's, or by the
             sum of the squares of what each scrape adds
    bias     pages are old

Sources: Little, Operations Research 9 (1961), 383-387; for finite spans Little, Operations Research
59 (2011), 536-549; Garwood, Biometrika 28 (1936), 437-442 (Poisson); Horvitz and Thompson, JASA 47
(1952), 663-685; Cochran, Sampling Techniques, section 6.3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pandas as pd
from scipy import special

from harness.analysis.figure import Figure, NotMeasurable
from harness.analysis.open_requests import OpenRequests, most_open, open_in_run, open_requests
from harness.analysis.run_facts import RunFacts
from harness.analysis.scraped import ScrapedReadings, met_step_s, readings_of
from harness.analysis.tokens import first_times, read_by, token_gaps, tokens_per_event
from harness.intervals import Z95
from harness.records import Metric
from harness.stats import Floats, Ints, ratio_ci95
from harness.store.frames import RunFrames

Limits = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """A total over the run as sums over blocks of time, with how many requests were left in each.

    `edges_ns`: the beginnings of the blocks; the last one ends with the observation. `bias`: how
    far off old pages can put the mean (least, most). `met`: how many requests the scrapes met in
    all, each of which stands for `span_s` on average; `squares`: the sum of the squares of
    (requests met * time that the scrape stands for). `goes_on`: some requests are known
    never to end, so the sum is a lower bound.
    """

    edges_ns: Ints
    sums: Floats
    counts: Ints
    bias: Limits = (0.0, 0.0)
    met: float = 0.0
    span_s: float = 0.0
    squares: float = 0.0
    goes_on: bool = False

    @property
    def n(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        return float(self.sums.sum()) / self.n

    @property
    def grain(self) -> float:
        """Half the width of Garwood's interval for the number that the scrapes met, but at least
        that of their squares, for each request left."""
        most_met = float(special.gammaincinv(self.met + 1, 0.975))
        by_squares = Z95 * math.sqrt(self.squares)
        return max((most_met - self.met) * self.span_s, by_squares) / self.n

    def by_chance(self) -> Limits | None:
        limits = ratio_ci95(self.sums, self.counts)
        if limits is None:
            return None
        return min(limits[0], self.mean - self.grain), max(limits[1], self.mean + self.grain)


def pooled(balances: Sequence[Balance]) -> Balance:
    weights = np.array([one.n for one in balances], dtype=float)
    lowest, highest, span_s = (
        float(np.average(values, weights=weights))
        for values in zip(*[(*one.bias, one.span_s) for one in balances], strict=True)
    )
    return Balance(
        edges_ns=np.concatenate([one.edges_ns for one in balances]),
        sums=np.concatenate([one.sums for one in balances]),
        counts=np.concatenate([one.counts for one in balances]),
        bias=(lowest, highest),
        met=sum(one.met for one in balances),
        span_s=span_s,
        squares=sum(one.squares for one in balances),
        goes_on=any(one.goes_on for one in balances),
    )


def as_figure(found: Balance | NotMeasurable, method: str) -> Figure:
    """A cancel latency from a balance; a lower bound if some requests never end.

    If chance alone reaches down to 0 there is not enough data for a mean. The figure then has only
    `upper95`, which the mean does not exceed by chance or by old pages, and in `needs` the number
    of requests that would be enough. `others.estimate` is the result of the totals. If it lies
    further below 0 than old pages and chance explain, the pages hide more than is known, and there
    is no limit.
    """
    if isinstance(found, NotMeasurable):
        return found
    mean, (low, high) = found.mean, found.bias
    by_chance = found.by_chance()
    from_s, to_s = by_chance or (mean - found.grain, mean + found.grain)
    if not np.isfinite([mean, from_s, to_s, found.grain]).all():
        return NotMeasurable(
            f"the totals by {method} are no finite number: what was read is absurd"
        )
    parts = {
        "total": float(found.sums.sum()),
        "bias_low": low,
        "bias_high": high,
        "grain": found.grain,
        "estimate": mean,
    }
    figure = Metric(unit="s", n=found.n, method=method, others=parts)
    if from_s > 0 or (found.goes_on and mean > 0):
        figure.mean, figure.bound = mean, "lower" if found.goes_on else "point"
        figure.mean_ci95 = None if by_chance is None else (max(0.0, from_s - high), to_s - low)
        return figure
    if to_s - low <= 0 or found.goes_on or mean + found.grain < low:
        return NotMeasurable(
            f"not enough data: by {method} {figure.n} cancels would have taken {mean:.3g} s "
            "on average, which pages no older than the target's description says do not explain"
        )
    figure.bound, figure.upper95 = "upper", to_s - low
    if mean > 0:
        figure.needs["mean"] = math.ceil(figure.n * ((to_s - mean) / mean) ** 2)
    return figure


def sum_by_block(balance: Balance, t_ns: pd.Series, values: pd.Series) -> Floats:
    return _sums(balance.edges_ns, t_ns.to_numpy(dtype=np.int64), values.to_numpy(dtype=float))


_TOGETHER: Final = 0.5  # of the median gap: tokens closer than this come from one step
_GRAINS: Final = 16  # of that time: of the tokens in one of these only the first is looked at


def step_boundaries(requests: pd.DataFrame) -> Ints:
    gaps, _ = token_gaps(requests)
    if not len(gaps):
        return np.empty(0, dtype=np.int64)
    together_ns = int(_TOGETHER * float(np.median(gaps, overwrite_input=True)) * 1e9)
    times = first_times(requests, every_ns=max(1, together_ns // _GRAINS))
    boundaries = []
    following = 0
    while following < len(times):
        boundaries.append(times[following])
        following = int(times.searchsorted(times[following] + together_ns, side="right"))
    return np.array(boundaries, dtype=np.int64)


def mean_wait_s(requests: pd.DataFrame, held: OpenRequests, step_s: float) -> float:
    """How long requests wait for a step to begin, on average over all that were sent.

    The end of each step shows only while a client reads. A request sent while all others were in
    their prefill waited no longer than until the next tokens, nor than a step.
    """
    boundaries, sent = step_boundaries(requests), held.started_ns
    following = np.searchsorted(boundaries, sent)
    is_busy = (held.at(sent - 1) > 0) & (following < len(boundaries))
    sent = sent[is_busy]
    waits_s = (boundaries[following[is_busy]] - sent) / 1e9
    first, last = (
        np.sort(requests[name].dropna().astype("int64"))
        for name in ("first_token_ns", "last_token_ns")
    )
    begun, over = (np.searchsorted(times, sent, side="right") for times in (first, last))
    is_read = begun > over  # of some answer a token had come, and more were to come
    waits_s = np.where(is_read, waits_s, np.minimum(waits_s, step_s))
    return float(waits_s.sum()) / max(1, len(is_busy))


MOST_BLOCKS: Final = 20
FEWEST_IN_BLOCK: Final = 5  # clients that leave, on average


def held_after_leaving(frames: RunFrames, facts: RunFacts) -> Balance | NotMeasurable:
    held = open_in_run(frames)
    if not held.n_left:
        return NotMeasurable("no request was left before its end")
    running, waiting = (readings_of(frames, facts, role) for role in ("running", "waiting"))
    if running is None or facts.trust.get("running") == "stuck":
        return NotMeasurable(f"{facts.engine}'s running requests were not scraped during the load")
    if (problem := _unusable_gauges(running, waiting, held, facts)) is not None:
        return NotMeasurable(problem)
    level = running.level - facts.idle_before.get("running", 0.0)
    if waiting is not None:
        level = level + waiting.level - facts.idle_before.get("waiting", 0.0)
    found = _area(running, level - held.at(running.t_ns), held, facts)
    added_s, bias = _lateness(frames, facts, held, running)
    return replace(found, sums=found.sums - added_s * found.counts, bias=bias)


def unread_tokens(frames: RunFrames, facts: RunFacts) -> Balance | NotMeasurable:
    held = open_requests(frames.requests.assign(n=1))
    generated = readings_of(frames, facts, "generated_tokens")
    change = facts.idle_change("generated_tokens")
    if generated is None or change is None or not held.n_left:
        return NotMeasurable("the counter of generated tokens was not scraped during the load")
    if facts.trust.get("generated_tokens") == "exact_when_idle":
        return NotMeasurable(f"{facts.metric_names['generated_tokens']} is right only when idle")
    edges = _edges(held, facts)
    # The balance of a block is read off at the first scrape in it, where it begins.
    first = np.minimum(np.searchsorted(generated.t_ns, edges[1:]), generated.n - 1)
    at_edges = generated.level[first] - facts.idle_before["generated_tokens"]
    scale = tokens_per_event(frames.requests) or 1.0
    read = read_by(frames.requests, generated.t_ns[first]) * scale
    total_read = float(read_by(frames.requests, np.array([facts.observed_until_ns]))[0]) * scale
    counts = np.bincount(_blocks(edges, held.left_ns), minlength=len(edges))
    cumulated = np.concatenate([[0.0], at_edges - read, [change - total_read]])
    return Balance(edges_ns=edges, sums=np.diff(cumulated), counts=counts)


def _lateness(
    frames: RunFrames, facts: RunFacts, held: OpenRequests, running: ScrapedReadings
) -> tuple[float, Limits]:
    changes = len(held.started_ns) / held.n_left
    late, step_s = facts.late.get("running"), met_step_s(frames) or 0.0
    if late is None:
        lag_s = running.lag_ns / 1e9 * changes
        return 0.0, (-lag_s, lag_s)
    is_beside_others = held.at(held.left_ns + int(step_s * 1e9)) > 0
    left = late["left"] * float(is_beside_others.mean())
    steps = left + late["ended"] * (changes - 1) - late["coming"] * changes
    added_s = steps * step_s - mean_wait_s(frames.requests, held, step_s) * changes
    return added_s, (-step_s / 2 * changes, step_s / 2 * changes)


def _unusable_gauges(
    running: ScrapedReadings, waiting: ScrapedReadings | None, held: OpenRequests, facts: RunFacts
) -> str | None:
    inside = running.level[running.t_ns <= facts.load_ended_ns]
    if facts.is_disaggregated:
        return "a request between two workers is neither running nor waiting"
    if len(inside) < 2:
        return "fewer than two scrapes fell into the load"
    if not np.ptp(running.level):
        return f"{facts.metric_names['running']} did not move while requests came and went"
    most = most_open(held.started_ns, held.ended_ns)
    if waiting is None and not (facts.slots is not None and most <= facts.slots):
        return f"{facts.engine} does not show how many requests wait: they would count as let go"
    return None


def _area(
    readings: ScrapedReadings, excess: Floats, held: OpenRequests, facts: RunFacts
) -> Balance:
    start, end = facts.load_started_ns, max(facts.observed_until_ns, facts.load_ended_ns)
    inside = (readings.t_ns >= start) & (readings.t_ns <= end)
    t_ns, excess = readings.t_ns[inside], excess[inside]
    middles = (t_ns[1:] + t_ns[:-1]) // 2
    spans = np.diff(np.concatenate([[start], middles, [end]])) / 1e9
    edges = _edges(held, facts)
    return Balance(
        edges_ns=edges,
        sums=_sums(edges, t_ns, excess * spans),
        counts=np.bincount(_blocks(edges, held.left_ns), minlength=len(edges)),
        met=float(np.abs(excess).sum()),
        span_s=float(spans.mean()),
        squares=float(((excess * spans) ** 2).sum()),
        goes_on=(facts.still_there or 0.0) > 0,
    )


def _edges(held: OpenRequests, facts: RunFacts) -> Ints:
    n = int(np.clip(held.n_left // FEWEST_IN_BLOCK, 1, MOST_BLOCKS))
    return np.linspace(facts.load_started_ns, facts.load_ended_ns, n + 1).astype(np.int64)[:-1]


def _sums(edges: Ints, t_ns: Ints, values: Floats) -> Floats:
    block = _blocks(edges, t_ns)
    return np.bincount(block, weights=values, minlength=len(edges)).astype(float)


def _blocks(edges: Ints, t_ns: Ints) -> Ints:
    return (np.searchsorted(edges, t_ns, side="right") - 1).clip(min=0)
