"""Clients over gevent: `python -m tests.bench.clients.on_gevent NAME URL STREAMS FILE`.

`httpx`: what our user would be without a transport of its own. `bare`: the least that a client can
do: a greenlet a stream, llhttp, a stamp a token.
"""

import sys

if sys.argv[1:2] == ["httpx"]:
    from gevent import monkey  # noqa: TID251

    monkey.patch_all()

from itertools import repeat
from time import perf_counter_ns
from urllib.parse import urlsplit

import gevent  # noqa: TID251
import httptools
import httpx
from gevent import socket  # noqa: TID251

from tests.bench.clients.common import (
    BODY,
    PATH,
    TOKEN,
    Times,
    arguments,
    headers,
    raw_request,
    write_on_sigterm,
)


def stock_httpx(url: str, streams: int, times: Times) -> None:
    def ask_for_ever() -> None:
        while True:
            fields, stamps = headers(times, perf_counter_ns())
            with client.stream("POST", url + PATH, content=BODY, headers=fields) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        stamps.append(perf_counter_ns())

    limits = httpx.Limits(max_connections=None)
    with httpx.Client(timeout=60, limits=limits, trust_env=False) as client:
        gevent.joinall([gevent.spawn(ask_for_ever) for _ in range(streams)])


class BareStream:
    """One connection, kept for all of its requests."""

    def __init__(self, place: tuple[str, int], times: Times) -> None:
        self._sock = socket.create_connection(place)
        self._times = times

    def ask_for_ever(self) -> None:
        while True:
            self._ask()

    def _ask(self) -> None:
        parser = httptools.HttpResponseParser(self)
        self._is_complete = False
        fields, self._stamps = headers(self._times, perf_counter_ns())
        self._sock.sendall(raw_request(fields))
        while not self._is_complete:
            data = self._sock.recv(65536)
            self._now_ns = perf_counter_ns()
            parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._stamps.extend(repeat(self._now_ns, body.count(TOKEN)))

    def on_message_complete(self) -> None:
        self._is_complete = True


def bare(url: str, streams: int, times: Times) -> None:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    place = (parts.hostname, parts.port)
    gevent.joinall(
        [gevent.spawn(lambda: BareStream(place, times).ask_for_ever()) for _ in range(streams)]
    )


CLIENTS = {"httpx": stock_httpx, "bare": bare}

if __name__ == "__main__":
    options = arguments(CLIENTS)
    noted: Times = {}
    write_on_sigterm(noted, options.file)
    CLIENTS[options.name](options.url, options.streams, noted)
