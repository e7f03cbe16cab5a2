"""When a hold without an end is believed."""

from collections.abc import Sequence

import pytest

from harness.experiments.holds import has_no_end
from harness.experiments.outcome import CannotDecideError


@pytest.mark.parametrize(
    ("tries_s", "found"),
    [([0.1], False), ([None], False), ([0.1, None], False), ([None, None], True)],
)
def test_a_hold_without_an_end_is_believed_if_the_next_one_has_none_either(
    tries_s: Sequence[float | None], found: bool
) -> None:
    assert has_no_end(tries_s) is found


def test_one_hold_without_an_end_may_be_another_load() -> None:
    with pytest.raises(CannotDecideError, match="another load may have been there"):
        has_no_end([None, 0.1])
