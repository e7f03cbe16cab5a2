"""The load process as the harness starts it: Locust, a plan, a real server, rows on disk."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest

from harness.load.mix import AfterTokens, LeavePlan, Never, Slice
from harness.load.plan import AbandonLoad, SlotRecoveryLoad
from harness.load.rows import ShardReader
from harness.records import (
    ClientSample,
    Delivery,
    Outcome,
    Role,
    TokenCounting,
    Way,
    WireClose,
)
from tests.harness.load.load_process import LOCUSTFILE, LoadProcess

if TYPE_CHECKING:
    from tests.harness.load.conftest import Exchange, Script, ScriptedServer

    Serve = Callable[[Script], ScriptedServer]

pytestmark = pytest.mark.e2e

MS = 1_000_000


def slice_of(weight: float, leave: LeavePlan, way: Way = Way.FIN) -> Slice:
    return Slice(weight=weight, leave=leave, way=way, delivery=Delivery.STREAM, n=1)


def abandoning(*, tokens: list[int], stay_share: float, stop_after: int | None) -> AbandonLoad:
    return AbandonLoad(
        mix=[slice_of(1 - stay_share, AfterTokens(tokens=tokens)), slice_of(stay_share, Never())],
        think="step",
        prompt_tokens=(30, 40),
        answer_tokens=5000,
        stay_tokens=8,
        shared_prefix_tokens=0,
        stop_after_abandons=stop_after,
    )


def engine(x: Exchange) -> None:
    x.accept()
    x.stream(tokens=x.body["max_tokens"], gap_s=0.005)


def beside_the_locustfile(folder: Path, code: str) -> tuple[str, ...]:
    """The options of a load process that runs this code, too."""
    file = folder / "locustfile.py"
    file.write_text(f"import runpy\nglobals().update(runpy.run_path({str(LOCUSTFILE)!r}))\n{code}")
    return "-f", str(file)


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
    load.mix = [slice_of(1, AfterTokens(tokens=[1]), way)]
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
    load.mix = [slice_of(1, AfterTokens(tokens=[2]), Way.KILLED)]
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


class TestSlotRecovery:
    LOAD = SlotRecoveryLoad(
        slots=2,
        trials=2,
        prompt_tokens=(8, 16),
        answer_tokens=2000,
        control_answer_tokens=400,  # two seconds: as long as the load process may be stalled
        probe_tokens=2,
        abandon_after_tokens=4,
    )

    @staticmethod
    def engine_with_slots(number: int, ghosts: list[tuple[int, int]], ghost_s: float = 0) -> Script:
        """Who leaves goes on for `ghost_s`; `ghosts` gets from when to when."""
        slots = threading.Semaphore(number)

        def script(x: Exchange) -> None:
            x.accept()
            while not slots.acquire(timeout=0.002):
                if x.client_left_within(0):
                    return
            try:
                x.stream(tokens=x.body["max_tokens"], gap_s=0.005)
                if x.closed_ns is not None and ghost_s:
                    threading.Event().wait(ghost_s)
                    ghosts.append((x.closed_ns, time.perf_counter_ns()))
            finally:
                slots.release()

        return script

    def test_the_probe_waits_for_the_one_who_leaves(self, serve: Serve, tmp_path: Path) -> None:
        server = serve(self.engine_with_slots(2, []))
        rows = LoadProcess(tmp_path, server.url, self.LOAD, users=1).result()
        waits: dict[str, list[int]] = {"abandon": [], "control": []}
        for trial in range(2):
            for arm in ("unloaded", "abandon", "control"):
                mine = [row for row in rows if (row.trial, row.arm) == (trial, arm)]
                (probe,) = [row for row in mine if row.role is Role.PROBE]
                fillers = [row for row in mine if row.role is Role.FILLER]
                assert (probe.outcome, probe.tokens_read) == (Outcome.COMPLETED, 2)
                assert probe.first_token_ns is not None
                if arm == "unloaded":
                    assert (fillers, probe.reference_ns) == ([], None)
                    continue
                assert probe.reference_ns is not None
                assert probe.sent_ns < probe.reference_ns < probe.first_token_ns
                waits[arm].append(probe.first_token_ns - probe.reference_ns)
                outcomes = sorted(row.outcome for row in fillers)
                if arm == "control":
                    assert outcomes == [Outcome.COMPLETED] * 2
                    continue
                assert outcomes == [Outcome.ABANDONED, Outcome.CUT_OFF]
                (left,) = [row for row in fillers if row.outcome is Outcome.ABANDONED]
                assert (left.abandoned_ns, left.planned_abandon) == (probe.reference_ns, 4)
        assert max(waits["abandon"]) < min(waits["control"])
        # Every request has a row, the checks before each trial too: counters are judged by them.
        assert len(server.exchanges) == len(rows)
        checks = [row for row in rows if row.role is Role.CHECK]
        assert len(checks) >= 2 * 3 * 2  # one for each slot before each trial
        assert {row.outcome for row in checks} == {Outcome.COMPLETED}

    def test_a_trial_begins_when_all_slots_are_free(self, serve: Serve, tmp_path: Path) -> None:
        """Not when one is: those who left may go on in the others, unknown to their client."""
        ghosts: list[tuple[int, int]] = []
        slots = 3
        server = serve(self.engine_with_slots(slots, ghosts, ghost_s=0.3))
        load = msgspec.structs.replace(self.LOAD, slots=slots)
        child = LoadProcess(tmp_path, server.url, load, users=1)
        rows = child.result()
        assert "is void" not in child.log
        probes = [row for row in rows if row.role is Role.PROBE]
        assert sorted(row.arm for row in probes) == sorted(["abandon", "control", "unloaded"] * 2)
        assert len(ghosts) == 2 * slots  # the leaver and those who were cut off, in each trial
        starts = {
            (row.trial, row.arm): row.sent_ns
            for row in rows
            if row.role is Role.FILLER or (row.role, row.arm) == (Role.PROBE, "unloaded")
        }
        assert len(starts) == 6
        for start_ns in starts.values():
            assert not [ghost for ghost in ghosts if ghost[0] < start_ns < ghost[1]]

    def test_fewer_slots_than_planned_void_all_trials(self, serve: Serve, tmp_path: Path) -> None:
        """Each look at the clock, another 20 s have passed."""
        options = beside_the_locustfile(
            tmp_path,
            """
from itertools import count
from types import SimpleNamespace
from harness.load import slot_recovery
looks_ns = count(step=20 * 10**9)
slot_recovery.time = SimpleNamespace(perf_counter_ns=lambda: next(looks_ns))
""",
        )
        load = msgspec.structs.replace(self.LOAD, trials=1)
        server = serve(self.engine_with_slots(1, []))
        child = LoadProcess(tmp_path, server.url, load, users=1, options=options)
        rows = child.result()
        assert {row.role for row in rows} == {Role.CHECK}
        assert child.log.count("is void: for 30 s no 2 requests ran at once") == 3

    def test_a_check_that_fails_voids_the_trial(self, serve: Serve, tmp_path: Path) -> None:
        load = msgspec.structs.replace(self.LOAD, trials=1)
        child = LoadProcess(tmp_path, serve(lambda x: x.accept()).url, load, users=1)
        rows = child.result()
        assert [(row.role, row.outcome) for row in rows] == [(Role.CHECK, Outcome.FAILED)] * 6
        assert child.log.count("is void: a request that checks the slots failed") == 3

    def test_answers_too_short_void_the_trial(self, serve: Serve, tmp_path: Path) -> None:
        load = msgspec.structs.replace(self.LOAD, trials=1, control_answer_tokens=2)
        child = LoadProcess(tmp_path, serve(self.engine_with_slots(2, [])).url, load, users=1)
        rows = child.result()
        probes = {row.arm: row.outcome for row in rows if row.role is Role.PROBE}
        assert probes.pop("control", Outcome.CUT_OFF) is Outcome.CUT_OFF
        assert probes == dict.fromkeys(["abandon", "unloaded"], Outcome.COMPLETED)
        assert "arm control, is void: a filler ended" in child.log


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
