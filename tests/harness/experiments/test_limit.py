"""The number of slots, found by trying."""

from collections.abc import Callable, Sequence

import pytest

from harness.experiments.limit import find_limit


def server_with(slots: int, *, stagger: int = 0) -> Callable[[int, int], Sequence[Sequence[int]]]:
    """A server with `slots` slots, a token each turn; each stream comes `stagger` turns later."""

    def ask(num_streams: int, tokens: int) -> list[Sequence[int]]:
        free: list[int] = [0] * slots
        times: list[Sequence[int]] = []
        for number in range(num_streams):
            slot = min(range(slots), key=free.__getitem__)
            begin = max(free[slot], number * stagger)
            free[slot] = begin + tokens
            times.append((begin + 1, begin + tokens - 1, begin + tokens))
        return times

    return ask


@pytest.mark.parametrize(
    ("slots", "stagger", "found"),
    [(n, 0, n) for n in (1, 2, 3, 5, 8, 31, 32, 200)] + [(6, 9, 6), (1_000, 0, None)],
)
def test_slots_are_found_by_trying(slots: int, stagger: int, found: int | None) -> None:
    assert find_limit(server_with(slots, stagger=stagger)) == found


def test_where_four_times_as_many_take_too_long_fewer_more_are_tried() -> None:
    asked = []

    def ask(num_streams: int, tokens: int) -> Sequence[Sequence[int]]:
        asked.append(num_streams)
        return server_with(128)(num_streams, tokens)

    assert find_limit(ask, more=lambda streams: min(4 * streams, streams + 32)) == 128
    assert max(asked) == 160
