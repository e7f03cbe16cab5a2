"""Losses that last: leaked slots and blocks, growth with each abandon, and health.

A leak is what is missing from the idle gauges in the end. Slots and blocks of a ghost that still
runs are missing too, but not lost: the lifecycle log shows which request has a slot, and the step
log for how many tokens it got blocks.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from harness.analysis.cancel import NOBODY_LEFT
from harness.analysis.facts import Facts, is_among
from harness.analysis.figure import Figure, Figures, NotMeasurable, same_reason
from harness.analysis.open_requests import num_abandoned, open_requests
from harness.analysis.stats import Floats, Ints, theil_sen
from harness.analysis.step_log import computed_tokens, shared_blocks
from harness.analysis.timeline import timeline
from harness.metrics import METRICS
from harness.records import Metric
from harness.store.frames import RunFrames


def leaks_in_use(
    frames: RunFrames, facts: Facts, figures: Mapping[str, Figure]
) -> dict[str, float]:
    """How many of the leaked `slots` and `blocks` are held by requests of this run that still run.

    Only values that are known and above 0. The gauges are read a moment before the end of the logs,
    so no more than was leaked.
    """
    leaked = {name: figures.get(f"leaked_{name}") for name in ("slots", "blocks")}
    missing = {name: one.mean or 0.0 for name, one in leaked.items() if isinstance(one, Metric)}
    if not any(missing.values()):
        return {}
    running = _running(frames)
    held = {"slots": len(running), "blocks": _blocks_of(running, frames, facts)}
    in_use = {name: min(held[name], value) for name, value in missing.items()}
    return {name: value for name, value in in_use.items() if value > 0}


def leaks_lost(facts: Facts) -> list[str]:
    """Which of `slots` and `blocks` are lost when they are missing, rather than still in use.

    The exact log shows what is in use. Without it, the proof is that the server computes nothing
    any more or, for blocks, that nothing runs that could hold them.
    """
    if facts.has_lifecycle or facts.still_computing is False:
        return ["slots", "blocks"]
    return ["blocks"] if facts.idle_change("running") == 0 else []


def _running(frames: RunFrames) -> pd.DataFrame:
    """The lives of this run's requests that were still open at the end of the log."""
    lives = timeline(frames)
    is_ours = is_among(lives["client_request_id"], frames.requests["request_id"])
    return lives[is_ours & lives["out_ns"].isna()].reset_index(drop=True)


def _blocks_of(running: pd.DataFrame, frames: RunFrames, facts: Facts) -> int:
    """Enough blocks for the tokens computed for each since it got its slot, and for the cached
    prefix that it got with it; 0 if not known."""
    if running.empty or frames.steps.empty or facts.block_size is None:
        return 0
    computed = computed_tokens(frames.steps, pd.Index(running["server_request_id"]))
    since = running["in_ns"].to_numpy(dtype=np.int64)[computed["request"]]
    scheduled = computed[computed["ended_ns"] > since].groupby("request")["scheduled"]
    tokens, first = scheduled.sum(), scheduled.first()
    had = running["blocks"].to_numpy(dtype=np.int64)[tokens.index]
    shared = shared_blocks(had, first.to_numpy(dtype=np.int64), facts.block_size)
    return int(np.ceil(tokens / facts.block_size).sum() + shared.sum())


_OF_ITSELF: Final = {
    True: "calls itself healthy",
    False: "calls itself ill",
    None: "has no /health",
}


def is_wedged(probing: Mapping[str, Any]) -> bool | None:
    """Does the server call itself healthy and yet leave requests without an answer? None without
    probing, or for a silent server that says nothing of its health."""
    if not probing:
        return None
    if not probing["errors"] or not _is_silent(probing):
        return False
    return None if probing["healthy"] is None else bool(probing["healthy"])


def health_warnings(probing: Mapping[str, Any]) -> Iterator[str]:
    if not probing or not probing["errors"]:
        return
    error, state = probing["errors"][0], _OF_ITSELF[probing["healthy"]]
    if not _is_silent(probing):
        yield (f"after the settle time the server answers short requests with: {error}; it {state}")
        return
    what = "wedged: " if is_wedged(probing) else ""
    yield (
        f"{what}after the settle time {len(probing['errors'])} of {probing['sent']} short requests "
        f"were not answered ({error}), and the server {state}"
    )


def _is_silent(probing: Mapping[str, Any]) -> bool:
    return bool(probing.get("is_silent", True))


# With n readings Sen's widest interval, from the least slope to the largest, holds the true one in
# 1 - 2 / n! of all cases: 92 % of four, 98 % of five. Idle gauges have one before the load, too.
FEWEST_LOOPS: Final = 4
FEWEST_CALM: Final = 5
_GAUGES: Final = {
    "slots": ("running", 1),
    "blocks": ("free_blocks", -1),
    "kv_share": ("kv_usage", 1),
}
_NOT_THE_SERVER: Final = ("machine", "load")  # and "load 0", "load 1", ...
_GROWTH: Final = {"memory_per_abandon": "rss_bytes", "handles_per_abandon": "handles"}


def leak_slopes(frames: RunFrames, facts: Facts) -> Figures:
    """How much more is missing from the idle gauges with each abandon, over the loops: the slope of
    Theil and Sen (JASA 63 (1968), 1379-1389), which one odd reading does not move."""
    return {f"leaked_{noun}_per_abandon": _leak_slope(frames, facts, noun) for noun in _GAUGES}


def _leak_slope(frames: RunFrames, facts: Facts, noun: str) -> Figure:
    role, sign = _GAUGES[noun]
    readings = [(t_ns, values[role]) for t_ns, values in facts.idle_loops if role in values]
    if role not in facts.idle_before:
        return NotMeasurable(f"{facts.engine} does not show its {role.replace('_', ' ')}")
    if len(readings) < FEWEST_LOOPS:
        return NotMeasurable(
            f"not enough data for a slope: {len(readings)} idle readings, and {FEWEST_LOOPS} are "
            "needed (`run.loops`)"
        )
    if not num_abandoned(frames.requests):
        return NotMeasurable(NOBODY_LEFT)
    times = np.array([t_ns for t_ns, _ in readings])
    left = np.append(0, open_requests(frames.requests).left_by(times)).astype(float)
    lost = [sign * (value - facts.idle_before[role]) for _, value in readings]
    unit = METRICS[f"leaked_{noun}_per_abandon"].unit
    return _slope(np.append(0.0, lost), left, unit, n=len(readings))


def growth_figures(frames: RunFrames, facts: Facts) -> Figures:
    """memory_per_abandon and handles_per_abandon: the same slope, of the readings after each loop,
    for all processes of the server together.

    A server also grows by what it keeps on purpose (caches, logs of a bounded size) until these are
    full: the first loops of a short run show that.
    """
    server = frames.cpu[~frames.cpu["process"].str.startswith(_NOT_THE_SERVER)]
    times = np.array([t_ns for t_ns, _ in facts.idle_loops], dtype=np.int64)
    if len(times) < FEWEST_CALM:
        reason = (
            f"not enough data for a slope: {len(times)} calm readings, and {FEWEST_CALM} are "
            "needed (`run.loops`)"
        )
        return same_reason(tuple(_GROWTH), reason)
    if not num_abandoned(frames.requests):
        return same_reason(tuple(_GROWTH), NOBODY_LEFT)
    left = open_requests(frames.requests).left_by(times).astype(float)
    return {
        name: _growth(server, column, METRICS[name].unit, times, left)
        for name, column in _GROWTH.items()
    }


def _growth(server: pd.DataFrame, column: str, unit: str, times: Ints, left: Floats) -> Figure:
    known = server.dropna(subset=column) if column in server else server.iloc[:0]
    if known.empty:
        return NotMeasurable("the server's processes are not on this machine, or not ours to see")
    of_processes = [_latest(rows, column, times) for _, rows in known.groupby("process")]
    return _slope(np.sum(of_processes, axis=0), left, unit, n=len(times))


def _slope(values: Floats, left: Floats, unit: str, *, n: int) -> Figure:
    """The slope of `values` over the requests `left` by then."""
    if len(np.unique(left)) < len(left):
        return NotMeasurable("one of the loops has no abandoned request")
    slope, interval = theil_sen(values, left)
    return Metric(unit=unit, n=n, mean=slope, mean_ci95=interval, method="gauge")


def _latest(rows: pd.DataFrame, column: str, times: Ints) -> Floats:
    """At each time, the latest value read by then."""
    ordered = rows.sort_values("t_ns", kind="stable")
    latest = np.searchsorted(ordered["t_ns"].to_numpy(dtype=np.int64), times, side="right") - 1
    values = ordered[column].to_numpy(dtype=float)
    return np.asarray(values[np.maximum(latest, 0)], dtype=np.float64)
