"""HTTP/1.1 on both sides of tools/truth/faulty_gateway.py: its clients, and the upstream."""

import asyncio
import zlib
from asyncio import StreamReader, StreamWriter
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

PIECE: Final = 65536
MOST_IDLE: Final = 2  # connections to one upstream
HOP_BY_HOP: Final = {"host", "connection", "keep-alive", "content-length", "accept-encoding"}
JSON: Final = {"content-type": "application/json"}
GZIP: Final = 31  # of zlib: its window, with gzip's head


class BrokenError(Exception):
    """The upstream cannot be reached, or it ended its connection before its answer."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request or of an answer. `first`: the words of its first line."""

    first: list[str]
    headers: dict[str, str]

    @property
    def method(self) -> str:
        return self.first[0]

    @property
    def target(self) -> str:
        return self.first[1]

    @property
    def status(self) -> int:
        return int(self.first[1])

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def is_kept(self) -> bool:
        is_new = "HTTP/1.1" in (self.first[0], self.first[-1])
        return is_new and self.headers.get("connection", "").lower() != "close"


def read_head(data: bytes) -> Head:
    first, *lines = data.decode("latin-1").rstrip().split("\r\n")
    fields = (line.partition(":") for line in lines)
    return Head(first.split(" ", 2), {name.lower(): value.strip() for name, _, value in fields})


class Client:
    """`how` it left: "fin" or "rst". Its connection is read at all times, while an answer is
    computed by `leaves`: what comes meanwhile is the next request."""

    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._ahead = b""
        self.how = ""

    async def request(self) -> tuple[Head, bytes] | None:
        while b"\r\n\r\n" not in self._ahead:
            if not await self._read():
                return None
        top, _, self._ahead = self._ahead.partition(b"\r\n\r\n")
        head = read_head(top)
        length = int(head.headers.get("content-length", 0))
        while len(self._ahead) < length:
            if not await self._read():
                return None
        body, self._ahead = self._ahead[:length], self._ahead[length:]
        return head, body

    async def leaves(self) -> None:
        while await self._read():
            pass

    async def _read(self) -> bool:
        try:
            data = await self._reader.read(PIECE)
        except ConnectionError:
            self.how = "rst"
            return False
        self._ahead += data
        self.how = "" if data else "fin"
        return bool(data)

    async def send(self, data: bytes) -> None:
        """Waits for a reader that stalls. Raises ConnectionError."""
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    def drop(self) -> None:
        self._writer.transport.abort()


class Connection:
    """A connection to the upstream, for one request at a time."""

    def __init__(self, url: str, reader: StreamReader, writer: StreamWriter) -> None:
        self.url = url
        self._reader, self._writer = reader, writer
        self._rest: int | None = 0  # of the body; None: it comes in chunks
        self._is_kept = True

    @property
    def is_open(self) -> bool:
        return self._is_kept and not self._reader.at_eof() and self._reader.exception() is None

    async def ask(self, request: Head, body: bytes) -> Head:
        """Returns the answer's head. Raises BrokenError."""
        parts, passed = urlsplit(self.url), request.headers.items()
        lines = [f"{request.method} {parts.path}{request.target} HTTP/1.1", f"host: {parts.netloc}"]
        lines += [f"{name}: {value}" for name, value in passed if name not in HOP_BY_HOP]
        lines += [f"content-length: {len(body)}", "", ""]
        try:
            self._writer.write("\r\n".join(lines).encode("latin-1") + body)
            head = read_head(await self._reader.readuntil(b"\r\n\r\n"))
        except (ConnectionError, EOFError) as error:
            raise BrokenError from error
        is_chunked = head.headers.get("transfer-encoding", "").lower() == "chunked"
        self._rest = None if is_chunked else int(head.headers.get("content-length", 0))
        self._is_kept = head.is_kept
        return head

    async def piece(self) -> bytes:
        """The next part of the body, as it came; nothing at its end. Raises BrokenError."""
        try:
            if self._rest is None:
                size = int(await self._reader.readline(), 16)
                return (await self._reader.readexactly(size + 2))[:-2]
            if not self._rest:
                return b""
            data = await self._reader.read(min(self._rest, PIECE))
        except (ConnectionError, EOFError, ValueError) as error:
            raise BrokenError from error
        self._rest -= len(data)
        if not data:
            raise BrokenError
        return data

    async def skip(self) -> None:
        while await self.piece():
            pass

    def close(self) -> None:
        self._writer.transport.abort()


class Pool:
    """Connections that wait for their next request."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Connection]] = {}

    async def take(self, url: str) -> Connection:
        """Raises BrokenError."""
        idle = self._idle.setdefault(url, [])
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
            connection.close()
        parts = urlsplit(url)
        try:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        except OSError as error:
            raise BrokenError from error
        return Connection(url, reader, writer)

    def give(self, connection: Connection) -> None:
        """Its answer was read to its end."""
        idle = self._idle.setdefault(connection.url, [])
        if connection.is_open and len(idle) < MOST_IDLE:
            idle.append(connection)
        else:
            connection.close()


class Body:
    """An answer on its way to a client: `head`, then `part` for each piece and `end`, or `whole`.
    `is_zipped`: by gzip, each piece at once."""

    def __init__(self, headers: dict[str, str], *, is_zipped: bool = False) -> None:
        self._headers = headers | ({"content-encoding": "gzip"} if is_zipped else {})
        self._zip = zlib.compressobj(wbits=GZIP) if is_zipped else None

    def head(self, status: int) -> bytes:
        return _head(status, self._headers | {"transfer-encoding": "chunked"})

    def part(self, piece: bytes) -> bytes:
        if self._zip is not None:
            piece = self._zip.compress(piece) + self._zip.flush(zlib.Z_SYNC_FLUSH)
        return _chunk(piece)

    def end(self) -> bytes:
        rest = b"" if self._zip is None else self._zip.flush()
        return (_chunk(rest) if rest else b"") + b"0\r\n\r\n"

    def whole(self, status: int, body: bytes) -> bytes:
        if self._zip is not None:
            body = self._zip.compress(body) + self._zip.flush()
        return _head(status, self._headers | {"content-length": str(len(body))}) + body


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def read_away(connection: Connection) -> None:
    """Whatever comes of it."""
    with suppress(BrokenError):
        await connection.skip()
