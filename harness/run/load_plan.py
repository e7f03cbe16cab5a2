"""The load plan: its files read, its trace fitted to the server, and what this server cannot do
refused before anything is sent.
"""

import shutil
from collections import deque
from pathlib import Path
from typing import Final

from harness.client.connection import CLIENT_PROGRAM
from harness.client.dialect import dialect_of
from harness.errors import ConfigError, in_words
from harness.formatting import quantity
from harness.records import Delivery, Protocol, Way
from harness.run.server import Server
from harness.run.settle import leaves_in_silence
from harness.workload.abandon import FilePlan, StayPlan, ToolCallPlan
from harness.workload.arrivals import (
    AnyArrivals,
    ClosedArrivals,
    OpenArrivals,
    RateArrivals,
    TraceArrivals,
)
from harness.workload.load import (
    AbandonLoad,
    AnyLoad,
    CancelStormLoad,
    ChunkFrontierLoad,
    OccupancyLoad,
    SlotRecoveryLoad,
)
from harness.workload.plan import LoadPlan
from harness.workload.schedule import longest_prompt, open_trace, planned_arrivals, tally
from harness.workload.target import Target
from harness.workload.values import MOST_TOKENS
from harness.workload.workload import Workload, choose_protocol, rate_problem

MOST_NUMBERS: Final = 100_000

ANY_SERVER: Final = "openai"  # the kind of which nothing is known


def read_token_counts(path: Path, column: str | None) -> list[int]:
    if column is None and path.suffix in (".csv", ".parquet"):
        raise ConfigError(f"{path}: name one of its columns with `column`")
    try:
        values = _read_lines(path) if column is None else _read_column(path, column)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {in_words(error)}") from error
    if not values:
        raise ConfigError(f"{path}: holds no token counts")
    if len(values) > MOST_NUMBERS:
        raise ConfigError(
            f"{path}: holds {len(values)} numbers; at most {MOST_NUMBERS} are allowed"
        )
    return [_parse(value, path, place) for place, value in enumerate(values, start=1)]


def _read_lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    return [line.strip() for line in lines if line.strip()]


def _read_column(path: Path, column: str) -> list[str]:
    import pandas as pd

    # As text: a float would change large numbers.
    table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, dtype=str)
    if column not in table.columns:
        names = ", ".join(str(name) for name in table.columns)
        raise ConfigError(f"{path}: has no column {column!r}; it has: {names}")
    return [str(value) for value in table[column]]


def _parse(value: str, path: Path, place: int) -> int:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not number.is_integer() or not 0 <= number <= MOST_TOKENS:
        raise ConfigError(
            f"{path}: entry {place} is {value!r}, not a token count from 0 to {MOST_TOKENS}"
        )
    return int(number)


def make_load(workload: Workload, target: Target, server: Server, folder: Path) -> AnyLoad:
    """Check the load against the server; its files lie in `folder`. Raises ConfigError."""
    load, slots = workload.load, server.slots
    if isinstance(load, AbandonLoad):
        if choose_protocol(workload, target) is Protocol.HTTP:
            _check_ways(load, target)
        if load.canaries and load.canaries >= workload.run.users:
            raise ConfigError(
                f"`load.canaries` is {load.canaries}, but `run.users` is {workload.run.users}: it "
                "includes the canaries, and other users are needed as well"
            )
        load = _with_files_read(load, folder)
    if slots is not None and (why := _slot_problem(workload, slots)) is not None:
        raise ConfigError(why)
    if isinstance(load, SlotRecoveryLoad | OccupancyLoad) and load.slots is None:
        if slots is None:
            raise ConfigError(
                f"workload {workload.name}: a server of kind {target.name} does not publish its "
                f"number of batch slots, and {server.slots_unknown}"
            )
        return load.model_copy(update={"slots": slots})
    return load


def check_files(workload: Workload, folder: Path) -> None:
    """Read the load's files, so that a mistake in them shows before a start. Raises ConfigError."""
    if isinstance(workload.load, AbandonLoad):
        _with_files_read(workload.load, folder)


def _with_files_read(load: AbandonLoad, folder: Path) -> AbandonLoad:
    if not load.mix:
        return load
    plans = [
        plan.with_counts(_read_counts(plan, folder / plan.file, load.answer_tokens))
        if isinstance(plan, FilePlan)
        else plan
        for plan in load.leavers
    ]
    return load.model_copy(update={"mix": plans})


def _read_counts(plan: FilePlan, path: Path, answer_tokens: int) -> list[int]:
    numbers = read_token_counts(path, plan.column)
    if max(numbers) >= plan.n * answer_tokens:
        raise ConfigError(
            f"{path}: goes up to {max(numbers)} tokens, but an answer has "
            f"{plan.n * answer_tokens} (`load.answer_tokens`): the answer ends before that"
        )
    return numbers


def _check_ways(load: AbandonLoad, target: Target) -> None:
    ways = {plan.way for plan in load.leavers if not isinstance(plan, StayPlan)}
    if Way.CANCEL in ways and target.cancel_path is None:
        raise ConfigError(
            f"way `cancel`: servers of kind {target.name} have no cancel endpoint; add "
            "`cancel_path` to the target's file, or choose another way"
        )
    _check_documents(load, target)
    has_calls = any(isinstance(plan, ToolCallPlan) for plan in load.leavers)
    if has_calls and load.session is None and dialect_of(target).name == "completions":
        raise ConfigError(
            "plan `tool_call`: completions have no tool calls; take a target whose `path` is of "
            "another dialect, or a `load.session`"
        )
    if Way.KILLED in ways and shutil.which(CLIENT_PROGRAM) is None:
        raise ConfigError(
            f"way `killed` needs the program `{CLIENT_PROGRAM}`, which is not on the PATH"
        )


def _check_documents(load: AbandonLoad, target: Target) -> None:
    dialect = dialect_of(target)
    if dialect.generates and any(plan.documents > 1 for plan in load.leavers):
        raise ConfigError(
            f"`documents`: {target.path} of a server of kind {target.name} generates text; take a "
            "target whose `path` ends in /embeddings or /rerank"
        )
    is_whole = load.stay_share == 0 and all(
        plan.delivery is Delivery.UNARY for plan in load.leavers
    )
    if not dialect.generates and load.session is None and not is_whole:
        raise ConfigError(
            f"{target.path} answers in one piece: each entry of the `mix` needs `delivery = "
            '"unary"`, and users who stay an entry `never`, with `stay_share = 0`'
        )


def _has_queued(load: AbandonLoad) -> bool:
    return any(plan.plan == "queued" for plan in load.leavers)


def _slot_problem(workload: Workload, slots: int) -> str | None:
    users, is_closed = workload.run.users, isinstance(workload.arrivals, ClosedArrivals)
    match workload.load:
        case AbandonLoad() as load if is_closed and users <= slots and _has_queued(load):
            return (
                "plan `queued` needs more users than batch slots, or no user waits: `run.users` is "
                f"{users} and the server has {slots} slots"
            )
        case CancelStormLoad(streams=streams, stayers=stayers) if streams + stayers > slots:
            return (
                f"`load.streams` + `load.stayers` are {streams + stayers}, but the server has "
                f"{slots} slots: the storm would wait forever for the queued ones"
            )
        case ChunkFrontierLoad(bystanders=bystanders) if bystanders >= slots:
            return (
                f"`load.bystanders` is {bystanders}, but the server has {slots} slots: none is "
                "left for the long prompts"
            )
        # The probe waits for the only slot left, so the number of slots must be exact.
        case SlotRecoveryLoad(slots=int(chosen)) | OccupancyLoad(slots=int(chosen)) if (
            chosen != slots
        ):
            return (
                f"`load.slots` is {chosen}, but the server has {slots}: omit `load.slots`, or "
                "start the server with that many"
            )
        case _:
            return None


def load_notes(workload: Workload, target: Target, server: Server) -> list[str]:
    load = workload.load
    if not isinstance(load, AbandonLoad):
        return []
    notes = []
    if _has_queued(load) and server.config is None and "waiting" not in target.metrics:
        notes.append(
            "this server shows no queue: users of plan `queued` may not have waited when they left"
        )
    if (note := _silence_note(workload, target)) is not None:
        notes.append(note)
    if (note := _priority_note(workload, load, target)) is not None:
        notes.append(note)
    if target.name == ANY_SERVER or not target.extra_body.get("ignore_eos"):
        notes.append(
            f"kind {target.name} is not known to honour `ignore_eos`: an answer may end before "
            "its user leaves"
        )
    return notes


def _priority_note(workload: Workload, load: AbandonLoad, target: Target) -> str | None:
    if all(plan.priority is None for plan in load.leavers):
        return None
    if choose_protocol(workload, target) is Protocol.GRPC:
        return "no request over gRPC has a priority: those of the `mix` are not sent"
    if target.priority_key is None:
        return (
            f"a server of kind {target.name} takes no priority: those of the `mix` are not sent "
            "(`priority_key` in the target's file names its field)"
        )
    return None


def _silence_note(workload: Workload, target: Target) -> str | None:
    settle = workload.settle
    is_known = target.silence_s is not None or settle.silence_seconds is not None
    if is_known or not leaves_in_silence(workload):
        return None
    settle_s = target.settle_s if settle.seconds is None else settle.seconds
    return (
        f"how soon a server of kind {target.name} gives up a client that leaves without closing "
        f"(stop_reading, vanish) is not known: it is watched for the settle time, {settle_s:g} s, "
        "and a request that is still running then counts as a ghost; "
        "`settle.silence_seconds` makes it longer"
    )


def prompt_salt(server: Server, *, run_id: str, created_at: str) -> str:
    """A prefix that makes this run's prompts differ from those of any other run and arm.

    A server that was already running may have cached the same seed's prompts. One started for the
    run has an empty cache.
    """
    return "" if server.engine is not None else f"{created_at}/{run_id}/"


def fit_to_trace(
    workload: Workload, load: AnyLoad, server: Server, folder: Path
) -> tuple[AnyLoad, AnyArrivals]:
    """The load and the arrivals for the load process. Raises ConfigError.

    A trace's path is relative to `folder`, else to the current directory.
    """
    if not isinstance(workload.arrivals, TraceArrivals):
        return load, workload.arrivals
    assert isinstance(load, AbandonLoad)
    return _replay(workload.arrivals, load, server.context, folder)


def check_trace(workload: Workload, folder: Path) -> None:
    if not isinstance(workload.arrivals, TraceArrivals):
        return
    assert isinstance(workload.load, AbandonLoad)
    load, trace = _replay(workload.arrivals, workload.load, None, folder)
    latest_s, in_a_second, busiest = None, deque[float](), 0
    for arrival in planned_arrivals(trace, load, seed=0):
        latest_s = arrival.offset_s
        in_a_second.append(latest_s)
        while in_a_second[0] <= latest_s - 1:
            in_a_second.popleft()
        busiest = max(busiest, len(in_a_second))
    if latest_s is None:
        raise ConfigError(
            f"{trace.file}: the part to replay holds no request with a prompt and an answer "
            "(`arrivals.from_s`, `arrivals.seconds`)"
        )
    if latest_s >= workload.run.max_seconds:
        raise ConfigError(
            f"{trace.file}: the part to replay takes {latest_s:g} s, but the load ends after "
            f"`run.max_seconds`, {workload.run.max_seconds:g} s; cut it with `arrivals.seconds`, "
            "raise `arrivals.speed`, or raise the limit"
        )
    if busiest > workload.run.most_rate:
        raise ConfigError(f"{trace.file}: {rate_problem(busiest, workload.run.most_rate)}")


def _replay(
    arrivals: TraceArrivals, load: AbandonLoad, context: int | None, folder: Path
) -> tuple[AbandonLoad, TraceArrivals]:
    shortest, longest = load.prompt_tokens
    if context is not None:
        room = context - max(load.answer_tokens, load.stay_tokens)
        if room < shortest:
            raise ConfigError(
                f"the server's context holds {context} tokens; the larger of `load.answer_tokens` "
                f"and `load.stay_tokens` leaves room for prompts of {room}, but "
                f"`load.prompt_tokens` begins at {shortest}; make the answers shorter"
            )
        longest = min(longest, room)
    by_workload = folder / arrivals.file
    file = (by_workload if by_workload.is_file() else Path(arrivals.file)).resolve()
    trace = arrivals.model_copy(update={"file": str(file)})
    if trace.prompt_factor == "fit":
        with open_trace(trace.file, trace.time_unit) as recorded:
            factor = min(1.0, longest / max(1, longest_prompt(recorded, trace)))
        trace = trace.model_copy(update={"prompt_factor": factor})
    return load.model_copy(update={"prompt_tokens": [shortest, longest]}), trace


def open_loop_notes(plan: LoadPlan) -> list[str]:
    trace, load = plan.arrivals, plan.load
    if not isinstance(trace, TraceArrivals):
        return []
    assert isinstance(load, AbandonLoad)
    with open_trace(trace.file, trace.time_unit) as recorded:
        found = tally(recorded, trace, load)
    parts = [f"trace {Path(trace.file).name}: {found.requests:,} requests"]
    if trace.prompt_factor != 1:
        parts.append(f"prompts multiplied by {trace.prompt_factor:.4g}")
    prompts = (found.prompts_cut, found.prompt_tokens_cut, found.prompt_tokens)
    answers = (found.answers_cut, found.answer_tokens_cut, found.answer_tokens)
    parts.append(_cut("prompt", load.prompt_tokens[1], *prompts))
    parts.append(_cut("answer", load.stay_tokens, *answers))
    if found.left_out:
        parts.append(f"left out without a prompt or an answer: {found.left_out:,}")
    if found.has_pages:
        parts.append("prompts share pages as recorded")
    return ["; ".join(parts)]


def _cut(what: str, longest: int, number: int, tokens: int, whole: int) -> str:
    if not number:
        return f"no {what} was cut"
    share = quantity(tokens / whole, "ratio")
    return f"{what}s cut to {longest:,} tokens: {number:,} ({share} of all {what} tokens lost)"


def count_arrivals(plan: LoadPlan) -> int:
    return sum(1 for _ in plan.planned_arrivals())


def describe_open_loop(schedule: OpenArrivals) -> str:
    most = f"at most {schedule.max_streams:,} streams at once"
    match schedule:
        case RateArrivals(expected=number, seconds_in_all=seconds):
            return f"about {number:,.0f} arrivals in {seconds:g} s, {most}"
        case TraceArrivals(file=file, speed=speed):
            return f"the trace {Path(file).name} at {speed:g} times its speed, {most}"
        case _:
            raise TypeError(f"{schedule!r} is no schedule")
