"""A step's plan, and the decisions behind it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from reference_engine.core.request import Request


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step, decided but not yet computed.

    `scheduled`: how many of each request's owed tokens are computed, in batch order. `partial`: the
    requests that get fewer than they are owed. `closely`: those at whose result `update` looks
    closely, since it is no plain decode, or since they have left the batch meanwhile. `budget`: the
    tokens left for this step.

    Blocks are copied before anything is computed: `swap_out` pairs a block with its copy on the
    host, `swap_in` a copy with the block that it goes to. `swapped` are their requests among the
    preempted and the resumed; what another worker began is among the admitted. No step copies both
    ways, since one that preempts admits nothing.
    """

    step: int
    budget: int = 0
    scheduled: dict[Request, int] = field(default_factory=dict)
    partial: list[Request] = field(default_factory=list)
    closely: set[Request] = field(default_factory=set)
    admitted: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    swapped: list[Request] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.scheduled or self.swap_out)

    @property
    def num_tokens(self) -> int:
        return sum(self.scheduled.values())

    @property
    def sampling(self) -> list[Request]:
        """The requests that get a token: those with all that they were owed."""
        if not self.partial:
            return list(self.scheduled)
        return [request for request in self.scheduled if request not in self.partial]

    def uses(self, request: Request) -> bool:
        """Whether the step writes to the request's blocks, there or on the host."""
        return request in self.scheduled or request in self.swapped

    def look_closely_at(self, request: Request) -> None:
        if request in self.scheduled:
            self.closely.add(request)

    def take_out(self, request: Request) -> None:
        self.budget += self.scheduled.pop(request, 0)
        self.closely.discard(request)
        if request in self.partial:
            self.partial.remove(request)


class Sampled(NamedTuple):
    """The new tokens of a step by request id, and the model's probabilities of tokens whose request
    asked for it.
    """

    tokens: dict[str, int]
    probabilities: dict[str, float]
