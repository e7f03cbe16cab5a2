"""The result of a cancelled request: for a client that is still there, and for a while after."""

import asyncio

import pytest

from tests.reference_engine.fake_worker import output, settled
from tests.reference_engine.serve.test_requests_api import UNKNOWN, Api

pytestmark = pytest.mark.anyio


async def test_cancelling_a_running_request_gives_its_client_the_true_end() -> None:
    api = Api()
    client = await api.start()
    api.worker.say(output(" one", 1), events=[api.worker.event("admitted")])
    found = (await api.cancel("req-1"))["requests"][0]
    assert (found["status"], found["phase"], found["tokens_generated"]) == ("running", "decode", 1)
    api.worker.say(output(" two", 2))  # the step in flight
    api.worker.say(output(" held", 2, "abort"))
    await client.finished()
    last = client.chunks[-1]
    assert last["choices"] == [
        {"index": 0, "text": " held", "logprobs": None, "finish_reason": "abort"}
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


@pytest.mark.parametrize("chat", [True, False])
async def test_the_body_of_a_cancelled_request(chat: bool) -> None:
    api = Api()
    client = await api.start(stream=False, chat=chat)
    await api.cancel("mine")
    api.worker.say(output("", 0, "abort", phase="waiting"))
    await client.finished()
    assert client.status == 200
    (choice,) = client.json["choices"]
    assert choice["finish_reason"] == "abort"
    assert (choice["message"]["content"] if chat else choice["text"]) == ""
    assert client.json["partial"] is True
    assert client.json["cancellation_info"]["phase"] == "waiting"
    assert client.json["usage"]["completion_tokens"] == 0


async def test_partial_results_are_kept_for_their_time() -> None:
    api = Api(keep_results_s=60.0)
    client = await api.start(chat=True)
    api.worker.say(output(" one", 1))
    client.leave()
    await client.finished()
    api.worker.say(output(" two", 2), output("", 2, "abort"))
    for name in ("req-1", "chatcmpl-req-1", "mine"):
        kept = await api.get(name)
        assert kept["object"] == "chat.completion"
        assert kept["choices"][0]["message"]["content"] == " one two"
        assert kept["choices"][0]["finish_reason"] == "abort"
        assert kept["status"] == "aborted"
        assert kept["partial"] is True
        assert kept["cancellation_info"]["reason"] == "user_disconnect"
        assert kept["cancellation"]["method"] == "connection"
    await asyncio.sleep(59.9)
    assert (await api.get("mine"))["status"] == "aborted"
    await asyncio.sleep(0.2)
    for name in ("req-1", "chatcmpl-req-1", "mine"):
        assert await api.get(name) == UNKNOWN
    assert len(api.worker.link.archive) == 0


async def test_only_so_many_results_are_kept() -> None:
    api = Api(keep_results=2)
    for number in (1, 2, 3):
        client = await api.start("same")
        api.worker.say(output("", 0, "abort", of=f"req-{number}"))
        await client.finished()
    assert await api.get("req-1") == UNKNOWN
    assert (await api.get("same"))["request_id"] == "req-3", "of the ended ones the latest"
    assert (await api.get("req-2"))["status"] == "aborted"


async def test_nothing_at_all_can_be_kept() -> None:
    api = Api(keep_results=0)
    client = await api.start()
    api.worker.say(output(" one", 1, "stop"))
    await client.finished()
    assert await api.get("mine") == UNKNOWN


async def test_a_cancel_that_came_after_the_last_token() -> None:
    api = Api()
    client = await api.start()
    assert (await api.cancel("req-1"))["cancelled"]
    api.worker.say(output(" one", 1), output("", 1, "length"))  # it was on its way
    await client.finished()
    assert client.chunks[0]["choices"][0]["text"] == " one"
    assert "partial" not in client.chunks[-1]
    ended = await api.get("req-1")
    assert ended["status"] == "finished"
    assert ended["cancellation"]["reason"] == "api", "asked for, in vain"
    assert not api.worker.link.collector.cancellations


async def test_cancelling_n_answers() -> None:
    api = Api()
    client = await api.start(n=2)
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
    client = await api.start()
    api.worker.say(output("", 0, "abort"))  # as the fault abort-by-prefix would have it
    await client.finished()
    assert client.chunks[-1]["cancellation_info"]["reason"] is None
    kept = await api.get("req-1")
    assert kept["cancellation"] is None
    assert kept["status"] == "aborted"
