"""HTTP/2: what a server must begin with, and streams that break."""

from collections.abc import Iterator
from typing import cast

import pytest
from h2.exceptions import ProtocolError

from harness.client.http2 import Http2Client, Http2Connection, Http2Exchange, check_first_frame
from harness.client.http_requests import TargetFrontend
from harness.client.sse import MAX_EVENT_BYTES
from harness.records import Outcome
from harness.workload.abandon import never
from tests.harness.client.asking import PLAN, SPEC

SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@pytest.mark.parametrize("said", [b"HTTP/1.1 404 Not Found\r\n\r\n", b"HTTP/1.0 400 Bad", b"nope"])
def test_a_server_of_another_protocol_is_known_by_its_first_bytes(said: bytes) -> None:
    with pytest.raises(ProtocolError, match=said.split(b"\r\n")[0].decode()):
        check_first_frame(said)


@pytest.mark.parametrize("received", [b"", SETTINGS[:3], SETTINGS[:4], SETTINGS * 2])
def test_a_server_that_begins_with_settings_speaks_http2(received: bytes) -> None:
    check_first_frame(received)


@pytest.fixture
def exchange() -> Iterator[Http2Exchange]:
    """Its answer has begun."""
    client = Http2Client(PLAN, api_key=None)
    begun = client.begin(SPEC, "Hello", never)
    begun.headers(200)
    begun.read(b'data: {"choices": [{"text": "a"}]}\n\n', 1)
    yield begun
    client.close()


def test_a_stream_that_breaks_after_its_end_is_complete(exchange: Http2Exchange) -> None:
    exchange.read(b"data: [DONE]\n", 2)  # the blank line is missing
    exchange.lost("the server reset the stream")
    assert exchange.stream.outcome is Outcome.COMPLETED


def test_a_stream_that_breaks_fails_with_the_reason(exchange: Http2Exchange) -> None:
    exchange.read(b'data: {"choices": [{"text": "b"', 2)
    exchange.lost("the server reset the stream")
    assert (exchange.stream.outcome, exchange.stream.tokens_read) == (Outcome.FAILED, 1)
    assert exchange.stream.error == "the server reset the stream"


def test_an_event_without_end_fails_the_request(exchange: Http2Exchange) -> None:
    exchange.read(b"data: " + b"x" * (MAX_EVENT_BYTES + 100), 2)
    assert exchange.stream.error == f"the server sent an event of more than {MAX_EVENT_BYTES} bytes"


class Failing:
    """A connection on which the answer fails while the server sends more."""

    def __init__(self) -> None:
        self.calls: dict[int, Http2Exchange] = {}
        self.cancelled: list[int] = []

    def ask(self, _headers: object, _body: bytes, call: Http2Exchange) -> int:
        self.calls[1] = call
        call.headers(200)
        call.read(b'data: {"error": "engine died"}\n\n', 1)
        return 1

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)
        del self.calls[number]


def test_a_stream_that_has_failed_is_cancelled() -> None:
    failing = Failing()

    class Client(Http2Client):
        def connection(self, _frontend: TargetFrontend) -> Http2Connection:
            return cast(Http2Connection, failing)

    begun = Client(PLAN, api_key=None).begin(SPEC, "Hello", never)
    begun.see_through()
    assert begun.stream.error == "engine died"
    assert failing.cancelled == [1]
