"""The lifecycle events of the step in progress, until they go out with its report."""

from collections.abc import Callable

from reference_engine.protocol import Event
from reference_engine.request import Request


class EventLog:
    """Stamps and collects. `step`: the one in progress; at a boundary, the one about to start."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._events: list[Event] = []
        self.step = 0

    def note(
        self,
        request: Request,
        event: str,
        reason: str | None = None,
        *,
        t_ns: int | None = None,
        num_blocks: int | None = None,
    ) -> None:
        """Log an event of a request, now unless it is said when."""
        self._events.append(
            Event(
                t_ns=self._now_ns() if t_ns is None else t_ns,
                event=event,
                request_id=request.request_id,
                step=self.step,
                num_generated=request.num_generated,
                num_blocks=len(request.block_table) if num_blocks is None else num_blocks,
                reason=reason,
            )
        )

    def take(self) -> list[Event]:
        """All since the last call."""
        events, self._events = self._events, []
        return events
