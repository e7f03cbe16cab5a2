"""HTTP/1.1 as gateways speak it: kept connections, pages of routers, odd requests."""

import json
import socket
from http.client import HTTPConnection

import pytest

from harness.upstream.connection import MOST_BODY_BYTES
from harness.upstream.orders import Order
from tests.harness.upstream.behind import WAIT_S, Running, body_of, upstream

PAGES = (
    *("/health", "/healthz", "/v1/models", "/v1/models/any", "/get_model_info"),
    *("/get_server_info", "/model_info", "/server_info", "/version", "/metrics"),
)


def raw(server: Running, data: bytes) -> bytes:
    """The answer to bytes, up to the connection's end."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as sock:
        sock.sendall(data)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def post(body: bytes, *fields: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: u", *fields, f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def test_a_kept_connection_carries_one_request_after_the_other() -> None:
    with upstream() as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        for name, stream in (("a", True), ("b", False), ("c", True)):
            body = body_of("chat", Order(id=name), tokens=2, stream=stream)
            connection.request("POST", "/v1/chat/completions", body)
            assert b" w2" in connection.getresponse().read()
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b"{}"
        connection.close()
        seen = [server.over(name) for name in "abc"]
        assert len({one["connection"] for one in seen}) == 1
        assert [one["nth"] for one in seen] == [1, 3, 5]
        page = json.loads(server.get("/walkaway/truth")[1])
        assert page["connections"]["open"] == 1, "the one that asks"
        assert (page["asked"], page["pages"]["/health"]) == (3, 3)


def test_requests_that_come_at_once_are_answered_in_their_order() -> None:
    bodies = [body_of("completions", Order(id=name), tokens=1, stream=False) for name in "ab"]
    with upstream() as server:
        answer = raw(server, post(bodies[0]) + post(bodies[1], "connection: close"))
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        assert server.over("a")["ended_ns"] < server.over("b")["arrived_ns"]


def test_an_offer_to_upgrade_and_a_wait_for_100_are_answered() -> None:
    body = body_of("completions", Order(id="a"), tokens=1, stream=False)
    with upstream() as server:
        offer = ("connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAAA")
        asked = post(body, *offer) + post(body, "expect: 100-continue", "connection: close")
        answer = raw(server, asked)
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        assert b" w1" in answer


def test_a_body_in_chunks_is_read() -> None:
    body = body_of("completions", Order(id="a"), tokens=1, stream=False)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    with upstream() as server:
        answer = raw(server, head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert answer.startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("page", PAGES)
def test_what_routers_ask_for_is_there(page: str, method: str) -> None:
    with upstream() as server:
        status, body = server.get(page, method)
        assert status == 200
        assert bool(body) == (method == "GET")


def test_the_gauges_are_those_of_vllm() -> None:
    with upstream(model="m") as server:
        page = server.get("/metrics")[1].decode()
    assert 'vllm:num_requests_running{model_name="m"} 0\n' in page
    assert 'vllm:num_requests_waiting{model_name="m"} 0\n' in page


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /nowhere HTTP/1.1\r\nconnection: close\r\n\r\n", 404),
        (b"POST /v1/embeddings HTTP/1.1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n", 404),
        (post(b"{", "connection: close"), 400),
        (post(b"[]", "connection: close"), 400),
        (post(b'{"prompt": "x", "n": 2}', "connection: close"), 400),
        (post(b'{"prompt": "x", "max_tokens": 0}', "connection: close"), 400),
        (post(b'{"prompt": %b"x"%b}' % (b"[" * 5000, b"]" * 5000), "connection: close"), 400),
        (post(b'{"prompt": "[walkaway act=odd]"}', "connection: close"), 400),
        (b"GET /walkaway/truth?since=x HTTP/1.1\r\nconnection: close\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"no HTTP at all\r\n\r\n", 400),
    ],
)
def test_what_cannot_be_answered_is_refused(data: bytes, status: int) -> None:
    with upstream() as server:
        assert raw(server, data).startswith(b"HTTP/1.1 %d" % status)


def test_a_body_that_is_too_large_is_refused() -> None:
    with upstream() as server:
        answer = raw(server, post(bytes(MOST_BODY_BYTES + 1)))
        assert answer.startswith(b"HTTP/1.1 413")
