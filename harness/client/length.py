"""How long an answer is, by any measure, and how long it may be.

An honest server sends at most `max_tokens` of each answer. One that ignores `max_tokens` gets room
for long answers too; an event with tokens takes some 20 bytes.
"""

from typing import Final

from harness.client.chunk import LARGEST_COUNT, Chunk

_MOST_TIMES_ASKED: Final = 16
_ROOM_TOKENS: Final = 10_000
_CHARS_A_TOKEN: Final = 64  # more than any whole text has


class Length:
    """`most`: tokens of all answers. `uncounted`: the events with text whose count stood still.
    `texts`: of a canary's answer, `_chars` long; None: they are not kept."""

    def __init__(self, max_tokens: int, answers: int, *, keeps_text: bool) -> None:
        self._max_tokens = max_tokens
        self.most = min(_MOST_TIMES_ASKED * max_tokens * answers + _ROOM_TOKENS, LARGEST_COUNT)
        self.uncounted = 0
        self.texts: list[str] | None = [] if keeps_text else None
        self._chars = 0

    def add(self, chunk: Chunk, tokens: int) -> int:
        """Take a chunk that brought this many tokens: the length of the answer in tokens by the
        events that were not counted, or by its kept text."""
        texts = [text for choice in chunk.choices if (text := choice.shown())]
        if texts and not tokens:
            self.uncounted += 1
        if self.texts is not None:
            self.texts += texts
            self._chars += sum(map(len, texts))
        return max(self.uncounted, self._chars // _CHARS_A_TOKEN)

    @property
    def text(self) -> str | None:
        return None if self.texts is None else "".join(self.texts)

    def complaint(self, tokens: int) -> str:
        asked = f"`max_tokens` is {self._max_tokens}"
        return f"the answer is far longer than was asked for: {tokens} tokens by now, and {asked}"
