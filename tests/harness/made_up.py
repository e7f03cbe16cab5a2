"""Servers that tell nothing of single requests, as their metrics pages show them; and a whole run
of the bundled engine."""

from pathlib import Path

from harness.run import write_summary
from harness.store import RunFolder
from tests.harness.conftest import RunBuilder


def lonely(run: RunBuilder) -> None:
    """One request, left at 100 ms; scraped at 90, 110, 130, 150, 170; gone from the page at 150."""
    run.another_engine()
    run.metrics(running="exact", waiting="exact", generated_tokens="exact")
    run.abandon("a", t0=100, tokens=[50, 80])
    for t, running, tokens in ((90, 1, 3), (110, 1, 4), (130, 1, 5), (150, 0, 6), (170, 0, 6)):
        run.scrape(t, "its_running", running)
        run.scrape(t, "its_waiting", 0)
        run.scrape(t, "its_generated_tokens", tokens)
    run.idle(
        {"running": 0, "waiting": 0, "generated_tokens": 0},
        {"running": 0, "waiting": 0, "generated_tokens": 6},
    )


def alone_one_by_one(run: RunBuilder, number: int) -> None:
    """So many requests, one a second, each left 100 ms after it was sent and gone 40 ms later."""
    run.another_engine()
    run.metrics(running="exact", waiting="exact")
    for i in range(number):
        start = 1000.0 * i
        tokens = [start + 50, start + 80]
        more = {"planned_abandon": 2}
        run.request(f"{i}", sent=start, tokens=tokens, outcome="abandoned", end=start + 100, **more)
        for t in (90, 110, 130, 150, 170):
            run.scrape(start + t, "its_running", float(t < 140))
            run.scrape(start + t, "its_waiting", 0.0)
    run.idle({"running": 0, "waiting": 0}, {"running": 0, "waiting": 0})


def save_judged(path: Path, *, step_ms: float = 10, freed_ms: float = 111) -> Path:
    """A run's folder: one request, left at 100 ms, and one that was completed."""
    path.mkdir(exist_ok=True)
    run = RunBuilder(path)
    run.manifest.workload = {"name": "hand-made", "question": "How long?"}
    run.abandon("a", t0=100, tokens=[50, 80])
    run.events(
        "a",
        generated=3,
        arrived=5,
        admitted=10,
        first_token=50,
        disconnected=101,
        abort_sent=102,
        abort_received=103,
        removed=freed_ms - 1,
        blocks_freed=freed_ms,
        finished=freed_ms + 1,
    )
    run.request("b", sent=0, tokens=[60, 90, 120], outcome="completed", end=125)
    run.steps(1, 12, "a", "b", length=step_ms)
    run.frames()
    write_summary(RunFolder(path))
    return path
