"""Each condition of early stopping at its boundaries."""

from collections.abc import Iterable, Sequence
from itertools import chain, count, repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_engine.core.early_stop import (
    Condition,
    Detector,
    EarlyStopping,
    LowConfidence,
    Repetition,
    Stop,
    Task,
)

LOOPS = EarlyStopping(repetition=Repetition())


def first_stop(
    wanted: EarlyStopping, tokens: Iterable[Any], num_prompt_tokens: int = 1000
) -> tuple[int, Stop] | None:
    """The number of tokens at the stop. A token is an id, or a text with an id of its own."""
    detector = Detector(wanted, num_prompt_tokens)
    for number, token in enumerate(tokens, start=1):
        pushed = (token, "x") if isinstance(token, int) else (1000 + number, token)
        if stop := detector.push(*pushed):
            return number, stop
    return None


def looping(pattern: int, before: int, num_tokens: int) -> list[int]:
    """`before` tokens without a repeat, then a pattern again and again."""
    unique = count(500)
    head = [next(unique) for _ in range(before)]
    return [*head, *(at % pattern for at in range(num_tokens))]


@pytest.mark.parametrize(
    ("pattern", "before", "at"),
    [
        (3, 50, 50 + 4 * 3),  # the shortest pattern: three copies before the newest
        (20, 50, 50 + 4 * 20),  # the longest
        (2, 50, 50 + 4 * 4),  # two tokens in turn are a pattern of four
        (1, 50, 50 + 4 * 3),  # one token is a pattern of three
        (3, 0, 20),  # not before there are twenty
        (3, 8, 20),
        (3, 9, 21),
    ],
)
def test_a_repetition_stops_with_the_fourth_copy(pattern: int, before: int, at: int) -> None:
    tokens = looping(pattern, before, 200)
    assert first_stop(LOOPS, tokens) == (at, Stop(Condition.REPETITION))
    assert first_stop(LOOPS, tokens[: at - 1]) is None


def test_a_pattern_that_is_too_long_is_none() -> None:
    assert first_stop(LOOPS, looping(21, 10, 400)) is None
    window = EarlyStopping(repetition=Repetition(window=80))
    assert first_stop(window, looping(20, 10, 400)) == (90, Stop(Condition.REPETITION))
    window = EarlyStopping(repetition=Repetition(window=79))
    assert first_stop(window, looping(20, 10, 400)) is None


def as_the_source_says(tokens: Sequence[int], wanted: Repetition) -> bool:
    recent = tokens[-wanted.window :]
    for length in range(wanted.min_pattern, wanted.max_pattern + 1):
        copies = [
            recent[len(recent) - length * (n + 1) :][:length] for n in range(wanted.repeats + 1)
        ]
        fits = len(recent) >= length * (wanted.repeats + 1)
        if fits and all(copy == copies[0] for copy in copies):
            return len(tokens) >= wanted.after
    return False


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 3), st.integers(6, 40))
def test_a_repetition_is_found_as_by_looking_back(
    tokens: list[int], repeats: int, window: int
) -> None:
    wanted = Repetition(min_pattern=2, max_pattern=6, after=9, repeats=repeats, window=window)
    expected = next(
        (n for n in range(1, len(tokens) + 1) if as_the_source_says(tokens[:n], wanted)), None
    )
    found = first_stop(EarlyStopping(repetition=wanted), tokens)
    assert (found and found[0]) == expected


@pytest.mark.parametrize(
    ("probabilities", "at"),
    [
        ([0.09] * 9, 5),  # five are needed
        ([0.1] * 9, None),  # below, not at
        ([1.0] * 5 + [0.05] * 5, 10),  # the last five, not all
        ([0.3, 0.05, 0.05, 0.05, 0.05, 0.05], 6),
        ([0.05] * 4 + [None] * 3 + [0.05], 8),  # tokens without one do not count
    ],
)
def test_low_confidence_is_the_mean_of_the_last_five(
    probabilities: list[float | None], at: int | None
) -> None:
    detector = Detector(EarlyStopping(low_confidence=LowConfidence()), 10)
    stops = [detector.push(7, "x", one) for one in probabilities]
    found = [number for number, stop in enumerate(stops, start=1) if stop]
    assert (found[0] if found else None) == at
    assert not found or stops[found[0] - 1] == Stop(Condition.LOW_CONFIDENCE)


WORD, END = " word", " end."


@pytest.mark.parametrize(
    ("texts", "num_prompt_tokens", "at"),
    [
        (repeat(WORD), 200, 60),  # 0.3 of the prompt
        (repeat(WORD), 199, 59),
        (repeat(WORD), 10, 20),  # at least twenty
        (chain(repeat(WORD, 49), repeat(END)), 1000, 50),  # a sentence's end from the fiftieth on
        (chain(repeat(END, 49), repeat(WORD, 20), [END]), 1000, 70),
        (chain(repeat(WORD, 48), [END, "\n", WORD, END]), 1000, 50),  # the line's end is white
        (repeat(WORD, 299), 1000, None),
    ],
)
def test_a_summary_ends_at_its_length_or_at_a_sentence(
    texts: Iterable[str], num_prompt_tokens: int, at: int | None
) -> None:
    found = first_stop(EarlyStopping(task=Task.SUMMARIZATION), texts, num_prompt_tokens)
    assert found == (at and (at, Stop(Condition.SUMMARIZATION)))


@pytest.mark.parametrize(
    ("texts", "labels", "at", "num_dropped"),
    [
        ([" a"] * 11, (), 10, 0),
        (["Po", "sitive", " because"], ("positive", "negative"), 2, 0),
        (["It is Positive, I say"], ("positive", "negative"), 1, len(", I say")),
        (["positively", " positive"], ("positive",), 2, 0),  # whole words only
        (["very", " good"], ("good", "very good"), 2, 0),
        (["very", " bad"], ("very", "very good"), 2, len(" bad")),  # may have become the longer
        (["C++ it is"], ("C", "C++"), 1, len(" it is")),
        (["none"] * 9, ("positive",), None, 0),
    ],
)
def test_a_classification_ends_with_a_label_or_the_tenth_token(
    texts: list[str], labels: tuple[str, ...], at: int | None, num_dropped: int
) -> None:
    wanted = EarlyStopping(task=Task.CLASSIFICATION, labels=labels)
    found = first_stop(wanted, texts)
    assert found == (at and (at, Stop(Condition.CLASSIFICATION, num_dropped)))


@pytest.mark.parametrize(
    ("texts", "at", "num_dropped"),
    [
        (['{"a"', ": 1}", " and"], 2, 0),
        (['\n {"a": {"b": [1]}} and'], 1, len(" and")),
        (['{"a": "}"', ', "b": "\\"}"', "}x"], 3, 1),  # in strings, also behind a quoted quote
        (["[1, [2]", "]"], 2, 0),
        (['The answer: {"a": 1}'], None, 0),  # begins with something else
        (["}"], None, 0),
        (["x"] * 501, 500, 0),
    ],
)
def test_an_extraction_ends_with_its_json(
    texts: list[str], at: int | None, num_dropped: int
) -> None:
    found = first_stop(EarlyStopping(task=Task.EXTRACTION), texts)
    assert found == (at and (at, Stop(Condition.EXTRACTION, num_dropped)))


def test_the_hook_sees_all_text_and_tokens() -> None:
    seen: list[tuple[str, list[int]]] = []

    def hook(text: str, token_ids: Sequence[int]) -> bool:
        seen.append((text, list(token_ids)))
        return "bad" in text

    detector = Detector(EarlyStopping(), 10, hook)
    assert detector.push(5, "b") is None
    assert detector.push(6, "ad") == Stop(Condition.QUALITY)
    assert seen == [("b", [5]), ("bad", [5, 6])]
