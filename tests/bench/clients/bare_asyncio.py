"""The least that a client can do: an asyncio protocol on uvloop, llhttp, a stamp for each token."""

import asyncio
from itertools import repeat
from time import perf_counter_ns
from typing import cast
from urllib.parse import urlsplit

import httptools
import uvloop

from tests.bench.clients.common import (
    TOKEN,
    Times,
    arguments,
    headers,
    raw_request,
    write_on_sigterm,
)


class BareProtocol(asyncio.Protocol):
    """One connection, kept for all of its requests."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._now_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        fields, self._stamps = headers(self._times, perf_counter_ns())
        self._transport.write(raw_request(fields))

    def data_received(self, data: bytes) -> None:
        self._now_ns = perf_counter_ns()
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._stamps.extend(repeat(self._now_ns, body.count(TOKEN)))

    def on_message_complete(self) -> None:
        asyncio.get_running_loop().call_soon(self._ask)


async def main() -> None:
    options = arguments()
    times: Times = {}
    write_on_sigterm(times, options.file)
    place = urlsplit(options.url)
    loop = asyncio.get_running_loop()
    for _ in range(options.streams):
        await loop.create_connection(lambda: BareProtocol(times), place.hostname, place.port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
