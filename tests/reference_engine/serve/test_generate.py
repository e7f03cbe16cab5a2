"""A request's life over ASGI: `receive` and `send` are functions, time is virtual."""

import asyncio

import pytest

from reference_engine.config import RateLimits
from reference_engine.faults import Faults
from reference_engine.serve.supervisor import EngineStoppedError
from tests.reference_engine.fake_worker import (
    AsgiClient,
    FakeWorker,
    output,
    respond,
    settled,
)

pytestmark = pytest.mark.anyio


async def test_a_stream_runs_to_its_end() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker))
    await worker.arrived.wait()
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


async def test_a_body_is_whole() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker, stream=False, chat=True))
    await worker.arrived.wait()
    worker.say(output(" one", 1))
    worker.say(output(" two", 2), output("", 2, "length"))
    await client.finished()
    assert client.json["choices"][0]["message"]["content"] == " one two"
    assert client.json["id"] == "chatcmpl-req-1"
    assert "partial" not in client.json


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_the_first_token_aborts_without_a_write(stream: bool) -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker, stream=stream))
    await worker.arrived.wait()
    client.leave()
    await client.finished()
    assert worker.events() == ["arrived", "disconnected", "abort_sent"]
    assert worker.aborts() == [("req-1", "user_disconnect")]
    assert worker.methods() == {"connection": 1}


async def test_leaving_between_tokens_is_seen_while_nothing_is_written() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker))
    await worker.arrived.wait()
    worker.say(output(" word", 1))
    await client.got_text.wait()
    client.leave()
    await client.finished()
    assert worker.events()[1:] == ["disconnected", "abort_sent"]
    assert repr(worker.link) == "<WorkerLink live 1 choices 1>", "until the worker has ended it"
    worker.say(output(" late", 2), output("", 2, "abort"))  # dropped, and harmless
    assert repr(worker.link) == "<WorkerLink live 0 choices 0>"
    assert b"late" not in client.body
    assert worker.link.collector.unread_tokens == 1


async def test_blocks_that_a_fault_holds_back_are_waited_for() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker))
    await worker.arrived.wait()
    client.leave()
    await client.finished()
    worker.say(output("", 0, "abort", phase="waiting"), holds_blocks=True)
    assert repr(worker.link) == "<WorkerLink live 0 choices 1>"
    assert not worker.link.collector.cancellations
    worker.say(events=[worker.event("blocks_freed")])
    assert repr(worker.link) == "<WorkerLink live 0 choices 0>"
    assert worker.entries()[-1].client_request_id == "mine"
    assert list(worker.link.collector.cancellations) == [
        ("user_disconnect", "waiting", "connection")
    ]


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
    worker = FakeWorker()
    worker.link.faults = faults
    client = AsgiClient(respond(worker, stream=stream))
    await worker.arrived.wait()
    if has_token:
        worker.say(output(" word", 1))
    client.leave()
    await client.finished()
    assert worker.events() == ["arrived", "disconnected"] + ["abort_sent"] * is_aborted
    assert len(worker.link.live) == 1, "it goes on"
    worker.say(output("", 2, "abort" if is_aborted else "length"))
    assert repr(worker.link) == "<WorkerLink live 0 choices 0>"


async def test_a_fault_delays_the_abort() -> None:
    worker = FakeWorker()
    worker.link.faults = Faults(delay_abort=7.0)
    client = AsgiClient(respond(worker))
    await worker.arrived.wait()
    client.leave()
    await client.finished()
    assert worker.aborts() == []
    await worker.aborted.wait()
    _, disconnected, sent = worker.entries()
    assert sent.t_ns - disconnected.t_ns == pytest.approx(7e9)


async def test_a_dying_worker_ends_the_stream_with_an_error() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker))
    await worker.arrived.wait()
    worker.say(output(" word", 1))
    await client.got_text.wait()
    worker.die()
    await client.finished()
    assert b'"error"' in client.body
    assert b"[DONE]" not in client.body
    assert repr(worker.link) == "<WorkerLink live 0 choices 0>"


async def test_a_dying_worker_ends_a_body_with_503() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker, stream=False))
    await worker.arrived.wait()
    worker.die()
    await client.finished()
    assert client.status == 503
    assert client.json["error"]["type"] == "server_error"
    worker.say(output(" word", 1))  # of an earlier connection: dropped


async def test_shutting_down_refuses_and_cancels() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker))
    await worker.arrived.wait()
    worker.link.shut_down()
    with pytest.raises(EngineStoppedError, match="shutting down"):
        respond(worker)
    assert worker.aborts() == [("req-1", "server_shutdown")]
    worker.say(output("", 0, "abort", phase="waiting"))
    await client.finished()
    assert client.chunks[-1]["cancellation_info"]["reason"] == "server_shutdown"


async def test_a_task_that_is_cancelled_aborts_its_request() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker))
    await settled(lambda: bool(client.sent))
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert worker.aborts() == [("req-1", "server_shutdown")]


@pytest.mark.parametrize("stream", [True, False])
async def test_finish_and_disconnect_in_one_turn_of_the_loop(stream: bool) -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker, stream=stream))
    await worker.arrived.wait()
    client.leave()
    worker.say(output(" word", 1, "length"))  # before the frontend looks
    await client.finished()
    assert worker.events() == ["arrived"], "there was nothing left to abort"
    assert repr(worker.link) == "<WorkerLink live 0 choices 0>"


async def test_a_finish_that_was_on_its_way_wins_over_the_abort() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker))
    await worker.arrived.wait()
    client.leave()
    await client.finished()
    worker.say(output(" word", 1, "length"))
    assert worker.events() == ["arrived", "disconnected", "abort_sent"]
    assert not worker.link.collector.cancellations, "the abort had no effect"
    assert worker.link.collector.generated_by_reason["length",] == 1


async def test_the_first_reason_wins_when_deadline_and_client_end_it_together() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker, deadline_s=2.0))
    await worker.arrived.wait()
    asyncio.get_running_loop().call_later(2.0, client.leave)
    await worker.aborted.wait()
    await client.finished()
    assert worker.events() == ["arrived", "abort_sent", "disconnected"]
    assert worker.aborts() == [("req-1", "client_timeout")]


@pytest.mark.parametrize("has_default", [True, False])
async def test_a_deadline_counts_from_acceptance_also_in_the_queue(has_default: bool) -> None:
    worker = FakeWorker(default_deadline_s=3.0 if has_default else 100.0)
    client = AsgiClient(respond(worker, stream=False, deadline_s=None if has_default else 3.0))
    await worker.aborted.wait()
    arrived, sent = worker.entries()
    assert (sent.t_ns - arrived.t_ns) / 1e9 == pytest.approx(3.0)
    assert sent.reason == "client_timeout"
    worker.say(output("", 0, "abort", phase="waiting"))
    await client.finished()
    assert client.json["cancellation_info"]["reason"] == "client_timeout"


async def test_the_timers_of_an_ended_request_do_nothing() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker, deadline_s=3.0, keep_alive_s=2.0))
    await worker.arrived.wait()
    worker.say(output(" word", 1, "length"))
    await client.finished()
    await asyncio.sleep(10)
    assert worker.events() == ["arrived"]


async def test_a_key_out_of_tokens_loses_its_running_requests() -> None:
    worker = FakeWorker(rate_limits=RateLimits(tokens_per_minute=3, kills=True))
    poor = [AsgiClient(respond(worker, owner="poor")) for _ in range(2)]
    rich = AsgiClient(respond(worker, owner="rich"))
    await settled(lambda: len(worker.received) == 3)
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
