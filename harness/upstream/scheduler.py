"""Which request has a slot, and which gets a token: decided without a clock or a connection.

A step begins when the last one ends, or when a request comes to an idle server. At its end each
request in a slot gets a token, once its prefill is over; then free slots go to the requests that
wait, in the order in which they came. A request that is left gives up its place at that moment, and
the next request gets its slot at the end of the step.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPace:
    """`prefill_ms`: in a slot, before the first token; and `prefill_token_ms` more for each token
    of the prompt."""

    slots: int = 4
    step_ms: float = 20.0
    prefill_ms: float = 0.0
    prefill_token_ms: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class Work:
    """`halts_at`: the number of tokens after which it makes no more, and keeps its slot."""

    prefill_ns: int
    tokens: int
    halts_at: int | None = None
    slot_ns: int | None = None
    made: int = 0

    @property
    def is_made(self) -> bool:
        return self.made == self.tokens


class Changes(NamedTuple):
    """What changed at one moment: who got a token, in whose place nothing was made, and who got a
    slot."""

    made: list[Work]
    halted: list[Work]
    admitted: list[Work]


class UpstreamScheduler:
    """`due_ns`: when the running step ends; None: the server is idle."""

    def __init__(self, pace: ServingPace) -> None:
        self.due_ns: int | None = None
        self._slots = pace.slots
        self._step_ns = round(pace.step_ms * NS_PER_MS)
        self._queue: dict[Work, None] = {}
        self._running: dict[Work, None] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def submit(self, work: Work, now_ns: int) -> Changes:
        self._queue[work] = None
        return self._begin(now_ns) if self.due_ns is None else Changes([], [], [])

    def leave(self, work: Work) -> None:
        """A work that has ended may leave, too."""
        self._queue.pop(work, None)
        self._running.pop(work, None)

    def step(self, now_ns: int) -> Changes:
        """End the step that is due. One that ended late does not make the next one shorter."""
        due_ns = now_ns if self.due_ns is None else self.due_ns
        made, halted = [], []
        for work in list(self._running):
            if work.slot_ns is None or due_ns < work.slot_ns + work.prefill_ns:
                continue
            if work.made == work.halts_at:
                halted.append(work)
                continue
            work.made += 1
            made.append(work)
            if work.is_made:
                del self._running[work]
        is_late = now_ns - due_ns > self._step_ns
        begun = self._begin(now_ns if is_late else due_ns)
        return Changes(made, halted, begun.admitted)

    def _begin(self, now_ns: int) -> Changes:
        admitted = list(self._queue)[: self._slots - len(self._running)]
        for work in admitted:
            del self._queue[work]
            work.slot_ns = now_ns
            self._running[work] = None
        self.due_ns = now_ns + self._step_ns if self._running else None
        return Changes([], [], admitted)
