"""A gateway with faults behind switches: `python -m tools.truth.faulty_gateway URL SETTINGS_JSON`.

It stands before one upstream at URL, and is clean unless a switch says otherwise: its settings are
the fields of `Faults`. It says on standard output where it listens, and ends with its standard
input. `GET /usage` has a row for each request that was passed on and is over, `/metrics` a gauge
and counters; `/v1/models` is the upstream's.
"""

import asyncio
import json
import os
import sys
from typing import Any, Final

from tools.truth.gateway_bill import dialect_of, error
from tools.truth.gateway_exchange import Books, Exchange
from tools.truth.gateway_faults import Faults
from tools.truth.gateway_wire import JSON, Body, BrokenError, Client, Head
from tools.truth.server import wait_for_stdin

TEXT: Final = {"content-type": "text/plain; version=0.0.4"}


class Gateway:
    """`_tasks`: one a client. The event loop does not keep them, and after a leave nobody else."""

    def __init__(self, url: str, faults: Faults) -> None:
        self._faults = faults
        self._books = Books(url, faults)
        self._tasks = set[asyncio.Task[None]]()

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = Client(reader, writer)
        try:
            while (request := await client.request()) is not None:
                head, body = request
                if not await self._answer(client, head, body) or not head.is_kept:
                    break
        except ConnectionError:
            return  # a client that leaves during a small answer does not matter
        finally:
            client.close()

    async def _answer(self, client: Client, head: Head, raw: bytes) -> bool:
        """Returns whether the connection is kept."""
        path = head.target.partition("?")[0]
        if not self._faults.takes_key(head.headers):
            return await self._refuse(client, 401, "no valid key")
        if head.method == "GET":
            await client.send(await self._page(path, head))
            return True
        dialect = dialect_of(path)
        if dialect is None or not self._faults.speaks(dialect):
            return await self._refuse(client, 404, "no such page here")
        if self._books.is_wedged:
            await asyncio.Event().wait()
        if self._books.refuses:
            return await self._refuse(client, 503, "the upstream has failed too often")
        if "transfer-encoding" in head.headers:
            await self._refuse(client, 411, "the body needs a content-length")
            return False
        asked = read_asked(raw)
        if asked is None:
            return await self._refuse(client, 400, "the body is no JSON object")
        return await Exchange(self._books, client, head, asked, dialect).run()

    async def _refuse(self, client: Client, status: int, why: str) -> bool:
        await client.send(Body(JSON).whole(status, error(why)))
        return True

    async def _page(self, path: str, head: Head) -> bytes:
        match path:
            case "/health":
                return Body(JSON).whole(200, b"{}")
            case "/usage":
                return Body(JSON).whole(200, json.dumps(self._books.rows).encode())
            case "/metrics":
                return Body(TEXT).whole(200, self._metrics().encode())
            case "/v1/models":
                return await self._models(head)
            case _:
                return Body(JSON).whole(404, error("no such page here"))

    def _metrics(self) -> str:
        shown = {"requests_in_flight": ("gauge", self._books.in_flight)}
        for kind in ("prompt_tokens", "completion_tokens"):
            shown[f"{kind}_total"] = "counter", self._books.billed[kind]
        lines = [
            f"# TYPE gateway_{name} {kind}\ngateway_{name} {value}\n"
            for name, (kind, value) in shown.items()
        ]
        return "".join(lines)

    async def _models(self, head: Head) -> bytes:
        parts: list[bytes] = []
        try:
            connection = await self._books.connect()
            answer = await connection.ask(head, b"")
            while piece := await connection.piece():
                parts.append(piece)
        except BrokenError:
            return Body(JSON).whole(502, error("the upstream does not answer"))
        self._books.pool.give(connection)
        return Body(JSON).whole(answer.status, b"".join(parts))


def read_asked(raw: bytes) -> dict[str, Any] | None:
    try:
        asked = json.loads(raw)
    except ValueError:
        return None
    return asked if isinstance(asked, dict) else None


async def main(url: str, faults: Faults) -> None:
    gateway = Gateway(url, faults)
    listener = await asyncio.start_server(gateway.connected, "127.0.0.1", 0, backlog=1024)
    port = listener.sockets[0].getsockname()[1]
    ready = {"event": "ready", "url": f"http://127.0.0.1:{port}", "pid": os.getpid()}
    print(json.dumps(ready), flush=True)  # noqa: T201
    await wait_for_stdin()
    os._exit(0)  # the connections that are still open end with the process


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Faults(**json.loads(sys.argv[2]))))
