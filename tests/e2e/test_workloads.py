"""Five of the shipped workloads on the real engine, scaled down to a second or two a run."""

import json
from pathlib import Path

import pytest

from tests.e2e.running import ROOT, measure, measure_arms, set_flags

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TRACE = ROOT / "workloads" / "made_up_trace.jsonl"


def test_a_storm_passes_over_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run = measure("cancel_storm", tmp_path / "run", *set_flags("load.storms=4"))
    metrics = run.metrics
    left = [row for row in run.rows("requests") if row["outcome"] == "abandoned"]
    assert len(left) == 4 * 28
    assert metrics["storm_clear_s"]["n"] == metrics["storm_spread_s"]["n"] == 4
    assert metrics["storm_clear_s"]["n_censored"] == 0
    assert metrics["ghost_rate"]["mean"] == 0
    assert metrics["leaked_slots"]["mean"] == metrics["leaked_blocks"]["mean"] == 0


def test_what_is_asked_again_is_found_again_where_it_was_retained(tmp_path: Path) -> None:
    settings = set_flags(
        "run.max_seconds=30",
        "load.stop_after_abandons=16",
        "run.rounds=1",
    )
    run = measure_arms("regenerate", tmp_path / "run", *settings)
    summary = run.summary
    found = {name: arm["metrics"]["cached_again"]["mean"] for name, arm in summary["arms"].items()}
    assert found["retain"] > 0.9
    assert found["immediate"] < 0.1
    assert found["uncached"] == 0


def test_the_value_of_cancellation_is_told_in_both_tables(tmp_path: Path) -> None:
    settings = set_flags(
        "run.max_seconds=30",
        "load.stop_after_abandons=20",
        "run.rounds=1",
        "engine.sim_fixed_ms=5",
        "settle.seconds=3",
        "value.price_per_million_tokens=2.0",
    )
    run = measure_arms("value_of_cancellation", tmp_path / "run", *settings)
    value = run.summary["value"]
    rows = {row["name"]: (row["ignored"], row["honoured"]) for row in value["rows"]}
    ignored, honoured = rows["tokens wasted per cancel"]
    wasted = {name: arm["metrics"]["wasted_tokens"] for name, arm in run.summary["arms"].items()}
    assert (ignored, honoured) == (wasted["ignored"]["mean"], wasted["honoured"]["mean"])
    assert ignored > 150
    assert wasted["honoured"]["p50"] < 5
    assert (
        rows["blocks held by abandoned requests"][0]
        > 10 * rows["blocks held by abandoned requests"][1]
    )
    assert rows["... by abandoned requests"][0] > rows["... by abandoned requests"][1]
    estimate, measured = (
        rows["... as the source estimates it"],
        rows["engine seconds wasted an hour"],
    )
    assert estimate[0] > 4 * measured[0]  # a step is shared
    assert rows["money wasted per 1,000 cancels"][0] == pytest.approx(ignored * 1000 * 2e-6)
    assert [stage["name"] for stage in value["stages"]][-1] == "cancel_latency_s"
    page = (run.folder / "report.html").read_text()
    assert "Value of cancellation" in page
    assert "How long a cancel takes, stage by stage" in page


def test_a_trace_is_replayed_and_what_it_asked_for_was_sent(tmp_path: Path) -> None:
    run = measure("trace_replay", tmp_path / "run", *set_flags("arrivals.seconds=4"), "--no-scrape")
    rows = sorted(run.rows("requests"), key=lambda row: row["user"])
    recorded = [json.loads(line) for line in TRACE.read_text().splitlines()]
    part = [one for one in recorded if one["timestamp"] < 4000]
    arrivals = run.manifest["arrivals"]
    assert (arrivals["planned"], arrivals["max_streams"]) == (len(part), 1000)
    assert arrivals["unsent"] == {"to_stay_s": [], "to_leave_s": []}
    assert len(rows) == len(part) > 3
    for row, one in zip(rows, part, strict=True):
        at_ms = (row["intended_start_ns"] - rows[0]["intended_start_ns"]) / 1e6
        assert at_ms == pytest.approx(one["timestamp"] / 2, abs=0.001)
        if row["outcome"] == "completed":
            told = (row["prompt_tokens"], row["completion_tokens"])
            assert told == (one["input_length"], one["output_length"])
    assert run.metrics["ttft_from_intended_s"]["n"] == run.metrics["ttft_s"]["n"]


def test_a_schedule_that_is_too_fast_for_its_cap_says_so(tmp_path: Path) -> None:
    settings = ("arrivals.rate=100", "arrivals.seconds=1", "arrivals.max_streams=2")
    run = measure("open_loop", tmp_path / "run", *set_flags(*settings, "run.max_seconds=2"))
    planned, sent = run.manifest["arrivals"]["planned"], len(run.rows("requests"))
    assert sent < planned
    said = [one["text"] for one in run.summary["validity"] if one["level"] == "warning"]
    assert any(f"{planned - sent} of {planned} requests of the schedule" in text for text in said)
    assert any("`arrivals.max_streams`, 2" in text for text in said)
