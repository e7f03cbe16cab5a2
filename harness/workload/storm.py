"""A cancel storm: the moment at which its streams leave together. Pure."""

import random
from typing import Final

_LEAVING_SHARES: Final = (0.1, 0.9)  # of the prefill: neither before it begins nor after its end
_LEAD_STEPS: Final = 3  # every stream gets a token in each step


def leaving_share(*, seed: int, n: int) -> float:
    return random.Random(f"{seed}/{n}/leave").uniform(*_LEAVING_SHARES)


class Storm:
    def __init__(self, *, streams: int, tokens: int) -> None:
        self._missing = set(range(streams))
        self._tokens = tokens
        self._moment_ns: int | None = None

    def pause_ns(self, stream: int, tokens_read: int, *, now_ns: int, step_ns: int) -> int | None:
        if tokens_read >= self._tokens:
            self._missing.discard(stream)
        if self._moment_ns is None:
            if self._missing:
                return None
            self._moment_ns = now_ns + _LEAD_STEPS * step_ns
        return max(0, self._moment_ns - now_ns)
