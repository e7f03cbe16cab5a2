"""The verdict is the gate's; the page also says how far to trust the run."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dashboards.verdict import MOST_LINES, Mark, ReportVerdict, Trust, trust, verdict_of
from harness.export.library import load_run
from tests.dashboards.reading import page_by
from tests.made_up.arms import save_arms
from tests.made_up.changed import change, change_metric, change_rows, change_workload
from tests.made_up.played import save_played

INTERVALS: dict[str, dict[str, Any]] = {
    "cancel_latency_steps": {"p50_ci95": (1, 1), "p99_ci95": (1, 2)},
    "wasted_after_close_tokens": {"mean_ci95": (1.0, 1.1)},
}


def verdict(run: Path) -> ReportVerdict:
    found = verdict_of(load_run(run))
    assert found is not None
    return found


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """A run whose every figure is surely within the gate's default limits."""
    run = save_played(tmp_path / "run")
    for name, intervals in INTERVALS.items():
        change_metric(run, name, **intervals)
    return run


@pytest.mark.parametrize("limits", [[], ["run / baseline: ttft_s.p50 <= 2"]])
def test_without_limits_on_the_run_itself_the_gates_defaults_judge(
    sound: Path, limits: list[str]
) -> None:
    change_workload(sound, gate={"limits": limits, "min_abandons": 10})
    found = verdict(sound)
    assert (found.mark, found.word) == (Mark.GOOD, "pass")
    assert found.basis.startswith("by the gate's defaults")
    assert found.lines == (("pass", "7 of 7 checks"),)
    assert len(found.checks) == 7


@pytest.mark.parametrize(
    ("metric", "changed"),
    [
        ("ghost_rate", {"mean": 0.1}),
        ("leaked_slots", {"mean": 1.0}),
        ("leaked_blocks", {"mean": 4.0}),
        ("cancel_latency_steps", {"p50": 3, "p50_ci95": (3, 3), "p99": 4, "p99_ci95": (4, 5)}),
        ("cancel_latency_steps", {"p99": 9.0, "p99_ci95": (8, 12)}),
        ("wasted_after_close_tokens", {"mean": 40.0, "mean_ci95": (39, 41)}),
    ],
)
def test_one_broken_limit_fails_the_run(sound: Path, metric: str, changed: dict[str, Any]) -> None:
    change_metric(sound, metric, **changed)
    found = verdict(sound)
    assert (found.mark, found.word) == (Mark.BAD, "fail")
    mark, text = found.lines[0]
    assert mark == "fail"
    assert text.startswith(metric)
    assert found.lines[-1][0] == "pass"


@pytest.mark.parametrize(
    ("changes", "gate", "why"),
    [
        ({"status": "interrupted"}, None, "interrupted"),
        ({"validity": [{"level": "invalid", "text": "a slow client"}]}, None, "a slow client"),
        ({"metrics": {}}, None, "not measurable"),
        ({}, {}, "only 30 requests were abandoned"),
        ({}, {"limits": ["ghosts are none"]}, "its limits cannot be read"),
    ],
)
def test_a_run_that_proves_nothing_is_no_pass(
    sound: Path, changes: dict[str, Any], gate: dict[str, Any] | None, why: str
) -> None:
    change(sound, "summary.json", **changes)
    if gate is not None:
        change_workload(sound, gate=gate)
    found = verdict(sound)
    assert (found.mark, found.word) == (Mark.UNKNOWN, "cannot decide")
    assert any(why in reason for *_, reason in found.checks)


def test_a_server_that_answers_nobody_any_more_fails(sound: Path) -> None:
    change(sound, "manifest.json", probing={"sent": 3, "healthy": None, "is_silent": True})
    assert (verdict(sound).mark, verdict(sound).word) == (Mark.BAD, "fail")


@pytest.mark.parametrize(
    ("changes", "marks"),
    [
        ({}, ("good", "good", "unknown")),
        ({"ghost_rate": {"mean": 0.1}}, ("bad", "good", "unknown")),
        ({"leaked_slots": {"mean": 1.0}}, ("good", "good", "bad")),
        ({"wasted_after_close_tokens": {"mean_ci95": (1, 9)}}, ("good", "unknown", "unknown")),
    ],
)
def test_each_card_has_the_verdict_of_its_limits_and_says_it_in_words(
    sound: Path, changes: dict[str, dict[str, Any]], marks: tuple[str, ...]
) -> None:
    """The slot recovery is not measured here: what else is on its card may fail it, no more."""
    change_workload(sound, gate={"min_abandons": 10})
    for name, changed in changes.items():
        change_metric(sound, name, **changed)
    cards = [
        (str(of["data-mark"]), " ".join("".join(text).split()))
        for tag, of, text in page_by("report", sound).elements
        if tag == "div" and "data-mark" in of and "card" in str(of["class"])
    ]
    assert tuple(mark for mark, _ in cards) == marks
    words = {
        "good": "\N{CHECK MARK} keeps its",
        "bad": "\N{MULTIPLICATION X} fails",
        "unknown": "\N{EN DASH} ",
    }
    assert all(words[mark] in text for mark, text in cards)
    for name in changes:
        assert any(f"{name}." in text for _, text in cards)


def test_a_verdict_on_hundreds_of_limits_is_short_on_the_first_screen(sound: Path) -> None:
    limits = [f"ghost_rate.mean <= 0.{place:03}" for place in range(1, 101)]
    change_metric(sound, "ghost_rate", mean=0.5)
    change_workload(sound, gate={"limits": limits, "min_abandons": 10})
    found = verdict(sound)
    assert len(found.checks) == 101
    assert len(found.lines) == MOST_LINES + 2
    assert found.lines[MOST_LINES][1].endswith("limits more")


def test_a_workloads_own_limits_take_the_place_of_the_defaults(tmp_path: Path) -> None:
    run = save_played(tmp_path / "run", ghosts=3)
    limits = ["ghost_rate.mean == 0", "leaked_slots.max == 0", "run / baseline: ttft_s.p50 <= 2"]
    change_workload(run, gate={"limits": limits, "min_abandons": 0})
    found = verdict(run)
    assert found.word == "fail"
    assert found.basis.startswith("by the workload's own limits")
    # A limit against a baseline is the gate's: a report is about its run alone.
    assert [name for name, *_ in found.checks] == [limits[0], "the run", limits[1]]


@pytest.mark.parametrize("limits", [[], ["leaked_slots.mean <= 1"]])
def test_arms_without_limits_on_the_run_itself_get_no_verdict(
    tmp_path: Path, limits: list[str]
) -> None:
    saved = save_arms(tmp_path, kind="abandon")
    arms = [arm["name"] for arm in load_run(saved).manifest.workload["arms"]]
    against = [f"{arm} / baseline: {limit}" for arm in arms for limit in limits]
    change_workload(saved, gate={"limits": against})
    run = load_run(saved)
    assert run.arms
    assert verdict_of(run) is None


def trusted(run: Path, name: str) -> Trust:
    (found,) = (one for one in trust(load_run(run)) if one.what == name)
    return found


@pytest.mark.parametrize(("share", "mark"), [(0.2, Mark.GOOD), (0.35, Mark.BAD)])
def test_a_window_that_was_mostly_warm_up_is_not_good(
    tmp_path: Path, share: float, mark: Mark
) -> None:
    steady = {"is_steady": True, "rule": "MSER-5", "warmup_s": 2.13, "steady_tps": 400.0}
    window = trusted(
        save_played(tmp_path / "run", steady=steady | {"warmup_share": share}), "window"
    )
    assert window.mark is mark
    if mark is Mark.BAD:
        assert window.text.startswith("35 % of the load were warm-up: steady after 2.13 s")


@pytest.mark.parametrize(
    ("cores", "mark", "brief"),
    [
        ([1.2], Mark.GOOD, "machine ok"),
        ([1.9], Mark.BAD, "machine full 100 % of the time"),
        ([1.9, 0.2], Mark.BAD, "machine full 50 % of the time"),  # the mean alone would not show it
        ([], Mark.UNKNOWN, None),
    ],
)
def test_a_full_machine_is_told(
    tmp_path: Path, cores: list[float], mark: Mark, brief: str | None
) -> None:
    run = save_played(tmp_path / "run")

    def with_the_machine(cpu: pd.DataFrame) -> pd.DataFrame:
        ticks = cpu[cpu["process"] == "load"]
        busy = [cores[n % len(cores)] for n in range(len(ticks))]
        return pd.concat([cpu, ticks.assign(process="machine", cores=busy)])

    if cores:
        change_rows(run, "cpu", with_the_machine)
    machine = trusted(run, "machine")
    assert machine.mark is mark
    assert machine.brief == brief or (machine.brief or "").startswith("machine full")
    if mark is Mark.GOOD:
        assert machine.text == "1.2 of 2 cores busy on average, 1.1 of them by this run"


def test_requests_that_went_wrong_are_counted(tmp_path: Path) -> None:
    run = save_played(tmp_path / "run")
    change(run, "summary.json", outcomes={"abandoned": 30, "completed": 6, "timed_out": 4})
    answers = trusted(run, "answers")
    assert (answers.mark, answers.brief) == (Mark.BAD, "4 went wrong")
    assert answers.text == "4 timed out, of 40 requests"
