"""One cycle of the train of probes: how a stream leaves in it, and what the cycle's rows say."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from harness.client.live_stream import LiveStream
from harness.records import Outcome, RequestRow

Where = Literal["decode", "queued", "prefill"]

_SAYS_NOTHING: Final = (Outcome.CUT_OFF, Outcome.FAILED, Outcome.REJECTED)  # of a server's slots


@dataclass(frozen=True, slots=True, kw_only=True)
class LeavePlan:
    """Which stream leaves, and when: a random part of a step after `tokens` ("decode"; a unary
    answer: after as many steps), in the queue, or at a random part of its prefill. `changes` are
    made to its RequestSpec."""

    where: Where = "decode"
    tokens: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_filler(self) -> bool:
        """It is one of the streams that keep the slots full."""
        return self.where == "decode" and "delivery" not in self.changes

    @property
    def plan(self) -> str:
        return f"tokens:{self.tokens}" if self.where == "decode" else self.where


class TrainBeat:
    """A cycle's rows: what they say is known only when they end."""

    def __init__(self) -> None:
        self.leaver: LiveStream | None = None
        self.slot_from: LiveStream | None = None
        self.probe_ended_ns: int | None = None
        self.is_void = False

    @property
    def since_ns(self) -> int | None:
        """The time at which it left, or at which the slot came free later, if it left the queue."""
        left_ns = None if self.leaver is None else self.leaver.abandoned_ns
        if left_ns is None or self.slot_from is None:
            return left_ns
        return self.slot_from.last_token_ns

    def edit(self, row: RequestRow) -> None:
        since_ns = self.since_ns
        is_unserved = row.first_token_ns is None
        if self.is_void or (is_unserved and row.outcome in _SAYS_NOTHING):
            return
        if since_ns is not None and (row.first_token_ns or since_ns) >= since_ns:
            row.reference_ns = since_ns

    def edit_control(self, row: RequestRow) -> None:
        row.reference_ns = self.probe_ended_ns
