"""The least that a client over gevent can do: a greenlet a stream, llhttp, a stamp a token."""

from itertools import repeat
from time import perf_counter_ns
from urllib.parse import urlsplit

import gevent  # noqa: TID251
import httptools
from gevent import socket  # noqa: TID251

from tests.bench.clients.common import (
    TOKEN,
    Times,
    arguments,
    headers,
    raw_request,
    write_on_sigterm,
)


class BareStream:
    """One connection, kept for all of its requests."""

    def __init__(self, place: tuple[str, int], times: Times) -> None:
        self._sock = socket.create_connection(place)
        self._times = times

    def ask_for_ever(self) -> None:
        """One request after the other."""
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


def main() -> None:
    options = arguments()
    times: Times = {}
    write_on_sigterm(times, options.file)
    url = urlsplit(options.url)
    assert url.hostname is not None
    assert url.port is not None
    place = (url.hostname, url.port)
    gevent.joinall(
        [
            gevent.spawn(lambda: BareStream(place, times).ask_for_ever())
            for _ in range(options.streams)
        ]
    )


if __name__ == "__main__":
    main()
