"""The first word of a report, and how far to trust the run behind it.

The verdict is the gate's: by the workload's own limits on the run itself, else by the gate's
default limits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from harness.analysis.load_side import saturations
from harness.analysis.remarks import MOST_WARM_UP
from harness.analysis.run_facts import ON_CPU
from harness.errors import ConfigError
from harness.export.library import Run
from harness.formatting import DASH, figure_of, number, quantity, spoken_outcome
from harness.gate.judge import Check, GateVerdict, Judgement, judge, refuse
from harness.gate.limits import (
    DEFAULT_LIMITS,
    fewest_abandons,
    of_the_run_alone,
    parse_limits,
    workload_limits,
)
from harness.gate.reports import gravest_first
from harness.gate.run import read_run
from harness.records import WENT_WRONG, ArmsSummary, Summary
from harness.store.run_folder import UnusableRunError
from harness.text.tables import steady_in_words

FULL: Final = 0.9  # of all cores: beyond it a process that wants a core waits for it
MOST_FULL: Final = 0.05  # of the load


class Mark(StrEnum):
    GOOD = "good"
    UNKNOWN = "not judged"
    BAD = "not good"


_GRAVITY: Final = list(Mark)
_MARK_OF: Final = {
    GateVerdict.PASS: Mark.GOOD,
    GateVerdict.FAIL: Mark.BAD,
    GateVerdict.CANNOT_DECIDE: Mark.UNKNOWN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportVerdict:
    """`mark` colours it; each of `lines` is a verdict and its checks. `checks`: a row for each
    limit, with its verdict, the measured value and the reason.
    """

    mark: Mark
    word: str
    basis: str
    lines: tuple[tuple[str, str], ...]
    checks: tuple[tuple[str, str, str, str], ...]


def verdict_of(run: Run) -> ReportVerdict | None:
    """None for arms without limits of their own: one of them may be meant to do badly. A limit
    against a baseline is left to `walkaway gate`: a report is about its run alone.
    """
    workload, basis = run.manifest.workload, "the workload's own limits"
    try:
        limits = of_the_run_alone(workload_limits(workload))
        if not limits and isinstance(run.summary, ArmsSummary):
            return None
        if not limits:
            limits, basis = parse_limits(DEFAULT_LIMITS, source="", arms=()), "the gate's defaults"
        measured, fewest = read_run(run.path), fewest_abandons(workload)
    except UnusableRunError as error:
        judgement = refuse(run.path.name, error.reason, error.remedy)
    except (ConfigError, KeyError, TypeError) as error:
        reason = f"its limits cannot be read: {error}"
        judgement = refuse(run.path.name, reason, "limits that can be")
    else:
        judgement = judge(measured, limits, run=run.path.name, fewest_abandons=fewest)
    return _in_words(judgement, basis)


def _in_words(judgement: Judgement, basis: str) -> ReportVerdict:
    checks = gravest_first(judgement.checks)
    of = {verdict: [one for one in checks if one.verdict is verdict] for verdict in GateVerdict}
    undecided = of[GateVerdict.CANNOT_DECIDE]
    lines = [(GateVerdict.FAIL, _with_reason(one)) for one in of[GateVerdict.FAIL]]
    if len(undecided) == 1:
        lines.append((GateVerdict.CANNOT_DECIDE, _with_reason(undecided[0])))
    elif undecided:
        lines.append((GateVerdict.CANNOT_DECIDE, "; ".join(one.name for one in undecided)))
    if kept := len(of[GateVerdict.PASS]):
        lines.append((GateVerdict.PASS, f"{kept} of {len(checks)} checks"))
    return ReportVerdict(
        mark=_MARK_OF[judgement.verdict],
        word=str(judgement.verdict),
        basis=f"by {basis}, one by one below",
        lines=tuple((str(verdict), text) for verdict, text in lines),
        checks=tuple(
            (one.name, str(one.verdict), one.measured or DASH, one.reason) for one in checks
        ),
    )


def _with_reason(one: Check) -> str:
    measured = f"{one.measured}, " if one.measured else ""
    return f"{one.name}: {measured}{one.reason}"


@dataclass(frozen=True, slots=True)
class Trust:
    """One foundation of the figures, and the findings about it. `brief`: the form for the first
    screen, if it belongs there.
    """

    what: str
    mark: Mark
    text: str
    brief: str | None = None


def trust(run: Run) -> list[Trust]:
    client, window = _client(run.whole), _steady(run.whole)
    return [client, _machine(run), window, _answers(run), *_floor(run), _known(run)]


def trust_of_arms(run: Run) -> list[Trust]:
    return [*_of_arms(_client, run), *_of_arms(_steady, run)]


def _of_arms(judge: Callable[[Summary], Trust], run: Run) -> Iterator[Trust]:
    worst: dict[str, tuple[Trust, str]] = {}
    for arm in run.arms:
        of_arm = {name: one for name, one in run.rounds.items() if name.partition("-")[2] == arm}
        if those := [(judge(one.whole), name) for name, one in of_arm.items()]:
            worst[arm] = max(those, key=lambda pair: _GRAVITY.index(pair[0].mark))
    are_alike = len({one.brief for one, _ in worst.values()}) == 1
    for place, (arm, (one, name)) in enumerate(worst.items()):
        brief = one.brief if are_alike else f"{arm}: {one.brief}"
        is_brief = place == 0 if are_alike else one.mark is not Mark.GOOD
        text = f"{one.text} (in {name})"
        yield replace(one, what=f"{one.what}, {arm}", text=text, brief=brief if is_brief else None)


def _client(summary: Summary) -> Trust:
    sides = summary.load_processes
    if not sides:
        text = "not known whether it kept up: it was watched for under a second"
        return Trust("client", Mark.UNKNOWN, text, "client not watched")
    busiest = quantity(max(side.cpu_share for side in sides), "ratio")
    latest = quantity(max(side.lag_p95_s for side in sides), "s")
    used = (
        f"in its worst ten seconds {busiest} of a core, and 5 % of its ticks noticed over "
        f"{latest} late"
    )
    if any(saturations(sides, summary.metrics)):
        return Trust("client", Mark.BAD, f"saturated: {used}", "client saturated")
    return Trust("client", Mark.GOOD, f"not saturated: {used}", "client ok")


def _machine(run: Run) -> Trust:
    """The machine of the load, which is also the server's if the run started the server. A client
    that used little may still have waited long for its turn.
    """
    cores = run.manifest.hardware.get("cores")
    during = run.frames.cpu["t_ns"].between(run.clock.started_ns, run.clock.ended_ns)
    samples = run.frames.cpu[during]
    is_whole = samples["process"] == "machine"
    if not cores or not is_whole.any():
        text = "not known how busy it was: it was not sampled during the load"
        return Trust("machine", Mark.UNKNOWN, text)
    busy = samples.loc[is_whole, "cores"]
    own = samples.loc[~is_whole, "cores"].sum() / len(busy)
    mean = f"{number(busy.mean())} of {quantity(cores, 'cores')}"
    used = f"{mean} busy on average, {number(own)} of them by this run"
    share = float((busy > FULL * cores).mean())
    if share <= MOST_FULL:
        return Trust("machine", Mark.GOOD, used, "machine ok")
    often = quantity(round(share, 2), "ratio")
    text = (
        f"over {quantity(FULL, 'ratio')} busy in {often} of the load, {used}: a process that "
        "wanted a core then waited for it, and the times include that wait"
    )
    return Trust("machine", Mark.BAD, text, f"machine full {often} of the time")


def _steady(summary: Summary) -> Trust:
    steady = summary.steady
    is_steady = None if steady is None else steady.is_steady
    text = f"{'steady ' if is_steady else ''}{steady_in_words(steady)}"
    share = None if steady is None else steady.warmup_share
    if is_steady and share is not None and share > MOST_WARM_UP:
        much = quantity(share, "ratio")
        text = f"{much} of the load were warm-up: {text}"
        return Trust("window", Mark.BAD, text, f"window {much} warm-up")
    mark, brief = {
        True: (Mark.GOOD, "window steady"),
        False: (Mark.BAD, "window not steady"),
        None: (Mark.UNKNOWN, "window not judged"),
    }[is_steady]
    return Trust("window", mark, text, brief)


def _answers(run: Run) -> Trust:
    outcomes = run.whole.outcomes
    wrong = {one: n for one in WENT_WRONG if (n := outcomes.get(one.value, 0))}
    if not wrong:
        return Trust("answers", Mark.GOOD, "no request went wrong")
    said = ", ".join(f"{n:,} {spoken_outcome(one)}" for one, n in wrong.items())
    text = f"{said}, of {sum(outcomes.values()):,} requests"
    return Trust("answers", Mark.BAD, text, f"{sum(wrong.values()):,} went wrong")


def _floor(run: Run) -> Iterator[Trust]:
    lag = run.metrics.get("client_lag_s")
    if lag is not None and lag.p99 is not None:
        flagged = len(run.whole.flags)
        shorter = f"a shorter time that a client stamped is flagged ({flagged})"
        mark = Mark.BAD if flagged else Mark.GOOD
        yield Trust("floor", mark, f"{figure_of(lag, 'p99')}: {shorter}")


def _known(run: Run) -> Trust:
    n = sum(reason != ON_CPU for reason in run.whole.not_measurable.values())
    if not n:
        but = " but those of a GPU" if run.whole.not_measurable else ""
        return Trust("known", Mark.GOOD, f"every figure{but} could be measured")
    text = f"{quantity(n, 'figures')} could not be measured; each with its reason below"
    return Trust("known", Mark.UNKNOWN, text, f"{n} not measurable")
