"""Questions to a server before the load: version, slots, blocks, clock, length of prompts.

The answers go into the manifest. A missing answer is a note or a warning at most, never an error.
"""

import json
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx

from harness.collect.clock import check_clock
from harness.collect.scrape import find_unseen, read_roles
from harness.collect.source import Notes, SourceError
from harness.load.dialect import NONSENSE, Chunk, decode_chunk, refusal_message, request_body
from harness.records import Delivery, MetricSample
from harness.run.process import Child
from harness.run.progress import Interruption, Progress
from harness.run.run_config import ResolvedRun
from harness.run.server import (
    Server,
    attach,
    choose_runner,
    engine_command,
    started_command,
    wait_for_engine,
)
from harness.run.settle import Asker, IdlePages, NotServedError, asker_of
from harness.store.manifest import Clock, Manifest, TargetFacts
from harness.workload.arms import unused_engine_settings
from harness.workload.load import SlotRecoveryLoad
from harness.workload.plan import LoadPlan
from harness.workload.prompts import PromptScale, fit_scale, prompt
from harness.workload.target import Target
from harness.workload.workload import as_plain_data


def resolve_server(
    resolved: ResolvedRun,
    log: Path,
    stack: ExitStack,
    *,
    client: httpx.Client,
    notes: Notes,
    progress: Progress,
    interruption: Interruption,
) -> Server:
    """Find the server, or start it: it then logs to `log` and ends with the `stack`.

    Raises TargetError, ConfigError and InterruptedRunError.
    """
    config, command = resolved.config, resolved.config.target_command
    engine: Child | None = None
    if resolved.url is None and command is None:
        engine, url = _start_ours(resolved, log, stack, notes, progress, interruption)
        return attach(url, resolved.target, model=config.model, client=client, engine=engine)
    if (note := unused_engine_settings(resolved.workload)) is not None:
        notes.add(note)
    if command is not None:
        progress.phase(f"starting {command[0]}")
        started = started_command(
            command,
            log,
            client=client,
            ready_s=config.ready_s,
            interrupted=lambda: interruption.requested,
        )
        engine, url = stack.enter_context(started)
    else:
        assert resolved.url is not None
        url = resolved.url
        progress.phase(f"connecting to {url}")
    return attach(url, resolved.target, model=config.model, client=client, engine=engine)


def _start_ours(
    resolved: ResolvedRun,
    log: Path,
    stack: ExitStack,
    notes: Notes,
    progress: Progress,
    interruption: Interruption,
) -> tuple[Child, str]:
    settings = resolved.workload.engine
    runner = choose_runner(settings)
    if settings.runner == "auto" and runner == "simulated":
        text = (
            "torch is not installed: the engine simulates its model (with steps of a fixed length)"
        )
        notes.add(text)
        progress.phase(text)
    progress.phase(f"starting the reference engine ({runner} runner)")
    command = engine_command(settings, runner, model=resolved.config.model)
    engine = stack.enter_context(Child("engine", command, log))
    return engine, wait_for_engine(engine, interrupted=lambda: interruption.requested)


_SIZES: Final = (64, 256, 512, 1024)  # bytes; some 15 to 300 tokens of a usual tokenizer
_NO_USER: Final = -1  # the prompts differ from those of every user


class CalibrationError(Exception):
    """The server gave no usable token count; the message says why."""


def calibrate(client: httpx.Client, plan: LoadPlan) -> PromptScale:
    """Fit tokens to bytes from prompts of several sizes. Raises CalibrationError."""
    samples = [(size, _prompt_tokens(client, plan, size)) for size in _SIZES]
    scale = fit_scale(samples)
    if scale is None:
        raise CalibrationError(f"its counts fit no line: {samples} (bytes, tokens)")
    return scale


def _prompt_tokens(client: httpx.Client, plan: LoadPlan, size: int) -> int:
    text = prompt(seed=plan.run.seed, user=_NO_USER, n=size, num_bytes=size)
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
        raise CalibrationError("its answers have no `usage.prompt_tokens`")
    return usage.prompt_tokens


def _decode(body: bytes) -> Chunk:
    try:
        return decode_chunk(body)
    except NONSENSE as error:
        raise CalibrationError(f"its answer is not in OpenAI's dialect ({error})") from error


FIRST_STREAMS: Final = 2
MOST_STREAMS: Final = 512
FIRST_TOKENS: Final = 16
MOST_TOKENS: Final = 1024
LONGEST_COUNT_S: Final = 60.0

Span = tuple[int, int]  # arrival of the first token and of the last but one (ns)

FITS_NOTHING: Final = "--engine "  # the beginning of that text


def published_slots(client: httpx.Client, server: Server, target: Target) -> int | None:
    """The number of batch slots on the server's page, or None."""
    if target.slots_from != "props":
        return None
    slots = _field_of_page(client, f"{server.url}/props", "total_slots")
    return slots if isinstance(slots, int) and slots > 0 else None


def published_version(client: httpx.Client, server: Server, target: Target) -> str | None:
    source = target.version_from
    if source is None:
        return None
    version = _field_of_page(client, f"{server.url}{source.path}", source.key)
    return version if isinstance(version, str) else None


def _field_of_page(client: httpx.Client, url: str, key: str) -> Any:
    """A field of a JSON page; None if the page or the field is missing."""
    try:
        return client.get(url).json()[key]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def published_blocks(samples: Sequence[MetricSample], target: Target) -> int | None:
    """The number of KV cache blocks, from a label of a metric."""
    source = target.blocks_from
    if source is None:
        return None
    for sample in samples:
        text = json.loads(sample.labels).get(source.label) if sample.name == source.name else None
        if text is not None and text.isdigit():
            return int(text)
    return None


def metrics_pages(typed: Sequence[str], server: Server, target: Target) -> list[str]:
    """The URLs to read; none if no metrics are known for this target."""
    if typed or not target.metrics:
        return list(typed)
    return [f"{server.url}/metrics"]


def scrape_note(interval_s: float | None, metrics_urls: Sequence[str]) -> str | None:
    if interval_s is not None:
        return None
    if not metrics_urls:
        return "nothing was scraped: figures that need /metrics are not measurable"
    return (
        "nothing was scraped while the load ran: figures that need gauges and counters over time "
        "are not measurable; /metrics was read before the load and after it"
    )


def scrape_warning(interval_s: float | None, target: Target) -> str | None:
    least_s = target.min_scrape_interval_s
    if interval_s is None or least_s is None or interval_s >= least_s:
        return None
    return (
        f"/metrics is read every {interval_s:g} s, but a server of kind {target.name} needs at "
        f"least {least_s:g} s: more frequent scrapes change how it cancels (see the target's file)"
    )


def unseen_metrics(
    samples: Sequence[MetricSample], metrics_urls: Sequence[str], target: Target
) -> str | None:
    """Names the target's metrics that are missing; None if there are all."""
    unseen = find_unseen({sample.name for sample in samples}, target.metrics)
    if not unseen:
        return None
    names = ", ".join(f"{target.metrics[role].name} ({role})" for role in unseen)
    text = f"not among the metrics at {' '.join(metrics_urls)}: {names}"
    if len(unseen) == len(target.metrics):
        return f"{FITS_NOTHING}{target.name} does not fit this server: {text}"
    return text


def count_slots(asker: Asker, *, longest_s: float) -> int | None:
    """How many requests the server runs at once; None if it shows no limit or does not serve.

    It takes seconds, some hundred short answers, and gives up after `LONGEST_COUNT_S`.
    """
    until_ns = asker.clock_ns() + int(LONGEST_COUNT_S * 1e9)

    def ask(num_streams: int, tokens: int) -> list[Span]:
        left_s = (until_ns - asker.clock_ns()) / 1e9
        if left_s <= 0:
            raise NotServedError(f"no limit was found within {LONGEST_COUNT_S:g} s")
        with ThreadPoolExecutor(max_workers=num_streams) as threads:
            prompts = [f"letter {tokens}/{i} of {num_streams}:" for i in range(num_streams)]
            answers = [
                threads.submit(asker.ask, prompt, tokens, longest_s=min(longest_s, left_s))
                for prompt in prompts
            ]
            times = [answer.result() for answer in answers]
        return [(of_one[0], of_one[-2]) for of_one in times if len(of_one) > 1]

    try:
        return find_limit(ask)
    except NotServedError:
        return None


def find_limit(ask: Callable[[int, int], Sequence[Span]]) -> int | None:
    """The smallest number of parallel streams at which one more waits.

    The number of streams doubles until fewer run at once than were sent. Answers of twice the
    length must confirm it: short streams may merely not have overlapped.
    """
    num_streams, tokens = FIRST_STREAMS, FIRST_TOKENS
    while num_streams <= MOST_STREAMS and tokens <= MOST_TOKENS:
        together = most_at_once(ask(num_streams, tokens))
        if together >= num_streams:
            num_streams *= 2
            continue
        tokens *= 2
        if most_at_once(ask(num_streams, tokens)) == together:
            return together
    return None


def most_at_once(spans: Sequence[Span]) -> int:
    """The largest number of spans that overlap at one moment."""
    starts, ends = sorted(first for first, _ in spans), sorted(last for _, last in spans)
    return max((i + 1 - bisect_right(ends, first) for i, first in enumerate(starts)), default=0)


class Preflight:
    """The questions of one run."""

    def __init__(
        self,
        resolved: ResolvedRun,
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
        """Note which server it is. Returns the URLs of its metrics pages."""
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
            version=published_version(self._client, server, self._target),
        )
        return metrics_urls

    def with_slots(self, server: Server) -> Server:
        """The server with its number of batch slots: published, or counted if the load needs it."""
        load = self._resolved.workload.load
        is_needed = isinstance(load, SlotRecoveryLoad) and load.slots is None
        told = published_slots(self._client, server, self._target)
        if told is not None:
            return self._keep_slots(server, told, "from its page /props")
        if server.slots is not None or not is_needed:
            return server
        self._progress.phase("trying how many requests the server runs at once")
        timeout_s = self._resolved.workload.run.timeout_s
        found = count_slots(
            asker_of(server, self._target, self._client, self._clock_ns), longest_s=timeout_s
        )
        if found is None:
            return server
        how = "the smallest number of parallel requests at which one more waits"
        return self._keep_slots(server, found, f"found by trying: {how}")

    def with_lengths(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with prompt lengths in tokens of this server's tokenizer."""
        if self._target.bytes_are_tokens:
            return plan
        self._progress.phase("calibrating prompt lengths on the server's tokenizer")
        try:
            scale = calibrate(self._client, plan)
        except CalibrationError as error:
            self._notes.warn(
                f"the length of prompts is not known in the server's tokens: {error}; one byte is "
                "counted as one token"
            )
            return plan
        self._manifest.prompt_scale = scale
        return plan.model_copy(update={"prompt_scale": scale})

    def note_clock(self, server: Server) -> None:
        """Check whether the stamps of a server with an exact log can be compared with ours."""
        try:
            check = check_clock(
                self._client, f"{server.url}/walkaway/clock", clock_ns=self._clock_ns
            )
        except SourceError as error:
            self._notes.warn(str(error))
            return
        self._manifest.clock = Clock(comparable=check.comparable, round_trip_ns=check.round_trip_ns)

    def read_first(self, pages: IdlePages) -> None:
        """Read the metrics pages before the load, and name the metrics that are missing."""
        if (samples := pages.samples()) is None:
            return
        self._manifest.idle.before = read_roles(samples, self._target.metrics)
        if self._manifest.target is not None:
            self._manifest.target.blocks_found = published_blocks(samples, self._target)
        text = unseen_metrics(samples, pages.urls, self._target)
        if text is None:
            return
        if text.startswith(FITS_NOTHING):
            self._notes.warn(text)
        self._progress.phase(text)

    def _keep_slots(self, server: Server, slots: int, how: str) -> Server:
        self._notes.add(f"batch slots: {slots}, {how}")
        if self._manifest.target is not None:
            self._manifest.target.slots_found = slots
        return replace(server, slots_found=slots)
