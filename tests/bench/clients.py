"""Clients that ours is compared with: `python -m tests.bench.clients NAME URL STREAMS FILE`.

A client asks again as soon as an answer has ended, on each of its streams, until SIGTERM; then it
writes a file: {request id: [when it was sent, when each token came]}, in nanoseconds. Tokens are
recognised by the beginning of their line; their JSON is not read. `bare` does the least that a
client can do: llhttp, and a stamp for each token.

`our-httpx` leaves rows instead. It is our user with stock httpx for a transport: `AsyncClient`
brings the bytes; decoding, counting by usage, stamps and rows are ours, without Locust and without
a watch on its own lag.
"""

import sys

if __name__ == "__main__" and sys.argv[1:2] == ["gevent-httpx"]:
    from gevent import monkey  # noqa: TID251

    monkey.patch_all()

import argparse
import asyncio
import itertools
import json
import os
import signal
from collections.abc import Awaitable, Callable
from itertools import repeat
from pathlib import Path
from time import perf_counter_ns
from typing import Final, cast
from urllib.parse import urlsplit

import gevent  # noqa: TID251
import httptools
import httpx
import uvloop
from gevent import socket  # noqa: TID251

from harness.load.client import StreamReader
from harness.load.rows import ShardWriter
from harness.load.stream import StreamMachine
from harness.records import RequestRow
from harness.workload.abandon import RequestSpec

PATH: Final = "/v1/completions"
TOKEN: Final = b"data: {"
_BODY: Final = {
    "model": "bench",
    "prompt": "the words of a prompt " * 12,
    "max_tokens": 100,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
BODY: Final = json.dumps(_BODY).encode()
UNLIMITED: Final = httpx.Limits(max_connections=None)

Times = dict[str, list[int]]
_numbers = itertools.count()


def headers(times: Times, now_ns: int) -> tuple[dict[str, str], list[int]]:
    """The headers of a new request sent now, and the list that takes its tokens' times."""
    request_id = f"request-{next(_numbers)}"
    times[request_id] = [now_ns]
    return {"content-type": "application/json", "x-request-id": request_id}, times[request_id]


async def for_ever(ask: Callable[[], Awaitable[None]], streams: int) -> None:
    async def one_stream() -> None:
        while True:
            await ask()

    await asyncio.gather(*(one_stream() for _ in range(streams)))


async def aiohttp(url: str, streams: int, times: Times) -> None:
    import aiohttp  # an optional extra

    async def ask() -> None:
        fields, stamps = headers(times, perf_counter_ns())
        async with session.post(url + PATH, data=BODY, headers=fields) as response:
            async for line in response.content:
                if line.startswith(TOKEN):
                    stamps.append(perf_counter_ns())

    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await for_ever(ask, streams)


def async_httpx() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=60, limits=UNLIMITED, trust_env=False)


async def stock_httpx(url: str, streams: int, times: Times) -> None:
    async def ask() -> None:
        fields, stamps = headers(times, perf_counter_ns())
        async with client.stream("POST", url + PATH, content=BODY, headers=fields) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    stamps.append(perf_counter_ns())

    async with async_httpx() as client:
        await for_ever(ask, streams)


class Bare:
    """One connection, kept for all of its requests: what comes, and when."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._now_ns = 0

    def new_request(self) -> bytes:
        """The request as it is on the wire."""
        self._parser = httptools.HttpResponseParser(self)
        self._is_complete = False
        fields, self._stamps = headers(self._times, perf_counter_ns())
        lines = [f"POST {PATH} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(BODY)}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + BODY

    def data_received(self, data: bytes) -> None:
        self._now_ns = perf_counter_ns()
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._stamps.extend(repeat(self._now_ns, body.count(TOKEN)))

    def on_message_complete(self) -> None:
        self._is_complete = True


class BareProtocol(Bare, asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        self._transport.write(self.new_request())

    def on_message_complete(self) -> None:
        asyncio.get_running_loop().call_soon(self._ask)


async def bare(url: str, streams: int, times: Times) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(streams):
        await loop.create_connection(lambda: BareProtocol(times), *_address(url))
    await asyncio.Event().wait()


class BareStream(Bare):
    def ask_for_ever(self, address: tuple[str, int]) -> None:
        sock = socket.create_connection(address)
        while True:
            sock.sendall(self.new_request())
            while not self._is_complete:
                self.data_received(sock.recv(65536))


def gevent_bare(url: str, streams: int, times: Times) -> None:
    clients = [BareStream(times) for _ in range(streams)]
    gevent.joinall([gevent.spawn(client.ask_for_ever, _address(url)) for client in clients])


def gevent_httpx(url: str, streams: int, times: Times) -> None:
    """What our user would be without a transport of its own."""

    def ask_for_ever() -> None:
        while True:
            fields, stamps = headers(times, perf_counter_ns())
            with client.stream("POST", url + PATH, content=BODY, headers=fields) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        stamps.append(perf_counter_ns())

    with httpx.Client(timeout=60, limits=UNLIMITED, trust_env=False) as client:
        gevent.joinall([gevent.spawn(ask_for_ever) for _ in range(streams)])


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


async def our_httpx(url: str, streams: int, folder: Path) -> None:
    async def ask() -> None:
        sent_ns = perf_counter_ns()
        fields, _ = headers({}, sent_ns)
        spec = RequestSpec(
            request_id=fields["x-request-id"],
            arm="main",
            user=0,
            max_tokens=100,
            prompt_tokens=64,
            intended_start_ns=sent_ns,
        )
        stream = StreamMachine(spec, sent_ns=sent_ns, continuous_usage=True)
        reader = StreamReader(stream, None)
        try:
            async with client.stream("POST", url + PATH, content=BODY, headers=fields) as response:
                stream.headers(response.status_code)
                async for chunk in response.aiter_raw():
                    reader.read(chunk, perf_counter_ns())
        finally:
            if stream.outcome is None:
                stream.cut(perf_counter_ns())
            rows.write(stream.row())

    with ShardWriter(folder, RequestRow, os.getpid()) as rows:
        async with async_httpx() as client:
            load = asyncio.ensure_future(for_ever(ask, streams))
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, load.cancel)
            await asyncio.wait([load])


ON_ASYNCIO = {"aiohttp": aiohttp, "aiohttp-uvloop": aiohttp, "httpx": stock_httpx, "bare": bare}
ON_GEVENT = {"gevent-httpx": gevent_httpx, "gevent-bare": gevent_bare}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[*ON_ASYNCIO, *ON_GEVENT, "our-httpx"])
    parser.add_argument("url")
    parser.add_argument("streams", type=int)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.name == "our-httpx":
        asyncio.run(our_httpx(options.url, options.streams, options.file.parent))
        return
    times: Times = {}

    def end(*_: object) -> None:
        options.file.write_text(json.dumps(times))
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    if options.name in ON_GEVENT:
        ON_GEVENT[options.name](options.url, options.streams, times)
        return
    run = uvloop.run if options.name in ("aiohttp-uvloop", "bare") else asyncio.run
    run(ON_ASYNCIO[options.name](options.url, options.streams, times))


if __name__ == "__main__":
    main()
