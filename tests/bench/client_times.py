"""Time to first token and gaps as a client sees them, against the truth of the server's log.

The server answers after 20 ms and sends a token each 5 ms: short enough to be hidden by a client
that reads by the kilobyte, as Locust's FastHttpUser does where it reads by line. Theirs is the
server's figure in each line, so a client that is right has a ratio of 1.
"""

from collections.abc import Iterable
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
RIGHT: Final = Bound("at most", 1.1)


def measure(*, quick: bool = False) -> Iterable[Ratio]:
    rounds, window_s = (1, 0.3) if quick else (ROUNDS, 2.0)
    seen: dict[str, list[Watched]] = {name: [] for name in CLIENTS}
    for _ in range(rounds):
        for name, kind in CLIENTS.items():
            seen[name].append(watch(kind, TRAFFIC, warm_s=window_s / 2, window_s=window_s))
    for name, watched in seen.items():
        bound = RIGHT if CLIENTS[name] is OURS else None
        yield _line(f"TTFT p50, {name} against the server", [_ttfts(w) for w in watched], 50, bound)
        for percentile in (50, 90):
            what = f"gap p{percentile}, {name} against the server"
            yield _line(what, [_gaps(w) for w in watched], percentile, bound)


class View(NamedTuple):
    """The same times as the client saw them and as the server did, in nanoseconds."""

    client: list[int]
    server: list[int]


def _line(what: str, rounds: list[View], percentile: int, bound: Bound | None) -> Ratio:
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
