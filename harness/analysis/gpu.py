"""The server's GPUs while it was under load: utilisation, memory, power, energy.

Energy over time is a curve: the devices' own counter between the moments at which it moved, else
their power, integrated by trapezoids. Between two points energy is taken to grow evenly, so a step
that is shorter than the interval of the readings gets the mean power around it.

Several devices are one: power, energy and memory are sums, utilisation is a mean. A reading counts
if every device has it.
"""

import statistics
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.figure import Figure, Figures, NotMeasurable, reading, same_reason
from harness.analysis.run_facts import RunFacts
from harness.metrics import ENERGY_PER_TOKEN
from harness.records import Metric
from harness.stats import Bools, Floats, Ints
from harness.store.frames import RunFrames

FEWEST_CHANGES: Final = 10  # of the readings during the load, or its ends are not found
_HIDDEN: Final = "the GPU does not show it"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnergyCurve:
    """Joules since some beginning. `method`: counter, or gauge for integrated power."""

    t_ns: Ints
    joules: Floats
    method: str

    def between(self, since_ns: Ints, until_ns: Ints) -> Floats:
        """NaN where the readings do not reach."""
        start, end = (
            np.interp(at_ns, self.t_ns, self.joules, left=np.nan, right=np.nan)
            for at_ns in (since_ns, until_ns)
        )
        return end - start


def energy_curves(frames: RunFrames, facts: RunFacts) -> list[EnergyCurve]:
    """The best first."""
    both = _counted(frames.gpu, facts), _integrated(frames.gpu)
    return [one for one in both if one is not None]


def _counted(gpu: pd.DataFrame, facts: RunFacts) -> EnergyCurve | None:
    total = _of_all(gpu, "energy_j")
    points = total[_has_moved(total)]
    if facts.is_in_load(_t_ns(points)).sum() < FEWEST_CHANGES or (np.diff(points) < 0).any():
        return None
    return _curve(_t_ns(points), points.to_numpy(), "counter")


def _integrated(gpu: pd.DataFrame) -> EnergyCurve | None:
    power = _of_all(gpu, "power_w")
    if len(power) < 2:
        return None
    t_ns, watts = _t_ns(power), power.to_numpy()
    joules = (watts[1:] + watts[:-1]) / 2 * (np.diff(t_ns) / 1e9)
    return _curve(t_ns, np.concatenate([[0.0], np.cumsum(joules)]), "gauge")


def _curve(t_ns: Ints, joules: Floats, method: str) -> EnergyCurve:
    """The curve is one interval longer at either end: the readings there may be that late."""
    more_ns = int(np.median(np.diff(t_ns)))
    more = np.diff(joules) / np.diff(t_ns) * more_ns
    return EnergyCurve(
        t_ns=np.r_[t_ns[0] - more_ns, t_ns, t_ns[-1] + more_ns],
        joules=np.r_[joules[0] - more[0], joules, joules[-1] + more[-1]],
        method=method,
    )


def change_times_ns(frames: RunFrames, facts: RunFacts) -> Ints:
    """The times of the readings during the load that were new: an exporter has its own clock."""
    for column in ("energy_j", "power_w"):
        values = _of_all(frames.gpu, column)
        if len(values):
            return _t_ns(values[_has_moved(values) & facts.is_in_load(_t_ns(values))])
    times = np.unique(frames.gpu["t_ns"].to_numpy(dtype=np.int64))
    return times[facts.is_in_load(times)]


def gpu_figures(frames: RunFrames, facts: RunFacts, throughput: Figure) -> Figures:
    if (why := facts.lacks("GPU", "load")) is not None:
        return same_reason([*_LEVELS, "gpu_energy_j", ENERGY_PER_TOKEN], why)
    energy = _energy(frames, facts)
    return {
        **{name: _level(name, frames.gpu, facts) for name in _LEVELS},
        "gpu_energy_j": energy,
        ENERGY_PER_TOKEN: _per_token(energy, throughput, facts),
    }


_LEVELS: Final = {
    "gpu_utilisation": "utilisation",
    "gpu_memory_bytes": "memory_bytes",
    "gpu_power_w": "power_w",
}


def _level(name: str, gpu: pd.DataFrame, facts: RunFacts) -> Figure:
    column = _LEVELS[name]
    values = _of_all(gpu, column)
    inside = values[facts.is_in_load(_t_ns(values))].to_numpy()
    if not len(inside):
        return NotMeasurable("no reading of the GPU fell into the load" if len(values) else _HIDDEN)
    if column == "utilisation":
        inside = inside / gpu["gpu"].nunique()
    mean = statistics.mean(inside.tolist())  # exact, or equal readings would seem to differ
    value = inside.max() if column == "memory_bytes" else mean
    return reading(name, value, method="gauge", n=len(inside), max=float(inside.max()))


def _energy(frames: RunFrames, facts: RunFacts) -> Figure:
    """A lower bound if the readings do not cover the whole load."""
    load = facts.load_started_ns, facts.load_ended_ns
    found: list[Metric] = []
    for curve in energy_curves(frames, facts):
        ends = np.clip(load, curve.t_ns[0], curve.t_ns[-1])
        found.append(
            reading(
                "gpu_energy_j",
                float(curve.between(ends[:1], ends[1:])[0]),
                method=curve.method,
                n=int(facts.is_in_load(curve.t_ns).sum()),
                bound="point" if tuple(ends) == load else "lower",
            )
        )
    if not found:
        return NotMeasurable("neither the energy nor the power of the GPU was read twice")
    best, *others = found
    best.others = {one.method: one for one in others}
    return best


def _per_token(energy: Figure, throughput: Figure, facts: RunFacts) -> Figure:
    if isinstance(energy, NotMeasurable) or isinstance(throughput, NotMeasurable):
        return energy if isinstance(energy, NotMeasurable) else throughput
    tokens = (throughput.mean or 0.0) * facts.load_s
    if energy.mean is None or energy.bound != "point" or not tokens:
        return NotMeasurable("the GPU's readings do not cover the load, or it has no token")
    # The tokens that clients read may be fewer than were generated.
    bound = "upper" if throughput.bound == "lower" else "point"
    return reading(
        ENERGY_PER_TOKEN, energy.mean / tokens, method=energy.method, n=round(tokens), bound=bound
    )


def _of_all(gpu: pd.DataFrame, column: str) -> pd.Series:
    """The sum over the devices, by time (ns) and ascending."""
    known = gpu.dropna(subset=column).groupby("t_ns")[column].agg(["sum", "count"])
    total: pd.Series = known.loc[known["count"] == gpu["gpu"].nunique(), "sum"].astype(float)
    return total


def _has_moved(values: pd.Series) -> Bools:
    """The first reading counts as new."""
    moved: Bools = np.diff(values.to_numpy(), prepend=np.nan) != 0
    return moved


def _t_ns(values: pd.Series) -> Ints:
    return values.index.to_numpy(dtype=np.int64)
