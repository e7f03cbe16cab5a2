"""The life of one streamed request, as its client sees it: a state machine without any I/O.

Whoever moves the bytes tells the machine what happened and when; the machine counts tokens, decides
the one outcome and builds the row. It never reads a clock.

    SENT ──▶ ACCEPTED ──▶ READING ──▶ FINISHED ──▶ completed
      │ └──▶ BUSY ──▶ rejected
      └────▶ REFUSED ──▶ failed           SENT, ACCEPTED, READING ──▶ abandoned

What may follow what is `TRANSITIONS`; anything not in it is a mistake of the caller and raises.
Three decisions that the table makes:
- a stream that ends without a finish reason or `[DONE]` has failed, however good it looked;
- one that has finished is completed, even if the line breaks or the run ends before its last byte:
  the user has the whole answer. It can no longer be abandoned either;
- a request can be abandoned from the moment it is sent, its headers or not: some servers hold them
  back until the first token, and it is their work that would be wasted.

Tokens are not events. With continuous usage the server's own count decides (also for events whose
text is still empty: half of a character is a token too); else an event that shows text is taken for
one token, and the row says so.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import msgspec

from harness.load.dialect import DONE, Chunk, decode_chunk, error_message, refusal_message
from harness.records import Outcome, RequestRow, Role, TokenCounting, WireClose

_BUSY_STATUSES: Final = frozenset({429, 503})


class State(Enum):
    """Where the request stands while it has no outcome."""

    SENT = auto()
    ACCEPTED = auto()  # the headers are there, no token yet
    READING = auto()
    FINISHED = auto()  # a finish reason or [DONE] was read
    BUSY = auto()  # refused at admission; its body is still to be read
    REFUSED = auto()


class Signal(Enum):
    """What can happen to a request."""

    ACCEPT = auto()
    TURN_AWAY = auto()
    REFUSE = auto()
    TOKEN = auto()
    FINISH = auto()
    ERROR = auto()  # the server sent an error, or nonsense, inside the stream
    BODY_END = auto()
    LEAVE = auto()
    TIMEOUT = auto()
    BREAK = auto()  # the connection failed
    CUT = auto()  # the run ended


_UNANSWERED: Final[dict[Signal, State | Outcome]] = {
    Signal.TIMEOUT: Outcome.TIMED_OUT,
    Signal.BREAK: Outcome.FAILED,
    Signal.CUT: Outcome.CUT_OFF,
}
_STREAMING: Final[dict[Signal, State | Outcome]] = _UNANSWERED | {
    Signal.TOKEN: State.READING,
    Signal.FINISH: State.FINISHED,
    Signal.ERROR: Outcome.FAILED,
    Signal.BODY_END: Outcome.FAILED,
    Signal.LEAVE: Outcome.ABANDONED,
}


def _whatever_ends_it(outcome: Outcome) -> dict[Signal, State | Outcome]:
    ends = (Signal.BODY_END, Signal.TIMEOUT, Signal.BREAK, Signal.CUT)
    return dict.fromkeys(ends, outcome)


TRANSITIONS: Final[dict[State, dict[Signal, State | Outcome]]] = {
    State.SENT: _UNANSWERED
    | {
        Signal.ACCEPT: State.ACCEPTED,
        Signal.TURN_AWAY: State.BUSY,
        Signal.REFUSE: State.REFUSED,
        Signal.LEAVE: Outcome.ABANDONED,
    },
    State.ACCEPTED: _STREAMING,
    State.READING: _STREAMING,
    State.FINISHED: _whatever_ends_it(Outcome.COMPLETED)
    | {
        Signal.TOKEN: State.FINISHED,
        Signal.FINISH: State.FINISHED,
        Signal.ERROR: Outcome.FAILED,
    },
    State.BUSY: _whatever_ends_it(Outcome.REJECTED),
    State.REFUSED: _whatever_ends_it(Outcome.FAILED),
}


class IllegalSignalError(Exception):
    """The caller told the machine something that cannot happen in its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What is known of a request before it is sent; the meanings are those of `RequestRow`."""

    request_id: str
    arm: str
    role: Role
    trial: int | None
    user: int
    planned_abandon: int | None
    max_tokens: int
    intended_start_ns: int


class StreamMachine:
    """One request from sending to its outcome.

    All state changes go through `_apply`; the counters change in `event` only. Once `outcome` is
    set nothing changes any more, and `row()` may be asked for.
    """

    def __init__(self, ticket: Ticket, *, sent_ns: int, continuous_usage: bool) -> None:
        self.state = State.SENT
        self.outcome: Outcome | None = None
        self.tokens_read = 0
        self._ticket = ticket
        self._sent_ns = sent_ns
        self._counting = TokenCounting.USAGE if continuous_usage else TokenCounting.EVENTS
        self._token_times_ns: list[int] = []
        self._event_tokens: list[int] = []
        self._status_code: int | None = None
        self._finish_reason: str | None = None
        self._prompt_tokens: int | None = None
        self._completion_tokens: int | None = None
        self._think_ns: int | None = None
        self._wire_close: WireClose | None = None
        self._ended_ns: int | None = None
        self._error: str | None = None

    def __repr__(self) -> str:
        return f"<StreamMachine {self.state.name} outcome={self.outcome} tokens={self.tokens_read}>"

    @property
    def can_leave(self) -> bool:
        """Whether there is an answer to come, or going on, that the user could abandon."""
        return self.outcome is None and Signal.LEAVE in TRANSITIONS[self.state]

    @property
    def last_gap_ns(self) -> int | None:
        """Time between the two latest token events, where there are two."""
        times = self._token_times_ns
        return times[-1] - times[-2] if len(times) > 1 else None

    # What the server did...

    def headers(self, status_code: int) -> None:
        """The status line and the headers are there."""
        self._status_code = status_code
        if status_code == 200:
            self._apply(Signal.ACCEPT)
        else:
            self._apply(Signal.TURN_AWAY if status_code in _BUSY_STATUSES else Signal.REFUSE)

    def event(self, data: bytes, t_ns: int) -> None:
        """One server-sent event of an accepted stream."""
        if data == DONE:
            self._apply(Signal.FINISH)
            return
        try:
            chunk = decode_chunk(data)
        except msgspec.DecodeError as error:
            self._end(Signal.ERROR, t_ns, f"an event of the stream makes no sense ({error})")
            return
        if chunk.error is not None:
            self._end(Signal.ERROR, t_ns, error_message(chunk.error))
            return
        self._read_chunk(chunk, t_ns)

    def refusal(self, body: bytes, t_ns: int) -> None:
        """The body of an answer other than 200, as far as it was read."""
        assert self._status_code is not None
        self._end(Signal.BODY_END, t_ns, refusal_message(self._status_code, body))

    def body_ended(self, t_ns: int) -> None:
        """The response to an accepted stream is complete."""
        self._end(
            Signal.BODY_END, t_ns, "the stream ended early: neither a finish reason nor [DONE]"
        )

    # What the user, the line and the run did...

    def leave(self, t0_ns: int, *, think_ns: int, wire_close: WireClose) -> None:
        """The user walked away at `t0_ns`."""
        self._end(Signal.LEAVE, t0_ns, None)
        self._think_ns = think_ns
        self._wire_close = wire_close

    def time_out(self, t_ns: int, why: str) -> None:
        """The user waited longer than users wait."""
        self._end(Signal.TIMEOUT, t_ns, why)

    def break_off(self, t_ns: int, why: str) -> None:
        """The connection could not be made, broke, or brought something that is not a stream."""
        self._end(Signal.BREAK, t_ns, why)

    def cut(self, t_ns: int) -> None:
        """The run ended first."""
        self._end(Signal.CUT, t_ns, None)

    def row(self) -> RequestRow:
        """The record of this request. Only a request with an outcome has one."""
        if self.outcome is None or self._ended_ns is None:
            raise IllegalSignalError(f"{self!r} has not ended, so there is no row of it yet")
        ticket, times = self._ticket, self._token_times_ns
        is_complete = self.outcome is Outcome.COMPLETED
        return RequestRow(
            request_id=ticket.request_id,
            arm=ticket.arm,
            role=ticket.role,
            trial=ticket.trial,
            user=ticket.user,
            stream=True,
            planned_abandon=ticket.planned_abandon,
            think_ns=self._think_ns,
            max_tokens=ticket.max_tokens,
            intended_start_ns=ticket.intended_start_ns,
            sent_ns=self._sent_ns,
            first_token_ns=times[0] if times else None,
            last_token_ns=times[-1] if times else None,
            abandoned_ns=self._ended_ns if self.outcome is Outcome.ABANDONED else None,
            ended_ns=self._ended_ns,
            wire_close=self._wire_close,
            tokens_read=self.tokens_read,
            token_times_ns=times,
            event_tokens=self._event_tokens,
            token_counting=self._counting,
            outcome=self.outcome,
            status_code=self._status_code,
            error=None if is_complete else self._error,
            finish_reason=self._finish_reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens if is_complete else None,
        )

    # How it is decided...

    def _apply(self, signal: Signal) -> None:
        target = None if self.outcome else TRANSITIONS[self.state].get(signal)
        if target is None:
            raise IllegalSignalError(f"{signal.name} cannot happen to {self!r}")
        if isinstance(target, State):
            self.state = target
        else:
            self.outcome = target

    def _end(self, signal: Signal, t_ns: int, error: str | None) -> None:
        self._apply(signal)
        self._ended_ns = t_ns
        self._error = error

    def _read_chunk(self, chunk: Chunk, t_ns: int) -> None:
        if chunk.usage is not None:
            self._prompt_tokens = chunk.usage.prompt_tokens
            self._completion_tokens = chunk.usage.completion_tokens
        if not chunk.choices:
            return  # the closing account: no token came with it
        tokens = self._count(chunk)
        if tokens:
            self._apply(Signal.TOKEN)
            self.tokens_read += tokens
            self._token_times_ns.append(t_ns)
            self._event_tokens.append(tokens)
        if chunk.choices[0].finish_reason is not None:
            self._finish_reason = chunk.choices[0].finish_reason
            self._apply(Signal.FINISH)

    def _count(self, chunk: Chunk) -> int:
        so_far = chunk.usage.completion_tokens if chunk.usage is not None else None
        if self._counting is TokenCounting.USAGE and so_far is not None:
            return max(0, so_far - self.tokens_read)
        if not chunk.choices[0].has_text():
            return 0
        self._counting = TokenCounting.EVENTS  # one such event makes the whole row an estimate
        return 1
