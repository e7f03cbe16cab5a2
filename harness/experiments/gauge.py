"""Gauge: how long the server's own count of running requests stays up after a leave.

For a server that nobody else uses at the time; for a server in use see `averaged` and `gentle`.
The count is read many times a step. The controls are answers that end by themselves: a gauge that
is late is late for both. A stream that leaves early may be counted only after it has left: the
gauge must then be down for longer than a request takes to be counted. This way cannot see below
half a poll and the gauge's own lag, nor anything that the server does not count: a stream that the
server takes off the gauge and still computes for nobody.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, NamedTuple

from harness.client.live_stream import LiveStream
from harness.experiments.holds import Holds, Leaver, has_no_end, wait_again_s
from harness.experiments.idle_server import ServerFacts
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import QUEUED_STEPS, READY_S
from harness.experiments.readings import (
    Reading,
    Readings,
    RunningGauge,
    gauge_lag_s,
    poll_of,
    why_no_gauge,
)
from harness.experiments.streams import Streams, end_of
from harness.records import Delivery, Role
from harness.store.conform_result import JudgingWay

_AT_REST_S: Final = 0.25
_AT_REST_READINGS: Final = 10
_CONTROL_STEPS: Final = 12
_SPARE_S: Final = 2.0  # that a ghost still runs on while another stream is tried


class Fall(NamedTuple):
    """A fall between two readings: `at_s` is their middle, `half_s` half their distance."""

    at_s: float
    half_s: float


def find_fall(readings: Sequence[Reading], since_s: float, rest: float) -> Fall | None:
    """The fall of the gauge to `rest` for good, at `since_s` or later; None: there was none. It is
    taken to be above `rest` before `since_s`."""
    above_s, down_s = since_s, None
    for one in readings:
        if one.at_s < since_s:
            continue
        if one.value > rest:
            above_s, down_s = one.at_s, None
        elif down_s is None:
            down_s = one.at_s
    if down_s is None:
        return None
    return Fall((above_s + down_s) / 2, (down_s - above_s) / 2)


class GaugeWatcher:
    way: JudgingWay = "gauge"

    def __init__(self, streams: Streams, urls: Sequence[str], rng: random.Random) -> None:
        self._streams = streams
        self._urls = urls
        self._rng = rng

    def can_judge(self, facts: ServerFacts) -> str | None:  # noqa: ARG002  other ways need them
        return why_no_gauge(self._streams.session.plan.target, self._urls)

    def holds(self, leaver: Leaver, tries: int) -> Holds:
        with self._reading() as readings:
            return self._holds(readings, leaver, tries)

    def held(self, leave: Callable[[], int]) -> int:
        """`leave` makes some streams leave and returns their number. Returns how many streams are
        still counted when the settle time is over. Raises CannotDecideError."""
        server = self._streams
        with self._reading() as readings:
            rest = self._at_rest(readings)
            leave()
            since_s = time.perf_counter()
            self._fall(readings, since_s, rest, sure_s=self._sure_s, longest_s=server.settle_s)
            return max(0, round(min(readings.level(_AT_REST_READINGS)) - rest))

    def reading(self) -> int:
        """The streams that are counted at this moment."""
        with self._reading() as readings:
            return round(min(readings.level(_AT_REST_READINGS)))

    def now(self) -> int:
        """The streams that are counted when all of ours must have ended."""
        with self._reading() as readings:
            return round(self._at_rest(readings))

    @contextmanager
    def _reading(self) -> Iterator[Readings]:
        server, plan = self._streams, self._streams.session.plan
        gauge = RunningGauge(plan, self._urls)
        poll_s = poll_of(plan.target, server.step_s)
        try:
            with Readings(gauge.read, poll_s=poll_s, rng=self._rng) as readings:
                yield readings
        finally:
            gauge.close()

    @property
    def _sure_s(self) -> float:
        """The time after which a request that was sent is counted."""
        server = self._streams
        lag_s = gauge_lag_s(server.session.plan.target, server.step_s)
        return server.ttft_s + lag_s + QUEUED_STEPS * server.step_s

    def _holds(self, readings: Readings, leaver: Leaver, tries: int) -> Holds:
        server, target = self._streams, self._streams.session.plan.target
        rest = self._at_rest(readings)
        tries_s: list[float | None] = []
        controls_s, halves_s = list[float](), list[float]()
        naturals_s = list[float]()
        while len(tries_s) < tries or tries_s[-1:] == [None]:
            longest_s = server.patience.probe_s
            if tries_s[-1:] == [None]:
                longest_s = wait_again_s(controls_s, longest_s)
            stream, fall = self._try(readings, leaver, len(tries_s), rest, longest_s)
            assert stream.abandoned_ns is not None
            tries_s.append(None if fall is None else fall.at_s - stream.abandoned_ns / 1e9)
            left_s = (stream.spec.max_tokens - stream.tokens) * server.step_s
            naturals_s.append(left_s)
            if has_no_end(tries_s):
                break
            if fall is None and left_s - longest_s < _SPARE_S:  # it would end in the next try
                server.wait_for_ghosts(lambda: False)
            elif fall is None:  # a ghost of ours may still be counted
                rest = min(readings.level(2))
            else:
                halves_s.append(fall.half_s)
            controls_s.append(self._control(readings, rest))
        half_s = max(halves_s, default=readings.poll_s / 2)
        return Holds(
            way=self.way,
            tries_s=tries_s,
            controls_s=controls_s,
            floor_s=half_s + gauge_lag_s(target, server.step_s),
            waited_s=server.patience.probe_s,
            natural_s=min(naturals_s, default=None),
        )

    def _at_rest(self, readings: Readings) -> float:
        """The gauge at rest. Raises CannotDecideError if it does not rest: others come and go."""
        readings.level(1)
        self._streams.wait_for_ghosts(lambda: readings.latest() == 0)
        levels = readings.level(max(_AT_REST_READINGS, int(_AT_REST_S / readings.poll_s)))
        if min(levels) != max(levels):
            raise CannotDecideError(
                f"others use this server: its gauge shows {min(levels):g} to {max(levels):g} "
                "running requests before the first of ours (--gentle judges a server in use)"
            )
        return levels[0]

    def _try(
        self, readings: Readings, leaver: Leaver, number: int, rest: float, longest_s: float
    ) -> tuple[LiveStream, Fall | None]:
        server = self._streams
        stream = leaver.begin(replace(leaver.spec, role=Role.USER))
        if not leaver.is_early:
            self._wait_counted(readings, stream, rest)
        leaver.ready(stream, number)
        if not leaver.is_early:
            server.pause(self._rng.random() * server.step_s)
        if stream.has_ended:
            raise CannotDecideError(
                f"the stream that was to leave ended by itself: {end_of(stream)}"
            )
        leaver.leave(stream)
        stream.join(READY_S)
        if stream.abandoned_ns is None:
            raise CannotDecideError("the stream that was to leave could not")
        sure_s = self._sure_s if leaver.is_early else 0.0
        since_s = stream.abandoned_ns / 1e9
        return stream, self._fall(readings, since_s, rest, sure_s=sure_s, longest_s=longest_s)

    def _wait_counted(self, readings: Readings, stream: LiveStream, rest: float) -> None:
        is_unary = stream.spec.delivery is Delivery.UNARY
        if not is_unary and not stream.wait_tokens(1, self._streams.patience.filler_s):
            raise CannotDecideError(f"the stream that was to leave did not begin: {end_of(stream)}")
        longest_s = READY_S if is_unary else self._streams.patience.settle_s
        if not readings.wait(lambda: readings.latest() > rest, longest_s):
            raise CannotDecideError("the gauge of running requests does not count a stream of ours")

    def _fall(
        self,
        readings: Readings,
        since_s: float,
        rest: float,
        *,
        sure_s: float = 0.0,
        longest_s: float = 0.0,
    ) -> Fall | None:
        """Two readings at rest are a fall: one may have been taken between two requests. It counts
        once it has lasted until `sure_s` after `since_s`. It is waited for as long as a probe is,
        or for `longest_s`."""
        until_s = since_s + sure_s + (longest_s or self._streams.patience.probe_s)

        def is_down() -> bool:
            latest = readings.since(since_s)[-2:]
            is_at_rest = len(latest) == 2 and all(one.value <= rest for one in latest)
            return is_at_rest and latest[-1].at_s >= since_s + sure_s

        readings.wait(is_down, max(0.0, until_s - time.perf_counter()))
        return find_fall(readings.since(since_s), since_s, rest)

    def _control(self, readings: Readings, rest: float) -> float:
        """The time from the last token of an answer that ends by itself to the gauge's fall. Raises
        CannotDecideError."""
        server = self._streams
        tokens = int(server.ttft_s / server.step_s) + _CONTROL_STEPS
        counted = server.short(tokens + 2 * int(readings.poll_s / server.step_s))
        stream = server.start(counted)
        self._wait_counted(readings, stream, rest)
        if stream.join(READY_S) is None or stream.last_token_ns is None:
            raise CannotDecideError(f"a short request had no end in {READY_S:g} s")
        fall = self._fall(readings, stream.last_token_ns / 1e9, rest)
        if fall is None:
            raise CannotDecideError(
                "the gauge of running requests stays up after an answer that ended by itself"
            )
        return fall.at_s - stream.last_token_ns / 1e9
