"""Tokens an event: learned from answers whose tokens the server counted, and whose events a client
did. So a user who is to leave after 5 tokens leaves after 5 tokens, not after 5 events.

Most servers send a fixed number of tokens in each event, but for the last: then the smallest whole
number that explains all answers is taken. Up to two tokens that no event shows are allowed for,
such as one that ends the answer. Otherwise the mean is taken.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

Counted = tuple[int, int]  # tokens of an answer, and the events with text in which they came

_WINDOW: Final = 32  # latest answers
_MOST_UNSEEN: Final = 2
_FEWEST_EVENTS: Final = 4  # of an answer that says much


class Calibration(NamedTuple):
    """`tokens`: of an event. `error`: the largest share by which it misses an answer that it was
    learned from, whose last event may bring fewer."""

    tokens: float
    error: float


def calibrate(answers: Sequence[Counted]) -> Calibration | None:
    """None: no answer says so, or one token takes more than an event."""
    some = [one for one in answers if min(one) > 0]
    some = [one for one in some if one[1] >= _FEWEST_EVENTS] or some
    if not some:
        return None
    whole = (_whole_number(some, unseen) for unseen in range(_MOST_UNSEEN + 1))
    found = next((float(one) for one in whole if one is not None), None)
    scale = found or sum(tokens for tokens, _ in some) / sum(events for _, events in some)
    if scale < 1:
        return None
    return Calibration(scale, max(_missed(scale, *one) / one[0] for one in some))


def _missed(scale: float, tokens: int, events: int) -> float:
    fewest = (events - 1) * scale if events > 1 else scale  # one event says nothing of another
    return max(0.0, tokens - events * scale, fewest - tokens)


def _whole_number(answers: Sequence[Counted], unseen: int) -> int | None:
    """The smallest number of tokens with which all events of each answer but the last are full."""
    number = max(1, *(math.ceil((tokens - unseen) / events) for tokens, events in answers))
    fits = all((events - 1) * number < tokens for tokens, events in answers)
    return number if fits else None


class EventScale:
    def __init__(self, answers: Iterable[Counted] = ()) -> None:
        self._answers: deque[Counted] = deque(answers, maxlen=_WINDOW)
        self.now = calibrate(self._answers)

    def observe(self, answer: Counted) -> None:
        """An answer that was read to its end."""
        tokens, events = answer
        self._answers.append(answer)
        if self.now is None or round(self.now.tokens * events) != tokens:
            self.now = calibrate(self._answers)
