"""Why a request was cancelled: one token for each request, and the first reason wins.

Several causes may meet: the client leaves, the deadline passes, an operator cancels, the server
shuts down. Only the first one is recorded.
"""

import threading
from enum import StrEnum
from typing import NamedTuple


class CancelReason(StrEnum):
    USER_DISCONNECT = "user_disconnect"
    CLIENT_TIMEOUT = "client_timeout"
    SERVER_SHUTDOWN = "server_shutdown"
    RATE_LIMIT = "rate_limit"
    API = "api"


class DetectionMethod(StrEnum):
    """How the server learned that a client is gone; NONE for other cancellations.

    CONNECTION: the connection ended (FIN or RST), whether a read or a write met that first: the
    transport reports one error for both. HEARTBEAT: sent bytes were not acknowledged in time, so
    the client vanished. PING: a client did not send the ping it had promised. STALL: a client
    stopped reading.
    """

    CONNECTION = "connection"
    HEARTBEAT = "heartbeat"
    PING = "ping"
    STALL = "stall"
    NONE = "none"


class Cancellation(NamedTuple):
    reason: CancelReason
    method: DetectionMethod
    t_ns: int


class CancellationToken:
    """Set once, by any thread; `_cancellation` changes only under `_lock`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancellation: Cancellation | None = None

    @property
    def cancellation(self) -> Cancellation | None:
        return self._cancellation

    def cancel(self, cancellation: Cancellation) -> bool:
        """False, and nothing changes, if the token was set before."""
        with self._lock:
            if self._cancellation is not None:
                return False
            self._cancellation = cancellation
            return True
