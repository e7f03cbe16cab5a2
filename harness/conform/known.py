"""What a run has seen of the server so far: what one case knows, the next need not find out again,
and the leaves before the server's death are blamed for it."""

import time
from dataclasses import dataclass, field
from typing import Final

from harness.experiments.patience import Patience
from harness.records import Outcome, RequestRow

_HASTE: Final = 4  # divides the settle time: the wait for a server that never stops
_LONGEST_READ: Final = 16  # tokens before a leave
_FEWEST_STEPS: Final = 30  # but at least this long: more than twice what a late slot may take


@dataclass(slots=True)
class Known:
    """`never_stops`: the case that showed that the server does not stop a plain stream. `left`:
    clients that had left before this case. `heard_ns`: when the server last sent something."""

    left: int = 0
    never_stops: str | None = None
    heard_ns: int = 0
    _leaves_ns: list[int] = field(default_factory=list)  # in this case

    def note(self, row: RequestRow) -> None:
        """Note a request that has ended."""
        heard_ns = row.ended_ns if row.outcome is Outcome.COMPLETED else row.last_token_ns or 0
        self.heard_ns = max(self.heard_ns, heard_ns)
        if row.outcome is Outcome.ABANDONED and row.abandoned_ns is not None:
            self._leaves_ns.append(row.abandoned_ns)

    def note_answer(self) -> None:
        """Note that the server has sent something now, on a route that was asked."""
        self.heard_ns = max(self.heard_ns, time.perf_counter_ns())

    def note_leave(self) -> None:
        """Note that a route's answer is left now, or a request is cancelled by a route."""
        self._leaves_ns.append(time.perf_counter_ns())

    def begin_case(self) -> None:
        self.left += len(self._leaves_ns)
        self._leaves_ns.clear()

    def left_here(self, patience_ns: int) -> int:
        """Clients that have left in this case while the server still answered: it may be silent
        for `patience_ns` beforehand."""
        return sum(at_ns <= self.heard_ns + patience_ns for at_ns in self._leaves_ns)


def hurried(patience: Patience, *, step_s: float, begin_s: float, ttft_s: float) -> Patience:
    """Shorter waits, for a server that is known not to stop: a slot that outlasts them is held for
    good. Answers that were left run on, so streams last only as long as they must."""
    settle_s = max(_FEWEST_STEPS * step_s, patience.settle_s / _HASTE)
    if settle_s >= patience.settle_s:
        return patience
    short = Patience.of(
        settle_s,
        None,
        step_s=step_s,
        begin_s=begin_s,
        most_tokens=patience.answer_tokens,
        ttft_s=ttft_s,
    )
    return short._replace(outlives=1.0, longest_read=_LONGEST_READ)
