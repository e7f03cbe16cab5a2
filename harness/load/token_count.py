"""How many tokens an event of one answer brings: by the server's own count, by the ids of its
tokens, else by its text, which stands for one token or for as many as in other answers."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from harness.load.chunk import ABORT, Choice, Usage
from harness.records import TokenCounting
from harness.workload.event_scale import Calibration

# Names of the module: an enum's attribute costs as much as a call, and this is for every token.
_BY_USAGE: Final = TokenCounting.USAGE


class TokenCount:
    """`by`: the basis so far; one event that had to be estimated makes the whole row an estimate.

    `_counted`: the server's latest count of each answer, or of all of them under 0. `_events` were
    taken for several tokens each, together for `_tokens`.
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
        self._usage_per_choice = usage_per_choice
        self._per_event = 1.0 if calibration is None else calibration.tokens
        self._asked = asked
        self._counted: defaultdict[int, int] = defaultdict(int)
        self._events = self._tokens = 0
        self._has_counted_text = False

    def of(self, choice: Choice, usage: Usage | None) -> int:
        if choice.finish_reason == ABORT and not choice.has_text():
            return 0  # its usage counts what was generated, sent or not
        if usage is not None and self.by is _BY_USAGE:
            so_far = usage.completion_tokens
            if so_far is not None:
                answer = choice.index if self._usage_per_choice else 0
                before = self._counted[answer]
                if so_far > before:
                    self._counted[answer] = so_far
                    return so_far - before
                if so_far:  # else it does not count yet, as texts that come now show
                    return 0
        if choice.token_ids:
            return self._count_ids(choice.token_ids)
        if not choice.has_text():
            return 0
        self.by, self._has_counted_text = self._by_text, True
        return 1 if self._per_event == 1 else self._scale_up()

    def of_whole(self, has_text: Sequence[bool], tokens: int | None) -> int:
        """Of an answer in one piece, whose `tokens` the server may have counted."""
        self.by = TokenCounting.EVENTS if tokens is None else _BY_USAGE
        return sum(has_text) if tokens is None else tokens

    def _count_ids(self, ids: list[Any]) -> int:
        if not self._has_counted_text:
            self.by = TokenCounting.IDS
        return len(ids)

    def _scale_up(self) -> int:
        """All together they are no more than were asked for, unless there are more events."""
        self._events = events = self._events + 1
        before, now = self._tokens, int(self._per_event * events + 0.5)
        if now > self._asked:
            now = max(self._asked, events)
        self._tokens = now
        return now - before
