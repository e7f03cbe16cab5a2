"""One request on its way through tools/truth/faulty_gateway.py, and what is kept of it."""

import asyncio
import json
import os
import re
from collections import Counter
from itertools import count, cycle
from typing import Any, Final

from tools.truth.gateway_bill import Meter, clean_end, error, error_event
from tools.truth.gateway_faults import Faults
from tools.truth.gateway_wire import (
    JSON,
    Body,
    BrokenError,
    Client,
    Connection,
    Head,
    Pool,
    read_away,
)

BROKE_OFF: Final = "the upstream broke off"
ORDER: Final = re.compile(rb"\[walkaway [^\]]*\]")


class Books:
    """What outlives a request. `leaked`: connections that nobody closes. `cached`: answers by their
    paths and bodies."""

    def __init__(self, url: str, faults: Faults) -> None:
        self.faults, self.pool = faults, Pool()
        self.in_flight = 0
        self.billed: Counter[str] = Counter()
        self.rows: list[dict[str, Any]] = []
        self.leaked: list[Connection] = []
        self.cached: dict[tuple[str, bytes], tuple[Head, bytes]] = {}
        self.numbers = count(1)
        self._urls = cycle(filter(None, (url, faults.two_upstreams)))
        self._num_left = 0
        self._refuses_until_s = 0.0
        self.is_wedged = False

    @property
    def refuses(self) -> bool:
        return asyncio.get_running_loop().time() < self._refuses_until_s

    async def connect(self) -> Connection:
        """Raises BrokenError."""
        return await self.pool.take(next(self._urls))

    def left(self) -> None:
        self._num_left += 1
        if self._num_left == self.faults.dies:
            os._exit(1)
        self.is_wedged |= self._num_left == self.faults.wedges
        if self._num_left == self.faults.penalty:
            self._num_left = 0
            now_s = asyncio.get_running_loop().time()
            self._refuses_until_s = now_s + self.faults.penalty_s

    def book(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.billed.update({key: row[key] for key in ("prompt_tokens", "completion_tokens")})


class Exchange:
    """`_pump` takes the answer from the upstream to the client, until it is `_noticed` that the
    client has left. `_connection`: the one to the upstream. `_outcome`: once all is sent,
    "completed", "refused" or "cut". `_delivered`: tokens that were sent to the client."""

    def __init__(
        self, books: Books, client: Client, head: Head, asked: dict[str, Any], dialect: str
    ) -> None:
        self._books, self._faults, self._client = books, books.faults, client
        self._head, self._asked, self._dialect = head, asked, dialect
        self._raw = json.dumps(self._faults.asks(asked)).encode()
        self._meter = Meter(asked)
        self._noticed = asyncio.Event()
        self._connection: Connection | None = None
        self._name = head.headers.get("x-request-id") or f"gw-{next(books.numbers)}"
        self._outcome, self._delivered = "", 0

    async def run(self) -> bool:
        """Returns whether the client's connection is kept."""
        self._books.in_flight += 1
        pump = asyncio.ensure_future(self._pump())
        watch = asyncio.ensure_future(self._watch())
        noticed = asyncio.ensure_future(self._noticed.wait())
        await asyncio.wait({pump, noticed}, return_when=asyncio.FIRST_COMPLETED)
        has_left = self._noticed.is_set()
        if has_left:
            await self._leave(pump)
        watch.cancel()
        noticed.cancel()
        await asyncio.wait({watch})  # nobody else may read the client's connection meanwhile
        if not pump.cancelled():
            pump.result()
        self._bill("left" if has_left and not self._faults.never else self._outcome)
        if has_left:
            self._books.left()
            if self._faults.asks_again(self._delivered):
                await self._ask_for_nobody()
        self._books.in_flight -= not (has_left and self._faults.leaked_gauge)
        return not has_left and not self._client.how and self._outcome != "cut"

    # A client that leaves

    async def _watch(self) -> None:
        await self._client.leaves()
        if not self._outcome and not self._faults.at_next_write and self._is_gone:
            self._noticed.set()

    @property
    def _is_gone(self) -> bool:
        how = self._client.how
        return how == "rst" or (how == "fin" and not self._faults.half_closed)

    async def _leave(self, pump: asyncio.Future[None]) -> None:
        """What becomes of the connection to the upstream."""
        self._client.drop()
        if self._faults.reads_on:
            await asyncio.wait({pump}, timeout=self._faults.cap_s)
        pump.cancel()
        await asyncio.wait({pump})
        if self._connection is not None and not self._faults.leaked_connection:
            if self._faults.late_s:
                await asyncio.sleep(self._faults.late_s)
            self._connection.close()
        elif self._connection is not None:
            self._books.leaked.append(self._connection)

    async def _ask_for_nobody(self) -> None:
        await asyncio.sleep(self._faults.backoff_s)
        try:
            connection = await self._books.connect()
            await connection.ask(self._head, self._raw)
        except BrokenError:
            return
        await read_away(connection)
        self._books.pool.give(connection)

    def _bill(self, outcome: str) -> None:
        prompt, made = self._faults.bill(self._meter, outcome, self._delivered)
        row = {
            "id": self._name,
            "upstream_id": self._meter.name,
            "user": self._asked.get("user"),
            "model": self._asked.get("model"),
            "outcome": outcome,
            "prompt_tokens": prompt,
            "completion_tokens": made,
        }
        self._books.book(row)

    # The answer

    async def _pump(self) -> None:
        key = self._head.target, ORDER.sub(b"", self._raw)
        if self._faults.answers_from_cache and key in self._books.cached:
            head, answer = self._books.cached[key]
            self._meter.read(answer if head.is_stream else b"")
            await self._send_whole(head, self._body(head), answer)
            return
        try:
            head = await self._ask()
        except BrokenError:
            await self._refuse()
            return
        read: list[bytes] = []
        body = self._body(head)
        try:
            await self._pass_on(head, body, read)
        except BrokenError:
            await self._cut(head, body, read)
        else:
            if self._faults.answers_from_cache and head.status < 400:
                self._books.cached[key] = head, b"".join(read)

    async def _ask(self) -> Head:
        """Returns the head of the answer. Raises BrokenError."""
        for tries_left in range(self._faults.failure_retries, -1, -1):
            try:
                self._connection = await self._books.connect()
                head = await self._connection.ask(self._head, self._raw)
            except BrokenError:
                self._drop_connection()
                if not tries_left:
                    raise
                continue
            has_failed = head.status == 429 or head.status >= 500
            if not has_failed or not tries_left:
                return head
            await read_away(self._connection)
            self._release()
        raise AssertionError

    async def _pass_on(self, head: Head, body: Body, read: list[bytes]) -> None:
        """`read`: gets what was read. Raises BrokenError."""
        assert self._connection is not None
        is_passed_on = self._is_passed_on(head)
        if is_passed_on:
            await self._send(body.head(head.status))
        while piece := await self._connection.piece():
            read.append(piece)
            if head.is_stream:
                self._meter.read(piece)
            if is_passed_on:
                await self._send(body.part(piece))
        self._release()
        if is_passed_on:
            await self._send(body.end())
            self._outcome = "completed"
        else:
            await self._send_whole(head, body, b"".join(read))

    async def _send_whole(self, head: Head, body: Body, answer: bytes) -> None:
        if not head.is_stream and head.status < 400:
            self._meter.read_whole(answer)
        await self._send(body.whole(head.status, answer))
        self._outcome = "completed" if head.status < 400 else "refused"

    async def _refuse(self) -> None:
        await self._send(Body(JSON).whole(502, error("the upstream does not answer")))
        self._outcome = "refused"

    async def _cut(self, head: Head, body: Body, read: list[bytes]) -> None:
        """The upstream has broken its answer."""
        self._drop_connection()
        is_hidden = head.is_stream and self._faults.silent_cut
        if not head.is_stream or not (self._is_passed_on(head) or is_hidden):
            await self._refuse()
        elif not is_hidden:
            await self._send(body.part(error_event(self._dialect, BROKE_OFF)))
            self._outcome = "cut"
        elif self._is_passed_on(head):
            await self._send(body.part(clean_end(self._dialect)) + body.end())
            self._outcome = "completed"
        else:
            await self._send_whole(head, body, b"".join([*read, clean_end(self._dialect)]))

    def _body(self, head: Head) -> Body:
        kept = {"content-type": head.headers.get("content-type", ""), "x-request-id": self._name}
        return Body(kept, is_zipped=self._faults.is_zipped(self._head.headers))

    def _is_passed_on(self, head: Head) -> bool:
        """Each piece at once."""
        return head.is_stream and not self._faults.buffers

    async def _send(self, data: bytes) -> None:
        if self._is_gone:
            self._noticed.set()
        if self._noticed.is_set():
            return
        try:
            await self._client.send(data)
        except ConnectionError:
            self._noticed.set()
        else:
            self._delivered = self._meter.tokens

    # The connection to the upstream

    def _release(self) -> None:
        """Its answer was read to its end."""
        assert self._connection is not None
        if self._noticed.is_set() and self._faults.leaked_connection:
            self._books.leaked.append(self._connection)
        else:
            self._books.pool.give(self._connection)
        self._connection = None

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
