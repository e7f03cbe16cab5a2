"""The server: connections on one side, the scheduler's steps on the other."""

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from importlib.metadata import version
from typing import IO, Any, Final
from urllib.parse import urlsplit

from harness.upstream.answers import answer_to, error_body
from harness.upstream.asked import Asked, AskedError, is_answered, read_asked
from harness.upstream.connection import HangUps, ReceivedRequest, UpstreamConnection
from harness.upstream.exchange import JSON, AnswerTerms, UpstreamExchange
from harness.upstream.pages import PageError, UpstreamPages
from harness.upstream.scheduler import Changes, ServingPace, UpstreamScheduler, Work
from harness.upstream.truth import KEPT, Record, Truth

BACKLOG: Final = 2048
_SHOWN: Final = 200  # characters of what a client sent that a record keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`has_early_headers`: a stream's head is sent at its arrival, else with its first token.
    `end_ms`: from the last token to the end of the answer, with its usage. `keeps_half_closed`: a
    client that has closed its sending side gets its answer, until a write fails; else it has left.
    `kept`: records in memory."""

    pace: ServingPace = field(default_factory=ServingPace)
    model: str = "upstream"
    has_early_headers: bool = True
    end_ms: float = 0.0
    keeps_half_closed: bool = False
    kept: int = KEPT

    def terms(self, asked: Asked) -> AnswerTerms:
        """The settings hold where the request's order says nothing else."""
        order, pace = asked.order, self.pace
        prefill_ms = pace.prefill_ms + pace.prefill_token_ms * asked.prompt_tokens
        is_early = self.has_early_headers if order.headers is None else order.headers == "early"
        return AnswerTerms(
            has_early_head=is_early,
            prefill_ms=prefill_ms if order.prefill_ms is None else order.prefill_ms,
            end_ms=self.end_ms if order.end_ms is None else order.end_ms,
            keeps_half_closed=self.keeps_half_closed,
        )

    def shown(self) -> dict[str, Any]:
        whole = asdict(self)
        return {**whole.pop("pace"), **whole}


class Upstream:
    """Lives in one event loop. `file`: of the log."""

    def __init__(self, settings: Settings, *, file: IO[bytes] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self.truth = Truth(time.perf_counter_ns, kept=settings.kept, file=file)
        self._scheduler = UpstreamScheduler(settings.pace)
        self._exchanges: dict[Work, UpstreamExchange] = {}
        self._connections = set[UpstreamConnection]()
        self._num_connections = 0
        self._hang_ups = HangUps(self._loop)
        self._timer: asyncio.TimerHandle | None = None
        self._pages = UpstreamPages(
            model=settings.model,
            version=version("walkaway"),
            settings=settings.shown(),
            truth=self.truth,
            scheduler=self._scheduler,
            connections=lambda: (len(self._connections), self._num_connections),
        )

    async def listen(self, host: str, port: int) -> asyncio.Server:
        self.truth.say("upstream", settings=self._settings.shown())
        return await self._loop.create_server(self._connect, host, port, backlog=BACKLOG)

    def close(self) -> None:
        """End all connections; requests that are open stop now."""
        for connection in list(self._connections):
            if isinstance(connection.watcher, UpstreamExchange):
                connection.watcher.stop("shutdown")
            connection.cut()
        if self._timer is not None:
            self._timer.cancel()
        self._hang_ups.close()

    # What an exchange needs

    def submit(self, exchange: UpstreamExchange) -> None:
        self._exchanges[exchange.work] = exchange
        self._apply(self._scheduler.submit(exchange.work, self.truth.clock_ns()))

    def leave(self, exchange: UpstreamExchange) -> None:
        self._scheduler.leave(exchange.work)
        self._exchanges.pop(exchange.work, None)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """A turn later than it is due, as `_is_due`."""
        return self._loop.call_later(delay_s, self._loop.call_soon, call)

    # Steps

    def _is_due(self) -> None:
        """The event loop reports a reset one turn after it has read it. So a step waits a turn, and
        nothing is made for a client that is known to have left."""
        self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._timer = None
        self._apply(self._scheduler.step(self.truth.clock_ns()))

    def _apply(self, changes: Changes) -> None:
        for work in changes.made:
            if (exchange := self._exchanges.get(work)) is not None:
                exchange.token()
        for work in changes.halted:
            if (exchange := self._exchanges.get(work)) is not None:
                exchange.halted()
        for work in changes.admitted:
            if (exchange := self._exchanges.get(work)) is not None:
                exchange.admitted()
        if self._timer is None and self._scheduler.due_ns is not None:
            self._timer = self._loop.call_at(self._scheduler.due_ns / 1e9, self._is_due)

    # Requests

    def _connect(self) -> UpstreamConnection:
        self._num_connections += 1
        return UpstreamConnection(
            self._num_connections,
            self._serve,
            self._hang_ups,
            keeps_half_closed=self._settings.keeps_half_closed,
            among=self._connections,
        )

    def _serve(self, connection: UpstreamConnection, request: ReceivedRequest) -> None:
        path = urlsplit(request.target).path
        if request.method in ("GET", "HEAD"):
            self._show_page(connection, request.target)
            return
        try:
            if request.method != "POST" or not is_answered(path):
                raise AskedError(f"{request.method} {path[:_SHOWN]}: this server has no such page")
            asked = read_asked(path, request.body, request.headers)
        except AskedError as error:
            is_route = request.method == "POST" and is_answered(path)
            status = HTTPStatus.BAD_REQUEST if is_route else HTTPStatus.NOT_FOUND
            self._refuse(connection, request, status, str(error))
            return
        self._answer(connection, request, asked)

    def _show_page(self, connection: UpstreamConnection, target: str) -> None:
        try:
            page = self._pages.page(target)
        except PageError as error:
            connection.whole(400, JSON, error_body("", 400, str(error)))
            return
        if page is None:
            text = f"{target[:_SHOWN]}: this server has no such page"
            connection.whole(404, JSON, error_body("", 404, text))
            return
        connection.whole(200, (("content-type", page[0]),), page[1])

    def _refuse(
        self, connection: UpstreamConnection, request: ReceivedRequest, status: int, why: str
    ) -> None:
        """What is wrong with a request is the client's to read, and stands in the log."""
        record = self._arrived(connection, request, None)
        connection.whole(status, JSON, error_body(record.route, status, why))
        self.truth.note(record, "headers", status=status)
        self.truth.note(record, "stopped", why="refused", error=why[:_SHOWN])
        self.truth.note(record, "ended")
        self.truth.note(record, "over")

    def _answer(
        self, connection: UpstreamConnection, request: ReceivedRequest, asked: Asked
    ) -> None:
        record = self._arrived(connection, request, asked)
        created = int(datetime.now(UTC).timestamp())
        answer = answer_to(asked, record.number, created)
        UpstreamExchange(self, connection, record, answer, self._settings.terms(asked)).begin()

    def _arrived(
        self, connection: UpstreamConnection, request: ReceivedRequest, asked: Asked | None
    ) -> Record:
        order = None if asked is None else asked.order
        name = (order.id if order else "") or request.headers.get("x-request-id", "")
        return self.truth.arrived(
            id=name[:_SHOWN] or None,
            connection=connection.number,
            nth=connection.num_requests,
            route=urlsplit(request.target).path[:_SHOWN],
            dialect=None if asked is None else asked.dialect,
            is_stream=asked is not None and asked.is_stream,
            model="" if asked is None else asked.model[:_SHOWN],
            act="" if order is None else order.act,
            prompt_tokens=0 if asked is None else asked.prompt_tokens,
            max_tokens=0 if asked is None else asked.tokens,
        )


async def serve(
    settings: Settings,
    *,
    host: str,
    port: int,
    file: IO[bytes] | None,
    announce: Callable[[str], None],
    ends_with_stdin: bool,
) -> tuple[Truth, int]:
    """Serve until a signal comes, the log cannot be written, or standard input ends. `announce`
    gets the URL. Returns the log, and the number of the signal (0: none)."""
    upstream = Upstream(settings, file=file)
    ends: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(number: int) -> None:
        if not ends.done():
            ends.set_result(number)

    _watch_for_the_end(end, with_stdin=ends_with_stdin)
    upstream.truth.on_failure = lambda: end(0)
    listener = await upstream.listen(host, port)
    gc.collect()
    gc.freeze()  # else the collector stops the server for 15 ms to look through what was imported
    try:
        address = listener.sockets[0].getsockname()
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        announce(f"http://{shown}:{address[1]}")
        number = await ends
    finally:
        listener.close()
        upstream.close()
        await asyncio.sleep(0)  # the connections end
    return upstream.truth, number


def _watch_for_the_end(end: Callable[[int], None], *, with_stdin: bool) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, int(number))
    if not with_stdin:
        return

    def read_to_the_end() -> None:
        # A thread, because stdin may be a file or a device, which no event loop can watch.
        while sys.stdin is not None and os.read(sys.stdin.fileno(), 4096):
            pass
        loop.call_soon_threadsafe(end, 0)

    threading.Thread(target=read_to_the_end, daemon=True).start()
