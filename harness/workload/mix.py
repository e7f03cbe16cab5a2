"""`[[load.mix]]`: one table a kind of leaving; `harness.workload.plan` tells what each plan means.

Each class knows what its plan needs to be possible at all (`problem`); what depends on the server
is checked in `harness.run.run_config`, when the server is known.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from harness.workload.values import LONGEST_S, MOST_TOKENS, Section

MOST_ANSWERS = 128

Weight = Annotated[float, Field(ge=0, le=1e9)]
TokenCount = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
WayName = Literal["fin", "rst", "half_close", "stop_reading", "vanish", "killed", "cancel"]


def _range_parser(highest: float, what: str) -> PlainValidator:
    def parse(value: object) -> list[float]:
        match value:
            case bool():
                pass
            case int() | float() if 0 <= value <= highest:
                return [float(value), float(value)]
            case [int(low) | float(low), int(high) | float(high)] if 0 <= low <= high <= highest:
                return [float(low), float(high)]
        raise ValueError(
            f"must be {what} from 0 to {highest:g}, or [lowest, highest], not {value!r}"
        )

    return PlainValidator(parse)


def _parse_counts(value: object) -> list[int]:
    counts = value if isinstance(value, list) else [value]
    good = [n for n in counts if type(n) is int and 0 <= n <= MOST_TOKENS]
    if not counts or len(good) != len(counts):
        raise ValueError(
            f"must be a number of tokens from 0 to {MOST_TOKENS}, or a list of them, not {value!r}"
        )
    return good


Counts = Annotated[list[int], PlainValidator(_parse_counts)]
Shares = Annotated[list[float], _range_parser(1, "a share")]
SecondsRange = Annotated[list[float], _range_parser(LONGEST_S, "seconds")]


class MixEntry(Section):
    """What every entry has. `n`: answers asked for in one request."""

    weight: Weight = 1.0
    way: WayName = "fin"
    delivery: Literal["stream", "unary"] = "stream"
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] = 1

    @property
    def waits_for_tokens(self) -> bool:
        """Whether its user reads tokens before leaving, which a unary answer does not show."""
        return True

    @property
    def is_read(self) -> bool:
        """Whether the answer is for reading to its end: it is then of `stay_tokens`."""
        return False

    def problem(self, answer_tokens: int, stay_tokens: int) -> str | None:
        """Why nobody can leave like this; None: they can."""
        if self.delivery == "unary" and self.waits_for_tokens:
            return "a unary answer shows no tokens before it is complete"
        return self.token_problem(self.n * (stay_tokens if self.is_read else answer_tokens))

    def token_problem(self, asked_for: int) -> str | None:
        """Why it cannot be when so many tokens are asked for, in all answers together."""
        if self.waits_for_tokens and asked_for <= self.n:
            return "an answer of one token is over when it comes"
        return None


def beyond(tokens: float, asked_for: int) -> str | None:
    """The complaint about a number of tokens that an answer does not have."""
    if tokens < asked_for:
        return None
    return (
        f"{tokens:g} tokens, but `answer_tokens` allow {asked_for}: nobody can leave an answer "
        "that is over"
    )


class TokensEntry(MixEntry):
    """After exactly so many tokens, or one of a list."""

    plan: Literal["tokens"]
    tokens: Counts

    @property
    def waits_for_tokens(self) -> bool:
        return max(self.tokens) > 0

    def token_problem(self, asked_for: int) -> str | None:
        return beyond(max(self.tokens), asked_for)


class UniformEntry(MixEntry):
    """After a number of tokens, each between the two with the same chance."""

    plan: Literal["tokens_uniform"]
    lowest: TokenCount
    highest: TokenCount

    def token_problem(self, asked_for: int) -> str | None:
        if self.lowest > self.highest:
            return f"`lowest` is {self.lowest}, more than `highest`, {self.highest}"
        return beyond(self.highest, asked_for)


class GeometricEntry(MixEntry):
    """The same chance to leave after each token; what lies beyond the answer is drawn again."""

    plan: Literal["tokens_geometric"]
    mean: Annotated[float, Field(ge=1, le=MOST_TOKENS)]

    def token_problem(self, asked_for: int) -> str | None:
        return super().token_problem(asked_for) or beyond(self.mean, asked_for)


class LognormalEntry(MixEntry):
    """Lognormal; what lies beyond the answer is drawn again."""

    plan: Literal["tokens_lognormal"]
    median: Annotated[float, Field(ge=1, le=MOST_TOKENS)]
    sigma: Annotated[float, Field(ge=0, le=10)]

    def token_problem(self, asked_for: int) -> str | None:
        return super().token_problem(asked_for) or beyond(self.median, asked_for)


class FileEntry(MixEntry):
    """After a number of tokens drawn from a file: one a line, or a `column` of CSV or parquet."""

    plan: Literal["tokens_from_file"]
    file: Annotated[str, Field(min_length=1)]
    column: str | None = None


class ShareEntry(MixEntry):
    """After a share of the expected answer."""

    plan: Literal["answer_share"]
    share: Shares


class TimeEntry(MixEntry):
    """So many seconds after the request was sent, or after its first token."""

    plan: Literal["time"]
    seconds: SecondsRange
    since: Literal["sent", "first_token"] = "sent"

    @property
    def waits_for_tokens(self) -> bool:
        return self.since == "first_token"


class QueuedEntry(MixEntry):
    """Once it is sent, after the think time."""

    plan: Literal["queued"]

    @property
    def waits_for_tokens(self) -> bool:
        return False


class PrefillEntry(MixEntry):
    """At a share of the expected time to first token."""

    plan: Literal["prefill"]
    share: Shares = Field(default_factory=lambda: [0.1, 0.9])

    @property
    def waits_for_tokens(self) -> bool:
        return False


class LastTokenEntry(MixEntry):
    """As the last of `stay_tokens` is made: some before its step, some during it, some too late."""

    plan: Literal["last_token"]

    @property
    def is_read(self) -> bool:
        return True

    def token_problem(self, asked_for: int) -> str | None:
        if asked_for <= 2 * self.n:
            return (
                "the race for the last token begins two before it: `stay_tokens` must be 3 or more"
            )
        return None


class NeverEntry(MixEntry):
    """Reads to the end of `stay_tokens`."""

    plan: Literal["never"]

    @property
    def is_read(self) -> bool:
        return True

    @property
    def waits_for_tokens(self) -> bool:
        return False


AnyMixEntry = Annotated[
    TokensEntry
    | UniformEntry
    | GeometricEntry
    | LognormalEntry
    | FileEntry
    | ShareEntry
    | TimeEntry
    | QueuedEntry
    | PrefillEntry
    | LastTokenEntry
    | NeverEntry,
    Field(discriminator="plan"),
]


def slice_values(entry: MixEntry, counts: dict[Path, list[int]], folder: Path) -> dict[str, Any]:
    """The values of `harness.workload.plan.Slice`. `counts`: what was read from files."""
    values = entry.model_dump()
    if isinstance(entry, FileEntry):
        values |= {"plan": "tokens", "tokens": counts[folder / entry.file]}
    return values | {"leave": values}
