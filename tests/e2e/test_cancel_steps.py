"""How many steps pass until the bundled engine has let go: the claim that its design makes.

The shipped workload, only shorter: 20 ms a step, so that steps are counted and not the machine.
"""

import pytest

from tests.e2e.running import Log, Run, measure, set_flags

pytestmark = pytest.mark.e2e

ABANDONS = 60


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("steps")
    fewer = set_flags(f"load.stop_after_abandons={ABANDONS}")
    return measure("cancel_steps", folder / "run", *fewer)


def test_nobody_is_forgotten_and_nothing_leaks_wherever_users_left(run: Run) -> None:
    assert run.summary["outcomes"]["abandoned"] >= ABANDONS
    points = run.summary["breakdown"]["waste_by_abandon_point"]
    assert [point["planned_abandon"] for point in points] == [0, 1, 4, 16, 64]
    for name in ("ghost_rate", "leaked_slots", "leaked_blocks"):
        assert run.metrics[name]["mean"] == 0, name
    detect = run.metrics["detect_s"]
    assert detect["n"] == run.summary["outcomes"]["abandoned"]
    assert 0 < detect["p50"] <= detect["p99"] <= detect["max"]
    assert detect["p50"] < 0.02


def test_the_machine_the_server_and_the_load_are_watched(run: Run) -> None:
    assert {"machine", "frontend", "worker", "load"} <= {row["process"] for row in run.rows("cpu")}


def test_a_cancel_takes_one_step_more_than_it_took_to_hear_of_it(run: Run) -> None:
    removed, log = run.metrics["removed_at_first_boundary"], Log(run)
    assert removed["n"] == run.summary["outcomes"]["abandoned"] == len(log.left_ns)
    assert removed["mean"] == 1.0
    until_heard, until_freed = [], []
    for client_id, t0 in log.left_ns.items():
        times = {name: event["t_ns"] for name, event in log.events[client_id].items()}
        assert t0 <= times["disconnected"] <= times["abort_sent"] <= times["abort_received"]
        until_heard.append(log.steps_between(t0, times["abort_received"]))
        until_freed.append(log.steps_between(t0, times["blocks_freed"]))
    more = [freed - heard for freed, heard in zip(until_freed, until_heard, strict=True)]
    assert max(more) <= 1
    steps = run.metrics["cancel_latency_steps"]
    assert steps["max"] == max(until_freed)
    assert steps["mean"] == pytest.approx(sum(until_freed) / len(until_freed))
    # In most cases: while the machine stands still the worker hears later.
    assert run.metrics["wasted_after_close_tokens"]["p50"] <= 1
    assert until_heard.count(0) > len(until_heard) * 2 / 3, "before the step was over"


def test_a_freed_slot_is_taken_in_the_very_next_schedule(run: Run) -> None:
    figure = run.metrics["refilled_next_schedule"]
    assert figure["n"] >= ABANDONS / 4
    assert figure["mean"] == 1.0
