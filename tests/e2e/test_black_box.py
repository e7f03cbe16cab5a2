"""What `make truth` does for twenty settings and twenty servers with nothing wrong, for a few."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.truth.alarms import alarms
from tests.truth.black_box import Line, Seen, hold_to_truth, look_at_users, user_lines
from tests.truth.settings import draw, draw_clean

# Three runs at most, each of which may take a minute.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

GHOSTS, LEAKS, DELAYS = 6, 2, 8
CLEAN = (1, 2)


def misses(lines: list[Line]) -> list[Line]:
    return [line for line in lines if not line.is_right]


@pytest.mark.parametrize("number", [GHOSTS, LEAKS, DELAYS])
def test_a_setting_is_told_as_it_is(number: int, tmp_path: Path) -> None:
    lines = hold_to_truth(draw(number), tmp_path)
    assert len(lines) >= 9
    assert misses(lines) == []


@pytest.mark.parametrize("number", CLEAN)
def test_a_server_with_nothing_wrong_raises_no_alarm(number: int, tmp_path: Path) -> None:
    setting = draw_clean(number)
    seen = look_at_users(setting, tmp_path)
    assert alarms(seen.run.summary) == []
    assert misses(list(user_lines(seen))) == []
    assert_would_be_noticed(seen)


def assert_would_be_noticed(seen: Seen) -> None:
    """Had anything been wrong, it would have been an alarm, and a line that misses."""
    summary = seen.run.summary
    for name in ("ghost_rate", "leaked_slots", "leaked_blocks"):
        wrong: dict[str, Any] = copy.deepcopy(summary)
        wrong["metrics"][name]["mean"] = 1.0
        raised = alarms(wrong)
        assert raised[0] == f"{name} is 1.0"
        assert len(raised) == 2  # the report's sentence says so, too
    assert alarms({**summary, "wedged": True}) == ["wedged is True"]
    truth = copy.deepcopy(seen.truth)
    for work in truth["requests"]:
        work["token_times_ns"] = work["token_times_ns"] * 2
        work["freed_ns"] += int(1e9)
        work["removed_ns"] += int(1e9)
        work["leaked_blocks"] = 1
    lines = user_lines(replace(seen, truth=truth))
    found = {line.what for line in misses(list(lines))}
    assert found >= {
        "wasted tokens, in all",
        "leaked blocks",
        "cancel latency by gauge",
        "cancel latency by counter",
    }
