"""What is asked of a server before the load, and after it whether it still serves.

The answers go into the manifest. What is not to be had is missing there, or is a note or a warning;
it is no error.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import httpx

from harness.collect.clock import check_clock
from harness.collect.scrape import find_unseen, read_roles
from harness.collect.source import Notes, SourceError
from harness.load.dialect import NONSENSE, Chunk, decode_chunk, refusal_message, request_body
from harness.records import Delivery, MetricSample
from harness.run.idle_pages import IdlePages
from harness.run.progress import Progress
from harness.run.run_config import ResolvedOrder
from harness.run.server import Server
from harness.run.serving import Asker, count_slots, probe_service
from harness.store.manifest import Clock, Manifest, TargetFacts
from harness.workload.load import SlotRecoveryLoad
from harness.workload.plan import LoadPlan
from harness.workload.prompts import PromptScale, fit_scale, prompt
from harness.workload.target import Target
from harness.workload.workload import as_plain_data

_SIZES: Final = (64, 256, 512, 1024)  # bytes; some 15 to 300 tokens of a usual tokenizer
_NOBODY: Final = -1  # the user whose prompts these are: no user of the load


class CalibrationError(Exception):
    """The server's count is not to be had; the message says why."""


def calibrate(client: httpx.Client, plan: LoadPlan) -> PromptScale:
    """Ask for one token after prompts of several sizes. Raises CalibrationError."""
    samples = [(size, _prompt_tokens(client, plan, size)) for size in _SIZES]
    scale = fit_scale(samples)
    if scale is None:
        raise CalibrationError(f"its counts make no sense: {samples} (bytes, tokens)")
    return scale


def _prompt_tokens(client: httpx.Client, plan: LoadPlan, size: int) -> int:
    text = prompt(seed=plan.run.seed, user=_NOBODY, n=size, num_bytes=size)
    body = request_body(plan.target, plan.model, text, max_tokens=1, delivery=Delivery.UNARY)
    try:
        answer = client.post(
            plan.url.rstrip("/") + plan.target.path,
            json=body,
            timeout=plan.run.timeout_s,
        )
    except httpx.HTTPError as error:
        raise CalibrationError(str(error)) from error
    if answer.status_code != 200:
        raise CalibrationError(refusal_message(answer.status_code, answer.content))
    usage = _decode(answer.content).usage
    if usage is None or usage.prompt_tokens is None:
        raise CalibrationError("its answers do not tell the tokens of the prompt (`usage`)")
    return usage.prompt_tokens


def _decode(body: bytes) -> Chunk:
    try:
        return decode_chunk(body)
    except NONSENSE as error:
        raise CalibrationError(f"its answer makes no sense ({error})") from error


FITS_NOTHING: Final = "--engine "  # how the text begins that says so


def told_slots(client: httpx.Client, server: Server, target: Target) -> int | None:
    """The number of batch slots on the server's own page; None where it has no such page."""
    if target.slots_from != "props":
        return None
    try:
        response = client.get(f"{server.url}/props")
        slots = response.json()["total_slots"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
    return slots if isinstance(slots, int) and slots > 0 else None


def told_version(client: httpx.Client, server: Server, target: Target) -> str | None:
    """The server's version on its own page; None where it has no such page."""
    source = target.version_from
    if source is None:
        return None
    try:
        version = client.get(f"{server.url}{source.path}").json()[source.key]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, str) else None


def told_blocks(samples: Sequence[MetricSample], target: Target) -> int | None:
    """The number of KV cache blocks, from the label of a metric that describes the cache."""
    source = target.blocks_from
    if source is None:
        return None
    for sample in samples:
        text = json.loads(sample.labels).get(source.label) if sample.name == source.name else None
        if text is not None and text.isdigit():
            return int(text)
    return None


def metrics_pages(typed: Sequence[str], server: Server, target: Target) -> list[str]:
    """The URLs to read; none where nothing is known of what would stand there."""
    if typed or not target.metrics:
        return list(typed)
    return [f"{server.url}/metrics"]


def scrape_note(interval_s: float | None, metrics_urls: Sequence[str]) -> str | None:
    """Said of a run that does not scrape while the load runs."""
    if interval_s is not None:
        return None
    if not metrics_urls:
        return "nothing was scraped: figures that need /metrics are not measurable"
    return (
        "nothing was scraped while the load ran: figures that need gauges and counters over time "
        "are not measurable; /metrics was read before the load and after it"
    )


def scrape_warning(interval_s: float | None, target: Target) -> str | None:
    """Said where the server is watched more closely than it bears."""
    least_s = target.min_scrape_interval_s
    if interval_s is None or least_s is None or interval_s >= least_s:
        return None
    return (
        f"/metrics is read every {interval_s:g} s, but a server of kind {target.name} bears that "
        f"only every {least_s:g} s: read more often it cancels otherwise (see the target's file)"
    )


def unseen_metrics(
    samples: Sequence[MetricSample], metrics_urls: Sequence[str], target: Target
) -> str | None:
    """Which of the target's metrics are not there, by name; None where all are."""
    unseen = find_unseen({sample.name for sample in samples}, target.metrics)
    if not unseen:
        return None
    names = ", ".join(f"{target.metrics[role].name} ({role})" for role in unseen)
    text = f"not among the metrics at {' '.join(metrics_urls)}: {names}"
    if len(unseen) == len(target.metrics):
        return f"{FITS_NOTHING}{target.name} fits nothing here: {text}"
    return text


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
        is_needed = isinstance(load, SlotRecoveryLoad) and load.slots is None
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
        return plan.model_copy(update={"prompt_scale": scale})

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
        return Asker(
            client=self._client,
            url=server.url,
            target=self._target,
            model=server.model,
            clock_ns=self._clock_ns,
        )
