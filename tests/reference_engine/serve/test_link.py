"""One frontend over several made-up workers: loss in every phase, migration, and cancellation."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from reference_engine.context import Cancellation, CancelReason, DetectionMethod, Signal
from reference_engine.core.accounting import Counters
from reference_engine.protocol import AbortRequest, AddRequest, Output
from reference_engine.serve.client_request import ClientRequest
from reference_engine.serve.link import NO_WORKER
from reference_engine.serve.supervisor import WORKER_LOST
from tests.reference_engine.conftest import VirtualTimeLoop
from tests.reference_engine.fake_worker import (
    EMPTY_REPORT,
    AsgiClient,
    FakeWorker,
    Served,
    generation,
    output,
    ready,
    respond,
)

pytestmark = pytest.mark.anyio
BOTH = ("a", "b")


def fleet(**settings: Any) -> FakeWorker:
    return FakeWorker(workers=BOTH, patience_s=3.0, **settings)


def submit(fleet: FakeWorker, **changes: Any) -> ClientRequest:
    return fleet.link.submit(generation(**changes), client_request_id=None, owner=None, created=0)


def token(number: int, of: str = "req-1") -> Output:
    return Output(request_id=of, text=f"word{number} ", num_generated=number, token_id=number)


def additions(fleet: FakeWorker) -> list[tuple[str, str, list[int]]]:
    return [(to, m.request_id, m.answer) for to, m in fleet.sent if isinstance(m, AddRequest)]


def aborts(fleet: FakeWorker) -> list[tuple[str, str]]:
    return [(to, m.request_id) for to, m in fleet.sent if isinstance(m, AbortRequest)]


async def test_each_request_has_its_worker_and_its_cancellation_goes_there_alone() -> None:
    served = fleet()
    first, second = submit(served), submit(served)
    assert [(to, name) for to, name, _ in additions(served)] == [("a", "req-1"), ("b", "req-2")]
    served.link.disconnected(second, DetectionMethod.CONNECTION)
    served.link.cancel(second, CancelReason.API)
    assert aborts(served) == [("b", "req-2")]
    assert second.context.is_killed()
    assert not first.context.is_stopped()
    assert [e.worker for e in served.entries()] == ["a", "b", "b", "b"]


async def test_without_a_token_another_worker_gets_it_and_the_first_ones_late_word_is_nothing() -> (
    None
):
    served = fleet()
    client = AsgiClient(respond(served))
    await served.arrived.wait()
    served.say(worker="a", events=[served.event("admitted")])
    served.link.worker_lost("a")
    served.say(token(1), worker="a")
    served.link.worker_up(ready("a", pid=2))
    served.say(token(1), worker="a")
    served.say(token(1), worker="b")
    served.say(output("word2 ", 2, "length"), worker="b")
    await client.finished()
    assert "".join(c["choices"][0]["text"] for c in client.chunks[:-1]) == "word1 word2 "
    assert additions(served) == [("a", "req-1", []), ("b", "req-1", [])]
    assert served.events() == ["arrived", "admitted", "resubmitted"]
    assert [e.worker for e in served.entries()] == ["a", "a", "b", "b"]


async def test_after_a_token_it_fails_where_migration_is_not_asked_for() -> None:
    served = fleet()
    stream, whole = AsgiClient(respond(served)), AsgiClient(respond(served, stream=False))
    served.say(token(1), worker="a")
    served.say(token(1, of="req-2"), worker="b")
    await stream.got_text.wait()
    for worker in BOTH:
        served.link.worker_lost(worker)
    await stream.finished()
    await whole.finished()
    assert WORKER_LOST.encode() in stream.body
    assert (whole.status, stream.status) == (503, 200)
    assert not served.link.live
    assert len(additions(served)) == 2


async def test_with_migration_it_goes_on_after_its_tokens_as_often_as_allowed() -> None:
    served = fleet(migrate=1)
    client = AsgiClient(respond(served, continuous_usage=True))
    await served.arrived.wait()
    served.say(token(1), token(2), worker="a")
    await client.got_text.wait()
    served.link.worker_lost("a")
    assert additions(served)[-1] == ("b", "req-1", [1, 2])
    served.say(token(3), worker="b")
    served.link.worker_up(ready("a", pid=2))
    served.link.worker_lost("b")
    await client.finished()
    said = client.body.decode()
    assert [said.count(f"word{number} ") for number in (1, 2, 3)] == [1, 1, 1]
    assert '"completion_tokens":3,' in said
    assert WORKER_LOST in said
    assert served.events() == ["arrived", "migrated", "finished"]


async def test_what_lost_the_worker_behind_it_goes_on_elsewhere_and_has_one_end() -> None:
    served = fleet()
    submit(served)
    first = additions(served)
    lost = [
        msgspec.structs.replace(served.event("blocks_freed"), reason="decode_worker_lost"),
        msgspec.structs.replace(served.event("finished"), reason="error"),
    ]
    served.say(output("", 0, "error"), worker="a", events=lost, holds_blocks=True)
    assert additions(served) == first, "not to the worker that is about to be lost"
    served.link.worker_lost("a")
    assert additions(served) == [*first, ("b", "req-1", [])]
    assert served.events() == ["arrived", "resubmitted"]


async def test_of_several_answers_only_those_that_have_not_ended_go_on() -> None:
    served = fleet(migrate=1)
    request = submit(served, n=2)
    served.say(
        token(1, of="req-1-0"),
        output("", 1, "length", of="req-1-0"),
        token(1, of="req-1-1"),
        holds_blocks=True,
        worker="a",
    )
    served.link.worker_lost("a")
    assert additions(served)[2:] == [("b", "req-1-1", [1])]
    served.say(output("", 1, "length", of="req-1-1"), worker="b")
    assert request.status == "finished"
    assert not served.link._choices


@pytest.mark.parametrize("is_sent", [True, False], ids=["told the worker", "no worker"])
async def test_a_cancelled_request_whose_worker_is_gone_ends_as_aborted(is_sent: bool) -> None:
    served = fleet()
    client = AsgiClient(respond(served, stream=False))
    await served.arrived.wait()
    [request] = served.link.live.values()
    served.link.worker_lost("b")
    cancel: Callable[[], bool] = lambda: served.link.cancel(request, CancelReason.API)  # noqa: E731
    if is_sent:
        assert cancel()
    served.link.worker_lost("a")
    assert cancel() is not is_sent
    await client.finished()
    assert client.json["cancellation_info"]["reason"] == "api"
    assert aborts(served) == ([("a", "req-1")] if is_sent else [])
    assert sum(served.link.collector.cancellations.values()) == 1
    served.link.worker_up(ready("a", pid=2))
    assert len(additions(served)) == 1, "it does not come back"


async def test_without_a_worker_it_waits_a_while() -> None:
    served = fleet()
    for worker in BOTH:
        served.link.worker_lost(worker)
    early, late = AsgiClient(respond(served)), AsgiClient(respond(served, stream=False))
    await asyncio.sleep(2)
    assert not served.sent
    served.link.worker_up(ready("b"))
    served.link.worker_lost("b")
    served.link.worker_up(ready("b"))
    assert [to for to, _, _ in additions(served)] == ["b"] * 4
    served.link.worker_lost("b")
    await asyncio.sleep(4)
    await early.finished()
    await late.finished()
    assert NO_WORKER in late.json["error"]["message"]
    assert NO_WORKER.encode() in early.body


async def test_a_request_that_kills_each_of_its_workers_is_given_up() -> None:
    served = fleet()
    submit(served)
    for _ in range(6):
        [name] = {to for to, _, _ in additions(served)[-1:]}
        served.link.worker_lost(name)
        served.link.worker_up(ready(name, pid=2))
    assert not served.link.live
    assert len(additions(served)) == 6


async def test_an_answer_is_a_child_of_its_request_and_can_be_stopped_alone() -> None:
    served = fleet()
    request = submit(served, n=2)
    why = Cancellation(CancelReason.API, DetectionMethod.NONE, 1)
    assert request.choices[1].context.stop(why)
    assert aborts(served) == [("a", "req-1-1")]
    request.context.kill(why)
    assert aborts(served)[1:] == [("a", "req-1")], "one for all"
    assert all(choice.context.is_killed() for choice in request.choices)
    [*_, last] = served.received
    assert isinstance(last, AbortRequest)
    assert last.signal is Signal.KILL


async def test_counters_are_sums_over_workers_and_what_a_dead_one_counted_stays() -> None:
    served = fleet()
    collector = served.link.collector

    def report(worker: str, steps: int, *, via: str | None = None, num_running: int = 0) -> None:
        counters = Counters(steps=steps, finished={"abort": steps})
        changes: dict[str, Any] = {"counters": counters, "num_running": num_running}
        said = msgspec.structs.replace(EMPTY_REPORT, worker=worker, free_blocks=10, **changes)
        served.link.take_in(via or worker, said)

    assert (collector.total_blocks, collector.batch_slots) == (8192, 16)
    assert collector.free_blocks == 8192
    report("a", 5, num_running=2)
    report("b", 7, num_running=1)
    report("behind a", 2, via="a", num_running=4)
    assert (collector.counters.steps, collector.num_running) == (14, 7)
    assert collector.free_blocks == 30
    served.link.worker_lost("a")
    assert (collector.num_running, collector.free_blocks) == (1, 10 + 2 * 4096)
    served.link.worker_up(ready("a", pid=2))
    report("a", 6)
    report("behind a", 1, via="a")
    assert collector.counters.steps == 5 + 6 + 2 + 1 + 7
    assert collector.ended_by_reason["abort",] == collector.counters.steps


async def test_a_client_that_left_counts_once_and_by_what_it_had_of_a_stream() -> None:
    served = fleet()
    link, collector = served.link, served.link.collector
    plans: list[dict[str, Any]] = [
        {"stream": True},
        {"stream": True},
        {"stream": False, "chat": True},
    ]
    requests = [submit(served, **plan) for plan in plans]
    requests[1].choices[0].num_sent = 3
    for request in requests:
        link.disconnected(request, DetectionMethod.CONNECTION)
        link.disconnected(request, DetectionMethod.PING)
    chat = "tiny", "chat_completions", "unary"
    assert dict(collector.leavings) == {("tiny", "completions", "stream"): 2, chat: 1}
    assert (collector.closed_before_stream, collector.closed_while_streaming) == (2, 1)


async def test_health_names_the_workers_that_are_missing() -> None:
    served = Served(workers=BOTH)
    assert (await served.client.get("/health")).status_code == 200
    served.link.worker_lost("b")
    answer = await served.client.get("/health")
    assert (answer.status_code, "not connected: b" in answer.text) == (503, True)
    config = (await served.client.get("/walkaway/config")).json()
    assert config["workers"] == {"a": 1, "b": 1}
    served.link.worker_up(ready("b", pid=7))
    assert (await served.client.get("/health")).status_code == 200


async def test_integrity_names_the_first_contradiction() -> None:
    served = Served()
    assert (await served.client.get("/walkaway/integrity")).text == "ok\n"

    def contradict() -> None:
        raise RuntimeError("2 requests wait, but 1 is known")

    served.frontend.check_integrity = contradict
    answer = await served.client.get("/walkaway/integrity")
    assert (answer.status_code, "2 requests wait, but" in answer.text) == (500, True)


MOST = 4


class Fleet(RuleBasedStateMachine):
    """Requests over workers that come and go. Each answer is its tokens in order, none twice."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.runner.run(self._begin())

    async def _begin(self) -> None:
        self.fleet = fleet(migrate=2)
        self.requests: list[ClientRequest] = []
        self.cancelled: list[ClientRequest] = []
        self.num_read = 0
        self.working: dict[str, dict[str, list[int]]] = {name: {} for name in BOTH}

    def teardown(self) -> None:
        self.runner.run(self._end())
        self.runner.close()

    async def _end(self) -> None:
        link = self.fleet.link
        for name in set(BOTH) - set(link.router.names):
            link.worker_up(ready(name))
        while link.live:
            for name in BOTH:
                await self._step(name)
        assert not link._choices
        for name in BOTH:
            instance = link.router.direct(name)
            assert instance.num_open == 1, instance
        for request in self.requests:
            text = request.choices[0].text if request.is_aborted else self._read(request)
            words = [f"word{number} " for number in range(1, MOST + 1)]
            assert text == "".join(words[: request.num_generated])
            assert request.status == "failed" or (request in self.cancelled) == request.is_aborted
        signals = sum(link.collector.signals.values())
        assert signals == len(self.cancelled)
        assert max(Counter(aborts(self.fleet)).values(), default=1) == 1

    def _read(self, request: ClientRequest) -> str:
        return "".join(one.text for _, one in request.outbox._queue)

    def _hear(self) -> None:
        for to, message in self.fleet.sent[self.num_read :]:
            if isinstance(message, AddRequest):
                self.working[to][message.request_id] = list(message.answer)
            elif isinstance(message, AbortRequest):
                self.working[to][message.request_id].append(-1)
        self.num_read = len(self.fleet.sent)

    async def _step(self, name: str) -> None:
        """A token for each of its requests."""
        self._hear()
        mine, outputs = self.working[name], []
        for request_id, tokens in list(mine.items()):
            if tokens[-1:] == [-1]:
                outputs.append(output("", len(tokens) - 1, "abort", of=request_id))
            else:
                tokens.append(len(tokens) + 1)
                outputs.append(token(len(tokens), of=request_id))
                if len(tokens) == MOST:
                    outputs.append(output("", MOST, "length", of=request_id))
            if outputs[-1].ending is not None:
                del mine[request_id]
        self.fleet.say(*outputs, worker=name)

    @rule()
    def submit(self) -> None:
        async def submitted() -> None:
            self.requests.append(submit(self.fleet))

        self.runner.run(submitted())

    @precondition(lambda self: self.fleet.link.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        async def cancelled() -> None:
            request = data.draw(st.sampled_from(list(self.fleet.link.live.values())))
            if self.fleet.link.cancel(request, CancelReason.API):
                self.cancelled.append(request)

        self.runner.run(cancelled())

    @rule(name=st.sampled_from(BOTH))
    def step(self, name: str) -> None:
        if name in self.fleet.link.router.names:
            self.runner.run(self._step(name))

    @rule(name=st.sampled_from(BOTH))
    def goes_or_comes(self, name: str) -> None:
        async def change() -> None:
            if name in self.fleet.link.router.names:
                self._hear()
                self.working[name] = {}
                self.fleet.link.worker_lost(name)
            else:
                self.fleet.link.worker_up(ready(name, pid=self.num_read))

        self.runner.run(change())


Fleet.TestCase.settings = hypothesis_settings(max_examples=60, deadline=None)
TestFleet = Fleet.TestCase
