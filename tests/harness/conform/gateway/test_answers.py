"""The answer of a client that stays, by the upstream's own record of it."""

import pytest

from harness.conform.gateway.bench import GatewayAnswer
from harness.conform.gateway.ledger import UpstreamRequest
from harness.records import Outcome
from tests.made_up.rows import request_row

ASKED = 5


def made(tokens: int, why: str) -> UpstreamRequest:
    return UpstreamRequest("x", True, 0, tokens, [], False, why)


@pytest.mark.parametrize(
    ("text", "requests", "has_all"),
    [
        ("w1 w2 w3 w4 w5", [made(5, "length")], True),
        ("w1 w2 w3 w4 w5", [], True),  # of a cache
        ("w1 w2 w3 w4 w5 w6 w7", [made(7, "length")], True),  # the gateway asked for more
        ("w6 w7", [made(5, "length")], False),  # the rest of another answer
        ("w1 w2 w3", [made(3, "told")], False),  # broken off
        ("w1 w2 w3", [made(3, "left"), made(5, "stop")], False),
        ("", [made(5, "length")], False),
    ],
)
def test_an_answer_is_whole_by_what_the_upstream_made_for_it(
    text: str, requests: list[UpstreamRequest], *, has_all: bool
) -> None:
    row = request_row("x", sent_ns=0, ended_ns=1, outcome=Outcome.COMPLETED, answer=text)
    assert GatewayAnswer(row, requests).has_all(ASKED) is has_all
