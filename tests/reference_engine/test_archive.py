"""What an ended request leaves behind: little more than the text of its answers."""

import gc
import tracemalloc

import pytest

from reference_engine.serve.client_request import Archive, ClientRequest
from tests.reference_engine.fake_worker import generation, output

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
