"""Which request runs where and when: decisions alone, with made-up times."""

from typing import Any

import pytest
from grpc import StatusCode
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reference_engine.triton.model import InferenceError
from reference_engine.triton.queue import (
    LOOK_US,
    BatchSizes,
    IllegalPhaseChangeError,
    InstanceBatch,
    ModelScheduler,
    Queue,
    QueuedRequest,
    QueuePhase,
    QueuePolicy,
)
from reference_engine.triton.sequences import Sequences

IDLE_US = 1_000


def requests(scheduler: ModelScheduler, number: int, now_us: int = 0, **fields: Any) -> Any:
    added = [QueuedRequest(payload=index, **fields) for index in range(number)]
    for request in added:
        scheduler.add(request, now_us)
    return added


def runs(scheduler: ModelScheduler, now_us: int = 0) -> list[list[Any]]:
    """The payloads of each batch that starts; None for an empty place."""
    batches = scheduler.next_batches(now_us)
    return [[None if r is None else r.payload for r in batch.requests] for batch in batches]


def ends(scheduler: ModelScheduler) -> list[tuple[Any, StatusCode]]:
    return [(ended.request.payload, ended.error.code) for ended in scheduler.take_ended()]


class TestBatches:
    def test_without_a_batcher_each_request_is_a_batch(self) -> None:
        queue = Queue(2)
        requests(queue, 3)
        assert runs(queue) == [[0], [1]]
        queue.finish(1)
        assert runs(queue) == [[2]]

    def test_a_batch_takes_what_waits_up_to_the_largest_size(self) -> None:
        queue = Queue(1, BatchSizes(4))
        requests(queue, 3, size=2)
        assert runs(queue) == [[0, 1]]
        queue.finish(0)
        assert runs(queue) == [[2]]

    def test_shapes_do_not_mix(self) -> None:
        queue = Queue(2, BatchSizes(4))
        for index, shape in enumerate("aab"):
            queue.add(QueuedRequest(payload=index, shape=shape), 0)
        assert runs(queue) == [[0, 1], [2]]

    def test_a_preferred_size_does_not_wait(self) -> None:
        queue = Queue(1, BatchSizes(8, (2, 4), delay_us=100))
        requests(queue, 3)
        assert runs(queue) == [[0, 1]]
        queue.finish(0)
        assert (runs(queue, 99), queue.wake_us(99)) == ([], 100)
        assert runs(queue, 100) == [[2]]

    def test_priorities_go_first(self) -> None:
        queue = Queue(1, BatchSizes(3), levels=2, default_level=2)
        requests(queue, 1, priority=0)
        requests(queue, 1, priority=2)
        queue.add(QueuedRequest(payload="urgent", priority=1), 0)
        queue.add(QueuedRequest(payload="unknown level", priority=9), 0)
        assert runs(queue) == [["urgent", 0, 0]]


class TestQueuePolicy:
    def test_a_timed_out_request_is_rejected_at_once(self) -> None:
        queue = Queue(1, BatchSizes(1), policy=QueuePolicy(100, allows_override=True))
        requests(queue, 2)
        queue.add(QueuedRequest(payload="short", timeout_us=10), 0)
        queue.add(QueuedRequest(payload="long", timeout_us=1000), 0)  # only shorter ones count
        assert (runs(queue), queue.wake_us(0)) == ([[0]], 10)
        runs(queue, 10)
        assert ends(queue) == [("short", StatusCode.UNAVAILABLE)]
        runs(queue, 100)
        assert ends(queue) == [(1, StatusCode.UNAVAILABLE), ("long", StatusCode.UNAVAILABLE)]

    def test_or_goes_behind_all_others(self) -> None:
        queue = Queue(1, BatchSizes(1), policy=QueuePolicy(100, delays=True))
        requests(queue, 2)
        runs(queue)
        queue.add(QueuedRequest(payload="later"), 50)
        queue.finish(0)
        assert runs(queue, 120) == [["later"]]
        queue.finish(0)
        assert runs(queue, 120) == [[1]]

    def test_the_faithful_manner_looks_every_half_second(self) -> None:
        policy = QueuePolicy(LOOK_US * 9, allows_override=True)
        queue = Queue(1, BatchSizes(1), policy=policy, is_faithful=True)
        requests(queue, 1)
        runs(queue)
        queue.add(QueuedRequest(payload="waits"), 0)
        queue.add(QueuedRequest(payload="short", timeout_us=10), 100)
        assert (runs(queue, 1000), ends(queue), queue.wake_us(1000)) == ([], [], LOOK_US)
        runs(queue, LOOK_US)
        assert ends(queue) == [("short", StatusCode.UNAVAILABLE)]
        assert queue.wake_us(LOOK_US) == 2 * LOOK_US

    def test_a_full_queue_refuses(self) -> None:
        queue = Queue(1, BatchSizes(1), policy=QueuePolicy(largest=1))
        requests(queue, 1)
        with pytest.raises(InferenceError, match="Exceeds maximum queue size"):
            queue.add(QueuedRequest(), 0)

    def test_each_level_may_have_its_own(self) -> None:
        own = {1: QueuePolicy(largest=1)}
        queue = Queue(1, BatchSizes(1), levels=2, default_level=2, level_policies=own)
        requests(queue, 3)
        requests(queue, 1, priority=1)
        with pytest.raises(InferenceError):
            queue.add(QueuedRequest(priority=1), 0)


class TestInstances:
    def test_a_lost_instance_runs_nothing_until_it_is_back(self) -> None:
        queue = Queue(1)
        first, _ = requests(queue, 2)
        runs(queue)
        queue.lose(0)
        assert (first.phase, runs(queue)) == (QueuePhase.OVER, [])
        queue.restore(0)
        assert runs(queue) == [[1]]

    def test_what_cannot_be_raises(self) -> None:
        queue = Queue(1)
        with pytest.raises(IllegalPhaseChangeError):
            queue.finish(0)
        with pytest.raises(IllegalPhaseChangeError):
            queue.restore(0)
        request = QueuedRequest(phase=QueuePhase.OVER)
        with pytest.raises(IllegalPhaseChangeError):
            request.move(QueuePhase.RUNNING)

    def test_its_sequences_are_over(self) -> None:
        sequences = Sequences(2, 1, model="m", idle_us=IDLE_US)
        for name in ("a", "b"):
            for number in range(2):
                starts = number == 0
                request = QueuedRequest(payload=f"{name}{number}", sequence=name, starts=starts)
                sequences.add(request, 0)
        assert runs(sequences) == [["a0"], ["b0"]]
        sequences.lose(0)
        assert ends(sequences) == [("a1", StatusCode.UNAVAILABLE)]
        sequences.finish(1)
        assert runs(sequences) == [["b1"]]


class TestSequences:
    def sequences(self, *, slots: int = 2, sizes: BatchSizes | None = None) -> Sequences:
        return Sequences(1, slots, sizes, model="m", idle_us=IDLE_US)

    def add(self, sequences: Sequences, name: str, now_us: int = 0, **flags: bool) -> QueuedRequest:
        request = QueuedRequest(payload=name, sequence=name[0])
        request.starts, request.ends = flags.get("starts", False), flags.get("ends", False)
        sequences.add(request, now_us)
        return request

    def test_a_place_of_the_direct_strategy_belongs_to_its_sequence(self) -> None:
        sequences = self.sequences(slots=3)
        for name in ("a0", "b0", "c0"):
            self.add(sequences, name, starts=True)
        assert runs(sequences) == [["a0", "b0", "c0"]]
        sequences.finish(0)
        self.add(sequences, "b1")
        assert runs(sequences) == [[None, "b1"]]

    def test_oldest_takes_the_oldest_of_the_candidates(self) -> None:
        sequences = self.sequences(slots=3, sizes=BatchSizes(2))
        for at, name in enumerate(("a0", "b0", "c0")):
            self.add(sequences, name, at, starts=True)
        self.add(sequences, "a1", 3)
        assert runs(sequences) == [["a0", "b0"]]
        sequences.finish(0)
        assert runs(sequences) == [["c0", "a1"]]

    def test_a_sequence_without_a_slot_waits_for_the_end_of_another(self) -> None:
        sequences = self.sequences(slots=1)
        self.add(sequences, "a0", starts=True)
        self.add(sequences, "b0", starts=True)
        assert runs(sequences) == [["a0"]]
        sequences.finish(0)
        assert runs(sequences) == []
        self.add(sequences, "a1", ends=True)
        assert runs(sequences) == [["a1"]]
        sequences.finish(0)
        assert runs(sequences) == [["b0"]]

    def test_an_idle_sequence_gives_up_its_slot(self) -> None:
        sequences = self.sequences(slots=1)
        self.add(sequences, "a0", starts=True)
        self.add(sequences, "b0", starts=True)
        runs(sequences)
        sequences.finish(0)
        assert sequences.wake_us(0) == IDLE_US
        assert runs(sequences, IDLE_US) == [["b0"]]
        with pytest.raises(InferenceError, match="must specify the START flag"):
            self.add(sequences, "a1", IDLE_US)

    def test_a_sequence_with_a_request_is_not_idle(self) -> None:
        sequences = self.sequences(slots=1)
        self.add(sequences, "a0", starts=True)
        assert runs(sequences) == [["a0"]]
        assert runs(sequences, 3 * IDLE_US) == []
        sequences.finish(0)
        self.add(sequences, "a1", 4 * IDLE_US - 1)
        assert runs(sequences, 4 * IDLE_US) == [["a1"]]

    def test_a_batch_size_over_one_is_refused(self) -> None:
        with pytest.raises(InferenceError, match="must specify batch-size 1"):
            self.sequences().add(QueuedRequest(size=2, sequence="a", starts=True), 0)


class Life(RuleBasedStateMachine):
    """Any order of events: no request runs twice or gets lost, a sequence keeps its order."""

    scheduler: ModelScheduler

    def __init__(self) -> None:
        super().__init__()
        self.now_us = 0
        self.requests: list[QueuedRequest] = []
        self.running: dict[int, InstanceBatch] = {}
        self.lost: set[int] = set()
        self.order: dict[QueuedRequest, int] = {}  # the sequence, by number: an id may come again
        self.last_run: dict[int, int] = {}

    @rule(sequence=st.integers(1, 4), starts=st.booleans(), ends=st.booleans())
    def add(self, sequence: int, starts: bool, ends: bool) -> None:
        request = QueuedRequest(
            payload=len(self.requests), sequence=sequence, starts=starts, ends=ends
        )
        earlier = [r for r in reversed(self.requests) if r.sequence == sequence]
        try:
            self.scheduler.add(request, self.now_us)
        except InferenceError:
            return
        goes_on = earlier and (not starts or (self.scheduler._is_faithful and not earlier[0].ends))
        self.order[request] = self.order[earlier[0]] if goes_on else len(self.requests)
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.scheduler.cancel(data.draw(st.sampled_from(self.requests)))

    @rule(passed_us=st.integers(0, IDLE_US))
    def run(self, passed_us: int) -> None:
        self.now_us += passed_us
        for batch in self.scheduler.next_batches(self.now_us):
            assert batch.instance not in self.running
            assert batch.instance not in self.lost
            self.running[batch.instance] = batch
            for request in filter(None, batch.requests):
                if isinstance(self.scheduler, Sequences):
                    number = self.order[request]
                    assert request.payload > self.last_run.get(number, -1)
                    self.last_run[number] = request.payload
        for ended in self.scheduler.take_ended():
            assert ended.request.phase is QueuePhase.OVER

    @precondition(lambda self: self.running)
    @rule(data=st.data(), dies=st.booleans())
    def leave(self, data: st.DataObject, dies: bool) -> None:
        instance = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[instance]
        if dies:
            self.scheduler.lose(instance)
            self.lost.add(instance)
        else:
            self.scheduler.finish(instance)

    @precondition(lambda self: self.lost)
    @rule()
    def come_back(self) -> None:
        self.scheduler.restore(self.lost.pop())

    @invariant()
    def the_books_agree(self) -> None:
        phases = [request.phase for request in self.requests]
        assert self.scheduler.num_waiting == phases.count(QueuePhase.WAITING)
        assert self.scheduler.num_running == phases.count(QueuePhase.RUNNING)
        if not self.scheduler._is_faithful:
            assert not any(r.is_cancelled and r.phase is QueuePhase.WAITING for r in self.requests)

    def teardown(self) -> None:
        """Everything ends, if every instance comes back and time passes."""
        for instance in self.lost:
            self.scheduler.restore(instance)
        for instance in self.running:
            self.scheduler.finish(instance)
        for _ in range(2 * len(self.requests) + 10):
            self.now_us += 10 * IDLE_US
            for batch in self.scheduler.next_batches(self.now_us):
                self.scheduler.finish(batch.instance)
        assert (self.scheduler.num_waiting, self.scheduler.num_running) == (0, 0)
        if isinstance(self.scheduler, Sequences):
            assert not self.scheduler._all()


def life_of(make: Any) -> Any:
    class OneLife(Life):
        def __init__(self) -> None:
            super().__init__()
            self.scheduler = make()

    OneLife.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    return OneLife.TestCase


def _sequences(sizes: BatchSizes | None, *, is_faithful: bool) -> Any:
    return lambda: Sequences(2, 2, sizes, model="m", idle_us=IDLE_US, is_faithful=is_faithful)


TestQueueLife = life_of(lambda: Queue(2, BatchSizes(2), policy=QueuePolicy(3 * IDLE_US)))
TestFaithfulQueueLife = life_of(lambda: Queue(2, BatchSizes(2), is_faithful=True))
TestDirectLife = life_of(_sequences(None, is_faithful=False))
TestFaithfulDirectLife = life_of(_sequences(None, is_faithful=True))
TestOldestLife = life_of(_sequences(BatchSizes(2), is_faithful=False))
TestFaithfulOldestLife = life_of(_sequences(BatchSizes(2), is_faithful=True))
