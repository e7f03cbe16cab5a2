"""What a step is to compute, and what was decided on the way to it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from reference_engine.request import Request


class ScheduledRequest(NamedTuple):
    """`num_tokens` of the request's owed tokens are computed in this step."""

    request: Request
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether a new token comes out: nothing is owed once these tokens are computed."""
        return self.num_tokens == self.request.num_owed_tokens


@dataclass(slots=True)
class StepPlan:
    """One step, decided but not yet computed: `scheduled` in batch order."""

    step: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_tokens for scheduled in self.scheduled)
