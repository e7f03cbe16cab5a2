"""The schedule as the load process will be told it: the trace found and read, its lengths fitted to
the server, and what that changed put into words.
"""

from collections import deque
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.formatting import quantity
from harness.run.server import Server
from harness.workload.arrivals import (
    ClosedArrivals,
    RateArrivals,
    RateSettings,
    TraceArrivals,
    expected_arrivals,
)
from harness.workload.caps import rate_problem
from harness.workload.load import AbandonSettings
from harness.workload.plan import LoadPlan, OpenLoop
from harness.workload.schedule import open_trace, planned_arrivals
from harness.workload.traces import Tally, TraceReplay, longest_prompt, tally
from harness.workload.workload import Workload


def make_open_loop(workload: Workload, server: Server, folder: Path) -> OpenLoop | None:
    """What replaces users who wait for their answers; None for a closed loop. Raises ConfigError.

    A trace is looked for in `folder`, then where the command was given.
    """
    arrivals = workload.arrivals
    if isinstance(arrivals, ClosedArrivals):
        return None
    if isinstance(arrivals, RateSettings):
        return OpenLoop(schedule=arrivals.schedule, max_streams=arrivals.max_streams)
    context = (server.config or {}).get("max_model_len")
    assert isinstance(workload.load, AbandonSettings)
    limits = prompt_limits(workload.load, None if context is None else int(context))
    replay = _replay(arrivals, workload.load, limits, folder)
    return OpenLoop(schedule=replay, max_streams=arrivals.max_streams)


def check_trace(workload: Workload, folder: Path) -> None:
    """Read the trace: a mistake in it is said before anything starts. Raises ConfigError."""
    if not isinstance(workload.arrivals, TraceArrivals):
        return
    assert isinstance(workload.load, AbandonSettings)
    limits = prompt_limits(workload.load, None)
    replay = _replay(workload.arrivals, workload.load, limits, folder)
    latest_s, in_a_second, busiest = None, deque[float](), 0
    for arrival in planned_arrivals(replay, seed=0):
        latest_s = arrival.offset_s
        in_a_second.append(latest_s)
        while in_a_second[0] <= latest_s - 1:
            in_a_second.popleft()
        busiest = max(busiest, len(in_a_second))
    if latest_s is None:
        raise ConfigError(
            f"{replay.file}: no request with a prompt and an answer lies in the part to replay "
            "(`arrivals.from_s`, `arrivals.seconds`)"
        )
    if latest_s >= workload.run.max_seconds:
        raise ConfigError(
            f"{replay.file}: the part to replay takes {latest_s:g} s, but the load ends after "
            f"`run.max_seconds`, {workload.run.max_seconds:g} s; cut it with `arrivals.seconds`, "
            "raise `arrivals.speed`, or raise the limit"
        )
    if busiest > workload.run.most_rate:
        raise ConfigError(f"{replay.file}: {rate_problem(busiest, workload.run.most_rate)}")


def prompt_limits(load: AbandonSettings, context: int | None) -> tuple[int, int]:
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
    """What a replay changes of its trace."""
    if plan.open_loop is None or isinstance(plan.open_loop.schedule, RateArrivals):
        return []
    replay = plan.open_loop.schedule
    with open_trace(replay.file) as recorded:
        return [_in_words(tally(recorded, replay), replay)]


def count_arrivals(plan: LoadPlan) -> int:
    """How many requests the schedule has; none in a closed loop."""
    if plan.open_loop is None:
        return 0
    return sum(1 for _ in planned_arrivals(plan.open_loop.schedule, seed=plan.seed))


def describe_open_loop(open_loop: OpenLoop) -> str:
    """The schedule in a few words."""
    most = f"at most {open_loop.max_streams:,} streams at once"
    match open_loop.schedule:
        case RateArrivals(stretches=stretches):
            seconds = sum(stretch.seconds for stretch in stretches)
            number = expected_arrivals(stretches)
            return f"about {number:,.0f} arrivals in {seconds:g} s, {most}"
        case TraceReplay(file=file, speed=speed):
            return f"the trace {Path(file).name} at {speed:g} times its speed, {most}"


def _replay(
    arrivals: TraceArrivals, load: AbandonSettings, limits: tuple[int, int], folder: Path
) -> TraceReplay:
    values: dict[str, Any] = arrivals.model_dump(include={"from_s", "seconds", "speed"})
    replay = TraceReplay(
        **values,
        file=str(_find(arrivals.file, folder)),
        prompt_factor=1.0,
        prompt_tokens=limits,
        answer_tokens=load.stay_tokens,
    )
    if arrivals.prompt_factor != "fit":
        replay.prompt_factor = float(arrivals.prompt_factor)
        return replay
    with open_trace(replay.file) as recorded:
        replay.prompt_factor = min(1.0, limits[1] / max(1, longest_prompt(recorded, replay)))
    return replay


def _find(file: str, folder: Path) -> Path:
    beside = folder / file
    return (beside if beside.is_file() else Path(file)).resolve()


def _in_words(found: Tally, replay: TraceReplay) -> str:
    parts = [f"trace {Path(replay.file).name}: {found.requests:,} requests"]
    if replay.prompt_factor != 1:
        parts.append(f"prompts multiplied by {replay.prompt_factor:.4g}")
    prompts = (found.prompts_cut, found.prompt_tokens_cut, found.prompt_tokens)
    answers = (found.answers_cut, found.answer_tokens_cut, found.answer_tokens)
    parts.append(_cut("prompt", replay.prompt_tokens[1], *prompts))
    parts.append(_cut("answer", replay.answer_tokens, *answers))
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
