"""Twenty clients that leave at one moment, twice, and what has come back afterwards. The control of
the gauges is twenty clients that stay, twice, before them."""

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import gevent

from harness.conform.gateway.bench import (
    Crowd,
    GatewayAnswer,
    GatewayBench,
    Gauges,
    LeaveSpec,
    together,
)
from harness.conform.gateway.crossing import Crossing
from harness.conform.pages import MetricsPages
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.records import Way
from harness.upstream.orders import Order
from harness.workload.target import DialectName

SIZE: Final = 20
LEAVE: Final = LeaveSpec(way=Way.FIN, tokens=50)
TIMES: Final = 2
_REST_S: Final = 2.0  # the longest until gauges and connections have come to rest
_LOOK_S: Final = 0.1
_SAME: Final = 4  # looks
# Names of gauges that count requests or clients; others count bytes, seconds or threads.
_OF_REQUESTS: Final = re.compile(
    r"flight|active|running|waiting|pending|queue|current|concurr|connection|request|stream|client"
)
_NO_GAUGE: Final = re.compile(r"(_total|_sum|_count|_bytes|_seconds)$")

T = TypeVar("T")


def crowd_of(bench: GatewayBench, dialect: DialectName) -> Crowd:
    """Several cases look at one crowd. Raises CannotDecideError."""
    if dialect not in bench.crowds:
        try:
            bench.crowds[dialect] = _gather(bench, dialect)
        except CannotDecideError as error:
            bench.crowds[dialect] = error
    seen = bench.crowds[dialect]
    if isinstance(seen, CannotDecideError):
        raise seen
    return seen


def _gather(bench: GatewayBench, dialect: DialectName) -> Crowd:
    pages = MetricsPages(bench.plan, judged=bench.page_urls, every=[])
    crossings: list[Crossing] = []
    after: list[GatewayAnswer] = []
    open_ones: list[int] = []
    memory_mb: list[float] = []
    gauges = _with_clients_that_stay(bench, dialect, pages)
    for _ in range(TIMES):
        crossings += _leave_at_once(bench, dialect)
        after += bench.ask_each(bench.plans[dialect], [Order()])
        gauges.append(_gauges_at_rest(pages, gauges[-1]))
        open_ones.append(_unchanged(bench.connections))
        memory_mb += bench.memory_mb()
    shown = [one for one in gauges if not isinstance(one, Exception)]
    unread = next((one for one in gauges if isinstance(one, Exception)), None)
    return Crowd(crossings, after, open_ones, memory_mb, shown if unread is None else unread)


def _with_clients_that_stay(
    bench: GatewayBench, dialect: DialectName, pages: MetricsPages
) -> list[Gauges | Exception]:
    """The gauges before, between and after; if they cannot be read, nobody asks."""
    gauges = [_gauges(pages)]
    if isinstance(gauges[0], Exception):
        return gauges
    for _ in range(TIMES):
        bench.ask_each(bench.plans[dialect], [Order()] * SIZE)
        gauges.append(_gauges_at_rest(pages, gauges[-1]))
    return gauges


def _leave_at_once(bench: GatewayBench, dialect: DialectName) -> list[Crossing]:
    with bench.session(bench.plans[dialect]) as session:
        streams = [bench.begin(session, LEAVE) for _ in range(SIZE)]
        together([partial(bench.await_turn, one, LEAVE) for one in streams])
        return together([partial(bench.see_leave, one, LEAVE, dialect) for one in streams])


def _gauges_at_rest(pages: MetricsPages, before: Gauges | Exception) -> Gauges | Exception:
    return _at_rest(lambda: _gauges(pages), lambda now: _is_as(now, before))


def _gauges(pages: MetricsPages) -> Gauges | Exception:
    try:
        shown = pages.gauges()
    except (RefusedError, CannotDecideError) as error:
        return error
    found = {name: value for name, value in shown.items() if _is_of_requests(name)}
    return found or RefusedError("the gateway's metrics page shows no gauge of requests")


def _is_of_requests(shown: str) -> bool:
    name = shown.partition("{")[0].lower()
    return bool(_OF_REQUESTS.search(name)) and not _NO_GAUGE.search(name)


def _is_as(now: Gauges | Exception, before: Gauges | Exception) -> bool:
    if isinstance(now, Exception) or isinstance(before, Exception):
        return True
    return all(now.get(name, 0.0) <= value for name, value in before.items())


def _at_rest(look: Callable[[], T], is_good: Callable[[T], bool]) -> T:
    """What is seen when it is good, or when the time is up."""
    until_s = time.monotonic() + _REST_S
    while not is_good(seen := look()) and time.monotonic() < until_s:
        gevent.sleep(_LOOK_S)
    return seen


def _unchanged(look: Callable[[], int]) -> int:
    """What is seen when it is the same a few times, or when the time is up."""
    seen: list[int] = []

    def is_same(now: int) -> bool:
        seen.append(now)
        return len(seen) >= _SAME and len({*seen[-_SAME:]}) == 1

    return _at_rest(look, is_same)
