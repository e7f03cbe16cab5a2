"""The load process as the harness starts it: Locust, a plan, a real server, rows on disk."""

import signal
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from harness.client.shards import ShardReader
from harness.records import ClientSample, Outcome, RequestRow, Role, Way, WireClose
from tests.harness.client.asking import engine
from tests.harness.client.conftest import Exchange, Serve
from tests.harness.client.load_process import LOCUSTFILE, LoadProcess, beside_the_locustfile
from tests.harness.workload.mixes import abandoning, tokens

MS = 1_000_000
e2e = pytest.mark.e2e


def test_a_load_process_loads_no_statistics() -> None:
    """They would take longer than all the rest, and nothing of a load needs them."""
    code = "import sys, workloads.locustfile; print(*sys.modules)"
    root = LOCUSTFILE.parents[1]
    out = subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True).split()
    assert "harness.locust.users" in out
    assert not {"scipy", "pandas", "pyarrow", "torch", "plotly"} & set(out)


@e2e
def test_users_leave_as_planned(serve: Serve, tmp_path: Path) -> None:
    server = serve(engine)
    load = abandoning(tokens=[0, 1, 5], stay_share=0.3, stop_after=40)
    child = LoadProcess(tmp_path, server.url, load, users=6)
    rows = child.result()
    counts = Counter(row.outcome for row in rows)
    assert counts[Outcome.ABANDONED] >= 40
    assert counts[Outcome.COMPLETED] >= 5
    assert 1 <= counts[Outcome.CUT_OFF] <= 6  # in flight when the load ended
    assert set(counts) == {Outcome.ABANDONED, Outcome.COMPLETED, Outcome.CUT_OFF}
    assert set(server.exchanges) <= {row.request_id for row in rows}
    for row in rows:
        if row.outcome is Outcome.ABANDONED:
            exchange = server.exchanges[row.request_id]
            assert exchange.is_over.wait(30)
            assert (row.planned_abandon or 0) <= row.tokens_read <= exchange.tokens_sent
            assert (row.abandoned_ns or 0) < (exchange.closed_ns or 0)
    # Locust's own pages: named by outcome, and a user that left as planned is no failure.
    assert child.failures == {"abandoned": 0, "completed": 0, "cut_off": 0}
    samples = ShardReader(tmp_path, ClientSample).read_new()
    assert 3 <= max(sample.streams for sample in samples) <= 6
    assert all(a.cpu_s <= b.cpu_s for a, b in pairwise(samples))


@e2e
def test_connections_that_users_left_open_end_with_the_load(serve: Serve, tmp_path: Path) -> None:

    def script(x: Exchange) -> None:
        x.accept(tokens=1)
        assert x.client_left_within(60)

    server = serve(script)
    load = abandoning(tokens=[1], stay_share=0.0, stop_after=8)
    load = load.model_copy(update={"mix": [tokens(1, way=Way.STOP_READING)]})
    rows = LoadProcess(tmp_path, server.url, load, users=2).result()
    left = [row for row in rows if row.outcome is Outcome.ABANDONED]
    assert len(left) >= 8
    for row in left:
        assert (row.plan, row.wire_close) == ("tokens:1", WireClose.NOTHING)
        exchange = server.exchanges[row.request_id]
        assert exchange.is_over.wait(30)
        assert exchange.closed_how == "rst"
        assert (row.abandoned_ns or 0) < (exchange.closed_ns or 0)


@e2e
@pytest.mark.parametrize("how", ["stdin", "SIGTERM"])
def test_an_ordered_end_cuts_the_streams_and_keeps_their_rows(
    serve: Serve, tmp_path: Path, how: str
) -> None:
    """Each user has failed once, paused, and asked again."""
    refused: set[str] = set()

    def script(x: Exchange) -> None:
        if len(refused) < 3:
            refused.add(x.request_id)
            x.send(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nbusy")
        else:
            engine(x)

    server = serve(script)
    load = abandoning(tokens=[4000], stay_share=0.0, stop_after=None)
    child = LoadProcess(tmp_path, server.url, load, users=3)
    server.wait_for_arrivals(6)
    if how == "stdin":
        child.stdin.close()
    else:
        child.process.send_signal(signal.SIGTERM)
    rows = child.result()
    counts = Counter(row.outcome for row in rows)
    assert counts == {Outcome.REJECTED: 3, Outcome.CUT_OFF: 3}
    cut_off = [row for row in rows if row.outcome is Outcome.CUT_OFF]
    assert all(row.error is None and row.abandoned_ns is None for row in cut_off)
    assert child.failures == {"rejected": 3, "cut_off": 0}


@e2e
def test_a_bug_of_ours_makes_no_busy_loop(tmp_path: Path) -> None:
    """Each user asks, fails, and pauses before it asks again."""
    options = beside_the_locustfile(
        tmp_path,
        """
from harness.client.exchange import StreamClient
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


def ended(rows: list[RequestRow]) -> list[RequestRow]:
    """Without requests that the end of the load caught, perhaps before they were sent."""
    return [row for row in rows if row.outcome is not Outcome.CUT_OFF]


@e2e
def test_a_user_that_has_lost_patience_asks_the_very_same_at_once(
    serve: Serve, tmp_path: Path
) -> None:
    """Each prompt is answered when it comes again."""
    answered: defaultdict[str, int] = defaultdict(int)

    def slow_at_first(x: Exchange) -> None:
        answered[x.body["prompt"]] += 1
        if answered[x.body["prompt"]] == 1:
            x.client_left_within(None)
        else:
            engine(x)

    server = serve(slow_at_first)
    load = abandoning(tokens=[1], stay_share=0.0, stop_after=3)
    load = load.model_copy(update={"ask_again_after": [Outcome.TIMED_OUT], "retry_pause_s": 0.0})
    rows = LoadProcess(tmp_path, server.url, load, users=1, timeout_s=1.0).result()
    timed_out = {row.request_id: row for row in rows if row.outcome is Outcome.TIMED_OUT}
    again = [(row, timed_out[row.repeats]) for row in rows if row.repeats is not None]
    assert len(again) >= 3
    for row, first in again:
        assert (row.outcome, row.user) == (Outcome.ABANDONED, first.user)
        assert answered[server.exchanges[row.request_id].body["prompt"]] == 2
    assert len(answered) >= len(again), "no two first requests are alike"
    pauses_ns = [row.sent_ns - first.ended_ns for row, first in again]
    assert median(pauses_ns) < 450 * MS, "otherwise each is 500"


@e2e
@pytest.mark.slow
def test_canaries_ask_alone_first_and_then_the_same_all_along(serve: Serve, tmp_path: Path) -> None:
    server = serve(engine)
    load = abandoning(tokens=[0, 2], stay_share=0.3, stop_after=20)
    load = load.model_copy(update={"canaries": 2, "canary_tokens": 4})
    rows = ended(LoadProcess(tmp_path, server.url, load, users=5).result())
    canaries = [row for row in rows if row.role is Role.CANARY]
    others = [row for row in rows if row.role is Role.USER]
    assert {row.user for row in canaries} == {0, 1}
    assert {row.user for row in others} == {2, 3, 4}
    bodies = {x.request_id: x.body for x in server.exchanges.values()}
    for user in (0, 1):
        mine = [bodies[row.request_id] for row in canaries if row.user == user]
        asked = {(body["prompt"], body["temperature"], body["max_tokens"]) for body in mine}
        assert [one[1:] for one in asked] == [(0.0, 4)]
    assert all("temperature" not in bodies[row.request_id] for row in others)
    first, second = (min(row.sent_ns for row in canaries if row.user == user) for user in (0, 1))
    ends_ns = {row.sent_ns: row.ended_ns for row in canaries}
    assert ends_ns[first] <= second
    assert ends_ns[second] <= min(row.sent_ns for row in others)
    assert all(row.answer for row in canaries)
