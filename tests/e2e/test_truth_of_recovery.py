"""Slot recovery by probe, a black box, against a server that knows when it gave the slot away."""

from statistics import fmean, median
from typing import Any

import pytest

from tests.e2e.running import Run, measure, scripted_server
from tests.truth.known import seconds

pytestmark = pytest.mark.e2e

STEP_S = 0.02
SLOTS = 3
TRIALS = 5
LINGER_STEPS = 2
FREE_DELAY_S = 0.05

WORKLOAD = f"""
question = "Is what a probe says what the server did?"
[run]
seed = 3
users = 1
max_seconds = 40
timeout_s = 20
[load]
kind = "slot_recovery"
trials = {TRIALS}
prompt_tokens = [10, 20]
answer_tokens = 1000
control_answer_tokens = 60
probe_tokens = 2
abandon_after_tokens = 5
"""


class Trials:
    """The probes of a run by arm, each with its row, its work and its trial's leaver, if any."""

    def __init__(self, run: Run, truth: dict[str, Any]) -> None:
        self.run = run
        self.works = {work["client_id"]: work for work in truth["requests"]}
        rows = run.rows("requests")
        self._leavers = {row["trial"]: row for row in rows if row["outcome"] == "abandoned"}
        self._probes = [row for row in rows if row["role"] == "probe"]

    def of(self, arm: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The probes' rows and works."""
        rows = [row for row in self._probes if row["arm"] == arm]
        return [(row, self.works[row["request_id"]]) for row in rows]

    def leaver(self, trial: int) -> tuple[int, dict[str, Any]]:
        """When the trial's leaver left, and its work."""
        row = self._leavers[trial]
        return row["abandoned_ns"], self.works[row["request_id"]]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    folder = tmp_path_factory.mktemp("recovery")
    workload = folder / "recovery.toml"
    workload.write_text(WORKLOAD)
    script = {"linger_steps": LINGER_STEPS, "free_delay_s": FREE_DELAY_S, "slots": SLOTS}
    with scripted_server(step_s=STEP_S, **script) as server:
        run = measure(workload, folder / "run", "--target", server.url, "--engine", "reference")
        return Trials(run, server.truth())


def assert_agrees(metric: dict[str, Any], read: list[float], known: list[float]) -> None:
    """Mean and median are those of what was read: each after the server sent it, and typically
    within a step."""
    assert metric["n"] == len(known) == TRIALS
    assert metric["n_censored"] == 0
    assert metric["mean"] == pytest.approx(fmean(read))
    assert metric["p50"] == pytest.approx(median(read))
    assert_soon([told - sent for told, sent in zip(read, known, strict=True)])


def assert_soon(lags_s: list[float]) -> None:
    """Never before it happened, and typically within a step."""
    assert min(lags_s) >= 0
    assert median(lags_s) <= STEP_S


def test_every_probe_was_queued_behind_full_slots(trials: Trials) -> None:
    """Else the trial would not have measured what it says."""
    for arm in ("abandon", "control"):
        for _, probe in trials.of(arm):
            others = [work for work in trials.works.values() if work is not probe]
            running = [
                work
                for work in others
                if work["admitted_ns"] is not None
                and work["admitted_ns"] < probe["arrived_ns"] < work["freed_ns"]
            ]
            assert len(running) == SLOTS


def test_recovery_is_from_leaving_to_the_first_token_sent_to_the_probe(trials: Trials) -> None:
    closes, read, known = [], [], []
    for row, probe in trials.of("abandon"):
        t0, leaver = trials.leaver(row["trial"])
        assert row["reference_ns"] == t0
        assert probe["slot_from"] == leaver["client_id"]
        closes.append(seconds(t0, leaver["closed_ns"]))
        read.append(seconds(t0, row["first_token_ns"]))
        known.append(seconds(t0, probe["sent_times_ns"][0]))
    assert_soon(closes)
    assert_agrees(trials.run.metrics["slot_recovery_s"], read, known)


def test_recovery_is_what_the_script_makes_it(trials: Trials) -> None:
    """Up to a step to the boundary, the lingering, the delay (up to a boundary), one step."""
    p50 = trials.run.metrics["slot_recovery_s"]["p50"]
    least = LINGER_STEPS * STEP_S + FREE_DELAY_S + STEP_S
    assert least <= p50 <= least + 3 * STEP_S


def test_the_unloaded_probe_is_answered_at_once(trials: Trials) -> None:
    probes = trials.of("unloaded")
    read = [seconds(row["sent_ns"], row["first_token_ns"]) for row, _ in probes]
    known = [seconds(work["arrived_ns"], work["sent_times_ns"][0]) for _, work in probes]
    assert_agrees(trials.run.metrics["probe_ttft_unloaded_s"], read, known)
    assert STEP_S <= trials.run.metrics["probe_ttft_unloaded_s"]["p50"] <= 2 * STEP_S


def test_in_the_control_the_probe_waits_for_a_natural_end(trials: Trials) -> None:
    read, known = [], []
    for row, probe in trials.of("control"):
        before = trials.works[probe["slot_from"]]
        assert before["finish_reason"] == "length"
        assert before["closed_ns"] is None
        read.append(seconds(row["reference_ns"], row["first_token_ns"]))
        known.append(seconds(row["reference_ns"], probe["sent_times_ns"][0]))
    assert_agrees(trials.run.metrics["probe_ttft_control_s"], read, known)
