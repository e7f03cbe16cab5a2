"""Server-sent events, decoded from bytes as they come: the name and the data of each.

    bytes of one receive, their time  ──feed──▶  the events that they completed
                       the last receive  ──end──▶  an event whose blank line is missing

https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

# Far above any token event, far below what could hurt the process.
MAX_EVENT_BYTES: Final = 1 << 20
MAX_EVENT_NS: Final = 60_000_000_000

Event = tuple[bytes, bytes]  # its name, b"" for a plain one, and its data

STRAY: Final = b"\n"  # in place of a name, which has no line end: lines that belong to no event
MAX_STRAY_BYTES: Final = MAX_EVENT_BYTES
_CR: Final = 0x0D
_FIELDS: Final = (b"id", b"retry", b"data", b"event")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class EndlessEventError(Exception):
    """An event is too long, in bytes or time; the decoder can no longer be used."""


class SSEDecoder:
    """The event under construction: `_name`; `_lines`, its complete data lines, and `_pieces`, the
    incomplete one (in pieces, so that a long line costs no copying); `_size` of all, and
    `_began_ns`. `_comment` of a named event is its data if it has no other: Dynamo says there what
    went wrong. `_strays`: lines in a row that are no part of an event, which come as an event
    called STRAY if `keeps_strays`."""

    def __init__(
        self,
        max_event_bytes: int = MAX_EVENT_BYTES,
        max_event_ns: int = MAX_EVENT_NS,
        *,
        keeps_strays: bool = False,
    ) -> None:
        self._max_event_bytes = max_event_bytes
        self._max_event_ns = max_event_ns
        self._began_ns: int | None = None
        self._name = b""
        self._lines: list[bytes] = []
        self._comment = b""
        self._strays: list[bytes] = []
        self._stray_room = MAX_STRAY_BYTES if keeps_strays else 0
        self._stray_bytes = 0
        self._pieces: list[bytes] = []
        self._size = 0
        self._after_cr = False
        self._at_start = True

    def feed(self, chunk: bytes, t_ns: int) -> list[Event]:
        if self._began_ns is None and not self._strays:
            event = self._one_event(chunk)
            if event is not None:
                self._at_start = self._after_cr = False
                return [event]
        if self._after_cr and chunk:
            self._after_cr = False
            if chunk.startswith(b"\n"):  # the other half of a CRLF that was cut
                chunk = chunk[1:]
        if not chunk:
            return []
        lines = chunk.splitlines()
        rest = b"" if chunk.endswith((b"\n", b"\r")) else lines.pop()
        self._after_cr = chunk.endswith(b"\r")
        if lines and self._pieces:
            lines[0] = self._finish_line(lines[0])
        events = self._take_lines(lines)
        if rest:
            self._pieces.append(rest)
            self._grow(len(rest))
        if self._size:
            begins = events or (lines and not self._lines and not self._name)
            self._began_ns = t_ns if begins or self._began_ns is None else self._began_ns
            self._check_age(t_ns - self._began_ns)
        else:
            self._began_ns = None
        return events

    def end(self) -> list[Event]:
        """What is left after the last receive: an event that no blank line has ended, and lines of
        no event. The last line may be cut."""
        last = self._finish_line(b"") if self._pieces else b""
        is_cut_name = any(field.startswith(last) for field in _FIELDS)
        return self._take_lines([b""] if is_cut_name else [last, b""])

    def _one_event(self, chunk: bytes) -> Event | None:
        """The event of a receive that is just one, as nearly all are."""
        if len(chunk) > self._max_event_bytes or _CR in chunk:
            return None
        name = b""
        if chunk.startswith(b"event: "):
            line, _, chunk = chunk.partition(b"\n")
            name = line[7:]
        if not chunk.startswith(b"data: "):
            return None
        line, end, rest = chunk.partition(b"\n")
        return (name, line[6:]) if end and rest == b"\n" else None

    def _finish_line(self, end: bytes) -> bytes:
        line = b"".join((*self._pieces, end))
        self._size -= len(line) - len(end)
        self._pieces.clear()
        return line

    def _take_lines(self, lines: list[bytes]) -> list[Event]:
        if lines and self._at_start:
            self._at_start = False
            lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
        events = []
        for line in lines:
            if self._strays and (not line or line.partition(b":")[0] in _FIELDS):
                events.append((STRAY, b"\n".join(self._strays)))
                self._strays.clear()
                self._stray_bytes = 0
            if not line:
                if self._lines or self._name:
                    events.append((self._name, b"\n".join(self._lines) or self._comment))
                    self._name = self._comment = b""
                    self._lines.clear()
                self._size = 0
            elif line.startswith(b"data:"):
                value = line[6:] if line.startswith(b" ", 5) else line[5:]
                self._lines.append(value)
                self._grow(len(value) + 1)  # the newline counts: empty lines must not be free
            elif line.startswith(b"event:"):
                self._name = line[7:] if line.startswith(b" ", 6) else line[6:]
                self._size += 1  # names replace one another: that a name has come matters
            elif line in (b"data", b"event"):
                self._take_bare(line)
            elif line.startswith(b":") and self._name:
                self._comment = line[1:].strip()
            else:
                self._keep_stray(line)
        return events

    def _take_bare(self, field: bytes) -> None:
        self._grow(1)
        if field == b"data":
            self._lines.append(b"")
        else:
            self._name = self._comment = b""

    def _keep_stray(self, line: bytes) -> None:
        room = self._stray_room - self._stray_bytes
        if room > 0 and not line.startswith(b":") and line.partition(b":")[0] not in _FIELDS:
            self._strays.append(line[:room])
            self._stray_bytes += len(line) + 1

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > self._max_event_bytes:
            raise EndlessEventError(
                f"the server sent an event of more than {self._max_event_bytes} bytes"
            )

    def _check_age(self, age_ns: int) -> None:
        if age_ns > self._max_event_ns:
            raise EndlessEventError(
                f"an event had not come to an end {self._max_event_ns / 1e9:g} s after it began"
            )


def events_of(chunks: Iterable[bytes], clock_ns: Callable[[], int]) -> Iterator[Event]:
    """All events of a stream that is read to its end. Raises EndlessEventError."""
    decoder = SSEDecoder()
    for chunk in chunks:
        yield from decoder.feed(chunk, clock_ns())
    yield from decoder.end()
