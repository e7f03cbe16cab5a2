"""The whole report, from run folders to HTML, read back with a parser. The snapshots hold the text
of some runs; these tests hold the rest.
"""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dashboards.__main__ import main
from dashboards.sections.section import Table
from harness.formatting import DASH
from harness.records import Summary
from tests.dashboards.reading import page_by
from tests.golden.recorded import judged_today
from tests.made_up.arms import arm as of_arm
from tests.made_up.arms import difference, save_arms
from tests.made_up.changed import change, change_workload
from tests.made_up.conform import conform_cases, conform_result, save_conform
from tests.made_up.played import save_played


def test_arms_without_figures_are_said_to_have_none(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"outcomes": {}, "metrics": {}, "not_measurable": {}, "per_round": {}}
    arms = dict.fromkeys(("32", "128", "512"), nothing)
    run = save_arms(tmp_path, kind="chunk_frontier", arms=arms, differences={})
    page = page_by("report", run)
    assert page.figures() == {}
    assert "No request was made, so there is nothing to report." in page.body


def test_arms_with_limits_of_the_run_itself_have_a_verdict_on_their_page(tmp_path: Path) -> None:
    run = save_arms(tmp_path, kind="abandon")
    change_workload(run, gate={"limits": ["ghost_rate.mean == 0"], "min_abandons": 0})
    assert "Verdict" in page_by("report", run).body


def test_an_invalid_run_of_arms_says_no_ratio_before_that(tmp_path: Path) -> None:
    invalid = [{"level": "invalid", "text": "the load could not keep up"}]
    body = page_by("report", save_arms(tmp_path, kind="abandon", validity=invalid, rounds=1)).body
    assert "Against 32" not in body
    assert body.index("the load could not keep up") < body.index("times")
    assert body.index("The arms side by side") < body.index("Workload and server")
    assert "1, seed 8" in body


def test_pictures_come_before_what_the_run_can_be_trusted_for(tmp_path: Path) -> None:
    hidden = {"gpu_seconds_after_abandon": "there is no GPU"}
    page = page_by("report", save_played(tmp_path / "run", not_measurable=hidden))
    titles = page.texts("h2")
    order = [
        *("How long each cancel took", "Cancel latency", "Unread tokens", "Batch slots over time"),
        *("The users who stayed", "The measurement floor", "How far to trust this"),
        *("Not measurable here", "The limits, one by one"),
    ]
    assert [one for one in titles if one in order] == order


def test_numbers_stand_on_the_right_of_their_column_and_words_on_the_left(tmp_path: Path) -> None:
    page = page_by("report", save_played(tmp_path / "run", ghosts=3))
    right = {"requests", "median", "p99", "n", "mean", "slot time"}
    seen = {
        "".join(text).strip(): of.get("class") for tag, of, text in page.elements if tag == "th"
    }
    assert {name: seen[name] for name in right} == dict.fromkeys(right, "n")
    assert {seen[name] for name in ("stage", "left", "method", "verdict", "why", "limit")} == {None}
    cells = Table(
        title="",
        shows="",
        columns=tuple("abcd"),
        rows=(("1", "> 2 s", "2 of 3 went wrong " * 3, DASH),),
    )
    assert cells.numeric == [False, True, False, False]


def test_two_hundred_arms_are_a_row_each_and_few_are_named_before(tmp_path: Path) -> None:
    names = [f"arm {n} {'long' * 40}" for n in range(200)]
    differences = {"preemptions": {"mean": [difference(one, 0.5) for one in names[1:]]}}
    arms = {name: of_arm(place % 3) for place, name in enumerate(names)}
    run = save_arms(tmp_path, kind="abandon", arms=arms, differences=differences)
    workload = json.loads((run / "manifest.json").read_text())["workload"]
    workload["arms"] = [{"name": name, "engine": {}, "load": {}} for name in names]
    change(run, "manifest.json", workload=workload)
    page = page_by("report", run)
    before, *_ = page.body.partition("The arms side by side")
    assert before.count("long" * 40) < 20
    assert "and 193 more" in before
    rows = [line for line in page.texts("tr") if line.endswith("0.5 times (0.4 to 0.6)")]
    assert len(rows) == 199
    assert max(one["layout"]["height"] for one in page.figures().values()) < 1_000


@pytest.mark.parametrize(
    ("culprit", "content"),
    [
        ("summary.json", b'{"run_id": '),
        ("summary.json", b'{"run_id": 7}'),
        ("requests.parquet", b"PAR1 not really"),
        ("cannot be written", b""),
    ],
)
def test_a_damaged_run_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], culprit: str, content: bytes
) -> None:
    run = save_played(tmp_path / "run")
    output = run / "report.html"
    if content:
        (run / culprit).write_bytes(content)
    else:
        output = run / "summary.json" / "report.html"
    assert main(["report", str(run), "-o", str(output)]) == 2
    captured = capsys.readouterr()
    assert culprit in captured.err
    assert captured.out == ""
    assert not (run / "report.html").exists()


def test_the_frontier_has_budgets_thresholds_and_no_chunking(tmp_path: Path) -> None:
    run = save_arms(tmp_path, kind="chunk_frontier")
    manifest = json.loads((run / "manifest.json").read_text())
    engines = (
        {"max_num_batched_tokens": 32},
        {"max_num_batched_tokens": 8192, "long_prefill_token_threshold": 128},
        {"max_num_batched_tokens": 4096, "enable_chunked_prefill": False},
    )
    for arm, engine in zip(manifest["workload"]["arms"], engines, strict=True):
        arm["engine"] = engine
    change(run, "manifest.json", workload=manifest["workload"])
    page = page_by("report", run)
    assert "From chunks of 32 tokens to 128" in page.body
    assert "Without chunking it comes after 180 ms, and a bystander waits up to 60 ms." in page.body
    drawn = {trace["name"]: trace["text"] for trace in page.figures()["run0-frontier"]["data"]}
    assert drawn == {
        "token budget": ["32"],
        "long-prefill threshold": ["128 (threshold)"],
        "no chunking": ["no chunking"],
    }


def test_two_chunk_sizes_are_enough_for_the_frontiers_sentence(tmp_path: Path) -> None:
    run = save_arms(tmp_path, kind="chunk_frontier")
    arms = json.loads((run / "summary.json").read_text())["arms"]
    arms["128"]["metrics"] = {}
    change(run, "summary.json", arms=arms)
    assert "From chunks of 32 tokens to 512" in page_by("report", run).body


def test_the_newest_conformance_of_the_same_kind_of_server_stands_beside_the_run(
    tmp_path: Path,
) -> None:
    run = save_played(tmp_path / "run", abandons=3)
    engine = json.loads((run / "summary.json").read_text())["engine"]
    of_ours = msgspec.structs.replace(conform_result().target, engine=engine)
    for day in ("21", "23", "22"):
        at = f"2026-11-{day}T00:00:00"
        save_conform(tmp_path / day, target=of_ours, started_at=at, cases=conform_cases()[:2])
    save_conform(tmp_path / "another", started_at="2026-11-30")
    (tmp_path / "23" / "index.html").touch()
    body = page_by("report", run).body
    assert f"1 pass, 1 fail: {tmp_path / '23' / 'index.html'}" in body
    assert body.count("conform.json") == 0


@pytest.mark.parametrize("name", ["slot_recovery", "generic", "value"])
def test_figures_that_are_not_finite_cost_no_report(tmp_path: Path, name: str) -> None:
    """As if each formula had failed, in one way or the other."""
    folder = judged_today(name, tmp_path)
    summary = folder.read_summary()
    for side in [summary] if isinstance(summary, Summary) else summary.arms.values():
        for place, metric in enumerate(side.metrics.values()):
            metric.mean = math.nan
            metric.p50_ci95 = (0.0, math.inf)
            if place % 2:
                metric.p50 = metric.p90 = metric.p95 = metric.p99 = metric.max = math.inf
                metric.lower_bounds = {}
    folder.write_summary(summary)
    assert main(["report", str(folder.path), "-o", str(folder.report)]) == 0
    assert "mean came out as nan" in folder.report.read_text()
