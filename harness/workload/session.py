"""`[load.session]`: turns that follow each other over one growing context, and what a turn is.

    first prompt  | system, tools | question |
    later prompts | the prompt before | its answer, as far as it was read | what this turn adds |

A turn adds what its user says, or a correction if the turn before was stopped. docs/workloads.md
explains each key.
"""

from typing import Literal, NamedTuple, Self

from pydantic import model_validator

from harness.records import Outcome
from harness.workload.values import Counts, SecondsRange, TomlTable


class SessionSettings(TomlTable):
    """Each list of lengths is drawn from evenly."""

    dialect: Literal["chat", "responses", "messages"] = "chat"
    turns: Counts
    first_tokens: Counts
    turn_tokens: Counts
    correction_tokens: Counts
    answer_tokens: Counts
    think_s: SecondsRange
    when_full: Literal["cut", "send"] = "cut"

    @model_validator(mode="after")
    def _must_not_be_empty(self) -> Self:
        for key in ("turns", "first_tokens", "turn_tokens", "correction_tokens", "answer_tokens"):
            if min(getattr(self, key)) < 1:
                raise ValueError(f"`{key}` must be 1 or more")
        return self

    @property
    def shortest_prompt(self) -> int:
        return min(self.first_tokens)

    @property
    def longest_without_history(self) -> int:
        """The context of a session whose history was cut to its first prompt, and one turn."""
        return max(self.first_tokens) + max(*self.turn_tokens, *self.correction_tokens)


Speaker = Literal["user", "assistant"]


class ChatMessage(NamedTuple):
    role: Literal["system"] | Speaker
    text: str


class Said(NamedTuple):
    """A part of a context: what the user's request number `n` added, or as much of the answer to it
    as was read."""

    n: int
    by: Speaker
    tokens: int


class Turn(NamedTuple):
    """The user's request number `n`. `earlier`: the context before it, the first prompt first.
    `own_tokens`: what it adds to `history_tokens`. `follows`: how the turn before it in its session
    ended. `cut_tokens`: of the oldest turns, which were left out."""

    n: int
    own_tokens: int
    earlier: tuple[Said, ...] = ()
    history_tokens: int = 0
    follows: Outcome | None = None
    cut_tokens: int = 0
