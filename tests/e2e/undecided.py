"""What a gate leaves undecided is made again: the machine was too busy for it, not the engine bad.

Nothing else is: whoever makes it must hold every other verdict to what it should be.
"""

from collections.abc import Callable
from typing import TypeVar

import pytest

Made = TypeVar("Made")

UNDECIDED = 4  # the exit code
MOST_TRIES = 3


def until_decided(make: Callable[[int], Made], is_decided: Callable[[Made], bool]) -> Made:
    """The first that is decided, of a few; `make` is told how many there were before."""
    tries: list[Made] = []
    for number in range(MOST_TRIES):
        tries.append(make(number))
        if is_decided(tries[-1]):
            return tries[-1]
    pytest.fail(f"{MOST_TRIES} times in turn nothing could be decided; the last: {tries[-1]}")
