from collections import Counter
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reference_engine.config import RouterPolicy
from reference_engine.dynamo.router import NoInstanceError, RoutedInstance, Router


def router_of(*names: str, seed: int = 0) -> Router[str]:
    router = Router[str](Random(seed))
    for name in names:
        router.up(name)
    return router


def chosen(router: Router[str], policy: RouterPolicy, times: int) -> str:
    return "".join(router.choose(policy).name for _ in range(times))


def test_each_policy_has_its_order() -> None:
    assert chosen(router_of("a", "b", "c"), "round_robin", 7) == "abcabca"
    assert chosen(router_of("a", "b", "c"), "least_loaded", 7) == "abcabca"
    drawn = chosen(router_of("a", "b", "c", seed=1), "random", 300)
    assert drawn == chosen(router_of("a", "b", "c", seed=1), "random", 300)
    assert min(Counter(drawn).values()) > 70


def test_the_fewest_open_requests_win_and_then_the_turn() -> None:
    router = router_of("a", "b", "c")
    a, b, _ = (router.choose("least_loaded") for _ in range(3))
    b.ended()
    assert router.choose("least_loaded").name == "b"
    b.ended()
    a.ended()
    assert chosen(router, "least_loaded", 3) == "abc"
    assert router.direct("c").num_open == 3


def test_an_instance_that_is_not_up_is_never_chosen() -> None:
    router = router_of("a", "b")
    before = router.direct("a")
    router.down("a")
    assert {router.choose("round_robin").name for _ in range(3)} == {"b"}
    with pytest.raises(NoInstanceError, match="no instance a"):
        router.direct("a")
    router.up("a")
    before.ended()
    assert router.direct("a").num_open == 1, "the request of its earlier life does not count"
    router.down("a")
    router.down("b")
    with pytest.raises(NoInstanceError, match="no instance is up"):
        router.choose("random")


class Routing(RuleBasedStateMachine):
    """Against a plain count of what is open."""

    def __init__(self) -> None:
        super().__init__()
        self.router = router_of()
        self.open: list[RoutedInstance[str]] = []

    @rule(name=st.sampled_from("abcd"))
    def goes_up_or_down(self, name: str) -> None:
        if name in self.router.names:
            self.router.down(name)
            self.open = [one for one in self.open if one.name != name]
        else:
            self.router.up(name)

    @precondition(lambda self: self.router.names)
    @rule(policy=st.sampled_from(["least_loaded", "random", "round_robin"]))
    def opens(self, policy: RouterPolicy) -> None:
        counts = Counter(one.name for one in self.open)
        took = self.router.choose(policy)
        if policy == "least_loaded":
            assert counts[took.name] == min(counts[name] for name in self.router.names)
        self.open.append(took)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        self.open.pop(data.draw(st.integers(0, len(self.open) - 1))).ended()

    @invariant()
    def counts_what_is_open(self) -> None:
        assert all(
            one.num_open == Counter(o.name for o in self.open)[one.name] for one in self.open
        )


TestRouting = Routing.TestCase
