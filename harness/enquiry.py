"""What is asked of a server before the load, and after it whether it still serves.

The answers go into the manifest. What is not to be had is missing there, or is a note or a warning;
it is no error.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import httpx
import msgspec

from harness.calibration import CalibrationError, calibrate
from harness.collect.clock import check_clock
from harness.collect.prometheus import read_roles
from harness.collect.source import Notes, SourceError
from harness.config import as_plain_data
from harness.idle_pages import IdlePages
from harness.load.plan import LoadPlan
from harness.load_settings import SlotRecoverySettings
from harness.manifest import Clock, Manifest, TargetFacts
from harness.order import ResolvedOrder
from harness.progress import Progress
from harness.server import Server
from harness.server_facts import (
    FITS_NOTHING,
    metrics_pages,
    scrape_note,
    scrape_warning,
    told_blocks,
    told_slots,
    told_version,
    unseen_metrics,
)
from harness.serving import Asker, count_slots, probe_service


class Enquiry:
    """The questions of one run; `client` has the run's headers and its CAs."""

    def __init__(
        self,
        resolved: ResolvedOrder,
        client: httpx.Client,
        manifest: Manifest,
        *,
        notes: Notes,
        progress: Progress,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._resolved = resolved
        self._target = resolved.target
        self._client = client
        self._manifest = manifest
        self._notes = notes
        self._progress = progress
        self._clock_ns = clock_ns

    def note_target(self, server: Server) -> list[str]:
        """Which server it is; the URLs of its metrics pages."""
        metrics_urls = metrics_pages(self._resolved.metrics_urls, server, self._target)
        interval_s = self._manifest.scrape_interval_s
        if (note := scrape_note(interval_s, metrics_urls)) is not None:
            self._notes.add(note)
        if (warning := scrape_warning(interval_s, self._target)) is not None:
            self._notes.warn(warning)
        self._manifest.target = TargetFacts(
            engine=self._target.name,
            url=server.url,
            metrics_urls=metrics_urls,
            model=server.model,
            started_by_us=server.engine is not None,
            spec=as_plain_data(self._target),
            config=server.config,
            version=told_version(self._client, server, self._target),
        )
        return metrics_urls

    def with_slots(self, server: Server) -> Server:
        """The server with its number of batch slots: as it tells it, or found by trying where it is
        needed and nobody says it."""
        load = self._resolved.workload.load
        is_needed = isinstance(load, SlotRecoverySettings) and load.slots is None
        is_told = self._target.slots_from == "config" and server.config is not None
        told = told_slots(self._client, server, self._target)
        if told is not None:
            return self._keep_slots(server, told, "as its page /props tells")
        if is_told or not is_needed:
            return server
        self._progress.phase("trying how many requests the server runs at once")
        timeout_s = self._resolved.workload.run.timeout_s
        found = count_slots(self._asker(server), longest_s=timeout_s)
        if found is None:
            return server
        how = "the smallest number of parallel requests at which one more waits"
        return self._keep_slots(server, found, f"found by trying: {how}")

    def with_lengths(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with prompts as long on this server's tokenizer as they should be."""
        if self._target.bytes_are_tokens:
            return plan
        self._progress.phase("asking the server how many tokens it makes of a prompt")
        try:
            scale = calibrate(self._client, plan)
        except CalibrationError as error:
            self._notes.warn(
                f"the length of prompts is not known in the server's tokens: {error}; a byte was "
                "taken for a token"
            )
            return plan
        self._manifest.prompt_scale = scale
        return msgspec.structs.replace(plan, prompt_scale=scale)

    def note_clock(self, server: Server) -> None:
        """Whether its stamps and ours are of one clock: asked of servers with exact logs."""
        try:
            check = check_clock(
                self._client, f"{server.url}/walkaway/clock", clock_ns=self._clock_ns
            )
        except SourceError as error:
            self._notes.warn(str(error))
            return
        self._manifest.clock = Clock(comparable=check.comparable, round_trip_ns=check.round_trip_ns)

    def read_first(self, pages: IdlePages) -> None:
        """Before the load: what the mapping does not find there is best known at once, by name."""
        if (samples := pages.samples()) is None:
            return
        self._manifest.idle.before = read_roles(samples, self._target.metrics)
        if self._manifest.target is not None:
            self._manifest.target.blocks_found = told_blocks(samples, self._target)
        text = unseen_metrics(samples, pages.urls, self._target)
        if text is None:
            return
        if text.startswith(FITS_NOTHING):
            self._notes.warn(text)
        self._progress.phase(text)

    def probe(self, server: Server) -> None:
        """Is it wedged? After everything was read: these requests are in no figure."""
        self._progress.phase("asking whether the server still serves")
        timeout_s = self._resolved.workload.run.timeout_s
        self._manifest.probing = probe_service(self._asker(server), longest_s=timeout_s)

    def _keep_slots(self, server: Server, slots: int, how: str) -> Server:
        self._notes.add(f"batch slots: {slots}, {how}")
        if self._manifest.target is not None:
            self._manifest.target.slots_found = slots
        return replace(server, slots_found=slots)

    def _asker(self, server: Server) -> Asker:
        body = {"model": server.model, **self._target.extra_body}
        path, clock_ns = self._target.path, self._clock_ns
        return Asker(client=self._client, url=server.url, path=path, body=body, clock_ns=clock_ns)
