"""The load as its process will be told it: files read, a trace found and fitted to the server, and
what cannot happen on this server refused before anything is sent.
"""

import shutil
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from harness.errors import ConfigError
from harness.formatting import quantity
from harness.load.client_process import PROGRAM
from harness.records import Way
from harness.run.server import Server
from harness.run.settle import leaves_in_silence
from harness.workload.abandon import AbandonPlan, FilePlan, StayPlan
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
    SlotRecoveryLoad,
)
from harness.workload.plan import LoadPlan
from harness.workload.schedule import Tally, longest_prompt, open_trace, planned_arrivals, tally
from harness.workload.target import Target
from harness.workload.values import MOST_TOKENS
from harness.workload.workload import Workload, rate_problem

MOST_NUMBERS: Final = 100_000


def read_token_counts(path: Path, column: str | None) -> list[int]:
    """All numbers of the file, in its order. Raises ConfigError."""
    values = _read_lines(path) if column is None else _read_column(path, column)
    if not values:
        raise ConfigError(f"{path}: holds no numbers of tokens")
    if len(values) > MOST_NUMBERS:
        raise ConfigError(f"{path}: holds {len(values)} numbers; at most {MOST_NUMBERS} are taken")
    return [_parse(value, path, place) for place, value in enumerate(values, start=1)]


def _read_lines(path: Path) -> list[str]:
    if path.suffix in (".csv", ".parquet"):
        raise ConfigError(f"{path}: say with `column` which of its columns is meant")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def _read_column(path: Path, column: str) -> list[str]:
    import pandas as pd

    try:
        # As text: a number must not change on its way through a float.
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, dtype=str)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
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
            f"{path}: entry {place} is {value!r}, not a number of tokens from 0 to {MOST_TOKENS}"
        )
    return int(number)


def make_load(workload: Workload, target: Target, server: Server, folder: Path) -> AnyLoad:
    """Resolve the load. Files are looked for in `folder`. Raises ConfigError."""
    match workload.load:
        case AbandonLoad() as load:
            _check_ways(load.leavers, target)
            _check_queue(workload, server)
            _check_canaries(workload)
            return _with_files_read(load, folder)
        case CancelStormLoad() as load:
            _check_storm(load, server)
        case ChunkFrontierLoad() as load:
            _check_bystanders(load, server)
        case SlotRecoveryLoad() as load:
            _check_slots(load, server)
            if load.slots is None:
                return load.model_copy(update={"slots": _ask_slots(workload, target, server)})
    return workload.load


def check_files(workload: Workload, folder: Path) -> None:
    """Read the files that the load names, so that a mistake in them is said before any start.

    Raises ConfigError.
    """
    if isinstance(workload.load, AbandonLoad):
        _with_files_read(workload.load, folder)


def load_notes(workload: Workload, target: Target, server: Server) -> list[str]:
    """Notes that a reader of the figures of this load on this server needs."""
    load = workload.load
    notes: list[str] = []
    if not isinstance(load, AbandonLoad):
        return notes
    tells_queue = server.config is not None or "waiting" in target.metrics
    if _is_planned(load, "queued") and not tells_queue:
        notes.append(
            "this server shows no queue: whether users who left as planned while queued really "
            "waited is not known"
        )
    if (note := _silence_note(workload, target)) is not None:
        notes.append(note)
    if not target.extra_body.get("ignore_eos"):
        notes.append(
            f"kind {target.name} is not known to honour `ignore_eos`: an answer may end before "
            "its user leaves"
        )
    return notes


def _silence_note(workload: Workload, target: Target) -> str | None:
    settle = workload.settle
    is_known = target.silence_s is not None or settle.silence_seconds is not None
    if is_known or not leaves_in_silence(workload):
        return None
    settle_s = target.settle_s if settle.seconds is None else settle.seconds
    return (
        f"how soon a server of kind {target.name} gives up a client that leaves without closing "
        f"(stop_reading, vanish) is not known: it is watched for the settle time, {settle_s:g} s; "
        "a request that is still there then counts as forgotten; `settle.silence_seconds` watches "
        "longer"
    )


def prompt_salt(server: Server, *, run_id: str, created_at: str) -> str:
    """A prefix that makes this run's prompts differ from those of any other run and arm.

    A server that was there before may have answered the same seed already, and remember: it would
    answer from its prefix cache. One that is started for the run has nothing to remember.
    """
    return "" if server.engine is not None else f"{created_at}/{run_id}/"


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
            f"{plan.n * answer_tokens} (`load.answer_tokens`): that answer is over by then"
        )
    return numbers


def _is_planned(load: AbandonLoad, name: str) -> bool:
    return any(plan.plan == name for plan in load.leavers)


def _check_ways(leavers: Sequence[AbandonPlan], target: Target) -> None:
    ways = {plan.way for plan in leavers if not isinstance(plan, StayPlan)}
    if Way.CANCEL in ways and target.cancel_path is None:
        raise ConfigError(
            f"way `cancel`: servers of kind {target.name} have no cancel endpoint; give the "
            "target's file a `cancel_path`, or take another way"
        )
    if Way.KILLED in ways and shutil.which(PROGRAM) is None:
        raise ConfigError(f"way `killed` needs the program `{PROGRAM}`, which is not on the PATH")


def _check_queue(workload: Workload, server: Server) -> None:
    """No user waits if each has a slot. The number of users of an open loop is not known."""
    assert isinstance(workload.load, AbandonLoad)
    if not isinstance(workload.arrivals, ClosedArrivals):
        return
    slots, users = server.slots, workload.run.users
    if slots is not None and _is_planned(workload.load, "queued") and users <= slots:
        raise ConfigError(
            f"plan `queued` needs more users than batch slots, or no user waits: `run.users` is "
            f"{users} and the server has {slots} slots"
        )


def _check_canaries(workload: Workload) -> None:
    assert isinstance(workload.load, AbandonLoad)
    canaries, users = workload.load.canaries, workload.run.users
    if canaries >= users and canaries:
        raise ConfigError(
            f"`load.canaries` is {canaries} of `run.users`, {users}: the canaries are among the "
            "users, and there must be others beside them"
        )


def _check_storm(load: CancelStormLoad, server: Server) -> None:
    """A wave leaves when each of its streams has read something, so each must have a slot."""
    slots, streams = server.slots, load.streams + load.stayers
    if slots is not None and streams > slots:
        raise ConfigError(
            f"`load.streams` + `load.stayers` are {streams}, but the server has {slots} slots: "
            "the storm would wait for those in the queue for ever"
        )


def _check_bystanders(load: ChunkFrontierLoad, server: Server) -> None:
    """A long prompt that waits for a slot shows nothing about its prefill."""
    slots = server.slots
    if slots is not None and load.bystanders >= slots:
        raise ConfigError(
            f"`load.bystanders` is {load.bystanders}, but the server has {slots} slots: none is "
            "left for the long prompts"
        )


def _check_slots(load: SlotRecoveryLoad, server: Server) -> None:
    """The probe must wait for the one slot that is left, so all of them must be known."""
    told = server.slots
    if load.slots is not None and told is not None and load.slots != told:
        raise ConfigError(
            f"`load.slots` is {load.slots}, but the server says that it has {told}: leave "
            "`load.slots` out, or start the server with as many"
        )


def _ask_slots(workload: Workload, target: Target, server: Server) -> int:
    if server.slots is not None:
        return server.slots
    raise ConfigError(
        f"workload {workload.name}: a server of kind {target.name} does not tell how many batch "
        f"slots it has, and trying it out showed no limit; say so with --set load.slots=N"
    )


class Replay(NamedTuple):
    """A trace that was found, and the load with its prompts limited to what the server holds."""

    trace: TraceArrivals
    load: AbandonLoad


def fit_to_trace(
    workload: Workload, load: AnyLoad, server: Server, folder: Path
) -> tuple[AnyLoad, AnyArrivals]:
    """The load and the arrivals as the load process gets them. Raises ConfigError.

    A trace is looked for in `folder`, then where the command was given.
    """
    if not isinstance(workload.arrivals, TraceArrivals):
        return load, workload.arrivals
    assert isinstance(load, AbandonLoad)
    context = (server.config or {}).get("max_model_len")
    replay = _replay(workload.arrivals, load, None if context is None else int(context), folder)
    return replay.load, replay.trace


def check_trace(workload: Workload, folder: Path) -> None:
    """Read the trace: a mistake in it is said before anything starts. Raises ConfigError."""
    if not isinstance(workload.arrivals, TraceArrivals):
        return
    assert isinstance(workload.load, AbandonLoad)
    trace, load = _replay(workload.arrivals, workload.load, None, folder)
    latest_s, in_a_second, busiest = None, deque[float](), 0
    for arrival in planned_arrivals(trace, load, seed=0):
        latest_s = arrival.offset_s
        in_a_second.append(latest_s)
        while in_a_second[0] <= latest_s - 1:
            in_a_second.popleft()
        busiest = max(busiest, len(in_a_second))
    if latest_s is None:
        raise ConfigError(
            f"{trace.file}: no request with a prompt and an answer lies in the part to replay "
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


def prompt_limits(load: AbandonLoad, context: int | None) -> tuple[int, int]:
    """How short and how long a replayed prompt may be, in tokens.

    `load.prompt_tokens`, but where the server tells its context at most what this leaves beside the
    longest answer that anybody asks for. Raises ConfigError where that is too little.
    """
    shortest, longest = load.prompt_tokens
    if context is None:
        return shortest, longest
    room = context - max(load.answer_tokens, load.stay_tokens)
    if room < shortest:
        raise ConfigError(
            f"the server's context holds {context} tokens; beside `load.answer_tokens` and "
            f"`load.stay_tokens` it has room for prompts of {room}, but `load.prompt_tokens` begin "
            f"at {shortest}; make the answers shorter"
        )
    return shortest, min(longest, room)


def open_loop_notes(plan: LoadPlan) -> list[str]:
    """Changes that a replay makes to its trace."""
    if not isinstance(plan.arrivals, TraceArrivals):
        return []
    assert isinstance(plan.load, AbandonLoad)
    with open_trace(plan.arrivals.file) as recorded:
        found = tally(recorded, plan.arrivals, plan.load)
    return [_in_words(found, plan.arrivals, plan.load)]


def count_arrivals(plan: LoadPlan) -> int:
    """How many requests the schedule has; none in a closed loop."""
    return sum(1 for _ in plan.planned_arrivals())


def describe_open_loop(schedule: OpenArrivals) -> str:
    """The schedule in a few words."""
    most = f"at most {schedule.max_streams:,} streams at once"
    match schedule:
        case RateArrivals(expected=number, seconds_in_all=seconds):
            return f"about {number:,.0f} arrivals in {seconds:g} s, {most}"
        case TraceArrivals(file=file, speed=speed):
            return f"the trace {Path(file).name} at {speed:g} times its speed, {most}"
        case _:
            raise TypeError(f"{schedule!r} is no schedule")


def _replay(
    arrivals: TraceArrivals, load: AbandonLoad, context: int | None, folder: Path
) -> Replay:
    limits = prompt_limits(load, context)
    trace = arrivals.model_copy(update={"file": str(_find(arrivals.file, folder))})
    if trace.prompt_factor == "fit":
        with open_trace(trace.file) as recorded:
            factor = min(1.0, limits[1] / max(1, longest_prompt(recorded, trace)))
        trace = trace.model_copy(update={"prompt_factor": factor})
    return Replay(trace, load.model_copy(update={"prompt_tokens": list(limits)}))


def _find(file: str, folder: Path) -> Path:
    beside = folder / file
    return (beside if beside.is_file() else Path(file)).resolve()


def _in_words(found: Tally, trace: TraceArrivals, load: AbandonLoad) -> str:
    parts = [f"trace {Path(trace.file).name}: {found.requests:,} requests"]
    if trace.prompt_factor != 1:
        parts.append(f"prompts multiplied by {trace.prompt_factor:.4g}")
    prompts = (found.prompts_cut, found.prompt_tokens_cut, found.prompt_tokens)
    answers = (found.answers_cut, found.answer_tokens_cut, found.answer_tokens)
    parts.append(_cut("prompt", load.prompt_tokens[1], *prompts))
    parts.append(_cut("answer", load.stay_tokens, *answers))
    if found.left_out:
        parts.append(f"left out, as they have no prompt or no answer: {found.left_out:,}")
    if found.has_pages:
        parts.append("prompts share pages as recorded")
    return "; ".join(parts)


def _cut(what: str, longest: int, number: int, tokens: int, whole: int) -> str:
    if not number:
        return f"no {what} was cut"
    share = quantity(tokens / whole, "ratio")
    return f"{what}s cut to {longest:,} tokens: {number:,} ({share} of all {what} tokens are gone)"
