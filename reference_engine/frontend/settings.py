"""How clients are served: every limit of the frontend, with its default."""

from math import isfinite
from typing import Final, Literal

import msgspec

from reference_engine.config import EngineConfigError

ShutdownPolicy = Literal["abort", "drain"]

LONGEST_S: Final = 86_400.0


class RateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one API key may do in a minute; None: as much as it likes.

    `kills`: who runs out of tokens also loses the requests that are being generated; otherwise only
    new ones are refused.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    kills: bool = False


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, bytes and counts.

    `heartbeat_s`: a stream that was silent for so long gets an SSE comment; 0: never.
    `request_timeout_s`: a request that has not come whole in so long is refused.
    `ack_timeout_s`: a client whose machine acknowledges nothing for so long is gone.
    `stall_timeout_s`: a client that reads nothing for so long is gone. Where it is longer than
    `ack_timeout_s`, it counts for both: the kernel, which waits, cannot tell the two.
    `send_buffer_bytes`: of the socket, and again of the server: more is not held for a slow client.
    `keep_results`, `keep_results_s`: how many ended requests can be asked for, and for how long.
    `default_deadline_s`: of a request that asks for none; None: none.
    `shutdown`: what becomes of running requests, `drain_timeout_s` how long they may drain.
    """

    heartbeat_s: float = 5.0
    request_timeout_s: float = 30.0
    ack_timeout_s: float = 10.0
    stall_timeout_s: float = 10.0
    send_buffer_bytes: int = 65_536
    keep_results: int = 1000
    keep_results_s: float = 300.0
    default_deadline_s: float | None = None
    shutdown: ShutdownPolicy = "abort"
    drain_timeout_s: float = 30.0
    api_keys: tuple[str, ...] = ()
    rate_limits: RateLimits = RateLimits()

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "keep_results_s", "drain_timeout_s"):
            _within(name, getattr(self, name), 0.0, LONGEST_S)
        for name in ("request_timeout_s", "ack_timeout_s", "stall_timeout_s"):
            _within(name, getattr(self, name), 0.1, LONGEST_S)
        if self.default_deadline_s is not None:
            _within("default_deadline_s", self.default_deadline_s, 0.001, LONGEST_S)
        _within("send_buffer_bytes", self.send_buffer_bytes, 4096, 2**30)
        _within("keep_results", self.keep_results, 0, 1_000_000)
        for name in ("requests_per_minute", "tokens_per_minute"):
            limit = getattr(self.rate_limits, name)
            if limit is not None:
                _within(name, limit, 1, 10**9)

    def __repr__(self) -> str:
        return f"<FrontendSettings {self.shown()}>"

    def shown(self) -> dict[str, object]:
        """What may be shown to anybody: how many API keys there are, none of them."""
        shown: dict[str, object] = msgspec.to_builtins(self)
        del shown["api_keys"]
        return {**shown, "num_api_keys": len(self.api_keys)}


def _within(name: str, value: float, low: float, high: float) -> None:
    if not (isfinite(value) and low <= value <= high):
        raise EngineConfigError(f"{name} goes from {low} to {high}, not {value}")
