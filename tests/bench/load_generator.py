"""What a streamed token costs the load generator: processor time, user and system, of its process.

Ours is the whole load process, as `walkaway run` starts it: Locust, users, transport, decoding,
counting by usage, stamps, rows on disk, its own lag measured all along. The others only stamp each
token's line; one more decodes, counts and writes rows as ours does, on stock httpx. All ask again
and again for answers of 100 tokens, and the asking counts, too. They take turns; one that received
less than was sent was saturated: it is marked so, ours is held to no bound against it, as its cost
is of less than was asked of it, and it is left out where there are more streams. Ours opens a
connection for each request, the others keep theirs.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from typing import Final

from tests.bench.ratio import Bound, Ratio, share
from tests.bench.streaming import (
    OURS,
    ClientKind,
    LocustUser,
    Script,
    Traffic,
    Watched,
    watch,
)

NUM_STREAMS: Final = (50, 100, 400)
ROUNDS: Final = 3
BARE: Final = "bare protocol on uvloop"
STOCK: Final = "httpx.AsyncClient"
RIVALS: Final[dict[str, ClientKind]] = {
    BARE: Script("on_asyncio", "bare"),
    "bare gevent loop": Script("on_gevent", "bare"),
    "aiohttp on asyncio": Script("on_asyncio", "aiohttp"),
    "aiohttp on uvloop": Script("on_asyncio", "aiohttp-uvloop"),
    "Locust's HttpUser": LocustUser("HttpLines"),
    "Locust's FastHttpUser": LocustUser("FastHttpLines"),
    "httpx.Client over gevent": Script("on_gevent", "httpx"),
    STOCK: Script("on_asyncio", "httpx"),
    "our user on httpx.AsyncClient": Script("httpx_user", "user", writes_rows=True),
}
BOUNDS: Final = {BARE: Bound("at most", 4.0), STOCK: Bound("at most", 1 / 3)}


def measure(*, quick: bool = False) -> Iterable[Ratio]:
    if quick:
        yield from _compare({BARE: RIVALS[BARE]}, Traffic(streams=5), rounds=1, window_s=0.2)
        return
    rivals = rivals_here(has_aiohttp=find_spec("aiohttp") is not None)
    for streams in NUM_STREAMS:
        lines = list(_compare(rivals, Traffic(streams=streams), rounds=ROUNDS, window_s=2.0))
        yield from lines
        rivals = {
            name: kind
            for name, kind in rivals.items()
            if not any(line.what.endswith(f"{name}, saturated") for line in lines)
        }


def rivals_here(*, has_aiohttp: bool) -> dict[str, ClientKind]:
    """The rivals that can run here; says which cannot."""
    missing = [] if has_aiohttp else [name for name in RIVALS if name.startswith("aiohttp")]
    if missing:
        names = " and ".join(missing)
        print(f"{names} left out: aiohttp is not installed", file=sys.stderr)  # noqa: T201
    return {name: kind for name, kind in RIVALS.items() if name not in missing}


def _compare(
    rivals: dict[str, ClientKind], traffic: Traffic, *, rounds: int, window_s: float
) -> Iterable[Ratio]:
    ours: list[Watched] = []
    theirs: dict[str, list[Watched]] = {name: [] for name in rivals}
    for _ in range(rounds):
        ours.append(watch(OURS, traffic, warm_s=window_s / 4, window_s=window_s))
        for name, kind in rivals.items():
            theirs[name].append(watch(kind, traffic, warm_s=window_s / 4, window_s=window_s))
    for name, watched in theirs.items():
        yield against(name, traffic, ours, watched)


def against(name: str, traffic: Traffic, ours: list[Watched], theirs: list[Watched]) -> Ratio:
    """The line of a rival, from the rounds of both."""
    what = f"{traffic.streams} streams of {traffic.rate:g}/s: our user"
    what += f"{_state(ours)} against {name}{_state(theirs)}"
    bound = None if _state(theirs) else BOUNDS.get(name)
    line = share(what, "us/token", _cpu(ours), _cpu(theirs), bound)
    return replace(line, is_overrun=bool(_state(ours)))


def _state(rounds: list[Watched]) -> str:
    kept_up = sum(watched.kept_up for watched in rounds)
    return "" if kept_up > len(rounds) / 2 else ", saturated"


def _cpu(rounds: list[Watched]) -> list[float]:
    return [watched.cpu_us_per_token for watched in rounds]
