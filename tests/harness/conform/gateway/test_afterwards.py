"""What leaves do to the gateway, from what it and the upstream have shown."""

import pytest

from harness.conform.gateway.afterwards import judge_gauges
from harness.conform.gateway.bench import Gauges
from harness.experiments.outcome import RefusedError
from harness.store.conform_result import Failure

ACTIVE = 'nginx_current_connections{"state": "active"}'
ACCEPTED = 'nginx_current_connections{"state": "accepted"}'
RESTING: list[Gauges] = [{ACTIVE: 1}] * 3


def read(active: list[float], accepted: list[float]) -> list[Gauges]:
    return [{ACTIVE: one, ACCEPTED: other} for one, other in zip(active, accepted, strict=True)]


def test_a_sum_that_is_typed_as_a_gauge_is_no_leak() -> None:
    staying, leaving = read([1, 1, 1], [0, 20, 40]), read([1, 1, 1], [40, 61, 82])
    found = judge_gauges(staying, leaving)
    assert found.failure is None
    assert found.evidence == {"gauges": 1, "sums": 1}
    not_shown_at_first = [{ACTIVE: 1.0}, *staying[1:]]
    assert judge_gauges(not_shown_at_first, leaving).failure is None
    with pytest.raises(RefusedError, match="only sums"):
        judge_gauges([{ACCEPTED: 0}, {ACCEPTED: 20}, {ACCEPTED: 40}], [{ACCEPTED: 40}] * 3)


def test_a_gauge_that_only_leaves_raise_leaks() -> None:
    found = judge_gauges(read([1, 20, 20], [0, 20, 40]), read([20, 40, 60], [40, 61, 82]))
    assert found.failure is Failure.NEVER
    assert found.reason == f"{ACTIVE} read 20, 40 after 20 leaves, and 60 after 40"


@pytest.mark.parametrize("leaving", [[0, 9, 18], [0, 20, 20], [0, 20, 0], [5, 4, 3]])
def test_a_gauge_that_grows_less_or_once_passes_and_is_not_said_to_read_as_before(
    leaving: list[float],
) -> None:
    found = judge_gauges(RESTING, [{ACTIVE: one} for one in leaving])
    assert (found.failure, found.reason) == (None, "none of 1 gauge grew each time by 10 or more")
