"""What a case left behind, by the streams that it began."""

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.conform.cleaning import Cleaning
from harness.experiments.occupancy import Occupancy
from harness.experiments.streams import Streams

SETTLE_S = 2.0


@dataclass
class Stream:
    """`silent_s`: since its last token; None: it has none."""

    silent_s: float | None
    has_ended: bool = False
    is_unread: bool = False

    @property
    def last_token_ns(self) -> int | None:
        if self.silent_s is None:
            return None
        return time.perf_counter_ns() - int(1e9 * self.silent_s)


def cleaning(*opened: Stream) -> Cleaning:
    streams: Any = SimpleNamespace(opened=list(opened), settle_s=SETTLE_S, ttft_s=0.02, step_s=0.02)
    return Cleaning(cast(Streams, streams), cast(Occupancy, None))


@pytest.mark.parametrize(
    ("opened", "still"),
    [
        ([Stream(3.0), Stream(5.0)], True),
        ([Stream(3.0), Stream(0.1)], False),
        ([Stream(3.0), Stream(0.1, has_ended=True)], True),
        ([Stream(None)], False),  # it may queue
        ([Stream(3.0, is_unread=True)], False),  # nobody looks at what it gets
        ([], False),
    ],
)
def test_a_server_stands_still_whose_running_streams_all_have_no_token(
    opened: list[Stream], *, still: bool
) -> None:
    assert cleaning(*opened).stand_still() is still


def test_a_check_is_ended_only_where_the_server_stands_still_for_longer_than_any_stall() -> None:
    one = cleaning(Stream(3 * SETTLE_S - 0.5))
    assert one.stand_still()
    assert not one.stand_still(one.longest_still_s)
    one = cleaning(Stream(3 * SETTLE_S + 0.5))
    assert one.stand_still(one.longest_still_s)
