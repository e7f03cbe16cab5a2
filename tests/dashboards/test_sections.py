"""The sections of a report: none may make a run look better, or clearer, than it was."""

import json
from pathlib import Path

import pandas as pd

from dashboards.sections import cancel, load
from dashboards.sections.stages import stage_table, stages_in_steps
from harness.export.library import load_run
from harness.records import Way
from harness.run.pipeline import write_summary
from harness.store.run_folder import RunFolder
from tests.dashboards.reading import page_by
from tests.made_up.changed import change, change_metric, without_an_end
from tests.made_up.played import save_played
from tests.made_up.run import RunBuilder


def test_a_stage_in_steps_is_the_boundaries_that_passed_in_it(tmp_path: Path) -> None:
    """A ghost is censored in the stage that it never left."""
    run = load_run(save_played(tmp_path / "run", ghosts=12))
    steps = stages_in_steps(run.cancellations, run.frames.steps)
    # Seen and heard within the step in which the user leaves; out of the batch at its end.
    medians = {name: metric.p50 for name, metric in steps.items()}
    assert medians == {"detect_s": 0, "signal_s": 0, "wait_s": 1, "free_s": 0}
    assert (steps["detect_s"].n, steps["detect_s"].n_censored) == (30, 9)  # three of the 12 stay
    assert (steps["wait_s"].n, steps["wait_s"].n_censored) == (21, 0)
    assert steps["detect_s"].p99 is None


def test_every_way_to_leave_has_a_label() -> None:
    assert set(cancel.WAYS) == {way.value for way in Way}


def test_without_a_step_log_there_are_times_only(tmp_path: Path) -> None:
    run = load_run(save_played(tmp_path / "run"))
    assert stages_in_steps(run.cancellations, pd.DataFrame()) == {}
    rows = stage_table(run.metrics, {}).rows
    assert rows[2][1:] == ("30", "11 ms", "12 ms", "\N{EN DASH}", "\N{EN DASH}")
    assert rows[4][2:] == ("13.1 ms", "13.1 ms", "1", "1")


def test_several_metrics_pages_are_one_server(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path)
    run.another_engine()
    run.metrics(running="exact", preemptions="exact")
    run.request("a", sent=0, tokens=[10], outcome="completed", end=40)
    for turn in (10, 20, 30):
        for number, (running, preemptions) in enumerate([(1.0, 5.0), (2.0, 7.0)]):
            labels = json.dumps({"metrics_url": f"http://127.0.0.1:{number}/metrics"})
            run.scrape(turn + number, "its_running", running, labels)
            run.scrape(turn + number, "its_preemptions", preemptions, labels)
    run.frames()
    write_summary(RunFolder(tmp_path))
    (picture,) = load.slots(load_run(tmp_path)).pictures
    assert picture.alt == (
        "Requests over the run, running: highest 3, mean 3, at the end 3. "
        "Marked: users who left, 0; preemptions, 0."
    )


def test_every_quantile_that_the_stages_leave_out_is_named(tmp_path: Path) -> None:
    run = save_played(tmp_path / "run", ghosts=30)
    metrics = json.loads((run / "summary.json").read_text())["metrics"]
    never = {"unit": "s", "n": 30, "n_censored": 30, "method": "exact"}
    metrics["signal_s"] = {**never, "lower_bounds": {"p50": 2.0, "p99": 2.0}}
    del metrics["wait_s"], metrics["free_s"]
    change(run, "summary.json", metrics=metrics)
    page = page_by("report", run)
    left_out = "wait, free, slot_refill"
    assert f"Not drawn: median of {left_out}; 99th percentile of {left_out}." in page.body
    assert page.figures()["run0-stages"]["layout"]["showlegend"]
    assert "Median: detect 1 ms, signal > 2 s" in page.alts()["run0-stages"]


def test_what_an_endless_request_wasted_is_a_lower_bound_everywhere(tmp_path: Path) -> None:
    run = save_played(tmp_path / "run", ghosts=1)
    without_an_end(run, "u-0")
    page = page_by("report", run)
    drawn = page.figures()
    assert [text[0] for text in drawn["run0-waste"]["data"][-1]["text"]] == ["≥", "1", "1"]
    assert [text[0] for text in drawn["run0-waste-phase"]["data"][-1]["text"]] == ["≥"]
    assert "some requests were still held when the watching ended" in page.body
    (row,) = (line for line in page.texts("tr") if line.startswith("in prefill") and " ms" in line)
    assert row.count("≥") == 2
    assert "≥" in page.alts()["run0-waste-phase"]


def test_a_request_that_was_not_watched_to_the_end_was_not_seen_stopped(tmp_path: Path) -> None:
    run = save_played(tmp_path / "run", status="interrupted")
    without_an_end(run, "u-38")  # the last user to leave
    window = json.loads((run / "manifest.json").read_text())["window"]
    change(run, "manifest.json", window=window | {"settled_ns": window["load_ended_ns"]})
    change_metric(run, "ghost_rate", n=29)
    body = page_by("report", run).body
    assert "29 of 30 abandoned requests were stopped, 1 undecided." in body
    assert "as it should be" not in body
