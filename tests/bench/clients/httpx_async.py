"""Stock httpx on asyncio: `AsyncClient`, its answers read by line."""

import asyncio
from time import perf_counter_ns

import httpx

from tests.bench.clients.common import (
    BODY,
    PATH,
    Times,
    arguments,
    headers,
    write_on_sigterm,
)


async def ask_for_ever(client: httpx.AsyncClient, url: str, times: Times) -> None:
    """One stream: one request after the other."""
    while True:
        fields, stamps = headers(times, perf_counter_ns())
        async with client.stream("POST", url, content=BODY, headers=fields) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    stamps.append(perf_counter_ns())


async def main() -> None:
    options = arguments()
    times: Times = {}
    write_on_sigterm(times, options.file)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client:
        streams = [ask_for_ever(client, options.url + PATH, times) for _ in range(options.streams)]
        await asyncio.gather(*streams)


if __name__ == "__main__":
    asyncio.run(main())
