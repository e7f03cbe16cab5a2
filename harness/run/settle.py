"""After a load: the settle time, the idle metrics pages, and whether the server still serves.

The pages of the idle server are read before the load, after the settle time, and a little later,
also in a run without scraping.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

import httpx

from harness.client.dialect import dialect_of, limit_key_of, request_body
from harness.client.reader import Reader, StreamReader, UnaryReader
from harness.client.server_error import refusal_message
from harness.client.sse import EndlessEventError
from harness.client.stream import StreamMachine
from harness.collect.scrape import read_roles, read_samples
from harness.collect.source import Notes, SourceError
from harness.experiments.patience import settle_time
from harness.records import GAUGES, Delivery, MetricSample, Outcome, Role, StepRow
from harness.run.process import Interruption
from harness.run.refusal import LIMIT_KEYS, longer_length
from harness.store.manifest import Probing
from harness.workload.abandon import RequestSpec
from harness.workload.load import AbandonLoad
from harness.workload.target import Target
from harness.workload.workload import SettleSettings, Workload

Roles = Mapping[str, float]

# Counters that move while anything is computed.
_OF_WORK: Final = ("decode_calls", "generated_tokens")

# One scrape may fall between two requests, or between an abort and the next gauge update.
CALM_SCRAPES: Final = 3
LATER_S: Final = 1.0  # a ghost counts tokens within this time

PROBES: Final = 3
PROBE_TOKENS: Final = 4
LONGEST_PROBE_S: Final = 20.0
_LONGER_FOR_MORE: Final = 3  # times as long, where the server needs longer answers
_MOST_START: Final = 1 << 16  # bytes of an answer that may hold a refusal


def settle_seconds(target: Target, settings: SettleSettings, step_s: float | None) -> float:
    seconds = target.settle_s if settings.seconds is None else settings.seconds
    steps = target.settle_steps if settings.steps is None else settings.steps
    return settle_time(seconds, steps, step_s)


def leaves_in_silence(workload: Workload) -> bool:
    load = workload.load
    return isinstance(load, AbandonLoad) and any(plan.way.stays_open for plan in load.leavers)


def silence_seconds(target: Target, workload: Workload) -> float:
    """Extra settle time if users leave without closing: the server then notices only that its
    output has not got through for this long."""
    chosen_s = workload.settle.silence_seconds
    if not leaves_in_silence(workload):
        return 0.0
    return (target.silence_s or 0.0) if chosen_s is None else chosen_s


def typical_step_s(steps: Sequence[StepRow], latest: int = 500) -> float | None:
    if not steps:
        return None
    return median((row.ended_ns - row.started_ns) / 1e9 for row in steps[-latest:])


def may_end_early(target: Target) -> bool:
    """The settle time may end early only if all gauges are exact at any time."""
    trusted = [target.metrics[role].trust for role in target.metrics if role in GAUGES]
    return bool(trusted) and all(trust == "exact" for trust in trusted)


def is_back(before: Roles, now: Roles) -> bool:
    gauges = [role for role in GAUGES if role in before]
    return bool(gauges) and all(now.get(role) == before[role] for role in gauges)


class CalmWatch:
    """Watches the scrapes after the load until the server is as before.

    It counts the latest scrapes with every gauge as before the load, and notes since when no value
    has changed, counters included.
    """

    def __init__(self, before: Roles) -> None:
        self._before = before
        self._scraped_ns: int | None = None
        self._calm = 0
        self._values: Roles = {}
        self._still_since_ns = 0

    def take(self, scraped_ns: int, values: Roles) -> None:
        """Take a scrape's values by role; a repeated scrape is ignored."""
        if scraped_ns == self._scraped_ns:
            return
        self._scraped_ns = scraped_ns
        self._calm = self._calm + 1 if is_back(self._before, values) else 0
        if values != self._values:
            self._values, self._still_since_ns = values, scraped_ns

    @property
    def is_calm(self) -> bool:
        return self._calm >= CALM_SCRAPES

    def is_idle(self, now_ns: int, values: Roles) -> bool:
        """Do these values prove that nothing is computed or held?

        They do if none has changed for `LATER_S`, the gauges are as before the load, and a counter
        of computed tokens is among them. No second reading is then needed.
        """
        has_counter = any(role in values for role in _OF_WORK)
        stood_ns = now_ns - self._still_since_ns
        is_still = values == self._values and stood_ns >= LATER_S * 1e9
        return is_still and has_counter and is_back(self._before, values)


@dataclass(slots=True, kw_only=True)
class IdlePages:
    """The metrics pages of one run's idle server. An unreadable page is a warning, not an error."""

    client: httpx.Client
    urls: Sequence[str]
    target: Target
    notes: Notes
    clock_ns: Callable[[], int] = time.perf_counter_ns
    names_read: set[str] = field(default_factory=set)

    def samples(self) -> list[MetricSample] | None:
        """All samples; None without pages, or if one cannot be read."""
        if not self.urls:
            return None
        try:
            samples = read_samples(self.client, self.urls, clock_ns=self.clock_ns)
        except SourceError as error:
            self.notes.warn(str(error))
            return None
        self.names_read |= {sample.name for sample in samples}
        return samples

    def roles(self) -> dict[str, float]:
        return read_roles(self.samples() or [], self.target.metrics)

    def roles_later(
        self, before: Roles, after: Roles, *, interruption: Interruption
    ) -> dict[str, float]:
        """Read again after the reading `after`, until the counters show work or the longest step
        must have ended: a slot that is still held may be at work in that step."""
        is_held = after.get("running", 0.0) > before.get("running", 0.0)
        until_ns = self.clock_ns() + int(self.target.longest_step_s * 1e9)
        while True:
            interruption.pause(LATER_S)
            later = self.roles()
            may_work = is_held and all(later.get(role) == after.get(role) for role in _OF_WORK)
            if not may_work or self.clock_ns() >= until_ns or interruption.requested:
                return later


class NotServedError(Exception):
    """A request got a wrong answer or none; the message says which. `status`: HTTP's, of a request
    that was refused."""

    def __init__(self, message: str = "", status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class NoAnswerError(NotServedError):
    """No complete answer came, as opposed to a wrong one."""


class SilentServerError(NoAnswerError):
    """The whole time passed, and nothing of an answer came."""


class TextlessAnswerError(NotServedError):
    """A whole answer came, and its tokens were generated, but none of them was shown."""


class RefusedAnswerError(NotServedError):
    """The server refused the request, also if it did so with status 200. `body`: of its answer.
    `words`: of the server, if not all of the body."""

    status: int

    def __init__(self, status: int, body: bytes, words: str | None = None) -> None:
        super().__init__(refusal_message(status, body) if words is None else words, status)
        self.body = body


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Sends streaming requests and stamps their tokens.

    Each request has its own connection: llama.cpp closes one after a stream without notice,
    and a request sent at that moment fails.

    `fewest_tokens`: that the server takes as the limit of an answer, or that it needs until it
    shows text; shorter answers are asked for with this limit.
    """

    client: httpx.Client
    url: str
    target: Target
    model: str
    clock_ns: Callable[[], int]
    fewest_tokens: int = 1

    def ask(self, prompt: str, max_tokens: int, *, longest_s: float) -> Sequence[int]:
        """The arrival times of all text events (ns). Raises NotServedError."""
        return self.answer(prompt, max_tokens, longest_s=longest_s).token_times_ns

    def ask_for_text(self, prompt: str, max_tokens: int, *, longest_s: float) -> Sequence[int]:
        """As `ask`, but an answer that may be longer than `max_tokens` is left after `max_tokens`.
        If the server finds `max_tokens` too few, a longer answer is asked for, once."""
        try:
            return self._ask_for_text(prompt, max_tokens, longest_s=longest_s)
        except RefusedAnswerError as error:
            keys = {key for key in (limit_key_of(self.target), *LIMIT_KEYS) if key is not None}
            longer = longer_length(error.body, keys, max(max_tokens, self.fewest_tokens))
            if longer is None:
                raise
        patient = replace(self, fewest_tokens=longer)
        return patient._ask_for_text(prompt, max_tokens, longest_s=longest_s)

    def _ask_for_text(self, prompt: str, max_tokens: int, *, longest_s: float) -> Sequence[int]:
        is_bounded = limit_key_of(self.target) is not None and max_tokens >= self.fewest_tokens
        enough = None if is_bounded else max_tokens
        found = self.answer(prompt, max_tokens, longest_s=longest_s, enough=enough)
        return found.token_times_ns or [found.row().ended_ns]  # of documents: when all was there

    def answer(
        self, prompt: str, max_tokens: int, *, longest_s: float, enough: int | None = None
    ) -> StreamMachine:
        """A whole answer, with text, or its first `enough` tokens. Raises NotServedError."""
        if max_tokens < self.fewest_tokens:
            max_tokens, longest_s = self.fewest_tokens, longest_s * _LONGER_FOR_MORE
        body = request_body(self.target, self.model, prompt, max_tokens=max_tokens)
        dialect = dialect_of(self.target)
        spec = RequestSpec(
            user=0,
            max_tokens=max_tokens,
            prompt_tokens=0,
            role=Role.CHECK,
            delivery=Delivery.STREAM if dialect.generates else Delivery.UNARY,
        )
        now_ns = self.clock_ns()
        stream = StreamMachine(spec, sent_ns=now_ns, continuous_usage=False, dialect=dialect)
        start = bytearray()
        try:
            with self.client.stream(
                "POST",
                self.url + self.target.path,
                json=body,
                headers={"connection": "close"},
                timeout=longest_s,
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise RefusedAnswerError(response.status_code, response.read())
                stream.headers(response.status_code)
                until_ns = now_ns + int(longest_s * 1e9)
                self._read(response, stream, start, until_ns, max_tokens, enough)
        except httpx.ReadTimeout as error:
            why = f"{type(error).__name__} within {longest_s:g} s"
            raise (NoAnswerError if start else SilentServerError)(why) from error
        except httpx.HTTPError as error:
            raise NoAnswerError(f"{type(error).__name__} within {longest_s:g} s") from error
        except EndlessEventError as error:
            raise NotServedError(str(error)) from error
        if dialect.generates or stream.outcome is not Outcome.COMPLETED:
            _check_whole(stream, bytes(start))
        return stream

    def _read(
        self,
        response: httpx.Response,
        stream: StreamMachine,
        start: bytearray,
        until_ns: int,
        max_tokens: int,
        enough: int | None,
    ) -> None:
        """`start` is filled with what comes before any text."""
        is_stream = dialect_of(self.target).generates
        reader: Reader = StreamReader(stream, None) if is_stream else UnaryReader(stream)
        for chunk in response.iter_bytes():
            now_ns = self.clock_ns()
            if now_ns > until_ns:
                if stream.tokens_read > max_tokens:
                    raise NotServedError(_without_end(self.target))
                raise NoAnswerError("the answer took too long")
            if not stream.token_times_ns:
                start += chunk[:_MOST_START]
                del start[_MOST_START:]
            reader.read(chunk, now_ns)
            if stream.outcome is not None or (enough and stream.tokens_read >= enough):
                return
        reader.end()


def _without_end(target: Target) -> str:
    key = limit_key_of(target)
    why = "no limit was asked for" if key is None else f"is `{key}` ignored?"
    return f"an answer without end ({why})"


def _check_whole(stream: StreamMachine, start: bytes) -> None:
    """Raises NotServedError, and says which kind. `start`: what came before any text."""
    if stream.token_times_ns and stream.outcome in (Outcome.COMPLETED, None):
        return
    if stream.token_times_ns:
        raise NotServedError(stream.error or "the answer has no end")
    if stream.outcome is not Outcome.COMPLETED:
        raise RefusedAnswerError(httpx.codes.OK, start, stream.error or "the answer has no end")
    row = stream.row()
    is_cut = bool(row.completion_tokens) or row.finish_reason == "length"
    raise (TextlessAnswerError if is_cut else NotServedError)(stream.why_empty)


def longest_check_s(longest_s: float) -> float:
    """The longest time that `probe_service` takes."""
    return PROBES * min(longest_s, LONGEST_PROBE_S)


def probe_service(asker: Asker, *, longest_s: float) -> Probing:
    probing = Probing(sent=0, healthy=read_health(asker.client, asker.url))
    longest_s = min(longest_s, LONGEST_PROBE_S)
    while probing.sent < PROBES and not probing.errors:
        probing.sent += 1
        sent_ns = asker.clock_ns()
        try:
            times_ns = asker.ask_for_text("is anybody there?", PROBE_TOKENS, longest_s=longest_s)
        except NotServedError as error:
            probing.errors.append(str(error))
            probing.is_silent = isinstance(error, NoAnswerError)
        else:
            probing.ttft_s.append((times_ns[0] - sent_ns) / 1e9)
    return probing


def read_health(client: httpx.Client, url: str) -> bool | None:
    """False: a server error, or no answer. None: there is no such page, or it says nothing of
    health, as a redirect or a page that wants another key. Some servers answer any path with 200:
    LM Studio with an error in JSON, others with the page for browsers."""
    try:
        answer = client.get(f"{url}/health")
    except httpx.HTTPError:
        return False
    if answer.is_server_error:
        return False
    says_nothing = not answer.is_success or _is_html(answer) or says_error(answer)
    return None if says_nothing else True


def _is_html(answer: httpx.Response) -> bool:
    is_declared = "html" in answer.headers.get("content-type", "")
    return is_declared and answer.text.lstrip().startswith("<")


def says_error(answer: httpx.Response) -> bool:
    """A JSON object with an `error`, whatever its status is."""
    try:
        said = answer.json()
    except ValueError:
        return False
    return isinstance(said, dict) and bool(said.get("error"))
