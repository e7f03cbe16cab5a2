"""What a report must not make look better, or clearer, than it was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dashboards.cancel_sections import recovery
from dashboards.source import Run, read_run
from dashboards.trust import Trust, trust
from dashboards.verdict import Mark
from tests.dashboards.reading import body_of, decoded, page_of

MakeRun = Callable[..., Path]


def test_the_slots_are_followed_until_everything_has_come_back(make_run: MakeRun) -> None:
    running = page_of(make_run()).figures()["run0-slots"]["data"][0]
    x, y = decoded(running["x"]), decoded(running["y"])
    assert x == sorted(x)
    assert max(y) == 4  # the step log, while there are steps
    assert y[-1] == 0  # scraped, after the last


def test_a_step_shows_from_its_start(make_run: MakeRun) -> None:
    data = page_of(make_run()).figures()["run0-slots"]["data"][0]
    x, y = decoded(data["x"]), decoded(data["y"])
    assert (x[0], y[0]) == (0.0, 4)  # four came at once, and the first step began with them
    assert x[1] == pytest.approx(0.020)
    last_step = max(n for n, t in enumerate(x) if y[n] > 0)
    assert x[last_step] % 0.020 == pytest.approx(0.019)  # and the last shows until its end


def test_the_lag_is_that_of_the_load(make_run: MakeRun) -> None:
    run = make_run()
    page = page_of(run)
    (lag,) = page.figures()["run0-lag"]["data"]
    manifest = json.loads((run / "manifest.json").read_text())
    window = manifest["window"]
    assert max(decoded(lag["x"])) <= (window["load_ended_ns"] - window["load_started_ns"]) / 1e9


def test_a_window_that_was_mostly_warm_up_is_not_called_good(make_run: MakeRun) -> None:
    steady = {"is_steady": True, "rule": "MSER-5", "warmup_s": 2.13, "steady_tps": 400.0}
    marks = {}
    for name, share in (("short", 0.2), ("long", 0.35)):
        run = read_run(make_run(name=name, steady=steady | {"warmup_share": share}))
        assert isinstance(run, Run)
        (marks[name],) = (one for one in trust(run) if one.what == "window")
    assert marks["short"].mark is Mark.GOOD
    assert marks["long"].mark is Mark.BAD
    assert marks["long"].text.startswith("35 % of the load were warm-up: steady after 2.13 s")


def test_a_bound_of_one_side_stands_under_its_share(make_run: MakeRun) -> None:
    run = make_run()
    summary = json.loads((run / "summary.json").read_text())
    share = {"unit": "ratio", "n": 500, "mean": 1.0, "lower95": 0.994, "method": "exact"}
    summary["metrics"]["refilled_next_schedule"] = share
    (run / "summary.json").write_text(json.dumps(summary))
    cells = page_of(run).texts("td")
    assert "100 %at least 99.4 %" in cells
    assert "0 %at most 3.1 %" in cells  # ghosts


def test_what_ghosts_hold_is_told(make_run: MakeRun) -> None:
    leaked = {"leaks_in_use": {"slots": 8, "blocks": 181}}
    run = make_run(ghosts=6, breakdown={"waste_by_abandon_point": [], **leaked})
    assert "8 slots and 181 blocks are still held" in body_of(page_of(run))


def without_an_end(run: Path, request_id: str) -> None:
    """Take from its log what came after its user had left: the server still holds it."""
    log = pd.read_parquet(run / "lifecycle.parquet")
    is_end = log["event"].isin(["removed", "blocks_freed", "finished"])
    log[~(is_end & (log["client_request_id"] == request_id))].to_parquet(run / "lifecycle.parquet")


def test_what_an_endless_request_wasted_is_a_lower_bound_everywhere(make_run: MakeRun) -> None:
    run = make_run(ghosts=1)
    without_an_end(run, "u-0")
    page = page_of(run)
    drawn = page.figures()
    assert [text[0] for text in drawn["run0-waste"]["data"][-1]["text"]] == ["≥", "1", "1"]
    assert [text[0] for text in drawn["run0-waste-phase"]["data"][-1]["text"]] == ["≥"]
    body = body_of(page)
    assert "some requests were still held when the watching ended" in body
    (row,) = (line for line in page.texts("tr") if line.startswith("in prefill") and " ms" in line)
    assert row.count("≥") == 2
    (alt,) = (
        attributes["aria-label"]
        for _, attributes, _ in page.elements
        if attributes.get("id") == "run0-waste-phase"
    )
    assert "≥" in str(alt)


def test_who_was_not_watched_to_the_end_was_not_seen_stopped(make_run: MakeRun) -> None:
    run = make_run(status="interrupted")
    without_an_end(run, "u-38")  # the last who left
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["window"]["settled_ns"] = manifest["window"]["load_ended_ns"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    summary = json.loads((run / "summary.json").read_text())
    summary["metrics"]["ghost_rate"]["n"] = 29
    (run / "summary.json").write_text(json.dumps(summary))
    body = body_of(page_of(run))
    assert "29 of 30 abandoned requests were stopped, of 1 it is not known." in body
    assert "as it should be" not in body


def test_a_machine_that_others_kept_busy_is_told(make_run: MakeRun) -> None:
    run = make_run()
    cpu = pd.read_parquet(run / "cpu.parquet")
    ticks = cpu[cpu["process"] == "load"]

    def machine_when(cores: list[float]) -> Trust:
        busy = [cores[n % len(cores)] for n in range(len(ticks))]
        whole = ticks.assign(process="machine", cores=busy)
        pd.concat([cpu, whole]).to_parquet(run / "cpu.parquet")
        read = read_run(run)
        assert isinstance(read, Run)
        (found,) = (one for one in trust(read) if one.what == "machine")
        return found

    idle, full = machine_when([1.2]), machine_when([1.9])
    assert (idle.mark, idle.brief) == (Mark.GOOD, "machine ok")
    assert idle.text == "in the mean 1.2 of 2 cores busy, 1.1 of them by this run"
    assert (full.mark, full.brief) == (Mark.BAD, "machine full 100 % of the time")
    assert machine_when([1.9, 0.2]).mark is Mark.BAD  # the mean alone would not tell
    read = read_run(make_run(name="not-sampled"))
    assert isinstance(read, Run)
    assert Mark.UNKNOWN in [one.mark for one in trust(read) if one.what == "machine"]


def without_colour(trace: dict[str, Any]) -> tuple[str, ...]:
    """What is left of the look of a trace, for who sees no colours."""
    line, marker = trace.get("line", {}), trace.get("marker", {})
    pattern = marker.get("pattern", {}).get("shape")
    return (
        trace["type"],
        trace.get("mode", ""),
        line.get("dash", "solid"),
        str(marker.get("symbol")),
        json.dumps(pattern if isinstance(pattern, list) else [pattern]),
    )


def test_no_two_marks_of_a_legend_differ_by_colour_alone(make_run: MakeRun) -> None:
    for name, figure in page_of(make_run(ghosts=6, gpu=True)).figures().items():
        told = [one for one in figure["data"] if one.get("name") and one.get("showlegend", True)]
        looks = [without_colour(one) for one in told]
        assert len(set(looks)) == len(looks), (name, looks)


def test_every_quantile_that_the_stages_leave_out_is_named(make_run: MakeRun) -> None:
    run = make_run(ghosts=30)
    summary = json.loads((run / "summary.json").read_text())
    never = {"unit": "s", "n": 30, "n_censored": 30, "method": "exact"}
    summary["metrics"]["signal_s"] = {**never, "lower_bounds": {"p50": 2.0, "p99": 2.0}}
    del summary["metrics"]["wait_s"], summary["metrics"]["free_s"]
    (run / "summary.json").write_text(json.dumps(summary))
    page = page_of(run)
    said = (
        "Not drawn: median of wait, free, slot_refill; 99th percentile of wait, free, slot_refill."
    )
    assert said in body_of(page)
    stages = page.figures()["run0-stages"]
    assert stages["layout"]["showlegend"]
    (alt,) = (
        attributes["aria-label"]
        for _, attributes, _ in page.elements
        if attributes.get("id") == "run0-stages"
    )
    assert alt is not None
    assert "Median: detect 1 ms, signal > 2 s" in alt


def test_a_workload_with_limits_is_judged_by_them(make_run: MakeRun) -> None:
    run = make_run(ghosts=3)
    manifest = json.loads((run / "manifest.json").read_text())
    limits = ["ghost_rate.mean == 0", "leaked_slots.max == 0", "run / baseline: ttft_s.p50 <= 2"]
    manifest["workload"] |= {"gate": {"limits": limits}, "run": {}, "load": {}, "arrivals": {}}
    manifest["workload"]["arms"] = []
    (run / "manifest.json").write_text(json.dumps(manifest))
    body = body_of(page_of(run))
    assert "Verdict fail by the workload's own limits" in body
    assert "fail ghost_rate.mean == 0: 3 of 30, beyond the limit" in body
    assert "The limits, one by one" in body
    assert "baseline" not in body  # `walkaway gate` knows one: a report is of its run alone


def test_limits_that_cannot_be_read_are_no_pass(make_run: MakeRun) -> None:
    run = make_run()
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["workload"]["gate"] = {"limits": ["ghosts are none"]}
    (run / "manifest.json").write_text(json.dumps(manifest))
    body = body_of(page_of(run))
    assert "Verdict cannot decide" in body
    assert "its limits cannot be read" in body


def test_the_control_is_said_to_be_the_workloads_choice(make_run: MakeRun) -> None:
    run = make_run()
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["workload"]["load"] = {"control_answer_tokens": 64}
    (run / "manifest.json").write_text(json.dumps(manifest))
    read = read_run(run)
    assert isinstance(read, Run)
    text = recovery(read).shows
    assert "a filler's natural end, here after 64 tokens, as the workload says" in text


def test_paper_keeps_together_what_belongs_together(make_run: MakeRun) -> None:
    style = "".join(page_of(make_run()).texts("style"))
    paper = style.rsplit("@media print", 1)[1]
    assert ".card, figure, tr, .remarks li { break-inside: avoid; }" in paper
    assert style.count(".opening .remarks") == 1
