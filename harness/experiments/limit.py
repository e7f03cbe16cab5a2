"""How many requests a server runs at once, found by trying."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from harness.load.rows import most_at_once

FIRST_STREAMS: Final = 2
MOST_STREAMS: Final = 512
FIRST_TOKENS: Final = 16
MOST_TOKENS: Final = 1024


def find_limit(ask: Callable[[int, int], Iterable[Sequence[int]]]) -> int | None:
    """The smallest number of parallel streams at which one more waits.

    The number of streams doubles until fewer run at once than were sent. Answers of twice the
    length must confirm it: short streams may merely not have overlapped.
    """
    num_streams, tokens = FIRST_STREAMS, FIRST_TOKENS
    while num_streams <= MOST_STREAMS and tokens <= MOST_TOKENS:
        together = most_at_once(ask(num_streams, tokens))
        if together >= num_streams:
            num_streams *= 2
            continue
        tokens *= 2
        if most_at_once(ask(num_streams, tokens)) == together:
            return together
    return None
