"""Why and by whom a request was cancelled: one token a request, and the first reason wins.

Many may want to end the same request at once: its client leaves, its deadline passes, an operator
cancels it, the server shuts down. Whoever comes first decides the reason; the others learn that
they came late. Any thread may cancel.
"""

import threading
from enum import StrEnum
from typing import NamedTuple


class CancelReason(StrEnum):
    """Why a request was aborted."""

    USER_DISCONNECT = "user_disconnect"
    CLIENT_TIMEOUT = "client_timeout"
    EARLY_STOP = "early_stop"
    SERVER_SHUTDOWN = "server_shutdown"
    RATE_LIMIT = "rate_limit"
    API = "api"


class DetectionMethod(StrEnum):
    """How the server learned that a client is gone; NONE where it decided by itself.

    CONNECTION: the connection ended (FIN or RST). WRITE: something could not be sent. HEARTBEAT:
    what was sent was not acknowledged in time, as of a client that vanished without a word. PING: a
    client that had promised to ping did not. STALL: a client stopped reading.
    """

    CONNECTION = "connection"
    WRITE = "write"
    HEARTBEAT = "heartbeat"
    PING = "ping"
    STALL = "stall"
    NONE = "none"


class Cancellation(NamedTuple):
    """The act of cancelling. `t_ns` is a monotonic stamp."""

    reason: CancelReason
    method: DetectionMethod
    t_ns: int


class CancellationToken:
    """Set once, by any thread. `_cancellation` changes under `_lock`, from None and never again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancellation: Cancellation | None = None

    @property
    def cancellation(self) -> Cancellation | None:
        """The first cancellation, or None as long as there is none."""
        return self._cancellation

    @property
    def is_cancelled(self) -> bool:
        return self._cancellation is not None

    def cancel(self, cancellation: Cancellation) -> bool:
        """Whether this was the first; a later one changes nothing."""
        with self._lock:
            if self._cancellation is not None:
                return False
            self._cancellation = cancellation
            return True
