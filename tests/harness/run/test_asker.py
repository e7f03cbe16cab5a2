"""The harness's own requests: does the server still serve, and how many slots has it?"""

import json
import time
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest

from harness.experiments.limit import FIRST_STREAMS
from harness.run.preflight import UncountedSlotsError, count_slots, why_not_counted
from harness.run.server import Server
from harness.run.settle import Asker, NoAnswerError, NotServedError, probe_service
from harness.workload.target import Target

Answer = Callable[[httpx.Request], httpx.Response]
NO_ANSWER = "the stream ended without text, a finish reason or a count of tokens"
LAST = {"choices": [{"text": "", "finish_reason": "length"}]}
TOKEN = {"choices": [{"index": 0, "text": " w"}]}


def stream(*events: object) -> Answer:
    """An event a receive."""
    lines = [*(b"data: %b\n\n" % json.dumps(one).encode() for one in events), b"data: [DONE]\n\n"]
    return lambda _: httpx.Response(200, content=iter(lines))


def raw(body: bytes) -> Answer:
    return lambda _: httpx.Response(200, content=body)


def clock(step_s: int) -> Callable[[], int]:
    """Each reading is `step_s` seconds later."""
    times = iter(range(0, 10**12, step_s * 10**9))
    return lambda: next(times)


def asking(answer: Answer, clock_ns: Callable[[], int], *, health: int = 200) -> Asker:
    def of_page(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(health)
        assert request.headers["connection"] == "close"  # servers close one after a stream
        return answer(request)

    return Asker(
        client=httpx.Client(transport=httpx.MockTransport(of_page)),
        url="http://s",
        target=Target(name="t", description="d", settle_s=0.0),
        model="m",
        clock_ns=clock_ns,
    )


@pytest.mark.parametrize(
    ("status", "health"),
    [(200, True), (204, True), (307, None), (401, None), (404, None), (503, False)],
)
def test_a_server_that_serves_is_well(status: int, health: bool | None) -> None:
    probing = probe_service(asking(stream(*[TOKEN] * 4), clock(1), health=status), longest_s=30)
    assert (probing.sent, probing.healthy, probing.errors) == (3, health, [])
    assert probing.ttft_s == [2.0] * 3  # a reading at the deadline, another at the token


def no_answer(_: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("nothing came")


@pytest.mark.parametrize(
    ("answer", "step_s", "error", "is_silent"),
    [
        (lambda _: httpx.Response(503), 1, "HTTP 503", False),
        (stream(), 1, NO_ANSWER, False),
        (stream(LAST), 1, "the answer was empty", False),
        (
            stream({"usage": {"completion_tokens": 4}}),
            *(1, "the server counts 4 tokens of an answer, but no event of it shows any text"),
            False,
        ),
        (stream({"error": {"message": "no"}}), 1, "no", False),
        (stream("?"), 1, f'{NO_ANSWER}; it could not be read: "?" is no object', False),
        (stream({"error": "\ud800"}), 1, "?", False),
        (raw(b'{"error": {"message": "out of blocks"}}'), 1, "out of blocks", False),
        (raw(b"<html>"), 1, "the server sent no stream of events, but '<html>'", False),
        (raw(b"event: error\ndata: engine died\n\n"), 1, "engine died", False),
        (stream(*[TOKEN] * 50), 3, "an answer without end (is `max_tokens` ignored?)", False),
        (stream(TOKEN), 30, "the answer took too long", True),
        (no_answer, 1, "ReadTimeout within 20 s", True),
    ],
)
def test_a_first_wrong_answer_is_the_last_request(
    answer: Answer, step_s: int, error: str, is_silent: bool
) -> None:
    probing = probe_service(asking(answer, clock(step_s)), longest_s=30)
    assert (probing.sent, probing.errors, probing.is_silent) == (1, [error], is_silent)


@pytest.mark.parametrize(("key", "fewest"), [("none", 1), (None, 512)])
def test_an_answer_that_may_be_long_is_left_once_it_shows_that_the_server_serves(
    key: str | None, fewest: int
) -> None:
    asker = asking(stream(*[TOKEN] * 50), clock(3))
    target = asker.target.model_copy(update={"limit_key": key})
    probing = probe_service(replace(asker, target=target, fewest_tokens=fewest), longest_s=20)
    assert (probing.sent, probing.errors, probing.ttft_s) == (3, [], [6.0] * 3)


def test_a_server_that_takes_no_short_answer_is_asked_for_a_longer_one() -> None:
    asked = []

    def at_least_16(request: httpx.Request) -> httpx.Response:
        asked.append(tokens := json.loads(request.content)["max_tokens"])
        if tokens < 16:
            return httpx.Response(400, json={"error": "max_tokens must be at least 16"})
        return stream(*[TOKEN] * tokens)(request)

    probing = probe_service(asking(at_least_16, time.perf_counter_ns), longest_s=30)
    assert (probing.sent, probing.errors) == (3, [])
    assert asked == [4, 16] * 3

    def never_enough(request: httpx.Request) -> httpx.Response:
        least = json.loads(request.content)["max_tokens"] + 1
        return httpx.Response(400, json={"error": f"max_tokens must be at least {least}"})

    probing = probe_service(asking(never_enough, time.perf_counter_ns), longest_s=30)
    assert probing.errors == ["HTTP 400: max_tokens must be at least 6"]


def test_slots_are_not_counted_for_ever_nor_on_a_server_that_refuses() -> None:
    sent = []

    def three_tokens(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return stream(*[TOKEN] * 3)(request)

    assert count_slots(asking(three_tokens, clock(10)), longest_s=1e6) is None
    assert len(sent) <= FIRST_STREAMS, "it went on although its time was over"
    busy = asking(lambda _: httpx.Response(429), time.perf_counter_ns)
    with pytest.raises(NotServedError, match="429"):
        count_slots(busy, longest_s=5)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (NotServedError("HTTP 429: busy", 429), "`walkaway conform --target http://s` judges"),
        (NotServedError("HTTP 400: no", 400), "give it with --set load.slots=N"),
    ],
)
def test_slots_that_cannot_be_counted_are_no_riddle(error: NotServedError, why: str) -> None:
    server = Server(url="http://s", model="m", config=None, engine=None)
    assert why in why_not_counted(error, server)
    assert str(error) in why_not_counted(error, server)
    with pytest.raises(UncountedSlotsError, match="works for clients that have left"):
        why_not_counted(NoAnswerError("ReadTimeout within 5 s"), server)
