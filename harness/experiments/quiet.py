"""Quiet: whether the server's processor, or its GPU, is at rest again after a leave.

For a server on this machine (`--pid`) that nobody else uses. It needs neither metrics nor full
slots nor a queue, and says whether the server stops, nothing finer: times are counted in hundredths
of a second by the system, and a GPU's counter is an average over a sixth of a second or more. A
server that polls for work with a busy loop is never at rest, and cannot be judged this way.
"""

import random
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Final, NamedTuple, TypeVar

import psutil

from harness.client.live_stream import LiveStream
from harness.collect.gpu import Gpus, open_nvml
from harness.collect.source import Notes, SourceError
from harness.experiments.holds import Holds, Leaver, has_no_end
from harness.experiments.idle_server import ServerFacts
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S
from harness.experiments.readings import Reading, Readings
from harness.experiments.streams import Streams, end_of
from harness.store.conform_result import JudgingWay

T = TypeVar("T")

_CPU_POLL_S: Final = 0.1  # ten of the system's ticks
_SHOWN_READINGS: Final = 10
_QUIET_READINGS: Final = 3  # in a row
_LOOK_READINGS: Final = 7
_APART: Final = 2.0  # times as busy with one stream as at rest: less, and rest is no rest
_LEAST_BUSY: Final = 0.02  # of a core, or of a GPU


class _NoRestError(Exception):
    """Busy and at rest look alike."""


class Meter(NamedTuple):
    """`busy`: the cores, or the share of a GPU, in use since the last call, which was about
    `poll_s` ago; raises SourceError."""

    busy: Callable[[], float]
    poll_s: float
    what: str


class Rest(NamedTuple):
    """`limit`: below it the server is at rest."""

    at_rest: float
    beside_one: float
    limit: float


def find_rest(idle: Sequence[float], busy: Sequence[float]) -> Rest | None:
    """The rest, by readings at rest and readings with one stream; None if they hardly differ."""
    worst_idle, least_busy = max(idle), quantiles(busy, n=10)[0]
    at_rest, beside_one = median(idle), median(busy)
    if beside_one < max(_LEAST_BUSY, _APART * at_rest) or least_busy <= worst_idle:
        return None
    return Rest(at_rest, beside_one, (worst_idle + least_busy) / 2)


def quiet_after_s(readings: Sequence[Reading], t0_s: float, limit: float) -> float | None:
    """The time from t0 to the first of three readings in a row at rest, if the server stayed so;
    None: it did not. A reading is of the time before it, so the one that holds t0 is left out."""
    first_s, quiet = None, 0
    for one in readings:
        if one.at_s <= t0_s:
            continue
        if one.value > limit:
            first_s, quiet = None, 0
        else:
            first_s, quiet = first_s or one.at_s, quiet + 1
    return None if first_s is None or quiet < _QUIET_READINGS else first_s - t0_s


def windows(values: Sequence[float]) -> list[Sequence[float]]:
    """All groups of as many values in a row as make a rest."""
    count = len(values) - _QUIET_READINGS + 1
    return [values[first : first + _QUIET_READINGS] for first in range(count)]


class ProcessTree:
    """The processor time of a process and all below it. A process that ended takes its time along:
    the sum never falls."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._latest: dict[int, float] = {}
        self._read_s = time.perf_counter()
        self._total_s = self._sum()

    def cores(self) -> float:
        """The number of cores in use since the last call."""
        now_s, total_s = time.perf_counter(), self._sum()
        used_s, passed_s = total_s - self._total_s, now_s - self._read_s
        self._read_s, self._total_s = now_s, total_s
        return used_s / passed_s

    def _sum(self) -> float:
        try:
            root = psutil.Process(self._pid)
            tree = [root, *root.children(recursive=True)]
        except (psutil.NoSuchProcess, psutil.AccessDenied) as error:
            raise SourceError(f"the process {self._pid} cannot be watched: {error}") from error
        for one in tree:
            try:
                times = one.cpu_times()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self._latest[one.pid] = float(times.user + times.system)
        return sum(self._latest.values())


def cpu_meter(pid: int) -> Meter:
    """Raises SourceError if there is no such process."""
    return Meter(ProcessTree(pid).cores, _CPU_POLL_S, "processor")


def gpu_meter(gpus: Gpus) -> Meter:
    """A meter of the busiest of the server's GPUs."""

    def busy() -> float:
        shares = [row.utilisation for row in gpus.sample() if row.utilisation is not None]
        if not shares:
            raise SourceError("the GPU does not show how busy it is")
        return max(shares)

    return Meter(busy, gpus.interval_s, "GPU")


def meters_of(pid: int) -> list[Meter]:
    """The GPUs of this machine, where NVML shows them, and the process's processor time. Raises
    SourceError if there is no such process."""
    gpus = open_nvml(Notes(), time.perf_counter_ns, uuid=None)
    return [*([] if gpus is None else [gpu_meter(gpus)]), cpu_meter(pid)]


class QuietWatcher:
    """`meters`: none where the server's process is not known; the first that shows a rest counts.
    `rest`: once it was measured."""

    way: JudgingWay = "quiet"

    def __init__(self, streams: Streams, meters: Sequence[Meter], rng: random.Random) -> None:
        self._streams = streams
        self._meters = meters
        self._rng = rng
        self.rest: Rest | None = None
        self._meter: Meter | None = None  # that showed it

    def can_judge(self, facts: ServerFacts) -> str | None:  # noqa: ARG002  other ways need them
        return None if self._meters else "the server's process is not known (--pid)"

    def holds(self, leaver: Leaver, tries: int) -> Holds:
        return self._by_a_meter(lambda readings: self._holds(readings, leaver, tries))

    def learn_rest(self) -> None:
        """Call it before `held` and `is_busy`. Raises CannotDecideError if no rest is seen."""
        self._by_a_meter(lambda readings: self._control(readings, self._idle(readings)))

    def held(self, leave: Callable[[], object]) -> bool:
        """`leave` makes some streams leave. Whether the server still computes for any of them when
        the settle time is over: after `leave` was called twice, but not after an answer in between
        that ended by itself. Raises CannotDecideError."""
        server = self._streams
        if not self._is_busy_after(leave):
            return False
        server.wait_for_ghosts(lambda: False)
        server.whole(server.short())
        server.pause(server.settle_s)
        if self.is_busy():
            raise CannotDecideError("the server is busy after an answer that ended by itself, too")
        if not self._is_busy_after(leave):
            raise CannotDecideError("the server was busy after the leaves, but not a second time")
        return True

    def _is_busy_after(self, leave: Callable[[], object]) -> bool:
        leave()
        self._streams.pause(self._streams.settle_s)
        is_busy = self.is_busy()
        if not is_busy and not self._streams.could_run():
            raise CannotDecideError("the answers that were left have ended by themselves by now")
        return is_busy

    def is_busy(self) -> bool:
        """Whether none of the next readings begins a rest. Call `learn_rest` before."""
        meter, rest = self._meter, self.rest
        assert meter is not None
        assert rest is not None
        with Readings(meter.busy, poll_s=meter.poll_s, rng=self._rng) as readings:
            read = readings.level(_LOOK_READINGS)[1:]  # the first is of the time before
        return min(max(some) for some in windows(read)) > rest.limit

    def _by_a_meter(self, look: Callable[[Readings], T]) -> T:
        """What `look` returns for the first meter that shows a rest."""
        why = list[str]()
        for meter in self._meters:
            self._meter = meter
            with Readings(meter.busy, poll_s=meter.poll_s, rng=self._rng) as readings:
                try:
                    return look(readings)
                except _NoRestError as error:
                    why.append(f"the server's {meter.what} is {error}")
        raise CannotDecideError("; ".join(why))

    def _idle(self, readings: Readings) -> list[float]:
        readings.level(2)
        self._streams.wait_for_ghosts(lambda: readings.latest() < _LEAST_BUSY)
        return readings.level(_SHOWN_READINGS + 1)[1:]

    def _holds(self, readings: Readings, leaver: Leaver, tries: int) -> Holds:
        idle = self._idle(readings)
        tries_s: list[float | None] = []
        controls_s: list[float] = []
        naturals_s = list[float]()
        while len(tries_s) < tries or tries_s[-1:] == [None]:
            controls_s.append(self._control(readings, idle))
            stream = self._leave(leaver, len(tries_s))
            left_s = (stream.spec.max_tokens - stream.tokens) * self._streams.step_s
            naturals_s.append(left_s)
            sure_s = self._streams.ttft_s + readings.poll_s if leaver.is_early else 0.0
            tries_s.append(self._quiet(readings, (stream.abandoned_ns or 0) / 1e9, sure_s))
            if has_no_end(tries_s):
                break
            if tries_s[-1] is None:
                self._streams.wait_for_ghosts(lambda: False)
        return Holds(
            way=self.way,
            tries_s=tries_s,
            controls_s=controls_s,
            floor_s=_QUIET_READINGS * readings.poll_s,
            waited_s=self._waited_s(readings),
            natural_s=min(naturals_s, default=None),
        )

    def _waited_s(self, readings: Readings) -> float:
        return self._streams.patience.probe_s + _QUIET_READINGS * readings.poll_s

    def _control(self, readings: Readings, idle: Sequence[float]) -> float:
        """An answer that ends by itself shows what busy is, and how soon it is quiet after that.
        Raises CannotDecideError if there is no rest."""
        server = self._streams
        seconds = server.ttft_s + (_SHOWN_READINGS + _QUIET_READINGS) * readings.poll_s
        stream = server.start(server.short(int(seconds / server.step_s)))
        if not stream.wait_tokens(1, server.patience.filler_s):
            raise CannotDecideError(f"a short request did not begin: {end_of(stream)}")
        busy = readings.level(_SHOWN_READINGS)[1:]
        if stream.join(READY_S) is None or stream.last_token_ns is None:
            raise CannotDecideError(f"a short request had no end in {READY_S:g} s")
        self.rest = rest = find_rest(idle, busy)
        if rest is None:
            at_rest, in_use = f"{median(idle):.2f}", f"{median(busy):.2f}"
            raise _NoRestError(f"about as busy at rest ({at_rest}) as with one stream ({in_use})")
        quiet_s = self._quiet(readings, stream.last_token_ns / 1e9)
        if quiet_s is None:
            self.rest = None
            raise _NoRestError("busy after an answer that ended by itself, too")
        return quiet_s

    def _leave(self, leaver: Leaver, number: int) -> LiveStream:
        stream = leaver.begin(leaver.spec)
        leaver.ready(stream, number)
        if not leaver.is_early:
            self._streams.pause(self._rng.random() * self._streams.step_s)
        leaver.leave(stream)
        stream.join(READY_S)
        if stream.abandoned_ns is None:
            raise CannotDecideError(f"a stream that was to leave ended: {end_of(stream)}")
        return stream

    def _quiet(self, readings: Readings, t0_s: float, sure_s: float = 0.0) -> float | None:
        """A rest counts once it has lasted until `sure_s` after t0: a request that has left early
        may be computed later only."""
        assert self.rest is not None
        limit, until_s = self.rest.limit, t0_s + sure_s + self._waited_s(readings)

        def is_quiet() -> bool:
            read = readings.since(t0_s)
            is_sure = bool(read) and read[-1].at_s >= t0_s + sure_s
            return is_sure and quiet_after_s(read, t0_s, limit) is not None

        readings.wait(is_quiet, max(0.0, until_s - time.perf_counter()))
        return quiet_after_s(readings.since(t0_s), t0_s, limit)
