"""A client of any protocol, and its conversations: one request each, up to a row."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from harness.client.connection import Deadline
from harness.client.stream import StreamMachine
from harness.records import Delivery, RequestRow, Way
from harness.workload.abandon import LeaveRule, RequestSpec
from harness.workload.event_scale import EventScale
from harness.workload.observed_latency import StepEstimate
from harness.workload.plan import LoadPlan
from harness.workload.workload import RunSettings


class Conversation(Protocol):
    """One request and its answer."""

    stream: StreamMachine

    def see_through(self) -> None:
        """Read it up to an outcome. Raises only for a mistake of ours, or because the load ends."""

    def note_wire(self, row: RequestRow) -> None:
        """Add what only the wire knows."""

    def leave_at_once(self, way: Way | None) -> None:
        """The user leaves now; `way` instead of the planned one. Called from another greenlet."""

    @property
    def waits_for_interrupt(self) -> bool:
        """`leave_at_once` takes effect only when GaveUpError is raised in the waiting greenlet."""


class LoadClient(ABC):
    """`open_streams`: the requests now in flight."""

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self.step = StepEstimate()
        self.event_scale = EventScale(plan.counted_answers)
        self.open_streams = 0
        self.connect_s = plan.run.connect_timeout_s or plan.run.timeout_s

    @abstractmethod
    def begin(self, spec: RequestSpec, prompt: str, leave_rule: LeaveRule) -> Conversation: ...

    @abstractmethod
    def close(self) -> None: ...

    def ask(
        self,
        spec: RequestSpec,
        prompt: str,
        leave_rule: LeaveRule,
        keep: Callable[[RequestRow], None],
    ) -> RequestRow:
        """Send one request and see it through. `keep` gets its row, even if this call is killed."""
        return self.see_through(self.begin(spec, prompt, leave_rule), keep)

    def see_through(self, exchange: Conversation, keep: Callable[[RequestRow], None]) -> RequestRow:
        stream = exchange.stream
        self.open_streams += 1
        try:
            exchange.see_through()
        except Exception as error:
            if stream.outcome is None:
                stream.break_off(time.perf_counter_ns(), f"a bug of the client: {error!r}")
            raise
        except BaseException:
            if stream.outcome is None:
                stream.cut(time.perf_counter_ns())
            raise
        finally:
            self.open_streams -= 1
            row = stream.row()
            if self.plan.learns_events and (counted := stream.counted) is not None:
                self.event_scale.observe(counted)
            exchange.note_wire(row)
            keep(row)
        return row


def limits(
    run: RunSettings, delivery: Delivery, sent_ns: int
) -> tuple[Deadline | None, Deadline | None]:
    total = first = None
    if (total_s := run.total_timeout_s) is not None:
        complaint = f"the answer was not complete {total_s:g} s after the sending"
        total = first = Deadline(sent_ns + int(total_s * 1e9), complaint)
    if (first_s := run.first_token_timeout_s) is not None and delivery is Delivery.STREAM:
        first_token = Deadline(
            sent_ns + int(first_s * 1e9), f"no token came {first_s:g} s after the sending"
        )
        first = first_token if total is None else min(first_token, total)
    return first, total
