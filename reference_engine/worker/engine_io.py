"""What the step loop has around it: clock, frontends, another worker, a thread that computes."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from reference_engine.context import Context
from reference_engine.core.early_stop import QualityHook
from reference_engine.core.step import Sampled
from reference_engine.protocol import AddRequest, Output, RequestEvent, StepReport


class FrontendShare(NamedTuple):
    """One frontend's part of a report."""

    outputs: list[Output]
    events: list[RequestEvent]


Compute = Callable[[], Sampled]
ReportStep = Callable[[StepReport, Mapping[str, FrontendShare]], None]


class Leaving(NamedTuple):
    """A request that continues at the decode worker."""

    request: AddRequest
    blocks: bytes | bytearray
    frontend: str
    context: Context
    parent: Context | None


class EngineIO(NamedTuple):
    """A clock, the way to the frontends, the operator's hook, and the worker's name.

    `report` gets a report without outputs and events, and each frontend's share of these.
    `hang_up` ends a frontend's connection, with a reason, after an impossible request. A prefill
    worker has a way to `hand_over` a request. If not `reads_all`, there are no outputs for plain
    decodes, and no texts: a later output says how many tokens there were. `say`: to the operator.
    `ahead` begins a step that the loop need not wait for, and returns how to wait for its result;
    with None the loop computes each step itself.
    """

    now_ns: Callable[[], int]
    report: ReportStep
    hang_up: Callable[[str, str], None]
    quality_hook: QualityHook | None = None
    worker: str = ""
    hand_over: Callable[[Leaving], None] | None = None
    reads_all: bool = True
    say: Callable[[str], object] = lambda _: None
    ahead: Callable[[Compute], Compute] | None = None
