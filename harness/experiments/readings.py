"""Readings of one quantity of a server, taken again and again while streams come and go."""

import random
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Final, Literal, NamedTuple, Self

import gevent
import httpx
from gevent.event import Event

from harness.client.session import asking_client
from harness.collect.scrape import fetch_page, parse_page, read_roles
from harness.collect.source import SourceError, jittered
from harness.experiments.outcome import CannotDecideError
from harness.workload.plan import LoadPlan
from harness.workload.target import MetricRole, MetricSource, Target

Gauge = Literal["running", "kv_usage"]

_PAGE_S: Final = 5.0
_SHORTEST_POLL_S: Final = 0.005
_LONGEST_POLL_S: Final = 0.05
_MOST_LAG_STEPS: Final = 4  # of a gauge that is refreshed each step
_TRUSTED: Final = ("exact", "exact_when_idle")


class Reading(NamedTuple):
    at_s: float
    value: float


class Readings:
    """`read` returns the quantity now, or raises SourceError: that moment is left out. It is read
    from `with` to its end, `poll_s` apart by a random quarter, so as not to keep in step with the
    server. Times are of `time.perf_counter`, in seconds."""

    def __init__(self, read: Callable[[], float], *, poll_s: float, rng: random.Random) -> None:
        self._read = read
        self._pause_s = jittered(poll_s, rng, shortest_s=poll_s if poll_s >= 1 else None)
        self._times, self._values = array("d"), array("d")
        self._news = Event()
        self.poll_s = poll_s
        self.why_unread = ""

    def __enter__(self) -> Self:
        self._reader = gevent.spawn(self._keep_reading)
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.kill()

    def columns(self, since_s: float = 0.0) -> "tuple[array[float], array[float]]":
        """Times and values, in order."""
        first = bisect_left(self._times, since_s)
        return self._times[first:], self._values[first:]

    def forget(self, before_s: float) -> None:
        """Drop the readings before then: nobody asks for them any more."""
        old = bisect_left(self._times, before_s)
        del self._times[:old], self._values[:old]

    def since(self, since_s: float) -> list[Reading]:
        return [Reading(*one) for one in zip(*self.columns(since_s), strict=True)]

    def latest(self) -> float:
        """The latest value; 0 before the first."""
        return self._values[-1] if self._values else 0.0

    @property
    def latest_s(self) -> float:
        """The time of the latest reading; 0 before the first."""
        return self._times[-1] if self._times else 0.0

    def wait(self, is_so: Callable[[], bool], longest_s: float) -> bool:
        """Waits until `is_so`, which is asked after each reading. Returns whether it became so."""
        until_s = time.perf_counter() + longest_s
        while not is_so():
            left_s = until_s - time.perf_counter()
            if left_s <= 0:
                return False
            self._news.clear()
            self._news.wait(left_s)
        return True

    def level(self, readings: int, longest_s: float = _PAGE_S) -> list[float]:
        """The next values. Raises CannotDecideError if they do not come."""
        wanted = len(self._values) + readings
        if not self.wait(lambda: len(self._values) >= wanted, longest_s + readings * self.poll_s):
            raise CannotDecideError(self.why_unread or "no reading came")
        return list(self._values[-readings:])

    def _keep_reading(self) -> None:
        while True:
            began_s = time.perf_counter()
            try:
                value = self._read()
            except SourceError as error:
                self.why_unread = str(error)
            else:
                self._times.append((began_s + time.perf_counter()) / 2)
                self._values.append(value)
                self._news.set()
            gevent.sleep(self._pause_s())


class RunningGauge:
    """The running requests on the server's pages, whose other metrics are not parsed.
    `with_waiting`: plus the waiting requests, where the server shows them. A missing gauge is 0:
    some servers show a gauge only after the first request."""

    def __init__(self, plan: LoadPlan, urls: Sequence[str], *, with_waiting: bool = False) -> None:
        self._urls = urls
        metrics = plan.target.metrics
        self._sources = [metrics["running"]]
        if with_waiting and "waiting" in metrics and metrics["waiting"].trust in _TRUSTED:
            self._sources.append(metrics["waiting"])
        self._client = asking_client(plan, _PAGE_S)

    def read(self) -> float:
        return self._requests(self._pages())

    def _pages(self) -> list[httpx.Response]:
        return [fetch_page(self._client, url) for url in self._urls]

    def _requests(self, pages: list[httpx.Response]) -> float:
        return sum(
            value_of(source, page)
            for source in self._sources
            for page in (pages[:1] if source.repeated else pages)
        )

    def cost_s(self) -> float:
        """How long one reading takes."""
        began_s = time.perf_counter()
        self.read()
        return time.perf_counter() - began_s

    def close(self) -> None:
        self._client.close()


class MemoryGauge(RunningGauge):
    """The share of its memory for contexts that a server shows as held; over several pages the
    mean. `requests`: how many requests ran or waited, in the mean over the readings."""

    def __init__(self, plan: LoadPlan, urls: Sequence[str]) -> None:
        super().__init__(plan, urls, with_waiting=True)
        self._memory = plan.target.metrics["kv_usage"]
        self._counted = self._readings = 0.0

    @property
    def requests(self) -> float:
        return self._counted / max(1.0, self._readings)

    def read(self) -> float:
        pages = self._pages()
        self._counted += self._requests(pages)
        self._readings += 1
        shown = pages[:1] if self._memory.repeated else pages
        return fmean(value_of(self._memory, page, "kv_usage") for page in shown)


def value_of(source: MetricSource, page: httpx.Response, role: MetricRole = "running") -> float:
    """Only its own lines are parsed: a page may have thousands of others. Raises SourceError."""
    own = "".join(f"{line}\n" for line in page.text.splitlines() if line.startswith(source.name))
    try:
        samples = parse_page(own, t_ns=0, duration_ns=0, extra_labels={})
    except ValueError as error:
        raise SourceError(f"the page at {page.url} is not in the Prometheus text format") from error
    return read_roles(samples, {role: source}).get(role, 0.0)


_SHOWN: Final[dict[Gauge, str]] = {
    "running": "how many requests run",
    "kv_usage": "how much memory they hold",
}


def why_no_gauge(target: Target, urls: Sequence[str], gauge: Gauge = "running") -> str | None:
    """Why this gauge cannot show when a stream was let go of; None: it can."""
    source = target.metrics.get(gauge)
    if not urls or source is None:
        return f"no metrics page shows {_SHOWN[gauge]} (--metrics-url, --engine)"
    if source.trust not in _TRUSTED:
        return f"{source.name} is not to be trusted ({source.trust})"
    if source.lag_steps > _MOST_LAG_STEPS:
        return f"{source.name} is refreshed {source.refresh}, not each step"
    return None


def poll_of(target: Target, step_s: float) -> float:
    """The seconds between readings: two a step where the server bears that."""
    least_s = target.min_scrape_interval_s or 0.0
    return max(least_s, min(_LONGEST_POLL_S, max(_SHORTEST_POLL_S, step_s / 2)))


def gauge_lag_s(target: Target, step_s: float, gauge: Gauge = "running") -> float:
    """The time by which the gauge may be late."""
    source = target.metrics[gauge]
    return source.lag_s + source.lag_steps * step_s
