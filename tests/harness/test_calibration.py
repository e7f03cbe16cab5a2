"""Prompts get the wanted length on a tokenizer that nobody here knows."""

import json
from collections.abc import Callable

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.run.preflight import CalibrationError, calibrate
from harness.workload.prompts import BYTES_ARE_TOKENS, fit_scale
from tests.harness.load.asking import PLAN, plan_of

Answer = Callable[[httpx.Request], httpx.Response]


def client(answer: Answer) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(answer))


def tokenizer(request: httpx.Request) -> httpx.Response:
    """Four bytes a token and eleven for the template."""
    body = json.loads(request.content)
    assert (body["max_tokens"], body["stream"]) == (1, False)
    text = body["messages"][0]["content"]
    usage = {"prompt_tokens": 11 + -(-len(text) // 4), "completion_tokens": 1}
    return httpx.Response(200, json={"choices": [], "usage": usage})


def test_what_the_server_counts_decides() -> None:
    chat = plan_of(PLAN.url, target={"path": "/v1/chat/completions"})
    scale = calibrate(client(tokenizer), chat)
    assert scale.bytes_per_token == pytest.approx(4)
    assert scale.overhead_tokens == pytest.approx(11)
    assert [size for size, _ in scale.samples] == [64, 256, 512, 1024]
    assert scale.num_bytes(100) == 356
    assert scale.num_bytes(3) == 1  # the template alone is longer


def broken(_: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("nothing came")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda _: httpx.Response(400, json={"error": {"message": "no"}}), "HTTP 400: no"),
        (lambda _: httpx.Response(200, content=b"hm"), "makes no sense"),
        (
            lambda _: httpx.Response(200, content=b'{"choices":[{"text":"\xff"}]}'),
            "makes no sense",
        ),
        (lambda _: httpx.Response(200, json={"usage": {"prompt_tokens": 2**70}}), "makes no sense"),
        (lambda _: httpx.Response(200, json={"choices": []}), "do not tell the tokens"),
        (lambda _: httpx.Response(200, json={"usage": {"prompt_tokens": 5}}), "make no sense"),
        (broken, "nothing came"),
    ],
)
def test_a_server_that_does_not_tell(answer: Answer, why: str) -> None:
    with pytest.raises(CalibrationError, match=why):
        calibrate(client(answer), PLAN)


@given(
    rate=st.floats(0.5, 20),
    overhead=st.floats(0, 500),
    wanted=st.integers(600, 100_000),
)
def test_any_straight_line_is_found_again(rate: float, overhead: float, wanted: int) -> None:
    samples = [(size, round(overhead + size / rate)) for size in (64, 256, 512, 1024)]
    scale = fit_scale(samples)
    assert scale is not None
    made = overhead + scale.num_bytes(wanted) / rate
    assert made == pytest.approx(wanted, rel=0.2)  # samples are whole tokens, and wanted far off


@pytest.mark.parametrize("samples", [[], [(64, 9)], [(64, 9), (64, 10)], [(64, 9), (128, 9)]])
def test_too_little_to_draw_a_line(samples: list[tuple[int, int]]) -> None:
    assert fit_scale(samples) is None


def test_bytes_are_tokens() -> None:
    assert [BYTES_ARE_TOKENS.num_bytes(n) for n in (1, 7, 4096)] == [1, 7, 4096]
