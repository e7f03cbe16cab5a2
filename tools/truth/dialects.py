"""A scripted engine behind other doors: `python -m tools.truth.dialects SETTINGS_JSON`.

Speaks completions, chat, Responses and Messages, several answers and prompts a request, schemas,
stored answers, and HTTP/2. Its settings are the engine's (`Script`), and `Oddities` of its doors.
The n-th token of every answer is " wn", so that a missing one shows.

    request ─▶ Answer ─▶ works of the engine ─▶ tokens ─▶ events of the dialect ─▶ Door
"""

import asyncio
import json
import math
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from http import HTTPStatus
from itertools import count
from typing import Any, Protocol

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset
from h2.exceptions import ProtocolError

from tools.truth.scripted_engine import Script, Work
from tools.truth.server import (
    JSON,
    Manners,
    TruthServer,
    chunk,
    main,
    read_request,
    response,
)

SEND_BUFFER_BYTES = 4096
PADDING = "-" * 1000  # of each event, so that a reader that stalls fills all buffers in a few steps
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Oddities:
    """`half_close`: a client that closed its sending side has left ("cancel"), gets its answer
    ("answer"), or gets only comments while its request runs on ("ghost"). `stalled`: of a reader
    whose buffers are full all is kept ("keep"), what does not fit is dropped ("cut"), or its later
    close is not seen ("forget"). `compile_s`: a schema's time, in a slot; `compiles_on`: also when
    its client has left. `rst_stream`: it is a leave ("cancel"), nothing ("ignore"), or the end of
    all streams of the connection ("end all"). `forgets_others`: of several answers only the first
    ends with its request. `keeps_queued`: waiting answers do not end. `deaf_route`: no leave is
    seen there. `keeps_stopped`: the text of an answer that was left is context of the next turn."""

    half_close: str = "cancel"
    stalled: str = "keep"
    compile_s: float = 0.0
    compiles_on: bool = False
    rst_stream: str = "cancel"
    forgets_others: bool = False
    keeps_queued: bool = False
    deaf_route: str = ""
    keeps_stopped: bool = False


class Door(Protocol):
    """Where an answer's bytes go."""

    def send(self, event: bytes, *, is_last: bool) -> None: ...
    def whole(self, body: bytes) -> None: ...


def data_of(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({**event, "padding": PADDING}).encode() + b"\n\n"


def text_of(content: Any) -> str:
    return "".join(message["content"] for message in content)


class Answer:
    """One request: a work for each prompt and each of n. `hidden`: tokens of a work that only stand
    for the time of a compilation."""

    def __init__(
        self, server: "DialectServer", path: str, body: dict[str, Any], door: Door
    ) -> None:
        self.finished = asyncio.Event()
        self.works: list[Work] = []
        self.name = f"answer-{next(server.numbers)}"
        self._server, self._path, self._body, self._door = server, path, body, door
        self._has_left = False
        self._letter = server.letter_for(body)
        self._texts: dict[int, str] = {}
        script, odd = server.engine.script, server.odd
        compile_s = odd.compile_s if "response_format" in body else 0.0
        self._hidden = math.ceil(compile_s / script.step_s)
        tokens = body.get("max_tokens") or body.get("max_output_tokens") or 16
        prompts = self._prompts()
        self.prompt_tokens = sum(map(len, prompts))
        for prompt in prompts:
            for _ in range(body.get("n", 1)):
                deliver = self._deliver_to(len(self.works))
                self._texts[len(self.works)] = ""
                work = server.engine.submit(self.name, len(prompt), tokens + self._hidden, deliver)
                self.works.append(work)
        self._running = len(self.works)
        if body.get("stream") and path.endswith("/responses"):
            made = {"type": "response.created", "response": self._response("in_progress")}
            door.send(data_of(made), is_last=False)

    @property
    def text(self) -> str:
        """The text of its first choice, so far."""
        return self._texts[0]

    def leave(self) -> None:
        """Its client has left."""
        odd = self._server.odd
        self._has_left = True
        if odd.keeps_stopped:
            self._server.stored[self.name] = self.prompt_tokens + self._num_tokens(self.works[0])
        if odd.deaf_route and self._path.endswith(odd.deaf_route):
            return
        works = self.works[:1] if odd.forgets_others else self.works
        if odd.keeps_queued:
            works = [work for work in works if work.admitted_ns is not None]
        for work in works:
            if not odd.compiles_on or self._num_tokens(work) >= 0:
                self._server.engine.left(work)

    def _prompts(self) -> list[str]:
        body = self._body
        if "messages" in body:
            return [text_of(body["messages"])]
        if "input" in body:
            before = self._server.stored.get(body.get("previous_response_id", ""), 0)
            return ["x" * before + body["input"]]
        prompt = body["prompt"]
        return prompt if isinstance(prompt, list) else [prompt]

    def _num_tokens(self, work: Work) -> int:
        return len(work.token_times_ns) - self._hidden

    def _deliver_to(self, index: int) -> Callable[[Work], None]:
        return lambda work: self._deliver(work, index)

    def _deliver(self, work: Work, index: int) -> None:
        number = self._num_tokens(work)
        if self._has_left and self._server.odd.compiles_on and number >= 0:
            self._server.engine.left(work)
        if number <= 0 or self._has_left:
            return
        text, is_end = f" {self._letter}{number}", work.finish_reason is not None
        self._texts[index] += text
        self._running -= is_end
        is_last = not self._running
        if is_last and self._path.endswith("/responses"):
            self._server.stored[self.name] = self.prompt_tokens + number
        if self._body.get("stream"):
            self._door.send(self._event(text, index, is_end=is_end), is_last=is_last)
        elif is_last:
            self._door.whole(json.dumps(self._whole()).encode())
        if is_last:
            self.finished.set()

    # Its dialect

    @property
    def _usage(self) -> dict[str, int]:
        tokens = sum(self._num_tokens(work) for work in self.works)
        names = ("prompt_tokens", "completion_tokens")
        if self._path.endswith(("/responses", "/messages")):
            names = ("input_tokens", "output_tokens")
        return dict(zip(names, (self.prompt_tokens, tokens), strict=True))

    def _event(self, text: str, index: int, *, is_end: bool) -> bytes:
        if self._path.endswith("/responses"):
            event = data_of({"type": "response.output_text.delta", "delta": text})
            done = {"type": "response.completed", "response": self._response("incomplete")}
            return event + data_of(done) if is_end else event
        if self._path.endswith("/messages"):
            delta = {"type": "text_delta", "text": text}
            event = data_of({"type": "content_block_delta", "index": 0, "delta": delta})
            end = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}}
            ends = data_of(end | {"usage": self._usage}) + data_of({"type": "message_stop"})
            return event + ends if is_end else event
        is_chat = self._path.endswith("/chat/completions")
        choice: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
        choice |= {"index": index, "finish_reason": "length" if is_end else None}
        event = data_of({"choices": [choice], "usage": self._usage})
        return event if self._running else event + b"data: [DONE]\n\n"

    def _response(self, status: str) -> dict[str, Any]:
        why = {"reason": "max_output_tokens"}
        return {
            "id": self.name,
            "status": status,
            "usage": self._usage if self.works else None,
            "incomplete_details": why if status == "incomplete" else None,
        }

    def _whole(self) -> dict[str, Any]:
        if self._path.endswith("/responses"):
            return self._response("incomplete")
        choices = [
            {"index": index, "text": text, "message": {"content": text}, "finish_reason": "length"}
            for index, text in self._texts.items()
        ]
        return {"choices": choices, "usage": self._usage}


class Http1Door:
    """`was_full`: a reader has stalled. `gone`: writing to it has failed."""

    def __init__(self, writer: asyncio.StreamWriter, odd: Oddities) -> None:
        self.is_half_closed = self.was_full = False
        self.gone = asyncio.Event()
        self._writer, self._odd = writer, odd
        self._has_head = False

    def send(self, event: bytes, *, is_last: bool) -> None:
        if not self._has_head:
            self._has_head = True
            self._writer.write(STREAM_HEAD)
        if self._writer.transport.is_closing():
            self.gone.set()
            return
        is_full = self._writer.transport.get_write_buffer_size() > 0
        self.was_full = self.was_full or is_full
        if self.is_half_closed and self._odd.half_close == "ghost":
            self._writer.write(chunk(b": \n\n"))
        elif not is_full or is_last or self._odd.stalled != "cut":
            self._writer.write(chunk(event) + (b"0\r\n\r\n" if is_last else b""))

    def whole(self, body: bytes) -> None:
        self._writer.write(response(body, JSON))


class Http2Door:
    def __init__(self, connection: "Http2Connection", number: int) -> None:
        self._connection, self._number = connection, number
        self._has_head = False

    def send(self, event: bytes, *, is_last: bool) -> None:
        self._send("text/event-stream", event, is_last=is_last)

    def whole(self, body: bytes) -> None:
        self._send(JSON, body, is_last=True)

    def _send(self, content_type: str, data: bytes, *, is_last: bool) -> None:
        h2 = self._connection.h2
        with suppress(ProtocolError):  # the client has reset it
            if not self._has_head:
                self._has_head = True
                h2.send_headers(self._number, [(":status", "200"), ("content-type", content_type)])
            h2.send_data(self._number, data, end_stream=is_last)
        self._connection.flush()


class Http2Connection:
    def __init__(self, server: "DialectServer", writer: asyncio.StreamWriter) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self._server, self._writer = server, writer
        self._asked: dict[int, tuple[str, bytes]] = {}
        self._answers: dict[int, Answer] = {}
        self.take(HTTP2_PREFACE)

    def flush(self) -> None:
        self._writer.write(self.h2.data_to_send())

    def take(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            self._take(event)
        self.flush()

    def end(self) -> None:
        for answer in self._answers.values():
            answer.leave()

    def _take(self, event: object) -> None:
        match event:
            case RequestReceived(stream_id=int(number), headers=headers):
                fields = {str(name): str(value) for name, value in headers or ()}
                self._asked[number] = fields[":path"], b""
            case DataReceived(stream_id=int(number), data=bytes(data)):
                path, body = self._asked[number]
                self._asked[number] = path, body + data
                self.h2.acknowledge_received_data(event.flow_controlled_length or 0, number)
            case StreamEnded(stream_id=int(number)):
                path, body = self._asked.pop(number)
                door = Http2Door(self, number)
                self._answers[number] = self._server.begin(path, json.loads(body), door)
            case StreamReset(stream_id=int(number)):
                self._reset(number)
            case _:
                return

    def _reset(self, number: int) -> None:
        if self._server.odd.rst_stream == "cancel":
            self._answers[number].leave()
        elif self._server.odd.rst_stream == "end all":
            self.end()
            self._writer.close()


class DialectServer(TruthServer):
    """`stored`: tokens of the context up to the end of an answer, by the answer's id."""

    def __init__(self, script: Script, odd: Oddities) -> None:
        super().__init__(script, Manners())
        self.odd = odd
        self.numbers = count(1)
        self.stored: dict[str, int] = {}

    def letter_for(self, body: dict[str, Any]) -> str:
        """The letter with which each word of the answer begins."""
        return "w"

    def begin(self, path: str, body: dict[str, Any], door: Door) -> Answer:
        answer = Answer(self, path, body, door)
        self.arrival.set()
        return answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        try:
            while (request := await read_request(reader)) is not None:
                method, target, headers, body = request
                if method == "PRI":
                    await self._serve_http2(reader, writer)
                    return
                if method == "POST":
                    await self._serve_post(target, json.loads(body), reader, writer)
                    return
                writer.write(self.answer(target, headers))
        except ConnectionError:
            return
        finally:
            writer.close()

    async def _serve_http2(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        connection = Http2Connection(self, writer)
        try:
            while data := await reader.read(65536):
                connection.take(data)
        finally:
            connection.end()

    async def _serve_post(
        self,
        path: str,
        body: dict[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        previous = body.get("previous_response_id")
        if previous is not None and previous not in self.stored:
            writer.write(response(b"{}", JSON, HTTPStatus.NOT_FOUND))
            return
        door = Http1Door(writer, self.odd)
        answer = self.begin(path, body, door)
        ending = asyncio.ensure_future(answer.finished.wait())
        watching = asyncio.ensure_future(self._watch(reader, door))
        await asyncio.wait([ending, watching], return_when=asyncio.FIRST_COMPLETED)
        if not answer.finished.is_set() and not (door.was_full and self.odd.stalled == "forget"):
            answer.leave()
        ending.cancel()
        watching.cancel()

    async def _watch(self, reader: asyncio.StreamReader, door: Http1Door) -> None:
        """Watches until the client has left, as this server sees it."""
        with suppress(ConnectionError):
            while await reader.read(4096):
                pass
            door.is_half_closed = True
            if self.odd.half_close != "cancel":
                await door.gone.wait()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    odd = {one.name: given.pop(one.name) for one in fields(Oddities) if one.name in given}
    certificate = given.pop("certificate", "")
    asyncio.run(main(DialectServer(Script(**given), Oddities(**odd)), certificate))
