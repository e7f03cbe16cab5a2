"""Loads that are directed from one place, in the load process: storms, and slot recovery."""

import threading
import time
from itertools import groupby
from pathlib import Path

import pytest

from harness.records import Outcome, Role
from harness.workload.load import CancelStormLoad, SlotRecoveryLoad
from tests.harness.load.asking import engine
from tests.harness.load.conftest import Exchange, Script, Serve
from tests.harness.load.load_process import LoadProcess, beside_the_locustfile

e2e = pytest.mark.e2e
LOAD = SlotRecoveryLoad(
    kind="slot_recovery",
    slots=2,
    trials=1,
    prompt_tokens=[8, 16],
    answer_tokens=2000,
    control_answer_tokens=400,  # two seconds: as long as the load process may be stalled
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


def engine_with_slots(number: int, ghosts: list[tuple[int, int]], ghost_s: float = 0) -> Script:
    """Requests that were left go on for `ghost_s`; `ghosts` gets from when to when."""
    slots = threading.Semaphore(number)

    def script(x: Exchange) -> None:
        x.accept()
        while not slots.acquire(timeout=0.002):
            if x.client_left_within(0):
                return
        try:
            x.stream(tokens=x.body["max_tokens"], gap_s=0.005)
            if x.closed_ns is not None:
                threading.Event().wait(ghost_s)
                ghosts.append((x.closed_ns, time.perf_counter_ns()))
        finally:
            slots.release()

    return script


@e2e
@pytest.mark.slow
def test_a_trial_begins_when_all_slots_are_free(serve: Serve, tmp_path: Path) -> None:
    """Not when one is: abandoned requests may go on in the others, unknown to their client."""
    ghosts: list[tuple[int, int]] = []
    server = serve(engine_with_slots(3, ghosts, ghost_s=0.3))
    load = LOAD.model_copy(update={"slots": 3, "trials": 2})
    child = LoadProcess(tmp_path, server.url, load, users=1)
    rows = child.result()
    assert "is void" not in child.log
    assert len(ghosts) == 2 * 3  # the leaver and those that were cut off, in each trial
    starts = {
        (row.trial, row.arm): row.sent_ns
        for row in rows
        if row.role is Role.FILLER or (row.role, row.arm) == (Role.PROBE, "unloaded")
    }
    assert len(starts) == 6
    for start_ns in starts.values():
        assert not [ghost for ghost in ghosts if ghost[0] < start_ns < ghost[1]]
    # Every request has a row, the checks before each trial too: counters are judged by them.
    assert len(server.exchanges) == len(rows)
    checks = [row.outcome for row in rows if row.role is Role.CHECK]
    assert len(checks) >= 2 * 3 * 3  # one for each slot before each trial
    assert set(checks) == {Outcome.COMPLETED}


# Each look at the clock, another 10 s have passed: a round takes more than a quarter of the
# patience, so the next one asks for no longer answers.
FAST_CLOCK = """
from itertools import count
from types import SimpleNamespace
from harness.load import slot_recovery
looks_ns = count(step=10 * 10**9)
slot_recovery.time = SimpleNamespace(perf_counter_ns=lambda: next(looks_ns))
"""


@e2e
@pytest.mark.parametrize(
    ("script", "options", "why", "checks"),
    [
        (
            engine_with_slots(1, []),
            FAST_CLOCK,
            "for 30 s no 2 requests ran at once",
            [Outcome.COMPLETED] * 3 * 3 * 2,  # rounds of each trial, for each slot
        ),
        (Exchange.accept, "", "a request that checks the slots failed", [Outcome.FAILED] * 3 * 2),
    ],
    ids=["fewer slots than planned", "a check fails"],
)
def test_void_trials(
    serve: Serve, tmp_path: Path, script: Script, options: str, why: str, checks: list[Outcome]
) -> None:
    more = beside_the_locustfile(tmp_path, options) if options else ()
    child = LoadProcess(tmp_path, serve(script).url, LOAD, users=1, options=more)
    rows = child.result()
    assert {(row.role, row.max_tokens) for row in rows} == {(Role.CHECK, 8)}
    assert [row.outcome for row in rows] == checks
    assert child.log.count(f"is void: {why}") == 3


@e2e
@pytest.mark.slow
def test_answers_too_short_void_the_trial(serve: Serve, tmp_path: Path) -> None:
    load = LOAD.model_copy(update={"control_answer_tokens": 2})
    child = LoadProcess(tmp_path, serve(engine_with_slots(2, [])).url, load, users=1)
    probes = {row.arm: row.outcome for row in child.result() if row.role is Role.PROBE}
    assert probes.pop("control", Outcome.CUT_OFF) is Outcome.CUT_OFF
    assert probes == dict.fromkeys(["abandon", "unloaded"], Outcome.COMPLETED)
    assert "arm control, is void: a filler ended" in child.log
