"""A scripted server of completions with slots and steps, which may be wrong in one way:
`python -m tests.harness.conform.slot_server SETTINGS_JSON`.

It says on standard output where it listens, and ends with its standard input.
"""

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from harness.run.process import Child, python_module

EVENT: Final = b'data: {"choices":[{"index":0,"text":"%b","finish_reason":null}]}\n\n'
PROMPT_TOKENS: Final = 128  # that a step computes
WORD: Final = b" w"
HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """`slots`: 0 for any number. `full`: the status of a request beyond them; 0: it queues.
    `stream_s`: by which each running request makes a step longer. `flush`: tokens sent at once, in
    `events` events each time.

    Of clients that leave: `hold_s`: their slots are held for so long; -1: for ever. `forgets`:
    their answers run to their ends. `stall_s`: the whole server stops for so long. `cuts`: another
    stream is cut. `asks_again`: of one that left before its first token, as a gateway does.
    """

    slots: int = 4
    step_s: float = 0.02
    full: int = 0
    stream_s: float = 0.0
    flush: int = 1
    events: bool = True
    hold_s: float = 0.0
    forgets: bool = False
    stall_s: float = 0.0
    cuts: bool = False
    asks_again: bool = False


@dataclass(slots=True, eq=False)
class Work:
    """`writer` None: for nobody."""

    prompt: int
    tokens: int
    writer: asyncio.StreamWriter | None
    is_stream: bool = True
    made: int = 0
    sent: int = 0
    is_over: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class SlotServer:
    def __init__(self, manners: Manners) -> None:
        self.manners = manners
        self.queue: deque[Work] = deque()
        self.running: list[Work] = []
        self.held = 0
        self.arrival = asyncio.Event()

    @property
    def is_full(self) -> bool:
        slots = self.manners.slots
        return slots > 0 and len(self.running) + self.held >= slots

    async def run(self) -> None:
        due_s = time.perf_counter()
        while True:
            while self.queue and not self.is_full:
                self.running.append(self.queue.popleft())
            if not self.running:
                self.arrival.clear()
                if not self.queue:
                    await self.arrival.wait()
                else:
                    await asyncio.sleep(self.manners.step_s)
                due_s = time.perf_counter()
                continue
            due_s += self.manners.step_s + self.manners.stream_s * len(self.running)
            due_s = max(due_s, time.perf_counter())
            await asyncio.sleep(due_s - time.perf_counter())
            self._step()

    def _step(self) -> None:
        room = PROMPT_TOKENS
        for work in list(self.running):
            if work.prompt > 0:
                computed = min(room, work.prompt)
                work.prompt, room = work.prompt - computed, room - computed
                if work.prompt > 0:
                    continue
            work.made += 1
            is_last = work.made >= work.tokens
            if is_last or work.made - work.sent >= self.manners.flush:
                self._send(work, is_last=is_last)
            if is_last:
                self._end(work)

    def _send(self, work: Work, *, is_last: bool) -> None:
        count, work.sent = work.made - work.sent, work.made
        if work.writer is None or not work.is_stream:
            return
        one_each = self.manners.events
        body = EVENT % WORD * count if one_each else EVENT % (WORD * count)
        if is_last:
            end = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
            end["usage"] = usage(work)  # type: ignore[assignment]
            body += b"data: " + json.dumps(end).encode() + b"\n\ndata: [DONE]\n\n"
        work.writer.write(b"%x\r\n%b\r\n" % (len(body), body) + (b"0\r\n\r\n" if is_last else b""))

    def _end(self, work: Work) -> None:
        work.is_over = True
        self.running.remove(work)
        work.ended.set()

    def left(self, work: Work) -> None:
        if work.is_over:
            return
        work.writer = None
        if self.manners.stall_s:
            time.sleep(self.manners.stall_s)  # noqa: TID251  the fault is that all stand still
        if self.manners.cuts:
            self._cut_another(work)
        if self.manners.forgets:
            return
        if self.manners.asks_again and not work.made:
            self.queue.append(Work(work.prompt, work.tokens, None))
        work.is_over = True
        if work in self.queue:
            self.queue.remove(work)
            return
        self.running.remove(work)
        if self.manners.hold_s:
            self.held += 1
        if self.manners.hold_s > 0:
            asyncio.get_running_loop().call_later(self.manners.hold_s, self._give_back)

    def _cut_another(self, leaver: Work) -> None:
        for work in self.running:
            if work is not leaver and work.writer is not None:
                work.writer.transport.abort()
                return

    def _give_back(self) -> None:
        self.held -= 1
        self.arrival.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            size = int(head.partition("content-length:")[2].split("\r\n")[0] or 0)
            asked = json.loads(await reader.readexactly(size) or b"{}")
            if head.startswith("get /v1/models"):
                writer.write(plain(200, {"data": [{"id": "scripted"}]}))
            elif head.startswith("post /v1/completions"):
                await self._complete(asked, reader, writer)
            else:
                writer.write(plain(404, {"error": {"message": "no such page"}}))
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    async def _complete(
        self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.manners.full and self.is_full:
            writer.write(plain(self.manners.full, {"error": {"message": "no slot is free"}}))
            return
        is_stream = bool(asked.get("stream"))
        work = Work(len(asked["prompt"]), asked["max_tokens"], writer, is_stream)
        if is_stream:
            writer.write(HEAD)
        (self.running if self.manners.full else self.queue).append(work)
        self.arrival.set()
        gone = asyncio.ensure_future(wait_for_close(reader))
        ended = asyncio.ensure_future(work.ended.wait())
        await asyncio.wait([gone, ended], return_when=asyncio.FIRST_COMPLETED)
        if ended.done() and not is_stream:
            choice = {"index": 0, "text": " w" * work.made, "finish_reason": "length"}
            writer.write(plain(200, {"choices": [choice], "usage": usage(work)}))
        elif not ended.done():
            self.left(work)
        gone.cancel()
        ended.cancel()


def usage(work: Work) -> dict[str, int]:
    return {"prompt_tokens": 24, "completion_tokens": work.made}


def plain(status: int, body: dict[str, Any]) -> bytes:
    encoded = json.dumps(body).encode()
    return (
        b"HTTP/1.1 %d -\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%b" % (status, len(encoded), encoded)
    )


async def wait_for_close(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(4096):
            pass
    except ConnectionError:
        return


async def main(manners: Manners) -> None:
    server = SlotServer(manners)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=2048)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    print(json.dumps({"event": "ready", "url": url}), flush=True)  # noqa: T201
    stdin = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    steps, told = asyncio.ensure_future(server.run()), asyncio.ensure_future(stdin.read())
    done, _ = await asyncio.wait([steps, told], return_when=asyncio.FIRST_COMPLETED)
    for one in done:
        one.result()


@contextmanager
def serving(manners: Manners, log: Any) -> Iterator[str]:
    """Yields its URL."""
    command = [*python_module("tests.harness.conform.slot_server"), json.dumps(asdict(manners))]
    with Child("scripted server", command, log, reports=True) as child:
        while not (lines := child.read_reports(0.1)):
            assert lines is not None, child.lines()
        yield json.loads(lines[0])["url"]


if __name__ == "__main__":
    asyncio.run(main(Manners(**json.loads(sys.argv[1]))))
