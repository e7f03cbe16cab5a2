"""Stock httpx with an end to everything: its own limits are for the next byte only.

A server that sends a byte now and then would keep it, and so a run, for ever, and a page without an
end would fill the memory. Here an answer must be complete so long after the last of its request was
sent, and no larger than `MOST_BYTES`. It is asked for as it is: one that is packed all the same is
refused, since a few packed bytes can be a memory full of others.
"""

import ssl
import time
from collections.abc import Iterable
from typing import Any, Final

import httpcore
import httpx

MOST_BYTES: Final = 1 << 25  # of one answer, headers and all
_TOO_LARGE: Final = f"the answer has more than {MOST_BYTES >> 20} MiB"
_PACKED: Final = "the answer is packed, though nobody asked for that"
_AS_IT_IS: Final = "identity"
_KEPT: Final = 8  # connections, for further requests
_KEPT_S: Final = 5.0  # longer, and servers begin to close them


def why_unread(error: Exception) -> str:
    """What kept an answer from being read, without what changes from one time to the next."""
    return str(error) if str(error) in (_TOO_LARGE, _PACKED) else type(error).__name__


class BoundedTransport(httpx.HTTPTransport):
    """`longest_s`: from the sending of a request to the end of its answer."""

    def __init__(self, *, verify: ssl.SSLContext, longest_s: float) -> None:
        super().__init__(verify=verify)
        self._pool.close()
        # As many at once as are asked for: a limit of ours would look like one of the server's.
        self._pool = httpcore.ConnectionPool(
            ssl_context=verify,
            network_backend=_Backend(longest_s),
            max_connections=None,
            max_keepalive_connections=_KEPT,
            keepalive_expiry=_KEPT_S,
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.headers["accept-encoding"] = _AS_IT_IS
        response = super().handle_request(request)
        if response.headers.get("content-encoding", _AS_IT_IS) != _AS_IT_IS:
            response.close()
            raise httpx.DecodingError(_PACKED, request=request)
        return response


class _Backend(httpcore.NetworkBackend):
    def __init__(self, longest_s: float) -> None:
        self._inner = httpcore.SyncBackend()
        self._longest_s = longest_s

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        stream = self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
        return _Stream(stream, self._longest_s)


class _Stream(httpcore.NetworkStream):
    """Its state: `_until_s`, when the answer must be complete, on the monotonic clock, and `_size`,
    the bytes of it that have come."""

    def __init__(self, inner: httpcore.NetworkStream, longest_s: float) -> None:
        self._inner = inner
        self._longest_s = longest_s
        self._until_s = time.perf_counter() + longest_s
        self._size = 0

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout)
        self._until_s = time.perf_counter() + self._longest_s
        self._size = 0

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        left_s = self._until_s - time.perf_counter()
        if left_s <= 0:
            raise httpcore.ReadTimeout(f"the answer was not complete after {self._longest_s:g} s")
        data = self._inner.read(max_bytes, left_s if timeout is None else min(timeout, left_s))
        self._size += len(data)
        if self._size > MOST_BYTES:
            raise httpcore.ReadError(_TOO_LARGE)
        return data

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        return _Stream(
            self._inner.start_tls(ssl_context, server_hostname, timeout), self._longest_s
        )

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
