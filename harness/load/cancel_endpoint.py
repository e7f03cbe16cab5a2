"""Asking a server to cancel: one POST on a connection of its own, made when it is needed.

The answer is waited for only when the stream has ended: what the cancelled request still brings
must not be late because of it.
"""

import time
from types import TracebackType
from typing import Self
from urllib.parse import quote

import httpx

from harness.load.connection import Connection
from harness.load.leaving import Departure
from harness.load.transport import SocketTransport, send
from harness.records import WireClose


class CancelRequest:
    """One request to cancel another; the connection is made before t0."""

    def __init__(
        self, http: httpx.Client, transport: SocketTransport, url: str, timeout_s: float
    ) -> None:
        self._request = http.build_request("POST", url, content=b"", timeout=timeout_s)
        self._timeout_s = timeout_s
        self._wire = transport.connect(self._request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._wire.sock.close()

    def send(self) -> Departure:
        """Ask now. Raises httpx.TransportError."""
        t0_ns = time.perf_counter_ns()
        send(self._wire, self._request, self._timeout_s)
        return Departure(t0_ns, WireClose.NOTHING)

    def problem(self) -> str | None:
        """What the endpoint answered, unless it agreed. Waits for the answer."""
        connection = Connection(self._wire.sock, self._timeout_s, tls=self._wire.tls)
        try:
            connection.receive_head(None)
        except httpx.TransportError as error:
            return f"the cancel endpoint did not answer: {error}"
        finally:
            connection.close()
        if 200 <= connection.status_code < 300:
            return None
        return f"the cancel endpoint answered HTTP {connection.status_code}"


def cancel_url(url: str, path: str, request_id: str) -> str:
    """Where to cancel a request: {id} in the path is its id."""
    return url.rstrip("/") + path.replace("{id}", quote(request_id, safe=""))
