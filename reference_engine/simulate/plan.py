"""The plan of a simulation: `simulation.json`, and `planned.parquet` with a row for each request.

A cell is some replicas behind one router, with the users that come there. Cells share nothing: each
has its own rows, and its own random numbers.
"""

from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Meta

from reference_engine.config import EngineConfigError
from reference_engine.core.early_stop import EarlyStopping
from reference_engine.faults import FaultError
from reference_engine.flags import read_settings
from reference_engine.serve.settings import ServeSettings

SIMULATION: Final = "simulation.json"
PLANNED: Final = "planned.parquet"

Quantiles = Annotated[list[float], Meta(min_length=2, max_length=1001)]
Positive = Annotated[int, Meta(ge=1)]
GrowthShare = Annotated[float, Meta(ge=0, le=1000)]
Seconds = Annotated[float, Meta(ge=0)]
Router = Literal["random", "round_robin", "least_loaded", "prefix_affine"]
Left = Literal["abandoned", "timed_out", "failed"]


class PlanError(ValueError):
    """A plan that cannot be simulated."""


PLAN_ERRORS: Final = (PlanError, EngineConfigError, FaultError)


class Growth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The share by which a lag grows: `deliver_s` with each token that its step sampled,
    `detect_s`, `between_s` and `schedule_s` with each request that runs, and `schedule_s` with each
    token of the prompts admitted to its step, too. More than `up_to` requests or tokens of a step
    count as so many.
    """

    between_request: GrowthShare = 0.0
    detect_request: GrowthShare = 0.0
    deliver_token: GrowthShare = 0.0
    schedule_request: GrowthShare = 0.0
    schedule_prompt_token: GrowthShare = 0.0
    up_to: Positive = 1_000_000

    def times(self, share: float, requests: int) -> float:
        return 1 + share * min(requests, self.up_to)


class Lags(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times that no cost model has, each as equally spaced quantiles (lowest first), in seconds.

    `send_s`: from the client's sending until the worker has the request. `deliver_s`: from a step's
    end until the client reads its token. `detect_s`, by way of leaving: from t0 until the frontend
    sees it. `signal_s`: from there until the worker hears of it. `step_s`: what a step takes
    beyond its cost. `between_s`: from its end to the next boundary. `schedule_s`: the part of a
    step's cost that passes until its schedule is made. `rest_s`: from the end of a user's request
    to the sending of the next, in a closed loop.
    """

    name: str
    send_s: Quantiles
    deliver_s: Quantiles
    detect_s: dict[str, Quantiles]
    signal_s: Quantiles
    step_s: Quantiles
    between_s: Quantiles
    schedule_s: Quantiles = msgspec.field(default_factory=lambda: [0.0, 0.0])
    rest_s: Quantiles = msgspec.field(default_factory=lambda: [0.0002, 0.0002])
    growth: Growth = Growth()

    def __post_init__(self) -> None:
        named = {name: getattr(self, name) for name in self.__struct_fields__ if name[-2:] == "_s"}
        for way, values in named.pop("detect_s").items():
            named[f"detect_s.{way}"] = values
        for name, values in named.items():
            if values != sorted(values) or values[0] < 0 or not isfinite(values[-1]):
                raise ValueError(f"lags: {name}: quantiles must not be negative and must ascend")


class CellPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first `simulated` of its `replicas` are simulated; its planned rows are their share."""

    replicas: Positive
    simulated: Positive
    router: Router = "least_loaded"

    def __post_init__(self) -> None:
        if self.simulated > self.replicas:
            raise ValueError(f"cells: {self.simulated} of {self.replicas} replicas are simulated")


class Outage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At `at_s` a share of the replicas dies, or is drained: a drained one takes no more requests
    and goes once it has none. They are back so long after they went; never, if null. `rolling`: one
    after another, the next when the one before is back."""

    at_s: Seconds
    kind: Literal["die", "drain"]
    share: Annotated[float, Meta(gt=0, le=1)]
    back_after_s: Seconds | None = None
    rolling: bool = False


class Retry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Users ask again, after a pause, when a request ended so.

    In a closed loop the user's next planned request then repeats the prompt, as live. In an open
    loop the planned request itself is sent again, at most `most` times.
    """

    after: list[Left]
    pause_s: Seconds = 0.5
    most: Annotated[int, Meta(ge=0)] = 3


class Text(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine answers the prompt with it, word by word, unless one of the conditions of the
    request ends the answer before."""

    prompt: str
    answer: str
    stop: tuple[str, ...] = ()
    early_stop: EarlyStopping | None = None


class Simulation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`simulation.json`.

    `engine_flags` are those of `python -m reference_engine`. `load_s`: no request begins after it,
    and streams that are open are cut off; then the engine is watched for `settle_s`. `think`: the
    pause before leaving of rows with pause `think`: "step" (uniform over one step), "none", or
    seconds (uniform up to them). `stop_after_abandons`: the load of a cell ends with so many.
    `max_streams`: of each cell. `texts`: those that rows ask for.
    """

    schema_version: Literal[1] = 1
    seed: int
    engine_flags: list[str]
    lags: Lags
    cells: Annotated[list[CellPlan], Meta(min_length=1)]
    outages: list[Outage] = []
    load_s: Annotated[float, Meta(gt=0)]
    settle_s: Seconds
    think: Literal["step", "none"] | Seconds = "step"
    max_streams: Positive | None = None
    stop_after_abandons: Positive | None = None
    retry: Retry | None = None
    first_token_timeout_s: Annotated[float, Meta(gt=0)] | None = None
    request_timeout_s: Annotated[float, Meta(gt=0)] | None = None
    keep: Literal["rows", "thin"] = "rows"
    texts: list[Text] = []


class PlannedRequest(NamedTuple):
    """A row of `planned.parquet`; the rows of a cell stand in the order of sending: by `offset_s`
    in an open loop; by user, then number, in a closed one (`offset_s` null: sent when the user's
    request before has ended).

    `number` is the request's own in its cell; `user` asks it. Its prompt begins with
    `shared_prefix_tokens` that all requests share, or is made of numbered `pages` of `page_tokens`
    each (a trace). `way` is "" for a user that stays; `leave_after_tokens` null likewise, 0 before
    the first token. `pause`: how long after that token: "think", "race" (around the last step) or
    `pause_ns` ("ns", counted from the sending if `leave_after_tokens` is 0). `ttft_share`: leave at
    this share of the median time to first token so far; a user that has seen none stays, and then
    asks for `stay_tokens`. `text`: the number of the text that answers it; null: words that nobody
    reads, without an end of their own.
    """

    cell: int
    number: int
    user: int
    offset_s: float | None
    prompt_tokens: int
    shared_prefix_tokens: int
    pages: list[int] | None
    page_tokens: float | None
    max_tokens: int
    stay_tokens: int | None
    stream: bool
    n: int
    role: str
    plan: str
    way: str
    leave_after_tokens: int | None
    pause: str
    pause_ns: int | None
    think_fraction: float
    ttft_share: float | None
    arm: str
    text: int | None


PLANNED_SCHEMA: Final = pa.schema(
    [
        pa.field("cell", pa.int32(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),
        pa.field("user", pa.int64(), nullable=False),
        pa.field("offset_s", pa.float64()),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("shared_prefix_tokens", pa.int32(), nullable=False),
        pa.field("pages", pa.list_(pa.int64())),
        pa.field("page_tokens", pa.float64()),
        pa.field("max_tokens", pa.int32(), nullable=False),
        pa.field("stay_tokens", pa.int32()),
        pa.field("stream", pa.bool_(), nullable=False),
        pa.field("n", pa.int32(), nullable=False),
        pa.field("role", pa.string(), nullable=False),
        pa.field("plan", pa.string(), nullable=False),
        pa.field("way", pa.string(), nullable=False),
        pa.field("leave_after_tokens", pa.int32()),
        pa.field("pause", pa.string(), nullable=False),
        pa.field("pause_ns", pa.int64()),
        pa.field("think_fraction", pa.float64(), nullable=False),
        pa.field("ttft_share", pa.float64()),
        pa.field("arm", pa.string(), nullable=False),
        pa.field("text", pa.int32()),
    ]
)
_ROWS_AT_ONCE: Final = 4096


def read_simulation(folder: Path) -> Simulation:
    """Raises PlanError."""
    path = folder / SIMULATION
    try:
        return msgspec.json.decode(path.read_bytes(), type=Simulation)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: {error}") from error


def planned_rows(folder: Path, cell: int) -> Iterator[PlannedRequest]:
    """The rows of a cell, read as they are needed. Raises PlanError."""
    path = folder / PLANNED
    try:
        with pq.ParquetFile(path) as file:
            if missing := set(PLANNED_SCHEMA.names) - set(file.schema_arrow.names):
                raise PlanError(f"{path}: columns are missing: {', '.join(sorted(missing))}")
            for group in range(file.num_row_groups):
                if not _may_have(file.metadata.row_group(group), cell):
                    continue
                for batch in file.iter_batches(_ROWS_AT_ONCE, [group], PLANNED_SCHEMA.names):
                    yield from _rows_of(batch, cell)
    except (OSError, pa.ArrowException) as error:
        raise PlanError(f"{path} cannot be read: {error}") from error


def _may_have(group: Any, cell: int) -> bool:
    """By the statistics of its column `cell`."""
    columns = [group.column(number) for number in range(group.num_columns)]
    [column] = [one for one in columns if one.path_in_schema == "cell"]
    known = column.statistics
    return known is None or not known.has_min_max or known.min <= cell <= known.max


def _rows_of(batch: pa.RecordBatch, cell: int) -> Iterator[PlannedRequest]:
    columns = [batch.column(name).to_pylist() for name in PLANNED_SCHEMA.names]
    return (row for row in map(PlannedRequest._make, zip(*columns, strict=True)) if row[0] == cell)


_NOT_HERE: Final = (
    *("poll_rearms", "grow_memory", "grow_with_answers", "cancel_does_nothing", "abort_by_prefix"),
    *("abort_says_stop", "compute_refused"),
)


def engine_settings(plan: Simulation, environment: Mapping[str, str]) -> ServeSettings:
    """Those that its flags mean. Raises PlanError, or what a live engine raises, for flags that
    cannot hold here."""
    said = StringIO()
    try:
        with redirect_stderr(said):
            settings = read_settings(plan.engine_flags, environment)
    except SystemExit as error:  # argparse has said why, after the usage
        why = said.getvalue().rstrip().rpartition("error: ")[2]
        raise PlanError(f"engine_flags: {why}") from error
    config, faults = settings.config, settings.faults
    if config.runner != "simulated":
        raise EngineConfigError("a simulation has no model: --runner simulated")
    if config.teacher is not None or config.quality_hook is not None:
        raise EngineConfigError(
            "a simulation has texts of its plan: no --teacher, no --quality-hook"
        )
    if settings.tiers.is_launched:
        raise EngineConfigError(
            "a simulation has replicas instead of --workers, --frontends and --disaggregated"
        )
    for name in _NOT_HERE:
        if getattr(faults, name):
            spelled = name.replace("_", "-")
            raise EngineConfigError(f"--fault {spelled} concerns what a simulation does not have")
    return settings
