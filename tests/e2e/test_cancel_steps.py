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


def cancels(run: Run) -> list[tuple[int, dict[str, int]]]:
    """When each user left, and when each event happened to the request."""
    log = Log(run)
    return [
        (t0, {name: event["t_ns"] for name, event in log.events[client_id].items()})
        for client_id, t0 in log.left_ns.items()
    ]


def test_enough_users_left_at_every_point(run: Run) -> None:
    assert run.summary["outcomes"]["abandoned"] >= ABANDONS
    points = run.summary["breakdown"]["waste_by_abandon_point"]
    assert [point["planned_abandon"] for point in points] == [0, 1, 4, 16, 64]


def test_nobody_is_forgotten_and_nothing_leaks(run: Run) -> None:
    assert run.metrics["ghost_rate"]["mean"] == 0
    assert run.metrics["leaked_slots"]["mean"] == run.metrics["leaked_blocks"]["mean"] == 0


def test_everybody_is_removed_at_the_first_boundary(run: Run) -> None:
    figure = run.metrics["removed_at_first_boundary"]
    assert figure["n"] == run.summary["outcomes"]["abandoned"]
    assert figure["mean"] == 1.0


def test_a_cancel_takes_one_step_more_than_it_took_to_hear_of_it(run: Run) -> None:
    log = Log(run)
    lived_on, took = [], []
    for t0, times in cancels(run):
        assert t0 <= times["disconnected"] <= times["abort_sent"] <= times["abort_received"]
        took.append(log.steps_between(t0, times["blocks_freed"]))
        lived_on.append(took[-1] - log.steps_between(t0, times["abort_received"]))
    assert max(lived_on) <= 1
    assert run.metrics["cancel_latency_steps"]["max"] == max(took)
    assert run.metrics["cancel_latency_steps"]["mean"] == pytest.approx(sum(took) / len(took))


def test_hardly_more_than_the_step_in_flight_is_wasted(run: Run) -> None:
    """In most cases: while the machine stands still the worker hears later."""
    assert run.metrics["wasted_after_close_tokens"]["p50"] <= 1
    log = Log(run)
    passed = [log.steps_between(t0, times["abort_received"]) for t0, times in cancels(run)]
    assert passed.count(0) > len(passed) * 2 / 3, "the worker knew before the step was over"


def test_a_freed_slot_is_taken_in_the_very_next_schedule(run: Run) -> None:
    figure = run.metrics["refilled_next_schedule"]
    assert figure["n"] >= ABANDONS / 4
    assert figure["mean"] == 1.0


def test_detection_is_told_with_its_tail(run: Run) -> None:
    """Its length depends on the machine; every abandon must have one."""
    figure = run.metrics["detect_s"]
    assert figure["n"] == run.summary["outcomes"]["abandoned"]
    assert 0 < figure["p50"] <= figure["p99"] <= figure["max"]
    assert figure["p50"] < 0.02
