"""The upstream in a thread, and a client of it on a plain socket."""

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

from harness.upstream.orders import Order
from harness.upstream.scheduler import ServingPace
from harness.upstream.server import Settings, Upstream

ROUTES = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
RESET = struct.pack("ii", 1, 0)
WAIT_S = 30.0


class Lines:
    """The file of a log: its lines as they come."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self._more = threading.Condition()

    def write(self, line: bytes) -> int:
        with self._more:
            self.lines.append(json.loads(line))
            self._more.notify_all()
        return len(line)

    def wait(self, event: str, name: str, *, nth: int = 1) -> dict[str, Any]:
        """The nth such event of the request with this id."""
        with self._more:
            assert self._more.wait_for(lambda: len(self._found(event, name)) >= nth, WAIT_S), (
                event,
                self.lines,
            )
            return self._found(event, name)[nth - 1]

    def _found(self, event: str, name: str) -> list[dict[str, Any]]:
        return [one for one in self.lines if one["event"] == event and one.get("id") == name]


class Running:
    def __init__(self, port: int, log: Lines) -> None:
        self.port, self.log = port, log
        self.url = f"http://127.0.0.1:{port}"

    def get(self, target: str, method: str = "GET") -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        connection.request(method, target)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body

    def truth(self, name: str) -> list[dict[str, Any]]:
        page = json.loads(self.get(f"/walkaway/truth?id={name}")[1])
        return sorted(page["requests"], key=lambda one: one["number"])

    def over(self, name: str) -> dict[str, Any]:
        """What became of it, when nothing more happens to it."""
        self.log.wait("over", name)
        return self.truth(name)[0]


@contextmanager
def upstream(**settings: Any) -> Iterator[Running]:
    """With short steps; `settings`: of the server and of its pace."""
    pace = {"slots": 2, "step_ms": 2.0}
    pace |= {key: settings.pop(key) for key in list(settings) if hasattr(ServingPace(), key)}
    log, ready, found = Lines(), threading.Event(), []

    async def run() -> None:
        one = Upstream(Settings(pace=ServingPace(**pace), **settings), file=log)  # type: ignore[arg-type]
        listener = await one.listen("127.0.0.1", 0)
        stop = asyncio.Event()
        found.append((asyncio.get_running_loop(), stop, listener.sockets[0].getsockname()[1]))
        ready.set()
        await stop.wait()
        listener.close()
        one.close()
        await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(WAIT_S)
    loop, stop, port = found[0]
    try:
        yield Running(port, log)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_S)
    assert not thread.is_alive()


def body_of(dialect: str, order: Order, *, tokens: int, stream: bool, **more: Any) -> bytes:
    prompt = f"Tell me a story. {order.line()}"
    said = [{"role": "user", "content": prompt}]
    fields: dict[str, Any] = {
        "completions": {"prompt": prompt, "max_tokens": tokens},
        "chat": {"messages": said, "max_tokens": tokens},
        "responses": {"input": prompt, "max_output_tokens": tokens},
        "messages": {"messages": said, "max_tokens": tokens},
    }[dialect]
    return json.dumps({"model": "any", "stream": stream, **fields, **more}).encode()


class Caller:
    """One request, and the bytes of its answer as they come. `receives`: its kernel's buffer."""

    def __init__(
        self,
        port: int,
        order: Order,
        *,
        dialect: str = "completions",
        tokens: int = 1000,
        stream: bool = True,
        version: str = "1.1",
        receives: int = 0,
        **more: Any,
    ) -> None:
        self.read = b""
        body = body_of(dialect, order, tokens=tokens, stream=stream, **more)
        head = f"POST {ROUTES[dialect]} HTTP/{version}\r\nhost: u\r\ncontent-length: {len(body)}"
        self.sock = socket.socket()
        self.sock.settimeout(WAIT_S)
        if receives:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        self.sock.connect(("127.0.0.1", port))
        self.sock.sendall(head.encode() + b"\r\n\r\n" + body)

    def until(self, text: bytes) -> bytes:
        while text not in self.read:
            more = self.sock.recv(65536)
            assert more, self.read
            self.read += more
        return self.read

    def to_the_end(self) -> bytes:
        """Raises ConnectionResetError."""
        while more := self.sock.recv(65536):
            self.read += more
        return self.read

    def leave(self, way: str) -> int:
        """Returns the time before it."""
        t0_ns = time.perf_counter_ns()
        if way == "half-close":
            self.sock.shutdown(socket.SHUT_WR)
        elif way == "fin":
            self.sock.shutdown(socket.SHUT_RDWR)  # close() with unread bytes would be a reset
        else:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.sock.close()
        return t0_ns

    def close(self) -> None:
        self.sock.close()
