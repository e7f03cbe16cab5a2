"""Who leaves, when, and after what pause: pure, from the plan and a seed.

Each request's plan follows from (seed, user, n) alone, so two runs of one plan ask for the same
things however their users happened to be scheduled. The pause between the last token wanted and
the act of leaving keeps users out of step with the server: leaving right after a token would put
every t0 at the same point of the engine's step.
"""

import random
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Final

from harness.load.plan import AbandonLoad

_FIRST_STEP_NS: Final = 20_000_000  # assumed until a gap was seen: a usual decode step
_WINDOW: Final = 101  # gaps remembered; enough that one stall does not move the median


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """What one request asks for. `think_fraction` in [0, 1) places the pause within its range."""

    planned_abandon: int | None
    max_tokens: int
    prompt_bytes: int
    think_fraction: float


def plan_request(load: AbandonLoad, *, seed: int, user: int, n: int) -> RequestPlan:
    """The n-th request of a user."""
    rng = random.Random(f"{seed}/{user}/{n}/request")
    stays = rng.random() < load.stay_share
    tokens = rng.choice(load.abandon_after_tokens)
    prompt_bytes = rng.randint(*load.prompt_tokens)
    fraction = rng.random()
    return RequestPlan(
        planned_abandon=None if stays else tokens,
        max_tokens=load.stay_tokens if stays else load.answer_tokens,
        prompt_bytes=prompt_bytes,
        think_fraction=fraction,
    )


def think_ns(think: str | float, *, fraction: float, step_ns: int) -> int:
    """The pause before leaving: "step" is uniform over one step, a number uniform from 0 to it."""
    if isinstance(think, str):
        longest_ns = {"none": 0, "step": step_ns}[think]
    else:
        longest_ns = int(think * 1e9)
    return int(fraction * longest_ns)


class StepEstimate:
    """How long a step of the server takes, judged by the latest gaps between its tokens."""

    def __init__(self) -> None:
        self._gaps_ns: deque[int] = deque(maxlen=_WINDOW)

    def observe(self, gap_ns: int) -> None:
        """Note one gap. Tokens that came in one receive tell nothing: their gap is zero."""
        if gap_ns > 0:
            self._gaps_ns.append(gap_ns)

    def median_ns(self) -> int:
        """The median of the latest gaps."""
        return int(statistics.median(self._gaps_ns)) if self._gaps_ns else _FIRST_STEP_NS
