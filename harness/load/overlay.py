"""Abandons laid over a trace: pure, from the trace's request, the load's mix and the seed.

No public trace tells who left, so that is drawn as for any other load. What the trace does tell
holds: who stays asks for the answer as it was recorded, a share of the answer is a share of that,
and who would leave after more tokens than the answer had reads it to its end. Who leaves asks for
`answer_tokens` of the load all the same: a server that goes on must be told from one that finished.
"""

from dataclasses import replace

import msgspec

from harness.load.abandon import RequestPlan, plan_request
from harness.load.expectation import Expectation
from harness.load.plan import AbandonLoad
from harness.load.ticket import Intent
from harness.load.traces import Asked


class _KnownAnswer(Expectation):
    """What was seen, but the length of the answer is known."""

    def __init__(self, seen: Expectation, tokens: int) -> None:
        super().__init__()
        self._seen = seen
        self._tokens = tokens

    def ttft_ns(self) -> int | None:
        return self._seen.ttft_ns()

    def answer_tokens(self, max_tokens: int) -> int:
        return min(self._tokens, max_tokens)


def plan_replayed(
    load: AbandonLoad, asked: Asked, *, seed: int, number: int, seen: Expectation
) -> RequestPlan:
    """The `number`-th request of the trace, and whether and when its user leaves."""
    as_recorded = msgspec.structs.replace(
        load,
        prompt_tokens=(asked.prompt_tokens, asked.prompt_tokens),
        stay_tokens=asked.answer_tokens,
    )
    known = _KnownAnswer(seen, asked.answer_tokens)
    plan = plan_request(as_recorded, seed=seed, user=number, n=0, seen=known)
    intent, whole = plan.intent, plan.intent.n * asked.answer_tokens
    if intent.planned_abandon is None:
        return plan
    is_too_short_to_race = intent.plan == "last_token" and intent.planned_abandon < 1
    if intent.planned_abandon < whole and not is_too_short_to_race:
        return plan
    return replace(
        plan,
        intent=Intent(delivery=intent.delivery, n=intent.n),
        pause="think",
        max_tokens=asked.answer_tokens,
    )
