"""Answers that are known before they are asked for: what early stopping is measured on.

A text is an answer, then more that the model would go on to say, then the end of the sequence. The
event that completes the answer stands at its end: a sentence's end, a label, the bracket that
closes JSON, a fence. How long a text is follows a recorded trace; how much of it comes after the
answer is an input of the workload.

Pure: the run writes the texts for the engine, the load process the prompts, the analysis reads the
lengths, all from a text's task, number and share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from harness.workload.prompts import BYTES_ARE_TOKENS, WORDS, PromptScale, prompt


class WorkloadTask(StrEnum):
    CHAT = "chat"  # its user leaves when it has read the answer
    SUMMARIZATION = "summarization"
    CLASSIFICATION = "classification"
    EXTRACTION = "extraction"
    CODE = "code"


# GeneratedTokens at 0, 5, ... 100 % of the Azure LLM inference trace 2023, conversation (Patel et
# al., Splitwise, ISCA 2024; CC-BY): the sorted column at the nearest rank, round(q * (rows - 1)).
TRACE_QUANTILES: Final = (
    *(7, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451),
    1000,
)
NUM_TEXTS: Final = len(TRACE_QUANTILES) - 1  # of each task: the middle of each two quantiles
LONGEST_TEXT: Final = (TRACE_QUANTILES[-2] + TRACE_QUANTILES[-1]) // 2
LABELS: Final = ("positive", "negative")
FENCE: Final = "```"
_SHORTEST_ANSWER: Final = 4
_SENTENCE_TOKENS: Final = 15
_PROMPT_STRIDE: Final = 7  # coprime to the number of texts: long prompts are not of long texts
_SEED: Final = 0  # every run asks the same


@dataclass(frozen=True, slots=True)
class TaskText:
    """One text of a task. `after_answer`: the share of its words that come after the answer."""

    task: WorkloadTask
    number: int
    after_answer: float
    stops_early: bool = True

    @property
    def plan(self) -> str:
        """The plan in words, as `RequestRow.plan`."""
        kind = "task" if self.stops_early else "whole"
        return f"{kind}:{self.task}:{self.number}:{self.after_answer:g}"

    @property
    def num_tokens(self) -> int:
        """The whole text's tokens, with the end of the sequence."""
        return (TRACE_QUANTILES[self.number] + TRACE_QUANTILES[self.number + 1]) // 2

    @property
    def num_answer(self) -> int:
        num_words = self.num_tokens - 1
        return max(_SHORTEST_ANSWER, round((1 - self.after_answer) * num_words))

    def conditions(self, *, has_tasks: bool) -> dict[str, Any]:
        """The fields of the request that end its answer. `has_tasks`: the server knows the early
        stops of the bundled engine, which others refuse."""
        fields: dict[str, Any] = {"ignore_eos": False} if has_tasks else {}
        if self.stops_early and self.task is WorkloadTask.CODE:
            fields["stop"] = [FENCE]
        elif self.stops_early and self.task is not WorkloadTask.CHAT and has_tasks:
            fields["early_stop"] = {"task": self.task}
            if self.task is WorkloadTask.CLASSIFICATION:
                fields["early_stop"]["labels"] = list(LABELS)
        return fields

    def prompt_tokens(self, limits: Sequence[int]) -> int:
        low, high = limits
        place = (self.number * _PROMPT_STRIDE % NUM_TEXTS + 0.5) / NUM_TEXTS
        return round(low + place * (high - low))

    def prompt(self, num_tokens: int, scale: PromptScale = BYTES_ARE_TOKENS) -> str:
        num_bytes, salt = scale.num_bytes(num_tokens), f"{self.task}/{self.after_answer:g}/"
        return prompt(seed=_SEED, user=0, n=self.number, num_bytes=num_bytes, salt=salt)

    @property
    def text(self) -> str:
        """A word or a sign with the space before it is a token, for the engine that says it."""
        num_after = self.num_tokens - 1 - self.num_answer
        return "".join([*_answer(self.task, self.num_answer), *_sentences(num_after)])


def parse_text(plan: str) -> TaskText | None:
    """The text of a row's plan; None for other plans."""
    match plan.split(":"):
        case [("task" | "whole") as kind, task, number, share]:
            return TaskText(WorkloadTask(task), int(number), float(share), kind == "task")
        case _:
            return None


def _answer(task: WorkloadTask, num_tokens: int) -> list[str]:
    match task:
        case WorkloadTask.CHAT | WorkloadTask.SUMMARIZATION:
            return [*_words(num_tokens - 1), "."]
        case WorkloadTask.CLASSIFICATION:
            return [*_words(num_tokens - 1), f" {LABELS[0]}"]
        case WorkloadTask.CODE:
            return [*_words(num_tokens - len(FENCE)), f"\n{FENCE[0]}", *FENCE[1:]]
        case WorkloadTask.EXTRACTION:
            # A bracket within a string closes nothing.
            inside = [" ]", *_words(num_tokens)][: num_tokens - 4]
            return ["[", '"', *inside, '"', "]"]


def _sentences(num_tokens: int) -> list[str]:
    words = _words(num_tokens)
    words[_SENTENCE_TOKENS - 1 :: _SENTENCE_TOKENS] = ["."] * (num_tokens // _SENTENCE_TOKENS)
    return words


def _words(num: int) -> list[str]:
    return [f" {WORDS[at % len(WORDS)]}" for at in range(num)]
