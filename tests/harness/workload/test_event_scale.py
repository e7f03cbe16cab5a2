"""How many tokens an event brings, learned from whole answers."""

import pytest

from harness.workload.event_scale import Counted, EventScale, calibrate, come_whole


@pytest.mark.parametrize(
    ("answers", "tokens", "error", "of_prefix"),
    [
        ([(24, 24)], 1, 0.0, 0),
        ([(24, 6), (13, 4)], 4, 0.0, 3),  # the last event of the second brings one
        ([(30, 8)], 4, 0.0, 3),
        ([(100, 7), (64, 4)], 16, 0.0, 15),
        ([(17, 16), (25, 24)], 1, 1 / 17, 1),  # each ends with a token that no event shows
        ([(26, 24)], 1, 2 / 26, 2),
        ([(41, 11)], 4, 0.0, 3),  # the first event brings one
        ([(40, 11), (57, 9), (20, 7)], 117 / 27, 0.32, 117 / 27),  # as it comes: the mean
        ([(3, 2), (24, 24)], 1, 0.0, 0),  # short answers say little
        ([(1, 1), (24, 1), (24, 6)], 4, 0.0, 3),  # one event says nothing of its size
        ([(12, 24)], 0.5, 0.0, 1),  # half a token an event
        ([(10, 20), (12, 23)], 22 / 43, 0.03, 1),
        ([(24, 100), (13, 50)], 37 / 150, 0.06, 1),  # a character an event
        ([(24, 25)], 1, 0.0, 1),  # an event more than tokens, such as half of a character
        ([(24, 26), (16, 16)], 1, 1 / 24, 2),
        ([(24, 27)], 24 / 27, 0.0, 1),
        ([(5, 6)], 5 / 6, 0.0, 1),
    ],
)
def test_the_smallest_whole_number_that_explains_all_answers(
    answers: list[Counted], tokens: float, error: float, of_prefix: float
) -> None:
    found = calibrate(answers)
    assert found is not None
    assert found.tokens == pytest.approx(tokens)
    assert found.error == pytest.approx(error, abs=0.02)
    assert found.of_prefix == pytest.approx(of_prefix)


@pytest.mark.parametrize("answers", [[], [(0, 5)], [(24, 0)], [(24, 1), (13, 1)], [(1, 1)]])
def test_nothing_to_learn(answers: list[Counted]) -> None:
    assert calibrate(answers) is None
    assert come_whole(answers) is (len(answers) == 2)


@pytest.mark.parametrize(
    ("answers", "events", "error"),
    [
        ([(24, 24)], 1, 0.0),
        ([(24, 6)], 1, 3 / 4),  # one event's worth: the first may bring one token
        ([(24, 6)], 2, 3 / 8),
        ([(24, 6)], 0, 3.0),
        ([(26, 24)], 1, 2.0),
        ([(26, 24)], 20, 2 / 20),
        ([(26, 24)], 1000, 2 / 26),
        ([(12, 24)], 10, 1 / 5),
    ],
)
def test_the_beginning_of_an_answer_is_known_less_well(
    answers: list[Counted], events: int, error: float
) -> None:
    found = calibrate(answers)
    assert found is not None
    assert found.error_after(events) == pytest.approx(error)


def test_it_goes_on_learning() -> None:
    scale = EventScale([(24, 1)])
    for answer in ((100, 7), (90, 6), (64, 4)):
        scale.observe(answer)
    assert scale.now is not None
    assert scale.now.tokens == 16
    unknown = EventScale()
    assert unknown.now is None
    unknown.observe((40, 10))
    assert unknown.now == (4.0, 0.0, 3.0)
