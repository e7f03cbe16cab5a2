"""The harness's own requests: counting slots by trying, and asking whether anybody is served."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from harness.http_client import http_client
from harness.run.preflight import Span, count_slots, find_limit, most_at_once
from harness.run.settle import Asker, probe_service
from harness.workload.target import Target

Answer = Callable[[BaseHTTPRequestHandler], None]


def server_with(slots: int, *, stagger: int = 0) -> Callable[[int, int], Sequence[Span]]:
    """A server that runs so many at once, a token each turn; each comes `stagger` turns later."""

    def ask(num_streams: int, tokens: int) -> list[Span]:
        free, spans = [0] * slots, []
        for number in range(num_streams):
            slot = min(range(slots), key=free.__getitem__)
            begin = max(free[slot], number * stagger)
            free[slot] = begin + tokens
            spans.append((begin + 1, begin + tokens - 1))
        return spans

    return ask


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8, 31, 32, 200])
def test_the_number_of_slots_is_found(slots: int) -> None:
    assert find_limit(server_with(slots)) == slots


def test_streams_that_come_one_after_the_other_are_made_longer() -> None:
    assert find_limit(server_with(6, stagger=9)) == 6


def test_a_server_without_a_limit_has_none() -> None:
    assert find_limit(server_with(10_000)) is None


def test_spans_that_only_touch_are_not_together() -> None:
    assert most_at_once([(0, 5), (5, 9), (5, 8)]) == 2
    assert most_at_once([(0, 6), (5, 9), (5, 8)]) == 3
    assert most_at_once([]) == 0


class Server(ThreadingHTTPServer):
    request_queue_size = 256  # all come at once: of those who do not fit, some knock seconds later


@contextmanager
def serving(answer: Answer, *, health: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(health)
            self.end_headers()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            answer(self)

        def log_message(self, *_: object) -> None:
            return

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def stream(handler: BaseHTTPRequestHandler, *events: object) -> None:
    handler.send_response(200)
    handler.end_headers()
    for event in events:
        handler.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
    handler.wfile.write(b"data: [DONE]\n\n")


def nest_without_end(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"data: " + b"[" * 100_000 + b"\n\n")


def tokens(n: int) -> list[object]:
    return [{"choices": [{"index": 0, "text": " w"}]}] * n


def asker(client: httpx.Client, url: str) -> Asker:
    return Asker(
        client=client,
        url=url,
        target=Target(name="t", description="d", settle_s=0.0),
        model="m",
        clock_ns=time.perf_counter_ns,
    )


def test_a_server_that_serves_is_well() -> None:
    with serving(lambda h: stream(h, *tokens(4))) as url, httpx.Client(trust_env=False) as client:
        probing = probe_service(asker(client, url), longest_s=5)
    assert (probing.sent, probing.healthy, probing.errors) == (3, True, [])
    assert len(probing.ttft_s) == 3


def test_a_server_that_closes_after_a_stream_without_saying_so_is_well() -> None:
    asked: set[object] = set()

    def answer_once(handler: BaseHTTPRequestHandler) -> None:
        if handler.client_address in asked:
            handler.close_connection = True
            return
        asked.add(handler.client_address)
        event = f"data: {json.dumps(tokens(1)[0])}\n\n".encode()
        handler.protocol_version = "HTTP/1.1"  # which keeps the connection, unless it says not to
        handler.send_response(200)
        handler.send_header("content-length", str(len(event)))
        handler.end_headers()
        handler.wfile.write(event)
        handler.close_connection = False

    with serving(answer_once) as url, httpx.Client(trust_env=False) as client:
        probing = probe_service(asker(client, url), longest_s=5)
    assert probing.errors == []


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda h: h.send_error(503), "status 503"),
        (lambda h: stream(h), "the answer was empty"),
        (lambda h: stream(h, {"error": {"message": "no"}}), "an error in the stream"),
        (lambda h: stream(h, "?"), "an event is not in the dialect of OpenAI"),
        (lambda h: stream(h, {"error": "\ud800"}), "an event is not in the dialect of OpenAI"),
        (nest_without_end, "an event is not in the dialect of OpenAI"),
    ],
)
def test_the_first_that_is_not_answered_is_the_last_that_is_sent(
    answer: Answer, error: str
) -> None:
    with serving(answer) as url, httpx.Client(trust_env=False) as client:
        probing = probe_service(asker(client, url), longest_s=5)
    assert (probing.sent, probing.healthy, probing.errors) == (1, True, [error])
    assert not probing.is_silent, "that was an answer, though a wrong one"


def test_a_server_that_never_answers_is_not_waited_for_long() -> None:
    released = threading.Event()

    def wait(_: BaseHTTPRequestHandler) -> None:
        released.wait(20)

    with serving(wait) as url:
        with httpx.Client(trust_env=False) as client:
            probing = probe_service(asker(client, url), longest_s=0.2)
        released.set()
    assert probing.errors == ["ReadTimeout within 0.2 s"]
    assert probing.is_silent


def test_an_answer_without_end_is_an_answer() -> None:
    times = iter(range(0, 10**12, 3 * 10**9))  # each look at the clock, another 3 s have passed
    with serving(lambda h: stream(h, *tokens(50))) as url, httpx.Client(trust_env=False) as client:
        slow = replace(asker(client, url), clock_ns=lambda: next(times))
        probing = probe_service(slow, longest_s=30)
    assert probing.errors == ["an answer without end (is `max_tokens` ignored?)"]
    assert not probing.is_silent


def test_more_than_a_hundred_at_once_are_asked() -> None:
    """As many as wait for each other: fewer connections than that, and nobody is answered."""
    together = threading.Barrier(120, timeout=60)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        together.wait()
        stream(handler, *tokens(3))

    with (
        serving(answer) as url,
        http_client({}, ca_file=None, timeout_s=60, longest_s=60) as client,
        ThreadPoolExecutor(max_workers=120) as threads,
    ):
        asked = [threads.submit(asker(client, url).ask, "?", 3, longest_s=60) for _ in range(120)]
        assert all(len(one.result()) == 3 for one in asked)


def test_slots_are_not_counted_for_ever() -> None:
    times = iter(range(0, 10**12, 10**10))  # each look at the clock, another 10 s have passed
    with serving(lambda h: stream(h, *tokens(3))) as url, httpx.Client(trust_env=False) as client:
        slow = replace(asker(client, url), clock_ns=lambda: next(times))
        assert count_slots(slow, longest_s=1e6) is None
        assert next(times) < 200 * 10**9, "it went on although its time was over"


@pytest.mark.parametrize(("status", "health"), [(200, True), (404, None), (503, False)])
def test_what_it_says_of_its_health(status: int, health: bool | None) -> None:
    served = serving(lambda h: stream(h, *tokens(1)), health=status)
    with served as url, httpx.Client(trust_env=False) as client:
        assert probe_service(asker(client, url), longest_s=5).healthy is health


def test_who_is_not_served_counts_no_slots() -> None:
    with serving(lambda h: h.send_error(429)) as url, httpx.Client(trust_env=False) as client:
        assert count_slots(asker(client, url), longest_s=5) is None
