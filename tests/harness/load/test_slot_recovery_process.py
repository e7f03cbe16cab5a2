"""Trials of slot recovery in the load process: who takes which slot when, and what is void."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.records import Outcome, Role
from harness.workload.load import SlotRecoveryLoad
from tests.harness.load.load_process import LoadProcess, beside_the_locustfile

if TYPE_CHECKING:
    from tests.harness.load.conftest import Exchange, Script, ScriptedServer

    Serve = Callable[[Script], ScriptedServer]

pytestmark = pytest.mark.e2e


class TestSlotRecovery:
    LOAD = SlotRecoveryLoad(
        kind="slot_recovery",
        slots=2,
        trials=2,
        prompt_tokens=[8, 16],
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

    @pytest.mark.slow
    def test_a_trial_begins_when_all_slots_are_free(self, serve: Serve, tmp_path: Path) -> None:
        """Not when one is: those who left may go on in the others, unknown to their client."""
        ghosts: list[tuple[int, int]] = []
        slots = 3
        server = serve(self.engine_with_slots(slots, ghosts, ghost_s=0.3))
        load = self.LOAD.model_copy(update={"slots": slots})
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

    @pytest.mark.slow
    def test_fewer_slots_than_planned_void_all_trials(self, serve: Serve, tmp_path: Path) -> None:
        """Each look at the clock, another 10 s have passed: a round takes more than a quarter of
        the patience, so the next one asks for no longer answers."""
        options = beside_the_locustfile(
            tmp_path,
            """
from itertools import count
from types import SimpleNamespace
from harness.load import slot_recovery
looks_ns = count(step=10 * 10**9)
slot_recovery.time = SimpleNamespace(perf_counter_ns=lambda: next(looks_ns))
""",
        )
        load = self.LOAD.model_copy(update={"trials": 1})
        server = serve(self.engine_with_slots(1, []))
        child = LoadProcess(tmp_path, server.url, load, users=1, options=options)
        rows = child.result()
        assert {(row.role, row.max_tokens) for row in rows} == {(Role.CHECK, 8)}
        assert len(rows) == 3 * 3 * 2, "rounds of each trial, for each slot"
        assert child.log.count("is void: for 30 s no 2 requests ran at once") == 3

    def test_a_check_that_fails_voids_the_trial(self, serve: Serve, tmp_path: Path) -> None:
        load = self.LOAD.model_copy(update={"trials": 1})
        child = LoadProcess(tmp_path, serve(lambda x: x.accept()).url, load, users=1)
        rows = child.result()
        assert [(row.role, row.outcome) for row in rows] == [(Role.CHECK, Outcome.FAILED)] * 6
        assert child.log.count("is void: a request that checks the slots failed") == 3

    @pytest.mark.slow
    def test_answers_too_short_void_the_trial(self, serve: Serve, tmp_path: Path) -> None:
        load = self.LOAD.model_copy(update={"trials": 1, "control_answer_tokens": 2})
        child = LoadProcess(tmp_path, serve(self.engine_with_slots(2, [])).url, load, users=1)
        rows = child.result()
        probes = {row.arm: row.outcome for row in rows if row.role is Role.PROBE}
        assert probes.pop("control", Outcome.CUT_OFF) is Outcome.CUT_OFF
        assert probes == dict.fromkeys(["abandon", "unloaded"], Outcome.COMPLETED)
        assert "arm control, is void: a filler ended" in child.log
