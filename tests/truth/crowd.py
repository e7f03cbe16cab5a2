"""Other users of a server: `python -m tests.truth.crowd URL USERS SEED`, until standard input ends.

Each asks for 20 to 250 tokens, reads them (three in ten leave on the way), pauses for a second on
average, and asks again, on a new connection.
"""

import asyncio
import json
import random
import sys
from contextlib import suppress
from urllib.parse import urlsplit

from tests.truth.server import wait_for_stdin

MODEL = "tiny"  # of the bundled engine
PAUSE_S = 1.0
LEAVE_SHARE = 0.3


async def one_answer(host: str, port: int, tokens: int, leaves_after: int | None) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    asked = {
        "model": MODEL,
        "prompt": "others",
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    body = json.dumps(asked).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    events = 0
    try:
        while line := await reader.readline():
            events += line.startswith(b"data: ")
            is_over = line.startswith(b"data: [DONE]")
            if is_over or (leaves_after is not None and events >= leaves_after):
                break
    finally:
        writer.close()


async def user(host: str, port: int, rng: random.Random) -> None:
    while True:
        tokens = rng.randint(20, 250)
        leaves_after = rng.randint(1, tokens) if rng.random() < LEAVE_SHARE else None
        with suppress(ConnectionError):
            await one_answer(host, port, tokens, leaves_after)
        await asyncio.sleep(rng.expovariate(1 / PAUSE_S))


async def main(url: str, users: int, seed: str) -> None:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    rng = random.Random(seed)
    tasks = [
        asyncio.ensure_future(user(parts.hostname, parts.port, random.Random(rng.random())))
        for _ in range(users)
    ]
    await wait_for_stdin()
    for one in tasks:
        one.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
