"""Cancel latency of a server that tells nothing of single requests: from totals, under any load.

    in the system   ──────┐                 what the server's gauges show
                          │░░░░░┐           ░ held for nobody
    held by clients ──────┴─────┴───

By Little's law the area under the number of requests in a system is the sum of the times that they
spend in it, whoever is who, and exactly so for a span of time at whose ends it is empty. So the
area between what the server holds and what its clients hold is the time that it went on for those
who had left, and

    mean cancel latency = area / number of those who left.

The same with counters: the area between the number of clients that have left and the number of
requests that the server says it aborted is the sum of the delays, if in the end both are equal but
for a few who left before the server saw their request.

The area is a sum over scrapes of (difference at the scrape) * (time that the scrape stands for).
The difference is nothing nearly all the time, so scrapes far apart cost precision and no truth, as
long as they keep no time with the load. What does bias it is a page that is old. Little's law
holds for each kind of change: a request that comes shows late by some time, which takes that much
from the area, and one that goes shows late, which adds. With their mean delays

    area = sum of latencies + left * (delay of leaving) + ended * (delay of ending)
           - all * (delay of coming).

Where the target's file knows these delays in steps (`late_steps`), their part is taken out, and
`bias` is half a step for each change: how far the mean delay may be off. A request that comes waits
for the next step's beginning, just as a cancel does: in the area the two nearly cancel out, and a
latency of half a step would be 0. So that wait is told apart: see `boundaries`. Where nothing is
known but the longest lag of the refresh rule, `bias` is that lag for each change.

What becomes of such sums, of one run or of several, is in `totals`.

Sources: Little, Operations Research 9 (1961), 383-387; for finite spans Little, Operations Research
59 (2011), 536-549.
"""

from dataclasses import replace
from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.facts import Facts
from harness.analysis.figure import NotMeasurable
from harness.analysis.open_requests import Held, held_open
from harness.analysis.scraped import Readings, met_step_s, readings_of
from harness.analysis.stats import Bools, Floats, Ints
from harness.analysis.tokens import first_times, read_by, token_gaps, tokens_per_event
from harness.analysis.totals import Balance
from harness.store.frames import RunFrames

_TOGETHER: Final = 0.5  # of the median gap: tokens no further apart than this are of one step
_ENDS: Final = ("first_token_ns", "last_token_ns")
_GRAINS: Final = 16  # of that time: of the tokens in one of these only the first is looked at


def step_boundaries(requests: pd.DataFrame) -> Ints:
    """The first token of each step that brought any (ns), ascending."""
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


def mean_wait_s(requests: pd.DataFrame, held: Held, step_s: float) -> float:
    """How long requests wait for a step to begin, on average over all that were sent.

    Only while somebody reads does the end of each step show. Who was sent while all others were
    still in their prefill waited no longer than until the next tokens, nor than a step.
    """
    boundaries, sent = step_boundaries(requests), held.started_ns
    following = np.searchsorted(boundaries, sent)
    is_busy = (held.at(sent - 1) > 0) & (following < len(boundaries))
    sent = sent[is_busy]
    waits_s = (boundaries[following[is_busy]] - sent) / 1e9
    waits_s = np.where(_is_read(requests, sent), waits_s, np.minimum(waits_s, step_s))
    return float(waits_s.sum()) / max(1, len(is_busy))


def _is_read(requests: pd.DataFrame, t_ns: Ints) -> Bools:
    """Whether there is an answer at each time of which a token had come, and more was to come."""
    first, last = (requests[name].dropna().astype("int64") for name in _ENDS)
    begun, over = (np.searchsorted(np.sort(times), t_ns, side="right") for times in (first, last))
    return begun > over


MOST_BLOCKS: Final = 20
FEWEST_IN_BLOCK: Final = 5  # clients that leave, on average
MOST_LOST: Final = 0.1  # of those who left, so many may have gone before the server saw them


def held_for_nobody(frames: RunFrames, facts: Facts) -> Balance | NotMeasurable:
    """Request-seconds in the server (running and waiting) beyond those that clients held."""
    held = held_open(frames.requests)
    if not held.n_left:
        return NotMeasurable("no request was left before its end")
    running, waiting = (readings_of(frames, facts, role) for role in ("running", "waiting"))
    if (problem := _unusable_gauges(running, waiting, held, facts)) is not None:
        return NotMeasurable(problem)
    assert running is not None
    level = running.level - facts.idle_before.get("running", 0.0)
    if waiting is not None:
        level = level + waiting.level - facts.idle_before.get("waiting", 0.0)
    found = _area(running, level - held.at(running.t_ns), held, facts)
    return _less(found, *_lateness(frames, facts, held, running))


def delay_of_aborts(frames: RunFrames, facts: Facts) -> Balance | NotMeasurable:
    """Seconds from each leaving until the counter of aborted requests moved, summed."""
    held = held_open(frames.requests)
    if not held.n_left:
        return NotMeasurable("no request was left before its end")
    aborted, change = readings_of(frames, facts, "aborted"), facts.idle_change("aborted")
    if aborted is None or change is None or facts.trust.get("aborted") == "stuck":
        return NotMeasurable(f"{facts.engine} shows no counter of aborted requests that moves")
    missing = held.n_left - change
    missing -= min(max(0.0, missing), _still_there(facts))  # these may be counted yet
    seen = aborted.level - facts.idle_before["aborted"]
    lost = _never_came(held, aborted, seen, int(missing))
    if missing < 0 or len(lost) != missing or missing > MOST_LOST * held.n_left:
        return NotMeasurable(
            f"{facts.metric_names['aborted']} moved by {change:g} for {held.n_left} who left: "
            "which of them it means is not known"
        )
    told = replace(held, left_ns=np.setdiff1d(held.left_ns, lost, assume_unique=True))
    found = _area(aborted, told.left_by(aborted.t_ns) - seen, told, facts)
    late = facts.late.get("aborted")
    if late is None:
        return replace(found, bias=(0.0, aborted.lag_ns / 1e9))
    step_s = met_step_s(frames) or 0.0
    added_s = late.left * step_s * _share_left_behind(told, step_s)
    return _less(found, added_s, (-step_s / 2, step_s / 2))


def unread_tokens(frames: RunFrames, facts: Facts) -> Balance | NotMeasurable:
    """Tokens that the server counted beyond those that clients read; of requests that were left,
    for however many answers each."""
    held = held_open(frames.requests.assign(n=1))
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
    cumulated = np.concatenate([[0.0], at_edges - read, [change - total_read]])
    return Balance(edges_ns=edges, sums=np.diff(cumulated), counts=_left_in(edges, held))


def _lateness(
    frames: RunFrames, facts: Facts, held: Held, running: Readings
) -> tuple[float, tuple[float, float]]:
    """What old pages add to the mean on average, and how far that may be off (s)."""
    changes = len(held.started_ns) / held.n_left
    late, step_s = facts.late.get("running"), met_step_s(frames) or 0.0
    if late is None:
        lag_s = running.lag_ns / 1e9 * changes
        return 0.0, (-lag_s, lag_s)
    left = late.left * _share_left_behind(held, step_s)
    steps = left + late.ended * (changes - 1) - late.coming * changes
    added_s = steps * step_s - mean_wait_s(frames.requests, held, step_s) * changes
    return added_s, (-step_s / 2 * changes, step_s / 2 * changes)


def _share_left_behind(held: Held, step_s: float) -> float:
    """Of those who left, the share after whom there was still somebody to compute a step for. An
    empty server has no step to wait for: its page is right at once."""
    return float((held.at(held.left_ns + int(step_s * 1e9)) > 0).mean())


def _less(found: Balance, added_s: float, bias: tuple[float, float]) -> Balance:
    """Without what old pages added to each of those who left."""
    return replace(found, sums=found.sums - added_s * found.counts, bias=bias)


def _unusable_gauges(
    running: Readings | None, waiting: Readings | None, held: Held, facts: Facts
) -> str | None:
    if running is None or facts.trust.get("running") == "stuck":
        return f"{facts.engine}'s running requests were not scraped during the load"
    inside = running.level[running.t_ns <= facts.load_ended_ns]
    if len(inside) < 2:
        return "fewer than two scrapes fell into the load"
    if not np.ptp(running.level):
        return f"{facts.metric_names['running']} did not move while requests came and went"
    most = float(held.at(held.started_ns).max())
    if waiting is None and not (facts.slots is not None and most <= facts.slots):
        return f"{facts.engine} does not show how many requests wait: they would count as let go"
    return None


def _never_came(held: Held, aborted: Readings, seen: Floats, missing: int) -> Ints:
    """Which leavings the counter will never count: so early that the server never saw the request,
    or with the last token made.

    After the j-th of them the counter stays at least j behind for ever. So it is the first of those
    that may be one after the last scrape at which the counter was less than j behind.
    """
    behind = held.left_by(aborted.t_ns) - seen
    lost: list[int] = []
    for level in range(1, missing + 1):
        near = np.flatnonzero(behind < level)
        since = aborted.t_ns[near[-1]] - aborted.lag_ns if len(near) else 0
        later = held.uncounted_ns[held.uncounted_ns > max(since, *lost, 0)]
        if not len(later):
            break
        lost.append(int(later[0]))
    return np.array(lost, dtype=np.int64)


def _area(readings: Readings, excess: Floats, held: Held, facts: Facts) -> Balance:
    """Sum of (excess * time that the reading stands for), by blocks."""
    start, end = facts.load_started_ns, max(facts.observed_until_ns, facts.load_ended_ns)
    inside = (readings.t_ns >= start) & (readings.t_ns <= end)
    t_ns, excess = readings.t_ns[inside], excess[inside]
    middles = (t_ns[1:] + t_ns[:-1]) // 2
    spans = np.diff(np.concatenate([[start], middles, [end]])) / 1e9
    edges = _edges(held, facts)
    block = (np.searchsorted(edges, t_ns, side="right") - 1).clip(min=0)
    return Balance(
        edges_ns=edges,
        sums=np.bincount(block, weights=excess * spans, minlength=len(edges)).astype(float),
        counts=_left_in(edges, held),
        met=float(np.abs(excess).sum()),
        span_s=float(spans.mean()),
        squares=float(((excess * spans) ** 2).sum()),
        goes_on=_still_there(facts) > 0,
    )


def _still_there(facts: Facts) -> float:
    """How many more requests there are after the settle time than before the load."""
    more = sum(facts.idle_change(role) or 0.0 for role in ("running", "waiting"))
    return max(0.0, more)


def _edges(held: Held, facts: Facts) -> Ints:
    """The beginnings of blocks of equal time over the load."""
    n = int(np.clip(held.n_left // FEWEST_IN_BLOCK, 1, MOST_BLOCKS))
    return np.linspace(facts.load_started_ns, facts.load_ended_ns, n + 1).astype(np.int64)[:-1]


def _left_in(edges: Ints, held: Held) -> Ints:
    block = (np.searchsorted(edges, held.left_ns, side="right") - 1).clip(min=0)
    return np.bincount(block, minlength=len(edges))
