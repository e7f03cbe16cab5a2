"""Routers of replicas: by turn, by load, by lot, by prefix."""

from random import Random

import pytest

from harness.simulate.asking import SimulatedRequest
from harness.simulate.router import ReplicaRouter
from harness.workload.abandon import RequestSpec
from harness.workload.cluster import Router as Policy
from reference_engine.dynamo.router import NoInstanceError

NAMES = ["worker-0", "worker-1", "worker-2", "worker-3"]


def _asked(number: int, *, page: int | None = None) -> SimulatedRequest:
    spec = RequestSpec(user=number, max_tokens=1, prompt_tokens=1)
    return SimulatedRequest(number, spec, 0, () if page is None else (page, 7), 16.0)


def _router(policy: Policy) -> ReplicaRouter:
    router = ReplicaRouter(policy, Random(5))
    for name in NAMES:
        router.up(name)
    return router


def test_round_robin_goes_by_turn() -> None:
    router = _router("round_robin")
    assert [router.route(_asked(n)).name for n in range(6)] == [*NAMES, *NAMES[:2]]


def test_the_least_loaded_is_chosen() -> None:
    router = _router("least_loaded")
    taken = [router.route(_asked(n)) for n in range(4)]
    taken[2].ended()
    assert router.route(_asked(4)).name == taken[2].name


def test_random_is_of_its_seed() -> None:
    first, again = ([_router("random").route(_asked(n)).name for n in range(9)] for _ in "ab")
    assert first == again


def test_one_prefix_goes_to_one_replica_while_that_has_room() -> None:
    router = _router("prefix_affine")
    homes = {router.route(_asked(n, page=3)).name for n in range(1)}
    taken = router.route(_asked(1, page=3))  # 1 open: the most is ceil(1.25 * 2 / 4) = 1
    assert taken.name not in homes
    taken.ended()
    assert {_router("prefix_affine").route(_asked(n, page=3)).name for n in range(9)} == homes


def test_prefixes_spread_and_no_replica_gets_too_much() -> None:
    router = _router("prefix_affine")
    taken = [router.route(_asked(n, page=n % 3)) for n in range(400)]
    loads = [sum(one.name == name for one in taken) for name in NAMES]
    assert max(loads) <= 125
    own = _router("prefix_affine")
    assert {own.route(_asked(n)).name for n in range(40)} == set(NAMES)


def test_a_prefix_keeps_its_replica_when_another_is_gone() -> None:
    homes = {page: _router("prefix_affine").route(_asked(0, page=page)).name for page in range(20)}
    for page, home in homes.items():
        router = _router("prefix_affine")
        router.down("worker-2")
        assert (router.route(_asked(0, page=page)).name == home) == (home != "worker-2")


@pytest.mark.parametrize("policy", ["random", "round_robin", "least_loaded", "prefix_affine"])
def test_nobody_is_up(policy: Policy) -> None:
    with pytest.raises(NoInstanceError, match="no instance is up"):
        ReplicaRouter(policy, Random(0)).route(_asked(0))
