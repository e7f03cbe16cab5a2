"""Which replica gets the next request: the engine's own router, and one by prefix.

`prefix_affine` sends requests with one beginning to one replica, as long as that has at most 1.25
times its share of the open requests; else to the next in the order that the prefix gives. That is
consistent hashing with bounded loads (arXiv:1608.01350); 1.25 is the default factor of bRPC.
"""

from hashlib import blake2b
from math import ceil
from random import Random
from typing import Final

from harness.simulate.asking import SimulatedRequest
from harness.workload.cluster import Router as Policy
from reference_engine.dynamo.router import NoInstanceError, RoutedInstance, Router

LOAD_FACTOR: Final = 1.25


class ReplicaRouter(Router[str]):
    """`up` and `down` as replicas come and go."""

    def __init__(self, policy: Policy, random: Random) -> None:
        super().__init__(random)
        self._policy = policy

    def route(self, request: SimulatedRequest) -> RoutedInstance[str]:
        """Raises NoInstanceError. The request counts as open until `RoutedInstance.ended`."""
        if self._policy == "prefix_affine":
            return self._nearest(prefix_of(request))
        return self.choose(self._policy)

    def _nearest(self, prefix: str) -> RoutedInstance[str]:
        instances = self._up.values()
        if not instances:
            raise NoInstanceError("no instance is up")
        num_open = sum(instance.num_open for instance in instances)
        most = ceil(LOAD_FACTOR * (num_open + 1) / len(instances))
        with_room = [instance for instance in instances if instance.num_open < most]
        return self._taken(max(with_room, key=lambda instance: _weight(prefix, instance.name)))


def prefix_of(request: SimulatedRequest) -> str:
    """A prompt begins with it: a known text's, its first page, or what all requests share, or its
    own words."""
    if request.spec.text is not None:
        return request.spec.text.plan
    if request.pages:
        return f"page {request.pages[0]}"
    return "shared" if request.shared_tokens else f"own {request.number}"


def _weight(prefix: str, name: str) -> bytes:
    return blake2b(f"{prefix}\n{name}".encode(), digest_size=8).digest()
