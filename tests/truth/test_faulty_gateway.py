"""The gateway is clean without a switch; each switch does what it says, and nothing else."""

import re
import zlib

import httpx
import pytest

from harness.upstream.orders import Order
from tests.e2e.running import faulty_gateway, wait_until
from tests.harness.upstream.behind import ROUTES, Caller, body_of, upstream
from tests.harness.upstream.test_leaving import PHASES, Phase, in_the_queue, occupied
from tools.truth.gateway_exchange import BROKE_OFF
from tools.truth.gateway_facts import (
    AT_ONCE_NS,
    FAULT_S,
    LEAVES,
    Facts,
    between,
    observed,
    post,
    truth,
)
from tools.truth.gateway_wire import GZIP

pytestmark = pytest.mark.e2e
CLEAN_NS = 3_000_000
NUM_LEAVES = 120
OWN = re.compile(r'[a-z]+[-_][0-9]+"|"created(_at)?":[0-9]+')  # of one answer alone


@pytest.mark.parametrize("way", ["fin", "rst", "half-close"])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_a_clean_gateway_hands_a_leave_on_at_once(phase: Phase, way: str) -> None:
    with between({}, slots=1) as (gateway, server):
        if phase is in_the_queue:
            with occupied(server):
                caller = phase(gateway)
                t0_ns = caller.leave(way)
                seen = server.over("x")
        else:
            caller = phase(gateway)
            t0_ns = caller.leave(way)
            seen = server.over("x")
        caller.close()
        assert seen["has_left"]
        assert 0 < seen["closed_ns"] - t0_ns < AT_ONCE_NS
        assert seen["tokens_after_close"] == 0
        (row,) = gateway.rows(1)
        assert row["outcome"] == "left"
        assert caller.read.count(b'"text":" w') <= row["completion_tokens"] <= seen["tokens"]
        assert gateway.gauge() == 0


@pytest.mark.alone
def test_a_clean_gateway_hands_leaves_on_within_milliseconds() -> None:
    lags_ns = []
    with between({}, step_ms=5.0) as (gateway, server):
        for number in range(NUM_LEAVES):
            is_silent, name = number % 2 == 1, f"x{number}"
            order = Order(id=name, act="silent" if is_silent else "go-on")
            caller = Caller(gateway.port, order)
            caller.until(b"\r\n\r\n" if is_silent else b" w2")
            t0_ns = caller.leave(("fin", "rst", "half-close")[number % 3])
            lags_ns.append(server.over(name)["closed_ns"] - t0_ns)
            caller.close()
    # Where all processors are busy, a few wait for one.
    assert sorted(lags_ns)[NUM_LEAVES * 9 // 10] < CLEAN_NS


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dialect", ROUTES)
def test_a_clean_gateway_changes_no_answer(dialect: str, *, stream: bool) -> None:
    body = body_of(dialect, Order(id="x"), tokens=4, stream=stream)
    with between({}) as (gateway, server):
        answers = set[tuple[str, str]]()
        for port in (server.port, gateway.port, gateway.port):
            url = f"http://127.0.0.1:{port}{ROUTES[dialect]}"
            answer = httpx.post(url, content=body, trust_env=False)
            kind = answer.headers["content-type"].partition(";")[0]
            answers.add((kind, OWN.sub("", answer.text)))
        rows = gateway.rows(2)
    ((kind, text),) = answers
    assert "w4" in text
    assert kind == ("text/event-stream" if stream else "application/json")
    assert [(row["prompt_tokens"], row["completion_tokens"]) for row in rows] == [(6, 4)] * 2


AT_ONCE, LATE, TO_THE_END = (
    dict.fromkeys(LEAVES, word) for word in ("at once", "late", "to the end")
)
ALL = {f"{name} bill": "all" for name in LEAVES}
NOTHING = {f"{name} bill": 0 for name in ("fin", "rst", "half-close")}  # others got nothing
HALF_CLOSED = dict.fromkeys(("half-close", "unary"), "to the end")
CLEAN: Facts = {
    **AT_ONCE,
    **{f"{name} bill": "right" for name in LEAVES},
    "rst asked": 1,
    "after leaves": 200,
    "connections": True,
    "gauge": 0,
    "stream bill": 5,
    "whole bill": 5,
    "model": "any",
    "cut": ["error", "is_cut"],
    "500": 500,
    "500 asked": 1,
}
FAULTS: list[tuple[Facts, Facts]] = [
    ({}, {}),
    ({"late_s": FAULT_S}, LATE),
    ({"at_next_write": True}, {"silent": "late", "unary": "to the end"}),
    (
        {"half_closed": True},
        HALF_CLOSED | {f"{name} bill": "all" for name in HALF_CLOSED} | {"silent": "late"},
    ),
    ({"drain_s": FAULT_S}, LATE),
    ({"drain_s": -1}, TO_THE_END),
    ({"drain_s": -1, "full_bill": True}, TO_THE_END | ALL),
    ({"never": True}, TO_THE_END | ALL),
    ({"leaked_connection": True}, TO_THE_END | {"connections": False}),
    ({"leaked_gauge": True}, {"gauge": len(LEAVES)}),
    ({"retries": True}, {"rst asked": 2}),
    ({"penalty": len(LEAVES), "penalty_s": 30}, {"after leaves": 503}),
    ({"lost_usage": True}, NOTHING),
    ({"double_usage": True}, {"stream bill": 10, "whole bill": 10}),
    ({"silent_cut": True}, {"cut": ["[DONE]"]}),
    ({"failure_retries": 1}, {"500": 200, "500 asked": 2}),
    ({"renames": "other"}, {"model": "other"}),
]


@pytest.mark.parametrize(("faults", "changes"), FAULTS, ids=lambda one: "-".join(one)[:20])
def test_a_switch_does_what_it_says_and_nothing_else(faults: Facts, changes: Facts) -> None:
    assert observed(faults) == CLEAN | changes


def test_a_gateway_that_buffers_sends_a_stream_as_a_whole_and_hands_on_a_leave() -> None:
    with between({"buffers": True}) as (gateway, server):
        answer = post(gateway, Order(id="x", tokens=5))
        assert answer.headers["content-length"] == str(len(answer.content))
        assert answer.text.endswith("data: [DONE]\n\n")
        caller = Caller(gateway.port, Order(id="left"))
        server.log.wait("first_token", "left")
        caller.leave("fin")
        seen = server.over("left")
        caller.close()
        assert (seen["why"], caller.read) == ("left", b"")


@pytest.mark.parametrize("dialect", ROUTES)
def test_a_gateway_that_asks_for_a_fewest_number_of_tokens(dialect: str) -> None:
    with between({"fewest": 16}) as (gateway, server):
        for name, tokens in (("short", 5), ("long", 20)):
            body = body_of(dialect, Order(id=name), tokens=tokens, stream=True)
            url = f"http://127.0.0.1:{gateway.port}{ROUTES[dialect]}"
            httpx.post(url, content=body, trust_env=False).raise_for_status()
            assert server.over(name)["tokens"] == max(16, tokens)


def test_a_gateway_that_answers_from_a_cache_asks_once() -> None:
    with between({"answers_from_cache": True}) as (gateway, server):
        first, second = (post(gateway, Order(id=name)) for name in ("a", "b"))
        assert first.text == second.text != ""
        assert [len(server.truth(name)) for name in ("a", "b")] == [1, 0]
        post(gateway, Order(id="c"), stream=False)
        assert len(server.truth("c")) == 1


def test_two_upstreams_take_turns() -> None:
    with (
        upstream() as other,
        between({"two_upstreams": other.url}) as (gateway, server),
    ):
        for name in "abcd":
            post(gateway, Order(id=name, tokens=1))
        assert [len(server.truth(name)) for name in "abcd"] == [1, 0, 1, 0]
        assert [len(other.truth(name)) for name in "abcd"] == [0, 1, 0, 1]


@pytest.mark.parametrize("headers", [{"authorization": "Bearer k"}, {"x-api-key": "k"}])
def test_a_key_is_needed(headers: dict[str, str]) -> None:
    with between({"needs_key": "k"}) as (gateway, _):
        page = f"{gateway.url}/v1/models"
        assert httpx.get(page, trust_env=False).status_code == 401
        assert httpx.get(page, headers=headers, trust_env=False).status_code == 200
        assert post(gateway, Order(id="x")).status_code == 401


@pytest.mark.parametrize("stream", [True, False])
def test_answers_are_compressed_unless_that_is_forbidden(*, stream: bool) -> None:
    with between({"compresses": True}) as (gateway, _):
        url = f"{gateway.url}/v1/completions"
        body = body_of("completions", Order(id="x", prefill_ms=1), tokens=4, stream=stream)
        plain = httpx.post(
            url, content=body, headers={"accept-encoding": "identity"}, trust_env=False
        )
        zipped = httpx.post(url, content=body, trust_env=False)
        assert "content-encoding" not in plain.headers
        assert zipped.headers["content-encoding"] == "gzip"
        assert OWN.sub("", zipped.text) == OWN.sub("", plain.text) != ""


def test_each_piece_is_compressed_at_once() -> None:
    with between({"compresses": True}) as (gateway, server):
        caller = Caller(gateway.port, Order(id="x", act="silent", after=2))
        server.log.wait("silent", "x")
        head, _, rest = caller.until(b"\r\n\r\n").partition(b"\r\n\r\n")
        assert b"content-encoding: gzip" in head
        unzip, text, chunks = zlib.decompressobj(wbits=GZIP), b"", rest
        while b" w2" not in text:
            size, end, after = chunks.partition(b"\r\n")
            if not end or len(after) < int(size, 16) + 2:
                chunks += caller.sock.recv(65536)
                continue
            text += unzip.decompress(after[: int(size, 16)])
            chunks = after[int(size, 16) + 2 :]
        caller.close()


def test_one_dialect_is_spoken() -> None:
    with between({"one_dialect": "chat"}) as (gateway, server):
        found = {}
        for dialect, path in ROUTES.items():
            body = body_of(dialect, Order(id=dialect), tokens=1, stream=True)
            found[dialect] = httpx.post(gateway.url + path, content=body, trust_env=False)
        assert {name for name, one in found.items() if one.is_success} == {"chat"}
        assert server.truth("messages") == []


@pytest.mark.parametrize("silent_cut", [False, True])
@pytest.mark.parametrize("act", ["break-reset", "break-end"])
@pytest.mark.parametrize("dialect", ROUTES)
def test_a_cut_ends_cleanly_only_by_its_switch(dialect: str, act: str, *, silent_cut: bool) -> None:
    ends = ("[DONE]", "response.completed", "message_stop")
    with between({"silent_cut": silent_cut}) as (gateway, _):
        caller = Caller(gateway.port, Order(id="x", act=act, after=2), dialect=dialect)
        answer = caller.until(b"0\r\n\r\n" if silent_cut else BROKE_OFF.encode()).decode()
        if not silent_cut:
            answer = caller.to_the_end().decode()
        caller.close()
        assert "w2" in answer
        assert (BROKE_OFF in answer) == (not silent_cut)
        assert any(end in answer for end in ends) == silent_cut
        assert answer.endswith("\r\n0\r\n\r\n") == silent_cut


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("act", ["break-reset", "break-end"])
def test_an_upstream_that_breaks_before_it_answers_is_a_502(act: str, *, stream: bool) -> None:
    with between({}) as (gateway, _):
        order = Order(id="x", act=act, headers="late")
        assert post(gateway, order, stream=stream).status_code == 502


def test_an_upstream_that_is_not_there_is_a_502() -> None:
    with upstream() as gone:
        pass
    with faulty_gateway(gone.url, failure_retries=1) as one:
        body = body_of("chat", Order(), tokens=1, stream=True)
        url = one.url + ROUTES["chat"]
        assert httpx.post(url, content=body, trust_env=False).status_code == 502
        assert httpx.get(f"{one.url}/v1/models", trust_env=False).status_code == 502
        for wrong in (b"{", b"[]"):
            assert httpx.post(url, content=wrong, trust_env=False).status_code == 400
        assert httpx.post(url, content=iter([body]), trust_env=False).status_code == 411


def test_connections_are_kept_on_both_sides() -> None:
    with between({}) as (gateway, server), httpx.Client(trust_env=False) as client:
        for name in "abc":
            body = body_of("completions", Order(id=name), tokens=2, stream=True)
            client.post(f"{gateway.url}/v1/completions", content=body)
            assert [one["nth"] for one in server.truth(name)] == ["abc".index(name) + 1]


def test_the_next_request_on_a_connection_is_no_leave() -> None:
    """It comes while the first one is answered."""
    with between({}) as (gateway, server):
        caller = Caller(gateway.port, Order(id="a"), tokens=20)
        body = body_of("completions", Order(id="b"), tokens=2, stream=True)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: {len(body)}\r\n\r\n"
        caller.until(b" w2")
        caller.sock.sendall(head.encode() + body)
        server.over("b")
        caller.close()
        assert [server.truth(name)[0]["why"] for name in "ab"] == ["length", "length"]


def test_a_reader_that_stalls_stalls_the_upstream_and_may_leave() -> None:
    with between({}, step_ms=0.2) as (gateway, server):
        order = Order(id="x", pad=10_000)
        caller = Caller(gateway.port, order, tokens=30_000, receives=4096)
        server.log.wait("stalled", "x")
        t0_ns = caller.leave("rst")
        seen = server.over("x")
        assert seen["why"] == "left"
        assert seen["closed_ns"] - t0_ns < AT_ONCE_NS


def test_twenty_leave_at_once_and_nothing_is_left_of_them() -> None:
    with between({}, slots=4) as (gateway, server):
        callers = [Caller(gateway.port, Order(id=f"x{n}")) for n in range(20)]
        for n in range(20):
            server.log.wait("arrived", f"x{n}")
        for caller in callers:
            caller.leave("rst")
        assert {server.over(f"x{n}")["why"] for n in range(20)} == {"left"}
        assert len(gateway.rows(20)) == 20
        assert gateway.gauge() == 0
        assert truth(server)["connections"]["open"] == 1  # that of this page


def test_a_penalty_ends() -> None:
    with between({"penalty": 1, "penalty_s": 0.2}) as (gateway, server):
        caller = Caller(gateway.port, Order(id="x"))
        caller.until(b" w1")
        caller.leave("fin")
        caller.close()
        gateway.rows(1)
        assert post(gateway, Order(id="a", tokens=1)).status_code == 503
        wait_until(lambda: post(gateway, Order(tokens=1)).status_code == 200, "it ends")
        assert server.truth("a") == []


def test_a_drain_that_leaks_reads_to_the_end_first() -> None:
    faults = {"drain_s": -1, "leaked_connection": True}
    with between(faults) as (gateway, server):
        for n in range(4):
            caller = Caller(gateway.port, Order(id=f"x{n}"), tokens=10)
            caller.until(b" w1")
            caller.leave("fin")
            caller.close()
            assert server.over(f"x{n}")["usage_ns"] is None
        rows = gateway.rows(4)
        assert all(row["completion_tokens"] < 10 for row in rows)
        assert truth(server)["connections"]["open"] == 1 + 4


def test_what_is_done_after_a_leave_is_not_forgotten() -> None:
    """The event loop keeps no task, and the garbage collector runs. A client that has tokens is not
    asked for again."""
    with between({"early_retries": True, "backoff_s": 0.05}) as (gateway, server):
        begun = Caller(gateway.port, Order(id="begun"))
        begun.until(b" w1")
        begun.leave("rst")
        caller = Caller(gateway.port, Order(id="x", prefill_ms=800), tokens=2)
        server.log.wait("slot", "x")
        caller.leave("rst")
        for _ in range(100):
            gateway.get("/usage")
        server.log.wait("over", "x", nth=2)
        assert [one["why"] for one in server.truth("x")] == ["left", "length"]
        assert [one["why"] for one in server.truth("begun")] == ["left"]
        wait_until(lambda: gateway.gauge() == 0, "the request is over")
