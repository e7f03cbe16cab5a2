"""Abandon plans: when a user leaves. Pure: each plan draws itself from the request's own generator.

A plan is an entry of `[[load.mix]]`. To add one: a subclass of `AbandonPlan` here and in `AnyPlan`,
a row in docs/workloads.md, an entry in tests/harness/workload/all_plans.toml. Some plans are known
by name elsewhere, and a new plan of their sort is named there too:

    in the web form             `_PLANS` in form.py, docs/web.md
    a race for the last token   schedule.py, `RACE` in harness/analysis/open_requests.py
    in the queue                `QUEUED` in the same file, harness/run/load_plan.py
    numbers from a file         harness/run/load_plan.py
    texts that are known        tasks.py, harness/run/preflight.py, harness/analysis/early_stop.py
    a tool to call              harness/client/http_requests.py, harness/run/load_plan.py

harness/client/leave.py says how to add a way to leave.

The pause between the last token wanted and leaving keeps users out of step with the server: leaving
right after a token would put every t0 at the same point of the engine's step.
"""

import math
import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import NormalDist
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field

from harness.records import Delivery, Role, Way
from harness.workload.observed_latency import ObservedLatency, StepEstimate
from harness.workload.session import ChatMessage, Turn
from harness.workload.tasks import LONGEST_TEXT, NUM_TEXTS, TaskText, WorkloadTask
from harness.workload.values import (
    MOST_TOKENS,
    Counts,
    SecondsRange,
    Share,
    Shares,
    TomlTable,
)

MOST_ANSWERS: Final = 128
MOST_DOCUMENTS: Final = 10_000

# Takes the number of tokens read; returns None to read on, or the pause before leaving (ns). It is
# called with 0 before the request is sent: a pause without a token counts from the sending or, if
# it is a time, from before the connection is opened. It must not wait: the event loop's own
# callback may call it.
LeaveRule = Callable[[int], int | None]

# The pause before leaving: the load's `think`, a race around the last step, or a number of ns.
Pause = Literal["think", "race"] | int

_NORMAL: Final = NormalDist()
_LARGEST_SHARE: Final = 1 - 2**-53  # the inverse of the normal distribution ends before 1
# The race begins with `_RACE_TOKENS` tokens to come. A request left within a step can be cancelled
# before the last step begins; within the next step, the last token is being made; then the answer
# is over.
_RACE_TOKENS: Final = 2
_RACE_STEPS: Final = (0.5, 2.5)
_LEAD_STEPS: Final = 3  # of a storm: every stream gets a token in each step


def never(_tokens_read: int) -> None:
    """The leave rule of a user that stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request before it is sent; names and meanings are those of `RequestRow`.

    `planned_abandon`: 0 reads none, None stays. `think_fraction` in [0, 1) places the pause within
    its range. `counts_calls`: only the tokens of tool calls count. The prompt begins with
    `shared_tokens` of all requests. `text` is the known text that answers it, if any. `path`:
    another route than the target's; `body`: keys laid over the ordinary body; `headers`: in
    addition to the ordinary ones. `turn`: of a session, whose `messages` come before the prompt;
    with `response_id` only the messages after this response, which the server has kept. Of
    several `documents` the prompt is the last, and `messages` are the others. `messages`,
    `response_id`, `request_id`, `arm` and `intended_start_ns` are set when it is issued.
    """

    user: int
    max_tokens: int
    prompt_tokens: int
    plan: str = "never"
    planned_abandon: int | None = None
    way: Way | None = None
    pause: Pause = "think"
    think_fraction: float = 0.0
    counts_calls: bool = False
    delivery: Delivery = Delivery.STREAM
    n: int = 1
    priority: int | None = None
    shared_tokens: int = 0
    documents: int = 1
    role: Role = Role.USER
    arm: str = ""
    trial: int | None = None
    repeats: str | None = None
    text: TaskText | None = None
    path: str | None = None
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] | None = None
    turn: Turn | None = None
    messages: Sequence[ChatMessage] = ()
    response_id: str | None = None
    request_id: str = ""
    intended_start_ns: int = 0

    @property
    def counts_from_start(self) -> bool:
        return isinstance(self.pause, int)

    def columns(self) -> dict[str, Any]:
        """Its part of its `RequestRow`: all that is known before it is sent."""
        turn = self.turn
        return {
            "request_id": self.request_id,
            "arm": self.arm,
            "role": self.role,
            "trial": self.trial,
            "user": self.user,
            "stream": self.delivery is Delivery.STREAM,
            "planned_abandon": self.planned_abandon,
            "max_tokens": self.max_tokens,
            "intended_start_ns": self.intended_start_ns,
            "plan": self.plan,
            "way": "" if self.way is None else self.way.value,
            "delivery": self.delivery,
            "n": self.n,
            "priority": self.priority,
            "repeats": self.repeats,
            "follows": None if turn is None else turn.follows,
            "history_tokens": 0 if turn is None else turn.history_tokens,
            "history_cut": 0 if turn is None else turn.cut_tokens,
        }

    def leave_rule(self, think: str | float, step: StepEstimate) -> LeaveRule:
        planned = self.planned_abandon
        if planned is None:
            return never

        def leave_when_read(tokens_read: int) -> int | None:
            return None if tokens_read < planned else self._pause_ns(think, step)

        return leave_when_read

    def _pause_ns(self, think: str | float, step: StepEstimate) -> int:
        if isinstance(self.pause, int):
            return self.pause
        step_ns = step.median_ns()
        if self.pause == "race":
            shortest, longest = _RACE_STEPS
            return int((shortest + self.think_fraction * (longest - shortest)) * step_ns)
        return think_ns(think, fraction=self.think_fraction, step_ns=step_ns)


def think_ns(think: str | float, *, fraction: float, step_ns: int) -> int:
    """The pause before leaving: "step" is uniform over one step, a number uniform from 0 to it."""
    if isinstance(think, str):
        longest_ns = {"none": 0, "step": step_ns}[think]
    else:
        longest_ns = int(think * 1e9)
    return int(fraction * longest_ns)


TokenCount = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Tasks = Annotated[
    list[Annotated[WorkloadTask, Field(strict=False)]],
    BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
    Field(min_length=1),
]


class AbandonPlan(TomlTable):
    """`weight`: the plan's share of the requests that leave, over the sum of weights. `n`: answers
    to one request; the plan counts the tokens of all of them together. A smaller `priority` is more
    important. `shared_prefix_tokens`: instead of the load's. `documents`: texts to embed or to rank
    in one request."""

    plan: str
    weight: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    way: Annotated[Way, Field(strict=False)] = Way.FIN
    delivery: Annotated[Delivery, Field(strict=False)] = Delivery.STREAM
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] = 1
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    shared_prefix_tokens: Annotated[int, Field(ge=0)] | None = None
    documents: Annotated[int, Field(ge=1, le=MOST_DOCUMENTS)] = 1
    is_read: ClassVar[bool] = False  # to its end, or nearly: the answer then has `stay_tokens`

    @abstractmethod
    def draw(self, rng: random.Random, asked: RequestSpec, seen: ObservedLatency) -> RequestSpec:
        """The request with its moment of leaving; unchanged if the user stays."""

    def most_read(self) -> float | None:
        """How many tokens users read before leaving, at most or typically; None: they need not wait
        for a token, which a unary answer does not show. At least one of each answer."""
        return self.n

    @property
    def counts_from_sending(self) -> bool:
        """The moment to leave is known as the request is sent."""
        return False

    def problem(self, answer_tokens: int, stay_tokens: int) -> str | None:
        tokens = self.most_read()
        if tokens is None:
            return None
        if self.delivery is Delivery.UNARY:
            return "a unary answer shows no tokens before it is complete"
        asked_for = self.n * (stay_tokens if self.is_read else answer_tokens)
        if tokens < asked_for:
            return None
        return (
            f"{tokens:g} tokens, but `answer_tokens` allow {asked_for}: the answer would end first"
        )

    def _leaving(
        self, asked: RequestSpec, plan: str, tokens: int, pause: Pause = "think"
    ) -> RequestSpec:
        return replace(asked, plan=plan, planned_abandon=tokens, way=self.way, pause=pause)


class _AfterTokens(AbandonPlan):
    @abstractmethod
    def draw_tokens(self, rng: random.Random, limit: int) -> int: ...

    def draw(self, rng: random.Random, asked: RequestSpec, seen: ObservedLatency) -> RequestSpec:
        tokens = self.draw_tokens(rng, asked.n * asked.max_tokens)
        return self._leaving(asked, f"tokens:{tokens}", tokens)


class TokensPlan(_AfterTokens):
    """Users leave after an exact number of tokens, drawn from `tokens`. 0: once the request is
    sent."""

    plan: Literal["tokens"]
    tokens: Counts

    def most_read(self) -> float | None:
        return max(self.tokens) or None

    def draw_tokens(self, rng: random.Random, limit: int) -> int:
        return rng.choice(self.tokens)


class UniformPlan(_AfterTokens):
    """Users leave after a number of tokens, uniform from `lowest` to `highest`, both included."""

    plan: Literal["tokens_uniform"]
    lowest: TokenCount
    highest: TokenCount

    def most_read(self) -> float:
        return self.highest

    def problem(self, answer_tokens: int, stay_tokens: int) -> str | None:
        if self.lowest > self.highest:
            return f"`lowest` is {self.lowest}, more than `highest`, {self.highest}"
        return super().problem(answer_tokens, stay_tokens)

    def draw_tokens(self, rng: random.Random, limit: int) -> int:
        return rng.randint(self.lowest, self.highest)


class GeometricPlan(_AfterTokens):
    """An equal chance to leave after each token, 1 / `mean`; the end of the answer cuts it off."""

    plan: Literal["tokens_geometric"]
    mean: Annotated[float, Field(ge=1, le=MOST_TOKENS)]

    def most_read(self) -> float:
        return max(self.n, self.mean)

    def draw_tokens(self, rng: random.Random, limit: int) -> int:
        return geometric(rng, mean=self.mean, limit=limit)


class LognormalPlan(_AfterTokens):
    """The logarithm is normal around that of `median`, with standard deviation `sigma`; the end of
    the answer cuts it off."""

    plan: Literal["tokens_lognormal"]
    median: Annotated[float, Field(ge=1, le=MOST_TOKENS)]
    sigma: Annotated[float, Field(ge=0, le=10)]

    def most_read(self) -> float:
        return max(self.n, self.median)

    def draw_tokens(self, rng: random.Random, limit: int) -> int:
        return lognormal(rng, median=self.median, sigma=self.sigma, limit=limit)


class FilePlan(AbandonPlan):
    """Users leave after a number of tokens drawn from a file: one a line, or a `column` of CSV or
    parquet. It becomes a `TokensPlan` when the file is read, before the load begins."""

    plan: Literal["tokens_from_file"]
    file: Annotated[str, Field(min_length=1)]
    column: str | None = None

    def with_counts(self, counts: list[int]) -> TokensPlan:
        shared = self.model_dump(exclude={"plan", "file", "column"})
        return TokensPlan(plan="tokens", tokens=counts, **shared)

    def draw(self, rng: random.Random, asked: RequestSpec, seen: ObservedLatency) -> RequestSpec:
        raise TypeError(f"{self.file} was not read")


class ToolCallPlan(TokensPlan):
    """Users leave after a number of tokens of a tool call that streams. An answer without a call is
    read to its end."""

    plan: Literal["tool_call"]  # type: ignore[assignment]

    def draw(self, rng: random.Random, asked: RequestSpec, seen: ObservedLatency) -> RequestSpec:
        tokens = max(1, self.draw_tokens(rng, asked.max_tokens))
        left = self._leaving(asked, f"tool_call:{tokens}", tokens)
        return replace(left, counts_calls=True)


class SharePlan(AbandonPlan):
    """Users leave after a share of the expected answer, uniform between the two."""

    plan: Literal["answer_share"]
    share: Shares

    def draw(self, rng: random.Random, asked: RequestSpec, seen: ObservedLatency) -> RequestSpec:
        share = rng.uniform(*self.share)
        whole = asked.n * seen.answer_tokens(asked.max_tokens)
        # At least one token is read, and at least one is not.
        tokens = max(1, min(math.ceil(share * whole), whole - 1))
        return self._leaving(asked, f"share:{share:.2f}", tokens)


class TimePlan(AbandonPlan):
    """Users leave after a time, in seconds uniform between the two, since the sending or the first
    token."""

    plan: Literal["time"]
    seconds: SecondsRange
    since: Literal["sent", "first_token"] = "sent"

    @property
    def counts_from_sending(self) -> bool:
        return self.since == "sent"

    def most_read(self) -> float | None:
        return self.n if self.since == "first_token" else None

    def draw(self, rng: random.Random, asked: RequestSpec, seen: ObservedLatency) -> RequestSpec:
        wait_s = rng.uniform(*self.seconds)
        if self.since == "sent":
            return self._leaving(asked, f"time:{wait_s:.4g}", 0, int(wait_s * 1e9))
        return self._leaving(asked, f"first_token+{wait_s:.4g}", 1, int(wait_s * 1e9))


class QueuedPlan(AbandonPlan):
    """Users leave after the sending and the think time: still in the queue, where there is one."""

    plan: Literal["queued"]

    def most_read(self) -> None:
        return None

    def draw(self, rng: random.Random, asked: RequestSpec, seen: ObservedLatency) -> RequestSpec:
        return self._leaving(asked, "queued", 0)


class PrefillPlan(AbandonPlan):
    """Users leave at a share of the median time to first token so far; before any was seen, the
    user stays."""

    plan: Literal["prefill"]
    share: Shares = Field(default_factory=lambda: [0.1, 0.9])

    @property
    def counts_from_sending(self) -> bool:
        return True

    def most_read(self) -> None:
        return None

    def draw(self, rng: random.Random, asked: RequestSpec, seen: ObservedLatency) -> RequestSpec:
        share, ttft_ns = rng.uniform(*self.share), seen.ttft_ns()
        if ttft_ns is None:
            return asked
        return self._leaving(asked, f"prefill:{share:.2f}", 0, int(share * ttft_ns))


class LastTokenPlan(AbandonPlan):
    """Users leave as the last of `stay_tokens` is made: from half a step before the last step
    begins to half a step after it ends. A quarter can still be cancelled, half leave while the last
    token is made, and a quarter comes too late."""

    is_read = True
    plan: Literal["last_token"]

    def problem(self, answer_tokens: int, stay_tokens: int) -> str | None:
        if stay_tokens <= _RACE_TOKENS and self.delivery is Delivery.STREAM:
            return "the race begins two tokens before the last: `stay_tokens` must be 3 or more"
        return super().problem(answer_tokens, stay_tokens)

    def draw(self, rng: random.Random, asked: RequestSpec, seen: ObservedLatency) -> RequestSpec:
        tokens = asked.n * (asked.max_tokens - _RACE_TOKENS)
        return self._leaving(asked, "last_token", tokens, "race")


class TaskPlan(AbandonPlan):
    """A request with a known text, of one of the tasks, that asks to be stopped when its answer is
    complete. The user of a chat leaves then. Without `early_stop` all read the whole text."""

    is_read = True
    plan: Literal["task"]
    task: Tasks = Field(default_factory=lambda: list(WorkloadTask))
    after_answer: Share
    early_stop: bool = True

    def most_read(self) -> None:
        return None

    def problem(self, answer_tokens: int, stay_tokens: int) -> str | None:
        if stay_tokens < LONGEST_TEXT:
            return f"a text has up to {LONGEST_TEXT} tokens, but `stay_tokens` is {stay_tokens}"
        if self.n > 1:
            return "a known text is one answer: leave `n` out"
        if self.delivery is Delivery.UNARY and self.early_stop and WorkloadTask.CHAT in self.task:
            return "the user of a chat leaves when it has read enough: a unary answer shows nothing"
        return None

    @property
    def texts(self) -> list[TaskText]:
        numbered = product(self.task, range(NUM_TEXTS))
        return [TaskText(*one, self.after_answer, self.early_stop) for one in numbered]

    def draw(self, rng: random.Random, asked: RequestSpec, seen: ObservedLatency) -> RequestSpec:
        text = rng.choice(self.texts)
        spec = replace(asked, plan=text.plan, text=text)
        if text.task is WorkloadTask.CHAT and self.early_stop:
            return self._leaving(spec, text.plan, text.num_answer)
        return spec


class StayPlan(AbandonPlan):
    is_read = True
    plan: Literal["never"]

    def most_read(self) -> None:
        return None

    def draw(self, rng: random.Random, asked: RequestSpec, seen: ObservedLatency) -> RequestSpec:
        return asked


AnyPlan = Annotated[
    TokensPlan
    | UniformPlan
    | GeometricPlan
    | LognormalPlan
    | FilePlan
    | ToolCallPlan
    | SharePlan
    | TimePlan
    | QueuedPlan
    | PrefillPlan
    | LastTokenPlan
    | TaskPlan
    | StayPlan,
    Field(discriminator="plan"),
]


def geometric(rng: random.Random, *, mean: float, limit: int) -> int:
    """A number from 1 to `limit` - 1; P(N > k) = (1 - 1 / mean)^k before the limit cuts it off."""
    if mean <= 1:
        return 1
    decay = math.log1p(-1 / mean)
    reach = -math.expm1(decay * (limit - 1))  # the share that lies below the limit
    drawn = 1 + math.floor(math.log1p(-rng.random() * reach) / decay)
    return min(drawn, limit - 1)


def lognormal(rng: random.Random, *, median: float, sigma: float, limit: int) -> int:
    """A number from 1 to `limit` - 1, rounded to the nearest."""
    if sigma == 0:
        return min(max(1, round(median)), limit - 1)
    highest = math.log(limit - 0.5)  # what would be rounded to the limit
    reach = _NORMAL.cdf((highest - math.log(median)) / sigma)
    share = min(max(rng.random() * reach, math.ulp(0.0)), _LARGEST_SHARE)
    drawn = round(median * math.exp(sigma * _NORMAL.inv_cdf(share)))
    return min(max(1, drawn), limit - 1)


class Storm:
    """`streams` streams leave together, once each has read at least `tokens` tokens."""

    def __init__(self, *, streams: int, tokens: int) -> None:
        self._missing = set(range(streams))
        self._tokens = tokens
        self._moment_ns: int | None = None

    def pause_ns(self, stream: int, tokens_read: int, *, now_ns: int, step_ns: int) -> int | None:
        if tokens_read >= self._tokens:
            self._missing.discard(stream)
        if self._moment_ns is None:
            if self._missing:
                return None
            self._moment_ns = now_ns + _LEAD_STEPS * step_ns
        return max(0, self._moment_ns - now_ns)
