"""Queries and cancels of requests: the answers stay true, however often."""

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette

from reference_engine.api.schemas import ApiError
from reference_engine.cancellation import CancelReason
from reference_engine.serve.server import RequestsApi
from reference_engine.serve.supervisor import EngineStoppedError
from tests.reference_engine.fake_worker import AsgiClient, FakeWorker, output, respond, settled

pytestmark = pytest.mark.anyio


class Api:
    """The endpoints over a made-up worker. A status other than 200 comes as {"status": ...}."""

    def __init__(self, **settings: Any) -> None:
        self.worker = FakeWorker(**settings)

        async def answer(request: Any, error: Any) -> Any:
            return error.response()

        self._app = Starlette(
            routes=[*RequestsApi(self.worker.link).routes()],
            exception_handlers={ApiError: answer},
        )

    async def start(self, name: str | None = "mine", **changes: Any) -> AsgiClient:
        before = len(self.worker.link.live)
        client = AsgiClient(respond(self.worker, name, **changes))
        await settled(lambda: len(self.worker.link.live) == before + 1)
        return client

    async def call(self, method: str, path: str, owner: str | None = None) -> dict[str, Any]:
        scope = {
            "type": "http",
            "method": method,
            "path": f"/v1/requests/{path}",
            "headers": [],
            "query_string": b"",
            "state": {"owner": owner},
        }
        client = AsgiClient(lambda _, receive, send: self._app(scope, receive, send))
        await client.finished()
        return client.json if client.status == 200 else {"status": client.status}

    async def get(self, name: str, owner: str | None = None) -> dict[str, Any]:
        return await self.call("GET", name, owner)

    async def cancel(self, name: str, owner: str | None = None) -> dict[str, Any]:
        return await self.call("POST", f"{name}/cancel", owner)

    async def ping(self, name: str, owner: str | None = None) -> dict[str, Any]:
        return await self.call("POST", f"{name}/ping", owner)


UNKNOWN = {"status": 404}


async def test_cancelling_a_waiting_request_and_asking_again() -> None:
    api = Api()
    client = await api.start()
    first = await api.cancel("req-1")
    again = await api.cancel("req-1")
    assert (first["cancelled"], again["cancelled"]) == (True, False)
    (one,), (two,) = first["requests"], again["requests"]
    assert one["status"] == "waiting"
    assert one["tokens_generated"] == 0
    assert one["cancellation"]["reason"] == "api"
    assert {**one, "cancelled": False} == two, "the same facts"
    assert api.worker.aborts() == [("req-1", "api")]
    assert api.worker.events() == ["arrived", "abort_sent"], "no client has left"
    api.worker.say(output("", 0, "abort", phase="waiting"))
    await client.finished()
    ended = await api.cancel("req-1")
    assert ended["requests"][0]["status"] == "aborted"
    assert ended["requests"][0]["cancellation"] == one["cancellation"]
    assert not ended["cancelled"]


async def test_a_live_and_a_finished_request() -> None:
    api = Api()
    client = await api.start()
    live = await api.get("mine")
    assert (live["status"], live["phase"]) == ("waiting", "waiting")
    for event, phase in (("admitted", "prefill"), ("preempted", "waiting"), ("resumed", "prefill")):
        api.worker.say(events=[api.worker.event(event)])
        assert (await api.get("mine"))["phase"] == phase
    api.worker.say(output(" one", 1))
    live = await api.get("cmpl-req-1")
    assert (live["status"], live["phase"], live["tokens_generated"]) == ("running", "decode", 1)
    assert live["choices"] == [{"index": 0, "finish_reason": None, "tokens_generated": 1}]
    api.worker.say(output("", 1, "stop"))
    await client.finished()
    ended = await api.get("mine")
    assert ended["status"] == "finished"
    assert ended["choices"] == [{"index": 0, "finish_reason": "stop", "tokens_generated": 1}]
    assert "partial" not in ended
    (kept,) = [api.worker.link.archive.by_id("req-1", 0)]
    assert kept is not None
    assert kept.choices[0].text == "", "the client had it"


async def test_a_cancel_after_the_end_but_before_the_client_has_it() -> None:
    api = Api()
    client = await api.start()
    await settled(lambda: len(client.sent) == 2)
    client.reads.clear()
    api.worker.say(output(" one", 1), output("", 1, "length"))
    late = await api.cancel("req-1")
    assert (late["cancelled"], late["requests"][0]["status"]) == (False, "finished")
    assert late["requests"][0]["cancellation"] is None
    client.reads.set()
    await client.finished()
    assert client.chunks[1]["choices"][0]["finish_reason"] == "length"


async def test_an_abort_that_the_worker_has_lost() -> None:
    api = Api()
    client = await api.start()
    api.worker.say(output(" one", 1))
    first = await api.cancel("req-1")
    for number in range(2, 5):
        api.worker.say(output(" word", number))
    again = await api.cancel("req-1")
    assert again["requests"][0]["status"] == "running", "that is the truth"
    assert again["requests"][0]["tokens_generated"] == 4
    assert not again["cancelled"]
    assert again["requests"][0]["cancellation"] == first["requests"][0]["cancellation"]
    assert api.worker.aborts() == [("req-1", "api")]
    await client.got_text.wait()
    client.leave()
    await client.finished()


async def test_names_match_whole() -> None:
    api = Api()
    clients = [await api.start(f"user-{number}") for number in range(1, 11)]
    await api.cancel("req-1")
    await api.cancel("user-1")
    assert api.worker.aborts() == [("req-1", "api")]
    for wrong in ("req-", "req-11", "cmpl-", "chatcmpl-req-1", "cmpl-cmpl-req-1", "user-", "REQ-1"):
        assert await api.cancel(wrong) == UNKNOWN, wrong
    for client in clients:
        client.leave()
        await client.finished()


async def test_a_shared_name_means_all_live_requests() -> None:
    api = Api()
    clients = [await api.start("twice") for _ in range(2)]
    found = await api.cancel("twice")
    assert [request["request_id"] for request in found["requests"]] == ["req-1", "req-2"]
    assert api.worker.aborts() == [("req-1", "api"), ("req-2", "api")]
    api.worker.say(output("", 0, "abort"), output("", 0, "abort", of="req-2"))
    for client in clients:
        await client.finished()


async def test_the_engines_names_go_before_a_clients() -> None:
    api = Api()
    await api.start("req-2")
    await api.start("other")
    assert (await api.get("req-2"))["client_request_id"] == "other"
    api.worker.say(output("", 0, "stop"), output("", 0, "stop", of="req-2"))


async def test_a_name_with_slashes() -> None:
    api = Api()
    client = await api.start("a/b/cancel")
    assert (await api.get("a/b/cancel"))["request_id"] == "req-1"
    assert (await api.cancel("a/b/cancel"))["cancelled"]
    api.worker.say(output("", 0, "abort"))
    await client.finished()


async def test_another_keys_requests_do_not_exist() -> None:
    api = Api()
    client = await api.start(owner="key-a")
    for name in ("req-1", "cmpl-req-1", "mine"):
        for owner in ("key-b", None):
            assert await api.get(name, owner) == UNKNOWN
            assert await api.cancel(name, owner) == UNKNOWN
            assert await api.ping(name, owner) == UNKNOWN
    other = await api.start(owner="key-b")
    assert (await api.get("mine", "key-b"))["request_id"] == "req-2"
    found = await api.cancel("mine", "key-a")
    assert [request["request_id"] for request in found["requests"]] == ["req-1"]
    assert "key-a" not in str(found)
    api.worker.say(output("", 0, "abort"), output("", 0, "stop", of="req-2"))
    await client.finished()
    await other.finished()
    assert await api.get("mine", None) == UNKNOWN
    assert (await api.get("mine", "key-a"))["status"] == "aborted"
    assert (await api.get("mine", "key-b"))["status"] == "finished"


async def test_pings() -> None:
    api = Api()
    client = await api.start(keep_alive_s=5.0)
    assert await api.ping("nobody") == UNKNOWN
    await asyncio.sleep(4)
    assert (await api.ping("mine"))["keep_alive_s"] == {"req-1": 5.0}
    await asyncio.sleep(4)
    assert api.worker.aborts() == []
    api.worker.say(output("", 0, "stop"))
    await client.finished()
    assert await api.ping("req-1") == UNKNOWN, "it has ended"


async def test_a_request_that_was_lost_with_the_worker_has_failed() -> None:
    api = Api()
    client = await api.start()
    api.worker.say(output(" one", 1))
    api.worker.die()
    await client.finished()
    lost = await api.get("req-1")
    assert (lost["status"], lost["tokens_generated"]) == ("failed", 1)
    assert lost["choices"][0]["finish_reason"] is None
    assert not (await api.cancel("req-1"))["cancelled"]
    assert await api.ping("req-1") == UNKNOWN


async def test_a_cancel_is_measured_until_its_blocks_are_free() -> None:
    api = Api()
    client = await api.start()
    (request,) = api.worker.link.live.values()
    api.worker.link.cancel(request, CancelReason.API)
    await asyncio.sleep(2)
    api.worker.say(output("", 3, "abort"))
    await client.finished()
    statistics = api.worker.link.collector
    assert statistics.cancel_s.total == pytest.approx(2.0)
    assert dict(statistics.cancellations) == {("api", "decode", "none"): 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_that_a_client_still_gets_are_not_unread(stream: bool) -> None:
    api = Api()
    client = await api.start(stream=stream, deadline_s=2.0)
    api.worker.say(output(" one", 1), output(" two", 2))
    await api.worker.aborted.wait()
    api.worker.say(output(" three", 3, "abort"))
    await client.finished()
    assert client.status == 200
    statistics = api.worker.link.collector
    assert list(statistics.cancellations) == [("client_timeout", "decode", "none")]
    assert statistics.unread_tokens == 0


@pytest.mark.parametrize(("stream", "unread"), [(True, 2), (False, 3)])
async def test_unsent_tokens_of_a_client_that_has_left_are_unread(
    stream: bool, unread: int
) -> None:
    api = Api()
    client = await api.start(stream=stream)
    api.worker.say(output(" word", 1))
    if stream:
        await client.got_text.wait()
    client.leave()
    await client.finished()
    api.worker.say(output(" late", 3, "abort"))
    assert api.worker.link.collector.unread_tokens == unread


async def test_a_client_that_leaves_after_a_cancel_has_not_read_the_rest() -> None:
    api = Api()
    client = await api.start()
    api.worker.say(output(" word", 1))
    await client.got_text.wait()
    await api.cancel("req-1")
    client.leave()
    await client.finished()
    api.worker.say(output(" late", 3, "abort"))
    assert api.worker.link.collector.unread_tokens == 2


async def test_a_request_that_was_lost_has_an_end_in_the_log() -> None:
    api = Api()
    client = await api.start(n=2)
    api.worker.say(output(" one", 1, of="req-1-0"), output("", 1, "stop", of="req-1-1"))
    api.worker.die()
    await client.finished()
    *_, ended = api.worker.entries()
    assert [entry.event for entry in api.worker.entries()].count("finished") == 1
    assert (ended.event, ended.reason, ended.request_id) == ("finished", "error", "req-1-0")
    assert (ended.client_request_id, ended.num_generated) == ("mine", 1)


async def test_a_request_that_the_worker_never_got_has_not_arrived() -> None:
    api = Api()
    api.worker.die()
    with pytest.raises(EngineStoppedError):
        respond(api.worker)
    assert api.worker.entries() == []
