"""Queries, cancels and pings of requests, and the results of cancelled requests."""

import asyncio
from typing import Any

import pytest

from tests.reference_engine.fake_worker import AsgiClient, Served, bearer, output, respond, settled

pytestmark = pytest.mark.anyio

UNKNOWN = {"status": 404}


class Api(Served):
    """The endpoints of requests. A status other than 200 comes as {"status": ...}."""

    def start(self, name: str | None = "mine", **changes: Any) -> AsgiClient:
        return AsgiClient(respond(self.worker, name, **changes))

    async def call(self, method: str, path: str, owner: str | None) -> dict[str, Any]:
        headers = bearer(owner) if owner else {}
        answer = await self.client.request(method, f"/v1/requests/{path}", headers=headers)
        found: dict[str, Any] = answer.json()
        return found if answer.status_code == 200 else {"status": answer.status_code}

    async def get(self, name: str, owner: str | None = None) -> dict[str, Any]:
        return await self.call("GET", name, owner)

    async def cancel(self, name: str, owner: str | None = None) -> dict[str, Any]:
        return await self.call("POST", f"{name}/cancel", owner)

    async def ping(self, name: str, owner: str | None = None) -> dict[str, Any]:
        return await self.call("POST", f"{name}/ping", owner)


async def test_cancelling_a_waiting_request_and_asking_again() -> None:
    api = Api()
    client = api.start(stream=False)
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
    (choice,) = client.json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "abort")
    assert (client.status, client.json["partial"]) == (200, True)
    assert client.json["cancellation_info"]["phase"] == "waiting"
    assert client.json["usage"]["completion_tokens"] == 0
    ended = await api.cancel("req-1")
    assert ended["requests"][0]["status"] == "aborted"
    assert ended["requests"][0]["cancellation"] == one["cancellation"]
    assert not ended["cancelled"]


async def test_a_live_and_a_finished_request() -> None:
    api = Api()
    client = api.start()
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


async def test_names_match_whole() -> None:
    api = Api()
    clients = [api.start(f"user-{number}") for number in range(1, 11)]
    clients.append(api.start("req-2"))
    await api.cancel("req-1")
    await api.cancel("user-1")
    assert api.worker.aborts() == [("req-1", "api")]
    wrong = ("req-", "req-12", "cmpl-", "chatcmpl-req-1", "cmpl-cmpl-req-1", "user-", "REQ-1")
    for name in wrong:
        assert await api.cancel(name) == UNKNOWN, name
    found = await api.get("req-2")
    assert found["client_request_id"] == "user-2", "the engine's names go before a client's"
    for client in clients:
        client.leave()
        await client.finished()


async def test_a_shared_name_means_all_live_requests_and_may_have_slashes() -> None:
    api = Api()
    clients = [api.start("a/b/cancel") for _ in range(2)]
    found = await api.cancel("a/b/cancel")
    assert [request["request_id"] for request in found["requests"]] == ["req-1", "req-2"]
    assert api.worker.aborts() == [("req-1", "api"), ("req-2", "api")]
    api.worker.say(output("", 0, "abort"), output("", 0, "abort", of="req-2"))
    for client in clients:
        await client.finished()


async def test_another_keys_requests_do_not_exist() -> None:
    api = Api(api_keys=("key-a", "key-b", "key-c"))
    client = api.start(owner="key-a")
    for name in ("req-1", "cmpl-req-1", "mine"):
        for call in (api.get, api.cancel, api.ping):
            assert await call(name, "key-b") == UNKNOWN
    other = api.start(owner="key-b")
    assert (await api.get("mine", "key-b"))["request_id"] == "req-2"
    found = await api.cancel("mine", "key-a")
    assert [request["request_id"] for request in found["requests"]] == ["req-1"]
    assert "key-a" not in str(found)
    api.worker.say(output("", 0, "abort"), output("", 0, "stop", of="req-2"))
    await client.finished()
    await other.finished()
    assert await api.get("mine", "key-c") == UNKNOWN
    assert (await api.get("mine", "key-a"))["status"] == "aborted"
    assert (await api.get("mine", "key-b"))["status"] == "finished"


async def test_pings() -> None:
    api = Api()
    client = api.start(keep_alive_s=5.0)
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
    client = api.start(n=2)
    api.worker.say(output(" one", 1, of="req-1-0"), output("", 1, "stop", of="req-1-1"))
    api.worker.die()
    await client.finished()
    lost = await api.get("req-1")
    assert (lost["status"], lost["tokens_generated"]) == ("failed", 2)
    assert [choice["finish_reason"] for choice in lost["choices"]] == [None, "stop"]
    (ended,) = [entry for entry in api.worker.entries() if entry.event == "finished"]
    assert (ended.reason, ended.request_id, ended.num_generated) == ("error", "req-1-0", 1)
    assert ended.client_request_id == "mine"
    assert not (await api.cancel("req-1"))["cancelled"]
    assert await api.ping("req-1") == UNKNOWN


# The result of a cancelled request: for a client that is still there, and for a while after...


async def test_cancelling_a_running_request_gives_its_client_the_true_end() -> None:
    api = Api()
    client = api.start()
    api.worker.say(output(" one", 1), events=[api.worker.event("admitted")])
    found = (await api.cancel("req-1"))["requests"][0]
    assert (found["status"], found["phase"], found["tokens_generated"]) == ("running", "decode", 1)
    api.worker.say(output(" two", 2))  # the step in flight
    api.worker.say(output(" held", 2, "abort"))
    await client.finished()
    last = client.chunks[-1]
    assert last["choices"] == [
        {
            "index": 0,
            "text": " held",
            "logprobs": None,
            "finish_reason": "abort",
            "stop_reason": None,
        }
    ]
    assert last["partial"] is True
    assert last["usage"]["completion_tokens"] == 2
    assert last["cancellation_info"] == {
        "reason": "api",
        "phase": "decode",
        "position": 1,
        "tokens_generated": 2,
        "tokens_remaining": 6,
    }
    texts = [choice["text"] for chunk in client.chunks for choice in chunk["choices"]]
    assert texts == [" one", " two", " held"]


async def test_partial_results_are_kept_for_their_time() -> None:
    api = Api(keep_results_s=60.0)
    client = api.start(chat=True, prompt="user: hello")
    api.worker.say(output(" one", 1))
    client.leave()
    await client.finished()
    assert "prompt" not in await api.get("mine"), "a result has one"
    api.worker.say(output(" two", 2), output("", 2, "abort"))
    kept = [await api.get(name) for name in ("req-1", "chatcmpl-req-1", "mine")]
    assert kept[0] == kept[1] == kept[2]
    assert kept[0]["object"] == "chat.completion"
    assert kept[0]["choices"][0]["message"]["content"] == " one two"
    assert kept[0]["prompt"] == "user: hello"
    assert kept[0]["choices"][0]["finish_reason"] == "abort"
    assert (kept[0]["status"], kept[0]["partial"]) == ("aborted", True)
    assert kept[0]["cancellation_info"]["reason"] == "user_disconnect"
    assert kept[0]["cancellation"]["method"] == "connection"
    await asyncio.sleep(59.9)
    assert (await api.get("mine"))["status"] == "aborted"
    await asyncio.sleep(0.2)
    for name in ("req-1", "chatcmpl-req-1", "mine"):
        assert await api.get(name) == UNKNOWN
    assert len(api.worker.link.archive) == 0


@pytest.mark.parametrize("most", [0, 2])
async def test_only_so_many_results_are_kept(most: int) -> None:
    api = Api(keep_results=most)
    for number in (1, 2, 3):
        client = api.start("same")
        api.worker.say(output("", 0, "abort", of=f"req-{number}"))
        await client.finished()
    assert await api.get("req-1") == UNKNOWN
    if most:
        assert (await api.get("same"))["request_id"] == "req-3", "the latest of the ended ones"
        assert (await api.get("req-2"))["status"] == "aborted"
    else:
        assert await api.get("same") == UNKNOWN


async def test_a_cancel_that_came_after_the_last_token() -> None:
    api = Api()
    client = api.start()
    assert (await api.cancel("req-1"))["cancelled"]
    api.worker.say(output(" one", 1), output("", 1, "length"))  # it was on its way
    await client.finished()
    assert client.chunks[0]["choices"][0]["text"] == " one"
    assert "partial" not in client.chunks[-1]
    ended = await api.get("req-1")
    assert ended["status"] == "finished"
    assert ended["cancellation"]["reason"] == "api", "asked for, in vain"
    collector = api.worker.link.collector
    assert not collector.cancellations
    assert collector.generated_by_reason["length",] == 1


async def test_cancelling_n_answers() -> None:
    api = Api()
    client = api.start(n=2)
    api.worker.say(output(" a", 1, of="req-1-0"), output(" b", 1, of="req-1-1"))
    api.worker.say(output("", 1, "stop", of="req-1-0"))
    await settled(lambda: b'"stop"' in client.body)
    found = await api.cancel("req-1")
    assert found["requests"][0]["tokens_generated"] == 2
    assert await api.cancel("req-1-1") == UNKNOWN, "an answer is not a request"
    api.worker.say(output(" c", 2, of="req-1-1"), output("", 2, "abort", of="req-1-1"))
    await client.finished()
    last = client.chunks[-1]
    assert [choice["index"] for choice in last["choices"]] == [1]
    assert last["usage"]["completion_tokens"] == 3
    assert last["cancellation_info"]["tokens_remaining"] == 6
    kept = await api.get("req-1")
    finishes = [(c["text"], c["finish_reason"]) for c in kept["choices"]]
    assert finishes == [(" a", "stop"), (" b c", "abort")]


async def test_an_abort_that_the_frontend_did_not_send_has_no_reason() -> None:
    api = Api()
    client = api.start()
    api.worker.say(output("", 0, "abort"))  # as the fault abort-by-prefix would have it
    await client.finished()
    assert client.chunks[-1]["cancellation_info"]["reason"] is None
    kept = await api.get("req-1")
    assert (kept["cancellation"], kept["status"]) == (None, "aborted")
