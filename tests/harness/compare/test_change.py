"""Since when a figure is at another level: found where there is a change, and hardly ever else."""

import numpy as np
import pytest

from harness.compare.change import FALSE_ALARMS, Change, RunReading, last_change

HISTORIES = 500


def readings(values: object) -> list[RunReading]:
    return [RunReading(float(one)) for one in np.asarray(values)]


def made_up(kind: str, runs: int) -> np.ndarray:
    """Histories without a change, a row each."""
    noise = np.random.default_rng(runs).standard_normal((HISTORIES, runs))
    if kind == "times":
        return 0.02 * np.exp(0.05 * noise)
    return 10 * noise  # of both signs


@pytest.mark.parametrize("kind", ["times", "both signs"])
@pytest.mark.parametrize("runs", [3, 5, 9, 30, 100])
def test_at_most_one_in_a_hundred_histories_without_a_change_shows_one(
    kind: str, runs: int
) -> None:
    alarms = sum(last_change(readings(one)) is not None for one in made_up(kind, runs))
    rare = FALSE_ALARMS + 3 * (FALSE_ALARMS / HISTORIES) ** 0.5
    assert alarms / HISTORIES < rare


@pytest.mark.parametrize("after", [1, 3, 10, 27])
def test_a_change_of_ten_spreads_is_dated_to_the_run(after: int) -> None:
    found = []
    for one in made_up("times", 30):
        one[-after:] *= np.exp(0.5)
        found.append(last_change(readings(one)))
    dated = [one for one in found if one is not None and one.first == 30 - after]
    assert len(dated) > 0.99 * HISTORIES
    assert all(one.is_rise for one in dated)


@pytest.mark.parametrize(
    ("history", "change"),
    [
        ("20 21 20 30", None),  # four runs that differ by a twentieth cannot tell
        ("20 20 20 30", (0, 3, 20, 30)),  # those of a simulation, say, are equal
        ("20 20.1 19.9 30 30.2 29.8", (0, 3, 20, 30)),
        ("20 20.1 19.9 20.0 20.1 20.2", None),
        ("0.3 0.30000000000000004 0.30000000000000004", None),
        ("0 0 0 0 3 3", (0, 4, 0, 3)),
        ("0 0 0 0 0", None),
        ("5 5", None),
        ("", None),
        # Up and down again: the newest change counts.
        ("10 10.1 9.9 20 20.2 19.8 20 20.1 10 10.1 9.9", (3, 8, 20, 10)),
        # A wild run long ago hides nothing.
        ("20 20.3 90 19.8 20.1 20.2 19.9 20 19.7 20.4 20.1 20 23 23.2 22.9", (7, 12, 20, 23)),
    ],
)
def test_the_newest_change_is_found(
    history: str, change: tuple[int, int, float, float] | None
) -> None:
    found = last_change(readings(history.split()))
    if change is None:
        assert found is None
    else:
        assert found is not None
        start, first, before, since = change
        assert (found.start, found.first) == (start, first)
        assert found.before.value == pytest.approx(before)
        assert found.since.value == pytest.approx(since)


def of_two(before: RunReading, since: RunReading) -> Change | None:
    return last_change([before] * 8 + [since] * 4)


def test_a_value_that_is_only_known_to_be_more_counts_on_the_higher_side() -> None:
    known, more = RunReading(0.04), RunReading(2.0, is_more=True)
    rise, fall = of_two(known, more), of_two(more, known)
    assert rise is not None
    assert (rise.first, rise.since) == (8, more)
    assert fall is not None
    assert (fall.first, fall.before) == (8, more)
    assert of_two(RunReading(3.0), more) is None  # it may be more than 3, too
    assert of_two(more, RunReading(3.0)) is None


def test_runs_are_no_finer_than_their_own_intervals() -> None:
    none, one = RunReading(0.0, (0.0, 0.0076)), RunReading(0.002, (0.0004, 0.011))
    assert last_change([none] * 9 + [one]) is None
    many = RunReading(0.05, (0.034, 0.073))
    assert last_change([none] * 9 + [many]) is not None
