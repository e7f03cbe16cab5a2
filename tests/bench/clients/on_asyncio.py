"""Clients on asyncio: `python -m tests.bench.clients.on_asyncio NAME URL STREAMS FILE`.

`aiohttp` and `httpx` read their answers by line; `bare` does the least that a client can do: a
protocol, llhttp, a stamp for each token. `aiohttp-uvloop` and `bare` run on uvloop.
"""

import asyncio
from itertools import repeat
from time import perf_counter_ns
from typing import cast
from urllib.parse import urlsplit

import httptools
import httpx
import uvloop

from tests.bench.clients.common import (
    BODY,
    PATH,
    TOKEN,
    Times,
    arguments,
    headers,
    raw_request,
    write_on_sigterm,
)


async def aiohttp(url: str, streams: int, times: Times) -> None:
    import aiohttp  # an optional extra

    async def ask_for_ever() -> None:
        while True:
            fields, stamps = headers(times, perf_counter_ns())
            async with session.post(url + PATH, data=BODY, headers=fields) as response:
                async for line in response.content:
                    if line.startswith(TOKEN):
                        stamps.append(perf_counter_ns())

    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await asyncio.gather(*(ask_for_ever() for _ in range(streams)))


async def stock_httpx(url: str, streams: int, times: Times) -> None:
    async def ask_for_ever() -> None:
        while True:
            fields, stamps = headers(times, perf_counter_ns())
            async with client.stream("POST", url + PATH, content=BODY, headers=fields) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        stamps.append(perf_counter_ns())

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(ask_for_ever() for _ in range(streams)))


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


async def bare(url: str, streams: int, times: Times) -> None:
    place = urlsplit(url)
    assert place.hostname is not None
    assert place.port is not None
    loop = asyncio.get_running_loop()
    for _ in range(streams):
        await loop.create_connection(lambda: BareProtocol(times), place.hostname, place.port)
    await asyncio.Event().wait()


CLIENTS = {"aiohttp": aiohttp, "aiohttp-uvloop": aiohttp, "httpx": stock_httpx, "bare": bare}

if __name__ == "__main__":
    options = arguments(CLIENTS)
    noted: Times = {}
    write_on_sigterm(noted, options.file)
    run = uvloop.run if options.name in ("aiohttp-uvloop", "bare") else asyncio.run
    run(CLIENTS[options.name](options.url, options.streams, noted))
