"""The choice of a request that gives up its blocks when a running request finds none.

The scheduler asks for victims among the running requests until the growing one fits, or is itself
the victim. The default victim is the request that the scheduling policy ranks last: the youngest,
or the least important. With `rebuild-cost` it is, among the least important, the one that is
cheapest to bring back: it has the fewest computed tokens that the prefix cache could not return.
The most expensive one is never chosen while there is another, so one request always gets to its
end.
"""

from collections.abc import Callable, Sequence

from reference_engine.config import EngineConfig
from reference_engine.core.kv_cache import KVCache
from reference_engine.core.request import Request

ChooseVictim = Callable[[Sequence[Request]], Request]


def victim_policy(config: EngineConfig, kv_cache: KVCache) -> ChooseVictim:
    by_priority = config.scheduling_policy == "priority"
    if config.victim == "policy":
        return _least_important if by_priority else _youngest

    def cheapest(running: Sequence[Request]) -> Request:
        return max(
            running,
            key=lambda r: (r.priority if by_priority else 0, -kv_cache.rebuild_cost(r), r.arrival),
        )

    return cheapest


def _youngest(running: Sequence[Request]) -> Request:
    return running[-1]


def _least_important(running: Sequence[Request]) -> Request:
    return max(running, key=lambda request: (request.priority, request.arrival))
