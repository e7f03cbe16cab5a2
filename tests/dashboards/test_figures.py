"""Figures say what the frames say: checked on the data that Plotly is given."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards.figures import bars, curves, ladders, timeline
from dashboards.figures.cancels import Cancels, each_cancel
from dashboards.figures.curves import rising_note, rising_steps
from dashboards.figures.dots import LONGEST_NAME, per_round
from dashboards.figures.timeline import min_max
from dashboards.figures.wire import SHOWN_LANES, SHOWN_MOMENTS, tries
from dashboards.sections.section import CLIENT_TIMES
from dashboards.sections.waste import point_bars
from harness.export.library import Clock
from harness.records import Metric
from harness.store.conform_result import WireEvent

CLOCK = Clock(started_ns=1_000, ended_ns=10_000_001_000, settled_ns=12_000_001_000)


def client_times(metrics: dict[str, Metric]) -> go.Figure:
    rows = [(label, metrics[name]) for name, label in CLIENT_TIMES if name in metrics]
    return ladders.ladders(rows)


def cancels(seconds: list[float], censored: list[bool]) -> pd.DataFrame:
    steps = pd.array([pd.NA if c else 1 for c in censored], dtype="Int64")
    return pd.DataFrame(
        {
            "cancel_latency_s": seconds,
            "censored": censored,
            "cancel_latency_steps": steps,
            "phase": "decode",
        }
    )


@pytest.mark.parametrize(
    ("seconds", "censored", "shares", "crosses"),
    [
        ([0.03, 0.01, 0.02, 0.04], [False] * 4, [0, 0.25, 0.5, 0.75, 1], []),
        ([0.01, 2.0, 0.02, 0.03], [False, True, False, False], [0, 0.25, 0.5, 0.75, 0.75], [0.75]),
        # watched for a short time: it weighs as Kaplan and Meier say
        ([0.01, 0.02, 0.03], [False, True, False], [0, 1 / 3, 1 / 3, 1], [1 / 3]),
        # let go of at the very time at which another's watch ended: that one was still at risk
        ([0.01, 0.02, 0.02], [False, False, True], [0, 1 / 3, 2 / 3, 2 / 3], [2 / 3]),
    ],
)
def test_a_ghost_stays_in_the_count_and_is_a_cross_where_watching_ended(
    seconds: list[float], censored: list[bool], shares: list[float], crosses: list[float]
) -> None:
    curve, *ghosts = curves.cancel_latency(cancels(seconds, censored)).data
    assert curve.x == pytest.approx([0, *(1e3 * one for one in sorted(seconds))])
    assert curve.y == pytest.approx(shares)
    assert [y for one in ghosts for y in one.y] == pytest.approx(crosses)
    ends = [1e3 * one for one, is_open in zip(seconds, censored, strict=True) if is_open]
    assert [x for one in ghosts for x in one.x] == pytest.approx(ends)


def test_each_cancel_stands_at_its_time_and_a_ghost_at_the_edge_is_no_time() -> None:
    frame = cancels([0.03, 2.0, 0.01, 0.7], [False, True, False, True])
    frame["ghost"] = pd.array([False, True, False, pd.NA], dtype="boolean")
    figure = each_cancel(Cancels.of_run(frame, step_s=0.02))
    let_go, ghosts, unknown, step = figure.data
    assert list(let_go.x) == [1, 3]
    assert list(let_go.y) == pytest.approx([30, 10])
    assert [list(one.x) for one in (ghosts, unknown)] == [[2], [4]]
    assert len({one.marker.symbol for one in (let_go, ghosts, unknown)}) == 3
    (edge,) = {*ghosts.y, *unknown.y}
    top = figure.layout.yaxis
    assert max(let_go.y) < edge < top.range[1]
    assert (top.ticktext[-1], top.tickvals[-1]) == ("not let go", edge)
    assert max(top.tickvals[:-1]) <= max(let_go.y)
    assert {*step.y, *(shape.y1 for shape in figure.layout.shapes)} == {20}
    assert [one.name for one in figure.data][1:] == [
        "never let go: 1",
        "watched too short a time: 1",
        "one engine step: 20 ms",
    ]


@pytest.mark.parametrize(
    ("seconds", "step_s", "kind", "ticks"),
    [
        ([0.01], None, "linear", ["0", "2", "4", "6", "8", "10"]),
        ([0.001] * 9 + [0.9], 0.002, "log", ["1 ms", "10 ms", "100 ms"]),
        ([], None, "linear", ["not let go"]),
        ([0.0], None, "linear", []),
    ],
)
def test_each_cancel_has_an_axis_that_shows_the_middle(
    seconds: list[float], step_s: float | None, kind: str, ticks: list[str]
) -> None:
    frame = cancels(seconds or [2.0], [not seconds] * max(1, len(seconds)))
    frame["ghost"] = frame["censored"]
    axis = each_cancel(Cancels.of_run(frame, step_s=step_s)).layout.yaxis
    assert (axis.type, list(axis.ticktext)) == (kind, ticks)


def test_of_a_hundred_thousand_cancels_the_slowest_and_usual_ones_are_drawn() -> None:
    seconds = np.random.default_rng(1).uniform(0.01, 0.02, size=100_000)
    seconds[77_777] = 0.05
    frame = cancels(list(seconds), [False] * len(seconds))
    frame["ghost"] = False
    of = Cancels.of_run(frame, step_s=None)
    (dots,) = each_cancel(of).data
    assert len(dots.x) <= 2 * timeline.INTERVALS
    assert dots.x[np.argmax(dots.y)] == 77_778
    assert sum(13 < y < 17 for y in dots.y) > 100  # no gap between the fastest and the slowest
    assert of.note is not None


@pytest.mark.parametrize(("arms", "shown"), [(3, True), (200, False)])
def test_long_names_of_arms_leave_room_for_the_dots(arms: int, shown: bool) -> None:
    values = {f"{n} {'long' * 50}": [1.0, 2.0, 3.0] for n in range(arms)}
    axis = per_round(values, title="TTFT p50", unit="s").layout.xaxis
    assert len(axis.categoryarray) == arms
    assert (axis.showticklabels is not False) == shown
    assert all(len(text) <= LONGEST_NAME for text in axis.ticktext or ())


def stage(p50: float | None, p99: float | None, bound: float | None = None) -> Metric:
    unknown = [name for name, value in (("p50", p50), ("p99", p99)) if value is None]
    bounds = {} if bound is None else dict.fromkeys(unknown, bound)
    return Metric(unit="s", n=5, p50=p50, p99=p99, lower_bounds=bounds, method="exact")


@pytest.mark.parametrize(
    ("metrics", "milliseconds", "shapes", "labels"),
    [
        (
            {"detect_s": stage(0.002, 0.004), "wait_s": stage(0.001, 0.003)},
            [[2, 4], [1, 3]],
            [["", ""], ["-", "-"]],
            [],
        ),
        (  # the row ends; cut off at half of the row that is known to its end
            {
                "detect_s": stage(0.002, 0.004),
                "signal_s": stage(0.001, None, bound=1.99),
                "wait_s": stage(0.01, 0.02),
            },
            [[2, 4], [1, 6.5], [10]],
            [["", ""], ["x", "/"], ["-"]],
            ["signal &gt; 1.99 s, cut off \N{RIGHTWARDS ARROW}"],
        ),
        (  # room is left for the others: to scale
            {"detect_s": stage(0.02, 0.04), "wait_s": stage(0.02, None, bound=0.1)},
            [[20, 40], [20, 100]],
            [["", ""], ["-", "/"]],
            ["wait &gt; 100 ms \N{RIGHTWARDS ARROW}"],
        ),
        (
            {"detect_s": stage(None, None, bound=2.0)},
            [[2000, 2000]],
            [["/", "/"]],
            ["detect &gt; 2 s \N{RIGHTWARDS ARROW}"] * 2,
        ),
    ],
)
def test_a_stage_that_never_ended_is_open_and_ends_its_row(
    metrics: dict[str, Metric],
    milliseconds: list[list[float]],
    shapes: list[list[str]],
    labels: list[str],
) -> None:
    figure = bars.cancel_stages(metrics)
    assert [list(one.x) for one in figure.data] == [pytest.approx(row) for row in milliseconds]
    assert [list(one.marker.pattern.shape) for one in figure.data] == shapes
    assert [one.text for one in figure.layout.annotations] == labels
    assert figure.layout.showlegend


def test_many_abandon_points_are_put_together_into_bars_of_as_many_requests() -> None:
    points: list[dict[str, Any]] = [
        {"planned_abandon": k, "n": 1, "in_flight_mean": 0.0, "after_close_mean": float(k)}
        for k in range(1, 41)
    ]
    found = point_bars(points, most=4)
    assert [bar.label for bar in found] == ["1 to 10", "11 to 20", "21 to 30", "31 to 40"]
    assert [bar.n for bar in found] == [10] * 4
    assert found[0].parts == pytest.approx((0.0, 5.5))


def test_a_probe_that_gave_up_is_a_cross_in_its_row() -> None:
    waited = pd.DataFrame(
        {"arm": ["abandon", "control"], "recovery_s": [0.02, 9.0], "censored": [False, True]}
    )
    figure = curves.slot_recovery(waited)
    *_, gave_up = figure.data
    rows = dict(zip(figure.layout.yaxis.ticktext, figure.layout.yaxis.tickvals, strict=True))
    assert (list(gave_up.x), list(gave_up.y)) == ([9000], [rows["control"]])


@pytest.mark.parametrize(
    ("low_s", "high_s", "ticks"),
    [
        (0.0203, 1.7, ["10 ms", "100 ms", "1 s", "10 s"]),
        (0.01, 0.01, ["10 ms", "100 ms"]),
        (1e-5, 90, ["10 µs", "1 ms", "100 ms", "10 s"]),
    ],
)
def test_a_log_axis_has_decades_with_their_units(
    low_s: float, high_s: float, ticks: list[str]
) -> None:
    axis = client_times({"itl_s": stage(low_s, high_s)}).layout.xaxis
    assert list(axis.ticktext) == ticks


def test_a_wait_that_brought_no_token_is_an_arrow_and_not_left_out() -> None:
    *_, arrow = client_times({"ttft_s": stage(None, None, bound=7.7)}).data
    assert (list(arrow.x), list(arrow.y)) == ([7700], ["first token (TTFT)"])
    assert arrow.name == "longer than"


def test_many_abandons_share_marks_but_none_is_lost_to_the_eye() -> None:
    stamps = np.linspace(0, 10, 5_000)
    marks = timeline.thin_marks(stamps, length_s=10)
    assert timeline.MARKS <= len(marks) <= timeline.MARKS + 1
    assert np.diff(marks).max() <= 2 * 10 / timeline.MARKS
    assert timeline.thin_marks(stamps[:5], length_s=10).tolist() == stamps[:5].tolist()


def test_the_levels_are_of_all_samples_and_the_mean_is_by_time() -> None:
    y = np.arange(100_000.0)
    levels = min_max(y, y, intervals=100).levels
    assert levels == (99_999.0, 49_999.0, 99_999.0)
    held = min_max(np.array([0.0, 1.0, 10.0]), np.array([8.0, 2.0, 0.0])).levels
    assert held == (8.0, 2.6, 0.0)
    assert min_max(np.array([1.0]), np.array([np.nan])).levels is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 20))
def test_extremes_are_kept_and_order_too(values: list[float], intervals: int) -> None:
    x, y = np.arange(float(len(values))), np.array(values)
    series = min_max(x, y, intervals=intervals)
    assert series.y.min() == y.min()
    assert series.y.max() == y.max()
    assert (np.diff(series.x) > 0).all()
    assert series.samples == len(values)
    assert set(zip(series.x, series.y, strict=True)) <= set(zip(x, y, strict=True))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=400))
def test_a_long_curve_is_drawn_nowhere_above_itself(rises: list[int]) -> None:
    y = np.cumsum(rises).astype(float)
    kept = rising_steps(y, steps=10)
    assert len(kept) <= 13
    assert (kept[0], kept[-1]) == (0, len(y) - 1)
    shown = y[kept[np.searchsorted(kept, np.arange(len(y)), side="right") - 1]]
    assert (shown <= y).all()
    assert (y - shown <= (y[-1] - y[0]) / 10).all()
    assert rising_note(5_000, steps=10) == (
        "5,000 requests, drawn in 10 steps: nowhere above the true curve."
    )


def wave(at_ms: float, slowest_ms: float | None, leavers: int = 20) -> list[WireEvent]:
    """`leavers` leave one after the other; 20 ms later four checks come, the last is slow."""
    name = f"{at_ms:g}"

    def event(ms: float, stream: str, what: Any, **more: Any) -> WireEvent:
        t_ns = round((at_ms + ms) * 1e6)
        return WireEvent(t_ns=t_ns, attempt=0, stream=f"{stream}.{name}", what=what, **more)

    log = []
    for number in range(leavers):
        log += [event(number / 10, f"leaver {number}", what) for what in ("connect", "act", "end")]
    for number, ms in enumerate((30, 31, 32, slowest_ms)):
        log.append(event(20, f"check {number}", "connect"))
        if ms is not None:
            log.append(event(ms, f"check {number}", "read", tokens=1))
    return log


def test_waves_are_drawn_where_a_check_waits_longest_and_told_to_their_end() -> None:
    first, second = tries([*wave(0, 40), *wave(100, None), *wave(200, 90)])[:2]
    assert first.title == "Try 2: 20 streams leave; 1 of 4 checks got no first token"
    last = "20 streams leave; the last of 4 checks got its first token 90 ms after t0"
    assert second.title == f"Try 3: {last}"
    (picture,) = first.drawings
    assert [lane.name for lane in picture.lanes[:2]] == ["leaver 0.100", "check 3.100"]
    assert (len(picture.lanes), picture.hidden) == (SHOWN_LANES, 24 - SHOWN_LANES)
    before, moments, after = tries(wave(0, 40, leavers=90))[0].moments
    assert (before, len(moments), after) == (3 * 90 + 8 - SHOWN_MOMENTS, SHOWN_MOMENTS, 0)
    assert moments[-1] == ("+40.0 ms", "check 3.0", "1 read, 0 B, 1 token")


def test_streams_that_leave_with_nothing_that_waits_are_no_probe_without_an_answer() -> None:
    (one,) = tries([event for event in wave(0, None) if event.stream.startswith("leaver")])
    assert (one.title, one.wait_s) == ("Try 1: 20 streams leave", None)
