"""A client that waits for its answer in one piece leaves."""

from typing import Final

from harness.conform.bench import Bench
from harness.conform.case import FREED, Finding, case
from harness.records import Delivery
from harness.store.conform_result import Level

AFTER_STEPS: Final = 8


@case(
    "unary/leave",
    Level.MUST,
    "A client that waits for its answer in one piece may leave.",
    wire='All slots are full, one by a request with `"stream": false`, and a short request queues. '
    "The connection of the unary one is closed 8 steps and more after its first token was made. "
    "Nothing is scraped.",
    passes=FREED,
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
