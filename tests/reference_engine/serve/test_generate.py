"""A request's life over ASGI: `receive` and `send` are functions, time is virtual."""

import asyncio
import json
from typing import Any

import pytest
from msgspec.structs import replace

from reference_engine.api.openai import TOO_LONG
from reference_engine.api.schemas import ApiError
from reference_engine.config import EngineConfig, RateLimits
from reference_engine.context import CancelReason, Signal
from reference_engine.core.request import FinishReason, Phase, Sampling
from reference_engine.faults import Faults
from reference_engine.protocol import OUT_OF_MEMORY, AbortRequest, AddRequest, Ending, Output
from reference_engine.serve.link import NO_MEMORY
from reference_engine.serve.supervisor import EngineStoppedError
from tests.reference_engine.fake_worker import (
    AsgiClient,
    FakeWorker,
    asked,
    output,
    respond,
    settled,
)

pytestmark = pytest.mark.anyio

IN_BOTH_FORMS = pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
NOTHING_LEFT = "<WorkerLink live 0 choices 0>"
LEFT = ["arrived", "disconnected", "abort_sent"]


async def test_a_stream_runs_to_its_end() -> None:
    worker, client = asked()
    worker.say(output(" word", 1), output("", 1, "length"))
    await client.finished()
    assert client.body.endswith(b"data: [DONE]\n\n")
    assert client.chunks[-1]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 1,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert dict(client.sent[0]["headers"])[b"x-request-id"] == b"mine"
    assert len(worker.received) == 1, "a finished request is not aborted"
    assert worker.events() == ["arrived"]
    collector = worker.link.collector
    assert (collector.num_answers.total, collector.most_generated_tokens.total) == (1, 1)


@IN_BOTH_FORMS
async def test_the_call_of_a_tool_is_streamed_as_its_arguments(stream: bool) -> None:
    worker, client = asked(stream=stream, chat=True, tool="write")
    worker.say(output(" word", 1), output(" other", 2), output("", 2, "length"))
    await client.finished()
    if not stream:
        [call] = json.loads(client.body)["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "write", "arguments": " word other"}
        return
    deltas = [one["choices"][0]["delta"] for one in client.chunks if one["choices"]]
    [[first], [second]] = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert first == {
        "index": 0,
        "id": "call-req-1-0",
        "type": "function",
        "function": {"name": "write", "arguments": " word"},
    }
    assert second == {"index": 0, "function": {"arguments": " other"}}
    assert not any(delta.get("content") for delta in deltas)


@IN_BOTH_FORMS
async def test_an_answer_whose_step_was_out_of_memory_ends_its_request(stream: bool) -> None:
    worker, client = asked(n=2, stream=stream)
    worker.say(output(" word", 1, of="req-1-0"), output(" other", 1, of="req-1-1"))
    ending = Ending(finish_reason=FinishReason.ERROR, phase=Phase.DECODE, stop_reason=OUT_OF_MEMORY)
    failed = Output(request_id="req-1-0", text="", num_generated=1, ending=ending)
    worker.say(failed, events=[replace(worker.event("finished", "req-1-0"), reason="error")])
    worker.say(output(" more", 2, of="req-1-1"))
    await client.finished()
    assert client.status == (200 if stream else 503)
    error = {"code": None, "message": NO_MEMORY, "param": None, "type": "server_error"}
    assert json.loads(client.body.rpartition(b"data: ")[2]) == {"error": error}
    [abort] = [message for message in worker.received if isinstance(message, AbortRequest)]
    assert (abort.request_id, abort.signal) == ("req-1", Signal.KILL), "the other answer is unread"
    finished = [one for one in worker.entries() if one.event == "finished"]
    assert [one.request_id for one in finished] == ["req-1-0", "req-1-1"]
    assert {one.reason for one in finished} == {"error"}
    assert repr(worker.link) == NOTHING_LEFT


async def test_n_answers_are_n_requests_of_one() -> None:
    options: dict[str, Any] = {"continuous_usage": True, "sampling": Sampling(max_tokens=8, seed=7)}
    worker, client = asked(n=2, **options)
    first, second = (m for m in worker.received if isinstance(m, AddRequest))
    assert (first.request_id, second.request_id) == ("req-1-0", "req-1-1")
    assert first.parent_id == second.parent_id == "req-1"
    assert first.sampling.seed == 7 != second.sampling.seed
    worker.say(output(" word", 1, of="req-1-1"), output(" other", 1, of="req-1-0"))
    worker.say(output("", 1, "stop", of="req-1-0"), output(" word", 2, of="req-1-1"))
    await settled(lambda: b'"stop"' in client.body)
    assert len(worker.link.live) == 1, "one answer is still to come"
    worker.say(output("", 2, "length", of="req-1-1"))
    await client.finished()
    texts = ["", ""]
    for chunk in client.chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [" other", " word word"]
    sent = [chunk["usage"]["completion_tokens"] for chunk in client.chunks]
    assert sent == [1, 2, 2, 3, 3, 3], "what was sent, of all answers"
    known = ["prompt_tokens_details" in chunk["usage"] for chunk in client.chunks]
    assert known == [False] * 5 + [True]
    assert client.chunks[-1]["usage"]["prompt_tokens"] == 2
    collector = worker.link.collector
    assert (collector.num_answers.total, collector.most_generated_tokens.total) == (2, 2)
    assert repr(worker.link) == NOTHING_LEFT


async def test_the_body_of_n_answers_has_each_in_its_place() -> None:
    worker, client = asked(n=2, stream=False)
    worker.say(output(" b", 1, "stop", of="req-1-1"))
    worker.say(output(" a", 1, "length", of="req-1-0"))
    await client.finished()
    choices = [(c["index"], c["text"], c["finish_reason"]) for c in client.json["choices"]]
    assert choices == [(0, " a", "length"), (1, " b", "stop")]


@pytest.mark.parametrize("n", [1, 3])
@IN_BOTH_FORMS
async def test_leaving_before_the_first_token_aborts_once_without_a_write(
    stream: bool, n: int
) -> None:
    worker, client = asked(stream=stream, n=n)
    client.leave()
    await client.finished()
    assert worker.events() == LEFT
    assert worker.aborts() == [("req-1", "user_disconnect")]
    assert worker.methods() == {"connection": 1}
    names = [f"req-1-{index}" for index in range(n)] if n > 1 else ["req-1"]
    worker.say(*(output("", 0, "abort", of=name) for name in names))
    assert repr(worker.link) == NOTHING_LEFT


async def test_leaving_between_tokens_is_seen_while_nothing_is_written() -> None:
    worker, client = asked()
    worker.say(output(" word", 1))
    await client.got_text.wait()
    client.leave()
    await client.finished()
    assert worker.events() == LEFT
    assert repr(worker.link) == "<WorkerLink live 1 choices 1>", "until the worker has ended it"
    worker.say(output(" late", 2), output("", 2, "abort"))  # dropped, and harmless
    assert repr(worker.link) == NOTHING_LEFT
    assert b"late" not in client.body
    assert worker.link.collector.unread_tokens == 1


async def test_blocks_that_a_fault_holds_back_are_waited_for() -> None:
    worker, client = asked()
    client.leave()
    await client.finished()
    worker.say(output("", 0, "abort", phase="waiting"), holds_blocks=True)
    assert repr(worker.link) == "<WorkerLink live 0 choices 1>"
    assert not worker.link.collector.cancellations
    await asyncio.sleep(2)
    worker.say(events=[worker.event("blocks_freed")])
    assert repr(worker.link) == NOTHING_LEFT
    assert worker.entries()[-1].client_request_id == "mine"
    collector = worker.link.collector
    assert dict(collector.cancellations) == {("user_disconnect", "waiting", "connection"): 1}
    assert collector.cancel_s.total == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("faults", "stream", "has_token", "is_aborted"),
    [
        (Faults(ignore_disconnect=True), True, True, False),
        (Faults(ignore_disconnect=True), False, False, False),
        (Faults(ignore_disconnect_unary=True), False, True, False),
        (Faults(ignore_disconnect_unary=True), True, True, True),
        (Faults(ignore_disconnect_while_waiting=True), True, False, False),
        (Faults(ignore_disconnect_while_waiting=True), False, False, False),
        (Faults(ignore_disconnect_while_waiting=True), True, True, True),
    ],
)
async def test_faults_that_see_and_do_nothing(
    faults: Faults, stream: bool, has_token: bool, is_aborted: bool
) -> None:
    worker, client = asked(stream=stream)
    worker.link.faults = faults
    if has_token:
        worker.say(output(" word", 1))
    client.leave()
    await client.finished()
    assert worker.events() == LEFT[: 2 + is_aborted]
    assert len(worker.link.live) == 1, "it goes on"
    worker.say(output("", 2, "abort" if is_aborted else "length"))
    assert repr(worker.link) == NOTHING_LEFT


async def test_a_fault_delays_the_abort() -> None:
    worker, client = asked()
    worker.link.faults = Faults(delay_abort=7.0)
    client.leave()
    await client.finished()
    assert worker.aborts() == []
    await worker.aborted.wait()
    _, disconnected, sent = worker.entries()
    assert sent.t_ns - disconnected.t_ns == pytest.approx(7e9)


async def test_a_cancel_over_http_may_do_nothing() -> None:
    worker, client = asked()
    worker.link.faults = Faults(cancel_does_nothing=True)
    assert worker.link.cancel(worker.link.live["req-1"], CancelReason.API), "so it says"
    assert worker.aborts() == []
    client.leave()
    await client.finished()
    assert worker.aborts() == [("req-1", "user_disconnect")]


async def test_readings_of_the_metrics_may_put_an_abort_off() -> None:
    worker, client = asked()
    worker.link.faults = Faults(poll_rearms=True)
    worker.link.polled()
    client.leave()
    await client.finished()
    for _ in range(10):
        worker.link.polled()
        await asyncio.sleep(0.1)
        assert worker.aborts() == []
    await worker.aborted.wait()
    _, disconnected, sent = worker.entries()
    assert sent.t_ns - disconnected.t_ns == pytest.approx(1.15e9, rel=0.01)


async def test_a_client_that_leaves_may_cost_memory() -> None:
    worker, client = asked()
    worker.link.faults = Faults(grow_memory=0.5)
    client.leave()
    await client.finished()
    assert [len(block) for block in worker.link._grown] == [500_000]
    assert worker.aborts() == [("req-1", "user_disconnect")]


async def test_each_request_may_cost_memory_left_or_not() -> None:
    worker, _ = asked()
    worker.link.faults = Faults(grow_with_answers=0.5)
    respond(worker)
    assert [len(block) for block in worker.link._grown] == [500_000]


async def test_what_is_aborted_may_be_said_to_have_stopped() -> None:
    worker, client = asked()
    worker.link.faults = Faults(abort_says_stop=True)
    worker.say(output(" word", 1), output("", 1, "abort"))
    await client.finished()
    assert [one["choices"][0]["finish_reason"] for one in client.chunks[:2]] == [None, "stop"]


@pytest.mark.parametrize("code", [TOO_LONG, "model_not_found"])
async def test_a_prompt_that_is_too_long_may_be_computed_though_it_is_refused(code: str) -> None:
    worker, _ = asked()
    config = EngineConfig(max_model_len=32)
    worker.link.refused(ApiError(400, "refused", code=code), config)
    worker.link.faults = Faults(compute_refused=True)
    worker.link.refused(ApiError(400, "refused", code=code), config)
    added = [one for one in worker.received if isinstance(one, AddRequest)]
    computed = [31] if code == TOO_LONG else []
    assert [len(one.prompt_token_ids) for one in added] == [2, *computed]


@IN_BOTH_FORMS
async def test_a_dying_worker_ends_the_answer_with_an_error(stream: bool) -> None:
    worker, client = asked(stream=stream)
    worker.say(output(" word", 1))
    await settled(lambda: client.got_text.is_set() or not stream)
    worker.die()
    await client.finished()
    assert b'"type":"server_error"' in client.body
    assert b"[DONE]" not in client.body
    assert client.status == (200 if stream else 503)
    assert repr(worker.link) == NOTHING_LEFT
    worker.say(output(" word", 1))  # of an earlier connection: dropped


async def test_shutting_down_refuses_and_cancels() -> None:
    worker, client = asked()
    worker.link.shut_down()
    with pytest.raises(EngineStoppedError, match="shutting down"):
        respond(worker)
    assert worker.aborts() == [("req-1", "server_shutdown")]
    worker.say(output("", 0, "abort", phase="waiting"))
    await client.finished()
    assert client.chunks[-1]["cancellation_info"]["reason"] == "server_shutdown"


async def test_a_task_that_is_cancelled_aborts_its_request() -> None:
    worker, client = asked()
    await settled(lambda: bool(client.sent))
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert worker.aborts() == [("req-1", "server_shutdown")]


@IN_BOTH_FORMS
async def test_finish_and_disconnect_in_one_turn_of_the_loop(stream: bool) -> None:
    worker, client = asked(stream=stream)
    client.leave()
    worker.say(output(" word", 1, "length"))  # before the frontend looks
    await client.finished()
    assert worker.events() == ["arrived"], "there was nothing left to abort"
    assert repr(worker.link) == NOTHING_LEFT


async def test_the_first_reason_wins_when_deadline_and_client_end_it_together() -> None:
    worker, client = asked(deadline_s=2.0)
    asyncio.get_running_loop().call_later(2.0, client.leave)
    await worker.aborted.wait()
    await client.finished()
    assert worker.events() == ["arrived", "abort_sent", "disconnected"]
    assert worker.aborts() == [("req-1", "client_timeout")]


@pytest.mark.parametrize(("default_s", "own_s"), [(3.0, None), (100.0, 3.0)])
async def test_a_deadline_counts_from_acceptance_also_in_the_queue(
    default_s: float, own_s: float | None
) -> None:
    limits = {"default_deadline_s": default_s}
    worker, client = asked(limits=limits, stream=False, deadline_s=own_s)
    await worker.aborted.wait()
    arrived, sent = worker.entries()
    assert (sent.t_ns - arrived.t_ns) / 1e9 == pytest.approx(3.0)
    assert sent.reason == "client_timeout"
    worker.say(output("", 0, "abort", phase="waiting"))
    await client.finished()
    assert client.json["cancellation_info"]["reason"] == "client_timeout"


async def test_a_key_out_of_tokens_loses_its_running_requests() -> None:
    worker = FakeWorker(rate_limits=RateLimits(tokens_per_minute=3, kills=True))
    poor = [AsgiClient(respond(worker, owner="poor")) for _ in range(2)]
    rich = AsgiClient(respond(worker, owner="rich"))
    worker.say(*(output(" word", 1, of=f"req-{number}") for number in (1, 2, 3)))
    assert worker.aborts() == []
    worker.say(output(" word", 3, of="req-1"), output(" word", 3, of="req-2"))
    assert worker.aborts() == [("req-1", "rate_limit"), ("req-2", "rate_limit")]
    worker.say(output("", 3, "abort"), output("", 3, "abort", of="req-2"))
    for client in poor:
        await client.finished()
        assert client.chunks[-1]["cancellation_info"]["reason"] == "rate_limit"
    rich.leave()
    await rich.finished()


@pytest.mark.parametrize(
    ("stream", "leaving", "unread"),
    [
        (True, "deadline", 0),
        (False, "deadline", 0),
        (True, "at once", 2),
        (False, "at once", 3),
        (True, "after a cancel", 2),
    ],
)
async def test_tokens_are_unread_if_the_client_left_before_they_were_sent(
    stream: bool, leaving: str, unread: int
) -> None:
    changes: dict[str, Any] = {"deadline_s": 2.0} if leaving == "deadline" else {}
    worker, client = asked(stream=stream, **changes)
    worker.say(output(" word", 1))
    await settled(lambda: client.got_text.is_set() or not stream)
    if leaving == "deadline":
        await worker.aborted.wait()
    else:
        if leaving == "after a cancel":
            worker.link.shut_down()
        client.leave()
        await client.finished()
    worker.say(output(" late", 3, "abort"))
    await client.finished()
    assert worker.link.collector.unread_tokens == unread


async def test_a_request_that_the_worker_never_got_has_not_arrived() -> None:
    worker = FakeWorker()
    worker.die()
    with pytest.raises(EngineStoppedError):
        respond(worker)
    assert worker.entries() == []
