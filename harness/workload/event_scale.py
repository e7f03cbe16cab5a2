"""Tokens an event: learned from answers whose tokens the server counted, and whose events a client
did. So a user who is to leave after 5 tokens leaves after 5 tokens, not after 5 events.

Most servers send a fixed number of tokens in each event, but for the last: then the smallest whole
number that explains all answers is taken. Up to two tokens that no event shows are allowed for,
such as one that ends the answer, and up to two events that show no token of their own. Otherwise
the mean is taken, which is below 1 where a token takes several events.

An answer in one event says nothing of the size of an event.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

Counted = tuple[int, int]  # tokens of an answer, and the events with text in which they came

_WINDOW: Final = 32  # latest answers
_MOST_UNSEEN: Final = 2
_FEWEST_EVENTS: Final = 4  # of an answer that says much
_FEWEST_TOKENS_AN_EXTRA: Final = 8  # of an answer, for each event without a token of its own


class Calibration(NamedTuple):
    """`tokens`: of an event. `error`: the largest share by which it misses an answer that it was
    learned from, whose last event may bring fewer. `of_prefix`: tokens by which it may miss the
    first events of an answer, however many: the first one may bring fewer."""

    tokens: float
    error: float
    of_prefix: float = 0.0

    def error_after(self, events: int) -> float:
        """The largest share by which the first `events` of an answer may be miscounted."""
        return max(self.error, self.of_prefix / max(1.0, self.tokens * events))


def calibrate(answers: Sequence[Counted]) -> Calibration | None:
    """None: no answer says so, or all came in one event."""
    some = [one for one in answers if one[0] > 0 and one[1] > 1]
    some = [one for one in some if one[1] >= _FEWEST_EVENTS] or some
    if not some:
        return None
    for unseen in range(_MOST_UNSEEN + 1):
        if (found := _whole_number(some, unseen)) is not None:
            return _calibration(found, some, found - 1 + unseen)
    if extra := _extra_events(some):
        return _calibration(1, some, extra)
    mean = sum(tokens for tokens, _ in some) / sum(events for _, events in some)
    return _calibration(mean, some, max(1.0, mean))


def come_whole(answers: Sequence[Counted]) -> bool:
    """All of several tokens came in one event, in each of these answers."""
    return bool(answers) and all(tokens > 1 and events == 1 for tokens, events in answers)


def _calibration(scale: float, answers: Sequence[Counted], of_prefix: float) -> Calibration:
    error = max(_missed(scale, *one) / one[0] for one in answers)
    return Calibration(float(scale), error, float(of_prefix))


def _missed(scale: float, tokens: int, events: int) -> float:
    return max(0.0, tokens - events * scale, (events - 1) * scale - tokens)


def _whole_number(answers: Sequence[Counted], unseen: int) -> int | None:
    """The smallest number of tokens with which all events of each answer but the last are full."""
    number = max(1, *(math.ceil((tokens - unseen) / events) for tokens, events in answers))
    fits = all((events - 1) * number < tokens for tokens, events in answers)
    return number if fits else None


def _extra_events(answers: Sequence[Counted]) -> int:
    """The most events of an answer without a token of their own, if all others bring one; else
    0."""
    extra = [events - tokens for tokens, events in answers]
    most = min(_MOST_UNSEEN, min(tokens for tokens, _ in answers) // _FEWEST_TOKENS_AN_EXTRA)
    return max(extra) if min(extra) >= 0 and max(extra) <= most else 0


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
