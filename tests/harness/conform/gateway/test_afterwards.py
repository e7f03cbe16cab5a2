"""What leaves do to the gateway, from what it and the upstream have shown."""

import time
from types import SimpleNamespace
from typing import Any

import gevent  # noqa: TID251  as the code under test waits
import pytest

from harness.conform.finding import Finding
from harness.conform.gateway.afterwards import RETRY_S, judge_gauges, no_retry
from harness.conform.gateway.bench import Gauges, LeaveSpec
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


class GatewayThatRetries(SimpleNamespace):
    """In place of the bench. It asks again, a little later, for clients that have got nothing. The
    leaves are nearly as long ago as it may take to ask again."""

    WAITED_S, BACKOFF_S = 0.2, 0.05

    def __init__(self) -> None:
        super().__init__(plans={"chat": None}, left={"chat": {}}, arrivals={})

    def leave_each(self, _plan: None, leave: LeaveSpec, clients: int, dialect: str) -> None:
        for _ in range(clients):
            name = f"x{len(self.left[dialect])}"
            t0_ns = time.perf_counter_ns() - round((RETRY_S - self.WAITED_S) * 1e9)
            self.left[dialect][name] = t0_ns
            self.arrivals[name] = list[int]()
            if leave.order.headers == "late":
                gevent.spawn_later(self.BACKOFF_S, self.arrivals[name].append, t0_ns + 1)

    def asked_again(self, name: str, _t0_ns: int) -> list[int]:
        return list(self.arrivals[name])


def test_alone_it_sees_a_retry_that_comes_after_a_back_off_and_before_the_first_byte() -> None:
    gateway: Any = GatewayThatRetries()
    found = no_retry(gateway, "chat")
    assert isinstance(found, Finding)
    assert found.failure is Failure.NEVER
    assert found.reason.startswith("for 10 of 20 clients that had left")


def test_nobody_leaves_and_nobody_waits_after_cases_whose_clients_left_long_ago() -> None:
    gateway: Any = SimpleNamespace(left={"chat": {"x": 0}}, asked_again=lambda *_: [])
    found = no_retry(gateway, "chat")
    assert isinstance(found, Finding)
    assert found.failure is None
