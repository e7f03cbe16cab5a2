"""Time to first token and gaps as a client sees them, against the truth of the server's log.

The server answers after 20 ms and sends a token each 5 ms: short enough to be hidden by a client
that reads by the kilobyte, as Locust's FastHttpUser does where it reads by line. Theirs is the
server's figure in each line, so a client that is right has a ratio of 1, and one that is wrong
may lie on either side of it: tokens that come together have gaps of nearly 0.

The last hundredth of TTFT is of a few answers a round, each late by what else the machine did. It
is held to less than a gap between two tokens: no client took a later token for the first one.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from tests.bench.ratio import Bound, Ratio, UnavailableError, share
from tests.bench.streaming import (
    OURS,
    ClientKind,
    Got,
    LocustUser,
    Sent,
    Traffic,
    Watched,
    watch,
)

ROUNDS: Final = 5
TRAFFIC: Final = Traffic(streams=8, rate=200.0, tokens=40, first_token_s=0.02)
CLIENTS: Final[dict[str, ClientKind]] = {
    "our user": OURS,
    "Locust's FastHttpUser": LocustUser("FastHttpLines"),
}
RIGHT: Final = Bound("off 1 by at most", 0.1)
NO_TOKEN_LATE: Final = Bound("off 1 by at most", 0.2)  # 5 ms of 25


def measure(*, quick: bool = False) -> Iterable[Ratio]:
    rounds, window_s = (1, 0.3) if quick else (ROUNDS, 2.0)
    seen: dict[str, list[Watched]] = {name: [] for name in CLIENTS}
    for _ in range(rounds):
        for name, kind in CLIENTS.items():
            seen[name].append(watch(kind, TRAFFIC, warm_s=window_s / 2, window_s=window_s))
    for name, watched in seen.items():
        for line in against_the_server(name, watched):
            yield line if CLIENTS[name] is OURS else replace(line, bound=None)


def against_the_server(name: str, rounds: list[Watched]) -> Iterable[Ratio]:
    """The lines of one client, each with the bound that a correct client keeps."""
    ttfts, gaps = [_ttfts(one) for one in rounds], [_gaps(one) for one in rounds]
    yield _line(f"TTFT p50, {name} against the server", ttfts, 50, RIGHT)
    yield _line(f"TTFT p99, {name} against the server", ttfts, 99, NO_TOKEN_LATE)
    yield _line(f"gap p50, {name} against the server", gaps, 50, RIGHT)
    yield _line(f"gap p90, {name} against the server", gaps, 90, RIGHT)


class View(NamedTuple):
    """The same times as the client saw them and as the server did, in nanoseconds."""

    client: list[int]
    server: list[int]


def _line(what: str, rounds: list[View], percentile: int, bound: Bound) -> Ratio:
    if not all(view.client and view.server for view in rounds):
        raise UnavailableError(f"{what}: no answer fell into the window")
    client = [_ms(view.client, percentile) for view in rounds]
    return share(what, "ms", client, [_ms(view.server, percentile) for view in rounds], bound)


def _ms(times_ns: list[int], percentile: int) -> float:
    return float(np.percentile(times_ns, percentile)) / 1e6


def _both(watched: Watched) -> list[tuple[Got, Sent]]:
    """The answers that were asked for and begun in the window."""
    both = [(watched.got[key], sent) for key, sent in watched.sent.items() if key in watched.got]
    return [
        (got, sent)
        for got, sent in both
        if watched.start_ns < got.sent_ns < watched.end_ns and got.tokens_ns and sent.tokens_ns
    ]


def _ttfts(watched: Watched) -> View:
    """By the client from its sending on, by the server from the arrival of the request on."""
    both = _both(watched)
    return View(
        [got.tokens_ns[0] - got.sent_ns for got, _ in both],
        [sent.tokens_ns[0] - sent.received_ns for _, sent in both],
    )


def _gaps(watched: Watched) -> View:
    both = _both(watched)
    return View(
        [gap for got, _ in both for gap in _differences(got.tokens_ns)],
        [gap for _, sent in both for gap in _differences(sent.tokens_ns)],
    )


def _differences(times_ns: list[int]) -> list[int]:
    return [later - earlier for earlier, later in pairwise(times_ns)]
