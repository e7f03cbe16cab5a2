"""An answer that is thrown away as it comes: no I/O, no decoding, only whether it has ended."""

from collections.abc import Iterable
from typing import Final

import httpx

from harness.client.chunk import DONE

_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"  # of a chunked body
_TAIL_BYTES: Final = 64


class Discarded:
    """`is_whole`: it ended as an answer should. `error`: how the connection broke, if it did."""

    def __init__(self) -> None:
        self.has_ended = self.is_whole = False
        self.error: str | None = None
        self._tail = b""

    def take(self, parts: Iterable[bytes]) -> None:
        """The bytes on the wire, receive by receive; b"" is the end of the connection."""
        try:
            for data in parts:
                self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
                is_whole = self._tail.endswith(_LAST_CHUNK) or (not data and DONE in self._tail)
                self.has_ended = self.has_ended or is_whole or not data
                self.is_whole = self.is_whole or is_whole
                if self.has_ended:
                    return
        except httpx.TransportError as error:
            self.has_ended, self.error = True, str(error)
