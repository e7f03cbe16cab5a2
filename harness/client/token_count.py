"""How many tokens an event of one answer brings: by the server's own count, by the ids of its
tokens, else by its text, which stands for one token or for as many as in other answers.

The server's count of an answer so far is believed while it rises with the text. Where it is
missing, stands still, falls, or gives the whole answer's length from the start, text is counted in
its place. What the text has been counted for is not counted again when the server's count rises.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from harness.client.chunk import ABORT, Choice, UsageCounts
from harness.client.words import end_of
from harness.records import TokenCounting
from harness.workload.event_scale import Calibration

# Names of the module: an enum's attribute costs as much as a call, and this is for every token.
_BY_USAGE: Final = TokenCounting.USAGE
_MOST_STILL: Final = 3  # texts of an answer with one count: parts of one token, or of one step
_MOST_AT_FIRST: Final = 4  # events' worth, and tokens more, that a first count may be


class _CountedAnswer:
    """`counted`: the server's latest count. `read`: tokens, once texts were counted too. `granted`
    and `since`: tokens and texts since the count rose, the rising event's own included. `still`:
    texts since it stood at `still_at`."""

    __slots__ = ("counted", "granted", "read", "since", "still", "still_at")

    def __init__(self) -> None:
        self.counted = self.read = self.granted = self.since = self.still = 0
        self.still_at = -1


class TokenCount:
    """`by`: the basis so far; one event that had to be estimated makes the whole row an estimate.

    `_answers`: each by its number, or all `_together` under 0. `_events` were taken for other than
    one token each, together for `_tokens`.
    """

    def __init__(
        self,
        *,
        continuous_usage: bool,
        usage_per_choice: bool,
        calibration: Calibration | None,
        asked: int,
    ) -> None:
        is_known = calibration is not None
        self._by_text = TokenCounting.CALIBRATED if is_known else TokenCounting.EVENTS
        self.by = _BY_USAGE if continuous_usage else self._by_text
        self._reads_usage = continuous_usage
        self._usage_per_choice = usage_per_choice
        self._per_event = 1.0 if calibration is None else calibration.tokens
        self._surely = 1.0  # tokens an event has at least
        if calibration is not None and calibration.tokens < 1:
            self._surely = calibration.tokens * (1 - calibration.error)
        self._most_at_first = asked - 1 if asked > 1 else 1
        if is_known:
            likely = int(_MOST_AT_FIRST * (self._per_event + 1))
            self._most_at_first = min(self._most_at_first, likely)
        self._asked = asked
        self._together = _CountedAnswer()
        self._answers = defaultdict(_CountedAnswer, {0: self._together})
        self._most_answers = 1
        self._events = self._tokens = 0
        self._has_counted_text = False

    def of(self, choice: Choice, usage: UsageCounts | None) -> int:
        if choice.finish_reason == ABORT and not choice.has_text():
            return 0  # its usage counts what was generated, sent or not
        if self._reads_usage:
            one = self._answers[choice.index] if self._usage_per_choice else self._together
            so_far, before = None if usage is None else usage.completion_tokens, one.counted
            if so_far is None or so_far <= before:
                return self._of_no_count(one, choice, so_far)
            if before and self.by is _BY_USAGE:  # as nearly always
                one.counted = so_far
                one.granted = new = so_far - before
                return new
            return self._of_risen(one, choice, so_far)
        if choice.token_ids:
            return self._count_ids(choice.token_ids)
        if not choice.has_text():
            return 0
        self.by, self._has_counted_text = self._by_text, True
        return 1 if self._per_event == 1 else self._scale()

    def of_whole(self, has_text: Sequence[bool], tokens: int | None) -> int:
        """The tokens of an answer in one piece; `tokens`: as the server counted them, if it did."""
        self.by = TokenCounting.EVENTS if tokens is None else _BY_USAGE
        return sum(has_text) if tokens is None else tokens

    def _of_risen(self, one: _CountedAnswer, choice: Choice, so_far: int) -> int:
        """The first count of an answer, or one after texts that were counted."""
        is_first = not one.counted
        is_odd = self._most_at_first < so_far <= self._asked and not end_of(choice.finish_reason)
        if is_first and is_odd:
            self._count_texts_from_now()
            one.counted = so_far
            return self._estimate(one, choice, so_far) if choice.has_text() else 0
        one.counted = so_far
        new = one.granted = max(0, so_far - one.read)
        one.read += new
        one.since = int(choice.has_text())
        return new

    def _of_no_count(self, one: _CountedAnswer, choice: Choice, so_far: int | None) -> int:
        """There is none, or it has not risen."""
        has_text = choice.has_text() or bool(choice.token_ids)
        if not has_text:
            is_last = end_of(choice.finish_reason) and self.by is not _BY_USAGE
            new = max(0, one.counted - one.read) if is_last else 0
            one.read += new
            return new
        if so_far and so_far >= one.counted and self.by is _BY_USAGE:
            self._most_answers = max(self._most_answers, choice.index + 1)
            if one.still_at != so_far:
                one.still_at, one.still = so_far, 0
            one.still += 1
            if one.still < _MOST_STILL * self._most_answers:
                return 0
        return self._estimate(one, choice, so_far)

    def _estimate(self, one: _CountedAnswer, choice: Choice, so_far: int | None) -> int:
        """The tokens by its ids or its text, less those that an unmoved count has brought."""
        has_counted = any(answer.counted for answer in self._answers.values())
        self._count_texts_from_now()
        if choice.token_ids:
            new = self._count_ids(choice.token_ids)
            if has_counted:
                self.by = self._by_text
        else:
            self.by, self._has_counted_text = self._by_text, True
            if so_far is None and one.since == 1:  # what rose before is of its own event alone
                one.granted = self._tokens_of(1)
            one.since += 1
            new = max(0, self._tokens_of(one.since) - one.granted)
            new = min(new, max(1, self._asked - one.read))
        one.granted += new
        one.read += new
        return new

    def _count_texts_from_now(self) -> None:
        if self.by is not _BY_USAGE:
            return
        self.by = self._by_text
        for one in self._answers.values():
            one.read = max(one.read, one.counted)
            one.since = int(one.counted > 0)
            if one.still_at == one.counted:
                one.since += max(0, one.still - 1)

    def _count_ids(self, ids: list[Any]) -> int:
        if not self._has_counted_text:
            self.by = TokenCounting.IDS
        return len(ids)

    def _scale(self) -> int:
        """The total stays within what was asked for, unless there are surely more tokens."""
        self._events = events = self._events + 1
        before, now = self._tokens, int(self._per_event * events + 0.5) or 1
        if now > self._asked:
            now = max(self._asked, int(self._surely * events), before)
        self._tokens = now
        return now - before

    def _tokens_of(self, events: int) -> int:
        """Whole, and never fewer than for fewer events. The first event shows a token."""
        return int(self._per_event * events + 0.5) or 1
