"""The states of a request and the signals that change them: one table.

    SENT ──▶ ACCEPTED ──▶ READING ──▶ FINISHED ──▶ completed
      │ └──▶ BUSY ──▶ rejected
      └────▶ REFUSED ──▶ failed           SENT, ACCEPTED, READING ──▶ abandoned

Anything else is a mistake of the caller. Four decisions that the table makes:
- a stream that ends without a finish reason or `[DONE]` has failed, however good it looked;
- one that has finished is completed, even if the line breaks or the run ends before its last byte:
  the user has the whole answer. It can no longer be abandoned either;
- one that the server aborts has failed, or timed out if its deadline was the reason: a user that
  left by plan no longer reads it;
- a request can be abandoned from the moment it is sent, its headers or not: some servers hold them
  back until the first token, and it is their work that would be wasted.
"""

from enum import Enum, auto
from typing import Final

from harness.records import Outcome


class State(Enum):
    SENT = auto()
    ACCEPTED = auto()  # the headers are there, no token yet
    READING = auto()
    FINISHED = auto()  # a finish reason or [DONE] was read
    BUSY = auto()  # refused at admission; its body is still to be read
    REFUSED = auto()


class Signal(Enum):
    ACCEPT = auto()
    TURN_AWAY = auto()
    REFUSE = auto()
    TOKEN = auto()
    FINISH = auto()
    ERROR = auto()  # the server sent an error, or nonsense, inside the stream
    ABORT = auto()  # the server cancelled the request unasked
    EXPIRE = auto()  # the same, because the request's own deadline had passed
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
    Signal.ABORT: Outcome.FAILED,
    Signal.EXPIRE: Outcome.TIMED_OUT,
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
        Signal.ABORT: Outcome.FAILED,
        Signal.EXPIRE: Outcome.TIMED_OUT,
    },
    State.BUSY: _whatever_ends_it(Outcome.REJECTED),
    State.REFUSED: _whatever_ends_it(Outcome.FAILED),
}
