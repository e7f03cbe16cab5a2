"""The life of one request, as its client sees it: a state machine without I/O and clock.

    SENT ──▶ ACCEPTED ──▶ READING ──▶ FINISHED ──▶ completed
      │ └──▶ BUSY ──▶ rejected
      └────▶ REFUSED ──▶ failed           SENT, ACCEPTED, READING ──▶ abandoned

- A stream that ends without a finish reason or `[DONE]` has failed; one that has finished is
  completed, even if the line breaks or the run ends before its last byte.
- One that the server aborts has failed, or timed out if its deadline was the reason.
- A request can be abandoned from the moment it is sent: some servers hold the headers back until
  the first token.

Tokens are not events. With continuous usage the server's own count decides, also for an event whose
text is still empty; else an event that shows text counts as one token, and the row says so. An
answer far longer than was asked for fails the request before it takes the memory. Tokens read after
leaving are counted apart.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Final

from harness.load.dialect import (
    ABORT,
    DONE,
    EXPIRED,
    LARGEST_COUNT,
    NONSENSE,
    Choice,
    Chunk,
    Usage,
    decode_chunk,
    error_message,
    refusal_message,
)
from harness.records import Delivery, Outcome, RequestRow, Role, TokenCounting, WireClose
from harness.workload.abandon import RequestSpec

# An honest server sends at most `max_tokens` of each answer. One that ignores `max_tokens` gets
# room for long answers too; an event with tokens takes some 20 bytes.
_MOST_TIMES_ASKED: Final = 16
_ROOM_TOKENS: Final = 10_000
_CHARS_A_TOKEN: Final = 64  # no whole text has so many

_EVENT: Final = "an event of the stream"
_EMPTY_EVENT: Final = b"null"  # the first of llama.cpp's answer to a list of prompts
ENDED_EARLY: Final = "the stream ended early: neither a finish reason nor [DONE]"
_BUSY_STATUSES: Final = frozenset({429, 503})


class State(Enum):
    SENT = auto()
    ACCEPTED = auto()  # the headers are there, no token yet
    READING = auto()
    FINISHED = auto()  # a finish reason or [DONE] was read
    BUSY = auto()  # refused at admission; its body is still to be read
    REFUSED = auto()


class Signal(Enum):
    ACCEPT = auto()
    TURN_AWAY = auto()
    REFUSE = auto()
    TOKEN = auto()
    FINISH = auto()
    ERROR = auto()  # the server sent an error, or nonsense, inside the stream
    ABORT = auto()  # the server cancelled the request unasked
    EXPIRE = auto()  # the same, because the request's own deadline had passed
    BODY_END = auto()
    LEAVE = auto()
    TIMEOUT = auto()
    BREAK = auto()  # the connection failed
    CUT = auto()  # the run ended


Targets = dict[Signal, State | Outcome]
_UNANSWERED: Final[Targets] = {
    Signal.TIMEOUT: Outcome.TIMED_OUT,
    Signal.BREAK: Outcome.FAILED,
    Signal.CUT: Outcome.CUT_OFF,
}
_IN_STREAM: Final[Targets] = {
    Signal.ERROR: Outcome.FAILED,
    Signal.ABORT: Outcome.FAILED,
    Signal.EXPIRE: Outcome.TIMED_OUT,
    Signal.FINISH: State.FINISHED,
}
_STREAMING: Final[Targets] = {
    **_UNANSWERED,
    **_IN_STREAM,
    Signal.TOKEN: State.READING,
    Signal.BODY_END: Outcome.FAILED,
    Signal.LEAVE: Outcome.ABANDONED,
}


def _however_it_ends(outcome: Outcome) -> Targets:
    ends = (Signal.BODY_END, Signal.TIMEOUT, Signal.BREAK, Signal.CUT)
    return dict.fromkeys(ends, outcome)


TRANSITIONS: Final[dict[State, Targets]] = {
    State.SENT: {
        **_UNANSWERED,
        Signal.ACCEPT: State.ACCEPTED,
        Signal.TURN_AWAY: State.BUSY,
        Signal.REFUSE: State.REFUSED,
        Signal.LEAVE: Outcome.ABANDONED,
    },
    State.ACCEPTED: _STREAMING,
    State.READING: _STREAMING,
    State.FINISHED: {
        **_however_it_ends(Outcome.COMPLETED),
        **_IN_STREAM,
        Signal.TOKEN: State.FINISHED,
    },
    State.BUSY: _however_it_ends(Outcome.REJECTED),
    State.REFUSED: _however_it_ends(Outcome.FAILED),
}


class IllegalSignalError(Exception):
    """The signal cannot happen in this state: a mistake of the caller."""


class StreamMachine:
    """Once `outcome` is set there is a `row()`; only events after leaving still change it.

    `_counted`: the server's latest count of each answer, or of all of them under 0. `_uncounted`:
    the events with text whose count stood still. `_answer_chars`: the length of `_answer`.
    """

    def __init__(
        self,
        spec: RequestSpec,
        *,
        sent_ns: int,
        continuous_usage: bool,
        usage_per_choice: bool = False,
        decode: Callable[[bytes], Chunk] = decode_chunk,
    ) -> None:
        self.state = State.SENT
        self.outcome: Outcome | None = None
        self.tokens_read = 0
        self._spec = spec
        self._sent_ns = sent_ns
        self._counting = TokenCounting.USAGE if continuous_usage else TokenCounting.EVENTS
        self._token_times_ns = array("q")  # 8 bytes each, where a list of such ints takes 40
        self._event_tokens: list[int] = []
        self._status_code: int | None = None
        self._finish_reason: str | None = None
        self._usage = Usage()
        self._think_ns: int | None = None
        self._wire_close: WireClose | None = None
        self._ended_ns: int | None = None
        self._error: str | None = None
        self._usage_per_choice = usage_per_choice
        self._decode = decode
        self._counted: defaultdict[int, int] = defaultdict(int)
        self._unfinished = spec.n
        asked = spec.max_tokens * spec.n
        self._most_tokens = min(_MOST_TIMES_ASKED * asked + _ROOM_TOKENS, LARGEST_COUNT)
        self._uncounted = 0
        self._late_tokens: int | None = None
        self._server_ended_ns: int | None = None
        self._answer: list[str] | None = [] if spec.role is Role.CANARY else None
        self._answer_chars = 0

    def __repr__(self) -> str:
        return f"<StreamMachine {self.state.name} outcome={self.outcome} tokens={self.tokens_read}>"

    @property
    def can_leave(self) -> bool:
        return self.outcome is None and Signal.LEAVE in TRANSITIONS[self.state]

    @property
    def token_times_ns(self) -> Sequence[int]:
        return self._token_times_ns

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

    # Events of the server

    def headers(self, status_code: int) -> None:
        self._status_code = status_code
        if status_code == 200:
            self._apply(Signal.ACCEPT)
        else:
            self._apply(Signal.TURN_AWAY if status_code in _BUSY_STATUSES else Signal.REFUSE)

    def event(self, data: bytes, t_ns: int) -> None:
        if self.outcome is Outcome.ABANDONED:
            self._late_event(data)
            return
        if data == DONE:
            self.finish()
            return
        if (chunk := self._decoded(_EVENT, data, t_ns)) is not None:
            self._read_chunk(chunk, t_ns)

    def accept(self) -> None:
        self._apply(Signal.ACCEPT)

    def turn_away(self, t_ns: int, why: str) -> None:
        self._apply(Signal.TURN_AWAY)
        self._end(Signal.BODY_END, t_ns, why)

    def chunk(self, chunk: Chunk, t_ns: int) -> None:
        if self.outcome is Outcome.ABANDONED:
            self._late_chunk(chunk)
        elif chunk.error is not None:
            self._end(Signal.ERROR, t_ns, error_message(chunk.error))
        else:
            self._read_chunk(chunk, t_ns)

    def finish(self) -> None:
        self._apply(Signal.FINISH)

    def answer(self, body: bytes, t_ns: int) -> None:
        if self.outcome is Outcome.ABANDONED:
            self._late_event(body)
            self._server_ended_ns = t_ns
            return
        if (chunk := self._decoded("the answer", body, t_ns)) is not None:
            self._read_answer(chunk, t_ns)

    def refusal(self, body: bytes, t_ns: int) -> None:
        assert self._status_code is not None
        self._end(Signal.BODY_END, t_ns, refusal_message(self._status_code, body))

    def body_ended(self, t_ns: int) -> None:
        """The response to an accepted stream is complete; after leaving also one that broke."""
        if self.outcome is Outcome.ABANDONED:
            self._late_tokens = self._late_tokens or 0
            self._server_ended_ns = t_ns
            return
        self._end(Signal.BODY_END, t_ns, ENDED_EARLY)

    def _decoded(self, what: str, data: bytes, t_ns: int) -> Chunk | None:
        try:
            chunk = self._decode(data)
        except NONSENSE as error:
            if what != _EVENT or data != _EMPTY_EVENT:
                self._end(Signal.ERROR, t_ns, f"{what} makes no sense ({error})")
            return None
        if chunk.error is None:
            return chunk
        self._end(Signal.ERROR, t_ns, error_message(chunk.error))
        return None

    # Events of the user, the line and the run

    def leave(self, t0_ns: int, *, think_ns: int, wire_close: WireClose) -> None:
        self._end(Signal.LEAVE, t0_ns, None)
        self._think_ns = think_ns
        self._wire_close = wire_close

    def time_out(self, t_ns: int, why: str) -> None:
        self._end(Signal.TIMEOUT, t_ns, why)

    def break_off(self, t_ns: int, why: str) -> None:
        self._end(Signal.BREAK, t_ns, why)

    def complain(self, problem: str) -> None:
        self._error = problem

    def cut(self, t_ns: int) -> None:
        if self.outcome is Outcome.ABANDONED:  # reads on, so that this ends the request
            self.outcome, self._ended_ns = Outcome.CUT_OFF, t_ns
        else:
            self._end(Signal.CUT, t_ns, None)

    def row(self) -> RequestRow:
        if self.outcome is None or self._ended_ns is None:
            raise IllegalSignalError(f"{self!r} has not ended, so there is no row of it yet")
        spec, times = self._spec, self._token_times_ns.tolist()
        is_complete = self.outcome is Outcome.COMPLETED
        return RequestRow(
            request_id=spec.request_id,
            arm=spec.arm,
            role=spec.role,
            trial=spec.trial,
            user=spec.user,
            stream=spec.delivery is Delivery.STREAM,
            planned_abandon=spec.planned_abandon,
            think_ns=self._think_ns,
            max_tokens=spec.max_tokens,
            intended_start_ns=spec.intended_start_ns,
            sent_ns=self._sent_ns,
            first_token_ns=self.first_token_ns,
            last_token_ns=self.last_token_ns,
            abandoned_ns=self.abandoned_ns,
            ended_ns=self._ended_ns,
            wire_close=self._wire_close,
            tokens_read=self.tokens_read,
            token_times_ns=times,
            event_tokens=self._event_tokens,
            token_counting=self._counting,
            outcome=self.outcome,
            status_code=self._status_code,
            error=None if is_complete else self._error,
            finish_reason=self._finish_reason,
            prompt_tokens=self._usage.prompt_tokens,
            completion_tokens=self._usage.completion_tokens if is_complete else None,
            plan=spec.plan,
            way="" if spec.way is None else spec.way.value,
            delivery=spec.delivery,
            n=spec.n,
            tokens_after_leaving=self._late_tokens,
            server_ended_ns=self._server_ended_ns,
            repeats=spec.repeats,
            answer=None if self._answer is None else "".join(self._answer),
        )

    # Decisions

    def _apply(self, signal: Signal) -> None:
        target = None if self.outcome else TRANSITIONS[self.state].get(signal)
        if target is None:
            raise IllegalSignalError(f"{signal.name} cannot happen to {self!r}")
        if isinstance(target, State):
            self.state = target
        else:
            self.outcome = target

    def _end(self, signal: Signal, t_ns: int, error: str | None) -> None:
        self._apply(signal)
        self._ended_ns = t_ns
        self._error = error

    def _read_chunk(self, chunk: Chunk, t_ns: int) -> None:
        if chunk.usage is not None:
            self._usage = chunk.usage
        tokens, is_last = 0, False
        for choice in chunk.choices:  # none in the closing account: no token came with it
            tokens += self._count(choice, chunk.usage)
            is_last = is_last or choice.finish_reason is not None
        so_far = self.tokens_read + tokens
        if is_last or not tokens or self._answer is not None:  # else the count is the only length
            so_far = max(so_far, self._other_lengths(chunk, tokens))
        if so_far > self._most_tokens:
            self._end(Signal.ERROR, t_ns, self._too_long(so_far))
            return
        if tokens:
            if self.state is not State.READING or self.outcome:  # else it changes nothing
                self._apply(Signal.TOKEN)
            self.tokens_read += tokens
            self._token_times_ns.append(t_ns)
            self._event_tokens.append(tokens)
        if is_last:
            self._note_finish(chunk, t_ns)

    def _other_lengths(self, chunk: Chunk, tokens: int) -> int:
        """The length of the answer in tokens by the server's total, by the events that were not
        counted, or by the kept text of a canary."""
        texts = [text for choice in chunk.choices if (text := choice.shown())]
        if texts and not tokens:
            self._uncounted += 1
        if self._answer is not None:
            self._answer += texts
            self._answer_chars += sum(map(len, texts))
        total = self._usage.completion_tokens or 0
        return max(total, self._uncounted, self._answer_chars // _CHARS_A_TOKEN)

    def _read_answer(self, answer: Chunk, t_ns: int) -> None:
        self._usage = answer.usage or self._usage
        tokens = self._usage.completion_tokens
        self._counting = TokenCounting.EVENTS if tokens is None else TokenCounting.USAGE
        if tokens is None:
            tokens = sum(choice.has_text() for choice in answer.choices)
        if tokens > self._most_tokens:
            self._end(Signal.ERROR, t_ns, self._too_long(tokens))
            return
        self.tokens_read = tokens
        self._unfinished = len(answer.choices)  # a server may not know `n`
        self._note_finish(answer, t_ns)
        if self.outcome is None:
            self._end(Signal.BODY_END, t_ns, "the answer has no finish reason")

    def _late_event(self, data: bytes) -> None:
        self._late_tokens = self._late_tokens or 0
        if data == DONE:
            return
        try:
            self._late_chunk(self._decode(data))
        except NONSENSE:
            return

    def _late_chunk(self, chunk: Chunk) -> None:
        so_far = self._late_tokens or 0
        for choice in chunk.choices:
            so_far += self._count(choice, chunk.usage)
            self._finish_reason = choice.finish_reason or self._finish_reason
        if so_far > self._most_tokens:
            self.complain(self._too_long(so_far))
        else:
            self._late_tokens = so_far

    def _too_long(self, tokens: int) -> str:
        asked = f"`max_tokens` is {self._spec.max_tokens}"
        return f"the answer is far longer than was asked for: {tokens} tokens by now, and {asked}"

    def _note_finish(self, chunk: Chunk, t_ns: int) -> None:
        for choice in chunk.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
            if choice.finish_reason == ABORT:
                reason = chunk.cancellation_info.reason if chunk.cancellation_info else None
                why = f"the server aborted the request: {reason or 'no reason given'}"
                self._end(Signal.EXPIRE if reason == EXPIRED else Signal.ABORT, t_ns, why)
                return
            if choice.finish_reason is not None:
                self._unfinished -= 1
                if self._unfinished <= 0:
                    self._apply(Signal.FINISH)

    def _count(self, choice: Choice, usage: Usage | None) -> int:
        if choice.finish_reason == ABORT and not choice.has_text():
            return 0  # its usage counts what was generated, sent or not
        if usage is not None and self._counting is TokenCounting.USAGE:
            so_far = usage.completion_tokens
            if so_far is not None:
                answer = choice.index if self._usage_per_choice else 0
                before = self._counted[answer]
                if so_far <= before:
                    return 0
                self._counted[answer] = so_far
                return so_far - before
        if not choice.has_text():
            return 0
        self._counting = TokenCounting.EVENTS  # one such event makes the whole row an estimate
        return 1
