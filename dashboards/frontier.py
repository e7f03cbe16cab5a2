"""The chunk frontier: what a larger chunk buys the long prompt, and what it costs the others."""

from collections.abc import Mapping
from typing import Any, Final

import plotly.graph_objects as go

from dashboards.arm_figures import SCALES
from dashboards.section import Picture, Section
from dashboards.source import ArmsRun
from dashboards.theme import BLUE, GREY, VERMILION, canvas
from harness.formatting import figure_of
from harness.records import Metric

KIND: Final = "chunk_frontier"
QUANTILES: Final = (
    ("p50", "median", {"line": {"color": BLUE}, "marker": {"symbol": "circle", "size": 8}}),
    (
        "p99",
        "p99",
        {"line": {"color": VERMILION, "dash": "dash"}, "marker": {"symbol": "square", "size": 8}},
    ),
)
GAPS, FIRST, CANCEL = "itl_s", "ttft_s", "cancel_latency_prefill_s"


def is_asked(workload: Mapping[str, Any]) -> bool:
    """Is this a run of the workload that the pictures are about?"""
    return bool(workload["load"]["kind"] == KIND)


def chunk_sizes(run: ArmsRun) -> dict[str, int]:
    """Each arm's tokens a step, smallest first; arms that do not say theirs are left out."""
    sizes = {
        arm["name"]: arm["engine"]["max_num_batched_tokens"]
        for arm in run.manifest.workload["arms"]
        if "max_num_batched_tokens" in arm["engine"]
    }
    return dict(sorted(sizes.items(), key=lambda item: item[1]))


def sentence(run: ArmsRun) -> str | None:
    """The two ends of the frontier in words; None where an end is not known."""
    sizes = chunk_sizes(run)
    ends = [(size, run.summary.arms[name].metrics) for name, size in sizes.items()]
    ends = [(size, found) for size, found in ends if {GAPS, FIRST} <= found.keys()]
    if len(ends) < 2:
        return None
    (small, at_small), (large, at_large) = ends[0], ends[-1]
    cancel = ""
    if CANCEL in at_small and CANCEL in at_large:
        cancel = (
            " Who left during the prefill was let go of after "
            f"{figure_of(at_small[CANCEL], 'p50')} and {figure_of(at_large[CANCEL], 'p50')} "
            "(medians)."
        )
    return (
        f"From chunks of {small:,} tokens to {large:,}, the long prompt's first token comes after "
        f"{figure_of(at_large[FIRST], 'p50')} instead of {figure_of(at_small[FIRST], 'p50')} "
        f"(medians), and a bystander waits up to {figure_of(at_large[GAPS], 'p99')} instead of "
        f"{figure_of(at_small[GAPS], 'p99')} for the next token (99th percentiles).{cancel}"
    )


def sections(run: ArmsRun) -> list[Section]:
    """The frontier itself, and chunk size against cancel latency."""
    return [_frontier(run), _cancel(run)]


def _frontier(run: ArmsRun) -> Section:
    section = Section(
        name="frontier",
        title="What chunks cost whom",
        shows="Each point is a chunk size (tokens a step): to the right, bystanders wait longer "
        "between two tokens (99th percentile); further up, the long prompt waits longer for its "
        "first (median).",
        good="a point low and to the left; where the line bends is the size to choose.",
    )
    points = _points(run, (GAPS, "p99"), (FIRST, "p50"))
    if not points:
        return section.without("No arm has both figures.")
    figure = canvas(
        x_title="bystanders: between two tokens (p99), ms",
        y_title="long prompt: first token, ms",
    )
    _add_points(figure, points, text=[f"{size:,}" for size, _, _ in points])
    figure.update_xaxes(rangemode="tozero")
    return section.drawn(Picture(name="frontier", figure=figure, alt=sentence(run) or ""))


def _cancel(run: ArmsRun) -> Section:
    section = Section(
        name="frontier-cancel",
        title="How long a prefill goes on without its user",
        shows="Cancel latency of prompts abandoned during their prefill, by chunk size: median, "
        "and 99th percentile. Nobody is let go of before the step in progress ends, and a step is "
        "as long as its chunk.",
        good="about half a step in the median, one step at most.",
    )
    medians = _points(run, None, (CANCEL, "p50"))
    if not medians:
        return section.without("No arm tells the cancel latency in prefill.")
    figure = canvas(x_title="chunk size, tokens a step", y_title="cancel latency, ms")
    for key, name, look in QUANTILES:
        points = _points(run, None, (CANCEL, key))
        figure.add_scatter(
            x=[size for size, _, _ in points],
            y=[y for _, _, y in points],
            mode="lines+markers",
            **look,
            name=name,
            hovertemplate="chunks of %{x}: %{y:.3~g} ms<extra>" + name + "</extra>",
        )
    sizes = [size for size, _, _ in medians]
    figure.update_xaxes(type="log", tickvals=sizes, ticktext=[f"{size:,}" for size in sizes])
    words = ", ".join(f"{size:,}: {y:.3g} ms" for size, _, y in medians)
    alt = f"Median cancel latency in prefill by chunk size: {words}."
    return section.drawn(Picture(name="frontier-cancel", figure=figure, alt=alt))


def _points(
    run: ArmsRun, x: tuple[str, str] | None, y: tuple[str, str]
) -> list[tuple[int, float, float]]:
    """(chunk size, x, y) in milliseconds of every arm that has both; x is the size without `x`."""
    points = []
    for name, size in chunk_sizes(run).items():
        metrics = run.summary.arms[name].metrics
        across = float(size) if x is None else _milliseconds(metrics, *x)
        up = _milliseconds(metrics, *y)
        if across is not None and up is not None:
            points.append((size, across, up))
    return points


def _milliseconds(metrics: Mapping[str, Metric], name: str, key: str) -> float | None:
    value = getattr(metrics[name], key) if name in metrics else None
    return None if value is None else float(value) * SCALES["s"][0]


def _add_points(
    figure: go.Figure, points: list[tuple[int, float, float]], *, text: list[str]
) -> None:
    figure.add_scatter(
        x=[x for _, x, _ in points],
        y=[y for _, _, y in points],
        text=text,
        mode="lines+markers+text",
        textposition="top right",
        marker={"size": 11, "color": BLUE},
        line={"color": GREY, "width": 1.5},
        cliponaxis=False,
        hovertemplate="chunks of %{text}: %{x:.3~g} ms, %{y:.3~g} ms<extra></extra>",
        showlegend=False,
    )
