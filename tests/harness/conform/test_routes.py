"""The routes other than streams, on a server that keeps answers."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest

from harness.conform.cases.next_request import STOPPED_AFTER, stop_a_turn
from harness.conform.finding import Finding
from harness.conform.known import Known
from harness.conform.routes import Routes
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.store.conform_result import Failure
from tests.harness.client.asking import plan_of


class Server(ThreadingHTTPServer):
    """`keeps`: tokens of a stopped answer that stay in its session; None: it keeps no answers;
    "refuses": a stopped answer is unknown to it."""

    def __init__(self, keeps: int | str | None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.keeps = keeps
        self.stopped_tokens = keeps if isinstance(keeps, int) else 0
        self.asked: list[str] = []
        self.was_closed = Event()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        if self.path != "/v1/responses":
            self.reply(404, {})
        elif body.get("stream"):
            self.stream()
        else:
            self.turn(body)

    def turn(self, body: dict[str, Any]) -> None:
        previous, keeps = body.get("previous_response_id"), self.server.keeps
        tokens = 10
        if previous == "stopped" and keeps == "refuses":
            self.reply(404, {})
            return
        if previous is not None and keeps is not None:
            kept = (
                self.server.stopped_tokens if previous == "stopped" else body["max_output_tokens"]
            )
            tokens += 10 + kept
        usage = {"input_tokens": tokens, "output_tokens": body["max_output_tokens"]}
        self.reply(200, {"id": "whole", "usage": usage})

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        try:
            self.event({"type": "response.created", "response": {"id": "stopped"}})
            while True:
                self.event({"type": "response.output_text.delta", "delta": "word "})
        except OSError:
            self.server.was_closed.set()

    def event(self, data: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def reply(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_args: object) -> None:
        return


@contextmanager
def serving(keeps: int | str | None, known: Known | None = None) -> Iterator[tuple[Server, Routes]]:
    with Server(keeps) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield server, Routes(plan_of(f"http://127.0.0.1:{server.server_port}"), known)
        finally:
            server.shutdown()


def stop(keeps: int | str | None) -> Finding:
    with serving(keeps) as (server, routes):
        return stop_a_turn(
            routes, "/v1/responses", "m", long_tokens=500, settle=lambda: closed(server)
        )


def closed(server: Server) -> None:
    assert server.was_closed.wait(30)


def test_a_stopped_answer_is_not_in_the_next_prompt() -> None:
    assert stop(0).failure is None
    assert stop("refuses").failure is None
    found = stop(STOPPED_AFTER)
    assert found.failure is Failure.HARM
    assert found.evidence["prompt_tokens"] == 20 + STOPPED_AFTER
    assert found.evidence["clean_prompt_tokens"] == 20


def test_a_server_that_keeps_no_answers_does_not_support_sessions() -> None:
    with pytest.raises(RefusedError, match="changes nothing"):
        stop(None)


def test_a_cancel_names_the_request_in_its_path() -> None:
    with serving(0) as (server, routes):
        assert routes.cancel("a/b").status == 404
        assert server.asked == ["/v1/requests/a%2Fb/cancel"]
        with pytest.raises(CannotDecideError, match="status 404"):
            routes.complete("a prompt", max_tokens=1)
        with pytest.raises(CannotDecideError, match=r"without \[DONE\]"):
            routes.close_at_done("a prompt", max_tokens=1)


def test_what_leaves_by_a_route_counts_as_left_and_its_answers_are_heard() -> None:
    """Also after a silence that is longer than the patience."""
    known = Known()
    with serving(0, known) as (server, routes), closing(routes):
        with closing(routes.events("/v1/responses", {"stream": True})) as events:
            next(events)
        closed(server)
        assert known.left_here(0) == 0  # nothing was heard since
        routes.cancel_at("/v1/responses/stopped/cancel")
        assert known.left_here(0) == 2
