"""A scripted engine behind HTTP: `python -m tests.truth.server SCRIPT_JSON`.

Speaks what the harness expects of the bundled engine, in plain asyncio streams, and serves beside
it `GET /truth`. It says on standard output where it listens and ends with its standard input.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.truth.scripted_engine import Script, ScriptedEngine, Shown, Work

MODEL = "scripted"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
JSON = "application/json"
TEXT = "text/plain; version=0.0.4"
NDJSON = "application/x-ndjson"


class TruthServer:
    """Connections on one side, the step loop on the other; `_arrival` wakes an idle loop."""

    def __init__(self, script: Script) -> None:
        self.engine = ScriptedEngine(script, time.perf_counter_ns)
        self._shown = Shown(self.engine, time.perf_counter_ns)
        self._arrival = asyncio.Event()
        self._reads_ns: dict[str, list[int]] = {}
        self._pages: dict[str, Callable[[], Any]] = {
            "/health": dict,
            "/v1/models": lambda: {"object": "list", "data": [{"id": MODEL, "object": "model"}]},
            "/walkaway/config": self._config,
            "/walkaway/clock": clock,
            "/truth": self._truth,
        }

    async def run_steps(self) -> None:
        while True:
            if not self.engine.has_work:
                self._arrival.clear()
                await self._arrival.wait()
            started_s = time.perf_counter()
            step = self.engine.boundary()
            await asyncio.sleep(self.engine.script.step_s - (time.perf_counter() - started_s))
            if step is not None:
                self.engine.end_step(step)
                self._shown.step_ended()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await read_request(reader)) is not None:
                method, target, headers, body = request
                if method == "POST":
                    await self._generate(headers, json.loads(body), reader, writer)
                    return
                writer.write(self._answer(target))
        except ConnectionError:
            return  # a client that leaves during a small answer does not matter
        finally:
            writer.close()

    async def _generate(
        self,
        headers: dict[str, str],
        body: dict[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        finished = asyncio.Event()

        def deliver(work: Work) -> None:
            is_last = work.finish_reason is not None
            writer.write(token_event(work, is_last=is_last))
            if is_last:
                writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
                finished.set()

        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        )
        client_id = headers.get("x-request-id", "")
        work = self.engine.submit(client_id, len(body["prompt"]), body["max_tokens"], deliver)
        self._arrival.set()
        closing = asyncio.ensure_future(wait_for_close(reader))
        ending = asyncio.ensure_future(finished.wait())
        await asyncio.wait([closing, ending], return_when=asyncio.FIRST_COMPLETED)
        if closing.done():
            self.engine.left(work)
        closing.cancel()
        ending.cancel()

    def _answer(self, target: str) -> bytes:
        parts = urlsplit(target)
        self._reads_ns.setdefault(parts.path, []).append(time.perf_counter_ns())
        query = {key: int(values[0]) for key, values in parse_qs(parts.query).items()}
        match parts.path:
            case "/metrics":
                return response(self._shown.page().encode(), TEXT)
            case "/walkaway/lifecycle":
                return log_page(self.engine.lifecycle, query)
            case "/walkaway/steps":
                return log_page([asdict(step) for step in self.engine.steps], query)
            case path if path in self._pages:
                return response(json.dumps(self._pages[path]()).encode(), JSON)
            case _:
                return response(b"{}", JSON, HTTPStatus.NOT_FOUND)

    def _config(self) -> dict[str, Any]:
        script = self.engine.script
        return {
            "model": MODEL,
            "device": "none",
            "runner": "scripted",
            "max_num_seqs": script.slots,
            "num_blocks": script.num_blocks,
            "block_size": script.block_size,
            "max_model_len": script.num_blocks * script.block_size,
            "frontend_pid": os.getpid(),
            "worker_pid": os.getpid(),
        }

    def _truth(self) -> dict[str, Any]:
        return {**self.engine.truth(), "reads_ns": self._reads_ns}


def clock() -> dict[str, Any]:
    return {
        "clock": "CLOCK_MONOTONIC",
        "now_ns": time.perf_counter_ns(),
        "boot_id": BOOT_ID.read_text().strip() if BOOT_ID.exists() else None,
    }


def token_event(work: Work, *, is_last: bool) -> bytes:
    event = {
        "id": work.name,
        "object": "text_completion",
        "choices": [{"index": 0, "text": " w", "finish_reason": "length" if is_last else None}],
        "usage": {
            "prompt_tokens": work.prompt_tokens,
            "completion_tokens": len(work.token_times_ns),
        },
    }
    return chunk(b"data: " + json.dumps(event).encode() + b"\n\n")


def log_page(rows: list[dict[str, Any]], query: dict[str, int]) -> bytes:
    after = query.get("after", 0)
    page = rows[after : after + query.get("limit", 10_000)]
    body = b"".join(json.dumps(row).encode() + b"\n" for row in page)
    numbers = {"next-after": after + len(page), "last": len(rows), "dropped": 0}
    headers = "".join(f"x-walkaway-{name}: {number}\r\n" for name, number in numbers.items())
    return response(body, NDJSON, more_headers=headers)


def response(
    body: bytes, content_type: str, status: HTTPStatus = HTTPStatus.OK, more_headers: str = ""
) -> bytes:
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: {content_type}\r\n"
    return f"{head}{more_headers}content-length: {len(body)}\r\n\r\n".encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def read_request(
    reader: asyncio.StreamReader,
) -> tuple[str, str, dict[str, str], bytes] | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (s.partition(":") for s in lines)}
    return method, target, headers, await reader.readexactly(int(headers.get("content-length", 0)))


async def wait_for_close(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(4096):
            pass
    except ConnectionError:
        return


async def wait_for_stdin() -> None:
    stdin = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    await stdin.read()


async def main(script: Script) -> None:
    server = TruthServer(script)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    ready = {"event": "ready", "url": f"http://127.0.0.1:{port}", "pid": os.getpid()}
    print(json.dumps(ready), flush=True)  # noqa: T201
    steps = asyncio.ensure_future(server.run_steps())
    stdin = asyncio.ensure_future(wait_for_stdin())
    ended, _ = await asyncio.wait([steps, stdin], return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()


if __name__ == "__main__":
    asyncio.run(main(Script(**json.loads(sys.argv[1]))))
