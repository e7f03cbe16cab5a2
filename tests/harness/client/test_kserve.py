"""Users over gRPC, against a server that knows the truth: what each way to leave is to it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import trustme
from tritonclient.grpc.service_pb2 import ModelStreamInferResponse

from harness.client.kserve import KServeClient
from harness.client.wire_log import WireLog
from harness.records import Outcome, RequestRow, TokenCounting, Way, WireClose
from harness.store.conform_result import read_wire_log
from harness.workload.abandon import LeaveRule, never
from harness.workload.workload import load_target
from tests.harness.client.asking import MS, SPEC, after, plan_of
from tests.harness.client.kserve_server import (
    LONG_S,
    Script,
    Served,
    TruthServer,
    serving,
    until_left,
    whole,
)

SOURCE = load_target("reference").kserve


class Users:
    def __init__(self, url: str, wire: WireLog | None = None, **changes: Any) -> None:
        plan = plan_of(url, target={"kserve": SOURCE}, **changes)
        self.client = KServeClient(plan, api_key="secret", wire=wire)
        self.rows: list[RequestRow] = []

    def ask(self, rule: LeaveRule = never, way: Way | None = None, **changes: Any) -> RequestRow:
        spec = replace(SPEC, way=way, **changes)
        return self.client.ask(spec, "Hello", rule, self.rows.append)


@contextmanager
def users_of(script: Script, **changes: Any) -> Iterator[tuple[Users, TruthServer]]:
    with serving(script) as (url, truth):
        users = Users(url, **changes)
        try:
            yield users, truth
        finally:
            users.client.close()


def test_the_log_of_the_wire_shows_the_cancel(tmp_path: Path) -> None:
    wire, file = WireLog({"Authorization": "Bearer secret"}), tmp_path / "wire.jsonl"
    with users_of(until_left, wire=wire) as (users, truth):
        wire.begin(file)
        row = users.ask(after(1), Way.CANCEL)
        ended(truth, row)
        wire.end()
    events = read_wire_log(file)
    assert [event.what for event in events] == ["write", "read", "act", "end"]
    assert (events[1].tokens, events[2].sent, events[2].t_ns) == (
        1,
        "RST_STREAM",
        row.abandoned_ns,
    )
    assert b"secret" not in file.read_bytes()


def ended(truth: TruthServer, row: RequestRow) -> Served:
    served = truth.calls[row.request_id]
    assert served.has_ended.wait(LONG_S)
    return served


LEAVING = [
    (Way.CANCEL, WireClose.RST_STREAM),
    (Way.FIN, WireClose.RST_STREAM),  # the usual way
    (Way.CHANNEL_CLOSED, WireClose.FIN),
    (Way.PROCESS_KILLED, WireClose.KERNEL),
]


@pytest.mark.parametrize(("way", "wire_close"), LEAVING)
@pytest.mark.parametrize("planned", [0, 1])
def test_a_call_is_cancelled(way: Way, wire_close: WireClose, planned: int) -> None:
    before = set(psutil.Process().children())

    def script(served: Served) -> Iterator[ModelStreamInferResponse]:
        if planned:
            yield served.token()
        assert served.has_ended.wait(LONG_S)

    # A process that dies before its call is on the wire leaves no call to cancel.
    think_ns = 300 * MS if way is Way.PROCESS_KILLED else 20 * MS
    with users_of(script) as (users, truth):
        row = users.ask(after(planned, think_ns=think_ns), way)
        served = ended(truth, row)
    assert (row.outcome, row.tokens_read, row.error) == (Outcome.ABANDONED, planned, None)
    assert (row.wire_close, row.think_ns, row.tokens_after_leaving) == (wire_close, think_ns, None)
    assert row.way == (Way.CANCEL if way is Way.FIN else way)
    assert row.abandoned_ns is not None
    assert row.abandoned_ns - row.sent_ns >= think_ns
    assert served.ended_ns is not None
    assert 0 < served.ended_ns - row.abandoned_ns < 5_000 * MS
    assert served.is_cancelled
    assert set(psutil.Process().children()) <= before, "a process was left"


def test_every_way_to_leave_over_tls(tmp_path: Path) -> None:
    authority, ca_file = trustme.CA(), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    own = authority.issue_cert("127.0.0.1")
    chain = b"".join(part.bytes() for part in own.cert_chain_pems)
    tls = grpc.ssl_server_credentials([(own.private_key_pem.bytes(), chain)])
    with serving(until_left, tls=tls) as (url, truth):
        users = Users(url, ca_file=str(ca_file))
        rows = [users.ask(after(1), way, request_id=way) for way, _ in LEAVING]
        assert all(ended(truth, row).is_cancelled for row in rows)
        users.client.close()
        strangers = Users(url)
        refused = strangers.ask()
        strangers.client.close()
    assert [row.wire_close for row in rows] == [wire_close for _, wire_close in LEAVING]
    assert refused.outcome is Outcome.FAILED
    assert "certificate" in (refused.error or "").lower()


def test_a_deadline_passes_at_the_planned_moment() -> None:
    """The server knows it from the beginning; a token that comes later was not read by then."""
    with users_of(until_left) as (users, truth):
        row = users.ask(after(0, think_ns=150 * MS), Way.DEADLINE, planned_abandon=0, pause=1)
        served = ended(truth, row)
    assert (row.outcome, row.wire_close, row.tokens_read) == (
        Outcome.ABANDONED,
        WireClose.RST_STREAM,
        1,
    )
    assert row.abandoned_ns == row.sent_ns + 150 * MS
    assert served.time_left_s is not None
    assert served.time_left_s <= 0.152
    assert served.is_cancelled
    assert served.ended_ns is not None
    assert 0 < served.ended_ns - row.abandoned_ns < 5_000 * MS


def test_a_half_close_cancels_nothing() -> None:
    def script(served: Served) -> Iterator[ModelStreamInferResponse]:
        yield served.token()
        assert served.has_half_closed.wait(LONG_S)
        for _ in range(3):
            yield served.token()
        yield served.end()

    with users_of(script) as (users, truth):
        row = users.ask(after(1), Way.HALF_CLOSE)
        served = ended(truth, row)
    assert (row.outcome, row.wire_close) == (Outcome.ABANDONED, WireClose.END_STREAM)
    assert (row.tokens_read, row.tokens_after_leaving) == (1, 3)
    assert not served.is_cancelled
    assert row.abandoned_ns is not None
    assert row.server_ended_ns is not None
    assert row.abandoned_ns < row.server_ended_ns


def test_calls_share_a_channel_and_end_alone_unless_it_is_closed_or_killed() -> None:
    """One user stays all along; meanwhile others leave in every way."""
    goes_on = threading.Event()

    def script(served: Served) -> Iterator[ModelStreamInferResponse]:
        if served.request.id != "stays":
            yield from until_left(served)
            return
        yield served.token()
        assert goes_on.wait(LONG_S)
        yield served.token()
        yield served.end()
        assert served.has_half_closed.wait(LONG_S)

    with users_of(script) as (users, truth):
        stays = threading.Thread(target=users.ask, kwargs={"request_id": "stays"})
        stays.start()
        rows = [users.ask(after(1), way, request_id=way) for way, _ in LEAVING]
        goes_on.set()
        stays.join(LONG_S)
        peers = {row.way: ended(truth, row).peer for row in rows}
    stayed = users.rows[-1]
    assert (stayed.request_id, stayed.outcome, stayed.tokens_read) == (
        "stays",
        Outcome.COMPLETED,
        2,
    )
    assert peers[Way.CANCEL] == truth.calls["stays"].peer
    assert len(set(peers.values())) == 3
    assert users.client.step.median_ns() > 0


def test_a_user_stays_to_the_end_and_says_what_it_wants() -> None:
    with users_of(whole) as (users, truth):
        row = users.ask()
        served = ended(truth, row)
    assert (row.outcome, row.tokens_read, row.wire_close) == (Outcome.COMPLETED, 9, None)
    assert (row.status_code, row.token_counting) == (None, TokenCounting.EVENTS)
    assert not served.is_cancelled
    request = served.request
    assert (request.id, request.model_name) == ("r1", "generate")
    inputs = {one.name: (one.datatype, list(one.shape), one.contents) for one in request.inputs}
    datatype, shape, contents = inputs["text_input"]
    assert (datatype, shape, list(contents.bytes_contents)) == ("BYTES", [1], [b"Hello"])
    datatype, shape, contents = inputs["max_tokens"]
    assert (datatype, shape, list(contents.int_contents)) == ("INT32", [1], [9])
    assert request.parameters["ignore_eos"].bool_param
    assert (served.metadata["authorization"], served.metadata["x-extra"]) == ("Bearer secret", "1")


def test_tokens_are_counted_as_the_server_counts_them() -> None:
    def script(served: Served) -> Iterator[ModelStreamInferResponse]:
        for so_far in (1, 4, 4, 9):
            response = served.token(is_last=so_far == 9)
            parameters = response.infer_response.parameters
            parameters["completion_tokens"].int64_param = so_far
            yield response

    with users_of(script) as (users, _):
        row = users.ask()
    assert (row.outcome, row.tokens_read, row.event_tokens) == (Outcome.COMPLETED, 9, [1, 3, 5])
    assert row.token_counting is TokenCounting.USAGE


def refuse(served: Served) -> Iterator[ModelStreamInferResponse]:
    served.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full")
    yield from ()


def break_off(served: Served) -> Iterator[ModelStreamInferResponse]:
    yield served.token()
    served.abort(grpc.StatusCode.INTERNAL, "out of memory")


def complain(served: Served) -> Iterator[ModelStreamInferResponse]:
    yield served.token()
    yield ModelStreamInferResponse(error_message="no such thing")
    assert served.has_ended.wait(LONG_S)


def say_nothing(served: Served) -> Iterator[ModelStreamInferResponse]:
    yield from ()


@pytest.mark.parametrize(
    ("script", "changes", "outcome", "error"),
    [
        (refuse, {}, Outcome.REJECTED, "RESOURCE_EXHAUSTED: queue full"),
        (break_off, {}, Outcome.FAILED, "INTERNAL: out of memory"),
        (complain, {}, Outcome.FAILED, "no such thing"),
        (say_nothing, {}, Outcome.FAILED, "the stream ended early"),
        (until_left, {"timeout_s": 0.1}, Outcome.TIMED_OUT, "nothing came for 0.1 s"),
        (until_left, {"total_timeout_s": 0.1}, Outcome.TIMED_OUT, "was not complete 0.1 s after"),
    ],
)
def test_how_else_a_call_ends(
    script: Script, changes: dict[str, Any], outcome: Outcome, error: str
) -> None:
    with users_of(script, **changes) as (users, truth):
        row = users.ask(after(7), Way.CANCEL)
        assert ended(truth, row).has_ended.is_set()
    assert (row.outcome, row.wire_close, row.abandoned_ns) == (outcome, None, None)
    assert error in (row.error or "")


def test_a_server_that_is_not_there_and_one_that_does_not_speak() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        place = f"grpc://127.0.0.1:{mute.getsockname()[1]}"
        late = Users(place, connect_timeout_s=0.1)
        row = late.ask()
        left = late.ask(after(0, think_ns=20 * MS), Way.CANCEL, plan="time:x", pause=1)
        late.client.close()
    assert (row.outcome, row.wire_close) == (Outcome.TIMED_OUT, WireClose.UNOPENED)
    assert row.error == "the request was not taken within 0.1 s"
    assert (left.outcome, left.wire_close) == (Outcome.ABANDONED, WireClose.UNOPENED)
    gone = Users(place)
    rows = [gone.ask(way=way) for way in (None, Way.PROCESS_KILLED)]
    gone.client.close()
    assert [row.outcome for row in rows] == [Outcome.FAILED, Outcome.FAILED]
    assert (rows[0].error or "").startswith("UNAVAILABLE: ")
    assert (rows[1].error or "").startswith("no process got a connection: ")


def test_what_may_be_on_its_way_over_an_open_channel_counts_as_sent() -> None:
    with users_of(whole) as (users, _):
        users.ask()
        rows = [
            users.ask(after(0, think_ns=0), Way.CANCEL, plan="time:x", pause=1, request_id=f"r{i}")
            for i in range(20)
        ]
    assert {(row.outcome, row.wire_close) for row in rows} == {
        (Outcome.ABANDONED, WireClose.RST_STREAM)
    }


def test_users_share_the_frontends_evenly() -> None:
    with serving(whole) as (url, first), serving(whole) as (other_url, other):
        users = Users(url, urls=[url, other_url])
        rows = [users.ask(user=user, request_id=f"r{user}") for user in range(4)]
        users.client.close()
    assert [row.frontend for row in rows] == [0, 1, 0, 1]
    assert (set(first.calls), set(other.calls)) == ({"r0", "r2"}, {"r1", "r3"})
