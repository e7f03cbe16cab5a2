"""The life of one request, as its client sees it: a state machine without I/O and clock.

- A stream that ends without a finish reason or `[DONE]` has failed; one that has finished is
  completed, even if the line breaks or the run ends before its last byte. But `[DONE]` alone ends
  nothing: an answer has text, a finish reason or a count of its tokens.
- One that the server aborts has failed, or timed out if its deadline was the reason.
- A request can be abandoned from the moment it is sent: some servers hold the headers back until
  the first token.
- Nothing counts after `[DONE]`. The row names what cannot be read, and keeps the answer.

Tokens are not events. With continuous usage the server's own count decides, also for an event whose
text is still empty; else its token ids; else an event that shows text counts as one token, or as
many as were learned of other answers, and the row says so. An answer far longer than was asked for
fails the request before it takes the memory. Tokens read after leaving are counted apart.
"""

from array import array
from collections.abc import Sequence
from typing import Final, Literal

from harness.client.chunk import NONSENSE, Choice, Chunk, Look, UsageCounts
from harness.client.dialect import COMPLETIONS, Dialect
from harness.client.ending import ENDED_EARLY as ENDED_EARLY
from harness.client.ending import NO_ANSWER, NO_STREAM, StreamEnding, StreamFailure, says_something
from harness.client.length import Length
from harness.client.loose import shown, values_of
from harness.client.server_error import error_message, refusal_message
from harness.client.sse import STRAY
from harness.client.states import TRANSITIONS, IllegalSignalError, State, StreamSignal
from harness.client.token_count import TokenCount
from harness.client.words import end_of, is_error_name, is_error_text
from harness.records import Outcome, RequestRow, Role, TokenCounting, WireClose
from harness.workload.abandon import RequestSpec
from harness.workload.event_scale import Calibration, Counted

# Names of the module: an enum's attribute costs as much as a call, and this is for every token.
_ABANDONED: Final = Outcome.ABANDONED
_READING: Final = State.READING
BUSY_STATUSES: Final = frozenset({429, 503, 529})  # 529: overloaded, as Anthropic says it


class StreamMachine:
    """Once `outcome` is set there is a `row()`; only events after leaving still change it."""

    def __init__(
        self,
        spec: RequestSpec,
        *,
        sent_ns: int,
        continuous_usage: bool,
        usage_per_choice: bool = False,
        dialect: Dialect = COMPLETIONS,
        calibration: Calibration | None = None,
    ) -> None:
        self.state = State.SENT
        self.outcome: Outcome | None = None
        self.tokens_read = 0
        self._spec = spec
        self.sent_ns = sent_ns
        self._token_times_ns = array("q")  # 8 bytes each, where a list of such ints takes 40
        self._event_tokens: list[int] = []
        self._status_code: int | None = None
        self._usage: UsageCounts | None = None
        self._think_ns: int | None = None
        self._wire_close: WireClose | None = None
        self._ended_ns: int | None = None
        self._error: str | None = None
        self._quick, self._look, self._is_older = dialect.quick, dialect.look, dialect.is_older
        self._calibration = calibration
        asked = spec.max_tokens * spec.n
        self._tokens = TokenCount(
            continuous_usage=continuous_usage,
            usage_per_choice=usage_per_choice,
            calibration=calibration,
            asked=asked,
        )
        self._count = self._tokens.of
        self._ending = StreamEnding(spec.n)
        self._last_event = b""
        self._keeps_text = spec.role is Role.CANARY or spec.turn is not None
        self._counts_calls = spec.counts_calls
        self._call_tokens = 0
        self.response_id: str | None = None
        self._length = Length(spec.max_tokens, spec.n, keeps_text=self._keeps_text)
        self._most_tokens = self._length.most
        self._late_tokens: int | None = None
        self._server_ended_ns: int | None = None
        self._is_done = self._shows_reasoning = self._comes_in_messages = False

    def __repr__(self) -> str:
        return f"<StreamMachine {self.state.name} outcome={self.outcome} tokens={self.tokens_read}>"

    @property
    def can_leave(self) -> bool:
        return self.outcome is None and StreamSignal.LEAVE in TRANSITIONS[self.state]

    @property
    def tokens_for_plan(self) -> int:
        """The tokens read that its user's plan counts."""
        return self._call_tokens if self._counts_calls else self.tokens_read

    @property
    def text(self) -> str:
        """All that was generated and read so far, of a request that keeps it."""
        return self._length.text or ""

    @property
    def token_times_ns(self) -> Sequence[int]:
        return self._token_times_ns

    @property
    def event_tokens(self) -> Sequence[int]:
        return self._event_tokens

    @property
    def first_token_ns(self) -> int | None:
        return self._token_times_ns[0] if self._token_times_ns else None

    @property
    def last_token_ns(self) -> int | None:
        return self._token_times_ns[-1] if self._token_times_ns else None

    @property
    def abandoned_ns(self) -> int | None:
        return self._ended_ns if self.outcome is Outcome.ABANDONED else None

    @property
    def last_gap_ns(self) -> int | None:
        """Time between the two latest token events of one answer. Answers to one prompt grow in
        step, so with n answers the previous event of this one is the n-th before."""
        times, n = self._token_times_ns, self._spec.n
        return times[-1] - times[-1 - n] if len(times) > n else None

    @property
    def error(self) -> str | None:
        """Why it ended, if not well."""
        return None if self.outcome is Outcome.COMPLETED else self._error

    @property
    def why_empty(self) -> str:
        tokens = None if self._usage is None else self._usage.completion_tokens
        why = "the answer was empty"
        if tokens:
            why = (
                f"the server counts {tokens} tokens of an answer, but no event of it shows any text"
            )
        return self._ending.with_unread(why, self.tokens_read)

    @property
    def counted(self) -> Counted | None:
        """The tokens of a completed answer by the server's account, and the events that showed
        them; None if they are not known. Reasoning that was not shown is left out; where events
        would then be without a token, it was shown in the text."""
        usage, events = self._usage, self._text_events
        is_whole = self.outcome is Outcome.COMPLETED and self._spec.n == 1 and events > 0
        if not is_whole or usage is None or (tokens := self._final_count(usage)) is None:
            return None
        hidden = 0 if self._shows_reasoning else usage.reasoning
        return (tokens - hidden if tokens - hidden >= events else tokens), events

    @property
    def _text_events(self) -> int:
        return len(self._token_times_ns) + self._length.uncounted

    # Events of the server

    def headers(self, status_code: int) -> None:
        self._status_code = status_code
        if status_code == 200:
            self._apply(StreamSignal.ACCEPT)
        else:
            self._apply(
                StreamSignal.TURN_AWAY if status_code in BUSY_STATUSES else StreamSignal.REFUSE
            )

    def event(self, data: bytes, t_ns: int, name: bytes = b"") -> None:
        """Nearly every token takes the first of three ways; the second is for whatever the quick
        reader can read, too, and the third for the rest. `name`: STRAY for lines of no event."""
        if self.outcome is _ABANDONED:
            self._late_event(data, name)
            return
        if self._is_done:
            self._read_late_account(data, name)
            return
        if not (name and (name == STRAY or is_error_name(name))):
            try:
                chunk = self._quick(data)
            except NONSENSE:
                pass
            else:
                if self._read_token(chunk, t_ns) or self._read_quick(chunk, t_ns):
                    self._last_event = data
                    return
        looks = self._look(data, name)
        if self._is_older and not self.tokens_read and not any(map(says_something, looks)):
            self._ending.passed_over = self._ending.passed_over or data
        for look in looks:
            if self.outcome is None and not self._is_done:
                self._read_look(look, t_ns)

    def last_event(self, data: bytes, t_ns: int, name: bytes) -> None:
        """One that no blank line has ended; its last line may be cut."""
        try:
            values_of(data)
        except NONSENSE:
            if name != STRAY and data and not is_error_text(data.decode("utf-8", "replace")):
                return
        self.event(data, t_ns, name)

    def accept(self) -> None:
        self._apply(StreamSignal.ACCEPT)

    def turn_away(self, t_ns: int, why: str) -> None:
        self._apply(StreamSignal.TURN_AWAY)
        self._end(StreamSignal.BODY_END, t_ns, why)

    def chunk(self, chunk: Chunk, t_ns: int) -> None:
        if self.outcome is Outcome.ABANDONED:
            self._late_chunk(chunk)
        elif chunk.error is not None:
            self._end(StreamSignal.ERROR, t_ns, error_message(chunk.error))
        else:
            self._read_chunk(chunk, t_ns)

    def finish(self) -> None:
        self._apply(StreamSignal.FINISH)

    def answer(self, body: bytes, t_ns: int) -> None:
        """An answer in one piece."""
        if self.outcome is Outcome.ABANDONED:
            self._late_event(body, b"")
            self._server_ended_ns = t_ns
            return
        look = next(iter(self._look(body, b"")), Look(unread=f"{shown(body)} is no answer"))
        self._ending.unread = look.unread
        if look.error is not None:
            self._end(StreamSignal.ERROR, t_ns, look.error)
        else:
            self._read_answer(look, t_ns)

    def refusal(self, body: bytes, t_ns: int) -> None:
        assert self._status_code is not None
        self._end(StreamSignal.BODY_END, t_ns, refusal_message(self._status_code, body))

    def body_ended(self, t_ns: int) -> None:
        """The response to an accepted stream is complete; after leaving also one that broke."""
        if self.outcome is Outcome.ABANDONED:
            self._late_tokens = self._late_tokens or 0
            self._server_ended_ns = t_ns
            return
        if self._look_again(t_ns):
            return
        ending = self._ending
        is_open = self.state in (State.ACCEPTED, State.READING)
        if is_open and ending.has_finished_by(self.tokens_read):
            self._apply(StreamSignal.FINISH)
        self._end(
            StreamSignal.BODY_END, t_ns, ending.with_last_words(ENDED_EARLY, self.tokens_read)
        )

    # Events of the user, the line and the run

    def leave(self, t0_ns: int, *, think_ns: int, wire_close: WireClose) -> None:
        self._end(StreamSignal.LEAVE, t0_ns, None)
        self._think_ns = think_ns
        self._wire_close = wire_close

    def time_out(self, t_ns: int, why: str) -> None:
        self._break(StreamSignal.TIMEOUT, t_ns, why)

    def break_off(self, t_ns: int, why: str) -> None:
        self._break(StreamSignal.BREAK, t_ns, why)

    def complain(self, problem: str) -> None:
        self._error = problem

    def cut(self, t_ns: int) -> None:
        if self.outcome is Outcome.ABANDONED:  # reads on, so that this ends the request
            self.outcome, self._ended_ns = Outcome.CUT_OFF, t_ns
        else:
            self._end(StreamSignal.CUT, t_ns, None)

    def row(self) -> RequestRow:
        if self.outcome is None or self._ended_ns is None:
            raise IllegalSignalError(f"{self!r} has not ended, so there is no row of it yet")
        spec, times, usage = self._spec, self._token_times_ns.tolist(), self._usage or UsageCounts()
        is_complete = self.outcome is Outcome.COMPLETED
        by = self._tokens.by
        scale = self._calibration if by is TokenCounting.CALIBRATED and times else None
        return RequestRow(
            **spec.columns(),
            think_ns=self._think_ns,
            sent_ns=self.sent_ns,
            first_token_ns=self.first_token_ns,
            last_token_ns=self.last_token_ns,
            abandoned_ns=self.abandoned_ns,
            ended_ns=self._ended_ns,
            wire_close=self._wire_close,
            tokens_read=self.tokens_read,
            token_times_ns=times,
            event_tokens=self._event_tokens,
            token_counting=by,
            outcome=self.outcome,
            status_code=self._status_code,
            error=self.error,
            finish_reason=self._ending.reason,
            prompt_tokens=usage.prompt_tokens or None,  # 0: the server does not count
            completion_tokens=self._final_count(usage) if is_complete else None,
            tokens_after_leaving=self._late_tokens,
            server_ended_ns=self._server_ended_ns,
            cached_tokens=usage.cached_tokens,
            answer=self._length.text if spec.turn is None else None,
            tokens_per_event=None if scale is None else scale.tokens,
            tokens_error=None if scale is None else scale.error_after(self._text_events),
            unread=self._ending.unread,
        )

    def _final_count(self, usage: UsageCounts) -> int | None:
        """A count of 0 after text has come is none."""
        count = usage.completion_tokens
        return None if not count and (self._text_events or self.tokens_read) else count

    # Decisions

    def _apply(self, signal: StreamSignal) -> None:
        target = None if self.outcome else TRANSITIONS[self.state].get(signal)
        if target is None:
            raise IllegalSignalError(f"{signal.name} cannot happen to {self!r}")
        if isinstance(target, State):
            self.state = target
        else:
            self.outcome = target

    def _end(self, signal: StreamSignal, t_ns: int, error: str | None) -> None:
        self._apply(signal)
        self._ended_ns = t_ns
        self._error = error

    def _break(self, signal: StreamSignal, t_ns: int, why: str) -> None:
        if self.outcome is not None or not self._look_again(t_ns):
            self._end(signal, t_ns, why)

    def _fail(self, failure: StreamFailure, t_ns: int) -> None:
        self._end(failure.signal, t_ns, failure.why)

    def _read_look(self, look: Look, t_ns: int) -> None:
        failure = self._ending.note(look, self.tokens_read)
        self.response_id = look.response_id or self.response_id
        if look.error is not None:
            is_in_place = look.is_plain and self.state is State.ACCEPTED
            error = f"{NO_STREAM} {look.error!r}" if is_in_place else look.error
            self._end(StreamSignal.ERROR, t_ns, error)
        elif failure is not None:
            self._fail(failure, t_ns)
        elif look.is_done:
            self._done(t_ns)
        else:
            if look.repeats and self.tokens_read and not self._comes_in_messages:
                for choice in look.choices:
                    choice.message = None
            self._read_chunk(look, t_ns)
            if look.ends and self.outcome is None and self._has_answer():
                self._apply(StreamSignal.FINISH)

    def _look_again(self, t_ns: int) -> bool:
        """What the quick reader may have passed over in the last event with text, if no other has
        said how the answer ended: a finish reason in the delta, an error of a choice, which ends
        the request (True)."""
        if self.state is not State.READING or not self._last_event:
            return False
        for look in self._look(self._last_event, b"")[:1]:
            if look.error is not None:
                self._end(StreamSignal.ERROR, t_ns, look.error)
                return True
            if look.usage is not None:
                self._fill_in(look.usage)
                self._usage = look.usage
            self._note_finish(look, t_ns)
            if look.ends and self.outcome is None:
                self._apply(StreamSignal.FINISH)
        return self.outcome is not None

    def _has_answer(self) -> bool:
        usage = self._usage
        is_counted = usage is not None and bool(usage.completion_tokens)
        return bool(self.tokens_read or self._length.uncounted or is_counted)

    def _done(self, t_ns: int) -> None:
        if self._look_again(t_ns):
            return
        ending, words = self._ending, self._ending.doubt(self.tokens_read)
        if words is not None:
            self._end(StreamSignal.ERROR, t_ns, words)
        elif self._has_answer() or ending.reason is not None:
            self._apply(StreamSignal.FINISH)
            self._is_done = True
        else:
            self._end(StreamSignal.ERROR, t_ns, ending.with_last_words(NO_ANSWER, self.tokens_read))

    def _read_late_account(self, data: bytes, name: bytes) -> None:
        """Only the count of tokens is still read after `[DONE]`."""
        for look in self._look(data, name):
            usage = look.usage
            if usage is not None and (usage.completion_tokens or 0) <= self._most_tokens:
                self._fill_in(usage)
                self._usage = usage

    def _read_token(self, chunk: Chunk, t_ns: int) -> bool:
        """Read a chunk that only adds tokens to one answer; False: it is another, or the first."""
        choices = chunk.choices
        if len(choices) != 1 or self.state is not _READING or self.outcome is not None:
            return False
        choice, usage = choices[0], chunk.usage
        if choice.finish_reason or chunk.error is not None:
            return False
        if self._keeps_text or self._counts_calls:
            return False
        tokens = self._count(choice, usage)
        if not tokens:
            return choice.has_text() and self._read_chunk(chunk, t_ns, tokens)
        if usage is not None:
            if not usage.prompt_tokens or usage.completion_tokens is None:
                self._fill_in(usage)
            self._usage = usage
        self._take(tokens, self.tokens_read + tokens, t_ns)
        return True

    def _read_quick(self, chunk: Chunk, t_ns: int) -> bool:
        """False: no text was found, or not of each answer, and nothing was read."""
        choices = chunk.choices
        if chunk.error is not None or not choices:
            return False
        if any(one.finish_reason or not one.has_text() for one in choices):
            return False
        return self._read_chunk(chunk, t_ns)

    def _read_chunk(self, chunk: Chunk, t_ns: int, tokens: int | None = None) -> Literal[True]:
        """`tokens`: of the chunk, if they were counted already."""
        choices, usage = chunk.choices, chunk.usage
        if tokens is None:  # there is no choice in the closing account: no token came with it
            tokens = sum(self._count(choice, usage) for choice in choices)
        if usage is not None:
            self._fill_in(usage)
            self._usage = usage
        is_last = any(choice.finish_reason for choice in choices)
        so_far = self.tokens_read + tokens
        if is_last or not tokens or self._keeps_text:  # else the count is the only length
            total = 0 if self._usage is None else self._usage.completion_tokens or 0
            so_far = max(so_far, total, self._length.add(chunk, tokens))
        if tokens and so_far <= self._most_tokens and self.state is not _READING:
            self._begin_reading(choices)
        if self._counts_calls and any(choice.is_call for choice in choices):
            self._call_tokens += tokens
        self._take(tokens, so_far, t_ns)
        if self.outcome is None and (is_last or not tokens):
            self._note_finish(chunk, t_ns)
        return True

    def _take(self, tokens: int, so_far: int, t_ns: int) -> None:
        """`so_far`: the length of the answer."""
        if so_far > self._most_tokens:
            self._end(StreamSignal.ERROR, t_ns, self._length.complaint(so_far))
        elif tokens:
            self.tokens_read += tokens
            self._token_times_ns.append(t_ns)
            self._event_tokens.append(tokens)

    def _begin_reading(self, choices: Sequence[Choice]) -> None:
        self._ending.begin_again(had_finished=self.state is State.FINISHED)
        self._shows_reasoning |= any(choice.is_reasoning for choice in choices)
        self._comes_in_messages = any(choice.message and not choice.delta for choice in choices)
        self._apply(StreamSignal.TOKEN)

    def _fill_in(self, usage: UsageCounts) -> None:
        """What an account leaves out, or counts as 0, is as it was before."""
        before = self._usage
        if before is not None and not usage.prompt_tokens:
            usage.prompt_tokens = before.prompt_tokens
        if before is not None and not usage.completion_tokens:
            usage.completion_tokens = before.completion_tokens
        if before is not None and usage.prompt_tokens_details is None:
            usage.prompt_tokens_details = before.prompt_tokens_details

    def _read_answer(self, answer: Look, t_ns: int) -> None:
        self._usage, self.response_id = answer.usage, answer.response_id
        counted = None if self._usage is None else self._usage.completion_tokens
        has_text = [choice.has_text() for choice in answer.choices]
        tokens = self._tokens.of_whole(has_text, counted or None if any(has_text) else counted)
        if tokens > self._most_tokens:
            self._end(StreamSignal.ERROR, t_ns, self._length.complaint(tokens))
            return
        self.tokens_read = tokens
        self._length.add(answer, tokens)
        self._ending.has_answers(len(answer.choices))
        self._note_finish(answer, t_ns)
        if self.outcome is None:
            has_ended = self._ending.reason is not None and self._ending.all_finished
            if any(has_text) or tokens or has_ended:
                self._apply(StreamSignal.FINISH)
            why = answer.notice or "the answer has no text, finish reason or count of tokens"
            self._end(StreamSignal.BODY_END, t_ns, self._ending.with_unread(why, tokens))

    def _late_event(self, data: bytes, name: bytes) -> None:
        self._late_tokens = self._late_tokens or 0
        for look in self._look(data, name):
            if look.error is None:
                self._late_chunk(look)

    def _late_chunk(self, chunk: Chunk) -> None:
        so_far = self._late_tokens or 0
        for choice in chunk.choices:
            so_far += self._count(choice, chunk.usage)
            self._ending.reason = end_of(choice.finish_reason) or self._ending.reason
        if so_far > self._most_tokens:
            self.complain(self._length.complaint(so_far))
        else:
            self._late_tokens = so_far

    def _note_finish(self, chunk: Chunk, t_ns: int) -> None:
        """An end that comes before any text or count of it is one only if the stream then ends."""
        failure = self._ending.finish(chunk, self.tokens_read)
        if failure is not None:
            self._fail(failure, t_ns)
        elif self._ending.is_an_end(chunk.choices) and self._has_answer():
            self._apply(StreamSignal.FINISH)
