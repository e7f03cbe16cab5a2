"""A schedule in words: the sentence that a maintainer reads first."""

import pytest

from harness.records import Delivery, Way
from harness.search.broken import Broken, Violation
from harness.search.schedule import Feature, Leave, Phase, Schedule, Visit
from harness.search.words import sentence_of, sentence_of_many

SEEN = Violation(broken=Broken.LOST, said="1 of 4 slots is still held")


@pytest.mark.parametrize(
    ("visit", "said"),
    [
        (Visit(leave=Leave(at=2)), "closes its connection after 2 tokens"),
        (
            Visit(n=2, leave=Leave(way=Way.RST, phase=Phase.SENT, at=1)),
            "asks for 2 answers of 64 tokens, and resets its connection 1 step after it asked",
        ),
        (
            Visit(features=(Feature.SCHEMA, Feature.CHAT), leave=Leave(phase=Phase.LAST, at=1)),
            "(a JSON schema) on /v1/chat/completions, and closes its connection with 1 token to",
        ),
        (
            Visit(prompt=300, shared=150, leave=Leave(phase=Phase.PREFILL, at=0.5)),
            "(a prompt of 300 tokens, 150 tokens of it shared), and closes its connection at 50%",
        ),
        (Visit(delivery=Delivery.UNARY), "asks for an answer in one piece of 64 tokens, and stays"),
    ],
)
def test_a_visit_is_one_clause(visit: Visit, said: str) -> None:
    sentence = sentence_of(Schedule(seed=1, visits=(visit,)), SEEN)
    assert sentence.startswith("Client 0 ")
    assert said in sentence
    assert sentence.endswith("; then: 1 of 4 slots is still held.")


def test_what_follows_another_visit_says_so_and_long_schedules_are_counted() -> None:
    again = Visit(after=0, repeats=0, same_id=True, at=2)
    two = Schedule(seed=1, visits=(Visit(leave=Leave()), again), bystanders=1)
    sentence = sentence_of(two, SEEN)
    assert "with the prompt of client 0 and its request id, 2 steps after client 0 was" in sentence
    assert "while 1 greedy stream runs to the end" in sentence
    many = Schedule(seed=1, visits=(Visit(leave=Leave()), *[Visit()] * 5))
    assert sentence_of(many, SEEN).startswith("Of 6 requests 1 are left by their clients")
    assert sentence_of_many([two, many], SEEN) == (
        "2 schedules in a row, with 8 requests, 2 of them left by their clients (no fewer were "
        "found to show it); then: 1 of 4 slots is still held."
    )
    sentence = sentence_of_many([two, many], SEEN, among=6)
    assert "show it; how often it comes was counted with the whole row of 6); then" in sentence
