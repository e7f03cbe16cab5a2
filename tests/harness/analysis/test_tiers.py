"""Requests that are at several workers, one after the other or at once, worked out by hand."""

import pytest

from harness.analysis.cancellations import cancellations
from harness.analysis.kills import kill_effects, kill_figures
from harness.analysis.recovery import slot_refills
from harness.analysis.run_facts import run_facts
from harness.analysis.summary import summarise
from harness.analysis.timeline import level_of_all, timeline
from harness.records import ProcessKind
from harness.store.manifest import Kill
from tests.harness.analysis.scenes import figures_of, only_row
from tests.harness.told import metric, ms
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder


def serving_with(run: RunBuilder, *workers: str) -> None:
    run.configure(workers=dict.fromkeys(workers, 9))


def handed_over(run: RunBuilder, t0: float, *, freed: float = 22) -> None:
    """Left at t0: a prompt of 4 tokens in one block, computed from 10 to 20 at the prefill worker,
    which keeps it until the decode worker has it."""
    run.abandon("a", t0=t0, tokens=[21], planned_abandon=1)
    run.events("a", arrived=1)
    run.worker = "prefill-0"
    run.step(10, 20, sampled=("a",), a=4)
    for number in range(12):  # it has shorter steps than the decode worker
        run.step(20 + 4 * number, 24 + 4 * number, other=1)
    run.events("a", admitted=10.1, first_token=20, handed_over=20.1, blocks_freed=freed)
    run.worker = "decode-0"
    run.events("a", taken_over=20.6)


def in_decode(run: RunBuilder, *, freed: float = 22) -> None:
    """Left at 53, in the step that samples its fourth token."""
    handed_over(run, 53, freed=freed)
    run.events("a", admitted=30.1)
    run.lifecycle[-1].num_blocks = 2
    run.steps(3, 5, "a")
    run.steps(6, 7, "other")
    run.worker = ""
    run.events("a", disconnected=54)
    run.worker = "decode-0"
    run.events("a", abort_received=55, removed=60.1, blocks_freed=60.2)
    run.events("a", finished=60.3, generated=4)


def test_a_request_lives_at_each_worker_that_has_it(run: RunBuilder) -> None:
    in_decode(run)
    lives = timeline(run.frames())
    columns = ["worker", "life", "in_ns", "out_ns", "reason", "freed_ns"]
    assert lives[columns].to_numpy().tolist() == [
        ["prefill-0", 0, at(10.1), at(20.1), "handed_over", at(22)],
        ["decode-0", 1, at(30.1), at(60.1), "removed", at(60.2)],
    ]


def test_left_in_decode_after_a_hand_over(run: RunBuilder) -> None:
    in_decode(run)
    row = only_row(run)
    assert (row["phase"], row["worker"], row["finish_reason"]) == ("decode", "decode-0", "abort")
    stages = row[["detect_s", "signal_s", "wait_s", "free_s"]].to_list()
    assert stages == [ms(1), ms(1), ms(5.1), ms(0.1)]
    assert row["cancel_latency_s"] == ms(7.2)
    assert row["cancel_latency_steps"] == 1, "in steps of its own worker"
    assert row["removed_at_first_boundary"]
    assert row[["hop_s", "prefill_tier_s"]].isna().all(), "the first tier had nothing left"
    assert row["decode_tier_s"] == ms(7.2)
    assert row["slot_seconds"] == ms(7.1)
    assert row["block_seconds"] == ms(2 * 7.2)  # two blocks, one of which came with it
    assert row["gpu_seconds"] == ms(7)
    assert (row["generated_tokens"], row["wasted_after_close_tokens"]) == (4, 1)


def test_removed_at_one_worker_and_freed_last_at_another(run: RunBuilder) -> None:
    """The prefill worker notices only at its next boundary that it may give the blocks back."""
    in_decode(run, freed=64.5)
    run.lifecycle[4].reason = "handed_over"
    row = only_row(run)
    assert (row["worker"], row["told_ns"]) == ("prefill-0", at(55)), "told: the decode worker"
    assert row["removed_at_first_boundary"]
    assert row["removal_s"] == ms(0.1), "after the boundary of the worker that removed it"
    assert row["cancel_latency_s"] == row["prefill_tier_s"] == ms(11.5)
    assert row["decode_tier_s"] == ms(7.2)
    assert row["cancel_latency_steps"] == 3, "in steps of the worker that freed it last"


def test_a_slot_that_is_handed_over_is_no_cancelled_one(run: RunBuilder) -> None:
    """The next request takes it at once; its blocks come free only after that."""
    in_decode(run)
    for row in run.step_log[:2]:
        row.num_waiting, row.num_running = 1, 2
    run.worker = "prefill-0"
    run.events("w", arrived=2, admitted=20.2)
    frames = run.frames()
    assert not slot_refills(frames, run_facts(frames))["request_id"].isin(["a"]).any()


def left_between(run: RunBuilder, *then: str) -> None:
    """Both workers hold it; the prefill worker lets go. `then`: in the next step of the other."""
    handed_over(run, 20.5, freed=21.2)
    run.steps(3, 4, *then)
    run.worker = ""
    run.events("a", disconnected=20.8)
    run.worker = "prefill-0"
    run.events("a", abort_received=20.9, removed=21.1, finished=21.3, generated=1)
    run.worker = "decode-0"


def test_left_between_two_workers(run: RunBuilder) -> None:
    """The latency ends when the last has let go."""
    left_between(run, "other")
    run.events("a", abort_received=21.4, removed=21.5, blocks_freed=21.6)
    run.events("a", finished=21.7, generated=1)
    row = only_row(run)
    assert (row["phase"], row["ghost"]) == ("hand_over", False)
    assert row["hop_s"] == ms(0.5)
    assert [row["prefill_tier_s"], row["decode_tier_s"]] == [ms(0.7), ms(1.1)]
    assert row["cancel_latency_s"] == ms(1.1)
    figures = figures_of(run)
    assert metric(figures["hop_s"]).p50 == ms(0.5)
    assert metric(figures["cancel_latency_prefill_tier_s"]).p50 == ms(0.7)


def test_a_tier_that_never_lets_go_makes_a_ghost(run: RunBuilder) -> None:
    left_between(run, "a")
    row, figures = only_row(run), figures_of(run)
    assert (row["ghost"], row["censored"], row["cancel_latency_s"]) == (True, True, 2.0)
    assert metric(figures["cancel_latency_prefill_tier_s"]).n_censored == 0
    decode = metric(figures["cancel_latency_decode_tier_s"])
    assert (decode.n_censored, decode.lower_bounds["p50"]) == (1, 2.0)


def test_each_worker_counts_and_refills_in_its_own_steps(run: RunBuilder) -> None:
    """Both let go at 41 of what was left at 12; one had passed two boundaries then, the other
    three. A request waits for a slot of the first only."""
    for worker, length in (("worker-0", 20), ("worker-1", 10)):
        name = worker[-1]
        run.worker = ""
        run.abandon(name, t0=12, tokens=[11], planned_abandon=1)
        run.events(name, arrived=1, disconnected=13)
        run.worker = worker
        run.events(name, admitted=2, first_token=10, abort_received=14)
        run.events(name, removed=41, blocks_freed=41, finished=41)
        for number in range(4):
            waiting = int(worker == "worker-0" and number < 2)
            begin, running = number * length, {name: 1, "x": 1}
            run.step(begin, begin + length, waiting=waiting, sampled=(), **running)
        run.step(4 * length, 5 * length, x=1)
    run.worker = "worker-0"
    run.events("w", arrived=2, admitted=41.5)
    serving_with(run, "worker-0", "worker-1")
    frames = run.frames()
    cancels = cancellations(frames).set_index("worker")
    assert cancels["cancel_latency_steps"].to_dict() == {"worker-0": 2, "worker-1": 3}
    facts = run_facts(frames)
    assert (facts.slots, facts.worker_slots) == (4, 2)
    assert slot_refills(frames, facts)["request_id"].to_list() == ["0"]


def test_slots_are_those_of_all_workers_without_their_steps(run: RunBuilder) -> None:
    serving_with(run, "prefill-0", "prefill-1")
    facts = run_facts(run.frames())
    assert (facts.slots, facts.is_disaggregated) == (8, True)


def test_utilisation_is_of_the_slots_of_all_workers(run: RunBuilder) -> None:
    """In a second of load two of four slots for half a second, and one of them for as long."""
    serving_with(run, "worker-0", "worker-1")
    for run.worker, start, names in (("worker-0", 0, "ab"), ("worker-1", 250, "c")):
        run.step(start, start + 500, sampled=(), **dict.fromkeys(names, 1))
    run.request("a", sent=0, tokens=[500], outcome="completed", end=500)
    assert metric(summarise(run.frames()).metrics["slot_utilisation"]).mean == 0.375


def test_a_workload_of_tiers_says_nothing_of_another_server(run: RunBuilder) -> None:
    run.another_engine()
    run.request("b", sent=0, tokens=[9], outcome="completed", end=60)
    run.manifest.workload |= {"engine": {"workers": 2, "frontends": 2, "disaggregated": True}}
    facts = run_facts(run.frames())
    assert (facts.slots, facts.is_disaggregated) == (None, False)
    assert "others_failed_rate" in kill_figures([kill_effects(run.frames(), facts)])


def test_the_level_of_all_workers_is_the_sum_of_their_latest(run: RunBuilder) -> None:
    for run.worker, start, running in (("a", 0, 2), ("b", 5, 1), ("a", 10, 3), ("b", 15, 0)):
        run.step(start, start + 4, sampled=(), **{f"r{number}": 1 for number in range(running)})
    steps = run.frames().steps.sort_values("started_ns")
    assert level_of_all(steps, "num_running").to_list() == [3, 3, 4, 3]


# Planned kills.


def two_of_each(run: RunBuilder, kind: ProcessKind, *killed: int) -> None:
    engine = {"frontends": 2, "workers": 2}
    run.manifest.workload |= {"engine": engine, "load": {"kill": kind}}
    run.manifest.kills = [
        Kill(t_ns=at(50), kind=kind, index=i, name=f"{kind}-{i}", pid=9, back_ns=at(100))
        for i in killed
    ]


def open_at(
    run: RunBuilder, name: str, *, frontend: int, worker: int, freed: float | None = None
) -> None:
    """Sent at 0 and failed at 50, when a process is killed."""
    run.request(name, sent=0, tokens=[20], outcome="failed", end=50, frontend=frontend)
    first = len(run.lifecycle)
    run.worker = ""
    run.events(name, arrived=1)
    run.worker = f"worker-{worker}"
    run.events(name, admitted=2)
    if freed is not None:
        run.events(name, removed=freed, blocks_freed=freed, finished=freed)
    for event in run.lifecycle[first:]:
        event.request_id = f"frontend-{frontend}{'.2' * (worker == 1)}-{name}"


def test_what_a_killed_frontend_left_is_free_when_the_workers_have_freed_it(
    run: RunBuilder,
) -> None:
    two_of_each(run, "frontend", 1)
    for number, freed in enumerate((53, 57, None)):
        open_at(run, f"f{number}", frontend=1, worker=number % 2, freed=freed)
    open_at(run, "other", frontend=0, worker=0)  # failed, though its processes lived
    run.request("b", sent=0, tokens=[9], outcome="completed", end=60)
    summary = summarise(run.frames())
    freed_after = summary.metrics["freed_after_kill_s"]
    assert (freed_after.n, freed_after.n_censored, freed_after.p50) == (3, 1, ms(7))
    others = summary.metrics["others_failed_rate"]
    assert (others.n, others.mean) == (2, 0.5)
    texts = [remark.text for remark in summary.validity]
    assert any(text.startswith("1 planned kills of a frontend: 3 requests") for text in texts)
    assert any(text.startswith("1 of 2 requests went wrong: 1 failed") for text in texts)


def test_what_a_killed_worker_had_is_no_ghost(run: RunBuilder) -> None:
    """Left at 45, a moment before the kill. Another request fails with its worker."""
    two_of_each(run, "worker", 1)
    run.abandon("a", t0=45, tokens=[20])
    run.events("a", arrived=1, disconnected=46)
    run.worker = "worker-1"
    run.events("a", admitted=2, abort_received=47)
    open_at(run, "f", frontend=0, worker=1)
    run.events("sent", arrived=49)  # it dies before it logs this one
    run.request("sent", sent=48, tokens=[], outcome="failed", end=51)
    frames = run.frames()
    row = cancellations(frames).iloc[0]
    assert (row["phase"], row["removed_ns"]) == ("lost", at(50))
    summary = summarise(frames)
    assert "ghost_rate" in summary.not_measurable
    assert summary.not_measurable["freed_after_kill_s"].startswith("no killed worker left")
    assert summary.metrics["others_failed_rate"].n == 1, "`a` had left before"


@pytest.mark.parametrize("kind", ["frontend", "worker"])
def test_without_a_kill_all_requests_are_others(run: RunBuilder, kind: ProcessKind) -> None:
    two_of_each(run, kind)
    run.request("b", sent=0, tokens=[9], outcome="completed", end=60)
    assert summarise(run.frames()).metrics["others_failed_rate"].mean == 0
