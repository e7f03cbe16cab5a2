"""Figures say what the frames say; checked on the data that plotly is given."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from dashboards import figures, ladders, timelines
from dashboards.downsample import min_max
from dashboards.stages import cancel_stages
from dashboards.timelines import Clock, Marks
from dashboards.waste_section import phase_bars, point_bars, waste_bars
from harness.records import Metric

CLOCK = Clock(started_ns=1_000, ended_ns=10_000_001_000, settled_ns=12_000_001_000)


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


def test_without_ghosts_the_curve_is_the_plain_distribution() -> None:
    (curve,) = figures.cancel_latency(cancels([0.03, 0.01, 0.02, 0.04], [False] * 4)).data
    assert curve.x == pytest.approx([0, 10, 20, 30, 40])
    assert curve.y == pytest.approx([0, 0.25, 0.5, 0.75, 1])


def test_a_ghost_stays_in_the_count_and_is_drawn_where_watching_ended() -> None:
    frame = cancels([0.01, 2.0, 0.02, 0.03], [False, True, False, False])
    curve, ghosts = figures.cancel_latency(frame).data
    assert max(curve.y) == pytest.approx(0.75)
    assert list(ghosts.x) == [2000]
    assert list(ghosts.y) == pytest.approx([0.75])
    assert ghosts.name.endswith(": 1")


def test_a_ghost_watched_for_a_short_time_weighs_as_kaplan_and_meier_say() -> None:
    frame = cancels([0.01, 0.02, 0.03], [False, True, False])
    curve, ghosts = figures.cancel_latency(frame).data
    assert curve.y == pytest.approx([0, 1 / 3, 1 / 3, 1])
    assert list(ghosts.y) == pytest.approx([1 / 3])


def test_steps_are_counted_without_ghosts() -> None:
    frame = cancels([0.01, 2.0, 0.02], [False, True, False])
    (bars,) = figures.cancel_steps(frame).data
    assert (list(bars.x), list(bars.y)) == ([1], [2])


def stage(p50: float | None, p99: float | None, bound: float | None = None) -> Metric:
    """A time; a quantile that is not known exceeds the bound."""
    unknown = [name for name, value in (("p50", p50), ("p99", p99)) if value is None]
    bounds = {} if bound is None else dict.fromkeys(unknown, bound)
    return Metric(unit="s", n=5, p50=p50, p99=p99, lower_bounds=bounds, method="exact")


def test_stages_are_stacked_in_milliseconds() -> None:
    figure = cancel_stages({"detect_s": stage(0.002, 0.004), "wait_s": stage(0.001, 0.003)})
    detect, wait = figure.data
    assert (list(detect.x), list(detect.y)) == ([2, 4], ["median", "99th percentile"])
    assert list(wait.x) == [1, 3]
    assert "/" not in wait.marker.pattern.shape
    assert not figure.layout.annotations


def test_a_stage_that_never_ended_is_open_and_ends_its_row() -> None:
    figure = cancel_stages(
        {
            "detect_s": stage(0.002, 0.004),
            "signal_s": stage(0.001, None, bound=1.99),
            "wait_s": stage(0.01, 0.02),  # of those that were lucky enough to be heard of
        }
    )
    _, signal, wait = figure.data
    assert list(signal.x) == pytest.approx([1, 6.5])  # half of the row that is known to its end
    assert [shape == "/" for shape in signal.marker.pattern.shape] == [False, True]
    assert list(wait.y) == ["median"]
    (label,) = figure.layout.annotations
    assert (label.y, label.x) == ("99th percentile", pytest.approx(10.5))
    assert label.text.startswith("signal &gt; 1.99 s, cut off")


def test_an_open_stage_that_leaves_room_for_the_others_is_drawn_to_scale() -> None:
    figure = cancel_stages({"detect_s": stage(0.02, 0.04), "wait_s": stage(0.02, None, bound=0.1)})
    _, wait = figure.data
    assert list(wait.x) == [20, 100]
    assert "cut off" not in figure.layout.annotations[0].text


def test_a_server_that_never_notices_gets_no_pretty_bar_and_a_legend() -> None:
    never = stage(None, None, bound=2.0)
    figure = cancel_stages({"detect_s": never})
    (bar,) = figure.data
    assert (list(bar.x), list(bar.marker.pattern.shape)) == ([2000, 2000], ["/", "/"])
    assert figure.layout.showlegend
    assert len(figure.layout.annotations) == 2


def test_waste_keeps_its_points_in_order() -> None:
    points: list[dict[str, Any]] = [
        {"planned_abandon": 0, "n": 3, "in_flight_mean": 0.5, "after_close_mean": 1.0},
        {"planned_abandon": 16, "n": 3, "in_flight_mean": 0.0, "after_close_mean": 2.0},
    ]
    in_flight, after = waste_bars(point_bars(points), x_title="").data
    assert list(after.x) == ["0", "16"]
    assert list(after.y) == [1.0, 2.0]
    assert list(in_flight.y) == [0.5, 0.0]
    assert list(after.text) == ["1.5", "2"]
    _, after = waste_bars(point_bars(points, unfinished={16}), x_title="").data
    assert list(after.text) == ["1.5", "≥ 2"]


def test_many_abandon_points_are_put_together_into_bars_of_as_many_requests() -> None:
    points: list[dict[str, Any]] = [
        {"planned_abandon": k, "n": 1, "in_flight_mean": 0.0, "after_close_mean": float(k)}
        for k in range(1, 41)
    ]
    bars = point_bars(points, most=4)
    assert [bar.label for bar in bars] == ["1 to 10", "11 to 20", "21 to 30", "31 to 40"]
    assert [bar.n for bar in bars] == [10] * 4
    assert bars[0].after_close == pytest.approx(5.5)


def test_waste_has_a_bar_for_each_phase_that_anybody_left_in() -> None:
    frame = pd.DataFrame(
        {
            "phase": ["decode", "decode", "waiting", "ended", "decode"],
            "wasted_in_flight_tokens": [1.0, 0.0, 0.0, 9.0, np.nan],
            "wasted_after_close_tokens": [1.0, 2.0, 0.0, 9.0, np.nan],
            "arrived_ns": pd.array([1, 1, 1, 1, 1], dtype="Int64"),
            "freed_ns": pd.array([2, None, 2, 2, 2], dtype="Int64"),
        }
    )
    waiting, decode = phase_bars(frame)
    assert (waiting.text, decode.text) == ("0", "≥ 2")  # one was still held in the end
    assert (waiting.label, waiting.n) == ("in the queue (1)", 1)
    assert (decode.n, decode.in_flight, decode.after_close) == (2, 0.5, 1.5)


def test_each_arm_is_a_row_and_a_probe_that_gave_up_is_a_cross() -> None:
    waited = pd.DataFrame(
        {
            "arm": ["unloaded", "abandon", "abandon", "control", "control"],
            "recovery_s": [0.005, 0.02, 0.03, 0.05, 9.0],
            "censored": [False, False, False, False, True],
        }
    )
    *boxes, gave_up = figures.slot_recovery(waited).data
    assert {box.name: list(box.x) for box in boxes} == {
        "unloaded": [5],
        "abandon": [20, 30],
        "control": [50],
    }
    assert (list(gave_up.x), list(gave_up.y)) == ([9000], ["control"])


def test_a_log_axis_has_whole_decades_with_their_units() -> None:
    times = {
        "itl_s": stage(0.0203, 0.0228),
        "e2e_s": stage(0.4, 1.7),
    }
    axis = ladders.client_times(times).layout.xaxis
    assert list(axis.ticktext) == ["10 ms", "100 ms", "1 s", "10 s"]
    assert list(axis.tickvals) == [10, 100, 1000, 10000]
    assert axis.range[0] < 1 < 4 < axis.range[1]
    narrow = ladders.client_times({"itl_s": stage(0.01, 0.01)}).layout.xaxis
    assert list(narrow.ticktext) == ["10 ms", "100 ms"]
    wide = ladders.client_times({"itl_s": stage(1e-5, 90)}).layout.xaxis
    assert len(wide.ticktext) <= ladders.MOST_TICKS


def test_a_latency_with_late_ghosts_is_on_such_an_axis_too() -> None:
    axis = figures.cancel_latency(cancels([0.005, 0.01, 2.0], [False, False, True])).layout.xaxis
    assert list(axis.ticktext) == ["1 ms", "10 ms", "100 ms", "1 s", "10 s"]


def test_a_wait_that_brought_no_token_is_an_arrow_and_not_left_out() -> None:
    *_, arrow = ladders.client_times({"ttft_s": stage(None, None, bound=7.7)}).data
    assert (list(arrow.x), list(arrow.y)) == ([7700], ["first token (TTFT)"])
    assert arrow.name == "longer than"


def test_phases_with_enough_requests_have_their_own_curve() -> None:
    frame = cancels([0.01] * 6 + [0.03] * 5 + [0.05], [False] * 12)
    frame["phase"] = ["waiting"] * 6 + ["decode"] * 5 + ["prefill"]
    names = [curve.name for curve in figures.cancel_latency(frame).data]
    assert names == ["all", "left while waiting", "left in decode"]


def test_many_abandons_share_marks_but_none_is_lost_to_the_eye() -> None:
    stamps = np.linspace(0, 10, 5_000)
    marks = timelines.thin_marks(stamps, length_s=10)
    assert timelines.MARKS <= len(marks) <= timelines.MARKS + 1
    assert np.diff(marks).max() <= 2 * 10 / timelines.MARKS
    assert timelines.thin_marks(stamps[:5], length_s=10).tolist() == stamps[:5].tolist()


@pytest.mark.parametrize(("number", "note"), [(40, None), (5_000, "share one")])
def test_a_caption_says_where_marks_are_shared(number: int, note: str | None) -> None:
    series = min_max(np.array([0.0, 1.0]), np.array([1.0, 2.0]))
    marks = timelines.Marks(abandons=np.linspace(0, 10, number), preemptions=np.empty(0))
    clock = timelines.Clock(started_ns=0, ended_ns=10**10, settled_ns=10**10)
    said = timelines.batch_slots(series, None, marks, clock).note
    assert said is None if note is None else note in str(said)


def test_the_time_axis_spans_the_run_and_the_settling() -> None:
    series = min_max(np.array([0.0, 1.0]), np.array([1.0, 2.0]))
    marks = Marks(abandons=np.array([0.5]), preemptions=np.array([0.7]))
    slots = timelines.batch_slots(series, None, marks, CLOCK)
    assert [one.name for one in slots.figure.data[1:]] == ["a user left", "preempted"]
    lag = timelines.lines({"<b>load</b>": series}, CLOCK, y_title="ms")
    for timeline in (slots, lag):
        assert list(timeline.figure.layout.xaxis.range) == [0, 12]
        assert timeline.figure.layout.shapes[0].x0 == 10
    assert lag.figure.data[0].name == "&lt;b&gt;load&lt;/b&gt;"
