"""Every odd stream against what is true of it: by the load's client, by the harness's own requests,
and by the suite's routes, each over loopback.

The server sends a part when the client has read the one before, so its log says between which two
moments a token was read, however slow the machine is.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from harness.client.chunk import DONE
from harness.conform.routes import Routes
from harness.experiments.outcome import CannotDecideError
from harness.records import Outcome, RequestRow
from harness.run.settle import Asker, NotServedError
from tests.harness.client.asking import PLAN, plan_of
from tests.harness.client.conftest import Connect, Exchange, Script, Serve
from tests.harness.client.odd_streams import ALL, HEAD, MANY, ZERO, Odd
from tools.truth.stream_docs import PAGE, page

TOKENS = 24  # asked for
SAYS_DONE = re.compile(rb'^(?:data: *)+"?\[?done\]?"? *$', re.IGNORECASE | re.MULTILINE)
by_name = pytest.mark.parametrize("odd", ALL, ids=[odd.name for odd in ALL])


class Turns:
    """The server's log, `sent_ns`, and the client's word that it has read a part."""

    def __init__(self, odd: Odd, leaves_after: int | None = None) -> None:
        self.sent_ns: list[int] = []
        self._odd = odd
        self._leaves_after = leaves_after
        self._read = threading.Semaphore(0)

    def script(self, x: Exchange) -> None:
        x.send(self._odd.head)
        for part in self._odd.parts:
            self.sent_ns.append(time.perf_counter_ns())
            send(x, self._odd, part)
            while not self._read.acquire(timeout=0.01):
                if x.client_left_within(0):
                    return
        x.send(self._odd.end)

    def rule(self, tokens_read: int) -> int | None:
        if self._leaves_after is not None and tokens_read >= self._leaves_after:
            return 0  # the server waits: no part comes that its user would not have wanted
        if self.sent_ns:
            self._read.release()
        return None


def send(x: Exchange, odd: Odd, part: bytes) -> None:
    if odd.head is HEAD:
        x.chunk(part)
    else:
        x.send(part)


def at_once(odd: Odd) -> Script:
    def script(x: Exchange) -> None:
        x.send(odd.head)
        for part in odd.parts:
            send(x, odd, part)
        x.send(odd.end)

    return script


@pytest.fixture
def row_of(serve: Serve, connect: Connect) -> Callable[[Odd, Turns], RequestRow]:
    def ask(odd: Odd, turns: Turns) -> RequestRow:
        target: dict[str, Any] = {"path": odd.path, "continuous_usage": False}
        more = {"target": target, "counted_answers": list(odd.counted)}
        return connect(serve(turns.script).url, **more).ask(turns.rule, max_tokens=TOKENS)

    return ask


@by_name
def test_a_user_that_stays(odd: Odd, row_of: Callable[[Odd, Turns], RequestRow]) -> None:
    turns = Turns(odd)
    row = row_of(odd, turns)
    assert row.outcome is (Outcome.FAILED if odd.error else Outcome.COMPLETED)
    assert odd.error in (row.error or "")
    assert (odd.unread == "") is (row.unread is None)
    assert odd.unread in (row.unread or "")
    assert (row.tokens_read, sum(row.event_tokens)) == (odd.tokens, odd.tokens)
    assert (odd.first is None) is (row.first_token_ns is None)
    if odd.first is not None and row.first_token_ns is not None:
        assert turns.sent_ns[odd.first] <= row.first_token_ns
        assert row.first_token_ns <= [*turns.sent_ns, row.ended_ns][odd.first + 1]


@by_name
def test_a_user_that_leaves(odd: Odd, row_of: Callable[[Odd, Turns], RequestRow]) -> None:
    turns = Turns(odd, odd.planned)
    row = row_of(odd, turns)
    assert (row.outcome is Outcome.ABANDONED) is (odd.leaves is not None)
    if odd.leaves is not None:
        assert len(turns.sent_ns) == odd.leaves + 1
        assert row.tokens_read >= odd.planned


def answers_of(odd: Odd, url: str) -> Iterator[int]:
    target = PLAN.target.model_copy(update={"path": odd.path})
    with httpx.Client() as client:
        asker = Asker(
            client=client, url=url, target=target, model="m", clock_ns=time.perf_counter_ns
        )
        yield from asker.ask("Hello", TOKENS, longest_s=30)


@by_name
def test_the_harnesss_own_requests(odd: Odd, serve: Serve) -> None:
    """What is completed is served, and what is not is said in the server's words."""
    url, events = serve(at_once(odd)).url, odd.tokens if odd not in MANY else None
    if odd.error or odd.first is None:
        with pytest.raises(NotServedError) as raised:
            list(answers_of(odd, url))
        assert odd.error in str(raised.value)
        assert "dialect" in odd.error or "dialect" not in str(raised.value)
    else:
        assert events in (None, len(list(answers_of(odd, url))))


@by_name
def test_the_suites_routes(odd: Odd, serve: Serve) -> None:
    """They see each event, whatever it holds, and say that a stream broke only if it did."""
    with closing(Routes(plan_of(serve(at_once(odd)).url))) as routes:
        values = list(routes.events(odd.path, {"stream": True}))
    stream = b"".join(odd.parts).replace(b"\r", b"\n")
    assert (DONE in values) is (SAYS_DONE.search(stream) is not None)
    assert sum(isinstance(value, dict) for value in values) <= 3 * len(odd.parts) + 3


def test_the_table_is_up_to_date() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == page(written), "run `make stream-docs`"


def test_the_suites_routes_do_not_cover_up_a_break(serve: Serve) -> None:
    def breaks(x: Exchange) -> None:
        x.send(HEAD)
        x.chunk(b'data: {"choices": [{"text": "a"}]}\n\n')

    said = pytest.raises(CannotDecideError, match="a stream broke")
    with closing(Routes(plan_of(serve(breaks).url))) as routes, said:
        list(routes.events("/v1/completions", {}))


def test_the_suites_routes_read_a_last_event_without_its_blank_line(serve: Serve) -> None:
    def ends(x: Exchange) -> None:
        x.send(HEAD)
        x.chunk(b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]')
        x.send(ZERO)

    with closing(Routes(plan_of(serve(ends).url))) as routes:
        assert list(routes.events("/v1/completions", {}))[1:] == [DONE]
