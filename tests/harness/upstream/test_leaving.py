"""The log says when and how a client left, in every phase of a request."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from unittest.mock import ANY

import pytest

from harness.upstream.orders import Order
from tests.harness.upstream.behind import Caller, Running, upstream

LONG_MS = 60_000.0
Phase = Callable[[Running], Caller]


def in_the_queue(server: Running) -> Caller:
    server.log.wait("slot", "other")
    caller = Caller(server.port, Order(id="x"))
    server.log.wait("arrived", "x")
    return caller


def before_the_headers(server: Running) -> Caller:
    caller = Caller(server.port, Order(id="x", headers="late", prefill_ms=LONG_MS))
    server.log.wait("slot", "x")
    return caller


def in_a_silent_prefill(server: Running) -> Caller:
    caller = Caller(server.port, Order(id="x", prefill_ms=LONG_MS))
    caller.until(b"\r\n\r\n")
    server.log.wait("slot", "x")
    return caller


def in_mid_stream(server: Running) -> Caller:
    caller = Caller(server.port, Order(id="x"))
    caller.until(b" w2")
    return caller


def in_silence_after_tokens(server: Running) -> Caller:
    caller = Caller(server.port, Order(id="x", act="silent", after=2))
    caller.until(b" w2")
    server.log.wait("silent", "x")
    return caller


def before_a_whole_answer(server: Running) -> Caller:
    caller = Caller(server.port, Order(id="x"), stream=False)
    server.log.wait("first_token", "x")
    return caller


def after_the_last_token(server: Running) -> Caller:
    """And before the usage."""
    caller = Caller(server.port, Order(id="x", tokens=3, end_ms=LONG_MS))
    caller.until(b'"finish_reason":"stop"')
    server.log.wait("stopped", "x")
    return caller


PHASES: list[Phase] = [
    in_the_queue,
    before_the_headers,
    in_a_silent_prefill,
    in_mid_stream,
    in_silence_after_tokens,
    before_a_whole_answer,
    after_the_last_token,
]


@contextmanager
def occupied(server: Running) -> Iterator[None]:
    """The only slot is taken."""
    other = Caller(server.port, Order(id="other", act="silent"))
    try:
        server.log.wait("slot", "other")
        yield
    finally:
        other.close()


@pytest.mark.parametrize("way", ["fin", "rst", "half-close"])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_a_client_that_leaves_is_seen_at_once_and_nothing_more_is_made(
    phase: Phase, way: str
) -> None:
    with upstream(slots=1) as server:
        if phase is in_the_queue:
            with occupied(server):
                caller = phase(server)
                t0_ns = caller.leave(way)
                seen = server.over("x")
        else:
            caller = phase(server)
            t0_ns = caller.leave(way)
            seen = server.over("x")
        now_ns = time.perf_counter_ns()
        caller.close()
        assert seen["closed"] == ("rst" if way == "rst" else "fin")
        assert t0_ns <= seen["closed_ns"] <= now_ns
        assert seen["has_left"]
        assert seen["ended_ns"] is None
        assert seen["usage_ns"] is None
        assert seen["tokens"] == seen["tokens_at_close"]
        is_made = phase is after_the_last_token
        assert seen["why"] == ("stop" if is_made else "left")
        assert (seen["stopped_ns"] < seen["closed_ns"]) == is_made
        check_phase(phase, seen)
        after = Caller(server.port, Order(id="after", tokens=1))
        after.until(b"[DONE]")  # the slot is free
        after.close()


def check_phase(phase: Phase, seen: dict[str, object]) -> None:
    """What it had when its client left."""
    is_stream = phase is not before_a_whole_answer
    assert seen["is_stream"] == is_stream
    assert (seen["slot_ns"] is None) == (phase is in_the_queue)
    has_headers = is_stream and phase is not before_the_headers
    assert (seen["headers_ns"] is not None) == has_headers
    least = {in_mid_stream: 2, in_silence_after_tokens: 2, before_a_whole_answer: 1}
    tokens = seen["tokens"]
    assert isinstance(tokens, int)
    if phase in least:
        assert tokens >= least[phase]
    else:
        assert tokens == (3 if phase is after_the_last_token else 0)


def test_a_leave_ends_no_other_request() -> None:
    with upstream(slots=2) as server:
        stays = Caller(server.port, Order(id="stays"), tokens=60)
        leaves = Caller(server.port, Order(id="leaves"))
        leaves.until(b" w2")
        leaves.leave("rst")
        assert server.over("leaves")["why"] == "left"
        stays.until(b"[DONE]")
        stays.close()
        seen = server.over("stays")
        assert (seen["tokens"], seen["why"], seen["has_left"]) == (60, "length", False)


def test_of_a_kept_half_close_the_answer_goes_on_to_its_end() -> None:
    with upstream(keeps_half_closed=True) as server:
        caller = Caller(server.port, Order(id="x"), tokens=40)
        caller.until(b" w2")
        caller.leave("half-close")
        assert caller.to_the_end().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        seen = server.over("x")
        assert (seen["closed"], seen["why"], seen["tokens"]) == ("fin", "length", 40)
        assert seen["rst_ns"] is None
        assert seen["tokens_after_close"] == 40 - seen["tokens_at_close"] > 0
        caller.close()


def test_of_a_kept_half_close_that_was_a_close_the_next_write_shows_it() -> None:
    with upstream(keeps_half_closed=True) as server:
        caller = Caller(server.port, Order(id="x"))
        caller.until(b" w2")
        caller.leave("fin")
        seen = server.over("x")
        assert seen["fin_ns"] < seen["rst_ns"] <= seen["stopped_ns"]
        assert (seen["closed"], seen["why"]) == ("fin", "left")
        assert seen["tokens_after_close"] >= 1
        caller.close()


def test_a_reset_after_a_kept_half_close_is_seen_in_silence() -> None:
    with upstream(keeps_half_closed=True) as server:
        caller = in_a_silent_prefill(server)
        caller.leave("half-close")
        server.log.wait("fin", "x")
        assert server.truth("x")[0]["stopped_ns"] is None
        t0_ns = caller.leave("rst")
        seen = server.over("x")
        assert t0_ns <= seen["rst_ns"] <= time.perf_counter_ns()
        assert (seen["why"], seen["tokens"]) == ("left", 0)


def test_a_reader_that_stalls_is_noted_and_its_leaving_is_seen() -> None:
    with upstream(step_ms=0.2) as server:
        caller = Caller(server.port, Order(id="x", pad=10_000), tokens=30_000, receives=4096)
        stalled = server.log.wait("stalled", "x")
        other = Caller(server.port, Order(id="other"), tokens=100)
        other.until(b"[DONE]")  # by then both buffers are full for good
        other.close()
        caller.leave("rst")
        seen = server.over("x")
        assert seen["stalled_ns"] == stalled["t_ns"]
        assert (seen["closed"], seen["why"]) == ("rst", "left")
        assert seen["unsent_bytes"] > 0


@pytest.mark.parametrize("leaves", [True, False])
def test_an_answer_ends_when_the_kernel_has_taken_all_of_it(*, leaves: bool) -> None:
    with upstream() as server:
        caller = Caller(server.port, Order(id="x", pad=10_000), tokens=60, receives=4096)
        server.log.wait("stopped", "x")
        (seen,) = server.truth("x")
        assert (seen["tokens"], seen["ended_ns"], seen["over_ns"]) == (60, None, None)
        if leaves:
            caller.leave("rst")
        else:
            caller.until(b"[DONE]")
        seen = server.over("x")
        caller.close()
        assert seen["has_left"] == leaves
        assert (seen["ended_ns"] is None) == leaves
        assert (seen["why"], seen["unsent_bytes"]) == ("length", ANY if leaves else None)


def test_too_much_for_a_reader_that_stalls_is_cut() -> None:
    with upstream(step_ms=0.1) as server:
        caller = Caller(server.port, Order(id="x", pad=10_000), tokens=30_000)
        seen = server.over("x")
        assert (seen["closed"], seen["why"]) == (None, "unread")
        with suppress(ConnectionResetError):
            caller.to_the_end()
        caller.close()


def test_the_end_of_a_kept_connection_is_no_leave() -> None:
    with upstream() as server:
        caller = Caller(server.port, Order(id="x", tokens=2))
        caller.until(b"[DONE]\n\n\r\n0\r\n\r\n")
        server.over("x")
        caller.leave("fin")
        server.log.wait("fin", "x")
        (seen,) = server.truth("x")
        assert seen["ended_ns"] < seen["closed_ns"]
        assert not seen["has_left"]
        caller.close()


def test_requests_that_are_open_when_the_server_ends_say_so() -> None:
    with upstream() as server:
        caller = in_a_silent_prefill(server)
    over = server.log.wait("over", "x")
    assert (over["why"], over["closed"]) == ("shutdown", None)
    caller.close()
