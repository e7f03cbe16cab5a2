"""What a step is to compute, and what was decided on the way to it."""

from dataclasses import dataclass, field

from reference_engine.core.request import Request


@dataclass(slots=True)
class StepPlan:
    """One step, decided but not yet computed.

    `scheduled`: in batch order, how many of each request's owed tokens are computed; `partial`:
    the requests that get less than they are owed. `budget` is what is left of the step's tokens.
    """

    step: int
    budget: int = 0
    scheduled: dict[Request, int] = field(default_factory=dict)
    partial: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.scheduled.values())

    @property
    def sampling(self) -> list[Request]:
        """The requests that get a new token, in batch order: all that they are owed is computed."""
        return [r for r, count in self.scheduled.items() if count == r.num_owed_tokens]

    def take_out(self, request: Request) -> None:
        """Leave a request out; not an error if it was not in."""
        self.budget += self.scheduled.pop(request, 0)
        if request in self.partial:
            self.partial.remove(request)
