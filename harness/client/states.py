"""The states of one request, as its client sees it, and what each signal makes of them.

    SENT ──▶ ACCEPTED ──▶ READING ◀──▶ FINISHED ──▶ completed
      │ └──▶ BUSY ──▶ rejected
      └────▶ REFUSED ──▶ failed           SENT, ACCEPTED, READING ──▶ abandoned

Text after a finish reason shows that it was none: the answer is being read again.
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


Targets = dict[Signal, State | Outcome]
_UNANSWERED: Final[Targets] = {
    Signal.TIMEOUT: Outcome.TIMED_OUT,
    Signal.BREAK: Outcome.FAILED,
    Signal.CUT: Outcome.CUT_OFF,
}
_IN_STREAM: Final[Targets] = {
    Signal.ERROR: Outcome.FAILED,
    Signal.ABORT: Outcome.FAILED,
    Signal.EXPIRE: Outcome.TIMED_OUT,
    Signal.FINISH: State.FINISHED,
    Signal.TOKEN: State.READING,
}
_STREAMING: Final[Targets] = {
    **_UNANSWERED,
    **_IN_STREAM,
    Signal.BODY_END: Outcome.FAILED,
    Signal.LEAVE: Outcome.ABANDONED,
}


def _however_it_ends(outcome: Outcome) -> Targets:
    ends = (Signal.BODY_END, Signal.TIMEOUT, Signal.BREAK, Signal.CUT)
    return dict.fromkeys(ends, outcome)


TRANSITIONS: Final[dict[State, Targets]] = {
    State.SENT: {
        **_UNANSWERED,
        Signal.ACCEPT: State.ACCEPTED,
        Signal.TURN_AWAY: State.BUSY,
        Signal.REFUSE: State.REFUSED,
        Signal.LEAVE: Outcome.ABANDONED,
    },
    State.ACCEPTED: _STREAMING,
    State.READING: _STREAMING,
    State.FINISHED: {**_however_it_ends(Outcome.COMPLETED), **_IN_STREAM},
    State.BUSY: _however_it_ends(Outcome.REJECTED),
    State.REFUSED: _however_it_ends(Outcome.FAILED),
}


class IllegalSignalError(Exception):
    """The signal cannot happen in this state: a mistake of the caller."""
