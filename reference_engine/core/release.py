"""How a request that ends lets go of what it had."""

from typing import Final, NamedTuple


class Release(NamedTuple):
    """How an ending request is let go. The defaults are right; anything else is a fault.

    `num_leaked` blocks and, with `leaks_slot`, its batch slot are lost for good. With
    `is_held_back` its blocks wait for `free_held_back`; with `drops_prefix` they leave the prefix
    cache. It is counted `times`.
    """

    num_leaked: int = 0
    leaks_slot: bool = False
    is_held_back: bool = False
    drops_prefix: bool = False
    times: int = 1


CORRECT: Final = Release()
