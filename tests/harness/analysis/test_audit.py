"""The audit's verdicts, one lie of a counter each; and how other users are found out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import pytest

from harness.analysis.audit import foreign_requests
from harness.records import TokenCounting
from tests.harness.analysis.audited import accounts, verdicts
from tests.harness.told import summary_of
from tests.made_up.rows import at

if TYPE_CHECKING:
    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]

MS = 1_000_000


def test_an_honest_server_is_exact(make_run: MakeRun) -> None:
    run = accounts(make_run())
    assert set(verdicts(run).values()) == {"exact"}
    client = summary_of(run.frames())["audit"]["client"]
    assert (client["sent"], client["completed"], client["abandoned_while_reading"]) == (2, 1, 1)
    assert (client["tokens_read"], client["prompt_tokens_known"]) == (100, 20)


@pytest.mark.parametrize(
    ("role", "told", "verdict"),
    [
        ("aborted", 0.0, "stuck"),
        ("aborted", 2.0, "double"),
        ("aborted", 3.0, "gross"),
        ("generated_tokens", 60.0, "lower"),
        ("generated_tokens", 202.0, "double"),
        ("generated_tokens", 500.0, "gross"),
        ("prompt_tokens", 0.0, "stuck"),
        ("prompt_tokens", 40.0, "double"),
        ("ended", 1.0, "lower"),
        ("running", 1.0, "gross"),
    ],
)
def test_each_lie_has_its_verdict(make_run: MakeRun, role: str, told: float, verdict: str) -> None:
    run = accounts(make_run())
    run.manifest.idle.after[role] = told
    assert verdicts(run)[role] == verdict


def test_a_counter_that_appears_with_its_first_count_began_at_nothing(make_run: MakeRun) -> None:
    run = accounts(make_run())
    del run.manifest.idle.before["aborted"]
    assert verdicts(run)["aborted"] == "exact"
    run.manifest.idle.before = {}  # nobody read the page before
    assert verdicts(run)["aborted"] == "unknown"
    run = accounts(make_run())
    del run.manifest.idle.before["running"]
    assert verdicts(run)["running"] == "unknown"


def test_what_counts_only_at_the_end_is_late(make_run: MakeRun) -> None:
    run = accounts(make_run())
    for sample in run.server_metrics:
        if sample.name == "its_generated_tokens" and sample.value < 101:
            sample.value = 0.0
    assert verdicts(run)["generated_tokens"] == "late"


def test_what_moves_on_after_the_settle_time_is_late(make_run: MakeRun) -> None:
    run = accounts(make_run())
    run.manifest.idle.after["ended"] = 1.0
    run.manifest.idle.later = run.manifest.idle.after | {"ended": 2.0}
    assert verdicts(run)["ended"] == "late"


def test_a_gauge_that_never_moves_is_stuck(make_run: MakeRun) -> None:
    run = accounts(make_run())
    for sample in run.server_metrics:
        if sample.name == "its_running":
            sample.value = 0.0
    assert verdicts(run)["running"] == "stuck"


def test_a_gauge_is_not_called_stuck_by_scrapes_that_fell_between_answers(
    make_run: MakeRun,
) -> None:
    run = accounts(make_run())
    run.server_metrics = [
        msgspec.structs.replace(sample, value=0.0 if sample.name == "its_running" else sample.value)
        for sample in run.server_metrics
        if sample.t_ns > at(605) or sample.t_ns < at(10)
    ]
    assert verdicts(run)["running"] == "exact"


def test_what_is_called_a_lower_bound_stays_one(make_run: MakeRun) -> None:
    run = accounts(make_run())
    assert run.manifest.target is not None
    run.manifest.target.spec["metrics"]["generated_tokens"]["trust"] = "lower"
    assert verdicts(run)["generated_tokens"] == "lower"


def test_what_is_known_never_to_move_is_stuck_also_where_it_need_not_have_moved(
    make_run: MakeRun,
) -> None:
    run = accounts(make_run())
    run.requests.pop()
    run.abandon("early", t0=405, tokens=[], prompt_tokens=10)
    run.manifest.idle.after["aborted"] = 0.0
    assert verdicts(run)["aborted"] == "exact"
    assert run.manifest.target is not None
    run.manifest.target.spec["metrics"]["aborted"]["trust"] = "stuck"
    assert verdicts(run)["aborted"] == "stuck"


def test_a_counter_that_is_right_when_idle_is_not_judged_while_requests_run(
    make_run: MakeRun,
) -> None:
    run = accounts(make_run())
    assert run.manifest.target is not None
    run.manifest.target.spec["metrics"]["generated_tokens"]["trust"] = "exact_when_idle"
    assert verdicts(run)["generated_tokens"] == "exact"
    run.manifest.idle.after |= {"generated_tokens": 0.0, "running": 4.0}
    assert verdicts(run)["generated_tokens"] == "cannot be judged"


def test_a_counter_without_an_upper_limit_is_not_called_exact(make_run: MakeRun) -> None:
    run = accounts(make_run())
    run.server_metrics = []
    run.manifest.idle.after["generated_tokens"] = 150.0
    assert verdicts(run)["generated_tokens"] == "cannot be judged"


def test_what_the_target_does_not_tell(make_run: MakeRun) -> None:
    run = accounts(make_run())
    run.metrics(running="exact")
    assert verdicts(run)["aborted"] == "unknown"


def test_events_are_no_tokens_in_the_audit(make_run: MakeRun) -> None:
    run = accounts(make_run())
    for row in run.requests:
        row.token_counting = TokenCounting.EVENTS
    run.requests[0].completion_tokens = 120
    run.manifest.idle.after["generated_tokens"] = 202.0
    for sample in run.server_metrics:
        if sample.name == "its_generated_tokens":
            sample.value *= 2
    assert verdicts(run)["generated_tokens"] == "exact"


def test_a_page_that_took_long_is_judged_by_when_it_was_asked_for(make_run: MakeRun) -> None:
    """Its middle is late by half of what it took; then clients had read more than it shows."""
    run = accounts(make_run())
    for sample in run.server_metrics:
        sample.t_ns += 60 * MS  # all of them 120 ms
        sample.duration_ns = 120 * MS
    assert verdicts(run)["generated_tokens"] == "exact"
    for number, sample in enumerate(run.server_metrics):
        if number // 3 == 5:  # and one, of three gauges, 410
            sample.t_ns += 145 * MS
            sample.duration_ns += 290 * MS
    assert verdicts(run)["generated_tokens"] == "exact"


def test_several_counters_that_tell_too_much_tell_of_somebody_else(make_run: MakeRun) -> None:
    run = accounts(make_run())
    run.manifest.idle.after |= {"generated_tokens": 500.0, "ended": 9.0}
    summary = summary_of(run.frames())
    found = {one["role"]: one["verdict"] for one in summary["audit"]["counters"]}
    assert set(found.values()) == {"cannot be judged"}
    (said,) = [one["text"] for one in summary["validity"] if "other users" in one["text"]]
    assert said.startswith("its_generated_tokens, its_ended all moved by more than this run's")


def test_the_log_tells_of_somebody_else(make_run: MakeRun) -> None:
    run = make_run()
    run.metrics(generated_tokens="exact")
    run.idle({"generated_tokens": 0.0}, {"generated_tokens": 50.0})
    for number in (1, 2):
        run.request(f"walkaway-aa-0-{number}", sent=0, tokens=[10], outcome="completed", end=20)
        run.events(f"walkaway-aa-0-{number}", arrived=1)
    run.events("walkaway-aa-0-3", arrived=2)  # its row was lost with its process
    assert foreign_requests(run.frames()) == 0
    run.events("walkaway-bb-0-1", arrived=2)
    summary = summary_of(run.frames())
    texts = [one["text"] for one in summary["validity"] if one["level"] == "warning"]
    assert any(text.startswith("the server had other users") for text in texts)
    assert summary["audit"]["counters"][0]["verdict"] == "cannot be judged"
