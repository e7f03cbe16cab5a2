"""When everybody leaves at once: pure, one `Storm` a time.

The moment is set when the last of the streams has read what it should. It lies a little ahead, so
that each stream, which only decides when something arrives, has heard of it by then.
"""

from typing import Final

_LEAD_STEPS: Final = 3  # how far ahead; every stream gets a token in each step


class Storm:
    """So many `streams` that will leave together, each after at least `tokens`.

    Its state is who has read enough, and the moment, once it is set.
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
