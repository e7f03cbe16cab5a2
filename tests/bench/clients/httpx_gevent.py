"""Stock httpx over gevent's sockets: what our user would be without a transport of its own."""

from gevent import monkey  # noqa: TID251

monkey.patch_all()

from time import perf_counter_ns  # noqa: E402

import gevent  # noqa: E402, TID251
import httpx  # noqa: E402

from tests.bench.clients.common import (  # noqa: E402
    BODY,
    PATH,
    Times,
    arguments,
    headers,
    write_on_sigterm,
)


def ask_for_ever(client: httpx.Client, url: str, times: Times) -> None:
    """One stream: one request after the other."""
    while True:
        fields, stamps = headers(times, perf_counter_ns())
        with client.stream("POST", url, content=BODY, headers=fields) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    stamps.append(perf_counter_ns())


def main() -> None:
    options = arguments()
    times: Times = {}
    write_on_sigterm(times, options.file)
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(timeout=60, limits=limits, trust_env=False) as client:
        gevent.joinall(
            [
                gevent.spawn(ask_for_ever, client, options.url + PATH, times)
                for _ in range(options.streams)
            ]
        )


if __name__ == "__main__":
    main()
