"""The target's metrics pages, for the cases that judge its counters or that only watch it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import gevent
import httpx

from harness.client.session import asking_client
from harness.collect.scrape import fetch_page, parse_gauges, read_roles, read_samples
from harness.collect.source import SourceError
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.records import MetricSample
from harness.workload.plan import LoadPlan

_PAGE_S: Final = 5.0
_POLL_S: Final = 0.1


class Polled:
    """A page that is read again and again; `answers`: how many times with status 200."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers = 0

    def keep_reading(self, client: httpx.Client) -> None:
        while True:
            with suppress(httpx.HTTPError):
                self.answers += client.get(self.url).status_code == httpx.codes.OK
            gevent.sleep(_POLL_S)


class MetricsPages:
    """`judged`: the pages whose metrics are understood; `every`: all pages."""

    def __init__(self, plan: LoadPlan, *, judged: Sequence[str], every: Sequence[str]) -> None:
        self._plan = plan
        self.judged = judged
        self._every = every
        self._client = asking_client(plan, _PAGE_S)

    def counters(self) -> dict[str, float]:
        """The target's metrics by role, read now. Raises RefusedError without any."""
        return read_roles(self.samples(), self._plan.target.metrics)

    def samples(self) -> list[MetricSample]:
        """All that the judged pages show now. Raises RefusedError without any."""
        if not self.judged:
            raise RefusedError("no metrics page is known (--metrics-url), or none of its metrics")
        try:
            return read_samples(self._client, self.judged, clock_ns=time.perf_counter_ns)
        except SourceError as error:
            raise CannotDecideError(str(error)) from error

    def gauges(self) -> dict[str, float]:
        """Those of the judged pages, by name and labels. Raises RefusedError without any page."""
        if not self.judged:
            raise RefusedError("no metrics page is known (--metrics-url)")
        found = dict[str, float]()
        for url in self.judged:
            try:
                found |= parse_gauges(fetch_page(self._client, url).text)
            except SourceError as error:
                raise CannotDecideError(str(error)) from error
            except ValueError as error:
                raise CannotDecideError(f"{url} is no metrics page: {error}") from error
        return found

    @contextmanager
    def polling(self) -> Iterator[Polled]:
        """Read the first page ten times a second, and look at nothing in it."""
        polled = Polled(self._every[0])
        with asking_client(self._plan, _PAGE_S) as client:
            reader = gevent.spawn(polled.keep_reading, client)
            try:
                yield polled
            finally:
                reader.kill()
