"""The live figures of a run in progress, from each row as it arrives: provisional, as an abandoned
request that the server still holds is in no latency and no waste.

Memory is bounded: points are thinned out, quantiles are of the latest values, and the oldest
unpaired item is dropped.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

from harness.records import ClientSample, LifecycleEvent, Outcome, RequestRow, WireClose

MOST_POINTS: Final = 600
MOST_MARKS: Final = 1_000
MOST_PENDING: Final = 20_000
LAST: Final = 1_000
T = TypeVar("T")
_MS: Final = 1e6
_NATURAL: Final = frozenset({"stop", "length", "error"})  # ends that are no cancel


class Latest:
    def __init__(self) -> None:
        self.n = 0
        self._values: deque[float] = deque(maxlen=LAST)

    def add(self, value: float) -> None:
        self.n += 1
        self._values.append(value)

    def quantiles(self) -> dict[str, float | None]:
        ranked = sorted(self._values)

        def at(share: float) -> float | None:
            return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else None

        return {"n": self.n, "p50": at(0.5), "p99": at(0.99)}


class Thinned(Generic[T]):
    """Every n-th added item; past `most`, every second one is dropped and n doubles."""

    def __init__(self, most: int) -> None:
        self.kept: list[T] = []
        self.every = 1
        self._most = most
        self._turn = 0

    def add(self, item: T) -> None:
        if self._turn % self.every == 0:
            self.kept.append(item)
        self._turn += 1
        if len(self.kept) > self._most:
            self.kept = self.kept[::2]
            self.every *= 2

    def drawn(self) -> dict[str, Any]:
        return {"kept": self.kept, "every": self.every}


class Pending(OrderedDict[str, T]):
    """Unpaired items by request id; past `MOST_PENDING` the oldest is dropped."""

    def put(self, name: str, item: T) -> None:
        self[name] = item
        if len(self) > MOST_PENDING:
            self.popitem(last=False)


class LiveRun:
    """`has_log`: the server has a lifecycle log on the clients' clock. Without it there is no
    latency and no waste before the summary."""

    def __init__(self, *, has_log: bool, started_ns: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.elapsed_s = 0.0  # at the last tick
        self.has_log = has_log
        self._started_ns = started_ns
        # Still held by the server: the time of the abandon, and the tokens read by then.
        self._left: Pending[tuple[int, int]] = Pending()
        self._gone: Pending[LifecycleEvent] = Pending()  # freed, but the row is not read yet
        self._arrived: Pending[int] = Pending()
        # The slots of each worker that came free: when, and whether by a cancel.
        self._free_slots = defaultdict[str, deque[tuple[int, bool]]](lambda: deque(maxlen=LAST))
        self._latency, self._refill, self._lag = Latest(), Latest(), Latest()
        self._wasted = self._seen = self._held = 0
        self._recent_lag_ns = 0
        self._gauges: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._points: Thinned[dict[str, float | None]] = Thinned(MOST_POINTS)
        self._leaves: Thinned[float] = Thinned(MOST_MARKS)
        self._latencies: Thinned[tuple[float, float]] = Thinned(MOST_MARKS)

    def take_rows(self, rows: Iterable[RequestRow]) -> None:
        for row in rows:
            self.outcomes[row.outcome.value] += 1
            event = self._gone.pop(row.request_id, None)
            if row.outcome is not Outcome.ABANDONED or row.abandoned_ns is None:
                continue
            self._leaves.add(self._seconds(row.abandoned_ns))
            leave = row.abandoned_ns, row.tokens_read
            if not self.has_log:
                continue
            if event is not None:
                self._over(leave, event)
            elif row.wire_close is not WireClose.UNOPENED:
                self._left.put(row.request_id, leave)
                self._held += 1

    def take_events(self, events: Iterable[LifecycleEvent]) -> None:
        """Each frontend has a log of its own; they are read one after the other."""
        for event in sorted(events, key=attrgetter("t_ns")):
            name = event.client_request_id or event.request_id
            if event.event in ("arrived", "taken_over"):
                self._arrived.put(name, event.t_ns)
            elif event.event == "admitted":
                self._pair(event, self._arrived.pop(name, event.t_ns))
            elif event.event == "blocks_freed" and event.reason != "handed_over":
                self._free(event, name)

    def take_lag(self, samples: Iterable[ClientSample]) -> None:
        lags = [sample.lag_ns for sample in samples]
        for lag in lags:
            self._lag.add(lag / _MS)
        self._recent_lag_ns = max(lags, default=0)

    @property
    def cancel_latency_s(self) -> float | None:
        p50_ms = self._latency.quantiles()["p50"]
        return None if p50_ms is None else p50_ms / 1e3

    def tick(self, now_ns: int, gauges: Mapping[str, float]) -> None:
        self.elapsed_s = self._seconds(now_ns)
        self._first = self._first or dict(gauges)
        self._gauges = dict(gauges)
        self._points.add(
            {
                "t": self.elapsed_s,
                "running": gauges.get("running"),
                "waiting": gauges.get("waiting"),
                "wasted": self._wasted if self.has_log else None,
                "lag_ms": self._recent_lag_ns / _MS,
            }
        )

    def shown(self) -> dict[str, Any]:
        """All figures of page and tab as plain data. Times are seconds since the load began; None
        is unknown."""
        now = self._gauges.get("preemptions")
        return {
            "elapsed_s": self.elapsed_s,
            "outcomes": {outcome.value: self.outcomes[outcome.value] for outcome in Outcome},
            "gauges": self._gauges,
            "preemptions": None if now is None else now - self._first.get("preemptions", 0.0),
            "has_log": self.has_log,
            "held": self._held if self.has_log else None,
            "latency_ms": self._latency.quantiles(),
            "refill_ms": self._refill.quantiles(),
            "lag_ms": self._lag.quantiles(),
            "wasted_tokens": self._wasted if self.has_log else None,
            "wasted_each": self._wasted / self._seen if self._seen else None,
            "points": self._points.drawn(),
            "leaves": self._leaves.drawn(),
            "latencies": self._latencies.drawn(),
        }

    def _free(self, event: LifecycleEvent, name: str) -> None:
        if (leave := self._left.pop(name, None)) is not None:
            self._held -= 1
            self._over(leave, event)
        else:
            self._gone.put(name, event)
        if self._arrived.pop(name, None) is None:  # else it was queued and had no slot
            slot = event.t_ns, event.reason not in _NATURAL
            self._free_slots[event.worker].append(slot)

    def _over(self, leave: tuple[int, int], event: LifecycleEvent) -> None:
        abandoned_ns, tokens_read = leave
        if event.t_ns < abandoned_ns:
            return  # it had ended before the abandon
        self._seen += 1
        self._wasted += max(0, event.num_generated - tokens_read)
        if event.reason in _NATURAL:
            return  # it ended by itself, not by a cancel
        latency_ms = (event.t_ns - abandoned_ns) / _MS
        self._latency.add(latency_ms)
        self._latencies.add((self._seconds(abandoned_ns), latency_ms))

    def _pair(self, admitted: LifecycleEvent, arrived_ns: int) -> None:
        slots = self._free_slots[admitted.worker]
        while slots:
            freed_ns, is_cancel = slots.popleft()
            if arrived_ns > freed_ns:
                continue  # the queue was empty when this slot was freed
            if is_cancel:
                self._refill.add((admitted.t_ns - freed_ns) / _MS)
            return

    def _seconds(self, t_ns: int) -> float:
        return (t_ns - self._started_ns) / 1e9
