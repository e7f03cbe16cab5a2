"""The figures of a run in progress, from rows and events in whatever order they come."""

import pytest

from harness.formatting import DASH
from harness.records import ClientSample, LifecycleEvent, Outcome, RequestRow, WireClose
from harness.run.live_figures import LAST, MOST_PENDING, Latest, LiveRun, Thinned
from harness.web.tab import live_rows
from tests.made_up.rows import lifecycle_event, request_row

MS = 1_000_000


def left(name: str, *, at_ms: int, read: int) -> RequestRow:
    t0 = at_ms * MS
    more = {"planned_abandon": read, "tokens_read": read}
    return request_row(name, sent_ns=0, ended_ns=t0, outcome=Outcome.ABANDONED, **more)


def event(
    what: str, name: str, *, at_ms: int, tokens: int = 0, reason: str = "user_disconnect"
) -> LifecycleEvent:
    why = reason if what == "blocks_freed" else None
    return lifecycle_event(0, at_ms * MS, what, name, num_generated=tokens, reason=why)


@pytest.mark.parametrize("is_row_first", [True, False])
@pytest.mark.parametrize(
    ("freed", "latency", "wasted"),
    [
        (event("blocks_freed", "a", at_ms=14, tokens=5), [(0.01, 4.0)], 2),
        (event("blocks_freed", "a", at_ms=900, tokens=100, reason="length"), [], 97),  # no cancel
        (event("blocks_freed", "a", at_ms=9, tokens=100), [], 0),  # over before the abandon
    ],
)
def test_latency_and_waste_do_not_depend_on_the_order(
    is_row_first: bool, freed: LifecycleEvent, latency: list[tuple[float, float]], wasted: int
) -> None:
    live = LiveRun(has_log=True, started_ns=0)
    if is_row_first:
        live.take_rows([left("a", at_ms=10, read=3)])
        assert live.shown()["held"] == 1
    moved = event("blocks_freed", "a", at_ms=8, tokens=1, reason="handed_over")
    live.take_events([moved, freed])  # a request that moved to another worker is not gone
    if not is_row_first:
        live.take_rows([left("a", at_ms=10, read=3)])
    shown = live.shown()
    assert shown["latencies"] == {"kept": latency, "every": 1}
    assert shown["latency_ms"]["n"] == len(latency)
    assert live.cancel_latency_s == (0.004 if latency else None)
    assert (shown["wasted_tokens"], shown["held"]) == (wasted, 0)
    assert shown["outcomes"]["abandoned"] == 1


def test_a_slot_is_refilled_by_a_request_that_waited_for_it() -> None:
    live = LiveRun(has_log=True, started_ns=0)
    live.take_events(
        [
            event("arrived", "waits", at_ms=1),
            event("blocks_freed", "a", at_ms=5),
            event("admitted", "waits", at_ms=8),
            event("blocks_freed", "b", at_ms=10),
            event("arrived", "queued", at_ms=11),
            event("blocks_freed", "queued", at_ms=12),  # left the queue: no slot came free
            event("arrived", "later", at_ms=20),  # the queue was empty when this slot came free
            event("admitted", "later", at_ms=21),
            event("arrived", "last", at_ms=22),
            event("blocks_freed", "later", at_ms=23, reason="length"),  # its end, and no cancel
            event("admitted", "last", at_ms=24),
        ]
    )
    assert live.shown()["refill_ms"] == {"n": 1, "p50": 3.0, "p99": 3.0}


def test_a_slot_is_refilled_at_its_own_worker() -> None:
    """A request that is handed over waits at the decode worker, whose slots are other ones."""
    live = LiveRun(has_log=True, started_ns=0)
    at_prefill = [
        event("arrived", "moves", at_ms=1),
        event("blocks_freed", "a", at_ms=2),
        event("admitted", "moves", at_ms=3),
        event("taken_over", "moves", at_ms=4),
    ]
    at_decode = [event("blocks_freed", "b", at_ms=5), event("admitted", "moves", at_ms=8)]
    for one in at_decode:
        one.worker = "decode-0"
    idle = event("blocks_freed", "c", at_ms=4)
    live.take_events([*at_decode, *at_prefill, idle])  # the logs of two frontends
    assert live.shown()["refill_ms"] == {"n": 2, "p50": 3.0, "p99": 3.0}


def test_a_server_without_a_log_has_unknown_latency_not_zero() -> None:
    live = LiveRun(has_log=False, started_ns=5 * MS)
    live.take_rows([left("a", at_ms=10, read=3)])
    live.take_lag([ClientSample(t_ns=0, pid=1, lag_ns=n * MS, cpu_s=0, streams=0) for n in (1, 4)])
    live.tick(10 * MS, {"running": 2.0, "preemptions": 7.0})
    live.tick(20 * MS, {"running": 1.0, "preemptions": 9.0})
    shown = live.shown()
    assert (shown["wasted_tokens"], shown["held"], shown["preemptions"]) == (None, None, 2.0)
    assert [point["t"] for point in shown["points"]["kept"]] == [0.005, 0.015]
    assert (shown["elapsed_s"], shown["leaves"]["kept"]) == (0.015, [0.005])
    assert shown["points"]["kept"][0]["lag_ms"] == 4.0  # the worst since the last tick
    rows = {row["figure"]: row for row in live_rows(shown)}
    assert rows["cancel latency"]["value"] == rows["wasted tokens"]["value"] == DASH
    assert "judged" in rows["cancel latency"]["about"]
    assert rows["engine: running"]["value"] == "1"


def test_memory_is_bounded() -> None:
    points: Thinned[int] = Thinned(50)
    for t in range(1000):
        points.add(t)
    assert len(points.kept) <= 50
    assert points.kept == list(range(0, 1000, points.every))

    values = Latest()
    assert values.quantiles() == {"n": 0, "p50": None, "p99": None}
    for value in range(3 * LAST):
        values.add(float(value))
    assert values.quantiles() == {"n": 3 * LAST, "p50": 2.5 * LAST, "p99": 2.99 * LAST}

    live, beyond = LiveRun(has_log=True, started_ns=0), MOST_PENDING + 10
    unopened = left("unopened", at_ms=1, read=0)
    unopened.wire_close = WireClose.UNOPENED  # without a connection, so it is not held
    live.take_rows([unopened])
    live.take_rows(left(str(n), at_ms=1, read=0) for n in range(beyond))
    live.take_events([event("blocks_freed", "0", at_ms=2)])  # the oldest was dropped
    assert (live.shown()["held"], live.shown()["latency_ms"]["n"]) == (beyond, 0)
    live.take_events([event("blocks_freed", str(beyond - 1), at_ms=2)])
    assert (live.shown()["held"], live.shown()["latency_ms"]["n"]) == (beyond - 1, 1)
