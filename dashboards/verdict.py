"""The first word of a report, and how far to trust the run behind it.

The verdict is the gate's: by the workload's own limits on the run itself, else by the gate's
default limits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    Limit,
    fewest_abandons,
    of_the_run_alone,
    parse_limits,
    workload_limits,
)
from harness.gate.reports import gravest_first
from harness.gate.run import read_run
from harness.metrics import CANCEL_LATENCY, GHOST_RATE, METRICS, SLOT_RECOVERY, WASTED_TOKENS
from harness.records import WENT_WRONG, ArmsSummary, Summary
from harness.store.run_folder import UnusableRunError
from harness.text.tables import steady_in_words

FULL: Final = 0.9  # of all cores: beyond it a process that wants a core waits for it
MOST_FULL: Final = 0.05  # of the load
MOST_LINES: Final = 6  # about limits, on the first screen
MOST_BRIEF: Final = 3  # arms that are named there
# The headline on whose card a limit stands; a part of a headline stands on its card, too.
_CARD_OF: Final = {
    **dict.fromkeys((CANCEL_LATENCY, "cancel_latency_prefill_s"), CANCEL_LATENCY),
    **dict.fromkeys((GHOST_RATE, "removed_at_first_boundary"), CANCEL_LATENCY),
    **dict.fromkeys((WASTED_TOKENS, "wasted_prompt_tokens", "energy_wasted_j"), WASTED_TOKENS),
    **dict.fromkeys((SLOT_RECOVERY, "slot_refill_s", "refilled_next_schedule"), SLOT_RECOVERY),
    **dict.fromkeys(("leaked_slots", "leaked_blocks"), SLOT_RECOVERY),
}


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
class CardVerdict:
    """How a headline does by its limits: a mark, that in words, and the limits not kept."""

    mark: Mark
    text: str
    limits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportVerdict:
    """`mark` colours it; each of `lines` is a verdict and its checks; `apart` are the lines of
    checks that are on no card. `checks`: a row for each limit, with its verdict, the measured value
    and the reason. `on_cards`: by the headline that the card is of.
    """

    mark: Mark
    word: str
    basis: str
    lines: tuple[tuple[str, str], ...]
    apart: tuple[tuple[str, str], ...]
    kept: str
    checks: tuple[tuple[str, str, str, str], ...]
    on_cards: Mapping[str, CardVerdict]


def verdict_of(run: Run) -> ReportVerdict | None:
    """None for arms without limits of their own: one of them may be meant to do badly. A limit
    against a baseline is left to `walkaway gate`: a report is about its run alone.
    """
    workload, basis = run.manifest.workload, "the workload's own limits"
    limits: list[Limit] = []
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
    return _in_words(judgement, basis, {one.text: _card_of(one.metric) for one in limits})


def _card_of(metric: str) -> str | None:
    return _CARD_OF.get(metric) or _CARD_OF.get(METRICS[metric].part_of or "")


def _in_words(judgement: Judgement, basis: str, card_of: Mapping[str, str | None]) -> ReportVerdict:
    """`card_of`: by the text of a limit."""
    checks = gravest_first(judgement.checks)
    on_cards: dict[str | None, list[Check]] = {}
    for one in checks:
        on_cards.setdefault(card_of.get(one.name), []).append(one)
    kept = sum(one.verdict is GateVerdict.PASS for one in checks)
    passed = f"{kept} of {len(checks)} checks"
    return ReportVerdict(
        mark=_MARK_OF[judgement.verdict],
        word=str(judgement.verdict),
        basis=f"by {basis}, one by one below",
        lines=(*_lines(checks), *([(str(GateVerdict.PASS), passed)] if kept else [])),
        apart=(*_lines(on_cards.get(None, ())),),
        kept=f"{passed} passed",
        checks=tuple(
            (one.name, str(one.verdict), one.measured or DASH, f"{one.reason}{_remedy(one)}")
            for one in checks
        ),
        on_cards={name: _on_card(of) for name, of in on_cards.items() if name is not None},
    )


def _lines(checks: Iterable[Check]) -> Iterator[tuple[str, str]]:
    of: dict[GateVerdict, list[Check]] = {verdict: [] for verdict in GateVerdict}
    for one in checks:
        of[one.verdict].append(one)
    failed, undecided = of[GateVerdict.FAIL], of[GateVerdict.CANNOT_DECIDE]
    for one in failed[:MOST_LINES]:
        yield str(GateVerdict.FAIL), _with_reason(one)
    if more := len(failed[MOST_LINES:]):
        yield str(GateVerdict.FAIL), f"{quantity(more, 'limits')} more"
    if len(undecided) == 1:
        yield str(GateVerdict.CANNOT_DECIDE), _with_reason(undecided[0])
    elif undecided:
        more = len(undecided[MOST_LINES:])
        named = "; ".join(one.name for one in undecided[:MOST_LINES])
        yield str(GateVerdict.CANNOT_DECIDE), f"{named}; {more:,} more" if more else named


def _on_card(checks: Sequence[Check]) -> CardVerdict:
    """`checks`: of one headline, the gravest first."""
    gravest = checks[0].verdict
    alike = [one for one in checks if one.verdict is gravest]
    of = quantity(len(checks), "limits")
    counted = f"{len(alike)} of {of}"
    if len(alike) == len(checks):
        counted = "its limit" if len(checks) == 1 else f"its {of}"
    words = {
        GateVerdict.FAIL: f"fails {counted}",
        GateVerdict.CANNOT_DECIDE: f"{counted} not decided",
        GateVerdict.PASS: f"keeps {counted}",
    }
    is_kept = gravest is GateVerdict.PASS
    named = [one.name + (f": {one.measured}" if one.measured else "") for one in alike]
    return CardVerdict(
        mark=_MARK_OF[gravest], text=words[gravest], limits=() if is_kept else tuple(named)
    )


def _remedy(one: Check) -> str:
    return f"; would decide: {one.to_decide}" if one.to_decide else ""


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
        if found := [(judge(one.whole), name) for name, one in of_arm.items()]:
            worst[arm] = max(found, key=lambda pair: _GRAVITY.index(pair[0].mark))
    briefs = _briefs({arm: one for arm, (one, _) in worst.items()})
    for arm, (one, name) in worst.items():
        text = f"{one.text} (in {name})"
        yield replace(one, what=f"{one.what}, {arm}", text=text, brief=briefs.get(arm))


def _briefs(worst: Mapping[str, Trust]) -> dict[str, str | None]:
    """The briefs by arm: one for all if alike, else one for each that is not good, if few are."""
    flawed = {arm: one for arm, one in worst.items() if one.mark is not Mark.GOOD}
    if len({one.brief for one in worst.values()}) == 1:
        return {arm: one.brief for arm, one in [*worst.items()][:1]}
    if len(flawed) <= MOST_BRIEF:
        return {arm: f"{arm}: {one.brief}" for arm, one in flawed.items()}
    first = max(flawed, key=lambda arm: _GRAVITY.index(flawed[arm].mark))
    return {first: f"{flawed[first].what} not good in {len(flawed):,} of {len(worst):,} arms"}


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
        shorter = "no figure that a client stamped is shorter"
        if flagged:
            shorter = f"shorter than that, and flagged: {quantity(flagged, 'figures')}"
        mark = Mark.BAD if flagged else Mark.GOOD
        yield Trust("floor", mark, f"{figure_of(lag, 'p99')}: {shorter}")


def _known(run: Run) -> Trust:
    n = sum(reason != ON_CPU for reason in run.whole.not_measurable.values())
    if not n:
        but = " but those of a GPU" if run.whole.not_measurable else ""
        return Trust("known", Mark.GOOD, f"every figure{but} could be measured")
    text = f"{quantity(n, 'figures')} could not be measured; each with its reason below"
    return Trust("known", Mark.UNKNOWN, text, f"{n} not measurable")
