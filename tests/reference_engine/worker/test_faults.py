"""Each fault of the worker: it does what its name says, to aborts only, and nothing else."""

from typing import Any

import pytest

from reference_engine.faults import FaultError, Faults, parse_faults
from tests.reference_engine.stepped_engine import Bench, abort, add

DROPS = Faults(drop_prefix_on_cancel=True)
CORRECT: dict[str, Any] = {
    "finished": {"abort": 1},
    "num_running": 1,
    "free_blocks": 6,  # of 8; two are the survivor's
    "slept": [],
    "live": ["survivor"],
}


def after_one_abort(faults: Faults) -> Bench:
    """A survivor and one that is aborted."""
    bench = Bench(faults)
    bench.step(add("survivor"), add("gone"))
    bench.step(abort("gone"))
    return bench


@pytest.mark.parametrize(
    ("faults", "wrong"),
    [
        (Faults(), {}),
        (Faults(double_count=True), {"finished": {"abort": 2}}),
        (Faults(never_count=True), {"finished": {"abort": 0}}),
        (Faults(leak_slot=True), {"num_running": 2}),
        (Faults(hold_blocks=1e-6), {"free_blocks": 4}),
        (Faults(leak_blocks=1), {"free_blocks": 5}),
        (Faults(leak_blocks=100), {"free_blocks": 4}),
        (Faults(stall_survivors_on_abort=0.25), {"slept": [0.25]}),
        (Faults(label_length=True), {"finished": {"abort": 1, "length": 1}}),
        (
            Faults(lose_abort=1.0),
            {"finished": {}, "num_running": 2, "free_blocks": 4, "live": ["survivor", "gone"]},
        ),
    ],
    ids=str,
)
def test_a_fault_changes_what_its_name_says_and_nothing_else(
    faults: Faults, wrong: dict[str, Any]
) -> None:
    bench = after_one_abort(faults)
    report = bench.reports[-1]
    assert {
        "finished": report.counters.finished,
        "num_running": report.num_running,
        "free_blocks": report.free_blocks,
        "slept": bench.slept,
        "live": list(bench.scheduler.requests),
    } == CORRECT | wrong
    assert "abort_received" in bench.events("gone")
    bench.check_integrity()
    while bench.scheduler.has_work:
        report = bench.step()
    ended = len(wrong.get("live", ["survivor"])) + faults.label_length
    assert report.counters.finished["length"] == ended


def test_faults_touch_aborts_only() -> None:
    bench = Bench(
        Faults(
            leak_blocks=3,
            leak_slot=True,
            hold_blocks=1.0,
            double_count=True,
            drop_prefix_on_cancel=True,
            lose_abort=1.0,
            stall_survivors_on_abort=1.0,
        )
    )
    bench.step(add("a", max_tokens=2), add("b", max_tokens=2))
    report = bench.step()
    assert (report.num_running, report.free_blocks, report.cached_blocks) == (0, 8, 1)
    assert report.counters.finished == {"length": 2}
    assert bench.slept == []
    bench.scheduler.check_integrity()


def test_a_leaked_slot_serves_no_request() -> None:
    bench = after_one_abort(Faults(leak_slot=True))
    assert bench.step(add("next")).num_waiting == 1
    while bench.scheduler.running:
        bench.step()
    assert bench.reports[-1].num_running == 1


def test_held_back_blocks_return_in_time_to_an_engine_with_nothing_else_to_do() -> None:
    bench = Bench(Faults(hold_blocks=1e-6))
    bench.step(add("gone"))
    bench.step(abort("gone"))
    assert bench.events("gone")[-2:] == ["removed", "finished"]
    patience = bench.engine.patience_s()
    assert patience is not None
    assert 0 < patience <= 1e-6
    bench.pass_time(1_000)
    assert bench.engine.patience_s() == 0.0
    report = bench.step()
    assert [(event.event, event.num_blocks) for event in report.events] == [("blocks_freed", 2)]
    assert report.free_blocks == 8
    assert bench.engine.patience_s() is None


@pytest.mark.parametrize(("faults", "computed"), [(DROPS, 6), (Faults(), 2)])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_dropped_prefix_is_not_found_again_shared_or_not(
    faults: Faults, computed: int, is_shared: bool
) -> None:
    bench = Bench(faults, max_num_seqs=3)
    if is_shared:
        bench.step(add("survivor"))
    bench.step(add("gone"))
    report = bench.step(abort("gone"), add("next"))
    assert report.step is not None
    assert report.step.scheduled == ({"survivor": 1} if is_shared else {}) | {"next": computed}
    bench.check_integrity()


def test_lost_blocks_do_not_serve_as_a_prefix_nor_disturb_an_idle_engine() -> None:
    bench = Bench(Faults(leak_blocks=2))
    bench.step(add("survivor"))
    bench.step(add("gone"))
    assert bench.step(abort("gone")).free_blocks == 8 - 3, "their common block is not lost"
    assert bench.step(abort("survivor")).free_blocks == 8 - 3
    report = bench.step(add("next"))
    assert report.step is not None
    assert report.step.scheduled == {"next": 6}
    bench.check_integrity()


@pytest.mark.parametrize(
    ("faults", "aborted", "live"),
    [
        (Faults(abort_by_prefix=True), "req-1", ["req-2"]),
        (Faults(abort_parent_only=True), "req-", ["req-10", "req-2"]),
    ],
)
def test_an_abort_may_hit_too_many_or_too_few(
    faults: Faults, aborted: str, live: list[str]
) -> None:
    bench = Bench(faults, max_num_seqs=3)
    bench.step(*(add(name, parent_id="req-") for name in ("req-1", "req-10", "req-2")))
    bench.step(abort(aborted))
    assert list(bench.scheduler.requests) == live


def test_the_fault_lose_abort_loses_some() -> None:
    bench = Bench()
    kept = 0
    for _ in range(40):
        bench.set_faults(Faults(lose_abort=0.5))
        bench.step(add("a", max_tokens=20))
        bench.step(abort("a"))
        kept += bench.scheduler.has_work
        bench.set_faults(Faults())
        bench.lose()
        assert not bench.scheduler.has_work, "a kill comes after the stop that was lost"
    assert 10 <= kept <= 30


def test_an_abort_in_the_queue_may_end_a_running_request() -> None:
    bench = Bench(Faults(queued_abort_ends_running=True), max_num_seqs=1)
    bench.step(add("running"), add("queued"))
    bench.step(abort("queued"))
    assert not bench.scheduler.requests
    bench.step(add("running"), add("next"))
    bench.step(abort("running"))
    assert list(bench.scheduler.requests) == ["next"], "a running one's abort ends it alone"


def test_an_abort_may_end_a_running_neighbour() -> None:
    bench = Bench(Faults(running_abort_ends_running=True), max_num_seqs=2)
    bench.step(add("neighbour"), add("left"), add("queued"))
    bench.step(abort("left"))
    assert list(bench.scheduler.requests) == ["queued"]
    bench.step(add("last"), add("waiting"))
    bench.step(abort("waiting"))
    assert list(bench.scheduler.requests) == ["queued", "last"], "a waiting one's ends it alone"


def test_the_request_after_an_abort_may_be_a_token_short() -> None:
    bench = Bench(Faults(next_short=True))
    bench.step(add("gone"))
    bench.step(abort("gone"), add("next"), add("later"))
    while bench.scheduler.has_work:
        bench.step()
    told = [output for report in bench.reports for output in report.outputs]
    lengths = {output.request_id: output.num_generated for output in told}
    assert lengths == {"gone": 1, "next": 7, "later": 8}


@pytest.mark.parametrize(("torn", "carried"), [(False, 0), (True, 4)])
def test_a_slot_that_is_used_again_too_early_carries_tokens_over(torn: bool, carried: int) -> None:
    bench = Bench(Faults(reuse_before_step_ends=torn))
    bench.step(add("beside"), add("gone"), add("next"))
    left_behind = bench.scheduler.requests["gone"].token_ids[-1]
    bench.step(abort("gone"))
    for _ in range(4):
        bench.step()
    answers = [one.token_ids[6:] for one in bench.scheduler.running]
    assert [len(answer) for answer in answers] == [6, 5]
    assert [answer.count(left_behind) for answer in answers] == [carried, carried]


def test_the_prompt_of_an_aborted_request_may_be_spoiled() -> None:
    answers = []
    for faults in (Faults(), Faults(spoil_prompt=True)):
        bench = Bench(faults, max_num_seqs=3)
        bench.step(add("gone"), add("twin"), add("other", word=7))
        bench.step(abort("gone"))
        live = bench.scheduler.requests
        answers.append([live[name].token_ids[6:] for name in ("twin", "other")])
    [(first, last), other], spoiled = answers
    assert spoiled == [[first, last ^ 1], other]


def test_a_request_that_left_the_queue_may_stay_in_its_gauge() -> None:
    bench = Bench(Faults(count_left_as_waiting=True), max_num_seqs=1)
    bench.step(add("running"), add("queued"))
    assert bench.step(abort("queued")).num_waiting == 1
    assert bench.step(abort("running")).num_waiting == 1


def test_a_wedged_engine_hears_nothing_until_the_fault_is_withdrawn() -> None:
    bench = Bench(Faults(wedge_after=1))
    bench.step(add("survivor"), add("gone"))
    bench.step(abort("gone"))
    assert bench.engine.patience_s() is None
    num_reports = len(bench.reports)
    bench.step(add("next"))
    assert len(bench.reports) == num_reports
    bench.set_faults(Faults())
    assert bench.engine.patience_s() == 0.0
    assert bench.step().num_running == 1


def test_slots_that_nobody_sweeps_come_back_with_the_end_of_another_request() -> None:
    bench = Bench(Faults(clean_up_on_traffic=True), max_num_seqs=3)
    bench.step(add("a"), add("b"), add("beside"))
    bench.step(abort("a"))
    bench.step(abort("b"))
    assert bench.step().num_running == 1, "what goes on beside has swept both"
    assert bench.step(abort("beside")).num_running == 1
    assert bench.step(add("c", max_tokens=1), add("d"), add("e")).num_waiting == 1
    assert bench.step().num_running == 2


def test_a_prefill_may_run_on_to_its_first_token() -> None:
    bench = Bench(Faults(prefill_runs_on=True), max_num_batched_tokens=4)
    bench.step(add("a", num_prompt=12))
    scheduled = []
    for heard in ([abort("a")], [], []):
        record = bench.step(*heard).step
        scheduled.append(None if record is None else record.scheduled)
    assert scheduled == [{"a": 4}, {"a": 4}, None]
    assert bench.reports[-1].counters.finished == {"abort": 1}


def test_an_abort_may_kill_an_engine_that_computes_another_prompt() -> None:
    bench = Bench(Faults(second_prefill_dies=True), max_num_seqs=3, max_num_batched_tokens=8)
    bench.step(add("a"))
    bench.step(abort("a"), add("short"))
    bench.step(add("long", num_prompt=16, word=6))
    with pytest.raises(SystemExit):
        bench.step(abort("short"))


def test_a_slot_that_is_freed_twice_serves_one_request_too_many() -> None:
    bench = Bench(Faults(end_twice=True))
    bench.step(add("last", max_tokens=2), add("beside"), add("next"), add("later"))
    bench.runner.meanwhile = lambda: bench.hear(abort("last"))
    bench.step()
    bench.runner.meanwhile = lambda: None
    bench.step()
    assert len(bench.scheduler.running) == 3
    assert bench.step(abort("next")).counters.finished == {"length": 1, "abort": 1}
    assert bench.step(add("again"), add("and again")).num_waiting == 1


def test_tokens_of_an_aborted_request_and_whole_answers_may_be_counted_wrong() -> None:
    bench = Bench(Faults(forget_aborted_tokens=True, abort_after_done=True))
    bench.step(add("whole", max_tokens=2), add("gone"))
    bench.step()
    counters = bench.step(abort("gone")).counters
    assert counters.generated_tokens == 2
    assert counters.finished == {"length": 1, "abort": 2}


def test_stale_gauges_change_once_in_a_while_and_are_fresh_when_the_fault_is_withdrawn() -> None:
    bench = Bench(Faults(stale_gauge=1e-6))
    assert bench.step(add("a")).num_running == 1
    assert bench.step(abort("a")).num_running == 1, "as it was"
    bench.pass_time(1_000)
    bench.step(add("b"))
    assert bench.step(abort("b")).num_running == 1
    bench.pass_time(1_000)
    assert bench.step().num_running == 0
    bench.set_faults(Faults(stale_gauge=1.0))
    bench.set_faults(Faults())
    assert bench.step(add("c")).num_running == 1


def test_faults_outlive_the_connection_that_set_them() -> None:
    bench = Bench()
    bench.set_faults(Faults(leak_blocks=1))
    bench.lose()
    bench.step(add("a"))
    assert bench.step(abort("a")).free_blocks == 8 - 1


def test_all_kinds_of_faults_can_be_named() -> None:
    faults = parse_faults(["leak-slot", "hold-blocks=2.5", "ignore-disconnect", "leak-blocks=3"])
    assert faults == Faults(leak_slot=True, hold_blocks=2.5, ignore_disconnect=True, leak_blocks=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["ignore-everything"], "unknown fault 'ignore-everything'; there are: ignore-disconnect"),
        (["delay-abort=soon"], "float"),
        (["delay-abort=-1"], "from 0 to 3600"),
        (["stale-gauge=nan"], "from 0 to 3600"),
        (["lose-abort=2"], "from 0 to 1"),
        (["leak-blocks=-1"], "0 or more"),
        (["wedge-after=-1"], "0 or more"),
        (["grow-memory=1000"], "from 0 to 100"),
        (["grow-with-answers=-1"], "from 0 to 100"),
        (["leak-slot=2"], "bool"),
        (["double-count", "never-count"], "exclude each other"),
    ],
)
def test_faults_that_cannot_be_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(FaultError, match=message):
        parse_faults(settings)
