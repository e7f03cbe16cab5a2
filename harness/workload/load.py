"""`[load]`: what the users do, one class a kind; docs/workloads.md explains each key. The load
process gets the same classes, with the named files read (`harness.run.load_plan`).
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from harness.records import Outcome, ProcessKind, Protocol
from harness.workload.abandon import (
    AbandonPlan,
    AnyPlan,
    RequestSpec,
    StayPlan,
    TaskPlan,
    TokenCount,
    TokensPlan,
)
from harness.workload.observed_latency import ObservedLatency
from harness.workload.session import SessionSettings
from harness.workload.values import (
    MOST_STREAMS,
    Count,
    Duration,
    Seconds,
    Share,
    Slots,
    Streams,
    Think,
    TokenRange,
    Tokens,
    TomlTable,
)

# After a refusal or a failure a user tries again after a pause: a dead server would otherwise get
# thousands of attempts a second.
RETRY_PAUSE_S: Final = 0.5
NOT_A_FAILURE: Final = frozenset({Outcome.COMPLETED, Outcome.ABANDONED, Outcome.CUT_OFF})


class Load(TomlTable):
    """A load has prompts, and answers of one length or several (`_answers`, by their keys).
    `protocol`: None for the target's own.
    `_streams`: the keys that add up to the streams open at once."""

    _answers: ClassVar[Sequence[str]]
    _streams: ClassVar[Sequence[str]] = ()
    kind: str
    protocol: Annotated[Protocol | None, Field(strict=False)] = None
    prompt_tokens: TokenRange

    @property
    def longest_requests(self) -> dict[str, int]:
        return {
            f"`load.prompt_tokens` + `load.{key}`": self.prompt_tokens[1] + getattr(self, key)
            for key in self._answers
        }

    def streams_at_once(self, users: int) -> tuple[str, int]:  # noqa: ARG002
        keys = " + ".join(f"`load.{key}`" for key in self._streams)
        return keys, sum(getattr(self, key) or 0 for key in self._streams)


class AbandonLoad(Load):
    """A share `stay_share` of the requests reads an answer of `stay_tokens` to its end. The others
    ask for `answer_tokens`, enough to distinguish a server that keeps generating from one that has
    finished, and leave by a plan of the `mix`, drawn by weight (`abandon_after_tokens` is short for
    one plan). With `session` each user's requests are turns over one growing context
    (`harness.workload.session_user`). Every `kill_every_s` the harness ends a process of kind
    `kill` of the bundled engine.
    """

    _answers = ("answer_tokens", "stay_tokens", "canary_tokens")
    kind: Literal["abandon"]
    abandon_after_tokens: list[TokenCount] = Field(default_factory=list)
    mix: list[AnyPlan] = Field(default_factory=list)
    stay_share: Share
    think: Think = "step"
    answer_tokens: Tokens
    stay_tokens: Tokens
    shared_prefix_tokens: Annotated[int, Field(ge=0)] = 0
    stop_after_abandons: Count | None = None
    ask_again_after: list[Literal["abandoned", "timed_out", "failed"]] = Field(default_factory=list)
    retry_pause_s: Seconds = 0.5
    canaries: Annotated[int, Field(ge=0, le=MOST_STREAMS)] = 0
    canary_tokens: Tokens = 32
    session: SessionSettings | None = None
    kill: ProcessKind | None = None
    kill_every_s: Duration = 1.0

    @model_validator(mode="after")
    def _must_say_how_they_leave(self) -> Self:
        if bool(self.mix) == bool(self.abandon_after_tokens):
            raise ValueError(
                "needs either `abandon_after_tokens` or a `mix`, not both; an empty list, [], "
                "removes one"
            )
        if self.mix and self.stay_share < 1 and sum(plan.weight for plan in self.mix) <= 0:
            raise ValueError("the weights of the `mix` sum to 0: at least one must be more than 0")
        for number, plan in enumerate(self.mix, start=1):
            entry = f"entry {number} of the `mix` ({plan.plan})"
            if why := plan.problem(self.answer_tokens, self.stay_tokens):
                raise ValueError(f"{entry}: {why}")
            if self._shared_by(plan) > self.prompt_tokens[0]:
                raise ValueError(
                    f"{entry}: `shared_prefix_tokens` is {self._shared_by(plan)} but the shortest "
                    f"of `prompt_tokens` is {self.prompt_tokens[0]}: it is part of the prompt"
                )
        if self.ask_again_after and any(isinstance(plan, TaskPlan) for plan in self.mix):
            raise ValueError(
                "`ask_again_after` repeats a prompt, and plan `task` draws another text each time: "
                "leave one out"
            )
        return self

    @model_validator(mode="after")
    def _must_leave_before_the_end(self) -> Self:
        latest = max(self.abandon_after_tokens, default=0)
        if latest >= self.answer_tokens:
            raise ValueError(
                f"`abandon_after_tokens` goes up to {latest} but "
                f"`answer_tokens` is {self.answer_tokens}: the answer would end first; "
                "`answer_tokens` must be larger"
            )
        if self.shared_prefix_tokens > self.prompt_tokens[0]:
            raise ValueError(
                f"`shared_prefix_tokens` is {self.shared_prefix_tokens} but the shortest of "
                f"`prompt_tokens` is {self.prompt_tokens[0]}: the prefix is part of the prompt"
            )
        return self

    @model_validator(mode="after")
    def _must_hold_its_sessions(self) -> Self:
        if (session := self.session) is None:
            return self
        longest, most = self.prompt_tokens[1], session.longest_without_history
        if session.when_full == "cut" and most > longest:
            raise ValueError(
                f"`session`: a first prompt and one more turn have up to {most} tokens, but "
                f"`prompt_tokens` go up to {longest}: there is no history to cut"
            )
        if (shortest := session.shortest_prompt) < self.shared_prefix_tokens:
            raise ValueError(
                f"`session.first_tokens` begin at {shortest}, but `shared_prefix_tokens`, with "
                f"which each of them begins, is {self.shared_prefix_tokens}"
            )
        if max(session.answer_tokens) > self.stay_tokens:
            raise ValueError(
                f"`session.answer_tokens` go up to {max(session.answer_tokens)}, more than "
                f"`stay_tokens`, {self.stay_tokens}"
            )
        if self.ask_again_after:
            raise ValueError(
                "`ask_again_after` repeats a request, and a `session` continues with the next "
                "turn: omit one"
            )
        for number, plan in enumerate(self.mix, start=1):
            if max(plan.n, plan.documents) > 1 or isinstance(plan, TaskPlan):
                raise ValueError(
                    f"entry {number} of the `mix` ({plan.plan}): a turn of a `session` has one "
                    "answer, which follows from its context: without `task`, `n` and `documents`"
                )
        return self

    @property
    def leavers(self) -> Sequence[AbandonPlan]:
        if self.mix:
            return [plan for plan in self.mix if plan.weight > 0]
        return [TokensPlan(plan="tokens", tokens=self.abandon_after_tokens)]

    @property
    def shares(self) -> list[tuple[AbandonPlan, float]]:
        leavers = self.leavers
        total = sum(plan.weight for plan in leavers)
        shares = [(plan, plan.weight / total * (1 - self.stay_share)) for plan in leavers]
        if self.stay_share > 0:
            shares.append((StayPlan(plan="never"), self.stay_share))
        return shares

    def _shared_by(self, plan: AbandonPlan) -> int:
        own = plan.shared_prefix_tokens
        return self.shared_prefix_tokens if own is None else own

    def streams_at_once(self, users: int) -> tuple[str, int]:
        return "`run.users`", users

    def pause_after(self, outcome: Outcome) -> float:
        """Seconds until a user's next request. After a time-out the load decides: the user has
        waited already, so there is no busy loop."""
        if outcome in NOT_A_FAILURE:
            return 0.0
        return self.retry_pause_s if outcome is Outcome.TIMED_OUT else RETRY_PAUSE_S

    def draw_request(
        self, *, seed: int, user: int, n: int = 0, seen: ObservedLatency
    ) -> RequestSpec:
        """The n-th request of a user. It depends on seed, user, n and what was `seen` only: two
        runs of one plan send the same requests, however their users were scheduled."""
        rng = random.Random(f"{seed}/{user}/{n}/request")
        plans, shares = zip(*self.shares, strict=True)
        plan: AbandonPlan = rng.choices(plans, shares)[0]
        prompt_tokens = rng.randint(*self.prompt_tokens)
        asked = RequestSpec(
            user=user,
            # Only a request that is left asks for the long answer.
            max_tokens=self.stay_tokens if plan.is_read else self.answer_tokens,
            prompt_tokens=prompt_tokens,
            think_fraction=rng.random(),
            delivery=plan.delivery,
            n=plan.n,
            priority=plan.priority,
            shared_tokens=self._shared_by(plan),
            documents=plan.documents,
        )
        drawn = plan.draw(rng, asked, seen)
        if drawn.text is not None:
            drawn = replace(drawn, prompt_tokens=drawn.text.prompt_tokens(self.prompt_tokens))
        return replace(drawn, max_tokens=self.stay_tokens) if drawn.way is None else drawn


class _LeavesAtOnePoint(Load):
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


class CancelStormLoad(_LeavesAtOnePoint):
    """`storms` waves of `streams` requests; all of a wave leave at one moment. Meanwhile `stayers`
    users read answers of `stay_tokens`, one after the other."""

    _answers = ("answer_tokens", "stay_tokens")
    _streams = ("streams", "stayers")
    kind: Literal["cancel_storm"]
    streams: Streams
    stayers: Annotated[int, Field(ge=0, le=MOST_STREAMS)] = 0
    storms: Count
    abandon_after_tokens: Tokens
    stay_tokens: Tokens


CAPACITY_ANSWER_TOKENS: Final = 1000  # of the prompts that measure the KV cache; they are left
Variant = Literal["decode", "queue", "prefill", "unary"]


class SlotRecoveryLoad(_LeavesAtOnePoint):
    """A train of probes (`harness.experiments.train`): it ends with the run's time, after `trials`
    samples, or when the 95 % interval of the median recovery is `width_s` wide. `slots` is the
    server's number of batch slots; if absent, the server is asked."""

    _answers = ("answer_tokens", "probe_tokens")
    _streams = ("slots",)
    kind: Literal["slot_recovery"]
    variant: Variant = "decode"
    slots: Slots | None = None
    trials: Count | None = None
    width_s: Duration | None = None
    probe_tokens: Tokens
    prefill_tokens: Tokens = 1024

    @property
    def longest_requests(self) -> dict[str, int]:
        found = super().longest_requests
        if self.variant == "prefill":
            found["`load.prefill_tokens` + `load.answer_tokens`"] = (
                self.prefill_tokens + self.answer_tokens
            )
        return found


class OccupancyLoad(Load):
    """`rounds` in which all streams leave, and as many requests as slots say how many slots are
    still held (`harness.experiments.occupancy`). Answers are as long as the settle time needs, at
    most `answer_tokens`. With `capacity_prompt_tokens`, prompts of this length count the KV
    capacity, before and after."""

    _answers = ("answer_tokens",)
    _streams = ("slots",)
    kind: Literal["occupancy"]
    slots: Slots | None = None
    rounds: Count
    answer_tokens: Tokens
    capacity_prompt_tokens: Tokens | None = None

    @property
    def longest_requests(self) -> dict[str, int]:
        found = super().longest_requests
        if self.capacity_prompt_tokens is not None:
            key = f"`load.capacity_prompt_tokens` + {CAPACITY_ANSWER_TOKENS}"
            found[key] = self.capacity_prompt_tokens + CAPACITY_ANSWER_TOKENS
        return found


class ChunkFrontierLoad(Load):
    """`bystanders` users ask again and again and never leave. Meanwhile `pairs` pairs of long
    prompts come: one answer of `read_tokens` is read, one of `answer_tokens` is left during its
    prefill."""

    _answers = ("answer_tokens", "read_tokens")
    _streams = ("bystanders",)
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


AnyLoad = Annotated[
    AbandonLoad | SlotRecoveryLoad | OccupancyLoad | ChunkFrontierLoad | CancelStormLoad,
    Field(discriminator="kind"),
]
