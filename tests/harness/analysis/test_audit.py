"""The audit's verdicts, one lie of a counter each; and how other users are found out."""

from collections.abc import Callable

import msgspec
import pytest

from harness.analysis.audit import foreign_requests
from harness.records import MetricSample, TokenCounting
from harness.store.manifest import Kill
from tests.harness.analysis.scenes import accounts, verdicts
from tests.harness.told import remarks, warnings
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder

Change = Callable[[RunBuilder], object]

MS = 1_000_000


def trust(role: str, level: str) -> Change:
    def change(run: RunBuilder) -> None:
        run.target.spec["metrics"][role]["trust"] = level

    return change


def idle(role: str, value: float) -> Change:
    return lambda run: run.manifest.idle.after.update({role: value})


def shown(name: str, change: Callable[[float], float]) -> Change:
    """Every scrape of one metric shows another value."""

    def apply(run: RunBuilder) -> None:
        for sample in run.server_metrics:
            if sample.name == name:
                sample.value = change(sample.value)

    return apply


def moves_on(run: RunBuilder) -> None:
    run.manifest.idle.after["ended"] = 1.0
    run.manifest.idle.later = run.manifest.idle.after | {"ended": 2.0}


def shows_zero_between_answers(run: RunBuilder) -> None:
    def flat(sample: MetricSample) -> MetricSample:
        return msgspec.structs.replace(sample, value=0.0) if "running" in sample.name else sample

    between = [one for one in run.server_metrics if one.t_ns > at(605) or one.t_ns < at(10)]
    run.server_metrics = [flat(one) for one in between]


def leaves_before_the_first_token(run: RunBuilder) -> None:
    run.requests.pop()
    run.abandon("early", t0=405, tokens=[], prompt_tokens=10)
    run.manifest.idle.after["aborted"] = 0.0


def counts_events(run: RunBuilder) -> None:
    for row in run.requests:
        row.token_counting = TokenCounting.EVENTS
    run.requests[0].completion_tokens = 120
    run.manifest.idle.after["generated_tokens"] = 202.0
    shown("its_generated_tokens", lambda n: 2 * n)(run)


def counts_when_idle_and_is_not(run: RunBuilder) -> None:
    trust("generated_tokens", "exact_when_idle")(run)
    run.manifest.idle.after |= {"generated_tokens": 0.0, "running": 4.0}


def counts_150_unseen(run: RunBuilder) -> None:
    run.server_metrics.clear()
    run.manifest.idle.after["generated_tokens"] = 150.0


@pytest.mark.parametrize(
    ("changes", "role", "verdict"),
    [
        ([idle("aborted", 0.0)], "aborted", "stuck"),
        ([idle("aborted", 2.0)], "aborted", "double"),
        ([idle("aborted", 3.0)], "aborted", "gross"),
        ([idle("generated_tokens", 60.0)], "generated_tokens", "lower"),
        ([idle("generated_tokens", 202.0)], "generated_tokens", "double"),
        ([idle("generated_tokens", 500.0)], "generated_tokens", "gross"),
        ([idle("prompt_tokens", 0.0)], "prompt_tokens", "stuck"),
        ([idle("prompt_tokens", 40.0)], "prompt_tokens", "double"),
        ([idle("ended", 1.0)], "ended", "lower"),
        ([idle("running", 1.0)], "running", "gross"),
        # a counter that appears with its first count began at nothing, if the page was read before
        ([lambda run: run.manifest.idle.before.pop("aborted")], "aborted", "exact"),
        ([lambda run: run.manifest.idle.before.clear()], "aborted", "unknown"),
        ([lambda run: run.manifest.idle.before.pop("running")], "running", "unknown"),
        ([lambda run: run.metrics(running="exact")], "aborted", "unknown"),
        # counted only at the end, or still counted after the settle time
        ([shown("its_generated_tokens", lambda n: n * (n >= 101))], "generated_tokens", "late"),
        ([moves_on], "ended", "late"),
        # a gauge that never moves; but scrapes between answers show nothing of that
        ([shown("its_running", lambda _: 0.0)], "running", "stuck"),
        ([shows_zero_between_answers], "running", "exact"),
        # the description of the target is believed
        ([trust("generated_tokens", "lower")], "generated_tokens", "lower"),
        ([leaves_before_the_first_token], "aborted", "exact"),
        ([leaves_before_the_first_token, trust("aborted", "stuck")], "aborted", "stuck"),
        ([trust("generated_tokens", "exact_when_idle")], "generated_tokens", "exact"),
        ([counts_when_idle_and_is_not], "generated_tokens", "cannot be judged"),
        # without scrapes no upper limit is known
        ([counts_150_unseen], "generated_tokens", "cannot be judged"),
        # events are no tokens
        ([counts_events], "generated_tokens", "exact"),
    ],
)
def test_a_verdict_on_a_changed_account(
    run: RunBuilder, changes: list[Change], role: str, verdict: str
) -> None:
    run = accounts(run)
    for change in changes:
        change(run)
    assert verdicts(run)[role] == verdict


def test_a_page_that_took_long_is_judged_by_when_it_was_asked_for(run: RunBuilder) -> None:
    """Its middle is late by half of what it took; then clients had read more than it shows."""
    run = accounts(run)
    for sample in run.server_metrics:
        sample.t_ns += 60 * MS  # all of them 120 ms
        sample.duration_ns = 120 * MS
    assert verdicts(run)["generated_tokens"] == "exact"
    for number, sample in enumerate(run.server_metrics):
        if number // 3 == 5:  # and one, of three gauges, 410
            sample.t_ns += 145 * MS
            sample.duration_ns += 290 * MS
    assert verdicts(run)["generated_tokens"] == "exact"


def test_several_counters_that_moved_too_far_show_other_users(run: RunBuilder) -> None:
    run = accounts(run)
    run.manifest.idle.after |= {"generated_tokens": 500.0, "ended": 9.0}
    assert set(verdicts(run).values()) == {"cannot be judged"}
    (said,) = remarks(run, "other users")
    assert said.startswith("its_generated_tokens, its_ended all moved by more than this run's")


def test_requests_of_other_processes_in_the_log_show_other_users(run: RunBuilder) -> None:
    run.metrics(generated_tokens="exact")
    run.idle({"generated_tokens": 0.0}, {"generated_tokens": 50.0})
    for number in (1, 2):
        run.request(f"walkaway-aa-0-{number}", sent=0, tokens=[10], outcome="completed", end=20)
        run.events(f"walkaway-aa-0-{number}", arrived=1)
    run.events("walkaway-aa-0-3", arrived=2)  # its row was lost with its process
    assert foreign_requests(run.frames()) == 0
    run.events("walkaway-bb-0-1", arrived=2)
    assert warnings(run, "the server had other users")
    assert verdicts(run)["generated_tokens"] == "cannot be judged"


def two_tiers(run: RunBuilder, *, counted: float) -> None:
    """Three leave: one between two workers, one at the first only, and one whose abort crosses its
    end."""
    for name, workers in (("a", ("prefill-0", "decode-0")), ("b", ("prefill-0",)), ("c", ("x",))):
        run.worker = workers[0]
        run.abandon(name, t0=10, tokens=[5])
        run.events(name, arrived=1, disconnected=11, abort_sent=11)
        for run.worker in workers:
            run.events(name, admitted=2, removed=12, blocks_freed=12)
            if name != "c":
                run.events(name, abort_received=12)
    run.metrics(worker_cancelled="exact", frontend_cancelled="exact")
    run.idle({"running": 0}, {"worker_cancelled": counted, "frontend_cancelled": 3})


@pytest.mark.parametrize(
    ("counted", "verdict"), [(2, "lower"), (3, "exact"), (4, "exact"), (6, "double"), (9, "gross")]
)
def test_a_cancellation_counts_once_at_each_worker_that_had_the_request(
    run: RunBuilder, counted: float, verdict: str
) -> None:
    two_tiers(run, counted=counted)
    found = verdicts(run)
    assert (found["worker_cancelled"], found["frontend_cancelled"]) == (verdict, "exact")
    said = [text for text in warnings(run) if text.startswith("its_worker_cancelled moved by")]
    assert bool(said) == (verdict != "exact")


def test_counters_of_killed_processes_are_not_judged(run: RunBuilder) -> None:
    two_tiers(run, counted=9)
    kill = Kill(t_ns=at(10), kind="worker", index=0, name="w", pid=9)
    run.manifest.kills = [kill]
    assert verdicts(run)["worker_cancelled"] == "cannot be judged"
