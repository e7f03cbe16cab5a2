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


class StreamSignal(Enum):
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


Targets = dict[StreamSignal, State | Outcome]
_UNANSWERED: Final[Targets] = {
    StreamSignal.TIMEOUT: Outcome.TIMED_OUT,
    StreamSignal.BREAK: Outcome.FAILED,
    StreamSignal.CUT: Outcome.CUT_OFF,
}
_IN_STREAM: Final[Targets] = {
    StreamSignal.ERROR: Outcome.FAILED,
    StreamSignal.ABORT: Outcome.FAILED,
    StreamSignal.EXPIRE: Outcome.TIMED_OUT,
    StreamSignal.FINISH: State.FINISHED,
    StreamSignal.TOKEN: State.READING,
}
_STREAMING: Final[Targets] = {
    **_UNANSWERED,
    **_IN_STREAM,
    StreamSignal.BODY_END: Outcome.FAILED,
    StreamSignal.LEAVE: Outcome.ABANDONED,
}


def _however_it_ends(outcome: Outcome) -> Targets:
    ends = (StreamSignal.BODY_END, StreamSignal.TIMEOUT, StreamSignal.BREAK, StreamSignal.CUT)
    return dict.fromkeys(ends, outcome)


TRANSITIONS: Final[dict[State, Targets]] = {
    State.SENT: {
        **_UNANSWERED,
        StreamSignal.ACCEPT: State.ACCEPTED,
        StreamSignal.TURN_AWAY: State.BUSY,
        StreamSignal.REFUSE: State.REFUSED,
        StreamSignal.LEAVE: Outcome.ABANDONED,
    },
    State.ACCEPTED: _STREAMING,
    State.READING: _STREAMING,
    State.FINISHED: {**_however_it_ends(Outcome.COMPLETED), **_IN_STREAM},
    State.BUSY: _however_it_ends(Outcome.REJECTED),
    State.REFUSED: _however_it_ends(Outcome.FAILED),
}


class IllegalSignalError(Exception):
    """The signal cannot happen in this state: a mistake of the caller."""
