"""The load's own side: which processes took part, and whether one was too busy to be believed.

A load process is saturated if in any ten seconds of the load it used over 90 % of a core (it is one
thread), or noticed one in twenty of its ticks later than a whole step of the server, and than
50 ms. Its stamps of that time show its own delay, so the run is invalid.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from harness.analysis.figure import Figure
from harness.analysis.open_requests import most_open
from harness.analysis.run_facts import RunFacts
from harness.analysis.tokens import read_by
from harness.formatting import quantity
from harness.records import LoadSide, Metric, Role, Steady
from harness.stats import Floats, Ints
from harness.store.frames import RunFrames


def losses(manifest: Mapping[str, Any], facts: RunFacts) -> Iterator[str]:
    for one in _died(manifest):
        died_s = (one["last_seen_ns"] - facts.load_started_ns) / 1e9
        yield (
            f"{_named(one)} died {died_s:.1f} s into the load: the {one['requests']} requests that "
            f"it had written are kept, the {one['open_streams']} that it had in flight are in no "
            "figure"
        )
    if absent := manifest.get("absent_workers"):
        yield (
            f"workers that had connected to the master and left nothing in the folders that were "
            f"collected: {', '.join(absent)}; what their users saw is in no figure: collect again "
            "with their folders, too (one that never began says so in its log)"
        )


def why_missed(manifest: Mapping[str, Any]) -> str | None:
    if died := _died(manifest):
        names = ", ".join(_named(one) for one in died)
        return f"{names} died, and its part of the schedule was not sent: its log may say why"
    if absent := manifest.get("absent_workers"):
        return f"or their rows are in a folder that was not collected ({', '.join(absent)})"
    return None


def _died(manifest: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [one for one in manifest.get("load_processes") or [] if one["ended_ns"] is None]


def _named(process: Mapping[str, Any]) -> str:
    return f"load process {process['worker']} (pid {process['pid']} on {process['host']})"


MOST_CPU: Final = 0.9
LATE_SHARE: Final = 0.95
LEAST_LATE_S: Final = 0.05
FEWEST_TICKS: Final = 50  # a second of them: with fewer, a process is not judged
STRETCH_NS: Final = 10_000_000_000
_EVERY_NS: Final = 1_000_000_000  # from where one stretch begins to where the next does


def load_sides(frames: RunFrames, facts: RunFacts) -> list[LoadSide]:
    is_inside = frames.client["t_ns"].between(facts.load_started_ns, facts.load_ended_ns)
    ticks = frames.client[is_inside]
    processes = [of_one for _, of_one in ticks.groupby(["host", "pid"])]
    return [_side(of_one) for of_one in processes if len(of_one) >= FEWEST_TICKS]


def saturations(sides: Sequence[LoadSide], figures: Mapping[str, Figure]) -> Iterator[str]:
    # The median step, else the median gap between two tokens.
    steps = (_median(figures.get(name)) for name in ("step_s", "itl_s"))
    late_s = max(LEAST_LATE_S, next((step for step in steps if step is not None), 0.0))
    for side in sides:
        why = f"at its busiest it used {quantity(side.cpu_share, 'ratio')} of a core"
        what = "share the load between more processes (--processes) or machines"
        if side.cpu_share <= MOST_CPU:
            if side.lag_p95_s <= late_s:
                continue
            why = (
                "at its latest, 5 % of its ticks were noticed over "
                f"{quantity(side.lag_p95_s, 's')} late, and the most is {quantity(late_s, 's')}, "
                f"though {why}"
            )
            what = "others kept this machine busy: take them elsewhere, or the load"
        yield (
            f"the load process with pid {side.pid} could not keep up ({why}): the client's times "
            f"are its own, not the server's; {what}"
        )


def _median(figure: Figure | None) -> float | None:
    return figure.p50 if isinstance(figure, Metric) else None


def _side(ticks: pd.DataFrame) -> LoadSide:
    t_ns = ticks["t_ns"].to_numpy(dtype=np.int64)
    cpu_s, lag_ns = (ticks[name].to_numpy(dtype=float) for name in ("cpu_s", "lag_ns"))
    first, last = _stretches(t_ns)
    late_ns = [np.quantile(lag_ns[a : b + 1], LATE_SHARE) for a, b in zip(first, last, strict=True)]
    took_s = np.maximum(t_ns[last] - t_ns[first], 1) / 1e9
    return LoadSide(
        host=str(ticks["host"].iloc[0]),
        pid=int(ticks["pid"].iloc[0]),
        cpu_share=float(np.max((cpu_s[last] - cpu_s[first]) / took_s)),
        lag_p95_s=float(np.max(late_ns)) / 1e9,
    )


def _stretches(t_ns: Ints) -> tuple[Ints, Ints]:
    latest_ns = t_ns[-1] - STRETCH_NS
    first = np.searchsorted(t_ns, np.arange(t_ns[0], latest_ns + 1, _EVERY_NS))
    first = first[t_ns[first] <= latest_ns]
    if not len(first):
        return np.array([0]), np.array([len(t_ns) - 1])
    return first, np.searchsorted(t_ns, t_ns[first] + STRETCH_NS)


# Late is a p99 of the delay above this share of the median TTFT; but no timer is finer than this.
_LATE_SHARE: Final = 0.1
_TIMER_S: Final = 0.01
# If a larger share of a schedule was due and not sent, not even a p95 can be known.
_MOST_MISSED: Final = 0.05


def sent_of_schedule(frames: RunFrames) -> dict[str, int] | None:
    arrivals = frames.manifest.get("arrivals")
    if arrivals is None:
        return None
    sent = int((frames.requests["role"] == Role.USER).sum())
    return {"planned": int(arrivals["planned"]), "sent": sent}


def why_schedule_means_nothing(frames: RunFrames, facts: RunFacts) -> Iterator[str]:
    counted = sent_of_schedule(frames)
    missed = len(facts.missed_to_stay_s) + len(facts.missed_to_leave_s)
    if counted is None or missed <= _MOST_MISSED * (counted["sent"] + missed):
        return
    yield (
        f"{missed:,} of {counted['sent'] + missed:,} requests that were due were not sent when the "
        f"load ended, more than {_MOST_MISSED:.0%}: this load is not the schedule's; "
        f"{why_missed(frames.manifest) or _why_late(frames)}"
    )


def arrival_warnings(frames: RunFrames, figures: Mapping[str, Figure]) -> Iterator[str]:
    counted = sent_of_schedule(frames)
    if counted is None:
        return
    if counted["sent"] < counted["planned"]:
        yield (
            f"{counted['planned'] - counted['sent']:,} of {counted['planned']:,} requests of the "
            "schedule were not sent: the load ended before their turn came, or a load process "
            "died; requests that were due are in `start_delay_s` and in the figures from the "
            "intended start, as waits that had not ended (censored), and in no other figure"
        )
    delay = figures.get("start_delay_s")
    if not isinstance(delay, Metric):
        return
    lost = why_missed(frames.manifest) if delay.n_censored else None
    late_s = delay.lower_bounds["p99"] if delay.p99 is None else delay.p99
    if late_s > max(_TIMER_S, _LATE_SHARE * (_median(figures.get("ttft_s")) or 0.0)):
        more = "more than " if delay.p99 is None else ""
        yield (
            f"requests were sent late: start_delay_s has a p99 of {more}{quantity(late_s, 's')}; "
            f"{lost or _why_late(frames)}; believe the figures from the intended start"
        )


def _why_late(frames: RunFrames) -> str:
    max_streams = int(frames.manifest["arrivals"]["max_streams"])
    if most_open(frames.requests["sent_ns"], frames.requests["ended_ns"]) >= max_streams:
        return (
            f"as many streams were open as there may be (`arrivals.max_streams`, {max_streams:,}): "
            "the server could not keep up with the schedule; raise the cap or lower the rate"
        )
    if frames.manifest.get("simulated") is not None:
        return "the simulation ended before their turn came"
    return (
        "the load generator could not keep up with the schedule: give it more processes "
        "(`--processes`) or lower the rate"
    )


PARTS: Final = 200
BATCH: Final = 5
FEWEST_TOKENS: Final = 400  # two a part, on average
RULE: Final = "MSER-5 on the tokens read in 200 parts of the load window"


def steady_window(frames: RunFrames, facts: RunFacts) -> Steady:
    if facts.load_s <= 0 or frames.requests.empty:
        return Steady(rule=RULE, note="there was no load")
    if (why := facts.lacks("token lists")) is not None:
        return Steady(rule=RULE, note=f"not known: {why}")
    edges = np.linspace(facts.load_started_ns, facts.load_ended_ns, PARTS + 1).astype(np.int64)
    counts = np.diff(read_by(frames.requests, edges))
    total = float(counts.sum())
    if total < FEWEST_TOKENS:
        note = f"not enough data: {total:.0f} tokens were read, and {FEWEST_TOKENS} are needed"
        return Steady(rule=RULE, note=note)
    means = counts.reshape(-1, BATCH).mean(axis=1)
    cut, is_steady = truncation(means)
    part_s = facts.load_s / PARTS
    return Steady(
        rule=RULE,
        is_steady=is_steady,
        warmup_s=cut * BATCH * part_s,
        warmup_share=cut / len(means),
        steady_tps=float(means[cut:].mean() / part_s) if is_steady else None,
    )


def truncation(means: Floats) -> tuple[int, bool]:
    half = len(means) // 2
    errors = [float(means[d:].var()) / (len(means) - d) for d in range(half + 1)]
    cut = int(np.argmin(errors))
    return cut, cut < half
