"""The end of an answer, by what its stream has said: finish reasons, other ends, notices, and data
that made no sense. It decides why a stream that ended has failed, if it has.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from harness.client.chunk import EXPIRED, CancellationReason, Choice, Chunk, Look
from harness.client.loose import shown
from harness.client.server_error import NO_REASON
from harness.client.states import StreamSignal
from harness.client.words import end_of, is_abort, is_doubtful_text, is_failure

ENDED_EARLY: Final = "the stream ended early: neither a finish reason nor [DONE]"
NO_ANSWER: Final = "the stream ended without text, a finish reason or a count of tokens"
NO_STREAM: Final = "the server sent no stream of events, but"
_MOST_UNREAD: Final = 1000  # events in a row


class StreamFailure(NamedTuple):
    signal: StreamSignal
    why: str


def says_something(look: Look) -> bool:
    said = (look.choices, look.usage, look.error, look.unread, look.notice)
    return any(said) or look.is_done or look.ends


class StreamEnding:
    """`reason`: the last finish reason. `means_nothing`: text came after a finish reason of all
    answers, so reasons that come with text end nothing. `unread`: the first data that made no
    sense. `_notice`: the last message that was neither an error nor text, and the tokens read by
    then. `passed_over`: the first event before any text in which nothing was found."""

    def __init__(self, answers: int) -> None:
        self.reason: str | None = None
        self.means_nothing = False
        self.unread: str | None = None
        self.passed_over = b""
        self._unfinished = answers
        self._finished_at = -1
        self._notice: tuple[str, int] = ("", 0)
        self._unread_since = self._unread_in_a_row = 0

    @property
    def all_finished(self) -> bool:
        return self._unfinished <= 0

    def begin_again(self, *, had_finished: bool) -> None:
        """Text begins, or comes after an end."""
        self.means_nothing = had_finished or self.all_finished

    def has_finished_by(self, tokens_read: int) -> bool:
        """All answers have, and no text has come after the last reason."""
        return self.all_finished and self._finished_at == tokens_read

    def has_answers(self, number: int) -> None:
        """A server may not know `n`."""
        self._unfinished = number

    def note(self, look: Look, tokens_read: int) -> StreamFailure | None:
        """What an event says that is no part of the answer."""
        if look.notice is not None:
            self._notice = (look.notice, tokens_read)
        if look.unread is None:
            return None
        self.unread = self.unread or look.unread
        if self._unread_since != tokens_read:
            self._unread_since, self._unread_in_a_row = tokens_read, 0
        self._unread_in_a_row += 1
        if self._unread_in_a_row <= _MOST_UNREAD:
            return None
        error = f"{_MOST_UNREAD} events without a token make no sense"
        return StreamFailure(StreamSignal.ERROR, self.with_unread(error, tokens_read))

    def finish(self, chunk: Chunk, tokens_read: int) -> StreamFailure | None:
        """The finish reasons of its choices decide. `tokens_read`: with the chunk's own."""
        for choice in chunk.choices:
            reason = end_of(choice.finish_reason)
            if reason is None:
                continue
            self.reason, self._finished_at = reason, tokens_read
            failure = self._failure(reason, chunk.cancellation_info)
            if failure is not None:
                return failure
            self._unfinished -= 1
        return None

    def _failure(self, reason: str, info: CancellationReason | None) -> StreamFailure | None:
        why = info.reason if info else None
        if is_abort(reason):
            signal = StreamSignal.EXPIRE if why == EXPIRED else StreamSignal.ABORT
            return StreamFailure(signal, f"the server aborted the request: {why or NO_REASON}")
        if is_failure(reason):
            error = f"the server ended the answer with the finish reason {reason!r}"
            return StreamFailure(StreamSignal.ERROR, f"{error}: {why}" if why else error)
        return None

    def is_an_end(self, choices: Sequence[Choice]) -> bool:
        """Have all answers finished? A reason without text is an end, where others mean nothing."""
        is_alone = any(one.finish_reason and not one.has_text() for one in choices)
        return self.all_finished and (is_alone or not self.means_nothing)

    def doubt(self, tokens_read: int) -> str | None:
        """The words after which `[DONE]` is no good end, unless a finish reason has come."""
        words, since = self._notice
        is_last = bool(words) and since == tokens_read and self.reason is None
        return words if is_last and is_doubtful_text(words) else None

    def with_last_words(self, error: str, tokens_read: int) -> str:
        words, since = self._notice
        if words and since == tokens_read:
            error = f"{error}; the server's last words are: {words}"
        return self.with_unread(error, tokens_read)

    def with_unread(self, error: str, tokens_read: int) -> str:
        if self.unread is not None:
            return f"{error}; it could not be read: {self.unread}"
        if self.passed_over and not tokens_read:
            return f"{error}; nothing was found in events such as {shown(self.passed_over)}"
        return error
