"""The load process as the harness starts it: Locust, a plan, a real server, rows on disk."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from harness.load.rows import ShardReader
from harness.records import ClientSample, Outcome, TokenCounting, Way, WireClose
from tests.harness.load.asking import engine
from tests.harness.load.load_process import LoadProcess, beside_the_locustfile
from tests.harness.workload.mixes import abandoning, tokens

if TYPE_CHECKING:
    from tests.harness.load.conftest import Exchange, Script, ScriptedServer

    Serve = Callable[[Script], ScriptedServer]

pytestmark = pytest.mark.e2e


def test_users_leave_as_planned_and_the_server_sees_it_at_once(
    serve: Serve, tmp_path: Path
) -> None:
    server = serve(engine)
    load = abandoning(tokens=[0, 1, 5], stay_share=0.3, stop_after=40)
    child = LoadProcess(tmp_path, server.url, load, users=6)
    rows = child.result()

    counts = Counter(row.outcome for row in rows)
    assert counts[Outcome.ABANDONED] >= 40
    assert counts[Outcome.COMPLETED] >= 5
    assert 1 <= counts[Outcome.CUT_OFF] <= 6  # in flight when the load ended
    assert set(counts) == {Outcome.ABANDONED, Outcome.COMPLETED, Outcome.CUT_OFF}
    by_id = {row.request_id: row for row in rows}
    assert set(server.exchanges) <= set(by_id)

    for row in rows:
        if row.request_id not in server.exchanges:
            assert row.outcome is Outcome.CUT_OFF  # before the server had read it
            continue
        exchange = server.exchanges[row.request_id]
        assert exchange.is_over.wait(30)
        if row.outcome is Outcome.COMPLETED:
            assert (row.planned_abandon, row.tokens_read) == (None, 8)
        if row.outcome is not Outcome.ABANDONED:
            assert row.abandoned_ns is None
            continue
        assert row.planned_abandon is not None
        assert row.planned_abandon <= row.tokens_read <= exchange.tokens_sent
        assert row.abandoned_ns is not None
        assert exchange.closed_ns is not None
        before = sum(sent_ns < row.abandoned_ns for sent_ns in exchange.sent_ns)
        assert before - row.tokens_read <= 1  # one may be on its way
        if exchange.tokens_sent == row.tokens_read:  # else the server may see the reset of a token
            assert row.wire_close == exchange.closed_how  # that crossed with an orderly end
        assert row.token_counting is TokenCounting.USAGE
        assert exchange.closed_ns > row.abandoned_ns

    # Locust's own pages: named by outcome, and nobody who left as planned is a failure.
    assert {entry["name"] for entry in child.stats} == {"abandoned", "completed", "cut_off"}
    assert all(entry["num_failures"] == 0 for entry in child.stats)

    samples = ShardReader(tmp_path, ClientSample).read_new()
    assert 3 <= max(sample.streams for sample in samples) <= 6
    assert all(a.cpu_s <= b.cpu_s for a, b in pairwise(samples))
    due_ns = [sample.t_ns - sample.lag_ns for sample in samples]
    assert {b - a for a, b in pairwise(due_ns)} == {20_000_000}  # none is missing


@pytest.mark.parametrize("way", [Way.STOP_READING, Way.VANISH])
def test_what_users_left_open_ends_with_the_load(serve: Serve, tmp_path: Path, way: Way) -> None:
    def script(x: Exchange) -> None:
        x.accept()
        x.token()
        assert x.client_left_within(60)

    server = serve(script)
    load = abandoning(tokens=[1], stay_share=0.0, stop_after=5)
    load = load.model_copy(update={"mix": [tokens(1, way=way)]})
    rows = LoadProcess(tmp_path, server.url, load, users=2).result()
    left = [row for row in rows if row.outcome is Outcome.ABANDONED]
    assert len(left) >= 5
    wire_close = WireClose.SILENCE if way is Way.VANISH else WireClose.NOTHING
    for row in left:
        assert (row.plan, row.way, row.wire_close) == ("tokens:1", way, wire_close)
        exchange = server.exchanges[row.request_id]
        assert exchange.is_over.wait(30)
        assert exchange.closed_how == "rst"


def test_killed_processes_leave_nothing_behind(serve: Serve, tmp_path: Path) -> None:
    server = serve(engine)
    load = abandoning(tokens=[2], stay_share=0.0, stop_after=10)
    load = load.model_copy(update={"mix": [tokens(2, way=Way.KILLED)]})
    child = LoadProcess(tmp_path, server.url, load, users=3)
    family = psutil.Process(child.process.pid)
    seen: set[int] = set()
    while child.process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            seen |= {p.pid for p in family.children() if p.name() == "cat"}
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(0.002)  # the server's threads need this process, too
    rows = child.result()
    left = [row for row in rows if row.outcome is Outcome.ABANDONED]
    assert len(left) >= 10
    for row in left:
        exchange = server.exchanges[row.request_id]
        assert exchange.is_over.wait(30)
        assert row.abandoned_ns is not None
        assert exchange.closed_ns is not None
        assert row.abandoned_ns < exchange.closed_ns
    assert seen
    assert not [pid for pid in seen if psutil.pid_exists(pid)]


@pytest.mark.parametrize("end", ["stdin", "SIGTERM"])
def test_an_ordered_end_cuts_the_streams_and_keeps_their_rows(
    serve: Serve, tmp_path: Path, end: str
) -> None:
    server = serve(engine)
    load = abandoning(tokens=[4000], stay_share=0.0, stop_after=None)
    child = LoadProcess(tmp_path, server.url, load, users=3)
    server.wait_for_arrivals(3)
    if end == "stdin":
        child.stdin.close()
    else:
        child.process.send_signal(signal.SIGTERM)
    rows = child.result()
    assert [row.outcome for row in rows] == [Outcome.CUT_OFF] * 3
    assert all(row.error is None and row.abandoned_ns is None for row in rows)


def test_trouble_is_told_apart(serve: Serve, tmp_path: Path) -> None:
    scripts = iter(range(3))
    turn = threading.Lock()

    def script(x: Exchange) -> None:
        with turn:
            which = next(scripts, None)
        if which == 0:
            x.send(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nbusy")
        elif which == 1:
            x.accept()
            x.token()
            x.chunk(b'data: {"error":{"message":"out of blocks"}}\n\n')
        elif which == 2:
            x.accept()
            x.token()
        else:
            engine(x)

    server = serve(script)
    load = abandoning(tokens=[4000], stay_share=0.0, stop_after=None)
    child = LoadProcess(tmp_path, server.url, load, users=3)
    server.wait_for_arrivals(6)  # all three have tried again
    child.process.send_signal(signal.SIGTERM)
    rows = child.result()
    counts = Counter(row.outcome for row in rows)
    assert counts == {Outcome.REJECTED: 1, Outcome.FAILED: 2, Outcome.CUT_OFF: 3}
    errors = {row.error for row in rows if row.outcome is Outcome.FAILED}
    assert "out of blocks" in errors
    failures = {entry["name"]: entry["num_failures"] for entry in child.stats}
    assert failures == {"rejected": 1, "failed": 2, "cut_off": 0}


def test_a_bug_of_ours_makes_no_busy_loop(tmp_path: Path) -> None:
    """Each user asks, fails, and pauses before it asks again."""
    options = beside_the_locustfile(
        tmp_path,
        """
from harness.load.client import StreamClient
def ask(*_):
    raise RuntimeError("a bug")
StreamClient.ask = ask
""",
    )
    load = abandoning(tokens=[4], stay_share=0.0, stop_after=None)
    child = LoadProcess(tmp_path, "http://127.0.0.1:9", load, 1, max_seconds=2.0, options=options)
    _, log = child.process.communicate(timeout=90)
    child.stdin.close()
    assert 1 <= log.count("RuntimeError: a bug") <= 5


def test_a_user_who_leaves_at_once_waits_for_no_headers(serve: Serve, tmp_path: Path) -> None:
    """A server that sends its headers with the first token, to users who do not wait for it."""

    def script(x: Exchange) -> None:
        x.client_left_within(None)

    server = serve(script)
    load = abandoning(tokens=[0], stay_share=0.0, stop_after=6)
    rows = LoadProcess(tmp_path, server.url, load, users=2).result()
    left = [row for row in rows if row.outcome is Outcome.ABANDONED]
    assert len(left) >= 6
    assert {row.outcome for row in rows} <= {Outcome.ABANDONED, Outcome.CUT_OFF}
    for row in left:
        assert (row.planned_abandon, row.status_code, row.tokens_read) == (0, None, 0)
        assert row.think_ns is not None
        assert row.abandoned_ns is not None
        assert row.abandoned_ns - row.sent_ns >= row.think_ns
