"""Loads that are directed from one place, in the load process: storms, and slot recovery."""

import threading
from collections.abc import Container
from itertools import count, groupby
from pathlib import Path

import pytest

from harness.errors import TargetError
from harness.records import Outcome, Role, TrialArm
from harness.workload.load import CancelStormLoad, OccupancyLoad, SlotRecoveryLoad
from tests.harness.load.asking import engine
from tests.harness.load.conftest import Exchange, Script, Serve
from tests.harness.load.load_process import LoadProcess

e2e = pytest.mark.e2e
LOAD = SlotRecoveryLoad(
    kind="slot_recovery",
    slots=2,
    trials=1,
    prompt_tokens=[8, 16],
    answer_tokens=2000,
    probe_tokens=2,
    abandon_after_tokens=4,
)


@e2e
def test_a_storm_is_left_at_one_moment_and_comes_again(serve: Serve, tmp_path: Path) -> None:
    load = CancelStormLoad(
        kind="cancel_storm",
        streams=4,
        stayers=1,
        storms=3,
        abandon_after_tokens=3,
        prompt_tokens=[10, 20],
        answer_tokens=5000,
        stay_tokens=20,
    )
    rows = LoadProcess(tmp_path, serve(engine).url, load, users=1).result()
    left = sorted((row for row in rows if row.trial is not None), key=lambda row: row.trial or 0)
    assert {row.outcome for row in left} == {Outcome.ABANDONED}
    waves = [list(wave) for _, wave in groupby(left, key=lambda row: row.trial)]
    assert [len(wave) for wave in waves] == [4, 4, 4]
    for wave in waves:
        times = [row.abandoned_ns or 0 for row in wave]
        assert max(times) - min(times) < 50_000_000
    assert all(row.tokens_read >= 3 for row in left)
    stayers = {row.outcome for row in rows if row.trial is None}
    assert stayers
    assert stayers <= {Outcome.COMPLETED, Outcome.CUT_OFF}


def engine_with_slots(number: int, ghosts: Container[int] = ()) -> Script:
    """First come, first served. Of the clients that leave in mid-stream the `ghosts` go on."""
    here: list[Exchange] = []
    left = count(1)

    def script(x: Exchange) -> None:
        here.append(x)
        x.accept()
        while here.index(x) >= number and not x.client_left_within(0.002):
            """It waits in the queue."""
        if here.index(x) < number:
            x.stream(tokens=x.body["max_tokens"], gap_s=0.005)
            if x.closed_ns is not None and next(left) in ghosts:
                threading.Event().wait((x.body["max_tokens"] - x.tokens_sent) * 0.005)
        here.remove(x)

    return script


@e2e
@pytest.mark.parametrize("real", [2, 3, 4], ids=["a slot fewer than told", "as told", "one more"])
def test_a_train_samples_one_stream_that_leaves_at_a_time(
    serve: Serve, tmp_path: Path, real: int
) -> None:
    load = LOAD.model_copy(update={"slots": 3, "trials": 5})
    child = LoadProcess(tmp_path, serve(engine_with_slots(real)).url, load, users=1)
    rows = child.result()
    unloaded = [row for row in rows if row.arm == TrialArm.UNLOADED]
    assert [row.outcome for row in unloaded] == [Outcome.COMPLETED] * 5
    samples = [row for row in rows if row.arm == TrialArm.ABANDON and row.reference_ns]
    left = {row.abandoned_ns: row for row in rows if row.outcome is Outcome.ABANDONED}
    assert len(samples) == 5
    for row in samples:
        assert (row.role, row.outcome) == (Role.PROBE, Outcome.COMPLETED)
        assert row.sent_ns < (row.reference_ns or 0) <= (row.first_token_ns or 0)
        leaver = left[row.reference_ns]
        assert (leaver.role, leaver.plan) == (Role.FILLER, "tokens:4")
        assert leaver.tokens_read >= 4
    controls = [row for row in rows if row.arm == TrialArm.CONTROL and row.reference_ns]
    ends = {row.last_token_ns for row in samples}
    assert len(controls) == 5
    assert {row.reference_ns for row in controls} == ends
    (metronome,) = (row for row in rows if row.role is Role.METRONOME)
    assert metronome.outcome is Outcome.CUT_OFF
    assert metronome.token_times_ns[-1] > max(end or 0 for end in ends)


def one_token(x: Exchange) -> None:
    x.accept()
    x.token(finish_reason="stop")
    x.finish()


@e2e
@pytest.mark.parametrize(
    ("script", "why"),
    [
        (Exchange.accept, "a probe on the idle server got no token: "),
        (one_token, "a stream ended before it had 4 tokens"),
    ],
)
def test_a_train_that_gets_no_sample_says_why(
    serve: Serve, tmp_path: Path, script: Script, why: str
) -> None:
    child = LoadProcess(tmp_path, serve(script).url, LOAD, users=1)
    _, log = child.process.communicate(timeout=60)
    child.stdin.close()
    assert child.process.returncode == TargetError.exit_code
    assert f"walkaway: no stream left while a probe waited: {why}" in log.splitlines()[-1]


@e2e
def test_requests_that_wait_after_a_round_count_what_is_held(serve: Serve, tmp_path: Path) -> None:
    """Ghosts 3, 6 and 7 of 12 that leave."""
    load = OccupancyLoad(
        kind="occupancy", slots=4, rounds=3, prompt_tokens=[8, 16], answer_tokens=2000
    )
    server = serve(engine_with_slots(4, ghosts=(3, 6, 7)))
    rows = LoadProcess(tmp_path, server.url, load, users=1).result()
    settle_ns = 500_000_000  # the shortest that is taken
    held = [
        row.first_token_ns is None or row.first_token_ns - row.reference_ns > settle_ns
        for row in sorted(rows, key=lambda row: row.trial or 0)
        if row.trial is not None and row.reference_ns is not None
    ]
    assert [sum(held[:4]), sum(held[4:8]), sum(held[8:])] == [1, 2, 0]
    assert all(row.first_token_ns is not None for row in rows)
