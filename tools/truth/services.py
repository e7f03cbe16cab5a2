"""A scripted engine with more than streams: `python -m tools.truth.services SETTINGS_JSON`.

It has the doors of tools/truth/dialects.py. It also ranks and embeds documents, computes answers in
the background, loads and unloads an adapter, keeps answers whose client has left until they are
stopped or read, and writes tool calls in few large pieces. Its settings are the engine's (`Script`)
and `Habits` of these services.
"""

import asyncio
import json
import re
import sys
from asyncio import StreamReader as Reader
from asyncio import StreamWriter as Writer
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from http import HTTPStatus
from itertools import chain, repeat
from typing import Any

from tools.truth.dialects import STREAM_HEAD, Answer, DialectServer, Http1Door, Oddities
from tools.truth.scripted_engine import Script
from tools.truth.server import JSON, chunk, main, read_request, response, wait_for_close

ADAPTER = "letters"
LONG_TOKENS = 64
BEFORE_SILENCE = 12  # tokens
CONVERSATION = "x-conversation-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """`document_s`: a document's time, one after the other. `ranks_on`: also when its client has
    left. `piece_tokens`: of a tool call, written at once; `silent_tokens`: of an answer of 64 or
    more, written at once after the twelfth; `deaf_between`: a leave is seen only when a piece is
    written. `spoils_cold`: a prompt that is left before it was ever answered has another answer
    from then on, but for requests with a `cache_salt`. `cancel`: of a running background answer
    works ("ends"), or is confirmed and ignored ("lies"). `ended`: a background answer that has
    ended keeps its status when it is cancelled ("kept"), or is refused like a foreground one
    ("refused"). `cancels_foreground`: with status 200. `pins`: a client that leaves keeps the
    adapter. `stop`: of a resumable answer works ("ends"), not before its first token ("late"), or
    never ("never"). `keeps_chars`: of a resumable answer."""

    document_s: float = 0.01
    ranks_on: bool = False
    piece_tokens: int = 1
    silent_tokens: int = 1
    deaf_between: bool = False
    spoils_cold: bool = False
    cancel: str = "ends"
    ended: str = "kept"
    cancels_foreground: bool = False
    pins: bool = False
    stop: str = "ends"
    keeps_chars: int = 1 << 20


class NoDoor:
    """Nobody reads the answer."""

    def send(self, event: bytes, *, is_last: bool) -> None: ...

    def whole(self, body: bytes) -> None: ...


class PieceDoor(Http1Door):
    """Writes some events at once, as many as `pieces` says; `written` is set by each piece."""

    def __init__(self, writer: Writer, odd: Oddities, pieces: Iterator[int]) -> None:
        super().__init__(writer, odd)
        self.written = asyncio.Event()
        self._pieces = pieces
        self._events = next(pieces)
        self._held: list[bytes] = []

    @property
    def is_silent(self) -> bool:
        return bool(self._held)

    def send(self, event: bytes, *, is_last: bool) -> None:
        self._held.append(event)
        if is_last or len(self._held) >= self._events:
            piece, self._held = b"".join(self._held), []
            self._events = next(self._pieces)
            super().send(piece, is_last=is_last)
            self.written.set()


class ServiceServer(DialectServer):
    """`_background`: answers by id. `_uses`: of a model, by clients that it still counts.
    `_answered`, `_spoiled`: prompts."""

    def __init__(self, script: Script, odd: Oddities, habits: Habits) -> None:
        super().__init__(script, odd)
        self.habits = habits
        self._ranking = asyncio.Lock()
        self._background: dict[str, Answer] = {}
        self._cancelled: set[str] = set()
        self._resumable: dict[str, Answer] = {}
        self._uses: Counter[str] = Counter()
        self._released = asyncio.Event()
        self._is_loaded = True
        self._answered: set[str] = set()
        self._spoiled: set[str] = set()
        model = {"id": ADAPTER, "object": "model", "root": "/adapters/letters"}
        models = self._pages["/v1/models"]()
        models["data"].append(model)
        self._pages["/v1/models"] = lambda: models

    async def serve(self, reader: Reader, writer: Writer) -> None:
        try:
            while (request := await read_request(reader)) is not None:
                method, target, headers, raw = request
                body = json.loads(raw) if raw and raw != b"null" else {}
                handle = self._handler(method, target, body, headers)
                if handle is None:
                    writer.write(self.answer(target, headers))
                    continue
                await handle(reader, writer)
                return
        except ConnectionError:
            return
        finally:
            writer.close()

    def _handler(
        self, method: str, target: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> Callable[[Reader, Writer], Awaitable[None]] | None:
        if match := re.fullmatch(r"/v1/responses/([^/]+)(/cancel)?", target):
            reply = self._cancel(match[1]) if match[2] else self._show(match[1])
            return lambda _, writer: self._reply(writer, *reply)
        if match := re.fullmatch(r"/v1/stream/([^/]+)", target):
            name = match[1]
            if method == "DELETE":
                return lambda _, writer: self._stop(writer, name)
            return lambda _, writer: self._replay(writer, name)
        if method != "POST":
            return None
        if target in ("/v1/rerank", "/v1/embeddings"):
            count = len(body.get("documents") or body.get("input") or ())
            return lambda reader, writer: self._pool(count, reader, writer)
        if target.endswith("_lora_adapter"):
            return lambda _, writer: self._adapt(writer, is_loaded="/load_" in target)
        if target == "/v1/responses" and body.get("background"):
            return lambda _, writer: self._reply(writer, 200, self._begin_background(body))
        return lambda reader, writer: self._generate_for(target, body, headers, reader, writer)

    async def _reply(self, writer: Writer, status: int, body: dict[str, Any]) -> None:
        writer.write(response(json.dumps(body).encode(), JSON, HTTPStatus(status)))

    # Streams: resumable ones, an adapter's, and tool calls in pieces

    async def _generate_for(
        self,
        path: str,
        body: dict[str, Any],
        headers: Mapping[str, str],
        reader: Reader,
        writer: Writer,
    ) -> None:
        model = str(body.get("model"))
        if model == ADAPTER and not self._is_loaded:
            await self._reply(writer, 404, {"error": {"message": "no such model"}})
            return
        door = PieceDoor(writer, self.odd, self._pieces(body))
        answer = self.begin(path, body, door)
        name = headers.get(CONVERSATION)
        if name is not None:
            self._resumable[name] = answer
        self._uses[model] += 1
        await self._follow(answer, door, reader, is_resumable=name is not None)
        prompt = str(body.get("prompt"))
        if answer.finished.is_set():
            self._answered.add(prompt)
        elif self.habits.spoils_cold and prompt not in self._answered:
            self._spoiled.add(prompt)
        if answer.finished.is_set() or not self.habits.pins:
            self._uses[model] -= 1
            self._released.set()

    def _pieces(self, body: dict[str, Any]) -> Iterator[int]:
        if "tools" in body:
            return repeat(self.habits.piece_tokens)
        if body.get("max_tokens", 0) < LONG_TOKENS:
            return repeat(1)
        return chain(repeat(1, BEFORE_SILENCE), [self.habits.silent_tokens], repeat(1))

    def letter_for(self, body: dict[str, Any]) -> str:
        is_spoiled = str(body.get("prompt")) in self._spoiled
        return "x" if is_spoiled and "cache_salt" not in body else "w"

    async def _follow(
        self, answer: Answer, door: PieceDoor, reader: Reader, *, is_resumable: bool
    ) -> None:
        ending = asyncio.ensure_future(answer.finished.wait())
        closing = asyncio.ensure_future(wait_for_close(reader))
        await asyncio.wait([ending, closing], return_when=asyncio.FIRST_COMPLETED)
        if closing.done() and self.habits.deaf_between and door.is_silent:
            door.written.clear()
            await door.written.wait()
        if not answer.finished.is_set() and not is_resumable:
            answer.leave()
        ending.cancel()
        closing.cancel()

    async def _stop(self, writer: Writer, name: str) -> None:
        answer, how = self._resumable.get(name), self.habits.stop
        if answer is None:
            await self._reply(writer, 404, {})
            return
        if how == "ends" or (how == "late" and answer.text):
            answer.leave()
        await self._reply(writer, 200, {})

    async def _replay(self, writer: Writer, name: str) -> None:
        answer = self._resumable.get(name)
        if answer is None:
            await self._reply(writer, 404, {})
            return
        await answer.finished.wait()
        choice = {"index": 0, "text": answer.text[-self.habits.keeps_chars :]}
        data = json.dumps({"choices": [choice]}).encode()
        event = chunk(b"data: " + data + b"\n\n") + chunk(b"data: [DONE]\n\n")
        with suppress(ConnectionError):
            writer.write(STREAM_HEAD + event + b"0\r\n\r\n")

    # Documents, one after the other

    async def _pool(self, documents: int, reader: Reader, writer: Writer) -> None:
        computing = asyncio.ensure_future(self._compute(documents))
        closing = asyncio.ensure_future(wait_for_close(reader))
        await asyncio.wait([computing, closing], return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        if computing.done():
            await self._reply(writer, 200, {"results": []})
        elif self.habits.ranks_on:
            await computing
        else:
            computing.cancel()
            with suppress(asyncio.CancelledError):
                await computing

    async def _compute(self, documents: int) -> None:
        await asyncio.gather(*(self._compute_one() for _ in range(documents)))

    async def _compute_one(self) -> None:
        async with self._ranking:  # first come, first served
            await asyncio.sleep(self.habits.document_s)

    # The background

    def _begin_background(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.begin("/v1/responses", {**body, "stream": False}, NoDoor())
        self._background[answer.name] = answer
        return {"id": answer.name, "status": "queued"}

    def _status(self, name: str) -> str:
        if name in self._cancelled:
            return "cancelled"
        return "incomplete" if self._background[name].finished.is_set() else "in_progress"

    def _show(self, name: str) -> tuple[int, dict[str, Any]]:
        if name not in self._background:
            return 404, {}
        return 200, {"id": name, "status": self._status(name)}

    def _cancel(self, name: str) -> tuple[int, dict[str, Any]]:
        is_foreground = name not in self._background
        if is_foreground and self.habits.cancels_foreground:
            return 200, {"id": name, "status": "cancelled"}
        has_ended = not is_foreground and self._background[name].finished.is_set()
        if is_foreground or (has_ended and self.habits.ended == "refused"):
            return 400, {"error": {"message": "Cannot cancel a synchronous response."}}
        if not has_ended:
            self._cancelled.add(name)
            if self.habits.cancel == "ends":
                self._background[name].leave()
        return self._show(name)

    # The adapter

    async def _adapt(self, writer: Writer, *, is_loaded: bool) -> None:
        while not is_loaded and self._uses[ADAPTER]:
            self._released.clear()
            await self._released.wait()
        self._is_loaded = is_loaded
        await self._reply(writer, 200, {})


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    odd = {one.name: given.pop(one.name) for one in fields(Oddities) if one.name in given}
    habits = {one.name: given.pop(one.name) for one in fields(Habits) if one.name in given}
    server = ServiceServer(Script(**given), Oddities(**odd), Habits(**habits))
    asyncio.run(main(server, ""))
