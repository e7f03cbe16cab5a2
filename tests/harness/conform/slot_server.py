"""A scripted server of completions with slots and steps, which may be wrong in one way:
`python -m tests.harness.conform.slot_server SETTINGS_JSON`.

It says on standard output where it listens, and ends with its standard input.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, Final

from harness.run.process import Child, python_module

EVENT: Final = b'data: {"choices":[{"index":0,"text":"%b","finish_reason":null}]}\n\n'
PROMPT_TOKENS: Final = 128  # that a step computes
AWAY_S: Final = 1.0
WORD: Final = b" w"
HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """`slots`: 0 for any number; `slots_later`: from request number `later` on. `full`: the status
    of a request beyond them; 0: it queues; -1: its connection is closed. `stream_s`, `chunk_s`: by
    which each running request, and a step's part of a prompt, make a step longer. `widest_s`: steps
    last from `step_s` to this time, at random. `first_s`: until a prompt is begun. `flush`: tokens
    sent at once, in `events` events each time. `memory`: the tokens, of prompts and answers, that
    fit at once; 0: any number. `metrics`: a page shows the requests that run and wait. `rate`:
    requests that are taken in `rate_s`; others get a 429. `restarts`: before this request all
    connections are cut, and for a second none is taken. `caches`: what was asked and answered is
    answered at once from then on. `says_done`: a stream ends with [DONE]. `one_choice`: it
    refuses a request for more choices. `named`: the model that the answers name. `queued`: requests
    that wait; one more gets a 429; 0: any number waits. `pools`: servers behind this address, each
    with a queue and its part of the slots; a request goes to the next one, or to any
    (`is_at_random`). `longest_s`: a request is cut after this time; 0: never. `stops`: the
    probability with which a token is an answer's last, unless the request says `ignore_eos`.

    What the server does when a client leaves: `hold_s`: it holds the slot for this time; -1: for
    ever. `forgets`: it computes the answer to its end; "early": only if it has no token yet,
    "resets": only if the client reset the connection, "prefill": only the prompt. `leaks`: this
    number of the request's tokens stays in memory. `stall_s`: the whole server stops for this time.
    `cuts`: it cuts another stream. `asks_again`: it repeats a request that had no token yet, as a
    gateway does. `dies_s`: after a request that was no stream, it makes no step any more, from this
    time on.
    """

    slots: int = 4
    slots_later: int = 0
    later: int = 0
    step_s: float = 0.02
    full: int = 0
    stream_s: float = 0.0
    chunk_s: float = 0.0
    first_s: float = 0.0
    flush: int = 1
    events: bool = True
    memory: int = 0
    metrics: bool = False
    rate: float = 0.0
    rate_s: float = 1.0
    restarts: int = 0
    widest_s: float = 0.0
    caches: bool = False
    says_done: bool = True
    one_choice: bool = False
    named: str = "scripted"
    queued: int = 0
    pools: int = 1
    is_at_random: bool = False
    longest_s: float = 0.0
    stops: float = 0.0
    hold_s: float = 0.0
    forgets: bool | str = False
    leaks: int = 0
    stall_s: float = 0.0
    cuts: bool = False
    asks_again: bool = False
    dies_s: float = 0.0


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
    size: int = 0
    stops: float = 0.0
    came_s: float = field(default_factory=time.perf_counter)
    pool: int = 0
    ends_by_itself: bool = False

    def __post_init__(self) -> None:
        self.size = self.prompt + self.tokens


class SlotServer:
    def __init__(self, manners: Manners) -> None:
        self.manners = manners
        self.queue: deque[Work] = deque()
        self.running: list[Work] = []
        self.held = Counter[int]()
        self.leaked = 0
        self.asked = 0
        self.taken_s = deque[float]()
        self.router = random.Random(1)
        self.arrival = asyncio.Event()
        self.away_until_s = 0.0
        self.dies_at_s = inf
        self.rng = random.Random(0)
        self.answered = set[str]()
        self.connections = set[asyncio.StreamWriter]()

    @property
    def slots(self) -> int:
        manners = self.manners
        is_later = 0 < manners.later <= self.asked
        return manners.slots_later if is_later else manners.slots

    def is_full(self, pool: int) -> bool:
        running = sum(work.pool == pool for work in self.running)
        return self.slots > 0 and running + self.held[pool] >= self.slots / self.manners.pools

    def has_room(self, work: Work) -> bool:
        """In memory, for its prompt and its whole answer."""
        taken = self.leaked + sum(one.size for one in self.running)
        return not self.manners.memory or taken + work.size <= self.manners.memory

    async def run(self) -> None:
        due_s = time.perf_counter()
        while True:
            self._admit()
            if not self.running:
                self.arrival.clear()
                if not self.queue:
                    await self.arrival.wait()
                else:
                    await asyncio.sleep(self.manners.step_s)
                due_s = time.perf_counter()
                continue
            due_s += self._step_s() + self.manners.stream_s * len(self.running)
            due_s += self.manners.chunk_s * any(work.prompt > 0 for work in self.running)
            due_s = max(due_s, time.perf_counter())
            await asyncio.sleep(due_s - time.perf_counter())
            if time.perf_counter() < self.dies_at_s:
                self._step()

    def _admit(self) -> None:
        waiting = set[int]()  # pools whose first request waits
        for work in list(self.queue):
            if work.pool in waiting:
                continue
            if self.is_full(work.pool) or not self.has_room(work):
                waiting.add(work.pool)
                if len(waiting) == self.manners.pools:
                    return
            else:
                self.queue.remove(work)
                self.running.append(work)

    def _step_s(self) -> float:
        manners = self.manners
        return self.rng.uniform(manners.step_s, max(manners.step_s, manners.widest_s))

    def _step(self) -> None:
        room = PROMPT_TOKENS
        for work in list(self.running):
            if 0 < self.manners.longest_s < time.perf_counter() - work.came_s:
                self._cut(work)
                continue
            if not work.made and time.perf_counter() < work.came_s + self.manners.first_s:
                continue
            if work.prompt > 0:
                computed = min(room, work.prompt)
                work.prompt, room = work.prompt - computed, room - computed
                if work.prompt > 0:
                    continue
            work.made += 1
            work.ends_by_itself = self.rng.random() < work.stops
            is_last = work.made >= work.tokens or work.ends_by_itself
            if is_last or work.made - work.sent >= self.manners.flush:
                self._send(work, is_last=is_last)
            if is_last or (work.writer is None and self.manners.forgets == "prefill"):
                self._end(work)

    def _send(self, work: Work, *, is_last: bool) -> None:
        count, work.sent = work.made - work.sent, work.made
        if work.writer is None or not work.is_stream:
            return
        one_each = self.manners.events
        body = EVENT % WORD * count if one_each else EVENT % (WORD * count)
        if is_last:
            reason = "stop" if work.ends_by_itself else "length"
            end: dict[str, Any] = {"choices": [{"index": 0, "text": "", "finish_reason": reason}]}
            end |= {"usage": usage(work), "model": self.manners.named}
            body += b"data: " + json.dumps(end).encode() + b"\n\n"
            body += b"data: [DONE]\n\n" if self.manners.says_done else b""
        work.writer.write(b"%x\r\n%b\r\n" % (len(body), body) + (b"0\r\n\r\n" if is_last else b""))

    def _end(self, work: Work) -> None:
        work.is_over = True
        self.running.remove(work)
        work.ended.set()

    def left(self, work: Work, *, is_reset: bool) -> None:
        if work.is_over:
            return
        work.writer = None
        if self.manners.dies_s and not work.is_stream:
            self.dies_at_s = min(self.dies_at_s, time.perf_counter() + self.manners.dies_s)
        if self.manners.stall_s:
            time.sleep(self.manners.stall_s)  # noqa: TID251  the fault is that all stand still
        if self.manners.cuts:
            self._cut_another(work)
        self.leaked += self.manners.leaks
        if self._forgets(work, is_reset=is_reset):
            return
        if self.manners.asks_again and not work.made:
            self.queue.append(Work(work.prompt, work.tokens, None))
        work.is_over = True
        if work in self.queue:
            self.queue.remove(work)
            return
        self.running.remove(work)
        if self.manners.hold_s:
            self.held[work.pool] += 1
        if self.manners.hold_s > 0:
            later = asyncio.get_running_loop().call_later
            later(self.manners.hold_s, self._give_back, work.pool)

    def _forgets(self, work: Work, *, is_reset: bool) -> bool:
        match self.manners.forgets:
            case "early":
                return not work.made
            case "prefill":
                return work.prompt > 0
            case "resets":
                return is_reset
            case forgets:
                return bool(forgets)

    def _cut_another(self, leaver: Work) -> None:
        for work in self.running:
            if work is not leaver and work.writer is not None:
                work.writer.transport.abort()
                return

    def _cut(self, work: Work) -> None:
        if work.writer is not None:
            work.writer.transport.abort()
        self._end(work)

    def _give_back(self, pool: int) -> None:
        self.held[pool] -= 1
        self.arrival.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(writer)
        try:
            if time.perf_counter() < self.away_until_s:
                return
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            size = int(head.partition("content-length:")[2].split("\r\n")[0] or 0)
            asked = json.loads(await reader.readexactly(size) or b"{}")
            if head.startswith("get /metrics"):
                writer.write(plain(200, self._metrics(), "text/plain"))
            elif head.startswith("get /v1/models"):
                writer.write(plain(200, as_json({"data": [{"id": "scripted"}]})))
            elif head.startswith("post /v1/completions"):
                await self._complete(asked, reader, writer)
            else:
                writer.write(plain(404, as_json({"error": {"message": "no such page"}})))
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            self.connections.discard(writer)
            writer.close()

    def _metrics(self) -> bytes:
        gauges = {"running": len(self.running) + self.held.total(), "waiting": len(self.queue)}
        return "".join(f"slots_{name} {value}\n" for name, value in gauges.items()).encode()

    def _refusal(self, pool: int) -> int:
        """The status; 0: the request is taken."""
        now_s, manners = time.perf_counter(), self.manners
        while self.taken_s and self.taken_s[0] < now_s - manners.rate_s:
            self.taken_s.popleft()
        if manners.rate and len(self.taken_s) >= manners.rate:
            return 429
        self.taken_s.append(now_s)
        room = self.slots - len(self.running) - self.held.total() + manners.queued
        if manners.queued and len(self.queue) >= room:
            return 429
        return manners.full if manners.full and self.is_full(pool) else 0

    def _next_pool(self) -> int:
        pools = self.manners.pools
        return self.router.randrange(pools) if self.manners.is_at_random else self.asked % pools

    def _restart(self) -> None:
        self.away_until_s = time.perf_counter() + AWAY_S
        for writer in self.connections:
            writer.transport.abort()
        for work in (*self.queue, *self.running):
            work.is_over = True
        self.queue.clear()
        self.running.clear()

    async def _complete(
        self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.asked += 1
        if self.asked == self.manners.restarts:
            self._restart()
            return
        pool = self._next_pool()
        if (status := self._refusal(pool)) < 0:
            return
        if status:
            writer.write(plain(status, as_json({"error": {"message": "no slot is free"}})))
            return
        if self.manners.one_choice and asked.get("n", 1) > 1:
            writer.write(plain(400, as_json({"error": {"message": "`n` must be 1"}})))
            return
        is_stream = bool(asked.get("stream"))
        work = Work(len(asked["prompt"]), asked["max_tokens"], writer, is_stream)
        work.pool = pool
        work.stops = 0.0 if asked.get("ignore_eos") else self.manners.stops
        if is_stream:
            writer.write(HEAD)
        whole = json.dumps(asked)
        if self.manners.caches and whole in self.answered:
            self._answer_at_once(work, writer)
            return
        (self.running if self.manners.full else self.queue).append(work)
        self.arrival.set()
        gone = asyncio.ensure_future(wait_for_close(reader))
        ended = asyncio.ensure_future(work.ended.wait())
        await asyncio.wait([gone, ended], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            self.left(work, is_reset=gone.result())
        elif not is_stream:
            writer.write(whole_answer(work, self.manners.named))
        if ended.done() and self.manners.caches:
            self.answered.add(whole)
        gone.cancel()
        ended.cancel()

    def _answer_at_once(self, work: Work, writer: asyncio.StreamWriter) -> None:
        work.made = work.tokens
        if work.is_stream:
            self._send(work, is_last=True)
        else:
            writer.write(whole_answer(work, self.manners.named))


def whole_answer(work: Work, named: str) -> bytes:
    reason = "stop" if work.ends_by_itself else "length"
    choice = {"index": 0, "text": " w" * work.made, "finish_reason": reason}
    return plain(200, as_json({"choices": [choice], "usage": usage(work), "model": named}))


def usage(work: Work) -> dict[str, int]:
    return {"prompt_tokens": 24, "completion_tokens": work.made}


def as_json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def plain(status: int, body: bytes, kind: str = "application/json") -> bytes:
    return (
        b"HTTP/1.1 %d -\r\ncontent-type: %b\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%b" % (status, kind.encode(), len(body), body)
    )


async def wait_for_close(reader: asyncio.StreamReader) -> bool:
    """Whether the client reset the connection."""
    try:
        while await reader.read(4096):
            pass
    except ConnectionError:
        return True
    return False


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
