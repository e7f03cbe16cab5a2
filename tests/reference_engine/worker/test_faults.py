"""Each fault of the worker: it does what its name says, to aborts only, and nothing else."""

import threading

import pytest

from reference_engine.config import EngineConfig
from reference_engine.core.request import Sampling
from reference_engine.faults import FaultError, Faults, parse_faults
from reference_engine.protocol import AddRequest, StepReport
from reference_engine.worker.engine import Families
from reference_engine.worker.inbox import ConnectionLost, Heard
from tests.reference_engine.worker.test_engine import Bench, abort, add

DROPS = Faults(drop_prefix_on_cancel=True)


def child(request_id: str, parent_id: str) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=[5] * 6,
        sampling=Sampling(max_tokens=8),
        parent_id=parent_id,
    )


def after_one_abort(faults: Faults) -> tuple[Bench, StepReport]:
    """A survivor and one that is aborted."""
    bench = Bench(faults)
    bench.step(add("survivor"), add("gone"))
    return bench, bench.step(abort("gone"))


def test_a_correct_engine_is_the_control() -> None:
    bench, report = after_one_abort(Faults())
    assert report.counters.finished == {"abort": 1}
    assert report.num_running == 1
    assert bench.slept == []
    bench.step(abort("survivor"))
    assert (bench.reports[-1].num_running, bench.reports[-1].free_blocks) == (0, 8)


def test_double_count() -> None:
    _, report = after_one_abort(Faults(double_count=True))
    assert report.counters.finished == {"abort": 2}


def test_never_count() -> None:
    bench, report = after_one_abort(Faults(never_count=True))
    assert report.counters.finished == {"abort": 0}
    while bench.scheduler.has_work:
        report = bench.step()
    assert report.counters.finished == {"abort": 0, "length": 1}, "natural ends are counted"


def test_leak_slot() -> None:
    bench, report = after_one_abort(Faults(leak_slot=True))
    assert report.num_running == 2, "the gauge shows a slot that no request uses"
    report = bench.step(add("next"))
    assert report.num_waiting == 1, "and none can"
    while bench.scheduler.running:
        report = bench.step()
    assert report.num_running == 1
    bench.check_integrity()


def test_hold_blocks() -> None:
    bench, report = after_one_abort(Faults(hold_blocks=1e-6))
    assert [event.event for event in report.events][-2:] == ["removed", "finished"]
    assert report.free_blocks == 4, "two are the survivor's, two are held back"
    bench.check_integrity()
    bench.pass_time(1_000)
    report = bench.step()
    freed = next(event for event in report.events if event.event == "blocks_freed")
    assert (freed.request_id, freed.num_blocks) == ("gone", 2)
    assert report.free_blocks == 6


def test_held_back_blocks_return_to_an_engine_that_has_nothing_else_to_do() -> None:
    bench = Bench(Faults(hold_blocks=1e-6))
    bench.step(add("gone"))
    bench.step(abort("gone"))
    patience = bench.engine.patience_s()
    assert patience is not None
    assert 0 < patience <= 1e-6
    bench.pass_time(1_000)
    assert bench.engine.patience_s() == 0.0
    assert bench.step().free_blocks == 8
    assert bench.engine.patience_s() is None


@pytest.mark.parametrize(("faults", "computed"), [(DROPS, 6), (Faults(), 2)])
def test_drop_prefix_on_cancel(faults: Faults, computed: int) -> None:
    bench = Bench(faults)
    bench.step(add("gone"))
    report = bench.step(abort("gone"), add("next"))
    assert report.step is not None
    assert report.step.scheduled == {"next": computed}


@pytest.mark.parametrize(("faults", "computed"), [(DROPS, 6), (Faults(), 2)])
def test_drop_prefix_takes_it_from_requests_that_share_it(faults: Faults, computed: int) -> None:
    bench = Bench(faults, max_num_seqs=3)
    bench.step(add("survivor"))
    bench.step(add("gone"))
    report = bench.step(abort("gone"), add("next"))
    assert report.step is not None
    assert report.step.scheduled == {"survivor": 1, "next": computed}
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


def test_die_on_abort() -> None:
    bench = Bench(Faults(die_on_abort=True))
    bench.step(add("gone"))
    with pytest.raises(SystemExit):
        bench.step(abort("gone"))


def test_stall_survivors_on_abort() -> None:
    bench, _ = after_one_abort(Faults(stall_survivors_on_abort=0.25))
    assert bench.slept == [0.25]


def test_abort_by_prefix() -> None:
    bench = Bench(Faults(abort_by_prefix=True), max_num_seqs=3)
    bench.step(add("req-1"), add("req-10"), add("req-2"))
    bench.step(abort("req-1"))
    assert list(bench.scheduler.requests) == ["req-2"]


def test_stale_gauge() -> None:
    bench = Bench(Faults(stale_gauge=1e-6))
    assert bench.step(add("a")).num_running == 1
    assert bench.step(abort("a")).num_running == 1, "as it was"
    bench.pass_time(1_000)
    bench.step(add("b"))
    report = bench.step(abort("b"))
    assert report.num_running == 1
    bench.pass_time(1_000)
    assert bench.step().num_running == 0


def test_gauges_are_fresh_once_stale_gauge_is_withdrawn() -> None:
    bench = Bench(Faults(stale_gauge=1.0))
    bench.step(add("a"))
    bench.set_faults(Faults())
    assert bench.step(abort("a")).num_running == 0


def test_a_parents_abort_ends_all_its_children() -> None:
    bench = Bench(Faults(), max_num_seqs=2)
    bench.step(child("p-0", "p"), child("p-1", "p"), child("p-2", "p"), add("other"))
    bench.step(abort("p"))
    assert list(bench.scheduler.requests) == ["other"], "running or waiting"
    bench.check_integrity()


def test_abort_parent_only() -> None:
    bench = Bench(Faults(abort_parent_only=True))
    bench.step(child("p-0", "p"), child("p-1", "p"))
    bench.step(abort("p"))
    assert list(bench.scheduler.requests) == ["p-1"]


def test_a_parents_record_goes_with_its_last_child() -> None:
    families = Families()
    for name in ("p-0", "p-1"):
        families.add("p", name)
    assert families.members("p") == ["p-0", "p-1"]
    families.ended("p-0")
    assert families.members("p") == ["p-1"]
    families.ended("p-1")
    families.ended("p-1")
    assert families.members("p") == ["p"], "a name like any other"
    assert len(families) == 0


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


def test_all_faults_can_be_named() -> None:
    faults = parse_faults(["leak-slot", "hold-blocks=2.5", "ignore-disconnect-unary"])
    assert faults == Faults(leak_slot=True, hold_blocks=2.5, ignore_disconnect_unary=True)


@pytest.mark.parametrize(
    "settings",
    [["double-count", "never-count"], ["hold-blocks=-1"], ["stale-gauge=nan"], ["leak-slot=2"]],
)
def test_faults_that_make_no_sense_are_refused(settings: list[str]) -> None:
    with pytest.raises(FaultError):
        parse_faults(settings)


def test_faults_outlive_the_connection_that_set_them() -> None:
    bench = Bench(Faults())
    bench.set_faults(Faults(leak_blocks=1))
    bench.engine.step(bench.now(), [Heard(bench.now(), ConnectionLost(threading.Event()))])
    bench.step(add("a"))
    assert bench.step(abort("a")).free_blocks == 8 - 1


def test_a_block_leak_larger_than_the_table_takes_what_is_there() -> None:
    bench, report = after_one_abort(Faults(leak_blocks=100))
    assert report.free_blocks == EngineConfig(num_blocks=8, max_model_len=32).num_blocks - 4
    bench.check_integrity()


def test_settings_become_faults() -> None:
    faults = parse_faults(["ignore-disconnect", "delay-abort=0.5", "lose-abort=0.02"])
    assert faults == Faults(ignore_disconnect=True, delay_abort=0.5, lose_abort=0.02)
    assert parse_faults(["leak-blocks=3"]).leak_blocks == 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("ignore-everything", "unknown fault 'ignore-everything'; there are: ignore-disconnect"),
        ("delay-abort=soon", "float"),
        ("delay-abort=-1", "from 0 to 3600"),
        ("delay-abort=inf", "from 0 to 3600"),
        ("lose-abort=2", "from 0 to 1"),
        ("leak-blocks=-1", "0 or more"),
        ("leak-blocks=1.5", "int"),
    ],
)
def test_faults_that_cannot_be_are_refused(setting: str, message: str) -> None:
    with pytest.raises(FaultError, match=message):
        parse_faults([setting])
