"""Steps from tokens that come one by one, a few in an event, or many events at once."""

from statistics import median

import pytest

from harness.experiments.flushes import flushes_of, latest_gaps, step_of, typical_tokens

STEP_NS = 20_000_000
STEP_S = STEP_NS / 1e9


def test_one_token_a_step() -> None:
    times = [STEP_NS * n for n in range(8)]
    assert step_of(flushes_of(times)) == pytest.approx(STEP_S)
    assert typical_tokens(flushes_of(times)) == 1
    assert latest_gaps(times, latest=24) == pytest.approx([STEP_S] * 4)


@pytest.mark.parametrize("size", [3, 16])
@pytest.mark.parametrize("apart_ns", [0, 1000, 100_000])
def test_many_events_at_once_are_one_flush(size: int, apart_ns: int) -> None:
    times = [STEP_NS * size * (n // size) + apart_ns * (n % size) for n in range(5 * size)]
    flushes = flushes_of(times)
    assert [one.tokens for one in flushes] == [size] * 5
    assert step_of(flushes) == pytest.approx(STEP_S)
    assert median(latest_gaps(times, latest=4 * size)) == pytest.approx(STEP_S)


def test_many_tokens_in_one_event() -> None:
    times, tokens = [STEP_NS * 16 * n for n in range(4)], [16, 16, 16, 5]
    assert typical_tokens(flushes_of(times, tokens)) == 16
    assert latest_gaps(times, tokens, latest=24)[:2] == pytest.approx([STEP_S] * 2)
    even = flushes_of(times[:3], tokens[:3])
    assert step_of(even) == pytest.approx(STEP_S)


def test_all_at_once_is_no_step() -> None:
    assert step_of(flushes_of([5] * 32)) is None
    assert step_of(flushes_of([5], [32])) is None
    assert step_of(flushes_of([])) is None
    assert latest_gaps([5] * 32, latest=24) == []


def test_tokens_that_a_busy_client_read_at_once_do_not_change_the_step() -> None:
    times = [STEP_NS * (n - n % 3 if 30 <= n < 60 else n) for n in range(120)]
    assert median(latest_gaps(times, latest=90)) == pytest.approx(STEP_S)
    assert typical_tokens(flushes_of(times)) == 1
