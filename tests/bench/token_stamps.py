"""How late a token is stamped: our user's stamps against the server's own log of its sends.

At 5,000 tokens a second, spread out: within a millisecond. In bursts, as the requests of one engine
step come, the last of B tokens has to wait until the others have been taken in, so B times what a
token costs (processor time, measured in the same round) is allowed on top.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np

from tests.bench.ratio import Bound, Ratio, UnavailableError, share
from tests.bench.streaming import OURS, Traffic, Watched, watch

STREAMS: Final = 100
ROUNDS: Final = 5
ALLOWED_MS: Final = 1.0


def measure(*, quick: bool = False) -> Iterable[Ratio]:
    streams, rounds, window_s = (5, 1, 0.2) if quick else (STREAMS, ROUNDS, 4.0)
    spread: list[Watched] = []
    bursts: list[Watched] = []
    for _ in range(rounds):
        for is_aligned, watched in ((False, spread), (True, bursts)):
            traffic = Traffic(streams=streams, is_aligned=is_aligned)
            watched.append(watch(OURS, traffic, warm_s=window_s / 4, window_s=window_s))
    once, bound = [ALLOWED_MS] * rounds, Bound("at most", 1.0)
    allowed = [ALLOWED_MS + streams * burst.cpu_us_per_token / 1e3 for burst in bursts]
    what = f"p99 from send to stamp, {streams * 50:,} tokens/s,"
    yield share(f"{what} spread out, against 1 ms", "ms", _p99_ms(spread), once, bound)
    what += f" bursts of {streams}, against 1 ms + {streams} x CPU/token"
    yield share(what, "ms", _p99_ms(bursts), allowed, bound)


def _p99_ms(rounds: list[Watched]) -> list[float]:
    lags_ns = [watched.lags_ns() for watched in rounds]
    if not all(lags_ns):
        raise UnavailableError("lag of stamps: no token fell into the window")
    return [float(np.percentile(lags, 99)) / 1e6 for lags in lags_ns]
