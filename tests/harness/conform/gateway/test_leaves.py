"""What the leave of one stream did to the other streams of its connection."""

import pytest

from harness.conform.gateway.leaves import broken_after
from harness.experiments.outcome import CannotDecideError
from harness.records import Outcome, RequestRow
from tests.made_up.rows import request_row

T0_NS = 1_000_000_000


def ended(at_ns: int, outcome: Outcome, why: str | None = None) -> RequestRow:
    return request_row("x", sent_ns=0, ended_ns=at_ns, outcome=outcome, error=why)


WHOLE = ended(2 * T0_NS, Outcome.COMPLETED)


def test_a_stream_that_breaks_after_the_leave_is_harm() -> None:
    cut = ended(T0_NS + 1, Outcome.FAILED, "the connection was reset")
    assert broken_after(T0_NS, [WHOLE, cut, None]) == "the connection was reset"
    assert broken_after(T0_NS, [WHOLE, None]) == "no end"
    assert broken_after(T0_NS, [WHOLE, ended(T0_NS - 1, Outcome.COMPLETED)]) is None


def test_a_stream_that_was_refused_before_the_leave_decides_nothing() -> None:
    """A gateway may limit how many requests run at once."""
    limited = ended(T0_NS - 1, Outcome.REJECTED, "429: too many requests at once")
    with pytest.raises(CannotDecideError, match="broke before the leave: 429"):
        broken_after(T0_NS, [None, WHOLE, limited])
