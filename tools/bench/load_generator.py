"""The load generator's cost, and how well it stamps: our load process and a server of tokens.

`load_generator`: processor time a token. Ours is the whole load process, as `walkaway run` starts
it; the others only stamp each token's line. All ask again and again for answers of 100 tokens. A
client that received less than was sent was saturated: it is marked, bounds nothing, and is left out
where there are more streams. Ours opens a connection for each request, the others keep theirs.

`grpc_tokens`: ours over gRPC, a response a token, against ours over HTTP, an event a token.

`token_stamps`: how late a token is stamped, by the server's own log of its sends. In bursts, as the
requests of one engine step come, the last of B tokens waits until the others have been taken in, so
B times what a token costs (processor time, measured in the same round) is allowed on top.

`client_times`: time to first token and gaps as a client sees them; theirs is the server's figure. A
token comes each 5 ms: a client that reads by the kilobyte, as Locust's FastHttpUser does where it
reads by line, would hide that. The p99 of TTFT is held to less than a gap between two tokens, so
that no client took a later token for the first one.

`many_streams`: 5,000 streams open in one load process, a token a second on each: the share of a
core, the memory of a stream (what 5,000 take more than 500) and of each token of a long answer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np

from tools.bench.ratio import BenchRatio, RatioLimit, UnavailableError, share, within
from tools.bench.streaming import OURS, OURS_OVER_GRPC, Traffic, WatchedAnswer, WatchedLoad, watch

BARE: Final = "bare protocol on uvloop"
STOCK: Final = "httpx.AsyncClient"
FAST: Final = "Locust's FastHttpUser"
RIVALS: Final = {BARE: "bare", FAST: "FastHttpLines", STOCK: "httpx"}
BOUNDS: Final = {BARE: RatioLimit("at most", 4.0), STOCK: RatioLimit("at most", 1 / 3)}


def load_generator(*, quick: bool = False) -> Iterable[BenchRatio]:
    if quick:
        yield from _costs({BARE: "bare"}, Traffic(streams=5), rounds=1, window_s=0.2)
        return
    rivals = dict(RIVALS)
    for streams in (50, 100, 400):
        lines = list(_costs(rivals, Traffic(streams=streams), rounds=3, window_s=2.0))
        yield from lines
        saturated = {name for name in rivals for line in lines if line.what.endswith(_late(name))}
        rivals = {name: client for name, client in rivals.items() if name not in saturated}


def _costs(
    rivals: Mapping[str, str], traffic: Traffic, *, rounds: int, window_s: float
) -> Iterable[BenchRatio]:
    watched = _in_turns({"": OURS, **rivals}, [traffic] * rounds, window_s / 4, window_s)
    for name in rivals:
        yield against(name, traffic, watched[""], watched[name])


def _in_turns(
    clients: Mapping[str, str], rounds: list[Traffic], warm_s: float, window_s: float
) -> dict[str, list[WatchedLoad]]:
    seen: dict[str, list[WatchedLoad]] = {name: [] for name in clients}
    for traffic in rounds:
        for name, client in clients.items():
            seen[name].append(watch(client, traffic, warm_s=warm_s, window_s=window_s))
    return seen


def against(
    name: str, traffic: Traffic, ours: list[WatchedLoad], theirs: list[WatchedLoad]
) -> BenchRatio:
    our_name = "our user" if _kept_up(ours) else _late("our user")
    what = f"{traffic.streams} streams of {traffic.rate:g}/s: {our_name} against "
    what += name if _kept_up(theirs) else _late(name)
    bound = BOUNDS.get(name) if _kept_up(theirs) else None
    line = share(what, "us/token", _cpu(ours), _cpu(theirs), bound)
    return replace(line, is_overrun=not _kept_up(ours))


def _late(name: str) -> str:
    return f"{name}, saturated"


def _kept_up(rounds: list[WatchedLoad]) -> bool:
    return sum(watched.kept_up for watched in rounds) > len(rounds) / 2


def _cpu(rounds: list[WatchedLoad]) -> list[float]:
    return [watched.cpu_us_per_token for watched in rounds]


def grpc_tokens(*, quick: bool = False) -> Iterable[BenchRatio]:
    sizes, rounds, window_s = ((5,), 1, 0.3) if quick else ((50, 100), 3, 2.0)
    for streams in sizes:
        traffic = [Traffic(streams=streams)] * rounds
        watched = _in_turns({"http": OURS, "grpc": OURS_OVER_GRPC}, traffic, window_s / 4, window_s)
        over_grpc = watched["grpc"]
        what = f"{streams} streams of 50/s: "
        what += "gRPC" if _kept_up(over_grpc) else _late("gRPC")
        line = share(f"{what} against HTTP", "us/token", _cpu(over_grpc), _cpu(watched["http"]))
        yield replace(line, is_overrun=not _kept_up(over_grpc))


def token_stamps(*, quick: bool = False) -> Iterable[BenchRatio]:
    streams, rounds, window_s = (5, 1, 0.2) if quick else (100, 5, 4.0)
    traffic = [Traffic(streams=streams, is_aligned=aligned) for aligned in (False, True)] * rounds
    watched = _in_turns({"": OURS}, traffic, window_s / 4, window_s)[""]
    spread, bursts = watched[::2], watched[1::2]
    what = f"p99 from send to stamp, {streams * 50:,} tokens/s,"
    yield within(f"{what} spread out, against 1 ms", "ms", lags_p99_ms(spread), 1.0)
    what += f" bursts of {streams}, against 1 ms + {streams} x CPU/token"
    allowed = [1.0 + streams * cost / 1e3 for cost in _cpu(bursts)]
    yield share(what, "ms", lags_p99_ms(bursts), allowed, RatioLimit("at most", 1.0))


def lags_p99_ms(rounds: list[WatchedLoad]) -> list[float]:
    lags_ns = [watched.lags_ns() for watched in rounds]
    if not all(lags_ns):
        raise UnavailableError("lag of stamps: no token fell into the window")
    return [float(np.percentile(lags, 99)) / 1e6 for lags in lags_ns]


RIGHT: Final = RatioLimit("off 1 by at most", 0.1)
NO_TOKEN_LATE: Final = RatioLimit("off 1 by at most", 0.2)  # 5 ms of 25


def client_times(*, quick: bool = False) -> Iterable[BenchRatio]:
    rounds, window_s = (1, 0.3) if quick else (5, 2.0)
    traffic = Traffic(streams=8, rate=200.0, tokens=40, first_token_s=0.02)
    clients = {"our user": OURS, FAST: RIVALS[FAST]}
    for name, watched in _in_turns(clients, [traffic] * rounds, window_s / 2, window_s).items():
        for line in against_the_server(name, watched):
            yield line if clients[name] == OURS else replace(line, bound=None)


Times = tuple[list[int], list[int]]  # as the client saw them and as the server did, in nanoseconds


def against_the_server(name: str, rounds: list[WatchedLoad]) -> Iterable[BenchRatio]:
    """The lines of one client, each with the bound that a correct client keeps."""
    ttfts, gaps = [_ttfts(one) for one in rounds], [_gaps(one) for one in rounds]
    for kind, times, percentile, bound in (
        ("TTFT p50", ttfts, 50, RIGHT),
        ("TTFT p99", ttfts, 99, NO_TOKEN_LATE),
        ("gap p50", gaps, 50, RIGHT),
        ("gap p90", gaps, 90, RIGHT),
    ):
        yield percentiles(f"{kind}, {name} against the server", times, percentile, bound)


def percentiles(what: str, rounds: list[Times], percentile: int, bound: RatioLimit) -> BenchRatio:
    if not all(client and server for client, server in rounds):
        raise UnavailableError(f"{what}: no answer fell into the window")
    client, server = (
        [float(np.percentile(times_ns, percentile)) / 1e6 for times_ns in side]
        for side in zip(*rounds, strict=True)
    )
    return share(what, "ms", client, server, bound)


def _both(watched: WatchedLoad) -> list[tuple[WatchedAnswer, WatchedAnswer]]:
    """The answers that were asked for and begun in the window."""
    both = [(watched.got[key], sent) for key, sent in watched.sent.items() if key in watched.got]
    return [
        (got, sent)
        for got, sent in both
        if watched.start_ns < got.began_ns < watched.end_ns and got.tokens_ns and sent.tokens_ns
    ]


def _ttfts(watched: WatchedLoad) -> Times:
    """The client counts from its sending, the server from the arrival of the request."""
    both = _both(watched)
    return (
        [got.tokens_ns[0] - got.began_ns for got, _ in both],
        [sent.tokens_ns[0] - sent.began_ns for _, sent in both],
    )


def _gaps(watched: WatchedLoad) -> Times:
    both = _both(watched)
    return (
        [later - earlier for got, _ in both for earlier, later in pairwise(got.tokens_ns)],
        [later - earlier for _, sent in both for earlier, later in pairwise(sent.tokens_ns)],
    )


def many_streams(*, quick: bool = False) -> Iterable[BenchRatio]:
    few, many, rounds = (2, 20, 1) if quick else (500, 5000, 3)
    rate, warm_s, window_s = (20.0, 0.0, 0.2) if quick else (1.0, 1.0, 5.0)
    traffic = [
        Traffic(streams=streams, rate=rate, is_staggered=quick) for streams in (few, many)
    ] * rounds
    watched = _in_turns({"": OURS}, traffic, warm_s, window_s)[""]
    with_few, with_many = watched[::2], watched[1::2]
    cpu = [one.cpu_ns / 1e9 for one in with_many]
    wall = [(one.end_ns - one.start_ns) / 1e9 for one in with_many]
    what = f"{many:,} streams of 1/s in one process"
    yield share(f"{what}: processor time against time", "s", cpu, wall, RatioLimit("at most", 0.8))
    memory = [
        max(0, after.rss_bytes - before.rss_bytes) / (many - few) / 1024
        for before, after in zip(with_few, with_many, strict=True)
    ]
    yield within(f"{what}: memory a stream against 64 KiB", "KiB", memory, 64.0)
    long = Traffic(streams=100, rate=100.0, tokens=5000, is_staggered=False)
    grown = [
        max(0, one.rss_bytes - one.rss_before_bytes) / one.tokens_received
        for one in _in_turns({"": OURS}, [long] * rounds, 0.5, 0.2 if quick else 10.0)[""]
    ]
    yield within("100 long answers: memory a token against 32 bytes", "bytes", grown, 32.0)
