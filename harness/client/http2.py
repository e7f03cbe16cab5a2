"""Streams over HTTP/2: several requests on one connection, of which one may be cancelled alone.

    connection   SETTINGS ── a, b, c, d ──────────────────────────────── another connection
    stream a     HEADERS ── DATA ── DATA ── RST_STREAM(CANCEL): t0
    streams b-d  HEADERS ── DATA ── DATA ── DATA ── DATA ── ... END_STREAM

A connection is opened with prior knowledge, over TLS by ALPN. A greenlet reads it and hands each
frame to its request. The only way to leave is RST_STREAM with the code CANCEL (RFC 9113, 7): the
connection stays open.
"""

import socket
import time
from contextlib import suppress
from typing import Final

import gevent
import httpx
from gevent.event import Event
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.exceptions import ProtocolError

from harness.client.connect import Tls, connect, dns_of
from harness.client.http_requests import HttpClient, TargetFrontend
from harness.client.reader import Reader, StreamReader, TappedReader
from harness.client.sse import EndlessEventError
from harness.client.wire_log import WireLog
from harness.errors import in_words
from harness.http_client import tls_context
from harness.records import RequestRow, Way, WireClose
from harness.workload.abandon import LeaveRule, RequestSpec
from harness.workload.plan import LoadPlan

STREAMS: Final = 4  # on a connection
_RECEIVE_BYTES: Final = 65536
_HEAD_BYTES: Final = 32
_TYPE_AT: Final = 3  # of a frame's head
_SETTINGS: Final = 4
_OF_HTTP1: Final = (b"host", b"connection")


class NoHttp2Error(Exception):
    """The server speaks another protocol on this port."""


class Http2Connection:
    """`why_lost`: it has ended. `settled`: the server has sent its SETTINGS."""

    def __init__(self, sock: socket.socket, tls: Tls | None) -> None:
        self.calls: dict[int, Http2Exchange] = {}
        self.why_lost: str | None = None
        self.settled = Event()
        self._sock, self._tls = sock, tls
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        self._h2.initiate_connection()
        self._send()
        self._reader = gevent.spawn(self._read)

    def ask(self, headers: list[tuple[bytes, bytes]], body: bytes, call: "Http2Exchange") -> int:
        number = self._h2.get_next_available_stream_id()
        self.calls[number] = call
        self._h2.send_headers(number, headers)
        most = self._h2.max_outbound_frame_size
        for first in range(0, len(body), most):
            self._h2.send_data(number, body[first : first + most])
        self._h2.end_stream(number)
        self._send()
        return number

    def cancel(self, number: int) -> None:
        self.calls.pop(number, None)
        with suppress(ProtocolError):  # the server has just ended it
            self._h2.reset_stream(number, ErrorCodes.CANCEL)
        self._send()

    def close(self) -> None:
        self._reader.kill()
        self._sock.close()

    def _send(self) -> None:
        data = self._h2.data_to_send()
        with suppress(OSError):  # the reader learns of it
            self._sock.sendall(data if self._tls is None else self._tls.encrypt(data))

    def _read(self) -> None:
        why = "the server closed the connection"
        head = b""
        try:
            while data := self._sock.recv(_RECEIVE_BYTES):
                plain = data if self._tls is None else self._tls.decrypt(data)
                if len(head) < _TYPE_AT + 1:
                    head += plain[:_HEAD_BYTES]
                    check_first_frame(head)
                for event in self._h2.receive_data(plain):
                    self._take(event, time.perf_counter_ns())
                self._send()
        except ProtocolError as error:
            why = f"this is not HTTP/2: {error}"
        except OSError as error:
            why = f"the connection broke: {in_words(error)}"
        self.why_lost = self.why_lost or why
        self.settled.set()
        for call in list(self.calls.values()):
            call.lost(self.why_lost)
        self.calls.clear()

    def _take(self, event: object, t_ns: int) -> None:
        match event:
            case RemoteSettingsChanged():
                self.settled.set()
            case ConnectionTerminated(error_code=code):
                self.why_lost = f"the server ends the connection ({code})"
            case ResponseReceived(stream_id=int(number), headers=headers) if number in self.calls:
                status = next(int(value) for name, value in headers or () if name == b":status")
                self.calls[number].headers(status)
            case DataReceived(stream_id=int(number), data=bytes(data)):
                self._h2.acknowledge_received_data(event.flow_controlled_length or 0, number)
                if number in self.calls:
                    self.calls[number].read(data, t_ns)
            case StreamEnded(stream_id=int(number)) if number in self.calls:
                self.calls.pop(number).ended(t_ns)
            case StreamReset(stream_id=int(number)) if number in self.calls:
                self.calls.pop(number).lost(f"the server reset the stream ({event.error_code})")
            case _:
                return


def check_first_frame(head: bytes) -> None:
    """Raises ProtocolError unless a server begins with SETTINGS (RFC 9113, 3.4). The library would
    take `HTTP/1.1 404` for the head of a long frame, and wait for its end."""
    if len(head) > _TYPE_AT and head[_TYPE_AT] != _SETTINGS:
        said = head.split(b"\r\n")[0].decode("ascii", errors="replace")
        raise ProtocolError(f"the server begins with {said!r}")


class Http2Client(HttpClient):
    """Up to `STREAMS` requests share a connection."""

    def __init__(self, plan: LoadPlan, *, api_key: str | None, wire: WireLog | None = None) -> None:
        super().__init__(plan, api_key=api_key, wire=wire)
        self._connections: list[Http2Connection] = []

    def begin(self, spec: RequestSpec, prompt: str, leave_rule: LeaveRule) -> "Http2Exchange":
        return Http2Exchange(self, spec, prompt, leave_rule)

    def connection(self, frontend: TargetFrontend) -> Http2Connection:
        """One with room. Raises httpx.TransportError, and NoHttp2Error."""
        for one in self._connections:
            if one.why_lost is None and len(one.calls) < STREAMS:
                return one
        url = frontend.url
        context = tls_context(self.plan.ca_file) if url.scheme == "https" else None
        if context is not None:
            context.set_alpn_protocols(["h2"])
        sock, tls = connect(dns_of(url), self.connect_s, context=context)
        if tls is not None and tls.protocol != "h2":
            sock.close()
            raise NoHttp2Error("by ALPN the server agrees on no HTTP/2")
        sock.settimeout(None)
        new = Http2Connection(sock, tls)
        self._connections.append(new)
        if not new.settled.wait(self.connect_s):
            raise httpx.ReadTimeout(f"no SETTINGS came within {self.connect_s:g} s")
        if new.why_lost is not None:
            raise NoHttp2Error(new.why_lost)
        return new

    def close(self) -> None:
        for one in self._connections:
            one.close()
        super().close()


class Http2Exchange:
    waits_for_interrupt = False  # `leave_at_once` acts by itself

    def __init__(
        self, client: Http2Client, spec: RequestSpec, prompt: str, leave_rule: LeaveRule
    ) -> None:
        self.stream = client.machine(spec, time.perf_counter_ns())
        self._client = client
        self._frontend = client.frontend_of(spec.user)
        self._path, self._fields, self._body = client.message(spec, prompt)
        self._tap = None if client.wire is None else client.wire.tap(spec)
        self._reader: Reader = StreamReader(self.stream, client.step)
        if self._tap is not None:
            self._reader = TappedReader(self._reader, self.stream, self._tap)
        self._leave_rule = leave_rule
        self._status, self._refusal = 0, b""
        self._changed = Event()
        self._connection: Http2Connection | None = None
        self._number = 0

    def see_through(self) -> None:
        stream, timeout_s = self.stream, self._client.plan.run.timeout_s
        try:
            self._connection = self._client.connection(self._frontend)
        except httpx.TimeoutException as error:
            stream.time_out(time.perf_counter_ns(), str(error))
            return
        except (httpx.TransportError, NoHttp2Error) as error:
            stream.break_off(time.perf_counter_ns(), str(error))
            return
        if stream.outcome is None:
            self._ask(self._connection, timeout_s)

    def _ask(self, connection: Http2Connection, timeout_s: float) -> None:
        headers, stream = self._headers(), self.stream
        if self._tap is not None:
            head = b"".join(b"%b: %b\r\n" % field for field in headers)
            self._tap.wrote(time.perf_counter_ns(), head + b"\r\n" + self._body)
        self._number = connection.ask(headers, self._body, self)
        while stream.outcome is None:
            self._changed.clear()
            if not self._changed.wait(timeout_s):
                stream.time_out(time.perf_counter_ns(), f"nothing came for {timeout_s:g} s")
        if self._number in connection.calls:  # the server may send more
            connection.cancel(self._number)

    def note_wire(self, row: RequestRow) -> None:
        row.frontend = self._frontend.number
        if self._tap is not None:
            self._tap.ended(row)

    def leave_at_once(self, way: Way | None) -> None:
        if not self.stream.can_leave:
            return
        t0_ns = time.perf_counter_ns()
        wire_close = WireClose.UNOPENED
        if self._connection is not None:
            wire_close = WireClose.RST_STREAM
            self._connection.cancel(self._number)
        self.stream.leave(t0_ns, think_ns=0, wire_close=wire_close)
        if self._tap is not None:
            self._tap.left(t0_ns, way or Way.FIN, 0, wire_close)
        self._changed.set()

    # Events of the stream

    def headers(self, status: int) -> None:
        self._status = status
        self.stream.headers(status)
        if self._tap is not None:
            self._tap.head(time.perf_counter_ns(), status)
        self._changed.set()

    def read(self, data: bytes, t_ns: int) -> None:
        if self._status != httpx.codes.OK:
            self._refusal += data
            return
        try:
            self._reader.read(data, t_ns)
        except EndlessEventError as error:
            self.lost(str(error))
        think_ns = self._leave_rule(self.stream.tokens_for_plan)
        if think_ns is not None:
            gevent.spawn_later(think_ns / 1e9, self.leave_at_once, None)
        self._changed.set()

    def ended(self, t_ns: int) -> None:
        if self._status == httpx.codes.OK and self.stream.outcome is None:
            self._reader.end()
        elif self.stream.outcome is None:
            self.stream.refusal(self._refusal, t_ns)
        self._changed.set()

    def lost(self, why: str) -> None:
        """An event that is there without its blank line may still say how the answer ended."""
        now_ns = time.perf_counter_ns()
        if self.stream.outcome is None:
            self._reader.read_rest(now_ns)
        if self.stream.outcome is None:
            self.stream.break_off(now_ns, why)
        self._changed.set()

    def _headers(self) -> list[tuple[bytes, bytes]]:
        url = self._frontend.url
        fields = [(name.lower(), value) for name, value in self._fields]
        return [
            (b":method", b"POST"),
            (b":scheme", url.raw_scheme),
            (b":authority", url.netloc),
            (b":path", self._path),
            *(pair for pair in fields if pair[0] not in _OF_HTTP1),
        ]
