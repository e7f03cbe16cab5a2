"""Whether streams ran at once: each had begun before any was nearly done."""

import pytest

from harness.load.rows import ran_at_once
from harness.records import Outcome, RequestRow
from tests.made_up.rows import request_row


def row(*token_times_ns: int) -> RequestRow:
    times = list(token_times_ns)
    return request_row(
        "r", sent_ns=0, ended_ns=100, outcome=Outcome.COMPLETED, token_times_ns=times
    )


@pytest.mark.parametrize(
    ("times", "is_so"),
    [
        ([(10, 20, 30)], True),
        ([(10, 20, 30), (11, 21, 31)], True),
        ([(10, 20, 30), (19, 29, 39)], True),
        ([(10, 20, 30), (20, 30, 40)], False),  # begun as the first was nearly done
        ([(10, 20, 30), (29, 39, 49)], False),  # the last token may have been taken late
        ([(10, 20, 30), (40, 50, 60)], False),  # one after the other
        ([(40, 50, 60), (10, 20, 30)], False),
        ([(10, 20, 30), (11, 21, 31), (40, 50, 60)], False),
        ([(10, 20, 30), (12,)], False),  # too short to tell
        ([(10, 20, 30), ()], False),
    ],
)
def test_ran_at_once(times: list[tuple[int, ...]], is_so: bool) -> None:
    assert ran_at_once([row(*of_row) for of_row in times]) is is_so
