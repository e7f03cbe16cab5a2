"""Clients that ours is compared with: `python -m tools.bench.clients NAME URL STREAMS FILE`.

A client asks again as soon as an answer has ended, on each of its streams, until SIGTERM; then it
writes a file: {request id: [when it was sent, when each token came]}, in nanoseconds. Tokens are
recognised by the beginning of their line; their JSON is not read. `bare` does the least that a
client can do: llhttp, and a stamp for each token.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
from itertools import repeat
from pathlib import Path
from time import perf_counter_ns
from typing import Final, cast
from urllib.parse import urlsplit

import httptools
import httpx
import uvloop

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

Times = dict[str, list[int]]
_numbers = itertools.count()


def headers(times: Times, now_ns: int) -> tuple[dict[str, str], list[int]]:
    """The headers of a new request sent now, and the list that takes its tokens' times."""
    request_id = f"request-{next(_numbers)}"
    times[request_id] = [now_ns]
    return {"content-type": "application/json", "x-request-id": request_id}, times[request_id]


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
    """One connection, kept for all of its requests: what comes, and when."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._now_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        fields, self._stamps = headers(self._times, perf_counter_ns())
        lines = [f"POST {PATH} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(BODY)}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        self._transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + BODY)

    def data_received(self, data: bytes) -> None:
        self._now_ns = perf_counter_ns()
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._stamps.extend(repeat(self._now_ns, body.count(TOKEN)))

    def on_message_complete(self) -> None:
        asyncio.get_running_loop().call_soon(self._ask)


async def bare(url: str, streams: int, times: Times) -> None:
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    address = (parts.hostname, parts.port)
    for _ in range(streams):
        await loop.create_connection(lambda: BareProtocol(times), *address)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=["httpx", "bare"])
    parser.add_argument("url")
    parser.add_argument("streams", type=int)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    times: Times = {}

    def end(*_: object) -> None:
        options.file.write_text(json.dumps(times))
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    if options.name == "bare":
        uvloop.run(bare(options.url, options.streams, times))
    else:
        asyncio.run(stock_httpx(options.url, options.streams, times))


if __name__ == "__main__":
    main()
