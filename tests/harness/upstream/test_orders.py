"""A line in the prompt says what becomes of the answer, and is found again in the log."""

import json
from http.client import HTTPConnection
from typing import Any

import pytest

from harness.upstream.orders import ACTS, Order, OrderError, read_order
from tests.harness.upstream.behind import WAIT_S, Caller, Running, body_of, upstream

ALL = Order(
    id="try-7",
    act="break-end",
    after=3,
    times=1,
    tokens=9,
    pad=10,
    prefill_ms=1.5,
    end_ms=2.0,
    headers="late",
    usage="no",
)


def asked(server: Running, order: Order, **more: Any) -> tuple[int, dict[str, Any]]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    connection.request("POST", "/v1/chat/completions", body_of("chat", order, **more))
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    return answer.status, body


@pytest.mark.parametrize("order", [Order(), Order(id="a"), ALL, *(Order(act=one) for one in ACTS)])
def test_an_order_is_read_as_it_was_written(order: Order) -> None:
    assert read_order(["", f"Say hello. {order.line()}\nThen stop."]) == order


def test_the_last_line_of_the_first_text_that_has_one_counts() -> None:
    texts = ["none here", "[walkaway id=old] and [walkaway id=new]", "[walkaway id=other]"]
    assert read_order(texts).id == "new"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[walkaway act=brake]", "act=brake]: must be one of go-on, break-reset"),
        ("[walkaway after=-1]", "after=-1]: must be a number"),
        ("[walkaway afterr=1]", "unknown key 'afterr'"),
        ("[walkaway end_ms=x]", "end_ms=x]: must be a number"),
    ],
)
def test_a_wrong_order_is_refused_by_name(line: str, said: str) -> None:
    with pytest.raises(OrderError) as refused:
        read_order([line])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "carrier",
    [
        {"user": "[walkaway id=c]"},
        {"metadata": {"session": "[walkaway id=c]"}},
        {"model": "m [walkaway id=c]"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "[walkaway id=c]"}]}]},
    ],
)
def test_it_may_stand_where_a_gateway_leaves_it(carrier: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **carrier}
    with upstream() as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        assert connection.getresponse().status == 200
        connection.close()
        assert server.over("c")["tokens"] == 1


def test_a_header_is_read_where_no_text_has_an_order() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    with upstream() as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        fields = {"X-Walkaway": "[walkaway id=c]", "X-Request-Id": "r"}
        connection.request("POST", "/v1/messages", json.dumps(body), fields)
        assert connection.getresponse().status == 200
        connection.request("POST", "/v1/messages", json.dumps(body), {"X-Request-Id": "r"})
        connection.close()
        assert [server.over(name)["nth"] for name in ("c", "r")] == [1, 2]


@pytest.mark.parametrize("act", ["break-reset", "break-end"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_break_comes_in_place_of_the_next_token(act: str, after: int) -> None:
    with upstream() as server:
        caller = Caller(server.port, Order(id="x", act=act, after=after))
        if act == "break-reset":
            with pytest.raises(ConnectionResetError):
                caller.to_the_end()
        else:
            assert not caller.to_the_end().endswith(b"0\r\n\r\n")
        caller.close()
        assert caller.read.count(b'"text":" w') == after
        seen = server.over("x")
        assert (seen["why"], seen["tokens"], seen["ended_ns"]) == ("told", after, None)
        assert (seen["closed"], seen["act"]) == (None, act)


def test_a_whole_answer_breaks_in_its_middle() -> None:
    with upstream() as server:
        caller = Caller(server.port, Order(id="x", act="break-end", after=2), stream=False)
        head, _, body = caller.to_the_end().partition(b"\r\n\r\n")
        caller.close()
        assert 0 < len(body) < int(head.partition(b"content-length: ")[2].split()[0])


@pytest.mark.parametrize("status", [500, 429])
def test_an_error_is_answered_at_once_and_only_as_often_as_told(status: int) -> None:
    with upstream(step_ms=1.0) as server:
        order = Order(id="x", act=str(status), times=2)
        answers = [asked(server, order, tokens=2, stream=False) for _ in range(3)]
        assert [code for code, _ in answers] == [status, status, 200]
        assert answers[0][1]["error"]["code"] == status
        seen = server.truth("x")
        assert [one["asked_before"] for one in seen] == [0, 1, 2]
        assert [one["why"] for one in seen] == ["told", "told", "length"]
        assert [one["slot_ns"] is None for one in seen] == [True, True, False]


@pytest.mark.parametrize("after", [0, 2])
def test_a_silent_answer_says_nothing_more_and_keeps_its_slot(after: int) -> None:
    with upstream(slots=1) as server:
        order = Order(id="x", act="silent", after=after, headers="late")
        caller = Caller(server.port, order)
        server.log.wait("silent", "x")
        waits = Caller(server.port, Order(id="waits", tokens=1))
        server.log.wait("arrived", "waits")
        page = json.loads(server.get("/walkaway/truth")[1])
        assert (page["running"], page["waiting"]) == (1, 1)
        (seen,) = server.truth("x")
        assert (seen["tokens"], seen["over_ns"]) == (after, None)
        assert (seen["headers_ns"] is None) == (after == 0)
        caller.leave("fin")
        waits.until(b"[DONE]")
        caller.close()
        waits.close()
