"""Which instance gets the next request; only instances that are up can be chosen.

A router keeps its instances in the order in which they were last chosen, so the first one is next
by turn, and of several with the fewest open requests the first is chosen.
"""

from collections.abc import Hashable
from random import Random
from typing import Generic, TypeVar

from reference_engine.config import RouterPolicy

Name = TypeVar("Name", bound=Hashable)


class NoInstanceError(LookupError):
    """No instance is up, or not the one that was named."""


class RoutedInstance(Generic[Name]):
    """One incarnation of what serves requests: after a loss, `Router.up` makes another."""

    def __init__(self, name: Name) -> None:
        self.name = name
        self.num_open = 0

    def __repr__(self) -> str:
        return f"<RoutedInstance {self.name} open {self.num_open}>"

    def ended(self) -> None:
        """One of its requests has ended; call it also if the instance is no longer up."""
        assert self.num_open > 0, f"{self.name} has no open request"
        self.num_open -= 1


class Router(Generic[Name]):
    def __init__(self, random: Random) -> None:
        self._random = random
        self._up: dict[Name, RoutedInstance[Name]] = {}

    @property
    def names(self) -> list[Name]:
        return list(self._up)

    def up(self, name: Name) -> None:
        assert name not in self._up, f"{name} is up twice"
        self._up[name] = RoutedInstance(name)

    def down(self, name: Name) -> None:
        self._up.pop(name, None)

    def choose(self, policy: RouterPolicy) -> RoutedInstance[Name]:
        """Raises NoInstanceError. The request counts as open until `RoutedInstance.ended`."""
        if not self._up:
            raise NoInstanceError("no instance is up")
        instances = list(self._up.values())
        if policy == "random":
            return self._taken(self._random.choice(instances))
        if policy == "round_robin":
            return self._taken(instances[0])
        return self._taken(min(instances, key=lambda instance: instance.num_open))

    def direct(self, name: Name) -> RoutedInstance[Name]:
        """Raises NoInstanceError, as `choose` does."""
        if name not in self._up:
            raise NoInstanceError(f"no instance {name} is up")
        return self._taken(self._up[name])

    def _taken(self, instance: RoutedInstance[Name]) -> RoutedInstance[Name]:
        instance.num_open += 1
        self._up[instance.name] = self._up.pop(instance.name)
        return instance
