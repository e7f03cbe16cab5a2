"""How many tries say enough, and how long they may take: one rule for a schedule and for a row."""

from typing import Final

from harness.conform.bystanders import chance_of
from harness.store.search_result import Rate

_CHANCE: Final = 0.05  # above it, that it comes more often with leaves may be chance
_LEAST_S: Final = 900.0  # for the tries of one thing
_BEYOND_S: Final = 1800.0  # the search's own time: no try begins later


def is_no_chance(rate: Rate, control: Rate) -> bool:
    hits, tries = rate.hits + control.hits, rate.tries + control.tries
    return chance_of(rate.hits, rate.tries, of_all=hits, among=tries) <= _CHANCE


def last_try_s(began_s: float, *, ends_s: float, tries: int = 0, one_s: float = 0.0) -> float:
    """Until when the tries of one thing, which began at `began_s`, may begin: 15 minutes, or as
    long as `tries` of `one_s` seconds take, but at most until half an hour after `ends_s`, the end
    of the search's own time."""
    return min(began_s + max(_LEAST_S, tries * one_s), ends_s + _BEYOND_S)
