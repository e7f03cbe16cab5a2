"""Other users of a server, until standard input ends:
`python -m tools.truth.crowd URL USERS SEED MODEL`.

Each asks for 20 to 250 tokens to a prompt of 16 to 512, reads them (three in ten leave on the way),
pauses for a second on average, and asks again, on a new connection. At the end it says when each
token came, and how long after the one before (both in seconds, of `time.perf_counter`), as JSON.
"""

import asyncio
import json
import random
import string
import sys
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from tools.truth.server import wait_for_stdin

PAUSE_S = 1.0
LEAVE_SHARE = 0.3


Gaps = list[tuple[float, float]]


async def one_answer(
    host: str, port: int, asked: dict[str, Any], leaves_after: int | None, gaps: Gaps
) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    body = json.dumps(asked).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    events, last_s = 0, None
    try:
        while line := await reader.readline():
            is_over = line.startswith(b"data: [DONE]")
            if line.startswith(b"data: ") and not is_over:
                now_s = time.perf_counter()
                if last_s is not None:
                    gaps.append((now_s, now_s - last_s))
                events, last_s = events + 1, now_s
            if is_over or (leaves_after is not None and events >= leaves_after):
                break
    finally:
        writer.close()


async def user(host: str, port: int, model: str, rng: random.Random, gaps: Gaps) -> None:
    while True:
        tokens = rng.randint(20, 250)
        prompt = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(16, 512)))
        leaves_after = rng.randint(1, tokens) if rng.random() < LEAVE_SHARE else None
        asked = {"model": model, "prompt": prompt, "max_tokens": tokens}
        asked |= {"stream": True, "ignore_eos": True}
        with suppress(ConnectionError):
            await one_answer(host, port, asked, leaves_after, gaps)
        await asyncio.sleep(rng.expovariate(1 / PAUSE_S))


async def main(url: str, users: int, seed: str, model: str) -> None:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    rng, gaps = random.Random(seed), Gaps()
    tasks = [
        asyncio.ensure_future(
            user(parts.hostname, parts.port, model, random.Random(rng.random()), gaps)
        )
        for _ in range(users)
    ]
    await wait_for_stdin()
    for one in tasks:
        one.cancel()
    print(json.dumps(gaps))  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
