"""Losses that last: leaked slots and blocks, growth with each abandon, and health.

A leak is what is missing from the idle gauges in the end. Slots and blocks of a ghost that still
runs are missing too, but not lost: the lifecycle log shows which request has a slot, and the step
log for how many tokens it got blocks.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from harness.analysis.counters import idle_figure, not_shown
from harness.analysis.figure import Figure, Figures, NotMeasurable, reading
from harness.analysis.open_requests import num_abandoned, open_in_run
from harness.analysis.run_facts import RunFacts, is_among
from harness.analysis.scraped import readings_of
from harness.analysis.timeline import computed_tokens, shared_blocks, timeline
from harness.metrics import NOBODY_LEFT
from harness.records import Metric
from harness.stats import Floats, theil_sen
from harness.store.frames import RunFrames

# The gauge that shows each resource, and the sign with which it moves when one is taken.
_GAUGES: Final = {
    "slots": ("running", 1),
    "blocks": ("free_blocks", -1),
    "kv_share": ("kv_usage", 1),
}


_MOST_SHARE: Final = 1.01  # with rounding


def leak_figures(frames: RunFrames, facts: RunFacts) -> Figures:
    figures: Figures = {
        f"leaked_{noun}": idle_figure(f"leaked_{noun}", facts, role, sign=sign)
        for noun, (role, sign) in _GAUGES.items()
    }
    if (no_share := _why_no_share(frames, facts)) is not None:
        figures["leaked_kv_share"] = NotMeasurable(no_share)
    for noun in ("blocks", "kv_share"):
        figures[f"leaked_{noun}"] = _with_those_in_use(figures[f"leaked_{noun}"], facts, noun)
    if isinstance(figures["leaked_blocks"], Metric):
        del figures["leaked_kv_share"]
        return figures
    share = figures["leaked_kv_share"]
    if isinstance(share, Metric) and share.mean is not None and facts.num_blocks is not None:
        blocks = round(share.mean * facts.num_blocks)
        figures["leaked_blocks"] = reading(
            "leaked_blocks", blocks, method=share.method, bound=share.bound
        )
    return figures


def _why_no_share(frames: RunFrames, facts: RunFacts) -> str | None:
    """A gauge that was above 1 at any time goes to 100, or to a number of tokens."""
    scraped = readings_of(frames, facts, "kv_usage")
    idle = [values["kv_usage"] for _, values in facts.idle_loops if "kv_usage" in values]
    idle += [facts.idle_before.get("kv_usage", 0.0), facts.idle_after.get("kv_usage", 0.0)]
    largest = max(idle) if scraped is None else max(*idle, float(scraped.level.max(initial=0.0)))
    if largest <= _MOST_SHARE:
        return None
    return (
        f"{facts.metric_names['kv_usage']} was {largest:g}, and a share is at most 1: name a gauge "
        "from 0 to 1 as `kv_usage` in the target's file"
    )


def _with_those_in_use(figure: Figure, facts: RunFacts, noun: str) -> Figure:
    """Blocks that a running request holds are missing like lost ones. Where only gauges are known
    and something may run, no more are lost than are missing."""
    if not isinstance(figure, Metric) or not figure.mean or not _may_be_in_use(facts):
        return figure
    role, _ = _GAUGES[noun]
    if facts.trust.get(role) == "lower":
        return NotMeasurable(
            f"requests may still run, and {facts.metric_names[role]} shows at least what they and "
            "a leak hold together"
        )
    figure.bound = "upper"
    return figure


def _may_be_in_use(facts: RunFacts) -> bool:
    if facts.has_lifecycle or facts.still_computing is False:
        return False
    return facts.still_there is None or bool(facts.idle_change("running"))


def leaks_in_use(
    frames: RunFrames, facts: RunFacts, figures: Mapping[str, Figure]
) -> dict[str, float]:
    leaked = {name: figures.get(f"leaked_{name}") for name in ("slots", "blocks")}
    missing = {name: one.mean or 0.0 for name, one in leaked.items() if isinstance(one, Metric)}
    if not any(missing.values()):
        return {}
    running = _running(frames)
    held = {"slots": len(running), "blocks": _blocks_of(running, frames, facts)}
    in_use = {name: min(held[name], value) for name, value in missing.items()}
    return {name: value for name, value in in_use.items() if value > 0}


def leaks_lost(facts: RunFacts) -> list[str]:
    """Which of `slots` and `blocks` are lost when they are missing, rather than still in use.

    The exact log shows what is in use. Without it, the proof is that the server computes nothing
    any more or, for blocks, that nothing runs that could hold them.
    """
    if facts.has_lifecycle or facts.still_computing is False:
        return ["slots", "blocks"]
    return ["blocks"] if facts.idle_change("running") == 0 else []


def _running(frames: RunFrames) -> pd.DataFrame:
    lives = timeline(frames)
    is_ours = is_among(lives["client_request_id"], frames.requests["request_id"])
    return lives[is_ours & lives["out_ns"].isna()].reset_index(drop=True)


def _blocks_of(running: pd.DataFrame, frames: RunFrames, facts: RunFacts) -> int:
    if running.empty or facts.block_size is None or facts.lacks("steps", "token lists"):
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
    if not probing:
        return None
    if not probing["errors"] or not probing["is_silent"]:
        return False
    return None if probing["healthy"] is None else bool(probing["healthy"])


def health_warnings(probing: Mapping[str, Any]) -> Iterator[str]:
    if not probing or not probing["errors"]:
        return
    error, state = probing["errors"][0], _OF_ITSELF[probing["healthy"]]
    if not probing["is_silent"]:
        yield (f"after the settle time the server answers short requests with: {error}; it {state}")
        return
    what = "wedged: " if is_wedged(probing) else ""
    yield (
        f"{what}after the settle time {len(probing['errors'])} of {probing['sent']} short requests "
        f"were not answered ({error}), and the server {state}"
    )


# With n readings Sen's widest interval, from the least slope to the largest, holds the true one in
# 1 - 2 / n! of all cases: 92 % of four, 98 % of five. Idle gauges have one before the load, too.
FEWEST_LOOPS: Final = 4
FEWEST_CALM: Final = 5
_NOT_THE_SERVER: Final = ("machine", "load")  # and "load 0", "load 1", ...
_ELSEWHERE: Final = "the server's processes are not on this machine, or not ours to see"


def growth_figures(frames: RunFrames, facts: RunFacts) -> Figures:
    """A server also grows by what it keeps on purpose (caches, logs of a bounded size) until these
    are full: the first loops of a short run show that."""
    leaked = {f"leaked_{noun}_per_abandon": gauge for noun, gauge in _GAUGES.items()}
    return {
        **{name: _leak_slope(name, frames, facts, *gauge) for name, gauge in leaked.items()},
        "memory_per_abandon": _growth("memory_per_abandon", frames, facts, "rss_bytes"),
        "handles_per_abandon": _growth("handles_per_abandon", frames, facts, "handles"),
    }


def _leak_slope(name: str, frames: RunFrames, facts: RunFacts, role: str, sign: int) -> Figure:
    if role not in facts.idle_before:
        return NotMeasurable(not_shown(facts, role))
    loops = [(t_ns, values[role]) for t_ns, values in facts.idle_loops if role in values]
    if (why := _why_no_slope(frames, len(loops), "idle", FEWEST_LOOPS)) is not None:
        return NotMeasurable(why)
    lost = [sign * (value - facts.idle_before[role]) for _, value in loops]
    slope = _slope(name, frames, [t_ns for t_ns, _ in loops], np.array([0.0, *lost]))
    is_of_slots = role == "running"
    if isinstance(slope, Metric) and slope.mean and not is_of_slots and _may_be_in_use(facts):
        slope.bound = "upper"
    return slope


def _growth(name: str, frames: RunFrames, facts: RunFacts, column: str) -> Figure:
    times = [t_ns for t_ns, _ in facts.idle_loops]
    if (why := _why_no_slope(frames, len(times), "calm", FEWEST_CALM)) is not None:
        return NotMeasurable(why)
    server = frames.cpu[~frames.cpu["process"].str.startswith(_NOT_THE_SERVER)]
    known = server.dropna(subset=column) if column in server else server.iloc[:0]
    if known.empty:
        return NotMeasurable(_ELSEWHERE)
    of_processes = [_latest(rows, column, times) for _, rows in known.groupby("process")]
    return _slope(name, frames, times, np.sum(of_processes, axis=0))


def _why_no_slope(frames: RunFrames, n: int, kind: str, fewest: int) -> str | None:
    if n < fewest:
        return (
            f"not enough data for a slope: {n} {kind} readings, and {fewest} are needed "
            "(`run.loops`)"
        )
    return None if num_abandoned(frames.requests) else NOBODY_LEFT


def _slope(name: str, frames: RunFrames, times: list[int], values: Floats) -> Figure:
    left = np.searchsorted(open_in_run(frames).left_ns, times, side="right").astype(float)
    left = np.append(np.zeros(len(values) - len(times)), left)
    if len(np.unique(left)) < len(left):
        return NotMeasurable("one of the loops has no abandoned request")
    slope, interval = theil_sen(values, left)
    return reading(name, slope, method="gauge", n=len(times), mean_ci95=interval)


def _latest(rows: pd.DataFrame, column: str, times: list[int]) -> Floats:
    ordered = rows.sort_values("t_ns", kind="stable")
    latest = np.searchsorted(ordered["t_ns"].to_numpy(dtype=np.int64), times, side="right") - 1
    values = ordered[column].to_numpy(dtype=float)
    return np.asarray(values[np.maximum(latest, 0)], dtype=np.float64)
