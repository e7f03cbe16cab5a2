"""When streams that leave together do so: pure, so that it is tested without Locust."""

import random
from typing import Final

_LEAVING_SHARES: Final = (0.1, 0.9)  # neither before the prefill has begun nor after it is over
_LEAD_STEPS: Final = 3  # how far ahead; every stream gets a token in each step


def leaving_share(*, seed: int, n: int) -> float:
    """At which share of the usual time to first token the n-th long prompt is left: uniform."""
    return random.Random(f"{seed}/{n}/leave").uniform(*_LEAVING_SHARES)


class Storm:
    """So many `streams` that will leave together, each after at least `tokens`.

    Its state is which streams have yet to read enough, and the moment, once it is set.
    """

    def __init__(self, *, streams: int, tokens: int) -> None:
        self._missing = set(range(streams))
        self._tokens = tokens
        self._moment_ns: int | None = None

    def pause_ns(self, stream: int, tokens_read: int, *, now_ns: int, step_ns: int) -> int | None:
        """How long from now the stream leaves; None while the moment is not set."""
        if tokens_read >= self._tokens:
            self._missing.discard(stream)
        if self._moment_ns is None:
            if self._missing:
                return None
            self._moment_ns = now_ns + _LEAD_STEPS * step_ns
        return max(0, self._moment_ns - now_ns)
