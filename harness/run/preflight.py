"""The checks before the load: find the server, and ask for its version, slots, blocks, clock, and
the length of prompts in its tokens.

The answers go into the manifest. A missing answer is a note or a warning at most, never an error,
but for a page of GPU counters that the user named.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from harness.client.chunk import Look
from harness.client.dialect import dialect_of, limit_key_of, request_body
from harness.client.server_error import refusal_message
from harness.client.sse import EndlessEventError, events_of
from harness.client.stream import BUSY_STATUSES
from harness.collect.gpu import NO_COUNTERS, DcgmGpus, Gpus, open_nvml
from harness.collect.lifecycle import check_clock
from harness.collect.scrape import find_unseen, of_model, read_roles
from harness.collect.source import SourceError
from harness.errors import ConfigError, TargetError
from harness.experiments.limit import find_limit
from harness.http_client import http_client
from harness.place import is_here
from harness.records import Delivery, MetricSample, Protocol
from harness.run.loading import wait_for_page
from harness.run.process import Child
from harness.run.refusal import LIMIT_KEYS, longer_length
from harness.run.run_config import Access, ServerConfig
from harness.run.run_state import Preparation, RunState
from harness.run.server import (
    Server,
    attach,
    choose_runner,
    engine_command,
    start_command,
    start_engine,
)
from harness.run.settle import Asker, IdlePages, NoAnswerError, NotServedError
from harness.store.manifest import TargetFacts
from harness.workload.abandon import TaskPlan
from harness.workload.arms import unused_engine_settings
from harness.workload.load import AbandonLoad, AnyLoad, OccupancyLoad, SlotRecoveryLoad
from harness.workload.plan import LoadPlan
from harness.workload.prompts import PromptScale, fit_scale, prompt
from harness.workload.target import Target
from harness.workload.workload import EngineSettings, as_plain_data, choose_protocol

_NO_TORCH: Final = (
    "torch is not installed: the engine simulates its model (with steps of a fixed length)"
)
_SIZES: Final = (64, 256, 512, 1024)  # bytes; some 15 to 300 tokens of a usual tokenizer
_NO_USER: Final = -1  # the prompts differ from those of every user

LONGEST_COUNT_S: Final = 60.0


class UncountedSlotsError(TargetError):
    """The server did not answer the requests by which its batch slots are counted."""


def find_server(
    run: RunState, client: httpx.Client, children: ExitStack, *, takes_first_model: bool = False
) -> Server:
    """Find the server, or start it: it then ends with `children`. If no model is named, the server
    must list exactly one, unless the first is taken.

    Raises TargetError, ConfigError and InterruptedRunError.
    """
    config, settings, url = run.resolved.config, run.resolved.workload.engine, run.resolved.url
    command, log, engine = config.target_command, run.folder.log("engine"), None
    is_ours = url is None and command is None
    note_kind(run, config)
    ready: Mapping[str, Any] = {}
    load = run.resolved.workload.load
    if not is_ours and isinstance(load, AbandonLoad) and load.kill is not None:
        raise ConfigError(
            f"`load.kill` is {load.kill!r}: only processes of an engine that the run itself starts "
            "are killed: leave out --target"
        )
    if not is_ours and (note := unused_engine_settings(run.resolved.workload)) is not None:
        run.notes.add(note)
    if is_ours:
        teacher = _write_texts(run.resolved.workload.load, run.folder.teacher)
        protocol = choose_protocol(run.resolved.workload, run.target)
        engine, ready = start_our_engine(
            run, settings, log, children, model=config.model, teacher=teacher, protocol=protocol
        )
        url = str(ready["url"])
    elif command is not None:
        run.progress.phase(f"starting {command[0]}")
        engine, url = start_command(
            command,
            log,
            children,
            client=client,
            ready_s=config.ready_s,
            interruption=run.interruption,
        )
    else:
        run.progress.phase(f"connecting to {url}")
        if run.target.http and url is not None:
            wait_for_page(run, client, url)
    assert url is not None
    return attach(
        url,
        run.target,
        model=config.model,
        client=client,
        engine=engine,
        ready=ready,
        place=run.resolved.place,
        takes_first_model=takes_first_model,
    )


def note_kind(run: Preparation, config: ServerConfig) -> None:
    """Note how the kind of server was recognised, where it was not named."""
    if config.recognised:
        run.progress.phase(config.recognised)
        run.notes.add(config.recognised)


def start_our_engine(
    run: Preparation,
    settings: EngineSettings,
    log: Path,
    children: ExitStack,
    *,
    model: str | None,
    teacher: Path | None = None,
    protocol: Protocol = Protocol.HTTP,
) -> tuple[Child, Mapping[str, Any]]:
    """It ends with `children`. Returns its process and its ready line; raises as `start_engine`."""
    runner = choose_runner(settings)
    if settings.runner == "auto" and runner == "simulated":
        run.notes.add(_NO_TORCH)
        run.progress.phase(_NO_TORCH)
    run.progress.phase(f"starting the reference engine ({runner} runner)")
    typed = engine_command(settings, runner, model=model, teacher=teacher, protocol=protocol)
    return start_engine(typed, log, children, interruption=run.interruption)


def _write_texts(load: AnyLoad, file: Path) -> Path | None:
    """The known texts that the load asks for, one a line; None if it asks for none."""
    plans = load.leavers if isinstance(load, AbandonLoad) else ()
    texts = [text for plan in plans if isinstance(plan, TaskPlan) for text in plan.texts]
    if not texts:
        return None
    prompts = [text.prompt(text.prompt_tokens(load.prompt_tokens)) for text in texts]
    lines = [
        {"prompt": prompt, "text": text.text} for prompt, text in zip(prompts, texts, strict=True)
    ]
    file.write_bytes(msgspec.json.Encoder().encode_lines(lines))
    return file.resolve()


def note_target(run: RunState, client: httpx.Client, server: Server) -> TargetFacts:
    urls = metrics_pages(run.resolved.access, server)
    _note_scraping(run, urls)
    if _is_eager_unasked(run, server):
        run.notes.warn("engine.compile: the engine computes eagerly; its log says why")
    run.manifest.target = TargetFacts(
        engine=run.target.name,
        url=server.url,
        address=server.address,
        metrics_urls=urls,
        model=server.model,
        started_by_us=server.engine is not None,
        spec=as_plain_data(run.target),
        config=server.config,
        version=published_version(client, server, run.target),
    )
    return run.manifest.target


def metrics_pages(access: Access, server: Server) -> list[str]:
    """The pages that were named, else the server's own, if its target knows their metrics."""
    if access.metrics_urls or not (access.target.metrics and access.target.http):
        return access.metrics_urls
    return server.metrics_urls


def published_version(client: httpx.Client, server: Server, target: Target) -> str | None:
    source = target.version_from
    version = source and _field_of_page(client, server.url + source.path, source.key)
    return version if isinstance(version, str) else None


def _is_eager_unasked(run: RunState, server: Server) -> bool:
    """On CUDA, an engine that a run starts captures its steps unless a setting prevents it."""
    wanted, config = run.resolved.workload.engine.compile, server.config or {}
    if wanted is None and server.ready:
        wanted = config.get("device") == "cuda" and not config.get("batch_invariant")
    return bool(wanted) and config.get("compile") is False


def _note_scraping(run: RunState, urls: Sequence[str]) -> None:
    interval_s, least_s = run.manifest.scrape_interval_s, run.target.min_scrape_interval_s
    if interval_s is None:
        run.notes.add(
            "nothing was scraped while the load ran: figures that need gauges and counters over "
            "time are not measurable; /metrics was read before the load and after it"
            if urls
            else "nothing was scraped: figures that need /metrics are not measurable"
        )
    elif least_s is not None and interval_s < least_s:
        run.notes.warn(
            f"/metrics is read every {interval_s:g} s, but a server of kind {run.target.name} "
            f"needs at least {least_s:g} s: more frequent scrapes change how it cancels (see the "
            "target's file)"
        )


def _field_of_page(client: httpx.Client, url: str, key: str) -> Any:
    try:
        return client.get(url).json()[key]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def with_slots(run: RunState, facts: TargetFacts, server: Server, asker: Asker) -> Server:
    load = run.resolved.workload.load
    slots, how = published_slots(asker.client, server, run.target), "from its page /props"
    if slots is None:
        is_needed = isinstance(load, SlotRecoveryLoad | OccupancyLoad) and load.slots is None
        if server.slots is not None or not is_needed or not run.target.http:
            return server
        run.progress.phase(
            f"trying how many requests the server runs at once (at most {LONGEST_COUNT_S:g} s)"
        )
        try:
            slots = count_slots(asker, longest_s=run.timeout_s)
        except NotServedError as error:
            return replace(server, slots_unknown=why_not_counted(error, server))
        how = "found by trying: the smallest number of parallel requests at which one more waits"
    if slots is None:
        return server
    run.notes.add(f"batch slots: {slots}, {how}")
    facts.slots_found = slots
    return replace(server, slots_found=slots)


def why_not_counted(error: NotServedError, server: Server) -> str:
    """Raises UncountedSlotsError for a server that did not answer."""
    if isinstance(error, NoAnswerError):
        raise UncountedSlotsError(
            f"the server did not answer requests that were sent at once ({error}), by which its "
            "batch slots are counted: it is slow, or still works for clients that have left. Try "
            "again when it is idle, or name its slots with --set load.slots=N"
        ) from error
    if error.status in BUSY_STATUSES:
        return (
            f"it refuses requests beyond them ({error}): no probe can wait for a slot. "
            f"`walkaway conform --target {server.url}` judges such a server"
        )
    return f"trying failed ({error}); give it with --set load.slots=N"


def published_slots(client: httpx.Client, server: Server, target: Target) -> int | None:
    if target.slots_from != "props":
        return None
    slots = _field_of_page(client, f"{server.url}/props", "total_slots")
    return slots if isinstance(slots, int) and slots > 0 else None


def published_context(client: httpx.Client, server: Server) -> int | None:
    """Tokens of a prompt and its answer, by its list of models (vLLM, SGLang) or by its page /props
    (llama.cpp: of a slot)."""
    models = _field_of_page(client, f"{server.url}/v1/models", "data")
    settings = _field_of_page(client, f"{server.url}/props", "default_generation_settings")
    pages = [one for one in (*(models or ()), settings) if isinstance(one, dict)]
    lengths = [one.get("max_model_len") for one in pages if one.get("id") == server.model]
    lengths += [one.get("n_ctx") for one in pages]
    return next((one for one in lengths if isinstance(one, int) and one > 0), None)


def count_slots(asker: Asker, *, longest_s: float) -> int | None:
    """How many requests the server runs at once; None if it shows no limit within
    `LONGEST_COUNT_S`. It takes seconds, some hundred short answers. Raises NotServedError."""
    until_ns = asker.clock_ns() + int(LONGEST_COUNT_S * 1e9)

    def ask(num_streams: int, tokens: int) -> list[Sequence[int]]:
        left_s = (until_ns - asker.clock_ns()) / 1e9
        if left_s <= 0:
            raise _NoTimeLeftError
        with ThreadPoolExecutor(max_workers=num_streams) as threads:
            prompts = [f"letter {tokens}/{i} of {num_streams}:" for i in range(num_streams)]
            answers = [
                threads.submit(asker.ask, prompt, tokens, longest_s=min(longest_s, left_s))
                for prompt in prompts
            ]
            return [answer.result() for answer in answers]

    try:
        return find_limit(ask)
    except _NoTimeLeftError:
        return None


class _NoTimeLeftError(Exception):
    pass


class CalibrationError(Exception):
    """The server gave no usable token count; the message says why."""


def with_lengths(run: RunState, client: httpx.Client, server: Server, plan: LoadPlan) -> LoadPlan:
    scale = find_scale(run, client, server, plan)
    if scale is None:
        return plan
    run.manifest.prompt_scale = scale
    return plan.model_copy(update={"prompt_scale": scale})


def find_scale(
    run: Preparation, client: httpx.Client, server: Server, plan: LoadPlan
) -> PromptScale | None:
    """None: one byte counts as one token. The reference engine says itself whether its tokens are
    bytes: it may serve a checkpoint."""
    if (server.config or {}).get("bytes_are_tokens", run.target.bytes_are_tokens):
        return None
    if not run.target.http:
        run.notes.warn(
            "the length of prompts is not known in the server's tokens, which no answer over gRPC "
            "counts; one byte is counted as one token"
        )
        return None
    run.progress.phase("calibrating prompt lengths on the server's tokenizer")
    try:
        return calibrate(client, plan)
    except CalibrationError as error:
        run.notes.warn(
            f"the length of prompts is not known in the server's tokens: {error}; one byte is "
            "counted as one token"
        )
        return None


def calibrate(client: httpx.Client, plan: LoadPlan) -> PromptScale:
    samples = [(size, _prompt_tokens(client, plan, size)) for size in _SIZES]
    scale = fit_scale(samples)
    if scale is None:
        counts = ", ".join(f"{tokens} for {size} bytes" for size, tokens in samples)
        raise CalibrationError(f"the tokens that it counts fit no line ({counts})")
    return scale


def _prompt_tokens(client: httpx.Client, plan: LoadPlan, size: int) -> int:
    text = prompt(seed=plan.run.seed, user=_NO_USER, n=size, num_bytes=size)
    answer, key = _post(client, plan, text, 1), limit_key_of(plan.target)
    if answer.is_client_error and key is not None:  # some take no limit below 16
        more = longer_length(answer.content, {key, *LIMIT_KEYS}, 1)
        answer = answer if more is None else _post(client, plan, text, more)
    if answer.status_code != httpx.codes.OK:
        raise CalibrationError(refusal_message(answer.status_code, answer.content))
    looks = _looks(plan.target, answer)
    for look in looks:
        if look.error is not None:
            raise CalibrationError(look.error)
    usage = next((one.usage for one in looks if one.usage is not None), None)
    if usage is None or not usage.prompt_tokens:
        said = next((f": {words}" for one in looks if (words := one.unread or one.notice)), "")
        raise CalibrationError(f"its answers do not count the tokens of their prompts{said}")
    return usage.prompt_tokens


def _looks(target: Target, answer: httpx.Response) -> list[Look]:
    """What a whole answer says, or the stream that some servers send in its place."""
    look = dialect_of(target).look
    if "event-stream" not in answer.headers.get("content-type", ""):
        return look(answer.content, b"")
    try:
        events = list(events_of([answer.content], lambda: 0))
    except EndlessEventError as error:
        raise CalibrationError(str(error)) from error
    return [one for name, data in events for one in look(data, name)]


def _post(client: httpx.Client, plan: LoadPlan, text: str, max_tokens: int) -> httpx.Response:
    body = request_body(
        plan.target, plan.model, text, max_tokens=max_tokens, delivery=Delivery.UNARY
    )
    try:
        return client.post(
            plan.url.rstrip("/") + plan.target.path, json=body, timeout=plan.run.timeout_s
        )
    except httpx.HTTPError as error:
        raise CalibrationError(str(error)) from error


def note_clock(run: RunState, client: httpx.Client, server: Server) -> None:
    url = f"{server.url}/walkaway/clock"
    try:
        run.manifest.clock = check_clock(client, url, clock_ns=run.clock_ns)
    except SourceError as error:
        run.notes.warn(str(error))


def find_gpus(run: RunState, server: Server, *, is_local: bool) -> Gpus | None:
    """The GPUs that compute for the server: the bundled engine names its own, of another server all
    are taken. Raises ConfigError for a page that was named and shows none."""
    config, url = server.config or {}, run.resolved.workload.collect.gpu_metrics_url
    uuid, is_on_cpu = config.get("gpu_uuid"), config.get("device") == "cpu"
    if url is not None:
        if is_on_cpu:
            run.notes.warn(f"the engine computes on the CPU: the GPUs at {url} are not its own")
        return _exporter(run, url, uuid)
    if is_on_cpu:
        run.notes.add(f"{NO_COUNTERS}the engine computes on the CPU")
        return None
    if not is_local and not is_here(server.url):
        run.notes.add(
            f"{NO_COUNTERS}the server is on another machine; name the page of its DCGM exporter "
            "with --gpu-metrics-url"
        )
        return None
    return open_nvml(run.notes, run.clock_ns, uuid=uuid)


def _exporter(run: RunState, url: str, uuid: str | None) -> Gpus:
    # Headers and API key are for the server alone.
    client = http_client({}, ca_file=run.resolved.config.ca_file, timeout_s=5.0, longest_s=5.0)
    try:
        return DcgmGpus(client, url, run.clock_ns, uuid=uuid)
    except SourceError as error:
        client.close()
        raise ConfigError(f"--gpu-metrics-url: {error}") from error


def read_first(run: RunState, facts: TargetFacts, pages: IdlePages) -> None:
    if (samples := pages.samples()) is None:
        return
    if take_own_series(run, samples, facts.model):
        pages.target, facts.spec = run.target, as_plain_data(run.target)
    run.manifest.idle.before = read_roles(samples, run.target.metrics)
    facts.blocks_found = published_blocks(samples, run.target)
    note_misfit(run, samples, pages.urls)


def take_own_series(run: Preparation, samples: Sequence[MetricSample], model: str) -> bool:
    """Only this model's series count on a page of several. Returns whether it is such a page."""
    metrics = of_model(samples, run.target.metrics, model)
    if metrics == run.target.metrics:
        return False
    run.notes.add(f"the metrics page is of several models: only {model}'s series count")
    run.take_target(run.target.model_copy(update={"metrics": metrics}))
    return True


def note_misfit(run: Preparation, samples: Sequence[MetricSample], urls: Sequence[str]) -> None:
    misfit = metrics_misfit(samples, run.target, urls)
    if misfit is None:
        return
    text, is_whole = misfit
    if is_whole:
        run.notes.warn(text)
    run.progress.phase(text)


def metrics_misfit(
    samples: Sequence[MetricSample], target: Target, urls: Sequence[str]
) -> tuple[str, bool] | None:
    """Metrics of the target's file that are not on the server's pages, in words, and whether none
    of them is; None if all are there."""
    unseen = find_unseen({sample.name for sample in samples}, target.metrics)
    if not unseen:
        return None
    names = ", ".join(f"{target.metrics[role].name} ({role})" for role in unseen)
    text = f"not among the metrics at {' '.join(urls)}: {names}"
    if len(unseen) < sum(not one.optional for one in target.metrics.values()):
        return text, False
    return f"--engine {target.name} does not fit this server: {text}", True


def published_blocks(samples: Sequence[MetricSample], target: Target) -> int | None:
    """The blocks of all engines on the pages."""
    source = target.blocks_from
    if source is None:
        return None
    texts = [
        json.loads(sample.labels).get(source.label, "")
        for sample in samples
        if sample.name == source.name
    ]
    return sum(int(text) for text in texts if text.isdigit()) or None
