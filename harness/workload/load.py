"""`[load]`: what the users do, one class a kind; `workload.plan` tells what a kind means."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from harness.workload.mix import AnyMixEntry, MixEntry, TokenCount, TokensEntry
from harness.workload.values import (
    MOST_STREAMS,
    Count,
    Seconds,
    Section,
    Share,
    Slots,
    Streams,
    Think,
    TokenRange,
    Tokens,
)


class _Asks(Section):
    """What all loads have in common: prompts, and answers of one length or several (`_answers`, by
    their keys)."""

    _answers: ClassVar[Sequence[str]]
    prompt_tokens: TokenRange

    @property
    def longest_requests(self) -> dict[str, int]:
        """Prompt and answer of each kind of request at their longest, by the keys they add up."""
        return {
            f"`load.prompt_tokens` + `load.{key}`": self.prompt_tokens[1] + getattr(self, key)
            for key in self._answers
        }


class AbandonSettings(_Asks):
    """`[load]` of kind "abandon": closed-loop users who leave (see `harness.workload.plan`).

    A share `stay_share` is read to the end; how the others leave stands in the `mix`, or short in
    `abandon_after_tokens`: one of these numbers of tokens.
    """

    _answers = ("answer_tokens", "stay_tokens", "canary_tokens")
    kind: Literal["abandon"]
    abandon_after_tokens: list[TokenCount] = Field(default_factory=list)
    mix: list[AnyMixEntry] = Field(default_factory=list)
    stay_share: Share
    think: Think = "step"
    answer_tokens: Tokens
    stay_tokens: Tokens
    shared_prefix_tokens: Annotated[int, Field(ge=0)] = 0
    stop_after_abandons: Count | None = None
    ask_again_after: list[Literal["abandoned", "timed_out"]] = Field(default_factory=list)
    retry_pause_s: Seconds = 0.5
    canaries: Annotated[int, Field(ge=0, le=MOST_STREAMS)] = 0
    canary_tokens: Tokens = 32

    @model_validator(mode="after")
    def _must_say_how_they_leave(self) -> Self:
        if bool(self.mix) == bool(self.abandon_after_tokens):
            raise ValueError(
                "needs either `abandon_after_tokens` or a `mix`, and not both; an empty list, [], "
                "takes one of them back"
            )
        if self.mix and self.stay_share < 1 and sum(entry.weight for entry in self.mix) <= 0:
            raise ValueError("the weights of the `mix` sum to nothing: nobody can be drawn")
        for number, entry in enumerate(self.mix, start=1):
            if why := entry.problem(self.answer_tokens, self.stay_tokens):
                raise ValueError(f"entry {number} of the `mix` ({entry.plan}): {why}")
        return self

    @model_validator(mode="after")
    def _must_leave_before_the_end(self) -> Self:
        latest = max(self.abandon_after_tokens, default=0)
        if latest >= self.answer_tokens:
            raise ValueError(
                f"`abandon_after_tokens` goes up to {latest} but "
                f"`answer_tokens` is {self.answer_tokens}: nobody can leave an answer that is over;"
                f" `answer_tokens` must be larger"
            )
        if self.shared_prefix_tokens > self.prompt_tokens[0]:
            raise ValueError(
                f"`shared_prefix_tokens` is {self.shared_prefix_tokens} but `prompt_tokens` begin "
                f"at {self.prompt_tokens[0]}: the prefix is part of the prompt"
            )
        return self

    @property
    def leavers(self) -> Sequence[MixEntry]:
        """Those of the mix who can be drawn, written out where it was given short."""
        if self.mix:
            return [entry for entry in self.mix if entry.weight > 0]
        return [TokensEntry(plan="tokens", tokens=self.abandon_after_tokens)]


class _LeavesAtOnePoint(_Asks):
    """What loads have in common whose streams all leave after the same number of tokens."""

    abandon_after_tokens: Annotated[int, Field(ge=0)]
    answer_tokens: Tokens

    @model_validator(mode="after")
    def _must_leave_before_the_end(self) -> Self:
        if self.abandon_after_tokens >= self.answer_tokens:
            raise ValueError(
                f"`abandon_after_tokens` is {self.abandon_after_tokens} but `answer_tokens` is "
                f"{self.answer_tokens}: `answer_tokens` must be larger"
            )
        return self


class CancelStormSettings(_LeavesAtOnePoint):
    """`[load]` of kind "cancel_storm": waves that leave as a whole, and stayers beside them."""

    _answers = ("answer_tokens", "stay_tokens")
    kind: Literal["cancel_storm"]
    streams: Streams
    stayers: Annotated[int, Field(ge=0, le=MOST_STREAMS)] = 0
    storms: Count
    abandon_after_tokens: Tokens
    stay_tokens: Tokens


class SlotRecoverySettings(_LeavesAtOnePoint):
    """`[load]` of kind "slot_recovery". Without `slots` the target is asked how many it has."""

    _answers = ("answer_tokens", "control_answer_tokens", "probe_tokens")
    kind: Literal["slot_recovery"]
    slots: Slots | None = None
    trials: Count
    control_answer_tokens: Tokens
    probe_tokens: Tokens


class ChunkFrontierSettings(_Asks):
    """`[load]` of kind "chunk_frontier": bystanders who decode, and long prompts beside them."""

    _answers = ("answer_tokens", "read_tokens")
    kind: Literal["chunk_frontier"]
    bystanders: Streams
    bystander_prompt_tokens: TokenRange
    bystander_answer_tokens: Tokens
    read_tokens: Tokens
    answer_tokens: Tokens
    pairs: Count

    @property
    def longest_requests(self) -> dict[str, int]:
        bystander = self.bystander_prompt_tokens[1] + self.bystander_answer_tokens
        key = "`load.bystander_prompt_tokens` + `load.bystander_answer_tokens`"
        return {**super().longest_requests, key: bystander}


LoadSettings = Annotated[
    AbandonSettings | SlotRecoverySettings | ChunkFrontierSettings | CancelStormSettings,
    Field(discriminator="kind"),
]
