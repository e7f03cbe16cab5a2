"""A gentle watch beside twelve busy users, end to end, on a server that is ten steps late (the
table of other servers: `python -m tests.truth.gentle`)."""

import pytest

from tests.truth.gentle import watch

pytestmark = [pytest.mark.e2e, pytest.mark.alone]


def test_beside_twelve_users_a_late_server_is_measured_in_forty_seconds() -> None:
    seen = watch(seconds=35, linger_steps=10)
    last = seen.last
    assert last["is_final"]
    assert last["stops"] is not False
    assert last["most_streams"] == 2
    assert last["share_of_load"] < 0.2
    assert seen.true_latency_s is not None
    assert last["latency_s"] == pytest.approx(seen.true_latency_s, rel=0.2)
