"""The schedule as the load process will be told it: the trace found and read, its lengths fitted to
the server, and what that changed put into words.
"""

from collections import deque
from pathlib import Path
from typing import NamedTuple

from harness.errors import ConfigError
from harness.formatting import quantity
from harness.run.server import Server
from harness.workload.arrivals import AnyArrivals, OpenArrivals, RateArrivals, TraceArrivals
from harness.workload.load import AbandonLoad, AnyLoad
from harness.workload.plan import LoadPlan
from harness.workload.schedule import Tally, longest_prompt, open_trace, planned_arrivals, tally
from harness.workload.workload import Workload, rate_problem


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
    """What a replay changes of its trace."""
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
