"""Pictures of arms beside each other: values in, figure out."""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from dashboards.theme import BLUE, GREY, canvas, plain
from harness.analysis.compare import FEWEST_ROUNDS
from harness.analysis.stats import mean_ci95
from harness.formatting import quantity

SCALES = {"s": (1e3, "milliseconds"), "ratio": (1e2, "percent")}


def per_round(values: Mapping[str, Sequence[float | None]], *, unit: str) -> go.Figure:
    """One column an arm: a dot for each round, and the mean with its interval."""
    scale, shown_unit = SCALES.get(unit, (1.0, unit))
    figure = canvas(x_title="", y_title=shown_unit, height=280)
    values = {plain(arm): those for arm, those in values.items()}
    known = {arm: [one for one in those if one is not None] for arm, those in values.items()}
    known = {arm: those for arm, those in known.items() if those}
    figure.add_scatter(
        x=[arm for arm, those in known.items() for _ in those],
        y=[one * scale for those in known.values() for one in those],
        mode="markers",
        marker={"size": 8, "color": BLUE, "opacity": 0.6},
        customdata=[quantity(one, unit) for those in known.values() for one in those],
        hovertemplate="%{x}: %{customdata}<extra>a round</extra>",
        name="a round",
    )
    means = {arm: float(np.mean(those)) for arm, those in known.items()}
    halves = [_half_width(those) * scale for those in known.values()]
    figure.add_scatter(
        x=list(means),
        y=[mean * scale for mean in means.values()],
        error_y={"type": "data", "array": halves, "color": GREY, "thickness": 2, "width": 8},
        mode="markers",
        marker={"symbol": "line-ew-open", "size": 22, "color": GREY, "line": {"width": 3}},
        customdata=[quantity(mean, unit) for mean in means.values()],
        hovertemplate="%{x}: %{customdata}<extra>mean</extra>",
        name="mean and its 95 % interval",
    )
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=list(values))
    return figure


def _half_width(values: Sequence[float]) -> float:
    limits = mean_ci95(np.array(values)) if len(values) >= FEWEST_ROUNDS else None
    return 0.0 if limits is None else (limits[1] - limits[0]) / 2
