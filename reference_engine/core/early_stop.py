"""Early stopping: ending an answer that has said enough, before its `max_tokens`.

A request may ask for conditions. Its `Detector` gets each new token, with its text and its
probability, and returns the condition that this token meets. It has no side effects: the engine
ends the request, in the same way as any other.

    stop tokens      the newest tokens are one of the given sequences: their text is not shown
    repetition       the newest tokens are a pattern, and `repeats` copies of it stand before it
    low confidence   the mean probability of the last tokens is too low
    quality          the engine's own hook says so
    task             the answer is complete as a summary, a label, or a JSON value

vLLM has the first: https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from statistics import fmean
from typing import Final, NamedTuple

import msgspec


class Condition(StrEnum):
    STOP_SEQUENCE = "stop_sequence"
    REPETITION = "repetition"
    LOW_CONFIDENCE = "low_confidence"
    QUALITY = "quality"
    SUMMARIZATION = "summarization"
    CLASSIFICATION = "classification"
    EXTRACTION = "extraction"


class Task(StrEnum):
    SUMMARIZATION = "summarization"
    CLASSIFICATION = "classification"
    EXTRACTION = "extraction"


class Repetition(msgspec.Struct, frozen=True, kw_only=True):
    """Patterns of `min_pattern` to `max_pattern` tokens, looked for in the last `window` tokens
    once there are `after`; `repeats` copies stand before the newest one.
    """

    min_pattern: int = 3
    max_pattern: int = 20
    window: int = 100
    after: int = 20
    repeats: int = 3


class LowConfidence(msgspec.Struct, frozen=True, kw_only=True):
    """The mean probability of the `last` tokens is below `below`."""

    last: int = 5
    below: float = 0.1


class EarlyStopping(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions of a request. `labels` belong to a classification."""

    stop_token_ids: tuple[int, ...] = ()
    stop_token_sequences: tuple[tuple[int, ...], ...] = ()
    repetition: Repetition | None = None
    low_confidence: LowConfidence | None = None
    task: Task | None = None
    labels: tuple[str, ...] = ()


# Takes the answer's text and tokens so far; returns whether going on is a waste.
QualityHook = Callable[[str, Sequence[int]], bool]

MIN_SUMMARY_TOKENS: Final = 20
MAX_SUMMARY_SHARE: Final = 0.3  # of the prompt
SENTENCE_AFTER_TOKENS: Final = 50
MAX_LABEL_TOKENS: Final = 10
MAX_EXTRACTION_TOKENS: Final = 500
_SENTENCE_ENDS: Final = (".", "!", "?")


class Stop(NamedTuple):
    """`num_dropped`: characters at the end that do not belong to the answer. `token_id`: the stop
    token, if it is a single one.
    """

    condition: Condition
    num_dropped: int = 0
    token_id: int | None = None


class Detector:
    """Watches one answer."""

    def __init__(
        self, wanted: EarlyStopping, num_prompt_tokens: int, hook: QualityHook | None = None
    ) -> None:
        self._wanted = wanted
        self._hook = hook
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._sequences = (
            *((token,) for token in wanted.stop_token_ids),
            *wanted.stop_token_sequences,
        )
        self._loops = None if wanted.repetition is None else Loops(wanted.repetition)
        self._probabilities = deque[float](maxlen=_last(wanted))
        self._task: SummaryAnswer | Label | JSONValue | None = None
        match wanted.task:
            case None:
                pass
            case Task.SUMMARIZATION:
                self._task = SummaryAnswer(num_prompt_tokens)
            case Task.CLASSIFICATION:
                self._task = Label(wanted.labels)
            case Task.EXTRACTION:
                self._task = JSONValue()

    def push(self, token_id: int, text: str, probability: float | None = None) -> Stop | None:
        self._tokens.append(token_id)
        self._texts.append(text)
        return (
            self._stop_tokens()
            or self._repetition(token_id)
            or self._low_confidence(probability)
            or self._quality()
            or self._end_of_task(text)
        )

    @property
    def num_undecided(self) -> int:
        """Characters at the end of the text that may turn out to be a stop sequence's."""
        starts = (seq[:n] for seq in self._sequences for n in range(len(seq) - 1, 0, -1))
        return self._length_of(max((len(one) for one in starts if self._ends_with(one)), default=0))

    def _stop_tokens(self) -> Stop | None:
        for sequence in self._sequences:
            if self._ends_with(sequence):
                num_dropped, is_single = self._length_of(len(sequence)), len(sequence) == 1
                token_id = sequence[0] if is_single else None
                return Stop(Condition.STOP_SEQUENCE, num_dropped, token_id)
        return None

    def _ends_with(self, sequence: tuple[int, ...]) -> bool:
        return tuple(self._tokens[-len(sequence) :]) == sequence

    def _length_of(self, num_tokens: int) -> int:
        """The length of the text of the newest tokens."""
        return sum(map(len, self._texts[len(self._texts) - num_tokens :]))

    def _repetition(self, token_id: int) -> Stop | None:
        is_loop = self._loops is not None and self._loops.push(token_id)
        return Stop(Condition.REPETITION) if is_loop else None

    def _low_confidence(self, probability: float | None) -> Stop | None:
        wanted, recent = self._wanted.low_confidence, self._probabilities
        if wanted is None or probability is None:
            return None
        recent.append(probability)
        is_low = len(recent) == wanted.last and fmean(recent) < wanted.below
        return Stop(Condition.LOW_CONFIDENCE) if is_low else None

    def _quality(self) -> Stop | None:
        is_poor = self._hook is not None and self._hook("".join(self._texts), self._tokens)
        return Stop(Condition.QUALITY) if is_poor else None

    def _end_of_task(self, text: str) -> Stop | None:
        return None if self._task is None else self._task.push(text, len(self._tokens))


def _last(wanted: EarlyStopping) -> int:
    return 0 if wanted.low_confidence is None else wanted.low_confidence.last


class Loops:
    """Looks for a pattern that is repeated up to the newest token.

    For each pattern length it counts how many of the newest tokens equal the token one pattern
    earlier: `repeats` copies before the newest are `repeats * length` such tokens.
    """

    def __init__(self, wanted: Repetition) -> None:
        longest = min(wanted.max_pattern, wanted.window // (wanted.repeats + 1))
        self._wanted = wanted
        self._recent = deque[int](maxlen=longest)
        self._num_equal = dict.fromkeys(range(wanted.min_pattern, longest + 1), 0)
        self._num_tokens = 0

    def push(self, token_id: int) -> bool:
        recent, num_equal = self._recent, self._num_equal
        for length in num_equal:
            is_equal = len(recent) >= length and recent[-length] == token_id
            num_equal[length] = num_equal[length] + 1 if is_equal else 0
        recent.append(token_id)
        self._num_tokens += 1
        if self._num_tokens < self._wanted.after:
            return False
        return any(n >= self._wanted.repeats * length for length, n in num_equal.items())


class SummaryAnswer:
    """Ends at a share of the prompt's length, or at the end of a sentence once long enough."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._most = max(MIN_SUMMARY_TOKENS, int(MAX_SUMMARY_SHARE * num_prompt_tokens))
        self._ends_sentence = False

    def push(self, text: str, num_tokens: int) -> Stop | None:
        if text.strip():
            self._ends_sentence = text.rstrip().endswith(_SENTENCE_ENDS)
        is_whole = num_tokens >= SENTENCE_AFTER_TOKENS and self._ends_sentence
        return Stop(Condition.SUMMARIZATION) if is_whole or num_tokens >= self._most else None


class Label:
    """One of the labels, as whole words in any case; text after it is dropped.

    A label that begins a longer one waits until the answer can no longer become that.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = sorted(labels, key=len, reverse=True)
        words = "|".join(re.escape(label) for label in self._labels)
        self._pattern = re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE)
        self._text = ""

    def push(self, text: str, num_tokens: int) -> Stop | None:
        self._text += text
        found = self._pattern.search(self._text) if self._labels else None
        if found and not self._may_grow(self._text[found.start() :]):
            num_after = len(self._text) - found.end()
            return Stop(Condition.CLASSIFICATION, min(len(text), num_after))
        return Stop(Condition.CLASSIFICATION) if num_tokens >= MAX_LABEL_TOKENS else None

    def _may_grow(self, text: str) -> bool:
        begun = text.casefold()
        return any(
            one.casefold().startswith(begun) and len(one) > len(text) for one in self._labels
        )


class JSONValue:
    """An object or an array that is closed; brackets within strings do not count."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_json: bool | None = None  # unknown before the first character
        self._in_string = False
        self._is_escaped = False

    def push(self, text: str, num_tokens: int) -> Stop | None:
        for at, character in enumerate(text):
            if self._is_json is None and not character.isspace():
                self._is_json = character in "{["
            if self._is_json and self._closes(character):
                return Stop(Condition.EXTRACTION, len(text) - at - 1)
        return Stop(Condition.EXTRACTION) if num_tokens >= MAX_EXTRACTION_TOKENS else None

    def _closes(self, character: str) -> bool:
        if self._in_string:
            self._in_string = character != '"' or self._is_escaped
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False
