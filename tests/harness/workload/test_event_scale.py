"""How many tokens an event brings, learned from whole answers."""

import pytest

from harness.workload.event_scale import Counted, EventScale, calibrate


@pytest.mark.parametrize(
    ("answers", "tokens", "error"),
    [
        ([(24, 24)], 1, 0.0),
        ([(24, 6), (13, 4)], 4, 0.0),  # the last event of the second brings one
        ([(30, 8)], 4, 0.0),
        ([(100, 7), (64, 4)], 16, 0.0),
        ([(17, 16), (25, 24)], 1, 1 / 17),  # each ends with a token that no event shows
        ([(26, 24)], 1, 2 / 26),
        ([(41, 11)], 4, 0.0),  # the first event brings one
        ([(40, 11), (57, 9), (20, 7)], 117 / 27, 0.32),  # as it comes: the mean
        ([(24, 1), (13, 1)], 24, 11 / 13),  # as one piece
        ([(3, 2), (24, 24)], 1, 0.0),  # short answers say little
    ],
)
def test_the_smallest_whole_number_that_explains_all_answers(
    answers: list[Counted], tokens: float, error: float
) -> None:
    found = calibrate(answers)
    assert found is not None
    assert found.tokens == pytest.approx(tokens)
    assert found.error == pytest.approx(error, abs=0.02)


@pytest.mark.parametrize("answers", [[], [(0, 5)], [(24, 0)], [(10, 20), (12, 23)]])
def test_nothing_to_learn(answers: list[Counted]) -> None:
    assert calibrate(answers) is None


def test_it_goes_on_learning() -> None:
    scale = EventScale([(24, 1)])
    for answer in ((100, 7), (90, 6), (64, 4)):
        scale.observe(answer)
    assert scale.now is not None
    assert scale.now.tokens == 16
    unknown = EventScale()
    assert unknown.now is None
    unknown.observe((40, 10))
    assert unknown.now == (4.0, 0.0)
