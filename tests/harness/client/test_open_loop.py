"""Requests by schedule, through real load processes: when they come, what is capped, who sends."""

import json
import re
import subprocess
import threading
from itertools import count
from pathlib import Path

import pytest

from harness.analysis.open_requests import most_open
from harness.records import Outcome, RequestRow
from harness.run.load_process import together
from harness.run.process import free_port
from harness.workload.arrivals import AnyArrivals, ConstantArrivals, TraceArrivals
from harness.workload.load import AbandonLoad
from tests.harness.client.asking import engine
from tests.harness.client.conftest import Exchange, Serve
from tests.harness.client.load_process import LoadProcess, master_on, run_locust, worker_on
from tests.harness.workload.mixes import STAY, load_of, tokens

pytestmark = pytest.mark.e2e

MS = 1_000_000
STAYING = load_of(STAY, stay_tokens=20)


def evenly(*, rate: float, seconds: float, max_streams: int = 100) -> ConstantArrivals:
    return ConstantArrivals(kind="constant", rate=rate, seconds=seconds, max_streams=max_streams)


THIRTY = evenly(rate=100, seconds=0.3)


def replay_of(trace: Path) -> TraceArrivals:
    """Twice as fast, with prompts a quarter as long."""
    return TraceArrivals(
        kind="trace", file=str(trace), speed=2.0, prompt_factor=0.25, max_streams=10
    )


def sending(
    folder: Path, url: str, arrivals: AnyArrivals, *options: str, load: AbandonLoad = STAYING
) -> LoadProcess:
    return LoadProcess(folder, url, load, users=1, arrivals=arrivals, options=options)


def schedule_of(rows: list[RequestRow]) -> list[tuple[int, int]]:
    """Which user arrived how many milliseconds after the first."""
    begin_ns = min(row.intended_start_ns for row in rows)
    return sorted((row.user, (row.intended_start_ns - begin_ns) // MS) for row in rows)


def test_no_arrival_waits_for_the_answers_of_others(serve: Serve, tmp_path: Path) -> None:
    """The server answers none before all have come: a closed loop would never end."""
    everybody = threading.Barrier(20)

    def script(x: Exchange) -> None:
        everybody.wait(30)
        engine(x)

    load, arrivals = load_of(STAY, tokens(3)), evenly(rate=40, seconds=0.5)
    rows = sending(tmp_path, serve(script).url, arrivals, load=load).result()
    assert schedule_of(rows) == [(n, 25 * n) for n in range(20)]
    assert all(row.sent_ns >= row.intended_start_ns for row in rows)
    left = {row.user for row in rows if row.outcome is Outcome.ABANDONED}
    assert left == {row.user for row in rows if row.planned_abandon == 3} != set()
    assert {row.outcome for row in rows} == {Outcome.ABANDONED, Outcome.COMPLETED}


def test_beyond_the_cap_arrivals_wait_and_what_was_not_sent_has_no_row(
    serve: Serve, tmp_path: Path
) -> None:
    """The first two wait for each other; the seventh and the eighth are never answered."""
    order = count()
    both, enough = threading.Barrier(2), threading.Event()

    def script(x: Exchange) -> None:
        number = next(order)
        if number < 2:
            both.wait(30)
        if number < 6:
            engine(x)
            return
        x.accept()
        if number == 7:
            enough.set()
        x.client_left_within(None)

    child = sending(tmp_path, serve(script).url, evenly(rate=1000, seconds=0.2, max_streams=2))
    assert enough.wait(30)
    child.stdin.close()
    rows = child.result()
    assert schedule_of(rows) == [(n, n) for n in range(8)]  # of 200; the others were not sent
    assert most_open([row.sent_ns for row in rows], [row.ended_ns for row in rows]) == 2
    outcomes = sorted(row.outcome for row in rows)
    assert outcomes == [Outcome.COMPLETED] * 6 + [Outcome.CUT_OFF] * 2


@pytest.mark.slow
def test_a_worker_that_was_lost_takes_no_arrivals_with_it(serve: Serve, tmp_path: Path) -> None:
    """Locust never gives its number to another one: the two that follow are 1 and 2."""
    port = free_port()
    child = sending(tmp_path, serve(engine).url, THIRTY, *master_on(port, workers=2))

    def worker() -> subprocess.Popen[str]:
        return run_locust(*worker_on(port), "--walkaway-plan", str(tmp_path / "plan.json"))

    def wait_for(word: str) -> None:
        assert child.process.stderr is not None
        assert any(word in line for line in child.process.stderr), word

    lost = worker()
    wait_for("reported as ready")
    lost.kill()
    wait_for("The last worker went missing")
    followers = [worker(), worker()]
    rows = child.result()
    for one in (lost, *followers):
        one.communicate(timeout=30)
    assert schedule_of(rows) == [(n, 10 * n) for n in range(30)]
    assert sum(path.stat().st_size > 0 for path in tmp_path.glob("requests-*")) == 2


@pytest.mark.slow
def test_a_worker_more_than_was_expected_sends_its_part(serve: Serve, tmp_path: Path) -> None:
    """All three are there before the master, which would begin with two. No part waits until
    another one has ended: there are as many directors as workers."""
    port = free_port()
    plan = ("--walkaway-plan", str(tmp_path / "plan.json"))
    workers = [run_locust(*worker_on(port), *plan) for _ in range(3)]
    child = sending(tmp_path, serve(engine).url, THIRTY, *master_on(port, workers=2))
    rows = child.result()
    for one in workers:
        one.communicate(timeout=30)
    assert schedule_of(rows) == [(n, 10 * n) for n in range(30)]
    spawned = re.search(r"spawn jobs of (\d) users at .* to (\d) ready workers", child.log)
    assert spawned is not None
    assert spawned[1] == spawned[2]


def test_a_trace_is_replayed_with_its_lengths_and_its_shared_pages(
    serve: Serve, tmp_path: Path
) -> None:
    """By two processes: what requests share does not depend on which sends them."""
    trace = tmp_path / "trace.jsonl"
    recorded = [(0, 1000, 3, [1, 2]), (20, 1100, 4, [1, 2, 3]), (60, 600, 1, [1, 9])]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    trace.write_text("\n".join(json.dumps(dict(zip(keys, one, strict=True))) for one in recorded))
    server = serve(engine)
    load = load_of(STAY, prompt_tokens=[1, 270], stay_tokens=100)
    child = sending(tmp_path, server.url, replay_of(trace), *together(2), load=load)
    rows = child.result()
    assert schedule_of(rows) == [(0, 0), (1, 10), (2, 30)]
    assert len(list(tmp_path.glob("requests-*.ndjson"))) == 2
    bodies = {row.user: server.exchanges[row.request_id].body for row in rows}
    prompts = [bodies[user]["prompt"] for user in range(3)]
    assert [len(prompt) for prompt in prompts] == [250, 270, 150]
    assert [bodies[user]["max_tokens"] for user in range(3)] == [3, 4, 1]
    assert prompts[0] == prompts[1][:250]
    assert prompts[2][:128] == prompts[0][:128]
    assert prompts[2][128:140] != prompts[0][128:140]


@pytest.mark.slow
def test_a_trace_that_breaks_off_ends_the_load(serve: Serve, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 3}\nbroken\n')
    child = sending(tmp_path, serve(engine).url, replay_of(trace))
    _, log = child.process.communicate(timeout=60)
    child.stdin.close()
    assert f"{trace}:2: " in log
    assert child.process.returncode == 0  # the rows show how far it came
