"""Our user with stock httpx for a transport: `AsyncClient` brings the bytes; decoding, counting by
usage, stamps and rows are ours (without Locust, and without a watch on its own lag).
"""

import asyncio
import os
import signal
from time import perf_counter_ns

import httpx

from harness.load.client import StreamReader
from harness.load.rows import ShardWriter
from harness.load.stream import StreamMachine
from harness.records import RequestRow
from harness.workload.abandon import RequestSpec
from tests.bench.clients.common import BODY, PATH, arguments, headers


async def ask_for_ever(
    client: httpx.AsyncClient, url: str, rows: ShardWriter[RequestRow], user: int
) -> None:
    """One stream: one request after the other."""
    while True:
        sent_ns = perf_counter_ns()
        fields, _ = headers({}, sent_ns)
        stream = StreamMachine(_spec(fields, user, sent_ns), sent_ns=sent_ns, continuous_usage=True)
        reader = StreamReader(stream, None)
        try:
            async with client.stream("POST", url, content=BODY, headers=fields) as response:
                stream.headers(response.status_code)
                async for chunk in response.aiter_raw():
                    reader.read(chunk, perf_counter_ns())
        finally:
            if stream.outcome is None:
                stream.cut(perf_counter_ns())
            rows.write(stream.row())


def _spec(fields: dict[str, str], user: int, sent_ns: int) -> RequestSpec:
    return RequestSpec(
        request_id=fields["x-request-id"],
        arm="main",
        user=user,
        max_tokens=100,
        prompt_tokens=64,
        intended_start_ns=sent_ns,
    )


async def main() -> None:
    options = arguments(["user"])
    limits = httpx.Limits(max_connections=None)
    with ShardWriter(options.file.parent, RequestRow, os.getpid()) as rows:
        async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client:
            url = options.url + PATH
            users = [ask_for_ever(client, url, rows, user) for user in range(options.streams)]
            load = asyncio.gather(*users, return_exceptions=True)
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, load.cancel)
            await asyncio.wait([load])


if __name__ == "__main__":
    asyncio.run(main())
