"""The load plan: its files read, its trace fitted to the server, and what this server cannot do
refused before anything is sent.
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
    """All numbers of the file, in order. Raises ConfigError."""
    values = _read_lines(path) if column is None else _read_column(path, column)
    if not values:
        raise ConfigError(f"{path}: holds no token counts")
    if len(values) > MOST_NUMBERS:
        raise ConfigError(
            f"{path}: holds {len(values)} numbers; at most {MOST_NUMBERS} are allowed"
        )
    return [_parse(value, path, place) for place, value in enumerate(values, start=1)]


def _read_lines(path: Path) -> list[str]:
    if path.suffix in (".csv", ".parquet"):
        raise ConfigError(f"{path}: name one of its columns with `column`")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def _read_column(path: Path, column: str) -> list[str]:
    import pandas as pd

    try:
        # As text: a float would change large numbers.
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
            f"{path}: entry {place} is {value!r}, not a token count from 0 to {MOST_TOKENS}"
        )
    return int(number)


def make_load(workload: Workload, target: Target, server: Server, folder: Path) -> AnyLoad:
    """Check the load against the server; its files lie in `folder`. Raises ConfigError."""
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
    """Read the load's files, so that a mistake in them shows before a start. Raises ConfigError."""
    if isinstance(workload.load, AbandonLoad):
        _with_files_read(workload.load, folder)


def load_notes(workload: Workload, target: Target, server: Server) -> list[str]:
    load = workload.load
    notes: list[str] = []
    if not isinstance(load, AbandonLoad):
        return notes
    tells_queue = server.config is not None or "waiting" in target.metrics
    if _is_planned(load, "queued") and not tells_queue:
        notes.append(
            "this server shows no queue: users of plan `queued` may not have waited when they left"
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


def _is_planned(load: AbandonLoad, name: str) -> bool:
    return any(plan.plan == name for plan in load.leavers)


def _check_ways(leavers: Sequence[AbandonPlan], target: Target) -> None:
    ways = {plan.way for plan in leavers if not isinstance(plan, StayPlan)}
    if Way.CANCEL in ways and target.cancel_path is None:
        raise ConfigError(
            f"way `cancel`: servers of kind {target.name} have no cancel endpoint; add "
            "`cancel_path` to the target's file, or choose another way"
        )
    if Way.KILLED in ways and shutil.which(PROGRAM) is None:
        raise ConfigError(f"way `killed` needs the program `{PROGRAM}`, which is not on the PATH")


def _check_queue(workload: Workload, server: Server) -> None:
    """Refuse plan `queued` if each user has a slot. An open loop has no number of users."""
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
            f"`load.canaries` is {canaries}, but `run.users` is {users}: it includes the canaries, "
            "and other users are needed beside them"
        )


def _check_storm(load: CancelStormLoad, server: Server) -> None:
    """A storm leaves once each of its streams has read something, so each needs a slot."""
    slots, streams = server.slots, load.streams + load.stayers
    if slots is not None and streams > slots:
        raise ConfigError(
            f"`load.streams` + `load.stayers` are {streams}, but the server has {slots} slots: "
            "the storm would wait forever for the queued ones"
        )


def _check_bystanders(load: ChunkFrontierLoad, server: Server) -> None:
    """The long prompts need a free slot: one that waits shows nothing about its prefill."""
    slots = server.slots
    if slots is not None and load.bystanders >= slots:
        raise ConfigError(
            f"`load.bystanders` is {load.bystanders}, but the server has {slots} slots: none is "
            "left for the long prompts"
        )


def _check_slots(load: SlotRecoveryLoad, server: Server) -> None:
    """The probe waits for the only slot left, so the number of slots must be exact."""
    told = server.slots
    if load.slots is not None and told is not None and load.slots != told:
        raise ConfigError(
            f"`load.slots` is {load.slots}, but the server has {told}: omit `load.slots`, or start "
            "the server with that many"
        )


def _ask_slots(workload: Workload, target: Target, server: Server) -> int:
    if server.slots is not None:
        return server.slots
    raise ConfigError(
        f"workload {workload.name}: a server of kind {target.name} does not publish its number of "
        f"batch slots, and trying showed no limit; give it with --set load.slots=N"
    )


class Replay(NamedTuple):
    """A trace with its file found, and the load with prompts that fit the server's context."""

    trace: TraceArrivals
    load: AbandonLoad


def fit_to_trace(
    workload: Workload, load: AnyLoad, server: Server, folder: Path
) -> tuple[AnyLoad, AnyArrivals]:
    """The load and the arrivals for the load process. Raises ConfigError.

    A trace's path is relative to `folder`, else to the current directory.
    """
    if not isinstance(workload.arrivals, TraceArrivals):
        return load, workload.arrivals
    assert isinstance(load, AbandonLoad)
    context = (server.config or {}).get("max_model_len")
    replay = _replay(workload.arrivals, load, None if context is None else int(context), folder)
    return replay.load, replay.trace


def check_trace(workload: Workload, folder: Path) -> None:
    """Read the trace, so that a mistake in it shows before a start. Raises ConfigError."""
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


def prompt_limits(load: AbandonLoad, context: int | None) -> tuple[int, int]:
    """The shortest and the longest replayed prompt, in tokens.

    The limits are `load.prompt_tokens`; with a known `context`, prompt and longest answer must fit
    it. Raises ConfigError if even the shortest prompt does not.
    """
    shortest, longest = load.prompt_tokens
    if context is None:
        return shortest, longest
    room = context - max(load.answer_tokens, load.stay_tokens)
    if room < shortest:
        raise ConfigError(
            f"the server's context holds {context} tokens; beside `load.answer_tokens` and "
            f"`load.stay_tokens` it has room for prompts of {room}, but `load.prompt_tokens` "
            f"begins at {shortest}; make the answers shorter"
        )
    return shortest, min(longest, room)


def open_loop_notes(plan: LoadPlan) -> list[str]:
    """The changes that a replay makes to its trace."""
    if not isinstance(plan.arrivals, TraceArrivals):
        return []
    assert isinstance(plan.load, AbandonLoad)
    with open_trace(plan.arrivals.file) as recorded:
        found = tally(recorded, plan.arrivals, plan.load)
    return [_in_words(found, plan.arrivals, plan.load)]


def count_arrivals(plan: LoadPlan) -> int:
    """The number of requests in the schedule; 0 in a closed loop."""
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
        parts.append(f"left out without a prompt or an answer: {found.left_out:,}")
    if found.has_pages:
        parts.append("prompts share pages as recorded")
    return "; ".join(parts)


def _cut(what: str, longest: int, number: int, tokens: int, whole: int) -> str:
    if not number:
        return f"no {what} was cut"
    share = quantity(tokens / whole, "ratio")
    return f"{what}s cut to {longest:,} tokens: {number:,} ({share} of all {what} tokens lost)"
