"""aiohttp, its answers read by line, on asyncio's own loop; on uvloop: `aiohttp_uvloop`."""

import asyncio
from time import perf_counter_ns

import aiohttp

from tests.bench.clients.common import (
    BODY,
    PATH,
    TOKEN,
    Times,
    arguments,
    headers,
    write_on_sigterm,
)


async def ask_for_ever(session: aiohttp.ClientSession, url: str, times: Times) -> None:
    """One stream: one request after the other."""
    while True:
        fields, stamps = headers(times, perf_counter_ns())
        async with session.post(url, data=BODY, headers=fields) as response:
            async for line in response.content:
                if line.startswith(TOKEN):
                    stamps.append(perf_counter_ns())


async def main() -> None:
    options = arguments()
    times: Times = {}
    write_on_sigterm(times, options.file)
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        streams = [ask_for_ever(session, options.url + PATH, times) for _ in range(options.streams)]
        await asyncio.gather(*streams)


if __name__ == "__main__":
    asyncio.run(main())
