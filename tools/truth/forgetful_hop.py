"""A hop before a server that does not always pass a client's leave on to it:
`python -m tools.truth.forgetful_hop URL EVERY LATE_S`.

Each connection gets one of its own to the server, and what comes is passed on. When a client
closes it, the hop closes its own too, after LATE_S; but one leave in EVERY (0: none) is forgotten,
and the answer read to its end. It says on standard output where it listens, ends with its standard
input, and then says of each leave whose it was and whether it was forgotten, as JSON.
"""

import asyncio
import json
import os
import random
import re
import sys
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from tools.truth.server import wait_for_stdin

ID: Final = re.compile(rb"x-request-id: (\S+)")
END: Final = b"[DONE]"
PIECE: Final = 65536


class Hop:
    def __init__(self, url: str, *, every: int, late_s: float) -> None:
        self._url = urlsplit(url)
        self._every, self._late_s = every, late_s
        self._rng = random.Random(1)
        self._serving: set[asyncio.Future[None]] = set()
        self.left: list[tuple[str, bool]] = []

    def serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        one = asyncio.ensure_future(self._serve(client, to_client))
        self._serving.add(one)  # the event loop itself would let go of it in the middle
        one.add_done_callback(self._serving.discard)

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection(self._url.hostname, self._url.port)
        asked, answered = bytearray(), bytearray()
        back = asyncio.ensure_future(_copy(server, to_client, answered))
        with suppress(ConnectionError):
            await _copy(client, to_server, asked)
        has_ended = END in answered or (back.done() and back.exception() is None)
        back.cancel()
        await asyncio.gather(back, return_exceptions=True)
        if not has_ended:
            is_forgotten = bool(self._every) and self._rng.random() < 1 / self._every
            name = ID.search(asked)
            self.left.append((name[1].decode() if name else "", is_forgotten))
            await (_read_on(server) if is_forgotten else asyncio.sleep(self._late_s))
        to_client.close()
        to_server.close()


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, last: bytearray
) -> None:
    """`last`: what came last."""
    while piece := await reader.read(PIECE):
        last[:] = (last + piece)[-PIECE:]
        writer.write(piece)
        await writer.drain()


async def _read_on(server: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await server.read(PIECE):
            pass


async def main(url: str, every: str, late_s: str) -> None:
    hop = Hop(url, every=int(every), late_s=float(late_s))
    listener = await asyncio.start_server(hop.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    print(json.dumps({"url": f"http://127.0.0.1:{port}"}), flush=True)  # noqa: T201
    await wait_for_stdin()
    print(json.dumps(hop.left), flush=True)  # noqa: T201
    os._exit(0)  # the connections that are still open end with the process


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
