"""Servers whose metrics pages show nothing of single requests."""

from typing import Any

import numpy as np

from tests.made_up.rows import at
from tests.made_up.run import RunBuilder

LOAD_MS = 60_000.0


def lonely(run: RunBuilder) -> RunBuilder:
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
    return run


def alone_one_by_one(run: RunBuilder, number: int) -> None:
    """`number` requests, one a second, each left 100 ms after it was sent and gone 40 ms later."""
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


def busy_server(
    run: RunBuilder, *, delay: float, every: float, lag: float = 0.0, coming_late: float = 0.0
) -> None:
    """Ten users for a minute, each leaving every other request; the server lets go of it `delay` ms
    after; it is scraped every `every` ms and its page is `lag` ms old, and shows who comes
    `coming_late` ms later still."""
    rng = np.random.default_rng(11)
    run.another_engine()
    run.metrics(running="exact", waiting="exact", aborted="exact")
    window = run.manifest.window
    window.load_started_ns, window.load_ended_ns = at(0), at(LOAD_MS)
    window.settled_ns = at(LOAD_MS + 5000)
    spans, aborts = [], []
    for user in range(10):
        t = float(rng.uniform(0, 200))
        for n in range(1000):
            length = float(rng.uniform(50, 400))
            if t + length > LOAD_MS:
                break
            leaves = bool(rng.random() < 0.5)
            outcome = "abandoned" if leaves else "completed"
            extra: dict[str, Any] = {"planned_abandon": 1} if leaves else {}
            run.request(
                f"{user}-{n}", sent=t, tokens=[t + 20], outcome=outcome, end=t + length, **extra
            )
            until = t + length + (delay if leaves else 0.0)
            spans.append((min(t + coming_late, until), until))
            if leaves:
                aborts.append(until)
            t += length + float(rng.uniform(0, 30))
    starts, ends = (np.sort(np.array(side)) for side in zip(*spans, strict=True))
    gone = np.sort(np.array(aborts))
    for scraped in np.arange(7.0, LOAD_MS + 4900, every):
        seen = scraped - lag
        there = np.searchsorted(starts, seen, "right") - np.searchsorted(ends, seen, "right")
        run.scrape(scraped, "its_running", float(min(there, 4)))
        run.scrape(scraped, "its_waiting", float(max(there - 4, 0)))
        run.scrape(scraped, "its_aborted", float(np.searchsorted(gone, seen, "right")))
    idle = {"running": 0.0, "waiting": 0.0}
    run.idle({**idle, "aborted": 0.0}, {**idle, "aborted": float(len(aborts))})


def stepping_server(run: RunBuilder, *, step: float, stays: float) -> float:
    """Eight users for two minutes; what comes and leaves is taken in when a step begins, and the
    page is written when it ends. Returns the true mean latency in seconds.

    Its page goes by steps, as it does where a step loop sends a report."""
    rng = np.random.default_rng(7)
    run.another_engine()
    run.metrics(running="exact", waiting="exact", aborted="exact")
    for role, late in (("running", (1.0, 0.0, 1.0)), ("aborted", (1.0, 0.0, 1.0))):
        names = ("coming", "ended", "left")
        more = {"lag_steps": 2.0, "late_steps": dict(zip(names, late, strict=True))}
        run.target.spec["metrics"][role] |= more
    window = run.manifest.window
    window.load_started_ns, window.load_ended_ns = at(0), at(2 * LOAD_MS)
    window.settled_ns = at(2 * LOAD_MS + 5000)
    shown_from, shown_until, aborts, latencies = [], [], [], []
    for user in range(8):
        t = float(rng.uniform(0, 200))
        for n in range(4000):
            taken = np.ceil(t / step) * step
            first = float(taken + step)
            stays_on = bool(rng.random() < stays)
            tokens = [first + step * i for i in range(int(rng.integers(4, 10)))]
            last = tokens[-1]
            until = last if stays_on else last + float(rng.uniform(0, step))
            if until > 2 * LOAD_MS:
                break
            outcome = "completed" if stays_on else "abandoned"
            extra: dict[str, Any] = {} if stays_on else {"planned_abandon": 1}
            run.request(f"{user}-{n}", sent=t, tokens=tokens, outcome=outcome, end=until, **extra)
            removed = until if stays_on else float(np.ceil(until / step) * step)
            shown_from.append(taken + step)
            shown_until.append(removed if stays_on else removed + step)
            if not stays_on:
                aborts.append(removed + step)
                latencies.append(removed - until)
            t = until + float(rng.uniform(0, 0.3 * step))
    begun, over, gone = (np.sort(np.array(one)) for one in (shown_from, shown_until, aborts))
    for scraped in np.arange(7.0, 2 * LOAD_MS + 4900, 31.7):
        there = np.searchsorted(begun, scraped, "right") - np.searchsorted(over, scraped, "right")
        run.scrape(scraped, "its_running", float(there))
        run.scrape(scraped, "its_waiting", 0.0)
        run.scrape(scraped, "its_aborted", float(np.searchsorted(gone, scraped, "right")))
    idle = {"running": 0.0, "waiting": 0.0}
    run.idle({**idle, "aborted": 0.0}, {**idle, "aborted": float(len(aborts))})
    return float(np.mean(latencies)) / 1e3
