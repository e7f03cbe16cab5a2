"""A server of OpenAI's completions dialect that is odd in one way."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Oddity = Literal["instant", "endless", "dies", "only short"] | int

STEP_S = 0.004
TOO_MANY = 40  # tokens beyond the number asked for
DIES_AFTER = 25  # requests
LONGEST = 100  # tokens


class OddServer(ThreadingHTTPServer):
    """`oddity`: a status with which it refuses completions; "instant": its answers come in one
    piece; "endless": it ignores `max_tokens`; "dies": after `DIES_AFTER` requests; "only short":
    longer answers than `LONGEST` are refused by 429, and there are 4 slots. Without an oddity it
    runs any number of requests at once. It echoes the key of a request that it refuses, and of a
    short one in each token."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, oddity: Oddity, pause: Callable[[float], object]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.oddity = oddity
        self.pause = pause
        self.asked = 0
        self.lock = threading.Lock()
        self.slots = threading.Semaphore(4 if oddity == "only short" else 1000)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        """A client that has left is no error."""


class Handler(BaseHTTPRequestHandler):
    server: OddServer

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(200, {"data": [{"id": "odd"}, {"id": "another"}]})
        else:
            self.answer(404, {"error": {"message": "no such page"}})

    def do_POST(self) -> None:
        server = self.server
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        key = self.headers.get("authorization", "no key")
        if isinstance(server.oddity, int):
            self.answer(server.oddity, {"error": {"message": f"refused, with {key}"}})
            return
        if server.oddity == "only short" and asked["max_tokens"] > LONGEST:
            self.answer(429, {"error": {"message": f"too long, with {key}"}})
            return
        with server.lock:
            server.asked += 1
            is_over = server.oddity == "dies" and server.asked > DIES_AFTER
        if is_over:
            server.socket.close()
            self.connection.close()
            return
        tokens = asked["max_tokens"] + (TOO_MANY if server.oddity == "endless" else 0)
        if not asked.get("stream"):
            usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": tokens}
            choice = {"index": 0, "text": "a" * tokens, "finish_reason": "length"}
            self.answer(200, {"choices": [choice], "usage": usage})
            return
        with server.slots:
            self.stream(tokens, key if server.oddity == "only short" else "a")

    def stream(self, tokens: int, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        is_instant = self.server.oddity == "instant"
        events = [{"index": 0, "text": text, "finish_reason": None} for _ in range(tokens)]
        events[-1]["finish_reason"] = "length"
        lines = [f"data: {json.dumps({'choices': [event]})}\n\n".encode() for event in events]
        with suppress(OSError):
            for part in [b"".join(lines)] if is_instant else lines:
                if not is_instant:
                    self.server.pause(STEP_S)
                self.wfile.write(part)
            self.wfile.write(b"data: [DONE]\n\n")

    def answer(self, status: int, body: dict[str, Any]) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(oddity: Oddity) -> Iterator[OddServer]:
    server = OddServer(oddity, threading.Event().wait)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
