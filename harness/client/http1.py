"""An HTTP/1.1 answer, parsed as its bytes come: no I/O and no clock.

The head is bounded in size, and an unusable answer ends in an httpx.RemoteProtocolError that says
why; good bytes before the bad ones are handed over first, however the bytes were cut on their way.
"""

from typing import Final

import httptools
import httpx

from harness.http_client import is_packed

MAX_HEAD_BYTES: Final = 65536  # of all headers, informational answers (1xx) included
MAX_HEADERS: Final = 256
CLOSED_EARLY: Final = "the server closed the connection before the answer was complete"

_TLS_ALERT: Final = b"\x15"  # how a TLS server's answer to plain text begins
_SHOWN_BYTES: Final = 24


class Http1Response:
    """`headers` are the final answer's, without trailers. `may_go_on`: the connection could carry
    another answer. `broken`: the error to raise when the bytes before it (`_body`) have been taken.
    """

    def __init__(self) -> None:
        self.status_code = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_head = False
        self.is_complete = False
        self.may_go_on = False
        self.broken: httpx.RemoteProtocolError | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._head_bytes = 0
        self._ends_with_connection = True

    def header(self, name: bytes) -> bytes:
        found = [value for key, value in self.headers if key.lower() == name]
        return b", ".join(found)

    # Called by the parser

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise httpx.RemoteProtocolError("a second answer came to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.has_head:
            return  # a trailer
        self.headers.append((name, value))
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            raise endless("headers")

    def on_headers_complete(self) -> None:
        self.status_code = self._parser.get_status_code()
        if self.status_code < 200:  # "100 Continue" and its like precede the answer
            self.headers.clear()
            return
        self.has_head = True
        self.may_go_on = self._parser.should_keep_alive()
        framing = self.header(b"transfer-encoding").lower()
        if framing not in (b"", b"chunked"):
            raise _unasked("transfer-encoding", framing)
        if self.status_code == 200 and self.is_encoded:
            raise _unasked("content-encoding", self.header(b"content-encoding"))
        self._ends_with_connection = not framing and not self.header(b"content-length")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = self.has_head

    # For the reader

    @property
    def is_encoded(self) -> bool:
        return is_packed(self.header(b"content-encoding").decode("latin-1"))

    def parse(self, data: bytes) -> None:
        """b"" is the end of the connection. Raises httpx.RemoteProtocolError before there are
        headers; later sets `broken` instead."""
        if not data:
            self._end()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.may_go_on = False
            if not self.is_complete:  # else more came than was declared: the answer itself is whole
                self._break(self._complaint(error, data))

    def take_body(self) -> bytes:
        body = b"".join(self._body)
        self._body.clear()
        return body

    def _end(self) -> None:
        if self.has_head and self._ends_with_connection:
            self.is_complete = True
        else:
            self._break(httpx.RemoteProtocolError(CLOSED_EARLY))

    def _break(self, complaint: httpx.RemoteProtocolError) -> None:
        self.broken = complaint
        if not self.has_head:
            raise complaint

    def _complaint(self, error: Exception, data: bytes) -> httpx.RemoteProtocolError:
        if isinstance(error.__context__, httpx.RemoteProtocolError):
            return error.__context__  # ours, from one of the methods above
        if isinstance(error, httptools.HttpParserUpgrade):
            return httpx.RemoteProtocolError("the server goes over to another protocol, unasked")
        if self.status_code or self.headers:
            return httpx.RemoteProtocolError(f"this is not HTTP/1.1: {error}")
        text = f"this is not HTTP/1.1: {error}; it begins {data[:_SHOWN_BYTES]!r}"
        if data.startswith(_TLS_ALERT):
            text += ", which is TLS: the URL should begin with https://"
        return httpx.RemoteProtocolError(text)


def endless(what: str) -> httpx.RemoteProtocolError:
    return httpx.RemoteProtocolError(
        f"the server sends {what} without end: more than {MAX_HEAD_BYTES} bytes"
    )


def _unasked(header: str, value: bytes) -> httpx.RemoteProtocolError:
    shown = value[:_SHOWN_BYTES].decode("ascii", "backslashreplace")
    return httpx.RemoteProtocolError(
        f"the answer is encoded ({header}: {shown}), though the request did not allow that: its "
        "tokens could not be timed; turn compression off at the server or the proxy before it"
    )
