"""Who leaves, when, and after what pause: pure, from the plan and a seed.

Each request's plan follows from (seed, user, n), so two runs of one plan ask for the same things
however their users happened to be scheduled. Two kinds of plan also need to know what is usual on
this server (a share of the time to first token, a share of an answer): that is `Expectation`.

The pause between the last token wanted and the act of leaving keeps users out of step with the
server: leaving right after a token would put every t0 at the same point of the engine's step.
"""

import math
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Literal, NamedTuple

from harness.records import Delivery, Outcome, RequestRow, Role, Way
from harness.workload.plan import (
    AbandonLoad,
    AfterAnswerShare,
    AfterGeometricTokens,
    AfterLognormalTokens,
    AfterTime,
    AfterTokens,
    AfterUniformTokens,
    AtLastToken,
    DuringPrefill,
    LeavePlan,
    Never,
    Slice,
    WhileQueued,
)

_NORMAL: Final = NormalDist()
_LARGEST_SHARE: Final = 1 - 2**-53  # the inverse of the normal distribution ends before 1


def geometric(rng: random.Random, *, mean: float, limit: int) -> int:
    """From 1 to `limit` - 1: P(N > k) is (1 - 1 / mean)^k where nothing is cut off."""
    if mean <= 1:
        return 1
    decay = math.log1p(-1 / mean)
    reach = -math.expm1(decay * (limit - 1))  # the share that lies below the limit
    drawn = 1 + math.floor(math.log1p(-rng.random() * reach) / decay)
    return min(drawn, limit - 1)


def lognormal(rng: random.Random, *, median: float, sigma: float, limit: int) -> int:
    """From 1 to `limit` - 1, rounded to the nearest."""
    if sigma == 0:
        return min(max(1, round(median)), limit - 1)
    highest = math.log(limit - 0.5)  # what would be rounded to the limit
    reach = _NORMAL.cdf((highest - math.log(median)) / sigma)
    share = min(max(rng.random() * reach, math.ulp(0.0)), _LARGEST_SHARE)
    drawn = round(median * math.exp(sigma * _NORMAL.inv_cdf(share)))
    return min(max(1, drawn), limit - 1)


_WINDOW: Final = 101  # latest observations; enough that one stall does not move the median


class Expectation:
    """Medians of the latest times to first token, and of the answers that ended by themselves."""

    def __init__(self) -> None:
        self._ttfts_ns: deque[int] = deque(maxlen=_WINDOW)
        self._own_ends: deque[int] = deque(maxlen=_WINDOW)

    def observe(self, row: RequestRow) -> None:
        """Note what a request that has ended tells."""
        if row.delivery is Delivery.STREAM and row.first_token_ns is not None:
            self._ttfts_ns.append(row.first_token_ns - row.sent_ns)
        if row.outcome is Outcome.COMPLETED and row.finish_reason == "stop":
            self._own_ends.append(row.tokens_read // row.n)

    def ttft_ns(self) -> int | None:
        """The usual time to first token; None before any was seen."""
        return int(statistics.median(self._ttfts_ns)) if self._ttfts_ns else None

    def answer_tokens(self, max_tokens: int) -> int:
        """The usual length of one answer: all that was asked for, unless answers end before."""
        if not self._own_ends:
            return max_tokens
        return min(max_tokens, int(statistics.median(self._own_ends)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What the user is up to: when and how to leave (`way`; None: stays), and what is asked for.

    `counts_from_start`: who leaves without a token does so at a time that counts from the moment
    before the connection is opened, and not from when the request has gone out.
    """

    plan: str = "never"
    planned_abandon: int | None = None
    way: Way | None = None
    counts_from_start: bool = False
    delivery: Delivery = Delivery.STREAM
    n: int = 1


STAYS: Final = Intent()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What is known of a request before it is sent; the meanings are those of `RequestRow`."""

    request_id: str
    arm: str
    role: Role
    trial: int | None
    user: int
    max_tokens: int
    intended_start_ns: int
    intent: Intent
    repeats: str | None = None


# Asked with the number of tokens read: None to read on, or how long to think before leaving. Asked
# with 0 before the request is sent; whoever will leave without a token thinks from the sending on:
# once the request has gone out or, where the plan is a time, from before the connection is opened.
# It may be asked in the event loop's own call, so it must not wait.
LeaveRule = Callable[[int], int | None]

# How long the pause is: as the load says, around the last step of the answer, or so many ns.
Pause = Literal["think", "race"] | int

_FIRST_STEP_NS: Final = 20_000_000  # assumed until a gap was seen: a usual decode step
# With so many tokens to come the race is on: who leaves within a step can be cancelled before the
# last step begins; within the next, the last token is being made; then nothing is left to leave.
_RACE_TOKENS: Final = 2
_RACE_STEPS: Final = (0.5, 2.5)
_LEAVING_SHARES: Final = (0.1, 0.9)  # neither before the prefill has begun nor after it is over


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """What one request asks for.

    After the `planned_abandon` tokens of its `intent` (0: the sending) begins the `pause`.
    `think_fraction` in [0, 1) places it within its range.
    """

    intent: Intent
    pause: Pause
    think_fraction: float
    max_tokens: int
    prompt_tokens: int


class _Moment(NamedTuple):
    text: str
    tokens: int
    pause: Pause = "think"


def plan_request(
    load: AbandonLoad, *, seed: int, user: int, n: int, seen: Expectation
) -> RequestPlan:
    """The n-th request of a user."""
    rng = random.Random(f"{seed}/{user}/{n}/request")
    (kind,) = rng.choices(load.mix, [kind.weight for kind in load.mix])
    prompt_tokens = rng.randint(*load.prompt_tokens)
    fraction = rng.random()
    # Only those who will have left ask for the long answer: it is not for reading.
    is_read = isinstance(kind.leave, Never | AtLastToken)
    max_tokens = load.stay_tokens if is_read else load.answer_tokens
    moment = _moment(kind, rng, max_tokens, seen)
    if moment is None:
        max_tokens = load.stay_tokens
    return RequestPlan(
        intent=_intent(kind, moment),
        pause="think" if moment is None else moment.pause,
        think_fraction=fraction,
        max_tokens=max_tokens,
        prompt_tokens=prompt_tokens,
    )


def _intent(kind: Slice, moment: _Moment | None) -> Intent:
    if moment is None:
        return Intent(delivery=kind.delivery, n=kind.n)
    return Intent(
        plan=moment.text,
        planned_abandon=moment.tokens,
        counts_from_start=isinstance(moment.pause, int),
        way=kind.way,
        delivery=kind.delivery,
        n=kind.n,
    )


def _moment(kind: Slice, rng: random.Random, max_tokens: int, seen: Expectation) -> _Moment | None:
    """When a request of this kind is left; None: it is not."""
    match kind.leave:
        case Never():
            return None
        case WhileQueued():
            return _Moment("queued", 0)
        case DuringPrefill(share=share):
            part, ttft_ns = rng.uniform(*share), seen.ttft_ns()
            if ttft_ns is None:
                return None
            return _Moment(f"prefill:{part:.2f}", 0, int(part * ttft_ns))
        case AfterTime(seconds=seconds, since=since):
            wait_s = rng.uniform(*seconds)
            if since == "sent":
                return _Moment(f"time:{wait_s:.4g}", 0, int(wait_s * 1e9))
            return _Moment(f"first_token+{wait_s:.4g}", 1, int(wait_s * 1e9))
        case AtLastToken():
            return _Moment("last_token", kind.n * (max_tokens - _RACE_TOKENS), "race")
        case AfterAnswerShare(share=share):
            part = rng.uniform(*share)
            whole = kind.n * seen.answer_tokens(max_tokens)
            return _Moment(f"share:{part:.2f}", _tokens_of_share(part, whole))
        case leave:
            tokens = _draw_tokens(leave, rng, kind.n * max_tokens)
            return _Moment(f"tokens:{tokens}", tokens)


def _tokens_of_share(part: float, whole: int) -> int:
    """At least one token is read, and at least one is not."""
    return max(1, min(math.ceil(part * whole), whole - 1))


def _draw_tokens(leave: LeavePlan, rng: random.Random, limit: int) -> int:
    match leave:
        case AfterTokens(tokens=tokens):
            return rng.choice(tokens)
        case AfterUniformTokens(lowest=lowest, highest=highest):
            return rng.randint(lowest, highest)
        case AfterGeometricTokens(mean=mean):
            return geometric(rng, mean=mean, limit=limit)
        case AfterLognormalTokens(median=median, sigma=sigma):
            return lognormal(rng, median=median, sigma=sigma, limit=limit)
        case _:
            raise TypeError(f"{leave!r} is no count of tokens")


def never(_tokens_read: int) -> None:
    """The rule of those who stay."""


def leave_rule(plan: RequestPlan, think: str | float, step: "StepEstimate") -> LeaveRule:
    """What the reader of this request asks after each receive."""
    planned = plan.intent.planned_abandon
    if planned is None:
        return never

    def leave_when_read(tokens_read: int) -> int | None:
        if tokens_read < planned:
            return None
        if isinstance(plan.pause, int):
            return plan.pause
        step_ns = step.median_ns()
        if plan.pause == "race":
            shortest, longest = _RACE_STEPS
            return int((shortest + plan.think_fraction * (longest - shortest)) * step_ns)
        return think_ns(think, fraction=plan.think_fraction, step_ns=step_ns)

    return leave_when_read


def leaving_share(*, seed: int, n: int) -> float:
    """At which share of the usual time to first token the n-th long prompt is left: uniform from
    0.1 to 0.9.
    """
    return random.Random(f"{seed}/{n}/leave").uniform(*_LEAVING_SHARES)


def think_ns(think: str | float, *, fraction: float, step_ns: int) -> int:
    """The pause before leaving: "step" is uniform over one step, a number uniform from 0 to it."""
    if isinstance(think, str):
        longest_ns = {"none": 0, "step": step_ns}[think]
    else:
        longest_ns = int(think * 1e9)
    return int(fraction * longest_ns)


class StepEstimate:
    """How long a step of the server takes, judged by the latest gaps between its tokens."""

    def __init__(self) -> None:
        self._gaps_ns: deque[int] = deque(maxlen=_WINDOW)

    def observe(self, gap_ns: int) -> None:
        """Note one gap. Tokens that came in one receive tell nothing: their gap is zero."""
        if gap_ns > 0:
            self._gaps_ns.append(gap_ns)

    def median_ns(self) -> int:
        """The median of the latest gaps."""
        return int(statistics.median(self._gaps_ns)) if self._gaps_ns else _FIRST_STEP_NS


_LEAD_STEPS: Final = 3  # how far ahead; every stream gets a token in each step


class Storm:
    """So many `streams` that will leave together, each after at least `tokens`.

    Its state is who has read enough, and the moment, once it is set.
    """

    def __init__(self, *, streams: int, tokens: int) -> None:
        self._missing = set(range(streams))
        self._tokens = tokens
        self._moment_ns: int | None = None

    def pause_ns(self, stream: int, tokens_read: int, *, now_ns: int, step_ns: int) -> int | None:
        """How long from now the stream leaves; None while the moment is not set."""
        if tokens_read >= self._tokens:
            self._missing.discard(stream)
        if self._moment_ns is None:
            if self._missing:
                return None
            self._moment_ns = now_ns + _LEAD_STEPS * step_ns
        return max(0, self._moment_ns - now_ns)
