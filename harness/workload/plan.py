"""What the load process is told to do: one JSON file, written by the run, read by the users.

The load runs in a process of its own (Locust monkey-patches the process that imports it), so
everything it needs to know is here, resolved: no defaults are filled in on the other side.
"""

from pathlib import Path
from typing import Literal

import msgspec

from harness.records import Delivery, Outcome, Way
from harness.workload.arrivals import RateArrivals
from harness.workload.prompts import BYTES_ARE_TOKENS, PromptScale
from harness.workload.traces import TraceReplay


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


class AbandonLoad(msgspec.Struct, kw_only=True, tag="abandon", tag_field="kind"):
    """Users who open streams and leave: each sends its next request when one ended (closed loop).

    Each request is of one kind of the `mix`, drawn by weight. Those who are to leave ask for
    `answer_tokens` (long enough that a server which goes on can be told from one that finished),
    those who read to the last token or never leave for `stay_tokens`. Who waits for no token begins
    to think when the request is sent, and leaves wherever the answer stands then: no headers yet,
    no token yet, or some tokens already (which count as read).
    All prompts of a load begin with the same `shared_prefix_tokens` tokens.
    After an outcome in `ask_again_after` a user asks the very same once more. A user whose patience
    ended (timed out) pauses `retry_pause_s` before the next request.
    The first `canaries` of the users are canaries (`workload.prompts`): they leave nothing, and
    ask for `canary_tokens`.
    `think` is "step" (uniform over one observed gap between tokens), "none", or seconds (uniform
    from 0). The load ends after `stop_after_abandons` abandons, or when the plan's time is up.
    """

    mix: list[Slice]
    think: str | float
    prompt_tokens: tuple[int, int]
    answer_tokens: int
    stay_tokens: int
    shared_prefix_tokens: int
    stop_after_abandons: int | None
    ask_again_after: list[Outcome] = []
    retry_pause_s: float = 0.5
    canaries: int = 0
    canary_tokens: int = 32


class CancelStormLoad(msgspec.Struct, kw_only=True, tag="cancel_storm", tag_field="kind"):
    """`storms` waves of `streams` requests for `answer_tokens`, each left as a whole.

    All of a wave leave at the same moment, when each has read `abandon_after_tokens` at least.
    Beside them `stayers` read answers of `stay_tokens`, one after the other.
    """

    streams: int
    stayers: int
    storms: int
    abandon_after_tokens: int
    prompt_tokens: tuple[int, int]
    answer_tokens: int
    stay_tokens: int


class SlotRecoveryLoad(msgspec.Struct, kw_only=True, tag="slot_recovery", tag_field="kind"):
    """One director: fill the slots, queue a probe, abandon one, time the probe's first token.

    `trials` of each arm, interleaved: `unloaded` (the probe alone), `abandon`, and `control`
    (nobody leaves). `slots` is the server's number of batch slots: before each trial as many short
    requests must run at once, or the trial is void.
    """

    slots: int
    trials: int
    prompt_tokens: tuple[int, int]
    answer_tokens: int
    control_answer_tokens: int
    probe_tokens: int
    abandon_after_tokens: int


class ChunkFrontierLoad(msgspec.Struct, kw_only=True, tag="chunk_frontier", tag_field="kind"):
    """Bystanders who stream all along, and one director who sends long prompts beside them.

    The `bystanders` ask for `bystander_answer_tokens` again and again and never leave. The director
    sends its prompts one after the other, in `pairs`: one of which `read_tokens` are read, and one
    that asks for `answer_tokens` and is left during its prefill, after a share (uniform from 0.1 to
    0.9) of the median time to first token so far.
    """

    bystanders: int
    bystander_prompt_tokens: tuple[int, int]
    bystander_answer_tokens: int
    prompt_tokens: tuple[int, int]
    read_tokens: int
    answer_tokens: int
    pairs: int


Load = AbandonLoad | SlotRecoveryLoad | ChunkFrontierLoad | CancelStormLoad


class OpenLoop(msgspec.Struct, kw_only=True):
    """Requests that come by a schedule, whatever became of those before them.

    One beyond `max_streams` at once waits until another has ended: its lateness shows.
    """

    schedule: RateArrivals | TraceReplay
    max_streams: int


class Timeouts(msgspec.Struct, kw_only=True, frozen=True):
    """How long a client waits, in seconds; null: as long as it takes.

    `connect_s` for the connection, `next_byte_s` for whatever comes next, `first_token_s` and
    `total_s` from the sending to the first token and to the end of the answer.
    """

    connect_s: float
    next_byte_s: float
    first_token_s: float | None = None
    total_s: float | None = None


class LoadPlan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The whole order.

    `continuous_usage` says that each event carries the token count so far: of the whole request, or
    with `usage_per_choice` of the answer that the event belongs to. `rows_dir` must exist; null
    keeps no rows. Prompts follow from the seed and the `prompt_salt`, everything else from the seed
    alone. `cancel_path`: where to POST a cancel, with {id} for the request's X-Request-Id. With an
    `open_loop`, which only an abandon load has, each arrival is a user who asks once. `ca_file`:
    the CAs to trust over TLS (`http_client`). `keep_alive`: who stays passes the connection on.
    `left_open_outlive`: connections that users left open end with standard input, not before.
    Users, arrivals and the number of abandons are those of all `processes` together.
    """

    url: str
    path: str
    model: str
    api_key_env: str | None
    headers: dict[str, str]
    extra_body: dict[str, int | float | str | bool]
    stream_options: dict[str, bool] | None
    continuous_usage: bool
    usage_per_choice: bool = False
    left_open_outlive: bool = False
    cancel_path: str | None = None
    ca_file: str | None = None
    keep_alive: bool = False
    prompt_scale: PromptScale = BYTES_ARE_TOKENS
    prompt_salt: str = ""
    rows_dir: str | None
    seed: int
    arm: str
    users: int
    processes: int = 1
    timeouts: Timeouts
    max_seconds: float
    load: Load
    open_loop: OpenLoop | None = None


def read_plan(path: Path) -> LoadPlan:
    """Read a plan that `write_plan` wrote. Raises `msgspec.ValidationError` for anything else."""
    return msgspec.json.decode(path.read_bytes(), type=LoadPlan)


def write_plan(plan: LoadPlan, path: Path) -> None:
    """Write the plan as indented JSON, for the load process and for whoever looks later."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")
