"""The step loop with a made-up model and a counted clock: its log and its timing."""

import threading
from collections.abc import Callable, Mapping
from itertools import count, cycle
from random import Random
from typing import NoReturn

import pytest

from reference_engine.config import EngineConfig
from reference_engine.core.request import Sampling
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import StepPlan
from reference_engine.faults import Faults
from reference_engine.model.tokenizer import EOS_TOKEN_ID, FIRST_WORD, Tokenizer
from reference_engine.protocol import AbortRequest, AddRequest, Ready, SetFaults, StepReport
from reference_engine.worker.engine import AnswerText, EngineIO
from reference_engine.worker.faults import FaultIO, FaultyEngine
from reference_engine.worker.inbox import ConnectionLost, Heard, Inbox


class MadeUpRunner:
    """Samples the words one after the other, round and round."""

    info = Ready(pid=1, device="cpu", vocab_size=2048, gpu_name=None)

    def __init__(self) -> None:
        self._words = cycle(range(FIRST_WORD, self.info.vocab_size))

    def execute(self, plan: StepPlan) -> Mapping[str, int]:
        return {request.request_id: next(self._words) for request in plan.sampling}


class Bench:
    """An engine, its reports, and a clock that ticks once a reading."""

    def __init__(self, faults: Faults, max_num_seqs: int = 2) -> None:
        self.reports: list[StepReport] = []
        self.slept: list[float] = []
        self.hung_up: list[str] = []
        self._now_ns = 0
        config = EngineConfig(
            max_num_seqs=max_num_seqs, num_blocks=8, block_size=4, max_model_len=32
        )
        self.scheduler = Scheduler(config, EOS_TOKEN_ID)
        self.engine = FaultyEngine(
            self.scheduler,
            MadeUpRunner(),
            EngineIO(self.now, report=self.reports.append, hang_up=self.hung_up.append),
            faults=faults,
            by=FaultIO(Random(1), sleep=self.slept.append, die=self.die),
        )

    def check_integrity(self) -> None:
        self.scheduler.check_integrity(self.engine._lost_blocks)

    def now(self) -> int:
        self._now_ns += 1
        return self._now_ns

    def set_faults(self, faults: Faults) -> None:
        self.step(SetFaults(faults=faults))

    def pass_time(self, ns: int) -> None:
        self._now_ns += ns

    def die(self) -> NoReturn:
        raise SystemExit

    def step(self, *messages: AddRequest | AbortRequest | SetFaults) -> StepReport:
        heard = [Heard(self.now(), message) for message in messages]
        self.engine.step(self.now(), heard)
        return self.reports[-1]

    def events(self, request_id: str) -> list[str]:
        events = [event for report in self.reports for event in report.events]
        return [event.event for event in events if event.request_id == request_id]


def add(request_id: str, *, max_tokens: int = 8, stop: tuple[str, ...] = ()) -> AddRequest:
    sampling = Sampling(max_tokens=max_tokens, stop=stop)
    return AddRequest(request_id=request_id, prompt_token_ids=[5] * 6, sampling=sampling)


SHORT = Sampling(max_tokens=2)


def abort(request_id: str) -> AbortRequest:
    return AbortRequest(request_id=request_id, reason="user_disconnect")


def test_a_request_from_admission_to_its_natural_end() -> None:
    bench = Bench(Faults())
    bench.step(add("a", max_tokens=2))
    report = bench.step()
    expected = ["admitted", "first_token", "removed", "blocks_freed", "finished"]
    assert bench.events("a") == expected
    assert [output.finish_reason for output in report.outputs] == [None, "length"]
    assert report.outputs[-1].num_generated == 2
    assert report.free_blocks == 8


def test_an_abort_is_applied_at_the_boundary_and_the_slot_refilled_in_that_step() -> None:
    bench = Bench(Faults(), max_num_seqs=1)
    bench.step(add("a"), add("b"))
    report = bench.step(abort("a"))
    assert [event.event for event in report.events] == [
        "abort_received",
        "removed",
        "blocks_freed",
        "finished",
        "admitted",
        "first_token",
    ]
    heard, removed, freed, finished, admitted, _ = report.events
    assert report.step is not None
    assert heard.t_ns < report.step.started_ns < removed.t_ns < freed.t_ns < report.step.ended_ns
    assert {event.step for event in report.events} == {2}
    assert (removed.num_generated, removed.num_blocks, freed.num_blocks) == (1, 2, 2)
    assert finished.num_blocks == 0
    assert (freed.reason, finished.reason) == ("user_disconnect", "abort")
    assert admitted.request_id == "b"
    assert report.step.scheduled == {"b": 2}, (
        "the prompt block of the cancelled one was still there"
    )


def test_an_abort_of_a_queued_request_frees_nothing_but_is_logged() -> None:
    bench = Bench(Faults(), max_num_seqs=1)
    bench.step(add("a"), add("b"))
    report = bench.step(abort("b"))
    freed = next(event for event in report.events if event.event == "blocks_freed")
    assert (freed.request_id, freed.num_blocks) == ("b", 0)
    assert "admitted" not in bench.events("b")


def test_a_second_request_of_the_same_id_costs_the_connection_and_not_the_first() -> None:
    bench = Bench(Faults())
    bench.step(add("a"), add("a"))
    assert bench.hung_up == ["request id a is in use"]
    lost = ConnectionLost(threading.Event())
    bench.engine.step(bench.now(), [Heard(bench.now(), lost)])
    assert lost.applied.is_set()
    assert bench.events("a")[-3:] == ["removed", "blocks_freed", "finished"]
    assert bench.reports[-1].free_blocks == 8


def test_an_abort_after_the_end_is_nothing() -> None:
    bench = Bench(Faults())
    bench.step(add("a", max_tokens=1))
    report = bench.step(abort("a"), abort("never existed"))
    assert report.events == []
    assert report.step is None


def test_the_fault_lose_abort_hears_and_forgets() -> None:
    bench = Bench(Faults(lose_abort=1.0))
    bench.step(add("a", max_tokens=3))
    bench.step(abort("a"))
    bench.step()
    assert bench.events("a")[2] == "abort_received"
    assert bench.reports[-1].outputs[-1].finish_reason == "length"


def test_the_fault_leak_blocks_loses_blocks_of_aborted_requests_only() -> None:
    bench = Bench(Faults())
    bench.step(SetFaults(faults=Faults(leak_blocks=1)), add("a"), add("b", max_tokens=1))
    assert bench.reports[-1].free_blocks == 6, "b ended by itself and gave back all"
    report = bench.step(abort("a"))
    assert report.free_blocks == 7
    bench.check_integrity()


def test_a_stop_string_ends_the_answer_before_it() -> None:
    words = Tokenizer(2048)
    first, second = words.text_of(FIRST_WORD), words.text_of(FIRST_WORD + 1)
    bench = Bench(Faults())
    bench.step(add("a", stop=(second.strip(),)))
    bench.step()
    outputs = [output for report in bench.reports for output in report.outputs]
    assert "".join(output.text for output in outputs) == first + " "
    assert outputs[-1].finish_reason == "stop"


def test_the_loop_ends_with_its_inbox() -> None:
    bench = Bench(Faults())
    inbox = Inbox(bench.now)
    inbox.put(add("a", max_tokens=3))
    inbox.close()
    bench.engine.run(inbox)
    assert bench.reports == []


def test_a_message_heard_before_a_boundary_is_in_it() -> None:
    ticks = count(1)
    inbox = Inbox(lambda: next(ticks))
    inbox.put(abort("a"))
    drained = inbox.drain(timeout_s=None)
    assert drained is not None
    boundary_ns, heard = drained
    assert [message.t_ns for message in heard] == [1]
    assert boundary_ns == 2
    assert inbox.drain(timeout_s=0.0) == (3, [])


class CountingInbox(Inbox):
    """Gives its messages at the first boundary, then remembers how it was asked, and ends."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        super().__init__(now_ns)
        self.waits: list[float | None] = []

    def drain(self, *, timeout_s: float | None) -> tuple[int, list[Heard]] | None:
        self.waits.append(timeout_s)
        return super().drain(timeout_s=0.0) if len(self.waits) < 4 else None


def test_the_loop_waits_when_it_is_idle_and_when_it_is_stuck() -> None:
    bench = Bench(Faults(), max_num_seqs=1)
    inbox = CountingInbox(bench.now)
    inbox.put(add("a", max_tokens=2))
    bench.engine.run(inbox)
    assert inbox.waits == [None, 0.0, None, None]

    stuck = Bench(Faults(leak_blocks=8), max_num_seqs=1)
    stuck.step(AddRequest(request_id="b", prompt_token_ids=[5] * 30, sampling=SHORT))
    stuck.step(abort("b"))
    inbox = CountingInbox(stuck.now)
    inbox.put(add("c"))
    stuck.engine.run(inbox)
    assert inbox.waits == [None, None, None, None], "no block is left: spinning would not help"


def pushed(stop: tuple[str, ...], *texts: str) -> tuple[list[str], bool]:
    answer = AnswerText(stop)
    sent, stopped = [], False
    for text in texts:
        part, stopped = answer.push(text)
        sent.append(part)
        if stopped:
            break
    else:
        sent.append(answer.flush())
    return sent, stopped


@pytest.mark.parametrize(
    ("stop", "texts", "sent", "stopped"),
    [
        ((), ("a", "b"), ["a", "b", ""], False),
        (("x",), ("a", "b"), ["a", "b", ""], False),
        (("end",), ("the e", "nd is"), ["the ", ""], True),  # straddles two tokens
        (("end",), ("the e", "asy"), ["the ", "easy", ""], False),  # looked like it, was not
        (("end",), ("the e",), ["the ", "e"], False),  # held back, then flushed
        (("bc", "ab"), ("xabc",), ["x"], True),  # the earliest counts
        (("aab",), ("aa", "ab"), ["", "a"], True),
    ],
)
def test_stop_strings(
    stop: tuple[str, ...], texts: tuple[str, ...], sent: list[str], stopped: bool
) -> None:
    assert pushed(stop, *texts) == (sent, stopped)
