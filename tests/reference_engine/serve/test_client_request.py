"""The outbox in which outputs wait for a slow reader, and the archive of ended requests."""

import gc
import tracemalloc

import pytest

from reference_engine.serve.client_request import MAX_QUEUED, Archive, ClientRequest, Outbox
from tests.reference_engine.fake_worker import generation, output

pytestmark = pytest.mark.anyio


async def test_the_outbox_of_a_slow_reader_is_bounded() -> None:
    outbox = Outbox()
    for number in range(1, 1001):
        outbox.put(number % 2, output(f" {number}", number))
    assert len(outbox) == MAX_QUEUED
    outbox.put(2, output("", 0, "abort"))
    assert len(outbox) == MAX_QUEUED + 1, "each answer has room for its last word"
    outbox.close()
    texts, last = ["", "", ""], [0, 0, 0]
    while (item := await outbox.get()) is not None:
        index, piece = item
        texts[index] += piece.text
        last[index] = piece.num_generated
    assert texts[0] == "".join(f" {number}" for number in range(2, 1001, 2))
    assert texts[1] == "".join(f" {number}" for number in range(1, 1001, 2))
    assert last == [1000, 999, 0]


NUM_TOKENS = 4000
WORD = " word"


def ended_request(n: int, reason: str) -> ClientRequest:
    asked = generation(n=n, prompt="".join(["long", "prompt"]))
    request = ClientRequest(
        "req-1", asked, client_request_id=None, owner=None, created=0, arrived_ns=0
    )
    for choice in request.choices:
        for number in range(1, NUM_TOKENS + 1):
            # Each word is a string of its own, as it is when it comes from a message.
            word = "".join((" ", "word"))
            choice.take(output(word, number, reason if number == NUM_TOKENS else None))
    request.outbox.close()
    return request


@pytest.mark.parametrize(("reason", "num_words"), [("abort", NUM_TOKENS), ("length", 0)])
def test_an_ended_request_takes_little_more_than_its_text(reason: str, num_words: int) -> None:
    n = 16
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
    assert kept.asked.prompt == ("longprompt" if reason == "abort" else "")
    assert held < n * num_words * len(WORD) + 8000 + n * 2000
