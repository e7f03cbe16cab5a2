"""n answers to one request, and the outbox in which they wait for a slow reader."""

import gc
import tracemalloc

import pytest

from reference_engine.core.request import Sampling
from reference_engine.protocol import AddRequest
from reference_engine.serve.client_request import MAX_QUEUED, Archive, ClientRequest, Outbox
from tests.reference_engine.fake_worker import (
    AsgiClient,
    FakeWorker,
    generation,
    output,
    respond,
    settled,
)

pytestmark = pytest.mark.anyio


async def test_n_answers_are_n_requests_of_one() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker, n=2, sampling=Sampling(max_tokens=8, seed=7)))
    await worker.arrived.wait()
    first, second = (m for m in worker.received if isinstance(m, AddRequest))
    assert (first.request_id, second.request_id) == ("req-1-0", "req-1-1")
    assert first.parent_id == second.parent_id == "req-1"
    assert first.sampling.seed == 7
    assert second.sampling.seed != 7
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
    assert client.chunks[-1]["usage"]["completion_tokens"] == 3
    assert client.chunks[-1]["usage"]["prompt_tokens"] == 2
    collector = worker.link.collector
    assert (collector.num_answers.total, collector.most_generated_tokens.total) == (2, 2)
    assert repr(worker.link) == "<WorkerLink live 0 choices 0>"


async def test_leaving_ends_all_n_answers_with_one_abort() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker, n=3, stream=False))
    await worker.arrived.wait()
    client.leave()
    await client.finished()
    assert worker.events() == ["arrived", "disconnected", "abort_sent"]
    assert worker.aborts() == [("req-1", "user_disconnect")]
    worker.say(*(output("", 0, "abort", of=f"req-1-{index}") for index in range(3)))
    assert repr(worker.link) == "<WorkerLink live 0 choices 0>"


async def test_the_body_of_n_answers_has_each_in_its_place() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker, n=2, stream=False))
    await worker.arrived.wait()
    worker.say(output(" b", 1, "stop", of="req-1-1"))
    worker.say(output(" a", 1, "length", of="req-1-0"))
    await client.finished()
    choices = [(c["index"], c["text"], c["finish_reason"]) for c in client.json["choices"]]
    assert choices == [(0, " a", "length"), (1, " b", "stop")]


async def test_continuous_usage_counts_what_was_sent() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker, n=2, continuous_usage=True))
    await worker.arrived.wait()
    worker.say(output(" a", 1, of="req-1-0"), output(" b", 1, of="req-1-1"))
    worker.say(output("", 1, "stop", of="req-1-0"), output("", 1, "stop", of="req-1-1"))
    await client.finished()
    assert [c["usage"]["completion_tokens"] for c in client.chunks] == [1, 2, 2, 2, 2]


async def test_the_outbox_of_a_slow_reader_is_bounded() -> None:
    outbox = Outbox()
    for number in range(1, 1001):
        outbox.put(number % 2, output(f" {number}", number))
    assert len(outbox) == MAX_QUEUED
    outbox.close()
    texts, last = ["", ""], [0, 0]
    while (item := await outbox.get()) is not None:
        index, piece = item
        texts[index] += piece.text
        last[index] = piece.num_generated
    assert texts[0] == "".join(f" {number}" for number in range(2, 1001, 2))
    assert texts[1] == "".join(f" {number}" for number in range(1, 1001, 2))
    assert last == [1000, 999]


async def test_each_answer_has_room_for_its_last_word() -> None:
    outbox = Outbox()
    for number in range(MAX_QUEUED):
        outbox.put(0, output(" word", number))
    outbox.put(1, output("", 0, "abort"))
    assert len(outbox) == MAX_QUEUED + 1


NUM_TOKENS = 4000
WORD = " word"


def ended_request(n: int, reason: str) -> ClientRequest:
    request = ClientRequest(
        "req-1", generation(n=n), client_request_id=None, owner=None, created=0, arrived_ns=0
    )
    for choice in request.choices:
        for number in range(1, NUM_TOKENS + 1):
            # Each word is a string of its own, as it is when it comes from a message.
            word = "".join((" ", "word"))
            choice.take(output(word, number, reason if number == NUM_TOKENS else None))
    request.outbox.close()
    return request


@pytest.mark.parametrize("n", [1, 16])
@pytest.mark.parametrize(("reason", "num_words"), [("abort", NUM_TOKENS), ("length", 0)])
def test_an_ended_request_takes_little_more_than_its_text(
    n: int, reason: str, num_words: int
) -> None:
    archive = Archive(10, keep_s=1.0)
    gc.collect()
    tracemalloc.start()
    try:
        archive.add(ended_request(n, reason), 0)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    kept = archive.by_id("req-1", 0)
    assert kept is not None
    assert [choice.text for choice in kept.choices] == [WORD * num_words] * n
    assert held < n * num_words * len(WORD) + 8000 + n * 2000
