"""A client that waits for its answer in one piece leaves; and whether watching changes that."""

from typing import Final

from harness.conform.bench import Bench
from harness.conform.case import Finding, RefusedError, case
from harness.conform.cases.queue import queue_leave
from harness.records import Delivery
from harness.store.conform_result import Failure, Level

AFTER_STEPS: Final = 8
MOST_DIFFERENCE_STEPS: Final = 4.0


@case(
    "unary/leave",
    Level.MUST,
    "A client that waits for its answer in one piece may leave.",
    wire='All slots are full, one by a request with `"stream": false`, and a short request queues. '
    "The connection of the unary one is closed 8 steps and more after its first token was made. "
    "Nothing is scraped.",
    passes="the queued request's first token comes at most 4 steps later at the median of the "
    "tries, and at most 12 in each",
    methods="P",
    why="A server that writes nothing until the end learns of a disconnect only if it looks.",
    quick=True,
    caught=(
        "https://github.com/vllm-project/vllm/issues/10806",
        "https://github.com/InternLM/lmdeploy/issues/4776",
        "https://github.com/BerriAI/litellm/issues/13774",
    ),
)
def unary_leave(bench: Bench) -> Finding:
    asked = bench.long(delivery=Delivery.UNARY)
    return bench.recovery(asked, ready=lambda *_: bench.pause(AFTER_STEPS * bench.step_s))


@case(
    "watch/polling",
    Level.SHOULD,
    "Watching a server does not change how it cancels.",
    wire="unary/leave and queue/leave, first unread, then with a GET of the metrics page every "
    "0.1 s.",
    passes="both have the same verdict, and medians at most 4 steps apart",
    methods="P",
    why="A dashboard must not be what keeps requests of clients that left alive, nor what ends "
    "them.",
    needs=("http",),
    caught=(),
)
def polling(bench: Bench) -> Finding:
    evidence: dict[str, float | str | None] = {}
    worst = Finding(None, "the same verdicts and medians, watched and not", evidence)
    for name, check in (("unary", unary_leave), ("queue", queue_leave)):
        alone = check(bench)
        bench.end_case()
        bench.rest()
        with bench.polling() as polled:
            watched = check(bench)
        if not polled.answers:
            raise RefusedError(f"GET {polled.url} was not answered with status 200")
        before, after = (one.evidence.get("median_steps") for one in (alone, watched))
        evidence |= {f"{name}_alone_steps": before, f"{name}_watched_steps": after}
        worst = _compared(name, alone, watched) or worst
        bench.end_case()
        bench.rest()
    return worst._replace(evidence=evidence)


def _compared(name: str, alone: Finding, watched: Finding) -> Finding | None:
    if alone.failure is not watched.failure:
        was, now = (one.failure or "good" for one in (alone, watched))
        return Finding(Failure.LATE, f"{name}/leave is {was} alone, {now} when watched", {})
    before, after = (one.evidence.get("median_steps") for one in (alone, watched))
    if not isinstance(before, float) or not isinstance(after, float):
        return None
    if abs(after - before) <= MOST_DIFFERENCE_STEPS:
        return None
    said = f"{name}/leave takes {before:.1f} steps alone, {after:.1f} when watched"
    return Finding(Failure.LATE, said, {})
