"""When and how users leave, as the load process is told it: one `Slice` a kind of request.

Everything is resolved: what a workload writes short (`abandon_after_tokens`, one number for a
range, the name of a file) has been written out by `harness.order`.
"""

from typing import Literal

import msgspec

from harness.records import Delivery, Way


class AfterTokens(msgspec.Struct, kw_only=True, tag="tokens", tag_field="plan"):
    """After a number of tokens drawn from `tokens`, each entry with the same chance.

    One entry: exactly so many. Many: a distribution as it was observed. 0: once it is sent.
    """

    tokens: list[int]


class AfterUniformTokens(msgspec.Struct, kw_only=True, tag="tokens_uniform", tag_field="plan"):
    """Uniform from `lowest` to `highest`, both included."""

    lowest: int
    highest: int


class AfterGeometricTokens(msgspec.Struct, kw_only=True, tag="tokens_geometric", tag_field="plan"):
    """After each token the same chance to leave: 1 / `mean`."""

    mean: float


class AfterLognormalTokens(msgspec.Struct, kw_only=True, tag="tokens_lognormal", tag_field="plan"):
    """The logarithm is normal around that of `median`, with standard deviation `sigma`."""

    median: float
    sigma: float


class AfterAnswerShare(msgspec.Struct, kw_only=True, tag="answer_share", tag_field="plan"):
    """After a share of the answer's expected tokens, uniform between the two."""

    share: tuple[float, float]


class AfterTime(msgspec.Struct, kw_only=True, tag="time", tag_field="plan"):
    """So many seconds, uniform between the two, after the request was sent or its first token."""

    seconds: tuple[float, float]
    since: Literal["sent", "first_token"]


class WhileQueued(msgspec.Struct, kw_only=True, tag="queued", tag_field="plan"):
    """Once it is sent, after the think time: still in the queue, where there is one."""


class DuringPrefill(msgspec.Struct, kw_only=True, tag="prefill", tag_field="plan"):
    """After a share of the expected time to first token, uniform between the two.

    Expected is what the load has seen so far; until it has, such a request is read to its end.
    """

    share: tuple[float, float]


class AtLastToken(msgspec.Struct, kw_only=True, tag="last_token", tag_field="plan"):
    """As the answer ends: from half a step before its last step begins to half a step after that
    step has ended. A quarter can still be cancelled, half leave while the last token is made, and a
    quarter comes too late.
    """


class Never(msgspec.Struct, kw_only=True, tag="never", tag_field="plan"):
    """Reads to the end."""


LeavePlan = (
    AfterTokens
    | AfterUniformTokens
    | AfterGeometricTokens
    | AfterLognormalTokens
    | AfterAnswerShare
    | AfterTime
    | WhileQueued
    | DuringPrefill
    | AtLastToken
    | Never
)


class Slice(msgspec.Struct, kw_only=True):
    """One kind of request: its share of all is `weight` over the sum of weights.

    `n`: answers asked for; token counts of the plan are of all of them together.
    """

    weight: float
    leave: LeavePlan
    way: Way
    delivery: Delivery
    n: int
