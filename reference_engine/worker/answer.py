"""The text of one answer as it grows, and the watch for stop strings.

A stop string may straddle tokens. Text that could be the beginning of one is held back until that
is decided, so no part of a stop string ever reaches the client.
"""


class AnswerText:
    """Give it each token's text; it gives back what may be sent."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be sent now, and whether a stop string has appeared."""
        if not self._stop:
            return text, False
        pending = self._held + text
        found = [at for stop in self._stop if (at := pending.find(stop)) >= 0]
        if found:
            self._held = ""
            return pending[: min(found)], True
        keep = max(_overlap(pending, stop) for stop in self._stop)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], False

    def flush(self) -> str:
        """What was held back, once the answer has ended otherwise."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` with which `text` ends."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
