"""The rows that a run leaves behind: written once, as they were observed, and analysed later.

Every time stamp is an integer in nanoseconds of the monotonic clock of the host that took it
(`time.perf_counter_ns`); the run's manifest names the clock and says whether the server's stamps
may be subtracted from the client's. A missing value is null, never 0 and never -1.
"""

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Final, Literal

import msgspec

SCHEMA_VERSION: Final = 1

# How far a server's metric can be believed: at any time; only when nothing runs; as a lower bound;
# never, since it does not move.
Trust = Literal["exact", "exact_when_idle", "lower", "stuck"]


# Roles of metrics that show the server's present state; all others are counters, which only grow.
GAUGES: Final = ("running", "waiting", "free_blocks", "kv_usage")
SHARES: Final = ("kv_usage",)  # of several engines on a page the mean says it, others add up


ProcessKind = Literal["frontend", "worker"]  # of an engine with several processes


class Outcome(StrEnum):
    COMPLETED = "completed"
    ABANDONED = "abandoned"  # the user left on purpose, by plan: not an error
    TIMED_OUT = "timed_out"
    REJECTED = "rejected"  # refused at admission (429, 503, 529)
    FAILED = "failed"
    CUT_OFF = "cut_off"  # the run ended first


WENT_WRONG: Final = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.REJECTED)


class Role(StrEnum):
    USER = "user"  # ordinary load
    FILLER = "filler"  # slot recovery: occupies a slot
    METRONOME = "metronome"  # slot recovery: a filler that never leaves; its tokens show the steps
    PROBE = "probe"  # slot recovery: its first token is the measurement
    BYSTANDER = "bystander"  # chunk frontier: decodes all along
    LONG_PROMPT = "long_prompt"  # chunk frontier: its prefill is in the bystanders' way
    CANARY = "canary"  # asks the same all along; its answer must not change
    CHECK = "check"  # slot recovery: one request a slot, to see that all slots are free


class TrialArm(StrEnum):  # of slot recovery and occupancy
    UNLOADED = "unloaded"
    ABANDON = "abandon"
    CONTROL = "control"
    OCCUPANCY = "occupancy"
    CAPACITY = "capacity"


class Protocol(StrEnum):
    HTTP = "http"
    GRPC = "grpc"


class Way(StrEnum):
    FIN = "fin"  # closes, after reading all that has come
    RST = "rst"  # closes with a reset
    HALF_CLOSE = "half_close"  # closes the sending side only, and reads on
    STOP_READING = "stop_reading"  # keeps the connection, reads nothing more
    VANISH = "vanish"  # is gone without a word: nothing is sent or acknowledged any more
    KILLED = "killed"  # the process that owns the connection gets a SIGKILL
    CANCEL = "cancel"  # asks the server's cancel endpoint, and reads on; gRPC: cancels the call
    DEADLINE = "deadline"  # the call had a deadline from its beginning, which passes
    CHANNEL_CLOSED = "channel_closed"  # closes the channel under its call
    PROCESS_KILLED = "process_killed"  # the process with the channel's connection gets a SIGKILL

    @property
    def stays_open(self) -> bool:
        """The connection outlasts its user: it is held until the server has settled."""
        return self in (Way.STOP_READING, Way.VANISH)

    @property
    def reads_on(self) -> bool:
        return self in (Way.HALF_CLOSE, Way.CANCEL)

    def over(self, protocol: Protocol) -> "Way | None":
        """This way with this protocol, None if it has none like it. The usual way to leave is to
        close over HTTP, and to cancel the call over gRPC."""
        if protocol is Protocol.HTTP:
            return None if self in _GRPC_ALONE else self
        if self in (*_GRPC_ALONE, Way.CANCEL, Way.HALF_CLOSE):
            return self
        return Way.CANCEL if self is Way.FIN else None


# What a disconnect means to a server, by its own declaration: it cancels the request; the answer
# may run on to its end; the client may come back for it.
Disconnect = Literal["cancel", "drain", "resume"]

_GRPC_ALONE: Final = (Way.DEADLINE, Way.CHANNEL_CLOSED, Way.PROCESS_KILLED)


class Delivery(StrEnum):
    STREAM = "stream"
    UNARY = "unary"  # in one piece, when it is complete


class WireClose(StrEnum):
    """The segment that the client's kernel sent, or gRPC's frame, when the user left."""

    FIN = "fin"
    RST = "rst"  # closed with unread bytes, or reset on purpose
    KERNEL = "kernel"  # what it sends for a dead process: FIN, or RST with unread bytes
    NOTHING = "nothing"  # the connection stayed open, and what came was acknowledged
    SILENCE = "silence"  # not even an acknowledgement: a socket filter drops all that comes
    RST_STREAM = "rst_stream"  # of HTTP/2: ends this call; the connection stays open
    END_STREAM = "end_stream"  # of HTTP/2: this side of the call has said all
    UNOPENED = "unopened"  # there was no connection yet: the server never had the request


class TokenCounting(StrEnum):
    """The basis of `tokens_read`: tokens are not events."""

    USAGE = "usage"  # the server said so in each event
    IDS = "ids"  # each event had the ids of its tokens
    CALIBRATED = "calibrated"  # a text event was taken for as many tokens as in other answers
    EVENTS = "events"  # one text event was taken for one token


class RequestRow(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One request as its client saw it: a row of `requests.parquet`.

    `abandoned_ns` is t0, taken immediately before the close. `token_times_ns` holds the time of
    receipt of each text event and `event_tokens` the tokens that it brought. `tokens_read` counts
    the tokens received up to t0 (or to the end, for a request that was not abandoned).

    `plan` is the plan in words ("tokens:16", "share:0.40", "time:2", "first_token+2", "queued",
    "prefill:0.40", "tool_call:16", "last_token", "task:code:7:0.4", "whole:code:7:0.4", "never")
    and `way` how the user was to leave, "" for a user that stays. `status_code` is HTTP's, null
    over gRPC. `repeats` is the request that this one repeats, and `answer` the text of a canary's
    answer. `follows` is how the turn before it in its session ended; its prompt begins with
    `history_tokens` that the server has had before, and `history_cut` tokens of the oldest turns
    were left out. `cached_tokens` of its prompt were in the server's prefix cache, by the server's
    account. A client that left and could still read has `tokens_after_leaving`, the tokens that
    came after t0, and `server_ended_ns`, when the server ended the answer or the connection.

    Where tokens were counted by calibrated events, `tokens_per_event` is what an event was taken
    for, and `tokens_error` the largest share by which that may miss what this row has read.
    `unread`: the first data that the client could not read, shortened, and why.
    """

    request_id: str  # sent as X-Request-Id
    arm: str
    role: Role
    trial: int | None  # slot recovery: which repetition
    user: int
    stream: bool
    planned_abandon: int | None  # tokens after which to decide to leave; null: stay to the end
    think_ns: int | None  # planned pause between that token (0: the sending) and leaving
    max_tokens: int
    intended_start_ns: int
    sent_ns: int
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    abandoned_ns: int | None = None
    reference_ns: int | None = None  # probe: t0; control: the end before it; occupancy: deadline
    ended_ns: int
    wire_close: WireClose | None = None
    tokens_read: int = 0
    token_times_ns: list[int] = []
    event_tokens: list[int] = []
    token_counting: TokenCounting
    outcome: Outcome
    status_code: int | None = None
    error: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None  # the server's own final count
    plan: str = ""
    way: str = ""
    delivery: Delivery = Delivery.STREAM
    n: int = 1  # answers asked for; their tokens are counted together
    priority: int | None = None  # a smaller one is more important; as planned, whatever was sent
    tokens_after_leaving: int | None = None
    server_ended_ns: int | None = None
    repeats: str | None = None
    follows: Outcome | None = None
    history_tokens: int = 0
    history_cut: int = 0
    cached_tokens: int | None = None
    answer: str | None = None
    resent: bool = False  # once more, on a new connection: the kept one ended without an answer
    frontend: int = 0  # of a server with several: the one that it was sent to
    tokens_per_event: float | None = None
    tokens_error: float | None = None
    unread: str | None = None


class ClientSample(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A load process watching itself: a row of `client.parquet`.

    `lag_ns` is how late its event loop noticed a tick of a short timer, `cpu_s` its processor time
    so far (seconds), `streams` the number of requests in flight. `pid` is of its `host`.
    """

    t_ns: int
    pid: int
    lag_ns: int
    cpu_s: float
    streams: int
    host: str = ""


class ProcessMark(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A load process began, or ended in good order. One that began and never ended was killed.

    `worker` numbers the processes of one load. `clock` names the clock of all its stamps: all
    processes have one clock until the machine is started again. `at` is the wall time of `t_ns`,
    and `url` and `model` are the target. `open_plan`: for an open loop, the plan of the load,
    without the contents of headers and bodies; the schedule follows from it. `name`: the master's
    name for a worker; "" for a process without a master.
    """

    event: Literal["began", "ended"]
    host: str
    pid: int
    worker: int
    clock: str
    t_ns: int
    at: str
    url: str
    model: str
    open_plan: dict[str, Any] | None = None
    name: str = ""


class WorkerSeen(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A worker connected to the master, which records it: the worker's own rows may lie on another
    machine. `name` begins with the name of its host; `at` is the wall time."""

    name: str
    at: str


class LifecycleEvent(msgspec.Struct, kw_only=True):
    """One event in a request's life, by the reference engine: a row of `lifecycle.parquet`.

    `worker`: the name of the worker that had it, for an event of a frontend of the first one; ""
    where the server names none.
    """

    seq: int
    t_ns: int
    event: str
    request_id: str  # the server's own
    client_request_id: str | None
    step: int | None  # the step in progress or last ended
    num_generated: int
    num_blocks: int
    reason: str | None
    worker: str = ""


class StepRow(msgspec.Struct, kw_only=True):
    """One engine step: a row of `steps.parquet` (there the two maps become lists, see store).

    Each `worker` numbers its own steps. `scheduled` maps a request (the server's id) to the tokens
    computed for it in the step, and `sampled` to the new tokens that came out of it.
    """

    step: int
    started_ns: int
    ended_ns: int
    num_running: int
    num_waiting: int
    free_blocks: int
    scheduled: dict[str, int]
    sampled: dict[str, int]
    worker: str = ""


class MetricSample(msgspec.Struct, kw_only=True):
    """One scraped value: a row of `server_metrics.parquet` (long form).

    `t_ns` is the middle of the scrape, `duration_ns` how long it took, `labels` the label set as
    JSON with sorted keys.
    """

    t_ns: int
    duration_ns: int
    name: str
    labels: str
    value: float


def num_slots(config: Mapping[str, Any] | None, found: int | None) -> int | None:
    """The slots of all workers in which requests begin."""
    declared: int | None = (config or {}).get("max_num_seqs")
    return declared * max(1, len((config or {}).get("workers") or ())) if declared else found


def is_disaggregated(workers: Iterable[str]) -> bool:
    """The names of the frontends' workers show it: each then has a decode worker after it."""
    return any(name.startswith("prefill-") for name in workers)


PAGE: Final = "metrics_url"  # the label that names a sample's page, where there are several


def page_of(labels: str) -> str:
    page: str = json.loads(labels).get(PAGE, "")
    return page


def has_labels(labels: str, wanted: Mapping[str, str]) -> bool:
    """As Prometheus reads them: a label that is wanted empty may be absent."""
    if not wanted:
        return True
    found = json.loads(labels)
    return all(found.get(name, "") == value for name, value in wanted.items())


class CpuSample(msgspec.Struct, kw_only=True):
    """CPU and memory of one process (or `machine`, the whole of it): a row of `cpu.parquet`.

    `cores` is processor seconds per second since the last sample, `handles` the number of open file
    descriptors (of the machine: null).
    """

    t_ns: int
    process: str
    cores: float
    rss_bytes: int
    handles: int | None = None


class GpuSample(msgspec.Struct, kw_only=True):
    """One reading of one GPU of the server: a row of `gpu.parquet`; null: it does not show it.

    `utilisation` is 0 to 1, `energy_j` the device's counter of all energy since some beginning.
    """

    t_ns: int
    gpu: int
    utilisation: float | None
    memory_bytes: int | None
    power_w: float | None
    energy_j: float | None = None


FIGURES: Final = ("mean", "p50", "p90", "p95", "p99", "max", "upper95", "lower95")  # of a metric
FIGURES_PER_ROUND: Final = ("mean", "p50", "p99")  # of these a summary keeps a value a round


class Metric(msgspec.Struct, kw_only=True):
    """A figure and how sure it is: an entry of `summary.json`.

    `n` counts the samples (censored ones included), `n_censored` the samples known only to exceed
    their value. A quantile that lies among these is null and `lower_bounds` gives, under the
    quantile's name, what it is known to exceed. `method` is exact, probe, counter, gauge or client;
    `bound` is point, lower or upper. `upper95` bounds a rate that should be 0, `lower95` a share
    that should be 1. `needs` gives, under the name of a missing interval, the number of samples
    that would be enough. `others` holds the figure by other methods. `of` names the kind of users
    it covers, if a run has several.
    """

    unit: str
    of: str | None = None
    n: int
    n_censored: int = 0
    mean: float | None = None
    mean_ci95: tuple[float, float] | None = None
    p50: float | None = None
    p50_ci95: tuple[float, float] | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p99_ci95: tuple[float, float] | None = None
    max: float | None = None
    upper95: float | None = None
    lower95: float | None = None
    method: str
    bound: str = "point"
    lower_bounds: dict[str, float] = {}
    needs: dict[str, int] = {}
    others: dict[str, Any] = {}


Level = Literal["info", "warning", "invalid"]


class Remark(msgspec.Struct, frozen=True, kw_only=True):
    level: Level
    text: str


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """An arm against the reference, in one figure of one metric, over `n` rounds that have both.

    The intervals hold 95 %. Null is not known; `note` then says why, and how many rounds are left
    out.
    """

    arm: str
    reference: str
    n: int
    difference: float | None = None
    difference_ci95: tuple[float, float] | None = None
    ratio: float | None = None
    ratio_ci95: tuple[float, float] | None = None
    note: str | None = None


class Shift(msgspec.Struct, frozen=True, kw_only=True):
    """The first sample against the second, each with its number of censored values. Null is not
    known; `note` then says why."""

    n: int
    n_reference: int
    n_censored: int = 0
    n_reference_censored: int = 0
    shift: float | None = None
    shift_ci95: tuple[float, float] | None = None
    superiority: float | None = None
    note: str | None = None


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity by the exact logs and by another method.

    `bias`: how far the method may lie off by its own rules (least, most): the age of the page, and
    the grain of few scrapes. `agrees`: interval and bias leave the exact value possible.
    """

    metric: str
    unit: str
    method: str
    exact: float
    value: float
    n: int
    difference: float = 0.0
    difference_ci95: tuple[float, float] | None = None
    bias: tuple[float, float] | None = None
    agrees: bool = True
    note: str | None = None


AuditVerdict = Literal[
    "exact", "stuck", "double", "gross", "late", "lower", "unknown", "cannot be judged"
]


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One counter: how far it had to move (from, to; null: no limit), and how far it did."""

    role: str
    name: str | None
    due: tuple[float, float | None] | None
    moved: float | None = msgspec.field(name="told")
    verdict: AuditVerdict
    note: str | None = None


class Audit(msgspec.Struct, kw_only=True):
    """The clients' counts, each of the server's counters against them, and `foreign_traffic`, a
    sentence about other users of the server (null: no sign of any)."""

    client: dict[str, float] = {}
    counters: list[AuditEntry] = []
    foreign_traffic: str | None = None


class LoadSide(msgspec.Struct, frozen=True, kw_only=True):
    """One load process in the load window: each figure is that of its worst ten seconds.
    `cpu_share`: of one core."""

    host: str
    pid: int
    cpu_share: float
    lag_p95_s: float


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """`note` has the reason if there was not enough to judge by; the rest is then null."""

    rule: str
    is_steady: bool | None = None
    warmup_s: float | None = None
    warmup_share: float | None = None
    steady_tps: float | None = None
    note: str | None = None


class ValueRow(msgspec.Struct, kw_only=True):
    """One row: its name, its formula in words, both arms' values, and how they differ.

    Null is not known. `source`: what the source document has. `change`: honoured against ignored.
    """

    name: str
    unit: str
    formula: str
    source: str | None = None
    ignored: float | None
    honoured: float | None
    change: Difference


class TaskSavings(msgspec.Struct, kw_only=True):
    """Effects of early stopping on the `n` answers of a task; `after_answer`: the share of a text
    that comes after its answer (null: several). `source_saved`: the source's figure for
    `saved_of_max`.
    """

    task: str
    n: int
    after_answer: float | None
    stops_early: bool
    saved: float
    saved_of_max: float
    cut_short: float
    source_saved: float


class Stage(msgspec.Struct, kw_only=True):
    """A stage of a cancel in the arm that honours it, and the limits that the source gives it."""

    name: str
    what: str
    p50: float | None
    p99: float | None
    source_s: tuple[float, float] | None


class Value(msgspec.Struct, kw_only=True):
    honoured: str
    ignored: str
    rows: list[ValueRow]
    stages: list[Stage]


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """No server ran: the engine's scheduler was driven in virtual time, and each step took as long
    as the cost model says. Only `simulated` of the `replicas` were, with their part of the load."""

    cost_model: str
    replicas: int = 1
    simulated: int = 1

    def __str__(self) -> str:
        part = f", {self.simulated} of {self.replicas:,} replicas"
        of = part if self.simulated < self.replicas else ""
        return f"simulated (cost model {self.cost_model}{of})"


class OverReplicas(msgspec.Struct, frozen=True, kw_only=True):
    """A figure over the `n` replicas that were simulated: its mean, and `whole`, the sum over all
    replicas (null for what does not add up)."""

    n: int
    mean: float
    mean_ci95: tuple[float, float] | None
    whole: float | None = None
    whole_ci95: tuple[float, float] | None = None


class Summary(msgspec.Struct, kw_only=True):
    """The content of `summary.json`.

    `not_measurable` has a reason for each metric without a figure, `flags` the figures below the
    measurement floor. `agreement`: two methods for one quantity. `steady`: how much of the load was
    warm-up. `wedged`: healthy by its own account, but it serves no request (null: not asked).
    `plan_failed`: why the plan of the load could not be carried out (null: it was).
    `load_processes`: how busy each was. `arrivals`: how many requests an open loop had `planned`,
    and how many were `sent`. In `breakdown`, `leaks_in_use` says how many of the leaked slots and
    blocks are held by requests that still run, `leaks_lost` which of them are known to be lost when
    they are missing; `over_replicas` has {metric: {figure: OverReplicas}} where only some of the
    replicas were simulated.
    """

    schema_version: int = SCHEMA_VERSION
    run_id: str
    status: str
    workload: str | None
    engine: str | None
    model: str | None
    outcomes: dict[str, int]
    metrics: dict[str, Metric]
    not_measurable: dict[str, str] = {}
    flags: dict[str, str] = {}
    validity: list[Remark]
    agreement: list[Agreement] = []
    audit: Audit | None = None
    steady: Steady | None = None
    wedged: bool | None = None
    load_processes: list[LoadSide] = []
    arrivals: dict[str, int] | None = None
    token_counting: str | None = None
    plan_failed: str | None = None
    breakdown: dict[str, Any] = {}
    simulated: Simulated | None = None


class ArmSummary(msgspec.Struct, kw_only=True):
    """One arm over all its rounds. `per_round`: {metric: {figure: a value a round}}."""

    outcomes: dict[str, int]
    metrics: dict[str, Metric]
    not_measurable: dict[str, str] = {}
    flags: dict[str, str] = {}
    token_counting: str | None = None
    per_round: dict[str, dict[str, list[float | None]]]
    breakdown: dict[str, Any] = {}


class ArmsSummary(msgspec.Struct, kw_only=True):
    """The content of the `summary.json` of a workload with arms.

    `reference` is an arm's name, `headlines` as the workload says. `differences`: {metric: {figure:
    an entry for each other arm}}; `shifts`: {metric: {arm: all its requests against all of the
    reference}}; `value` is null unless the workload asks for it.
    """

    schema_version: int = SCHEMA_VERSION
    run_id: str
    status: str
    workload: str
    engine: str | None
    model: str | None
    reference: str
    rounds: int
    headlines: list[str]
    arms: dict[str, ArmSummary]
    differences: dict[str, dict[str, list[Difference]]]
    shifts: dict[str, dict[str, Shift]] = {}
    validity: list[Remark]
    value: Value | None = None
    simulated: Simulated | None = None

    @property
    def metrics(self) -> dict[str, dict[str, Metric]]:
        return {name: arm.metrics for name, arm in self.arms.items()}

    def difference(self, metric: str, figure: str, arm: str) -> Difference | None:
        found = self.differences.get(metric, {}).get(figure, [])
        return next((one for one in found if one.arm == arm), None)
