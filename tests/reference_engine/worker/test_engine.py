"""The step loop with a made-up model and a counted clock: its log and its timing."""

from collections import Counter
from collections.abc import Callable
from itertools import count
from random import Random

import pytest

from reference_engine.context import CancelReason, Signal
from reference_engine.core.request import FinishReason, Phase
from reference_engine.core.step import StepPlan
from reference_engine.faults import Faults
from reference_engine.model.runners import OutOfMemoryError
from reference_engine.model.tokenizer import EOS_TOKEN_ID, FIRST_WORD, WordTokenizer
from reference_engine.protocol import AddRequest, Ending, SetFaults
from reference_engine.worker.inbox import Heard, Inbox, Requests
from tests.reference_engine.stepped_engine import Bench, abort, add


def test_a_request_from_admission_to_its_natural_end() -> None:
    bench = Bench()
    bench.step(add("a", max_tokens=2))
    report = bench.step()
    expected = ["admitted", "first_token", "removed", "blocks_freed", "finished"]
    assert bench.events("a") == expected
    assert [output.finish_reason for output in report.outputs] == [None, "length"]
    assert report.outputs[-1].num_generated == 2
    assert report.free_blocks == 8


def test_an_abort_is_applied_at_the_boundary_and_the_slot_refilled_in_that_step() -> None:
    bench = Bench(max_num_seqs=1)
    report = bench.step(add("a"), add("b"), add("c"))
    assert report.step is not None
    assert (report.step.num_running, report.step.num_waiting, report.step.free_blocks) == (1, 2, 6)
    report = bench.step(abort("a"))
    stages = ["abort_received", "removed", "blocks_freed", "finished"]
    assert [event.event for event in report.events] == [*stages, "admitted", "first_token"]
    heard, removed, freed, finished, admitted, _ = report.events
    assert report.step is not None
    assert heard.t_ns < report.step.started_ns < removed.t_ns < freed.t_ns < report.step.ended_ns
    assert {event.step for event in report.events} == {2}
    assert (removed.num_generated, removed.num_blocks, freed.num_blocks) == (1, 2, 2)
    assert (freed.reason, finished.reason, finished.num_blocks) == ("user_disconnect", "abort", 0)
    assert admitted.request_id == "b"
    assert report.step.scheduled == {"b": 2}, "the cancelled one's prompt block was still there"
    report = bench.step(abort("c"))
    freed = next(event for event in report.events if event.event == "blocks_freed")
    assert (freed.request_id, freed.num_blocks) == ("c", 0), "it waited"
    bench.step(abort("b"))
    report = bench.step(*(abort(name) for name in ("a", "c", "never existed")))
    assert (report.events, report.step) == ([], None)


def test_the_log_and_the_account_of_one_that_waited_was_preempted_and_resumed() -> None:
    bench = Bench()
    bench.step(*(add(name, num_prompt=15, max_tokens=16, word=ord(name)) for name in "ab"))
    report = bench.step()
    while "preempted" not in bench.events("b"):
        report = bench.step()
    assert report.step is not None
    assert (report.step.num_running, report.step.num_waiting) == (1, 1)
    assert report.step.free_blocks == 8 - 5
    bench.step(abort("a"))
    assert bench.events("b")[:4] == ["admitted", "first_token", "preempted", "resumed"]
    report = bench.step()
    assert report.cached_blocks == 3, "what is left of the one that was aborted"
    report = bench.step(abort("b"))
    assert report.outputs[-1].ending == Ending(
        finish_reason=FinishReason.ABORT,
        phase=Phase.DECODE,
        num_cached_tokens=0,  # at its first admission
        num_preemptions=1,
        num_recomputed_tokens=4,
    )


def test_the_log_says_which_were_copied_to_the_host_and_back() -> None:
    bench = Bench(preemption="swap")
    bench.step(*(add(name, num_prompt=15, max_tokens=16, word=ord(name)) for name in "ab"))
    while "preempted" not in bench.events("b"):
        bench.step()
    assert bench.reports[-1].host_blocks == 4
    bench.step(abort("a"))
    events = [event for report in bench.reports for event in report.events]
    reasons = {event.event: event.reason for event in events if event.request_id == "b"}
    assert (reasons["preempted"], reasons["resumed"]) == ("swap", "swap")
    report = bench.step(abort("b"))
    assert report.counters.recomputed_tokens == 0
    assert (report.host_blocks, report.counters.swapped_in_requests) == (0, 1)


def test_a_second_request_of_the_same_id_costs_its_connection_and_not_the_first() -> None:
    bench = Bench()
    bench.step(add("a"))
    bench.hear(add("a"), of="frontend-1")
    bench.step()
    assert bench.hung_up == [("frontend-1", "request id a is in use")]
    assert bench.lose("frontend-1") == 0
    assert list(bench.scheduler.requests) == ["a"]
    assert bench.lose() == 1
    assert bench.events("a")[-3:] == ["removed", "blocks_freed", "finished"]
    assert bench.reports[-1].free_blocks == 8


def test_a_parents_abort_ends_all_its_children_running_or_waiting() -> None:
    bench = Bench()
    bench.step(*(add(f"p-{i}", parent_id="p") for i in range(3)), add("other"))
    bench.step(abort("p-1"))
    assert list(bench.scheduler.requests) == ["p-0", "p-2", "other"]
    bench.step(abort("p"))
    assert list(bench.scheduler.requests) == ["other"]
    assert "p" not in bench.requests_of("frontend-0"), "forgotten with its last child"
    bench.check_integrity()


def test_a_stop_string_ends_the_answer_before_it() -> None:
    words = WordTokenizer(2048)
    first, second = words.text_of(FIRST_WORD), words.text_of(FIRST_WORD + 1)
    bench = Bench()
    bench.step(add("a", stop=(second.strip(),)))
    bench.step()
    outputs = [output for report in bench.reports for output in report.outputs]
    assert "".join(output.text for output in outputs) == first + " "
    assert outputs[-1].finish_reason == "stop"


def test_a_message_heard_before_a_boundary_is_in_it_and_none_after_the_end() -> None:
    ticks = count(1)
    inbox = Inbox(lambda: next(ticks))
    command = SetFaults(faults=Faults())
    inbox.put(command)
    assert inbox.drain(timeout_s=None) == (2, [Heard(1, command)])
    assert inbox.drain(timeout_s=0.0) == (3, [])
    inbox.put(command)
    inbox.close()
    assert inbox.drain(timeout_s=None) is None


class CountingInbox(Inbox):
    """Gives its request at the first boundary, then remembers how it was asked, and ends."""

    def __init__(self, bench: Bench, message: AddRequest) -> None:
        super().__init__(bench.now)
        Requests("frontend-0", self, bench.now).add(message)
        self.waits: list[float | None] = []

    def drain(self, *, timeout_s: float | None) -> tuple[int, list[Heard]] | None:
        self.waits.append(timeout_s)
        return super().drain(timeout_s=0.0) if len(self.waits) < 4 else None


def test_the_loop_waits_when_it_is_idle_and_when_it_is_stuck() -> None:
    bench = Bench(max_num_seqs=1)
    inbox = CountingInbox(bench, add("a", max_tokens=2))
    bench.engine.run(inbox)
    assert inbox.waits == [None, 0.0, None, None]

    stuck = Bench(Faults(leak_blocks=8), max_num_seqs=1)
    stuck.step(add("b", num_prompt=30, max_tokens=2))
    stuck.step(abort("b"))
    inbox = CountingInbox(stuck, add("c"))
    stuck.engine.run(inbox)
    assert inbox.waits == [None, None, None, None], "no block is left: spinning would not help"


def cut_short(signal: Signal, *, in_the_step: bool) -> Callable[[Bench], object]:
    """A cancel between two steps, or in the step that makes the third token."""

    def act(bench: Bench) -> None:
        if in_the_step:
            bench.runner.meanwhile = lambda: bench.hear(abort("a", signal))
            bench.step()
        bench.step(abort("a", signal))

    return act


def run_out_of_memory(bench: Bench) -> None:
    def breaks(_: StepPlan | None) -> None:
        raise OutOfMemoryError("Tried to allocate 2.00 GiB")

    bench.runner.breaks = breaks
    bench.step()


def end_the_sequence(bench: Bench) -> None:
    bench.runner.say_next(EOS_TOKEN_ID)
    bench.step()


WAYS_OUT: dict[str, tuple[Callable[[Bench], object], str, int]] = {
    "a cancel or a deadline": (cut_short(Signal.STOP, in_the_step=False), "abort", 2),
    "a cancel in a step": (cut_short(Signal.STOP, in_the_step=True), "abort", 3),
    "a disconnect": (cut_short(Signal.KILL, in_the_step=False), "abort", 2),
    "a disconnect in a step": (cut_short(Signal.KILL, in_the_step=True), "abort", 3),
    "its length": (Bench.step, "length", 3),
    "an end of sequence": (end_the_sequence, "stop", 3),
    "a fault": (run_out_of_memory, "error", 2),
}


@pytest.mark.parametrize("is_held_back", [False, True])
@pytest.mark.parametrize(("leave", "reason", "num_generated"), WAYS_OUT.values(), ids=WAYS_OUT)
def test_the_text_is_that_of_all_counted_tokens_whatever_ends_the_answer(
    leave: Callable[[Bench], object], reason: str, num_generated: int, is_held_back: bool
) -> None:
    """Text is held back while it could be the beginning of a stop string."""
    words = [WordTokenizer(2048).text_of(FIRST_WORD + n) for n in range(3)]
    bench = Bench()
    stop = ("".join(words) + "?",) if is_held_back else ()
    max_tokens = num_generated + (reason != "length")
    bench.step(add("a", max_tokens=max_tokens, stop=stop, ignore_eos=False))
    bench.step()
    leave(bench)
    outputs = [output for report in bench.reports for output in report.outputs]
    assert (outputs[-1].finish_reason, outputs[-1].num_generated) == (reason, num_generated)
    num_words = num_generated - (reason == "stop")  # the end of a sequence is a token without text
    assert "".join(output.text for output in outputs) == "".join(words[:num_words])


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_frontends_that_add_abort_and_vanish_at_random_hear_of_their_own_and_leave_nothing(
    seed: int, is_ahead: bool
) -> None:
    preemption = ("recompute", "swap")[seed % 2]
    random = Random(seed)
    bench = Bench(max_num_seqs=3, preemption=preemption, async_scheduling=is_ahead)
    frontends = [f"frontend-{n}" for n in range(3)]
    for number in range(400):
        of, by = random.choice(frontends), random.choice(frontends)
        request_id, kind = f"{of} req-{number}", random.randrange(8)
        if kind == 0:
            bench.requests_of(of).cancel_all(CancelReason.FRONTEND_LOST)
        elif kind <= 2:
            signal = random.choice(list(Signal))
            bench.hear(abort(f"{of} req-{random.randrange(number + 1)}", signal), of=by)
        elif kind <= 4:
            size, word = random.randrange(1, 20), random.randrange(300, 320)
            bench.hear(add(request_id, num_prompt=size, max_tokens=12, word=word), of=of)
        elif kind == 5:
            bench.hear(*(add(f"{request_id}-{i}", parent_id=request_id) for i in range(2)), of=of)
        bench.step()
        bench.check_integrity()
        for frontend, (outputs, events) in bench.shares.items():
            names = {one.request_id for one in outputs} | {one.request_id for one in events}
            assert all(name.startswith(f"{frontend} ") for name in names)
    for frontend in frontends:
        bench.lose(frontend)
    bench.step()
    outputs = [output for report in bench.reports for output in report.outputs]
    ended = Counter(one.request_id for one in outputs if one.ending is not None)
    assert set(ended.values()) == {1}
    assert sum(bench.scheduler.counters.finished.values()) == len(ended)
    assert bench.scheduler.counters.finished["abort"] > 50
    assert bench.reports[-1].free_blocks == 8
    assert not any(name in bench.requests_of(of) for of in frontends for name in ended)
