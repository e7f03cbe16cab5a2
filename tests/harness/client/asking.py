"""Users who ask a real server once at a time, for tests of what becomes of a request."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import httpx

from harness.client.connection import Http1Connection
from harness.client.exchange import StreamClient
from harness.client.transport import SocketTransport, WireRequest, head_of
from harness.records import RequestRow, Way
from harness.workload.abandon import LeaveRule, RequestSpec, never
from harness.workload.plan import LoadPlan
from harness.workload.target import Target
from harness.workload.workload import RunSettings
from tests.harness.workload.mixes import STAY, load_of

if TYPE_CHECKING:
    from tests.harness.client.conftest import Exchange

MS = 1_000_000
LONG_NS = 30_000 * MS  # as long as tests wait for what must come
PLAN = LoadPlan(
    url="http://127.0.0.1:1",
    model="m",
    headers={"x-extra": "1"},
    target=Target(
        name="t",
        description="d",
        extra_body={"ignore_eos": True},
        stream_options={"include_usage": True},
        continuous_usage=True,
        cancel_path="/v1/requests/{id}/cancel",
        settle_s=0.0,
    ),
    run=RunSettings(users=1, timeout_s=30.0, max_seconds=60.0),
    load=load_of(STAY, think="none", prompt_tokens=[8, 8], answer_tokens=9, stay_tokens=9),
)
SPEC = RequestSpec(user=0, max_tokens=9, prompt_tokens=8, request_id="r1", arm="main")


def plan_of(url: str, *, target: dict[str, Any] | None = None, **changes: Any) -> LoadPlan:
    """PLAN with another server; `target` changes that section, what else is named the run's."""
    own = {name: changes.pop(name) for name in list(changes) if name in LoadPlan.model_fields}
    sections = {
        "target": PLAN.target.model_copy(update=target),
        "run": PLAN.run.model_copy(update=changes),
    }
    return PLAN.model_copy(update={"url": url, **sections, **own})


def after(tokens: int, *, think_ns: int = 0) -> LeaveRule:
    """Leave after reading `tokens` tokens."""
    return lambda read: think_ns if read >= tokens else None


class Leaping:
    """The system's clock, for a module's `time`, that leaps ahead by what a test would wait for."""

    ahead_ns = 0

    def perf_counter_ns(self) -> int:
        return time.perf_counter_ns() + self.ahead_ns

    def perf_counter(self) -> float:
        return self.perf_counter_ns() / 1e9


def wire_request(
    *, request_id: str = "r1", body: bytes = b"{}", timeout_s: float = 30.0, **more: Any
) -> WireRequest:
    fields = [(b"host", b"h"), (b"x-request-id", request_id.encode())]
    head = head_of(b"/", fields, body)
    return WireRequest(head=head, body=body, connect_s=timeout_s, next_byte_s=timeout_s, **more)


@contextmanager
def connected(url: str, *, ca_file: str | None = None, **request: Any) -> Iterator[Http1Connection]:
    transport = SocketTransport(httpx.URL(url), ca_file=ca_file)
    with transport.open(wire_request(**request)) as connection:
        yield connection


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    ends = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[a:b] for a, b in pairwise(ends) if a < b]


def body_of(connection: Http1Connection) -> bytes:
    return b"".join(iter(connection.receive, None))


class Client:
    """Asks once at a time; `rows` are what was kept."""

    def __init__(self, url: str, **changes: Any) -> None:
        self.client = StreamClient(plan_of(url, **changes), api_key="secret")
        self.rows: list[RequestRow] = []

    def ask(self, rule: LeaveRule = never, way: Way | None = None, **changes: Any) -> RequestRow:
        spec = replace(SPEC, way=way, **changes)
        try:
            return self.client.ask(spec, "Hello", rule, self.rows.append)
        finally:
            assert self.client.open_streams == 0


@contextmanager
def limited(which: int, soft: int) -> Iterator[None]:
    """This process has a lower limit of the system."""
    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


@contextmanager
def listening(speak: Callable[[socket.socket], None]) -> Iterator[str]:
    """The host and port of a server that has one client, and speaks to it in any protocol."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as sock, suppress(OSError):
                speak(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(30)
        assert not thread.is_alive()


def refuse(x: Exchange) -> None:
    body = b'{"error":{"message":"come back later"}}'
    head = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n"
    x.send(head % len(body) + body)


def until_left(x: Exchange) -> None:
    x.accept(tokens=1)
    assert x.client_left_within(30)


def two_tokens(x: Exchange) -> None:
    x.accept(tokens=2)
    assert x.client_left_within(30)


def five_tokens(x: Exchange) -> None:
    x.accept()
    x.stream(tokens=5, gap_s=0.001)


def engine(x: Exchange) -> None:
    """All tokens that were asked for, one each 5 ms."""
    x.accept()
    x.stream(tokens=x.body["max_tokens"], gap_s=0.005)
