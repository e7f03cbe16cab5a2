"""Thousands of aborts, in all phases: no state of the engine grows with them."""

import gc
import tracemalloc

import pytest

from tests.reference_engine.stepped_engine import Bench, abort, add

ABORTS_A_ROUND = 4


def abort_many(bench: Bench, first: int, count: int) -> None:
    """Rounds of four: running, running, waiting, and one that is aborted before its first step."""
    for number in range(first, first + count, ABORTS_A_ROUND):
        names = [f"r{number + k}" for k in range(ABORTS_A_ROUND)]
        adds = [add(name, parent_id=f"p{number}", word=3 + number % 2000) for name in names]
        bench.step(*adds[:3])
        bench.step(adds[3], abort(f"p{number}"))
        bench.reports.clear()


@pytest.mark.slow
def test_thousands_of_aborts_leave_nothing() -> None:
    bench = Bench()
    abort_many(bench, 0, 8_000)
    gc.collect()
    tracemalloc.start()
    try:
        abort_many(bench, 8_000, 4_000)  # what is allocated once is there now
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        abort_many(bench, 12_000, 8_000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bench.scheduler.counters.finished == {"abort": 20_000}
    assert not bench.scheduler.has_work
    bench.scheduler.check_integrity()
    assert after - before < 4_000, f"{after - before} bytes more after 8,000 aborts"
