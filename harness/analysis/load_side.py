"""The load's own side: who took part, and whether anybody was too busy to be believed.

A load process is saturated if in any ten seconds of the load it used over 90 % of a core (it is one
thread, so a core is all that it can use), or noticed one in twenty of its ticks later than a whole
step of the server, and than 50 ms. Its stamps of that time tell of itself, not of the server: the
run is invalid, however idle it was before. A shorter load is judged as a whole. A little lag is no
reason: whatever lies below it is flagged, figure by figure.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pandas as pd

from harness.analysis.facts import Facts
from harness.analysis.figure import Figure
from harness.analysis.frames import RunFrames
from harness.analysis.lost import losses
from harness.analysis.stats import Ints
from harness.records import Remark
from harness.records import Metric

MOST_CPU: Final = 0.9
LATE_SHARE: Final = 0.95
LEAST_LATE_S: Final = 0.05
FEWEST_TICKS: Final = 50  # a second of them: with fewer nobody is judged
STRETCH_NS: Final = 10_000_000_000
_EVERY_NS: Final = 1_000_000_000  # from where one stretch begins to where the next does


class LoadSide(msgspec.Struct, frozen=True, kw_only=True):
    """One load process in the load window: each figure is that of its worst ten seconds.
    `cpu_share`: of one core."""

    host: str
    pid: int
    cpu_share: float
    lag_p95_s: float


def load_sides(frames: RunFrames, facts: Facts) -> list[LoadSide]:
    """Every process that watched itself in the load window for long enough to be judged."""
    is_inside = frames.client["t_ns"].between(facts.load_started_ns, facts.load_ended_ns)
    ticks = frames.client[is_inside]
    processes = [of_one for _, of_one in ticks.groupby(["host", "pid"])]
    return [_side(of_one) for of_one in processes if len(of_one) >= FEWEST_TICKS]


def remarks_on_the_load(
    sides: Sequence[LoadSide],
    manifest: Mapping[str, Any],
    facts: Facts,
    figures: Mapping[str, Figure],
) -> list[Remark]:
    """Whether the load generator did its part."""
    return [
        *(Remark(level="invalid", text=text) for text in saturations(sides, figures)),
        *(Remark(level="warning", text=text) for text in losses(manifest, facts)),
    ]


def saturations(sides: Sequence[LoadSide], figures: Mapping[str, Figure]) -> Iterator[str]:
    """A sentence for each process that was saturated, with what to do."""
    late_s = max(LEAST_LATE_S, _step_s(figures))
    for side in sides:
        if side.cpu_share > MOST_CPU:
            why = f"at its busiest it used {side.cpu_share:.0%} of a core"
            what = "share the load between more processes (--processes) or machines"
        elif side.lag_p95_s > late_s:
            why = (
                f"at its latest, 5 % of its ticks were noticed over {side.lag_p95_s * 1e3:.3g} ms "
                f"late, and the most is {late_s * 1e3:.3g} ms, though at its busiest it used "
                f"{side.cpu_share:.0%} of a core"
            )
            what = "others kept this machine busy: take them elsewhere, or the load"
        else:
            continue
        yield (
            f"the load process with pid {side.pid} could not keep up ({why}): the client's times "
            f"are its own, not the server's; {what}"
        )


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
    """The first and the last tick of each stretch: one begins each second, and all are that long
    or, where ticks were far apart, longer. Of less time than that there is one, the whole."""
    latest_ns = t_ns[-1] - STRETCH_NS
    first = np.searchsorted(t_ns, np.arange(t_ns[0], latest_ns + 1, _EVERY_NS))
    first = first[t_ns[first] <= latest_ns]
    if not len(first):
        return np.array([0]), np.array([len(t_ns) - 1])
    return first, np.searchsorted(t_ns, t_ns[first] + STRETCH_NS)


def _step_s(figures: Mapping[str, Figure]) -> float:
    """The median step, else the median gap between two tokens; 0 where neither is known."""
    for name in ("step_s", "itl_s"):
        figure = figures.get(name)
        if isinstance(figure, Metric) and figure.p50 is not None:
            return figure.p50
    return 0.0
