"""A request in flight, in a greenlet of its own, that another greenlet watches and makes leave.

Where the moment to leave follows from the request itself (a number of tokens read, a time
passed), a leave rule is enough. A live stream leaves when something outside says so: when another
stream's token came, when a probe is queued, in the middle of another's prefill.
"""

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

import gevent
from gevent.event import Event

from harness.client.conversation import Conversation
from harness.client.exchange import Http1Exchange
from harness.client.session import LoadSession
from harness.client.transport import GaveUpError
from harness.records import RequestRow, Way
from harness.workload.abandon import RequestSpec
from harness.workload.event_scale import Counted

_DRAINED_EVERY_S: Final = 0.2
_DRAINED_AT_ONCE: Final = 32  # streams, then the other greenlets have their turn


class LiveStream:
    """Sent at once, or at the event loop's next turn. `row`: once it has ended. `edit` gets it
    before it is kept."""

    def __init__(
        self,
        session: LoadSession,
        spec: RequestSpec,
        text: str | None = None,
        edit: Callable[[RequestRow], None] = lambda _row: None,
    ) -> None:
        self.spec = session.issue(spec)
        self.row: RequestRow | None = None
        self._client = session.client
        self._text = session.prompt(self.spec, n=session.sent) if text is None else text
        self._keep, self._edit = session.keep, edit
        self._conversation: Conversation | None = None
        self._leaves = False
        self._way: Way | None = None
        self._waiting: list[tuple[int, Event]] = []
        self._greenlet = gevent.spawn(self._run)

    def __repr__(self) -> str:
        return f"<LiveStream {self.spec.request_id} tokens={self.tokens} ended={self.has_ended}>"

    @property
    def has_ended(self) -> bool:
        return self.row is not None

    @property
    def tokens(self) -> int:
        return 0 if self._conversation is None else self._conversation.stream.tokens_read

    @property
    def sent_ns(self) -> int | None:
        return None if self._conversation is None else self._conversation.stream.sent_ns

    @property
    def counted(self) -> Counted | None:
        """The count of a whole answer: see StreamMachine."""
        return None if self._conversation is None else self._conversation.stream.counted

    @property
    def token_times_ns(self) -> Sequence[int]:
        return () if self._conversation is None else self._conversation.stream.token_times_ns

    @property
    def first_token_ns(self) -> int | None:
        return None if self._conversation is None else self._conversation.stream.first_token_ns

    @property
    def last_token_ns(self) -> int | None:
        return None if self._conversation is None else self._conversation.stream.last_token_ns

    @property
    def abandoned_ns(self) -> int | None:
        return None if self._conversation is None else self._conversation.stream.abandoned_ns

    def wait_tokens(self, tokens: int, timeout_s: float | None) -> bool:
        """False: they have not come in this time, or the stream ended before."""
        if self.tokens < tokens and not self.has_ended:
            entry = tokens, Event()
            self._waiting.append(entry)
            entry[1].wait(timeout_s)
            self._waiting.remove(entry)
        return self.tokens >= tokens

    def leave(self, way: Way | None = None) -> None:
        """Leave now, whatever the server has sent by now. It does not wait: t0, stamped right
        before the act, is `abandoned_ns` after the event loop's next turn. After the answer's end
        it does nothing."""
        self._leaves, self._way = True, way
        if self._conversation is not None:
            self._conversation.leave_at_once(way)
        gevent.get_hub().loop.run_callback(self._interrupt)

    @property
    def event_tokens(self) -> Sequence[int]:
        """The tokens of each event in `token_times_ns`."""
        return () if self._conversation is None else self._conversation.stream.event_tokens

    def set_aside(self) -> bool:
        """See Http1Exchange. False over other protocols, too."""
        return isinstance(self._conversation, Http1Exchange) and self._conversation.set_aside()

    @property
    def is_unread(self) -> bool:
        """Its tokens are not taken in: it is drained, or its user does not read for a while."""
        return isinstance(self._conversation, Http1Exchange) and self._conversation.is_stalled

    def discard(self) -> None:
        self.exchange.discard()

    @property
    def exchange(self) -> Http1Exchange:
        """Only a stream over HTTP/1.1 has one."""
        assert isinstance(self._conversation, Http1Exchange)
        return self._conversation

    def join(self, timeout_s: float | None = None) -> RequestRow | None:
        """Wait until it has ended: its row, or None if the time was too short."""
        self._greenlet.join(timeout_s)
        return self.row

    def cut(self) -> None:
        """End it now, as the end of a load does: no leaving of a user."""
        self._greenlet.kill()

    def _run(self) -> None:
        conversation = self._client.begin(self.spec, self._text, self._note_progress)
        if self._leaves:
            conversation.leave_at_once(self._way)
        self._conversation = conversation
        self._client.see_through(conversation, self._end)

    def _interrupt(self) -> None:
        conversation = self._conversation
        if conversation is not None and conversation.waits_for_interrupt:
            self._greenlet.throw(GaveUpError)

    def _note_progress(self, tokens_read: int) -> None:
        for tokens, reached in self._waiting:
            if tokens_read >= tokens:
                reached.set()

    def _end(self, row: RequestRow) -> None:
        self._edit(row)
        self.row = row
        for _, reached in self._waiting:
            reached.set()
        self._keep(row)


def join_all(streams: Sequence[LiveStream], longest_s: float) -> list[RequestRow | None]:
    """Their rows, in order; None for a stream that has not ended in this time."""
    until_s = time.monotonic() + longest_s
    return [stream.join(max(0.0, until_s - time.monotonic())) for stream in streams]


class Drain:
    """Holds streams open without reading them: what they get is thrown away a few times a second.
    `streams`: the streams that it holds now; `taken`: all that it has held."""

    def __init__(self) -> None:
        self.streams: list[LiveStream] = []
        self.taken = set[LiveStream]()
        self._is_running = False

    def add(self, stream: LiveStream) -> None:
        """Call it after the first token of the stream. A stream that must be read is read on."""
        if stream.has_ended or not stream.set_aside():
            return
        self.streams.append(stream)
        self.taken.add(stream)
        if not self._is_running:
            self._is_running = True
            gevent.spawn(self._run)

    def add_later_ones(self, streams: Sequence[LiveStream], first: int, longest_s: float) -> None:
        """All but the first to begin, each after its first token. It does not wait."""
        begun = count(1)

        def watch(stream: LiveStream) -> None:
            if stream.wait_tokens(1, longest_s) and next(begun) > first:
                self.add(stream)

        for stream in streams:
            gevent.spawn(watch, stream)

    def _run(self) -> None:
        while self.streams:
            gevent.sleep(_DRAINED_EVERY_S)
            for number, stream in enumerate(list(self.streams), start=1):
                stream.discard()
                if number % _DRAINED_AT_ONCE == 0:
                    gevent.sleep(0)
            self.streams = [one for one in self.streams if not one.has_ended]
        self._is_running = False
