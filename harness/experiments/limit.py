"""How many requests a server runs at once, found by trying.

Requests start at once. A request whose first token comes after another's end waited for a slot.
"""

from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import Final, NamedTuple

FIRST_STREAMS: Final = 8
MOST_STREAMS: Final = 512
FIRST_TOKENS: Final = 16
MOST_TOKENS: Final = 1024
_MORE: Final = 4  # times as many streams, while all run at once and time allows
_CLEAR: Final = 4  # times the usual distance of two first tokens, and of two steps


class ParallelLook(NamedTuple):
    """Requests that started at once. `is_clear`: the requests that waited came long after the
    others. `spacing`: the steps between two first tokens, as where prompts take turns."""

    running: int
    waiting: int
    is_clear: bool
    spacing: float


def look_at(answers: Iterable[Sequence[int]], tokens: int) -> ParallelLook | None:
    """`answers`: the token times of each answer, of some only the first token's; each answer has
    `tokens` tokens. None: no answer shows when it ended."""
    times = [one for one in answers if one]
    # A busy client may read a last token after the first one of the stream in its place.
    whole = [one for one in times if len(one) > 2]
    if not whole:
        return None
    first_end = min(one[-2] for one in whole)
    step = min((one[-1] - one[0]) / (tokens - 1) for one in whole)
    firsts = sorted(one[0] for one in times)
    running = [at for at in firsts if at <= first_end]
    late = firsts[len(running) :]
    spacing = (running[-1] - running[0]) / max(1, len(running) - 1)
    is_clear = bool(late) and late[0] - running[-1] > _CLEAR * max(spacing, step)
    return ParallelLook(len(running), len(late), is_clear, spacing / step if step else 0.0)


def four_times(streams: int) -> int:
    return _MORE * streams


def find_limit(
    ask: Callable[[int, int], Iterable[Sequence[int]]],
    *,
    most: int = MOST_STREAMS,
    more: Callable[[int], int] = four_times,
) -> int | None:
    """The smallest number of parallel streams at which one more waits; None: not up to `most`.

    `ask` starts a number of streams, each of a number of tokens. Where prompts take turns, answers
    must last until the last one has begun. `more`: how many streams are tried after a number that
    all ran at once.
    """
    streams, spacing = FIRST_STREAMS, 0.0
    while True:
        seen = _clear_look(ask, streams, spacing)
        if seen is None:
            return None
        if seen.waiting:
            return seen.running if is_limit(ask, seen.running, seen.spacing) else None
        if streams >= most:
            return None
        streams, spacing = min(most, more(streams)), max(spacing, seen.spacing)


def is_limit(
    ask: Callable[[int, int], Iterable[Sequence[int]]], slots: int, spacing: float = 0.0
) -> bool:
    """Whether one of `slots + 1` requests waits."""
    seen = _clear_look(ask, slots + 1, spacing)
    return seen is not None and (seen.running, seen.waiting) == (slots, 1)


def _clear_look(
    ask: Callable[[int, int], Iterable[Sequence[int]]], streams: int, spacing: float
) -> ParallelLook | None:
    tokens = FIRST_TOKENS + ceil(streams * spacing)
    while tokens <= MOST_TOKENS:
        seen = look_at(ask(streams, tokens), tokens)
        if seen is None or not seen.waiting or seen.is_clear:
            return seen
        tokens = 2 * tokens + ceil(streams * seen.spacing)
    return None
