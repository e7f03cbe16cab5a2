"""5,000 streams open in one load process, a token a second on each: what they cost.

The share of a core that the process uses, and its memory: for each stream, what 5,000 streams take
more than 500, divided by the difference, when hardly a token has come; and for each token of an
answer that goes on, what the process grows by while 100 streams receive 1,000 tokens each.
"""

from collections.abc import Iterable
from typing import Final

from tests.bench.ratio import Bound, Ratio, share
from tests.bench.streaming import OURS, Traffic, Watched, watch

FEW, MANY = 500, 5000
ROUNDS: Final = 3
MOST_OF_A_CORE: Final = 0.8
ALLOWED_KIB: Final = 64.0
ALLOWED_TOKEN_BYTES: Final = 32.0
LONG: Final = Traffic(streams=100, rate=100.0, tokens=5000, is_staggered=False)
KEPT: Final = Bound("at most", 1.0)


def measure(*, quick: bool = False) -> Iterable[Ratio]:
    few, many = (2, 20) if quick else (FEW, MANY)
    rounds = 1 if quick else ROUNDS
    watched = [(_watch(few, quick=quick), _watch(many, quick=quick)) for _ in range(rounds)]
    cpu = [with_many.cpu_ns / 1e9 for _, with_many in watched]
    wall = [(with_many.end_ns - with_many.start_ns) / 1e9 for _, with_many in watched]
    what = f"{many:,} streams of 1/s in one process"
    bound = Bound("at most", MOST_OF_A_CORE)
    yield share(f"{what}: processor time against time", "s", cpu, wall, bound)
    memory = [max(0, b.rss_bytes - a.rss_bytes) / (many - few) / 1024 for a, b in watched]
    what += f": memory a stream against {ALLOWED_KIB:g} KiB"
    yield share(what, "KiB", memory, [ALLOWED_KIB] * rounds, KEPT)
    window_s = 0.2 if quick else 10.0
    grown = [
        _bytes_a_token(watch(OURS, LONG, warm_s=0.5, window_s=window_s)) for _ in range(rounds)
    ]
    what = f"{LONG.streams} long answers: memory a token against {ALLOWED_TOKEN_BYTES:g} bytes"
    yield share(what, "bytes", grown, [ALLOWED_TOKEN_BYTES] * rounds, KEPT)


def _watch(streams: int, *, quick: bool) -> Watched:
    if quick:
        return watch(OURS, Traffic(streams=streams, rate=20.0), warm_s=0.0, window_s=0.2)
    traffic = Traffic(streams=streams, rate=1.0, is_staggered=False)
    return watch(OURS, traffic, warm_s=1.0, window_s=5.0)


def _bytes_a_token(watched: Watched) -> float:
    return max(0, watched.rss_bytes - watched.rss_before_bytes) / watched.tokens_received
