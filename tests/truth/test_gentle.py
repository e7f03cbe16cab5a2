"""A gentle watch of a server with busy users, end to end (the table of other servers:
`python -m tools.truth.gentle`)."""

import pytest

from tools.truth.gentle import watch

pytestmark = [pytest.mark.e2e, pytest.mark.alone]


LEAVES = 10
LONGEST_S = 120  # on a slow machine; it ends after the leaves


def test_beside_twelve_users_each_leave_from_a_late_server_is_seen_by_its_memory() -> None:
    seen = watch(seconds=LONGEST_S, leaves=LEAVES, linger_steps=10)
    last = seen.last
    assert last["leaves"] == LEAVES, f"too few leaves in {LONGEST_S} s: {last}"
    assert last["stops"] is not False
    assert last["most_streams"] == 1
    assert last["share_of_load"] < 0.2
    assert 0 < last["share_of_memory"] <= 0.05
    assert last["ghost_rate"] == 0
    assert seen.true_latency_s is not None
    assert last["latency_s"] == pytest.approx(seen.true_latency_s, rel=0.2)
