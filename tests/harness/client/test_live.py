"""Streams that leave when another greenlet says so, at any moment of the request."""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
from tritonclient.grpc.service_pb2 import ModelStreamInferResponse

from harness.records import Delivery, Outcome, Protocol, RequestRow, Way, WireClose
from harness.workload.plan import LoadPlan, write_plan
from tests.harness.client.asking import plan_of
from tests.harness.client.conftest import Exchange, Serve
from tests.harness.client.kserve_server import Served, serving
from tests.harness.client.test_kserve import SOURCE

# The value of `max_tokens` chooses how the server behaves.
NO_HEAD, NO_TOKEN, THREE_TOKENS, HALF = 101, 102, 103, 104
WHOLE, CUT, STAYS = 105, 106, 107


def play(folder: Path, plan: LoadPlan, scenarios: list[dict[str, Any]]) -> list[RequestRow]:
    write_plan(plan, folder / "plan.json")
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.client.live_streams", str(folder / "plan.json")],
        input=json.dumps(scenarios).encode(),
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    return msgspec.json.decode(done.stdout, type=list[RequestRow])


def server(x: Exchange) -> None:
    if x.target.endswith("/cancel"):
        x.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        return
    tokens = x.body["max_tokens"]
    if tokens != NO_HEAD:
        x.accept(tokens=3 if tokens in (THREE_TOKENS, HALF) else 0)
    x.client_left_within(0.5 if tokens == HALF else 30)
    if tokens == HALF:
        x.finish()


AT_ONCE: list[dict[str, Any]] = [
    {"way": way, **moment}
    for way in ("fin", "rst")
    for moment in (
        {"max_tokens": NO_HEAD, "wait_s": 0.02},
        {"max_tokens": NO_HEAD, "wait_s": 0.02, "delivery": "unary"},
        {"max_tokens": NO_TOKEN, "wait_s": 0.02},
        {"max_tokens": THREE_TOKENS, "tokens": 3},
        {"max_tokens": THREE_TOKENS, "tokens": 2, "is_planned": True},
    )
]
OTHERS: list[dict[str, Any]] = [
    {"way": "half_close", "max_tokens": HALF, "tokens": 3},
    {"way": "cancel", "max_tokens": HALF, "tokens": 3},
    {"way": "killed", "max_tokens": THREE_TOKENS, "tokens": 3, "is_planned": True},
]


def test_a_stream_leaves_in_every_way_at_any_moment(serve: Serve, tmp_path: Path) -> None:
    started = serve(server)
    *rows, half_closed, cancelled, killed = play(
        tmp_path, plan_of(started.url), [*AT_ONCE, *OTHERS]
    )
    for scenario, row in zip(AT_ONCE, rows, strict=True):
        x = started.exchanges[row.request_id]
        assert x.is_over.wait(30)
        assert row.outcome is Outcome.ABANDONED
        assert (row.way, row.wire_close) == (scenario["way"],) * 2
        assert row.way == x.closed_how
        assert row.tokens_read == (3 if scenario["max_tokens"] == THREE_TOKENS else 0)
        assert x.closed_ns is not None
        assert row.sent_ns < (row.abandoned_ns or 0) <= x.closed_ns
    assert (half_closed.way, half_closed.wire_close) == (Way.HALF_CLOSE, WireClose.FIN)
    assert (cancelled.way, cancelled.wire_close) == (Way.CANCEL, WireClose.NOTHING)
    assert f"/v1/requests/{cancelled.request_id}/cancel" in {
        x.target for x in started.exchanges.values()
    }
    for row in (half_closed, cancelled):
        assert (row.outcome, row.error) == (Outcome.ABANDONED, None)
        assert row.server_ended_ns is not None
    assert (killed.outcome, killed.tokens_read) == (Outcome.ABANDONED, 3)
    assert killed.wire_close is WireClose.KERNEL
    assert started.exchanges[killed.request_id].is_over.wait(30)


def many_tokens(x: Exchange) -> None:
    """Far more than the kernel's buffers hold, so that somebody must read."""
    x.accept(tokens=1)
    text = 10_000 * "word "
    for _ in range(40):
        x.token(text=text)
    if x.body["max_tokens"] == WHOLE:
        x.token(finish_reason="length")
        x.finish()
    elif x.body["max_tokens"] == STAYS:
        x.client_left_within(30)


def test_a_stream_that_is_drained_ends_or_leaves_like_any_other(
    serve: Serve, tmp_path: Path
) -> None:
    started = serve(many_tokens)
    held = [{"max_tokens": one, "leaves_after_s": 30} for one in (WHOLE, CUT)]
    leaving = {"max_tokens": STAYS, "leaves_after_s": 1.5}
    whole, cut, left = play(tmp_path, plan_of(started.url), [*held, leaving])
    assert (whole.outcome, whole.error) == (Outcome.COMPLETED, None)
    assert cut.outcome is Outcome.FAILED
    assert (left.outcome, left.wire_close) == (Outcome.ABANDONED, WireClose.FIN)
    assert started.exchanges[left.request_id].closed_how == "fin"


def test_of_streams_at_once_the_first_to_begin_is_read(serve: Serve, tmp_path: Path) -> None:
    """Whichever was asked for first: here the last to ask begins first."""
    last_has_ended, asked = Event(), count(1)
    last: list[Exchange] = []

    def in_turn(x: Exchange) -> None:
        is_last = next(asked) == 2
        assert is_last or last_has_ended.wait(30)
        x.accept(tokens=3)
        x.client_left_within(0.2)  # the other one may be drained by then
        x.finish()
        if is_last:
            last.append(x)
            assert x.client_left_within(30)
            last_has_ended.set()

    started = serve(in_turn)
    [row] = play(tmp_path, plan_of(started.url), [{"max_tokens": WHOLE, "is_first_read": True}])
    assert [started.exchanges[row.request_id]] == last


def test_a_user_leaves_before_there_is_a_connection(full: str, tmp_path: Path) -> None:
    scenario = {"way": "fin", "max_tokens": NO_TOKEN, "wait_s": 0.02}
    [row] = play(tmp_path, plan_of(full), [scenario])
    assert (row.outcome, row.wire_close) == (Outcome.ABANDONED, WireClose.UNOPENED)


def test_a_call_over_grpc_leaves_too(tmp_path: Path) -> None:
    def two_tokens(served: Served) -> Iterator[ModelStreamInferResponse]:
        yield served.token()
        yield served.token()
        served.has_half_closed.wait(30)

    with serving(two_tokens) as (url, _):
        plan = plan_of(url, target={"kserve": SOURCE}, protocol=Protocol.GRPC)
        left = {"max_tokens": 50, "tokens": 2}
        rows = play(tmp_path, plan, [left | {"way": way} for way in ("fin", "half_close")])
    assert {(row.outcome, row.tokens_read, row.delivery) for row in rows} == {
        (Outcome.ABANDONED, 2, Delivery.STREAM)
    }
    assert [(row.way, row.wire_close) for row in rows] == [
        (Way.CANCEL, WireClose.RST_STREAM),
        (Way.HALF_CLOSE, WireClose.END_STREAM),
    ]
