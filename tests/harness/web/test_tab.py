"""The rows of the tab: the progress of a run, warnings, figures."""

from typing import Any

import msgspec
import pytest

from harness.formatting import DASH
from harness.records import Metric
from harness.web.tab import NO_TEST, brief_text, figure_text, final_rows, progress_text, tab_rows
from tests.made_up.summaries import made_up_summary

OUTCOMES = dict.fromkeys(
    ["completed", "abandoned", "timed_out", "rejected", "failed", "cut_off"], 0
)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ({"state": "ready"}, NO_TEST),
        ({"state": "running", "phase": "load: 3 users"}, "load: 3 users"),
        ({"state": "running", "why": "the server is gone"}, "the server is gone"),
        ({"state": "failed", "why": "it ended"}, "it ended"),
        ({"state": "ready", "not_started": "no worker"}, "no test was started: no worker"),
        ({"state": "starting", "phase": "starting the engine"}, "starting the engine"),
        (
            {"state": "running", "phase": "load: 3 users", "refused": "Seed cannot change"},
            "not changed: Seed cannot change (load: 3 users)",
        ),
        (
            {"state": "done", "report": "r.html", "report_at": "http://me/report"},
            "judged: its report is at http://me/report",
        ),
        (
            {"state": "done", "report": None, "folder": "runs/7"},
            "judged; its report could not be drawn: see runs/7/report.log",
        ),
        (
            {"state": "done", "why": "the engine died", "folder": "runs/7"},
            "the engine died; the run so far is judged and saved in runs/7",
        ),
    ],
)
def test_the_progress_of_a_run_is_a_sentence(shown: dict[str, Any], text: str) -> None:
    assert progress_text(shown) == text
    assert tab_rows(shown, reported=0)[0]["about"] == text


def test_rows_of_other_machines_are_counted_at_the_end() -> None:
    shown = {"state": "running", "phase": "", "requests": 3}
    assert len(tab_rows(shown, reported=5)) == 1
    done = {"state": "done", "report": "r.html", "report_at": "http://me/report"}
    last = tab_rows(shown | done, reported=5)[-1]
    assert (last["figure"], last["value"]) == ("requests elsewhere", "2")


def test_final_rows_begin_with_the_warnings() -> None:
    metric = Metric(unit="s", n=2, method="exact", bound="point", p50=0.002, p99=0.003)
    summary = {
        "outcomes": OUTCOMES | {"abandoned": 2},
        "metrics": {"cancel_latency_s": msgspec.to_builtins(metric)},
        "not_measurable": {"wasted_tokens": "no log"},
        "validity": [
            {"level": "info", "text": "no GPU"},
            {"level": "warning", "text": "a process died"},
            {"level": "invalid", "text": "the client was too slow"},
        ],
    }
    rows = final_rows(made_up_summary(summary), "2 fail: results/c/index.html")
    assert [row["about"] for row in rows[:2]] == ["a process died", "the client was too slow"]
    figures = {row["figure"]: row for row in rows}
    assert figures["abandoned"]["value"] == "2"
    assert figures["cancel latency"]["value"] == figure_text(metric) == "p50 2 ms, p99 3 ms"
    assert figures["wasted tokens"]["value"] == DASH
    assert figures["wasted tokens"]["about"] == "not measurable here: no log"
    assert "ghosts" not in figures
    assert "this workload sends no probes" in figures["slot recovery"]["about"]
    assert figures["conformance"]["value"] == "2 fail"
    assert figures["conformance"]["about"] == "results/c/index.html"


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (
            Metric(unit="tokens", n=50, method="exact", mean=0.92, p50=1.0, p99=2.0),
            "0.92 each, 46 in all; p50 1, p99 2",
        ),
        (
            Metric(unit="tokens", n=4, method="exact", bound="lower", mean=2.5, p50=1.0, p99=2.0),
            "≥ 2.5 each, ≥ 10 in all; p50 ≥ 1, p99 ≥ 2",
        ),
        (Metric(unit="preemptions", n=1, method="exact", mean=0.0), "0"),
        (Metric(unit="ratio", n=9, method="exact", mean=0.0), "0 %"),
    ],
)
def test_a_figure_has_quantiles_or_a_mean_and_the_sum_of_tokens(metric: Metric, text: str) -> None:
    assert figure_text(metric) == text


def test_beside_a_link_to_the_report_no_address_stands() -> None:
    done = {"state": "done", "report": "r.html", "report_at": "http://me/report", "folder": "7"}
    assert brief_text(done) == "the run is judged"
    assert brief_text(done | {"why": "it died"}).startswith("it died; the run so far is judged")
    assert brief_text(done | {"not_started": "a typo"}) == "no test was started: a typo"
