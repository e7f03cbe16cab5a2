"""Start the engine as its users do, talk to it over bare sockets, and read its log."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil


class RunningEngine:
    """A started engine. Its standard input is a pipe that we hold: closing it ends the engine."""

    def __init__(
        self,
        *flags: str,
        stderr: int | None = None,
        env: dict[str, str] | None = None,
        module: str = "reference_engine",
    ) -> None:
        command = [sys.executable, "-m", module, "--port", "0", "--exit-with-stdin"]
        self.process = subprocess.Popen(
            [*command, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=env,
        )
        assert self.process.stdout is not None
        self.ready: dict[str, Any] = json.loads(self.process.stdout.readline())
        self.url: str = self.ready["url"]
        self.kserve_url: str = self.ready.get("kserve_url", "")
        self.worker = psutil.Process(self.ready["worker_pid"])

    def stop(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(20)

    def silenced(self, status: int) -> None:
        """It has ended with this status, with its worker, and without a word; its pipes are closed.

        It must have been started with `stderr=PIPE`.
        """
        assert self.process.wait(20) == status
        assert self.process.stderr is not None
        assert self.process.stderr.read() == b""
        self.process.stderr.close()
        self.worker.wait(20)
        self.stop()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def events(self, after: int = 0, of: str | None = None) -> list[dict[str, Any]]:
        """The log, from the entry after this one on; `of` another process at this URL."""
        lines: list[str] = []
        last = after + 1
        while after < last:
            answer = httpx.get(f"{of or self.url}/walkaway/lifecycle", params={"after": after})
            lines += answer.text.splitlines()
            after = int(answer.headers["x-walkaway-next-after"])
            last = int(answer.headers["x-walkaway-last"])
        return [json.loads(line) for line in lines]

    def wait_for(self, event: str, client_request_id: str) -> dict[str, Any]:
        """Follow the log until the event is there; the test's own timeout bounds it."""
        while True:
            for entry in self.events():
                if (entry["event"], entry["client_request_id"]) == (event, client_request_id):
                    return entry

    def order(self, client_request_id: str) -> list[str]:
        mine = [e for e in self.events() if e["client_request_id"] == client_request_id]
        return [entry["event"] for entry in sorted(mine, key=lambda entry: entry["t_ns"])]

    def metric(self, name: str, *, of: str | None = None, **labels: str) -> float:
        """The sum of all series of this name that have these labels, among others."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        values = []
        for line in httpx.get(f"{of or self.url}/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(label in series for label in wanted):
                values.append(float(value))
        assert values, f"no metric {name} {labels}"
        return sum(values)


@contextmanager
def running(*flags: str) -> Iterator[RunningEngine]:
    engine = RunningEngine(*flags)
    try:
        yield engine
    finally:
        status = engine.stop()
        engine.worker.wait(10)
    assert status == 0


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello", "max_tokens": 3000, "ignore_eos": True, **fields}


def post_raw(engine: RunningEngine, request_id: str, **fields: Any) -> socket.socket:
    """Send a request and keep the bare socket, so that leaving is ours to do."""
    connection = socket.create_connection(engine.address)
    connection.sendall(raw_request(request_id, **fields))
    return connection


def lazy_client(engine: RunningEngine, request_id: str, **fields: Any) -> socket.socket:
    """A client whose machine takes little: its request is sent, nothing is read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(engine.address)
    client.sendall(raw_request(request_id, **fields))
    return client


def raw_request(request_id: str, **fields: Any) -> bytes:
    data = json.dumps(body(**fields)).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {request_id}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    seen = b""
    while mark not in seen:
        part = connection.recv(65536)
        assert part, f"the connection ended before {mark!r}: {seen!r}"
        seen += part
    return seen
