"""The engine of tools/truth/pair_engine.py behind HTTP: `python -m tools.truth.pair_server --port P
[--defect NAME]`. It ends with its standard input, or at a signal.
"""

import argparse
import asyncio
import json
import sys
from collections import defaultdict
from typing import Any, Final

from tools.truth.pair_engine import ADAPTER, CONTEXT, DEFECTS, PairEngine, Request
from tools.truth.server import (
    JSON,
    TEXT,
    chunk,
    read_request,
    refused,
    response,
    sse,
    wait_for_stdin,
)

MODEL: Final = "pairs"
STEP_S: Final = 0.01
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
)
STILL_THERE: Final = b"HTTP/1.1 102 Processing\r\n\r\n"
CANCEL: Final = "/cancel"
TARGET: Final = """
description = "A scripted engine with one defect where two features meet"
stream_options = { include_usage = true, continuous_usage_stats = true }
continuous_usage = true
bytes_are_tokens = true
slots_from = "workload"
settle_s = 1.0
cancel_path = "/v1/requests/{id}/cancel"

[metrics]
running = { name = "vllm:num_requests_running", refresh = "at once", trust = "exact" }
waiting = { name = "vllm:num_requests_waiting", refresh = "at once", trust = "exact" }
generated_tokens = { name = "vllm:generation_tokens_total", refresh = "at once", trust = "exact" }
ended = { name = "vllm:request_success_total", refresh = "at once", trust = "exact" }

[metrics.aborted]
name = "vllm:request_success_total"
labels = { finished_reason = "abort" }
refresh = "at once"
trust = "exact"
"""


class Answer:
    """A request's answer on its connection."""

    def __init__(self, body: dict[str, Any], name: str, writer: asyncio.StreamWriter) -> None:
        self.ended = asyncio.Event()
        self._writer = writer
        self._texts = defaultdict[int, str](str)
        self._words = 0
        is_chat = "messages" in body
        prompt = "".join(one["content"] for one in body["messages"]) if is_chat else body["prompt"]
        self.request = Request(
            name=name,
            prompt=prompt,
            tokens=body.get("max_completion_tokens") or body["max_tokens"],
            deliver=self._deliver,
            cut=self._cut,
            n=body.get("n", 1),
            model=body["model"] if body["model"] == ADAPTER else "",
            priority=body.get("priority", 0),
            is_stream=bool(body.get("stream")),
            is_chat=is_chat,
            has_schema="response_format" in body,
            has_tools="tools" in body,
            has_stop="stop" in body,
        )
        if self.request.is_stream:
            writer.write(STREAM_HEAD)

    def _deliver(self, index: int, word: str, is_last: bool) -> None:
        self._words += 1
        self._texts[index] += word
        usage = {"prompt_tokens": len(self.request.prompt), "completion_tokens": self._words}
        has_ended = self.request.parts[index].has_ended
        if self.request.is_stream:
            choice = self._choice(index, word, "delta", is_end=has_ended)
            event = sse(json.dumps({"choices": [choice], "usage": usage}).encode())
            self._writer.write(chunk(event + (b"data: [DONE]\n\n" if is_last else b"")))
            self._writer.write(b"0\r\n\r\n" if is_last else b"")
        elif is_last:
            choices = [
                self._choice(number, text, "message", is_end=True)
                for number, text in sorted(self._texts.items())
            ]
            body = json.dumps({"choices": choices, "usage": usage}).encode()
            self._writer.write(response(body, JSON, more_headers="connection: close\r\n"))
        if is_last:
            self.ended.set()

    def _choice(self, index: int, text: str, key: str, *, is_end: bool) -> dict[str, Any]:
        said: dict[str, Any] = {key: {"content": text}} if self.request.is_chat else {"text": text}
        return {"index": index, "finish_reason": "length" if is_end else None, **said}

    def _cut(self) -> None:
        self._writer.transport.abort()
        self.ended.set()


class PairServer:
    def __init__(self, engine: PairEngine) -> None:
        self.engine = engine
        self._arrival = asyncio.Event()
        self._answers = dict[str, Answer]()

    async def run_steps(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self.engine.has_work:
                self._arrival.clear()
                await self._arrival.wait()
            due_s = loop.time() + STEP_S
            self.engine.step()
            await asyncio.sleep(due_s - loop.time())

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await read_request(reader)) is not None:
                method, path, headers, body = request
                if method == "POST" and path.endswith("completions"):
                    await self._generate(headers, json.loads(body), reader, writer)
                    return
                writer.write(self._page(method, path))
        except ConnectionError:
            return
        finally:
            writer.close()

    def _page(self, method: str, path: str) -> bytes:
        if method == "POST" and path.endswith(CANCEL):
            found = self._answers.get(path.removesuffix(CANCEL).rpartition("/")[2])
            if found is None or found.request.is_over:
                return refused(404, None)
            self.engine.leave(found.request, "cancel")
            found.request.cut()
            return response(b"{}", JSON)
        match path:
            case "/metrics":
                return response(self.engine.page().encode(), TEXT)
            case "/v1/models":
                models = [{"id": MODEL, "max_model_len": CONTEXT}, {"id": ADAPTER}]
                return response(json.dumps({"data": models}).encode(), JSON)
            case _:
                return refused(404, None)

    async def _generate(
        self,
        headers: dict[str, str],
        body: dict[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if isinstance(body.get("prompt"), list):
            writer.write(refused(400, None))
            return
        name = headers.get("x-request-id", "")
        answer = self._answers[name] = Answer(body, name, writer)
        self.engine.submit(answer.request)
        self._arrival.set()
        ending = asyncio.ensure_future(answer.ended.wait())
        leaving = asyncio.ensure_future(self._way_of_leave(reader, writer))
        await asyncio.wait([ending, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not answer.ended.is_set():
            self.engine.leave(answer.request, leaving.result())
        ending.cancel()
        leaving.cancel()
        if self._answers[name] is answer:
            del self._answers[name]

    async def _way_of_leave(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> str:
        """A client that has closed its connection resets it when something is written to it."""
        try:
            while await reader.read(4096):
                pass
            if self.engine.defect == "unary-half-close":
                writer.write(STILL_THERE)
                await asyncio.sleep(STEP_S)
                return "fin" if writer.transport.is_closing() else "half-close"
        except ConnectionError:
            return "rst"
        return "fin"


async def main(port: int, defect: str) -> None:
    server = PairServer(PairEngine(defect))
    listener = await asyncio.start_server(server.serve, "127.0.0.1", port, backlog=512)
    number = listener.sockets[0].getsockname()[1]
    print(json.dumps({"event": "ready", "url": f"http://127.0.0.1:{number}"}), flush=True)  # noqa: T201
    steps = asyncio.ensure_future(server.run_steps())
    stdin = asyncio.ensure_future(wait_for_stdin())
    ended, _ = await asyncio.wait([steps, stdin], return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=sys.argv[0], description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--defect", choices=["", *DEFECTS], default="")
    asked = parser.parse_args()
    asyncio.run(main(asked.port, asked.defect))
