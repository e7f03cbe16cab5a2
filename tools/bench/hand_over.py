"""The price of a hand-over: a cancel reaches the decode worker through the prefill worker."""

import time
from collections.abc import Iterable
from statistics import quantiles

from tests.reference_engine.running_engine import RunningEngine, post_raw, read_until, running
from tools.bench.ratio import BenchRatio, share

_NUM_TOKENS = 5


def relayed_abort(*, quick: bool = False) -> Iterable[BenchRatio]:
    """The time until the worker that decodes hears of an abort, in turns: behind a prefill worker,
    and without one. The engines stand side by side, and have no other request.
    """
    flags = "--runner", "simulated", "--sim-fixed-ms", "5"
    with running(*flags, "--disaggregated") as divided, running(*flags) as whole:
        rounds = [
            (abort_ms(divided, f"left-{number}"), abort_ms(whole, f"left-{number}"))
            for number in range(5 if quick else 100)
        ]
    for at, since in enumerate(("a client's close", "the frontend's abort")):
        relayed, direct = [one[at] for one, _ in rounds], [one[at] for _, one in rounds]
        yield share(f"abort heard after {since}: median", "ms", relayed, direct)
        latest = quantiles(relayed, n=100)[-1:], quantiles(direct, n=100)[-1:]
        yield share(f"abort heard after {since}: p99", "ms", *latest)


def abort_ms(engine: RunningEngine, name: str) -> tuple[float, float]:
    client = post_raw(engine, name, stream=True)
    for _ in range(_NUM_TOKENS):
        read_until(client, b"\n\n")
    left_ns = time.perf_counter_ns()
    client.close()
    heard_ns: int = engine.wait_for("abort_received", name)["t_ns"]
    sent_ns: int = engine.wait_for("abort_sent", name)["t_ns"]
    return (heard_ns - left_ns) / 1e6, (heard_ns - sent_ns) / 1e6
