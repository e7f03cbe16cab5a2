"""The bench of every case: a server with its slots, its step, and the methods that time it.

The methods need no metrics, see docs/conform.md:

    P  probe behind full slots: `recovery`. Slots stay full, a short probe queues, one stream
       leaves. The control is in each try: before the leave the probe must wait. Judged in steps.
    O  occupancy: `held`. Some leave; then as many requests as slots start at once: as many as do
       not run together are slots still held.
    B  bystander: greedy streams beside a load, against a control without leaving.
    R  repeat: what the next request gets.
    W  wire: what the client saw.       C  counters: the server's own.

Streams that fill the slots are kept from try to try; only the one that left is replaced. They are
asked for twice the settle time, so that a slot that is still held cannot be one that ended.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from statistics import median
from typing import Any, Final, NamedTuple

import gevent
import httpx

from harness.collect.scrape import read_roles, read_samples
from harness.collect.source import SourceError
from harness.conform.facts import (
    ANOTHER_LOAD,
    MOST_SLOTS,
    PROMPT_TOKENS,
    READY_S,
    TOGETHER_TOKENS,
    Facts,
    find_facts,
)
from harness.conform.finding import Finding
from harness.conform.recovery import AT_ONCE, Bound, Conditions, Try, judge_recovery
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.http_client import http_client, read_api_key, request_headers
from harness.load.http2 import Http2Client, NoHttp2Error
from harness.load.lag import LagWatch
from harness.load.live import LiveStream, join_all
from harness.load.rows import most_at_once
from harness.load.session import LoadSession, canary_prompt
from harness.load.wire_log import WireLog
from harness.records import Delivery, MetricSample, Outcome, RequestRow, Role, WireClose
from harness.store.conform_result import Aftermath, Failure
from harness.workload.abandon import RequestSpec

READ_TOKENS: Final = (1, 16, 64)  # of the streams that leave, try by try
_PROBE_TOKENS: Final = 2
_CANARY_TOKENS: Final = 16
_QUEUED_STEPS: Final = 3  # that a probe waits, beyond its idle time, before the leave
_SLOW: Final = 10  # times the idle time to first token
_LEAST_SLOW_S: Final = 2.0
_BUSY: Final = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
_FEWEST_TOKENS: Final = 64
_PAGE_S: Final = 5.0
_NOT_OFFERED: Final = frozenset({400, 404, 405, 415, 422, 501})
_POLL_S: Final = 0.1
_SHOWN_STEPS: Final = 24  # by which a step is judged,
_GAP_TOKENS: Final = 4  # each gap over so many
_LONGEST_REST_S: Final = 90.0


class Asked(NamedTuple):
    """The part of an order that all its cases share. `metrics`: reads the target's pages."""

    settle_s: float
    tries: int
    is_quick: bool
    seed: int
    pid: int | None = None
    direct: str | None = None
    metrics: Callable[[], list[MetricSample]] | None = None
    metrics_urls: Sequence[str] = ()


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


class Counted(NamedTuple):
    """Requests sent at once: the most that ran together, and those that got no token."""

    at_once: int
    waiting: int


class _Leaving(NamedTuple):
    """How the stream of a case comes and goes (see `Bench.recovery`)."""

    spec: RequestSpec
    begin: Callable[[RequestSpec], LiveStream]
    ready: Callable[[LiveStream, int], object]
    leave: Callable[[LiveStream], object]


class Bench:
    """`slots`: how many requests the server runs at once. `step_s`, `ttft_s`: of the idle server.
    `tries`: of a case that is judged by method P. Reading `slots` raises CannotDecideError where
    they are not known."""

    def __init__(
        self, session: LoadSession, facts: Facts, asked: Asked, lag: LagWatch, wire: WireLog
    ) -> None:
        self.session = session
        self.facts = facts
        self.asked = asked
        self._lag = lag
        self.wire = wire
        self.step_s, self.ttft_s = facts.step_s, facts.ttft_s
        self.settle_s, self.tries, self.is_quick = asked.settle_s, asked.tries, asked.is_quick
        self.rng = random.Random(asked.seed)
        self._streams: list[LiveStream] = []
        self._fillers: list[LiveStream] = []
        self.fitting_prompt: int | None = None  # tokens, of method K
        self.running: int | None = None  # of as many requests as slots, when last all was at rest
        self._canary: str | None = None
        self._resets = 0
        self._before: list[float] = []

    # The server

    @property
    def slots(self) -> int:
        slots = self.facts.slots
        if slots is None or slots > MOST_SLOTS:
            raise CannotDecideError(
                f"this case needs a server whose slots can be filled, but {self.facts.why}: start "
                "it with 4 to 8 slots (such as --max-num-seqs 8, --parallel 8)"
            )
        return slots

    @property
    def lag_s(self) -> float:
        """How late this client is, at the median of the latest seconds."""
        latest = self._lag.latest_ns
        return median(latest) / 1e9 if latest else 0.0

    @property
    def patience_s(self) -> float:
        """How long a probe is waited for: the settle time, or half of what a long answer takes."""
        return min(self.settle_s, self.long_tokens * self.step_s / 2)

    @property
    def long_tokens(self) -> int:
        """An answer that runs on for more than twice the settle time, if the context allows."""
        wanted = int(2.2 * self.settle_s / self.step_s) + max(READ_TOKENS) + 32
        room = (self.facts.context or 1 << 20) - 4 * PROMPT_TOKENS
        return max(_FEWEST_TOKENS, min(wanted, room))

    # Requests

    def long(self, **changes: Any) -> RequestSpec:
        """A request whose answer runs on; `changes` are fields of RequestSpec."""
        spec = RequestSpec(user=0, max_tokens=self.long_tokens, prompt_tokens=PROMPT_TOKENS)
        return replace(spec, **changes)

    def short(self, tokens: int = 8, **changes: Any) -> RequestSpec:
        return self.long(**{"max_tokens": tokens, **changes})

    def probe(self) -> RequestSpec:
        return self.short(_PROBE_TOKENS, role=Role.PROBE)

    def start(
        self, spec: RequestSpec, text: str | None = None, *, session: LoadSession | None = None
    ) -> LiveStream:
        """It ends with the case at the latest, and its answer with the server's context. `session`:
        with other settings than the bench's."""
        room = (self.facts.context or 1 << 20) - spec.prompt_tokens - PROMPT_TOKENS
        tokens = max(1, min(spec.max_tokens, room))
        spec = replace(spec, max_tokens=tokens, user=spec.user or len(self._streams))
        stream = LiveStream(session or self.session, spec, text)
        self._streams.append(stream)
        return stream

    def pause(self, seconds: float) -> None:
        gevent.sleep(seconds)

    def ask(
        self, spec: RequestSpec, text: str | None = None, *, session: LoadSession | None = None
    ) -> RequestRow:
        """Read to its end. Raises CannotDecideError if that takes too long."""
        stream = self.start(spec, text, session=session)
        limit_s = READY_S + 4 * (self.ttft_s + spec.max_tokens * self.step_s)
        row = stream.join(limit_s)
        if row is None:
            raise CannotDecideError(f"a request was not answered in {limit_s:.0f} s")
        return row

    def whole(
        self, spec: RequestSpec, text: str | None = None, *, session: LoadSession | None = None
    ) -> RequestRow:
        """Like `ask`; raises CannotDecideError unless it is answered whole."""
        return whole(self.ask(spec, text, session=session), "a request of the set-up")

    def offered(self, spec: RequestSpec, what: str, text: str | None = None) -> RequestRow:
        """Its whole answer. Raises RefusedError if the server says that it does not offer this."""
        row = self.ask(spec, text)
        if row.status_code in _NOT_OFFERED:
            raise RefusedError(f"{what}: {row.error}")
        return whole(row, what)

    def rows(self) -> list[RequestRow]:
        """The case's streams, as far as they have ended."""
        return [stream.row for stream in self._streams if stream.row is not None]

    def whole_at_once(self, tokens: int) -> list[RequestRow]:
        """As many whole answers as slots, asked for at once."""
        streams = [self.start(self.short(tokens, role=Role.CHECK)) for _ in range(self.slots)]
        rows = join_all(streams, READY_S)
        if None in rows:
            raise CannotDecideError(f"short requests were not answered in {READY_S:g} s")
        return [whole(row, "a short request") for row in rows if row is not None]

    def session_that_keeps(self) -> LoadSession:
        """A session whose connections carry one request after the other; the caller closes it."""
        plan = self.session.plan
        run = plan.run.model_copy(update={"keep_alive": True})
        return self.session.with_plan(plan.model_copy(update={"run": run}))

    @contextmanager
    def over_http2(self) -> Iterator[None]:
        """All requests go over HTTP/2. Raises RefusedError if the server does not speak it."""
        usual = self.session
        plan = usual.plan
        self.session = session = usual.with_plan(plan)
        session.client = client = Http2Client(
            plan, api_key=read_api_key(plan.api_key_env), wire=self.wire
        )
        try:
            client.connection(client.frontend_of(0))
            yield
        except NoHttp2Error as error:
            raise RefusedError(f"the server speaks no HTTP/2: {error}") from error
        except httpx.TransportError as error:
            raise CannotDecideError(f"no connection for HTTP/2: {error}") from error
        finally:
            self.end_case()
            session.close()
            self.session = usual

    @contextmanager
    def polling(self) -> Iterator["Polled"]:
        """Read the first metrics page ten times a second, and look at nothing in it."""
        polled = Polled(self.asked.metrics_urls[0])
        headers = request_headers(self.session.plan.headers, self.session.plan.api_key_env)
        with http_client(
            headers, ca_file=self.session.plan.ca_file, timeout_s=_PAGE_S, longest_s=_PAGE_S
        ) as client:
            reader = gevent.spawn(polled.keep_reading, client)
            try:
                yield polled
            finally:
                reader.kill()

    # Method P

    def fill(self, streams: int | None = None) -> list[LiveStream]:
        """Let so many long streams run (default: a stream a slot). Those of the last try are kept
        while they have more left than a probe is waited for."""
        wanted = self.slots if streams is None else streams
        reserve = self.patience_s / self.step_s + max(READ_TOKENS) + 32
        kept = []
        for filler in self._fillers:
            if not filler.has_ended and filler.spec.max_tokens - filler.tokens > reserve:
                kept.append(filler)
            else:
                filler.leave()
        for extra in kept[wanted:]:
            extra.leave()
        self._fillers = kept[:wanted]
        while len(self._fillers) < wanted:
            self._fillers.append(self.start(self.long(role=Role.FILLER)))
        for number, filler in enumerate(self._fillers):
            if not filler.wait_tokens(1, READY_S / 3):
                row, self._fillers = filler.row, self._fillers[:number]
                raise CannotDecideError(
                    f"only {number} of {wanted} long streams ran at once"
                    + (f": {row.error}" if row is not None and row.error else "")
                )
        return list(self._fillers)

    def queue_probe(self) -> LiveStream:
        """A short request behind full slots; returns when it has surely waited.

        Raises CannotDecideError if it is served: then the slots were not full.
        """
        probe = self.start(self.probe())
        if probe.wait_tokens(1, self.ttft_s + _QUEUED_STEPS * self.step_s):
            raise CannotDecideError(
                f"the control's probe did not wait: {self.slots} streams do not fill the server's "
                "slots (--slots N names their number)"
            )
        if probe.row is not None:
            raise CannotDecideError(
                f"a request that should queue was refused: {probe.row.error or probe.row.outcome}"
            )
        return probe

    def recovery(
        self,
        spec: RequestSpec | None = None,
        *,
        leave: Callable[[LiveStream], object] = LiveStream.leave,
        ready: Callable[[LiveStream, int], object] | None = None,
        begin: Callable[[RequestSpec], LiveStream] | None = None,
        tokens: Sequence[int] = READ_TOKENS,
        queues_first: bool = True,
        bound: Bound = AT_ONCE,
    ) -> Finding:
        """Method P: a stream of this `spec` (default: a long one) leaves, and a probe gets its
        slot. `begin` starts it. `ready` waits until it may leave, and gets the number of the try;
        by default it has read one of `tokens`. `leave` is the act; the stream's `abandoned_ns` is
        t0. Not `queues_first`: the probe is sent at t0, since the stream leaves too early for one
        to queue behind it."""

        def until_read(leaver: LiveStream, number: int) -> None:
            leaver.wait_tokens(tokens[number % len(tokens)], READY_S)

        way = _Leaving(spec or self.long(), begin or self.start, ready or until_read, leave)
        tries: list[Try] = []
        self._resets = 0
        self.watch_steps()
        if not queues_first:  # the control, since no probe of these tries queues before the leave
            self._hand_over()
            self._before = self.steps_at_rest()
        for number in range(self.tries):
            self.wire.begin_try(number)
            tries.append(self._try_queued(way, number) if queues_first else self._try(way, number))
            if tries[-1].recovery_s is None:
                break
        finding = self.judged(tries, bound)
        finding.evidence["left_by_reset"] = self._resets
        return finding

    def watch_steps(self) -> None:
        """Begin a case of method P: all slots but one are full, and the client's lag is noted. No
        stream is left for this: a server that did not notice would still run it."""
        self._before = []
        self._lag.latest_ns.clear()
        self.fill(self.slots - 1)
        gevent.sleep(12 * self.step_s)

    def judged(self, tries: Sequence[Try], bound: Bound = AT_ONCE) -> Finding:
        """After `watch_steps` and the tries. Raises CannotDecideError."""
        after = self.steps_at_rest()
        now = Conditions.of(self._before or after, after, self.lag_s)
        finding = judge_recovery(tries, now, bound)
        finding.evidence["ttft_ms"] = round(1e3 * self.ttft_s, 3)
        return finding

    def note_steps(self) -> None:
        """Right before a leave; the first one of a case counts."""
        self._before = self._before or self.steps_now()

    def _try_queued(self, way: "_Leaving", number: int) -> Try:
        self.fill(self.slots - 1)
        leaver = way.begin(replace(way.spec, role=Role.USER))
        self._wait_admitted(leaver)
        probe = self.queue_probe()
        way.ready(leaver, number)
        gevent.sleep(self.rng.random() * self.step_s)
        return self._leave_and_time(way, leaver, probe)

    def _try(self, way: "_Leaving", number: int) -> Try:
        self.fill(self.slots - 1)
        leaver = way.begin(replace(way.spec, role=Role.USER))
        way.ready(leaver, number)
        probe = self.start(self.probe())
        return self._leave_and_time(way, leaver, probe)

    def _hand_over(self, more_tokens: int = 0) -> Try:
        """A slot changes hands because its answer has ended: the control of a leave."""
        self.fill(self.slots - 1)
        tokens = int(self.ttft_s / self.step_s) + 4 * _QUEUED_STEPS + more_tokens
        ender = self.start(self.short(tokens, role=Role.FILLER))
        if not ender.wait_tokens(1, READY_S / 3):
            raise CannotDecideError(f"a short request did not begin: {_end(ender)}")
        probe = self.queue_probe()
        self.note_steps()
        if ender.join(READY_S) is None:
            raise CannotDecideError(f"a short request had no end in {READY_S:g} s")
        return self.time_probe(probe, lambda: ender.last_token_ns)

    def check_alone(self) -> Finding:
        """The control of a red, after `rest`: slots whose answers end by themselves serve another
        request in time. Raises CannotDecideError if they do not: then another load takes them.
        Slots that stay lost after every stream has ended are left out from here on."""
        if self.facts.slots is None or self.facts.slots > MOST_SLOTS:
            return Finding(None, "no slots are known that another load could take", {})
        if self.running == 0:
            if self.serves():
                raise CannotDecideError(f"{ANOTHER_LOAD}: a short request waits long for a slot")
            return Finding(Failure.NEVER, "the server serves no request any more", {})
        more = [0] * self.tries
        if self.running is not None and self.running < self.slots:
            # Are they lost, or taken? Another load's come free while a probe waits so long.
            more = [int(self.patience_s / self.step_s)]
            self.facts = self.facts._replace(slots=self.running)
        self.watch_steps()
        try:
            tries = [self._hand_over(tokens) for tokens in more]
        except CannotDecideError as error:
            raise CannotDecideError(f"{ANOTHER_LOAD}: {error}") from error
        control = self.judged(tries)
        if control.failure is not None:
            raise CannotDecideError(
                f"{ANOTHER_LOAD}: a slot whose answer ended by itself was {control.failure}, too "
                f"({control.reason})"
            )
        return control

    def serves(self) -> bool:
        """A short request is answered, however long it waits for a slot."""
        row = self.start(self.short()).join(READY_S)
        return row is not None and row.outcome is Outcome.COMPLETED

    def _leave_and_time(self, way: "_Leaving", leaver: LiveStream, probe: LiveStream) -> Try:
        if leaver.has_ended:
            raise CannotDecideError(f"the stream that was to leave ended by itself: {_end(leaver)}")
        if probe.tokens:
            raise CannotDecideError("the control's probe did not wait: it began before the leave")
        self.note_steps()
        way.leave(leaver)
        tried = self.time_probe(probe, lambda: leaver.abandoned_ns)
        self._resets += leaver.row is not None and leaver.row.wire_close is WireClose.RST
        return tried

    def _wait_admitted(self, leaver: LiveStream) -> None:
        if leaver.spec.delivery is Delivery.UNARY:
            gevent.sleep(self.ttft_s + 4 * self.step_s)
        elif not leaver.wait_tokens(1, READY_S / 3):
            raise CannotDecideError(f"the stream that was to leave did not begin: {_end(leaver)}")

    def time_probe(
        self,
        probe: LiveStream,
        since: Callable[[], int | None] = lambda: 0,
        *,
        idle_s: float | None = None,
    ) -> Try:
        """Wait for its first token. `since`: the moment (ns) from which a slot could work for it,
        if not from its sending; asked for when the wait is over. `idle_s`: its first-token time
        where nothing is in its way, if it is no short request."""
        idle_s = self.ttft_s if idle_s is None else idle_s
        patience_s = idle_s + self.patience_s
        probe.wait_tokens(1, patience_s)
        if (t0_ns := since()) is None:
            raise CannotDecideError("the stream that was to leave could not")
        since_ns = max(t0_ns, probe.spec.intended_start_ns)
        others = None
        if self._fillers:
            others = sum(at_ns > since_ns for at_ns in self._fillers[0].token_times_ns)
        if probe.first_token_ns is None:
            if probe.row is not None:
                raise CannotDecideError(f"the probe was not answered: {_end(probe)}")
            return Try(None, patience_s, others)
        # A busy client may read a last token after the first one of the stream in its place.
        if probe.first_token_ns < t0_ns - 2e9 * self.step_s:
            raise CannotDecideError("the control's probe did not wait: it began before the leave")
        waited_s = (probe.first_token_ns - since_ns) / 1e9
        probe.join(READY_S)
        return Try(waited_s - idle_s - self.lag_s, waited_s, others)

    def steps_now(self) -> list[float]:
        """The gaps between the latest tokens of the streams that fill the slots, in seconds."""
        times = [filler.token_times_ns for filler in self._fillers]
        gaps = [gap for of_one in times for gap in latest_gaps(of_one)]
        if self.slots == 1:
            return [self.step_s, self.step_s]  # no stream runs beside the one that leaves
        if len(gaps) < 2:
            raise CannotDecideError("the streams show no step: their tokens come in one piece")
        return gaps

    def steps_at_rest(self) -> list[float]:
        """The next steps, in seconds: no prompt is computed beside them."""
        self.pause(_SHOWN_STEPS * self.step_s)
        return self.steps_now()

    # Method O

    def held(self, leave: Callable[[], int], *, settle: bool = True) -> int:
        """`leave` makes some leave and returns how many; the slots then still held at the end of
        the settle time. A count that finds none is final: it cannot get better."""
        leave()
        settled_ns = time.perf_counter_ns() + int(self.settle_s * 1e9)
        counted = self.count_running(self.settle_s if settle else self._together_s)
        if settle and counted.at_once < self.slots and not counted.waiting:
            gevent.sleep(max(0.0, (settled_ns - time.perf_counter_ns()) / 1e9))
            counted = self.count_running(self._together_s)
        return self.slots - counted.at_once

    def running_at_once(self, extra: int = 0) -> int:
        """How many of as many requests as slots (and some more) run at the same time."""
        return self.count_running(self._together_s, extra).at_once

    @property
    def _together_s(self) -> float:
        """As many short requests as slots take half of it on a server with nothing else to do."""
        return 2 * self.ttft_s * (1 + self.slots) + 4 * TOGETHER_TOKENS * self.step_s

    def count_running(self, longest_s: float, extra: int = 0) -> "Counted":
        """They are read to their end: abandoned, they could themselves hold slots."""
        asked = self.short(TOGETHER_TOKENS, role=Role.CHECK)
        streams = [self.start(asked) for _ in range(self.slots + extra)]
        until_ns = time.perf_counter_ns() + int(longest_s * 1e9)
        rows = join_all(streams, longest_s)
        for row in rows:
            if row is not None:
                whole(row, "a request that counts the slots")
        times = [[t_ns for t_ns in stream.token_times_ns if t_ns <= until_ns] for stream in streams]
        return Counted(most_at_once(times), sum(not one for one in times))

    # Methods B, R, C

    def counters(self) -> dict[str, float]:
        """The target's metrics by role, read now. Raises RefusedError without any."""
        return read_roles(self.samples(), self.session.plan.target.metrics)

    def samples(self) -> list[MetricSample]:
        """All that the target's metrics pages show now. Raises RefusedError without any."""
        if self.asked.metrics is None:
            raise RefusedError("no metrics page is known (--metrics-url), or none of its metrics")
        return self.asked.metrics()

    def past_the_proxy(self) -> "Bench":
        """A bench on the server behind it. Raises CannotDecideError if that is not known."""
        if self.asked.direct is None:
            raise CannotDecideError("the server behind the proxy is not known (--direct URL)")
        plan = self.session.plan.model_copy(update={"url": self.asked.direct, "urls": []})
        session = self.session.with_plan(plan)
        facts = find_facts(session, slots=self.slots, context=self.facts.context)
        return Bench(session, facts, self.asked, self._lag, self.wire)

    # Between the cases

    def learn_canary(self) -> None:
        """A greedy answer to compare with later; none if the server does not repeat itself."""
        first, second = (self._ask_canary(READY_S) for _ in range(2))
        is_stable = first is not None and second is not None and first.answer == second.answer
        self._canary = first.answer if is_stable and first is not None else None

    def _ask_canary(self, longest_s: float) -> RequestRow | None:
        scale = self.session.plan.prompt_scale
        text = canary_prompt(0, tokens=PROMPT_TOKENS, scale=scale)
        return self.start(self.short(_CANARY_TOKENS, role=Role.CANARY), text).join(longest_s)

    def end_case(self) -> None:
        """Nothing of the case stays in flight."""
        for stream in self._streams:
            if not stream.has_ended:
                stream.leave()
        join_all(self._streams, 1.0)
        self._fillers.clear()

    def aftermath(self) -> tuple[Aftermath, str]:
        answered_s = _SLOW * (self.ttft_s + _CANARY_TOKENS * self.step_s)
        longest_s = max(2 * self.settle_s, answered_s, _LEAST_SLOW_S)
        row = self._ask_canary(longest_s)
        until_ns = time.perf_counter_ns() + int(self.settle_s * 1e9)
        while row is not None and row.outcome is not Outcome.COMPLETED:
            if time.perf_counter_ns() > until_ns:
                if row.status_code in _BUSY:
                    return Aftermath.SLOW, f"a short request is refused: {row.error}"
                if row.outcome is Outcome.TIMED_OUT:
                    return Aftermath.WEDGED, f"a short request is not answered: {row.error}"
                return Aftermath.DEAD, f"the server no longer serves: {row.error or row.outcome}"
            gevent.sleep(0.1)
            row = self._ask_canary(longest_s)
        if row is None:
            return Aftermath.WEDGED, f"no answer to a short request within {longest_s:.0f} s"
        if self._canary is not None and row.answer != self._canary:
            return Aftermath.WRONG_TEXT, "a greedy answer has changed"
        ttft_s = ((row.first_token_ns or row.ended_ns) - row.sent_ns) / 1e9
        if ttft_s > max(_SLOW * self.ttft_s + self.step_s, _LEAST_SLOW_S):
            return Aftermath.SLOW, f"first token after {ttft_s:.2f} s"
        return Aftermath.CLEAN, ""

    def rest(self) -> None:
        """Wait until the slots are free for the next case, at most until every stream that was left
        must have ended by itself."""
        slots = self.facts.slots
        now_ns = time.perf_counter_ns()
        until_ns = now_ns + int(1e9 * min(_LONGEST_REST_S, self._ghosts_s()))
        self.running = None
        while slots is not None and slots <= MOST_SLOTS and time.perf_counter_ns() < until_ns:
            try:
                self.running = self.running_at_once()
                if self.running >= slots:
                    break
            except CannotDecideError:
                gevent.sleep(self.settle_s / 4)
        self.end_case()
        self._streams.clear()

    def check_free(self, *, wholly: bool) -> None:
        """A case must not be blamed for slots that were taken before it. `wholly`: each counts;
        else at least one has to be free."""
        if self.running is not None and self.running < self.slots:
            self.rest()
        if self.running is not None and self.running < (self.slots if wholly else 1):
            raise CannotDecideError(
                f"only {self.running} of {self.slots} slots were free before this case: "
                f"{ANOTHER_LOAD}, or a case before lost the others"
            )

    def _ghosts_s(self) -> float:
        """How long the streams that were left would run on, if the server has not noticed."""
        left = 0
        for stream in self._streams:
            row = stream.row
            if row is not None and row.outcome is Outcome.ABANDONED:
                left += stream.spec.n * stream.spec.max_tokens - row.tokens_read
        longest = min(left, self.long_tokens)
        return 1.5 * (self.ttft_s + (longest + left / (self.facts.slots or 1)) * self.step_s)


def whole(row: RequestRow, what: str) -> RequestRow:
    """Raises CannotDecideError unless it was answered whole."""
    if row.outcome is not Outcome.COMPLETED:
        raise CannotDecideError(f"{what} was not answered: {row.error or row.outcome}")
    return row


def latest_gaps(times_ns: Sequence[int]) -> list[float]:
    """Each over some tokens: a busy client may read a few at once."""
    latest = times_ns[-_SHOWN_STEPS:]
    pairs = zip(latest, latest[_GAP_TOKENS:], strict=False)
    return [(late - early) / 1e9 / _GAP_TOKENS for early, late in pairs]


def _end(stream: LiveStream) -> str:
    row = stream.row
    return "no end yet" if row is None else row.error or row.finish_reason or row.outcome


def read_metrics(client: httpx.Client, urls: Sequence[str]) -> Callable[[], list[MetricSample]]:
    def read() -> list[MetricSample]:
        try:
            return read_samples(client, urls, clock_ns=time.perf_counter_ns)
        except SourceError as error:
            raise CannotDecideError(str(error)) from error

    return read
