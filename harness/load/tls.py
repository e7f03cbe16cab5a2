"""TLS as a matter of bytes: what to send for what was received, without a socket.

    encrypted, from the server  ──decrypt──▶  readable at once, all of it
    to be sent, plain           ──encrypt──▶  to be put on the wire

So a connection over TLS is read like any other: each receive is taken from the kernel whole and
handed over whole. Nothing readable stays behind in a buffer of the TLS library, where it would have
been received and yet counted by nobody; only a record of which the end is missing does. And it need
not be this process that holds the socket.
"""

import contextlib
import ssl
from typing import Final

_READ_BYTES: Final = 65536


class Tls:
    """Our end of one TLS connection. `is_over`: the server has said its last (close_notify).

    All methods that take bytes from the server raise ssl.SSLError where these make no sense.
    """

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self.is_over = False
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._end = context.wrap_bio(self._received, self._to_send, server_hostname=host)

    def shake_hands(self, data: bytes) -> bool:
        """Take what the server sent, at first nothing. True when both sides have agreed."""
        self._received.write(data)
        try:
            self._end.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def decrypt(self, data: bytes) -> bytes:
        """All that can be read now; nothing where a record is not yet complete."""
        self._received.write(data)
        parts: list[bytes] = []
        try:
            while part := self._end.read(_READ_BYTES):
                parts.append(part)
            self.is_over = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # the same, when we have said our last before
            self.is_over = True
        return b"".join(parts)

    def encrypt(self, plain: bytes) -> bytes:
        """What to send for it."""
        self._end.write(plain)
        return self.owed()

    def owed(self) -> bytes:
        """What the protocol itself has to send: handshake, alerts, new keys. Often nothing."""
        return self._to_send.read()

    def farewell(self) -> bytes:
        """The close_notify to send: from now on only the server speaks (RFC 8446, 6.1)."""
        with contextlib.suppress(ssl.SSLError):  # it would wait for the server's, too: not we
            self._end.unwrap()
        return self.owed()
