"""Slots, steps and the queue, in numbers of nanoseconds and without a clock."""

from harness.upstream.scheduler import ServingPace, UpstreamScheduler, Work

STEP_NS = 20_000_000


def work(tokens: int = 5, prefill_ns: int = 0, halts_at: int | None = None) -> Work:
    return Work(prefill_ns=prefill_ns, tokens=tokens, halts_at=halts_at)


def scheduler(slots: int) -> UpstreamScheduler:
    return UpstreamScheduler(ServingPace(slots=slots, step_ms=20))


def test_an_idle_server_begins_a_step_at_an_arrival_and_one_that_runs_does_not() -> None:
    one, first, second = scheduler(2), work(), work()
    assert one.submit(first, 100).admitted == [first]
    assert one.due_ns == 100 + STEP_NS
    assert one.submit(second, 150).admitted == []
    changes = one.step(100 + STEP_NS)
    assert (changes.made, changes.admitted) == ([first], [second])
    assert second.slot_ns == 100 + STEP_NS


def test_slots_are_given_in_the_order_of_arrival_and_no_more_than_there_are() -> None:
    one, works = scheduler(2), [work(tokens=1) for _ in range(5)]
    admitted = [one.submit(each, 0).admitted for each in works]
    assert admitted == [[works[0]], [], [], [], []]
    assert one.step(STEP_NS).admitted == works[1:3]
    assert (one.num_running, one.num_waiting) == (2, 2)
    assert one.step(2 * STEP_NS) == ([*works[1:3]], [], [*works[3:]])
    assert one.step(3 * STEP_NS).made == works[3:]
    assert (one.num_running, one.num_waiting, one.due_ns) == (0, 0, None)


def test_the_first_token_comes_with_the_first_step_that_ends_after_the_prefill() -> None:
    one, slow = scheduler(1), work(prefill_ns=2 * STEP_NS + 1)
    one.submit(slow, 0)
    made = [bool(one.step(n * STEP_NS).made) for n in range(1, 5)]
    assert made == [False, False, True, True]


def test_a_slot_that_is_left_is_given_on_at_the_end_of_the_step() -> None:
    one, leaves, queued, waits = scheduler(1), work(), work(), work()
    for each in (leaves, queued, waits):
        one.submit(each, 0)
    one.leave(leaves)
    one.leave(queued)
    one.leave(queued)
    assert (one.num_running, one.num_waiting) == (0, 1)
    assert one.step(STEP_NS) == ([], [], [waits])


def test_a_halted_work_keeps_its_slot_and_makes_nothing() -> None:
    one, halts, waits = scheduler(1), work(halts_at=1), work()
    one.submit(halts, 0)
    one.submit(waits, 0)
    assert one.step(STEP_NS) == ([halts], [], [])
    assert one.step(2 * STEP_NS) == ([], [halts], [])
    assert (halts.made, one.num_waiting) == (1, 1)


def test_a_step_that_ends_a_little_late_shifts_no_other() -> None:
    one, runs = scheduler(1), work()
    one.submit(runs, 0)
    one.step(STEP_NS + 900)
    assert one.due_ns == 2 * STEP_NS
    one.step(10 * STEP_NS)
    assert one.due_ns == 11 * STEP_NS, "steps that were missed are not made up for"
    assert runs.made == 2
