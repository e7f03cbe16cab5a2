"""A run in the formats of other tools: what the files hold, and what is refused.

The golden runs hold the times of their timelines, ghosts among them.
"""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from harness.commands.index import app
from harness.errors import ConfigError
from harness.export.chrome_trace import CLIENTS, QUEUE, SLOTS, STEPS, chrome_trace
from harness.store.manifest import Kill
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder, save_judged

Event = dict[str, Any]


def busy(run: RunBuilder) -> RunBuilder:
    """One slot's worth of three requests: `a` is left in its slot, `b` waits and is preempted, `c`
    is left in the queue. Twice user 0 has two streams at once."""
    run.abandon("a", t0=100, tokens=[50, 80], prompt_tokens=32)
    run.events(
        "a",
        arrived=5,
        admitted=10,
        first_token=50,
        disconnected=101,
        removed=110,
        blocks_freed=111,
        finished=112,
    )
    run.request(
        "b", sent=20, tokens=[140, 160, 190], outcome="completed", end=195, prompt_tokens=16
    )
    run.events(
        "b", arrived=22, admitted=111, preempted=120, resumed=130, blocks_freed=194, finished=194
    )
    run.request("c", sent=200, tokens=[], outcome="abandoned", end=230, user=3)
    run.events("c", arrived=201, disconnected=231, removed=240, finished=241)
    run.request("d", sent=210, tokens=[], outcome="rejected", end=215, user=4, status_code=429)
    run.steps(1, 12, "a", "b")
    return run


def traced(run: RunBuilder) -> list[Event]:
    events: list[Event] = chrome_trace(run.frames())["traceEvents"]
    return events


def slices(events: list[Event], process: int) -> list[tuple[str, float, float, int]]:
    return [
        (event["name"], event["ts"] / 1000, event["dur"] / 1000, event["tid"] % 10)
        for event in events
        if event["ph"] == "X" and event["pid"] == process
    ]


def test_the_rows_of_clients_and_engine(run: RunBuilder) -> None:
    events = traced(busy(run))
    assert slices(events, CLIENTS) == [
        ("abandoned", 0, 100, 1),
        ("until the first token", 0, 50, 1),
        ("completed", 20, 175, 2),
        ("until the first token", 20, 120, 2),
        ("abandoned", 200, 30, 3),
        ("rejected", 210, 5, 4),
    ]
    assert slices(events, SLOTS) == [("a", 10, 101, 1), ("b", 111, 9, 1), ("b", 130, 64, 1)]
    assert slices(events, QUEUE) == [
        ("a", 5, 5, 1),
        ("b", 22, 89, 1),
        ("b", 120, 10, 1),
        ("c", 201, 40, 1),
    ]
    assert len(slices(events, STEPS)) == 12
    marks = {
        (one["name"], one["args"]["request_id"], one["pid"], one["ts"] / 1000)
        for one in events
        if one["ph"] == "i"
    }
    assert {("abandon", "a", CLIENTS, 100), ("free", "a", SLOTS, 111)} < marks
    assert ("detect", "c", QUEUE, 231) in marks


def test_rows_are_named_and_no_slices_of_a_row_cross(run: RunBuilder) -> None:
    events = traced(busy(run))
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    open_until: dict[tuple[int, int], list[float]] = {}
    for one in (event for event in timed if event["ph"] == "X"):
        ends = open_until.setdefault((one["pid"], one["tid"]), [])
        while ends and ends[-1] <= one["ts"]:
            ends.pop()
        assert not ends or one["ts"] + one["dur"] <= ends[-1]
        ends.append(one["ts"] + one["dur"])
    names = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert names.keys() == {one["tid"] for one in events if one["ph"] in "Xi"}
    assert {"user 0", "user 0 (2)", "user 3", "slot", "queue"} <= {*names.values()}


def test_a_request_has_a_slot_at_each_of_its_workers(run: RunBuilder) -> None:
    """The first gives its blocks back only while the second computes, and the second is killed."""
    run.abandon("a", t0=100, tokens=[50, 80])
    run.worker = "prefill-0"
    run.events("a", arrived=5, admitted=10, handed_over=50, blocks_freed=60)
    run.worker = "decode-0"
    run.events("a", taken_over=51, admitted=55)
    run.steps(1, 12, "a")
    run.manifest.kills = [Kill(t_ns=at(90), kind="worker", index=0, name="decode-0", pid=9)]
    events = traced(run)
    assert slices(events, SLOTS) == [("a", 10, 40, 1), ("a", 55, 35, 1)]
    assert slices(events, QUEUE) == [("a", 5, 5, 1), ("a", 51, 4, 1)]


def test_a_request_that_went_with_its_worker_waits_on_at_another(run: RunBuilder) -> None:
    run.request("a", sent=0, tokens=[50], outcome="completed", end=60)
    run.worker = "worker-0"
    run.events("a", arrived=5)
    run.worker = "worker-1"
    run.events("a", admitted=30, removed=60, blocks_freed=60)
    assert slices(traced(run), QUEUE) == [("a", 5, 25, 1)]


def test_of_another_server_there_are_its_scraped_gauges(run: RunBuilder) -> None:
    run.another_engine()
    run.metrics(running="exact")
    run.request("a", sent=0, tokens=[10], outcome="completed", end=20)
    for t, url, level in ((5, "a", 1.0), (7, "b", 2.0)):
        run.scrape(t, "its_running", level, json.dumps({"replica": "0", "metrics_url": url}))
    events = traced(run)
    (counter,) = [event for event in events if event["ph"] == "C"]
    assert (counter["ts"], counter["args"]) == (6000, {"requests (scraped)": 3.0})
    assert not slices(events, SLOTS)


def test_the_command_writes_the_trace(tmp_path: Path) -> None:
    run, trace = save_judged(tmp_path / "run"), tmp_path / "t.json"
    order = ["export", str(run), "--trace", str(trace)]
    result = CliRunner().invoke(app, order)
    assert result.exit_code == 0, result.exception
    assert json.loads(trace.read_text())["otherData"]["run_id"] == "made-up"
    written = trace.read_bytes()
    assert CliRunner().invoke(app, order).exit_code == 0, "over its like"
    printed = CliRunner().invoke(app, ["export", str(run), "--trace", "-"])
    assert printed.stdout_bytes == written
    notes = tmp_path / "notes.txt"
    notes.write_text("a user's")
    to_notes = ["export", str(run), "--trace", str(notes)]
    for words, message in (
        (to_notes, "replace it with --force"),
        (["export", str(run), "--trace", str(notes / "t")], "cannot be written"),
        (["export", str(run)], "nothing to write"),
    ):
        refused = CliRunner().invoke(app, words).exception
        assert isinstance(refused, ConfigError)
        assert message in str(refused)
    assert CliRunner().invoke(app, [*to_notes, "--force"]).exit_code == 0
    assert notes.read_bytes() == written
