"""A scripted engine behind HTTP: `python -m tools.truth.server SETTINGS_JSON`.

Speaks what the harness expects of the bundled engine, in plain asyncio streams, and serves
`GET /truth`, too. It says on standard output where it listens and ends with its standard input. Its
settings are the engine's (`Script`), and bad manners of a server (`Manners`).
"""

import asyncio
import json
import os
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tools.truth.scripted_engine import Script, ScriptedEngine, Shown, Work

MODEL = "scripted"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
JSON = "application/json"
TEXT = "text/plain; version=0.0.4"
NDJSON = "application/x-ndjson"
COARSE_S = 0.002  # timers of the loop are set in whole milliseconds
NAP_S = 5e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """Wrongs that a bad server does to its clients, apart from its engine's faults.

    `status`: of each answer to a POST, from the request number `status_from` on. `only_model`:
    another one gets 404. `key`, `metrics_key`: without this bearer token an answer, or the metrics
    page, is refused by 401. `at_once`: the whole answer in one piece. `length`: of each answer,
    whatever was asked for. `dies_after_tokens`: after sending this number, the process ends.
    `certificate`: a PEM file with its key; the server then speaks TLS.
    """

    status: int = 0
    status_from: int = 1
    only_model: bool = False
    key: str = ""
    metrics_key: str = ""
    at_once: bool = False
    length: int = 0
    dies_after_tokens: int = 0
    certificate: str = ""

    def refusal(self, number: int, headers: dict[str, str], body: dict[str, Any]) -> int:
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            return 401
        if self.only_model and body.get("model") != MODEL:
            return 404
        return self.status if number >= self.status_from else 0


class TruthServer:
    """Connections on one side, the step loop on the other; `arrival` wakes an idle loop."""

    def __init__(self, script: Script, manners: Manners) -> None:
        self._manners = manners
        self._num_asked = 0
        self._num_sent = 0
        self.engine = ScriptedEngine(script, time.perf_counter_ns)
        self._shown = Shown(self.engine, time.perf_counter_ns)
        self.arrival = asyncio.Event()
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
                self.arrival.clear()
                await self.arrival.wait()
            began_s = time.perf_counter()
            step = self.engine.boundary()
            script, running = self.engine.script, 0 if step is None else step.num_running
            ends_s = began_s + script.step_s + running * script.stream_s
            while running and time.perf_counter() < began_s + script.busy_s:
                pass
            await asyncio.sleep(ends_s - time.perf_counter() - COARSE_S)
            while time.perf_counter() < ends_s:
                time.sleep(NAP_S)  # noqa: ASYNC251, TID251  a busy loop would take a core
                await asyncio.sleep(0)  # a close that comes now is seen before the step ends
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
                writer.write(self.answer(target, headers))
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
        self._num_asked += 1
        refusal = self._manners.refusal(self._num_asked, headers, body)
        if refusal:
            writer.write(refused(refusal, body.get("model")))
            return
        finished = asyncio.Event()
        num_tokens, is_stream = self._manners.length or body["max_tokens"], body.get("stream")

        def deliver(work: Work) -> None:
            self._num_sent += 1
            if self._num_sent == self._manners.dies_after_tokens:
                os._exit(3)
            is_last = work.finish_reason is not None
            if not is_stream:
                if is_last:
                    writer.write(response(token_event(work, is_last=True), JSON))
                    finished.set()
                return
            writer.write(chunk(sse(token_event(work, is_last=is_last))))
            if is_last:
                writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
                finished.set()

        if is_stream:
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
            )
        if self._manners.at_once:
            writer.write(whole_answer(num_tokens))
            return
        client_id = headers.get("x-request-id", "")
        work = self.engine.submit(client_id, len(body["prompt"]), num_tokens, deliver)
        self.arrival.set()
        closing = asyncio.ensure_future(wait_for_close(reader))
        ending = asyncio.ensure_future(finished.wait())
        await asyncio.wait([closing, ending], return_when=asyncio.FIRST_COMPLETED)
        if closing.done():
            self.engine.left(work)
        closing.cancel()
        ending.cancel()

    def answer(self, target: str, headers: dict[str, str]) -> bytes:
        wanted = self._manners.metrics_key
        parts = urlsplit(target)
        self._reads_ns.setdefault(parts.path, []).append(time.perf_counter_ns())
        query = {key: int(values[0]) for key, values in parse_qs(parts.query).items()}
        match parts.path:
            case "/metrics" if wanted and headers.get("authorization") != f"Bearer {wanted}":
                return refused(401, None)
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


def refused(status: int, model: str | None) -> bytes:
    words = {401: "no valid key", 404: f"no model {model!r} here"}
    error = {"message": words.get(status, HTTPStatus(status).phrase), "code": status}
    again = "retry-after: 1\r\n" if status in (429, 503) else ""
    return response(json.dumps({"error": error}).encode(), JSON, HTTPStatus(status), again)


def whole_answer(num_tokens: int) -> bytes:
    events = [one_event("at-once", 8, n, is_last=n == num_tokens) for n in range(1, num_tokens + 1)]
    return chunk(b"".join(map(sse, events)) + b"data: [DONE]\n\n") + b"0\r\n\r\n"


def sse(event: bytes) -> bytes:
    return b"data: " + event + b"\n\n"


def token_event(work: Work, *, is_last: bool) -> bytes:
    num_tokens = len(work.token_times_ns)
    return one_event(work.name, work.prompt_tokens, num_tokens, is_last=is_last)


def one_event(name: str, prompt_tokens: int, num_tokens: int, *, is_last: bool) -> bytes:
    event = {
        "id": name,
        "object": "text_completion",
        "choices": [{"index": 0, "text": " w", "finish_reason": "length" if is_last else None}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": num_tokens},
    }
    return json.dumps(event).encode()


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


async def main(server: TruthServer, certificate: str) -> None:
    tls = None
    if certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate)
        tls.set_alpn_protocols(["h2", "http/1.1"])
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    port, scheme = listener.sockets[0].getsockname()[1], "http" if tls is None else "https"
    ready = {"event": "ready", "url": f"{scheme}://127.0.0.1:{port}", "pid": os.getpid()}
    print(json.dumps(ready), flush=True)  # noqa: T201
    steps = asyncio.ensure_future(server.run_steps())
    stdin = asyncio.ensure_future(wait_for_stdin())
    ended, _ = await asyncio.wait([steps, stdin], return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    bad = {one.name: given.pop(one.name) for one in fields(Manners) if one.name in given}
    manners = Manners(**bad)
    asyncio.run(main(TruthServer(Script(**given), manners), manners.certificate))
