"""Loads that are directed from one place, in the load process: storms, and slot recovery."""

import threading
from collections.abc import Container
from itertools import count, groupby
from pathlib import Path

import pytest

from harness.errors import TargetError
from harness.records import Outcome, RequestRow, Role, TrialArm
from harness.workload.load import AnyLoad, CancelStormLoad, OccupancyLoad, SlotRecoveryLoad, Variant
from tests.harness.client.asking import engine
from tests.harness.client.conftest import Exchange, Script, Serve
from tests.harness.client.load_process import LoadProcess

pytestmark = pytest.mark.e2e

LOAD = SlotRecoveryLoad(
    kind="slot_recovery",
    slots=2,
    trials=1,
    prompt_tokens=[8, 16],
    answer_tokens=2000,
    probe_tokens=2,
    abandon_after_tokens=4,
)


def rows_of(
    serve: Serve, folder: Path, script: Script, load: AnyLoad, *, settle_s: float = 0.0
) -> list[RequestRow]:
    target = {"settle_s": settle_s}
    return LoadProcess(folder, serve(script).url, load, users=1, target=target).result()


def reason(serve: Serve, folder: Path, script: Script, load: AnyLoad) -> str:
    """The last line of a load that could not continue."""
    child = LoadProcess(folder, serve(script).url, load, users=1)
    _, log = child.process.communicate(timeout=60)
    child.stdin.close()
    assert child.process.returncode == TargetError.exit_code
    return log.splitlines()[-1]


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
    rows = rows_of(serve, tmp_path, engine, load)
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


LONG = 1000  # tokens, of a prompt or of its answer


def engine_with_slots(
    number: int,
    ghosts: Container[int] = (),
    *,
    gap_s: float = 0.005,
    prefill_s: float = 0.0,
    long_at_once: int = 99,
    long_answer: int = LONG,
    held_s: float = 0.0,
) -> Script:
    """First come, first served. Of the clients that leave in mid-stream, the server keeps computing
    for the `ghosts` and holds the slot of every other one for `held_s`. All prefills share a lock.
    `long_at_once` long requests have room in the KV cache at once."""
    here: list[Exchange] = []
    left, prefill = count(1), threading.Lock()

    def is_long(x: Exchange) -> bool:
        return x.body["max_tokens"] == LONG or len(x.body["prompt"]) >= LONG

    def must_wait(x: Exchange) -> bool:
        before = here[: here.index(x)]
        if is_long(x) and sum(map(is_long, before)) >= long_at_once:
            return True
        return len(before) >= number

    def script(x: Exchange) -> None:
        here.append(x)
        x.accept()
        while must_wait(x) and not x.client_left_within(0.002):
            """It waits in the queue."""
        if not must_wait(x):
            with prefill:
                threading.Event().wait(prefill_s)
            tokens = long_answer if is_long(x) else x.body["max_tokens"]
            x.stream(tokens=tokens, gap_s=gap_s)
            if x.closed_ns is not None:
                is_ghost = next(left) in ghosts
                threading.Event().wait((tokens - x.tokens_sent) * gap_s if is_ghost else held_s)
        here.remove(x)

    return script


@pytest.mark.parametrize("real", [2, 3, 4], ids=["a slot fewer than told", "as told", "one more"])
def test_a_train_samples_one_stream_that_leaves_at_a_time(
    serve: Serve, tmp_path: Path, real: int
) -> None:
    load = LOAD.model_copy(update={"slots": 3, "trials": 5})
    rows = rows_of(serve, tmp_path, engine_with_slots(real), load)
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
    metronome = max((row for row in rows if row.role is Role.METRONOME), key=lambda r: r.sent_ns)
    assert metronome.outcome is Outcome.CUT_OFF
    assert metronome.token_times_ns[-1] > max(end or 0 for end in ends)


def test_no_filler_of_a_train_comes_to_its_own_end(serve: Serve, tmp_path: Path) -> None:
    """A cancel takes 50 steps, so that eight fillers cannot leave one by one before they end."""
    load = LOAD.model_copy(update={"slots": 8, "trials": 9, "answer_tokens": 400})
    rows = rows_of(serve, tmp_path, engine_with_slots(8, held_s=0.25), load)
    fillers = [row for row in rows if row.role in (Role.FILLER, Role.METRONOME)]
    assert {row.outcome for row in fillers} == {Outcome.ABANDONED, Outcome.CUT_OFF}
    assert sum(row.arm == TrialArm.ABANDON and row.reference_ns is not None for row in rows) == 9


def one_token(x: Exchange) -> None:
    x.accept()
    x.token(finish_reason="stop")
    x.finish()


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
    last = reason(serve, tmp_path, script, LOAD)
    assert f"walkaway: no stream left while a probe waited: {why}" in last


@pytest.mark.parametrize("variant", ["prefill", "queue"])
def test_only_those_that_left_in_their_phase_are_samples(
    serve: Serve, tmp_path: Path, variant: Variant
) -> None:
    load = LOAD.model_copy(update={"trials": 4, "variant": variant, "prefill_tokens": LONG})
    rows = rows_of(serve, tmp_path, engine_with_slots(2, prefill_s=0.02), load)
    plan = {"prefill": "prefill", "queue": "queued"}[variant]
    leavers = {row.trial: row for row in rows if row.plan == plan}
    samples = [row for row in rows if row.arm == TrialArm.ABANDON and row.reference_ns]
    assert len(samples) == 4
    for row in samples:
        assert leavers[row.trial].outcome is Outcome.ABANDONED
        assert leavers[row.trial].tokens_read == 0
        assert row.sent_ns < (row.reference_ns or 0) <= (row.first_token_ns or 0)
    watched = [row for row in leavers.values() if row.tokens_read]
    assert len(watched) == (3 if variant == "prefill" else 0)


OCCUPANCY = OccupancyLoad(
    kind="occupancy", slots=4, rounds=3, prompt_tokens=[8, 16], answer_tokens=2000
)


def held_by_round(rows: list[RequestRow]) -> list[list[bool]]:
    checks = [row for row in rows if row.arm == TrialArm.OCCUPANCY and row.reference_ns]
    checks.sort(key=lambda row: (row.trial or 0, row.first_token_ns or 0))
    return [
        [row.first_token_ns is None or row.first_token_ns > (row.reference_ns or 0) for row in one]
        for _, one in groupby(checks, key=lambda row: row.trial)
    ]


@pytest.mark.parametrize("told", [3, 5])
def test_requests_that_wait_after_a_round_count_what_is_held(
    serve: Serve, tmp_path: Path, told: int
) -> None:
    """Ghosts 3, 6 and 7 of 12 leaves, whatever number of slots the load was given."""
    load = OCCUPANCY.model_copy(update={"slots": told})
    script = engine_with_slots(4, ghosts=(3, 6, 7))
    rows = rows_of(serve, tmp_path, script, load, settle_s=0.5)
    rounds = held_by_round(rows)
    assert [len(one) for one in rounds] == [4, 4, 4]
    assert [sum(one) for one in rounds] == [1, 2, 0]
    checks = [row for row in rows if row.trial is not None]
    assert all(row.first_token_ns is not None for row in checks)


def test_requests_that_count_outlast_those_that_left_also_when_steps_become_longer(
    serve: Serve, tmp_path: Path
) -> None:
    """Else a ghost ends after them, and counts as a lost slot."""
    quick, slow = (engine_with_slots(4, gap_s=gap_s) for gap_s in (0.002, 0.008))
    number = count()

    def script(x: Exchange) -> None:
        (quick if next(number) < 10 else slow)(x)

    rows = rows_of(serve, tmp_path, script, OCCUPANCY, settle_s=0.3)
    filled = [row for row in rows if row.arm == TrialArm.OCCUPANCY and row.outcome != "completed"]
    for trial in range(3):
        checks = [row for row in filled if row.trial == trial]
        before = [row for row in filled if row.trial == (trial - 1 if trial else None)]
        to_come = [(row.max_tokens or 0) - row.tokens_read for row in before]
        assert min(row.max_tokens or 0 for row in checks) > max(to_come)


def test_prefills_are_no_ghosts(serve: Serve, tmp_path: Path) -> None:
    """Four prefills take longer than the settle time."""
    load = OCCUPANCY.model_copy(update={"rounds": 1})
    rows = rows_of(serve, tmp_path, engine_with_slots(4, prefill_s=0.15), load, settle_s=0.4)
    assert held_by_round(rows) == [[False] * 4]


def test_ghosts_of_the_capacity_phase_are_waited_for(serve: Serve, tmp_path: Path) -> None:
    """Two long prompts have room; one is a ghost for longer than several answers take."""
    load = OCCUPANCY.model_copy(update={"rounds": 1, "capacity_prompt_tokens": LONG})
    script = engine_with_slots(4, ghosts=(1, 4), gap_s=0.005, long_at_once=2)
    rows = rows_of(serve, tmp_path, script, load, settle_s=0.2)
    assert [sum(one) for one in held_by_round(rows)] == [1]
    assert len(held_by_round(rows)[0]) == 4
    for trial in (0, 1):
        of_it = [row for row in rows if row.arm == TrialArm.CAPACITY and row.trial == trial]
        assert [row.first_token_ns is None for row in of_it].count(True) == 1
        assert len(of_it) == 3


def test_a_capacity_phase_whose_answers_all_end_comes_to_its_end(
    serve: Serve, tmp_path: Path
) -> None:
    load = OCCUPANCY.model_copy(update={"rounds": 1, "capacity_prompt_tokens": LONG})
    script = engine_with_slots(4, long_at_once=1, long_answer=30)
    rows = rows_of(serve, tmp_path, script, load)
    assert [row.trial for row in rows if row.arm == TrialArm.CAPACITY] == [0, 0, 1, 1]


def test_a_refused_capacity_prompt_ends_the_load_with_its_reason(
    serve: Serve, tmp_path: Path
) -> None:
    good = engine_with_slots(4)

    def script(x: Exchange) -> None:
        if x.body["max_tokens"] == LONG:
            x.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 8\r\n\r\ntoo long")
        else:
            good(x)

    load = OCCUPANCY.model_copy(update={"capacity_prompt_tokens": LONG})
    last = reason(serve, tmp_path, script, load)
    assert "a prompt of 1000 tokens got no token from the idle server: " in last
    assert "too long" in last
