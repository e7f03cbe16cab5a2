"""Cancel latency of single requests from gauges and counters, where a change can only be theirs.

A client leaves at t0. Until the scrape that shows the change, and since so long before that the
page had caught up, no other request begins or ends: then the change is this request's. Between the
last scrape that still showed it and the first that did not it was let go of; and since a page may
be as old as its refresh rule allows, it may have been gone that much before the last one:

    last showing - lag - t0  <  latency  <=  first not showing - t0

So each is known between two limits. The figure is of the upper ones (`bound` upper), and beside it
stand the lower ones (`at_least`). Under load this finds hardly anybody; see `balance` for that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.facts import Facts
from harness.analysis.figure import NotMeasurable, Sample, describe
from harness.analysis.open_requests import Held, held_open
from harness.analysis.scraped import Readings, readings_of
from harness.analysis.stats import Floats, Ints
from harness.records import Metric
from harness.store.frames import RunFrames

_NOBODY_ALONE = (
    "no request was left at a moment at which no other began or ended until the next scrapes: the "
    "changes cannot be attributed"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """A request left at `t0_ns` with nothing else happening in (since, until); `held_after` is what
    clients hold then."""

    t0_ns: int
    since_ns: int
    until_ns: int
    held_after: int


Limits = tuple[float, float]  # seconds; the upper one infinite where the change never showed


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """Those who stood alone: when they left, and between which limits their latency lies."""

    t0_ns: Ints
    low_s: Floats
    high_s: Floats

    @property
    def n(self) -> int:
        return len(self.t0_ns)


def quiet_leavings(held: Held, observed_until_ns: int, t_ns: Ints) -> list[Quiet]:
    """Every leaving after which there was a reading (at `t_ns`) before anything else happened, with
    the nearest other thing that happened before and after."""
    moments = np.sort(np.concatenate([held.started_ns, held.ended_ns]))
    t0 = held.left_ns
    here = np.searchsorted(moments, t0)
    before = np.where(here > 0, moments[here - 1], t0)
    after = np.append(moments, observed_until_ns)[here + 1]
    is_alone = (here + 1 == len(moments)) | (after != t0)
    is_seen = np.searchsorted(t_ns, t0, "right") != np.searchsorted(t_ns, after, "right")
    of_quiet = np.flatnonzero(is_alone & is_seen)  # under load hardly any of them
    columns = (t0, before, after, held.at(t0).astype(np.int64))
    return [
        Quiet(t0_ns=left, since_ns=since, until_ns=until, held_after=still)
        for left, since, until, still in zip(*(c[of_quiet].tolist() for c in columns), strict=True)
    ]


def fall_of_gauge(quiet: Quiet, readings: Readings, level: Floats) -> Limits | None:
    """When the level fell to what clients hold; None where it cannot be attributed."""
    first, end = np.searchsorted(readings.t_ns, [quiet.t0_ns, quiet.until_ns], side="right")
    if first == end or first == 0:
        return None
    before = first - 1
    is_caught_up = readings.t_ns[before] - readings.lag_ns >= quiet.since_ns
    if not is_caught_up or level[before] != quiet.held_after + 1:
        return None
    fallen = np.flatnonzero(level[first:end] <= quiet.held_after)
    gone = int(first + fallen[0]) if len(fallen) else None
    return _limits(quiet, readings, last_showing=(end if gone is None else gone) - 1, gone=gone)


def rest_of_counter(quiet: Quiet, readings: Readings) -> Limits | None:
    """When a counter that only this request can move moved for the last time; None where others
    could, or where it was not seen resting for two scrapes."""
    first, end = np.searchsorted(readings.t_ns, [quiet.t0_ns, quiet.until_ns], side="right")
    if quiet.held_after or first == 0 or end - first < 2:
        return None
    rises = np.flatnonzero(np.diff(readings.level[first - 1 : end]) > 0)
    last_rise = int(first + rises[-1]) if len(rises) else int(first)
    if end - 1 - last_rise < 1:
        return _limits(quiet, readings, last_showing=end - 1, gone=None)
    return _limits(quiet, readings, last_showing=last_rise - 1, gone=last_rise)


def alone_by_gauge(frames: RunFrames, facts: Facts) -> Alone | NotMeasurable:
    """From the fall of running + waiting by one."""
    running, waiting = (readings_of(frames, facts, role) for role in ("running", "waiting"))
    if running is None or facts.trust.get("running") == "stuck":
        return NotMeasurable(f"{facts.engine}'s running requests were not scraped during the load")
    level = running.level - facts.idle_before.get("running", 0.0)
    if waiting is not None:
        level = level + waiting.level - facts.idle_before.get("waiting", 0.0)
    held = held_open(frames.requests)
    leavings = quiet_leavings(held, facts.observed_until_ns, running.t_ns)
    return _known(leavings, [fall_of_gauge(quiet, running, level) for quiet in leavings])


def role_that_rests(facts: Facts) -> str | None:
    """A counter that moves with every step, so that its rest means that nothing is computed; None
    where there is none. One that moves when a request ends rests as long as it goes on.
    """
    for role in ("decode_calls", "generated_tokens"):
        if facts.trust.get(role, "stuck") not in ("stuck", "exact_when_idle"):
            return role
    return None


def alone_by_rest(frames: RunFrames, facts: Facts) -> Alone | NotMeasurable:
    """From such a counter going flat, where nobody else is left."""
    role = role_that_rests(facts)
    if role is None:
        return NotMeasurable(f"{facts.engine} has no counter that moves with every step")
    counted = readings_of(frames, facts, role)
    if counted is None:
        return NotMeasurable(f"{facts.metric_names[role]} was not scraped during the load")
    held = held_open(frames.requests)
    leavings = quiet_leavings(held, facts.observed_until_ns, counted.t_ns)
    return _known(leavings, [rest_of_counter(quiet, counted) for quiet in leavings])


def described(found: Sequence[Alone], method: str) -> Metric:
    """The figure of those who stood alone, of one run or of several."""
    low = np.concatenate([one.low_s for one in found])
    high = np.concatenate([one.high_s for one in found])
    never = np.isinf(high)
    figure = describe(
        Sample(values=np.where(never, low, high), censored=never),
        unit="s",
        method=method,
        bound="upper",
    )
    figure.others["at_least"] = describe(
        Sample(values=low, censored=never), unit="s", method=method, bound="lower"
    )
    return figure


def _limits(quiet: Quiet, readings: Readings, *, last_showing: int, gone: int | None) -> Limits:
    shown_ns = int(readings.t_ns[last_showing]) - readings.lag_ns
    low = max(0, shown_ns - quiet.t0_ns) / 1e9
    return low, np.inf if gone is None else (int(readings.t_ns[gone]) - quiet.t0_ns) / 1e9


def _known(leavings: Sequence[Quiet], found: Sequence[Limits | None]) -> Alone | NotMeasurable:
    pairs = [(quiet.t0_ns, limits) for quiet, limits in zip(leavings, found, strict=True) if limits]
    if not pairs:
        return NotMeasurable(_NOBODY_ALONE)
    low, high = np.array([limits for _, limits in pairs], dtype=float).T
    return Alone(t0_ns=np.array([t0 for t0, _ in pairs], dtype=np.int64), low_s=low, high_s=high)
