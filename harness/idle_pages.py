"""The metrics pages while nothing runs: before the load, once all is settled, and a while later.

They are read then also where nothing is scraped while the load runs.
"""

import time
from collections.abc import Callable
from typing import Final

import httpx

from harness.collect.prometheus import read_roles, read_samples
from harness.collect.source import Notes, SourceError
from harness.records import MetricSample
from harness.settle import may_be_at_work
from harness.target_spec import Target

LATER_S: Final = 1.0  # after the last idle reading: a ghost has counted tokens by then


class IdlePages:
    """Reads them for one run. What cannot be read is a warning, not an error.

    `names_read`: the metrics that were ever seen on them.
    """

    def __init__(
        self,
        client: httpx.Client,
        urls: list[str],
        target: Target,
        *,
        notes: Notes,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.urls = urls
        self.names_read: set[str] = set()
        self._client = client
        self._target = target
        self._notes = notes
        self._clock_ns = clock_ns

    def samples(self) -> list[MetricSample] | None:
        """All that they show; None where there is no page, or one cannot be read."""
        if not self.urls:
            return None
        try:
            samples = read_samples(self._client, self.urls, clock_ns=self._clock_ns)
        except SourceError as error:
            self._notes.warn(str(error))
            return None
        self.names_read |= {sample.name for sample in samples}
        return samples

    def roles(self) -> dict[str, float]:
        """What they show of the quantities that the target maps, by role."""
        return read_roles(self.samples() or [], self._target.metrics)

    def roles_later(
        self,
        before: dict[str, float],
        after: dict[str, float],
        *,
        pause: Callable[[float], None],
        interrupted: Callable[[], bool],
    ) -> dict[str, float]:
        """Once more, after the reading `after` the load: as soon as they show work, or when a step
        must have ended."""
        until_ns = self._clock_ns() + int(self._target.longest_step_s * 1e9)
        while True:
            pause(LATER_S)
            later = self.roles()
            is_over = self._clock_ns() >= until_ns or interrupted()
            if is_over or not may_be_at_work(before, after, later):
                return later
