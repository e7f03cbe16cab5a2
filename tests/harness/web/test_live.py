"""What is known of a run while it goes on, from rows and events in whatever order they come."""

from harness.formatting import DASH
from harness.records import (
    ClientSample,
    LifecycleEvent,
    Outcome,
    RequestRow,
    WireClose,
)
from harness.web.live import LAST, MOST_PENDING, Distribution, LiveRun, Thinned
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


def test_latency_and_waste_do_not_depend_on_who_tells_first() -> None:
    row, freed = left("a", at_ms=10, read=3), event("blocks_freed", "a", at_ms=14, tokens=5)
    for is_row_first in (True, False):
        live = LiveRun(has_log=True, started_ns=0)
        if is_row_first:
            live.take_rows([row])
            assert live.shown()["held"] == 1
            live.take_events([freed])
        else:
            live.take_events([freed])
            live.take_rows([row])
        shown = live.shown()
        assert shown["latency_ms"] == {"n": 1, "p50": 4.0, "p99": 4.0}
        assert (shown["wasted_tokens"], shown["held"]) == (2, 0)
        assert shown["latencies"] == {"kept": [(0.01, 4.0)], "every": 1}
        assert shown["outcomes"]["abandoned"] == 1


def test_who_never_had_a_connection_is_held_by_nobody() -> None:
    live = LiveRun(has_log=True, started_ns=0)
    row = left("a", at_ms=10, read=0)
    row.wire_close = WireClose.UNOPENED
    live.take_rows([row])
    assert (live.shown()["held"], live.shown()["outcomes"]["abandoned"]) == (0, 1)


def test_what_ends_by_itself_was_not_let_go_of_and_still_a_waste() -> None:
    row = left("a", at_ms=10, read=3)
    ended = event("blocks_freed", "a", at_ms=900, tokens=100, reason="length")
    for is_row_first in (True, False):
        live = LiveRun(has_log=True, started_ns=0)
        if is_row_first:
            live.take_rows([row])
            live.take_events([ended])
        else:
            live.take_events([ended])
            live.take_rows([row])
        shown = live.shown()
        assert shown["latency_ms"]["n"] == 0
        assert shown["latencies"]["kept"] == []
        assert (shown["held"], shown["wasted_tokens"]) == (0, 97)


def test_a_slot_is_recovered_by_who_waited_for_it() -> None:
    live = LiveRun(has_log=True, started_ns=0)
    live.take_events(
        [
            event("arrived", "waits", at_ms=1),
            event("blocks_freed", "a", at_ms=5),
            event("admitted", "waits", at_ms=8),
            event("blocks_freed", "b", at_ms=10),
            event("arrived", "queued", at_ms=11),
            event("blocks_freed", "queued", at_ms=12),  # left the queue: no slot came free
            event("arrived", "later", at_ms=20),  # nobody waited when this slot came free
            event("admitted", "later", at_ms=21),
            event("arrived", "last", at_ms=22),
            event("blocks_freed", "later", at_ms=23, reason="length"),  # its end, and no cancel
            event("admitted", "last", at_ms=24),
        ]
    )
    assert live.shown()["refill_ms"] == {"n": 1, "p50": 3.0, "p99": 3.0}


def test_a_server_without_a_log_has_no_latency_and_not_nothing() -> None:
    live = LiveRun(has_log=False, started_ns=0)
    live.take_rows([left("a", at_ms=10, read=3)])
    live.tick(10 * MS, {"running": 2.0, "preemptions": 7.0})
    live.tick(20 * MS, {"running": 1.0, "preemptions": 9.0})
    shown = live.shown()
    assert (shown["wasted_tokens"], shown["held"], shown["preemptions"]) == (None, None, 2.0)
    rows = {row["figure"]: row for row in live_rows(shown)}
    assert rows["cancel latency"]["value"] == rows["wasted tokens"]["value"] == DASH
    assert "judged" in rows["cancel latency"]["about"]
    assert rows["engine: running"]["value"] == "1"


def test_lag_is_the_worst_since_the_last_look() -> None:
    live = LiveRun(has_log=False, started_ns=0)
    live.take_lag([ClientSample(t_ns=0, pid=1, lag_ns=n * MS, cpu_s=0, streams=0) for n in (1, 4)])
    live.tick(5 * MS, {})
    assert live.shown()["points"]["kept"][-1]["lag_ms"] == 4.0


def test_points_are_thinned_out_evenly() -> None:
    points: Thinned[int] = Thinned(50)
    for t in range(1000):
        points.add(t)
    assert len(points.kept) <= 50
    assert points.kept == list(range(0, 1000, points.every))


def test_what_never_finds_its_counterpart_does_not_pile_up() -> None:
    live, beyond = LiveRun(has_log=True, started_ns=0), MOST_PENDING + 10
    names = [str(n) for n in range(beyond)]
    live.take_rows(left(f"forgotten-{name}", at_ms=1, read=0) for name in names)
    live.take_events(event("arrived", f"queued-{name}", at_ms=1) for name in names)
    live.take_events(event("blocks_freed", f"elsewhere-{name}", at_ms=1) for name in names)
    assert {len(kept) for kept in live.pending} == {MOST_PENDING}
    assert live.shown()["held"] == beyond
    live.take_events([event("blocks_freed", f"forgotten-{names[-1]}", at_ms=2)])
    assert live.shown()["held"] == beyond - 1


def test_quantiles_are_of_the_last_values() -> None:
    values = Distribution()
    assert values.quantile(0.5) is None
    for value in range(3 * LAST):
        values.add(float(value))
    assert values.n == 3 * LAST
    assert values.quantile(0.0) == 2.0 * LAST
    assert values.quantile(1.0) == 3.0 * LAST - 1
