"""How far to trust a run, at a glance: did the load keep up, was it steady, what is not known?"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from dashboards.source import ArmsRun, Run, Summary
from dashboards.verdict import Mark
from harness.analysis.load_side import saturations
from harness.analysis.remarks import MOST_WARM_UP
from harness.export.tables import steady_in_words
from harness.formatting import figure_of, number, quantity
from harness.records import Outcome

FULL: Final = 0.9  # of all cores: beyond it who wants one waits for it
MOST_FULL: Final = 0.05  # of the load
WRONG: Final = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.REJECTED)
_GRAVITY: Final = (Mark.GOOD, Mark.UNKNOWN, Mark.BAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """One thing that figures rest on, and what is known of it; in `brief` for the first screen,
    where it belongs there."""

    what: str
    mark: Mark
    text: str
    brief: str | None = None


def trust(run: Run) -> list[Trust]:
    """What must hold for a figure to mean what its name says."""
    client, window = _client(run.summary), _steady(run.summary)
    return [client, _machine(run), window, _answers(run), *_floor(run), _known(run)]


def trust_of_arms(run: ArmsRun) -> list[Trust]:
    """The same of the client and the window, for each arm: that of its worst round."""
    return [*_of_arms(_client, run), *_of_arms(_steady, run)]


def _of_arms(judge: Callable[[Summary], Trust], run: ArmsRun) -> Iterator[Trust]:
    """In brief once what holds of all arms, else what is not good of which."""
    worst: dict[str, tuple[Trust, str]] = {}
    for arm in run.summary.arms:
        if those := [(judge(one.summary), one.name) for one in run.rounds if one.arm == arm]:
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
        text = "whether it kept up is not known: it was watched for under a second"
        return Trust(what="client", mark=Mark.UNKNOWN, text=text, brief="client not watched")
    busiest = quantity(max(side.cpu_share for side in sides), "ratio")
    latest = quantity(max(side.lag_p95_s for side in sides), "s")
    used = (
        f"in its worst ten seconds {busiest} of a core, and 5 % of its ticks noticed over "
        f"{latest} late"
    )
    if any(saturations(sides, summary.metrics)):
        text = f"saturated: {used}"
        return Trust(what="client", mark=Mark.BAD, text=text, brief="client saturated")
    return Trust(what="client", mark=Mark.GOOD, text=f"not saturated: {used}", brief="client ok")


def _machine(run: Run) -> Trust:
    """The one that the load ran on; the server, too, where the run started it. A client that used
    little may still have waited long for its turn."""
    cores = run.manifest.hardware.get("cores")
    during = run.frames.cpu["t_ns"].between(run.clock.started_ns, run.clock.ended_ns)
    samples = run.frames.cpu[during]
    is_whole = samples["process"] == "machine"
    if not cores or not is_whole.any():
        text = "how busy it was is not known: it was not sampled during the load"
        return Trust(what="machine", mark=Mark.UNKNOWN, text=text)
    busy = samples.loc[is_whole, "cores"]
    own = samples.loc[~is_whole, "cores"].sum() / len(busy)
    mean = f"{number(busy.mean())} of {quantity(cores, 'cores')}"
    used = f"in the mean {mean} busy, {number(own)} of them by this run"
    share = float((busy > FULL * cores).mean())
    if share > MOST_FULL:
        often = quantity(round(share, 2), "ratio")
        brief = f"machine full {often} of the time"
        text = (
            f"over {quantity(FULL, 'ratio')} busy in {often} of the load, {used}: whoever wanted a "
            "core then waited for it, and the times have that in them"
        )
        return Trust(what="machine", mark=Mark.BAD, text=text, brief=brief)
    return Trust(what="machine", mark=Mark.GOOD, text=used, brief="machine ok")


def _steady(summary: Summary) -> Trust:
    steady = summary.steady
    is_steady = steady.get("is_steady")
    text = f"{'steady ' if is_steady else ''}{steady_in_words(steady)}"
    share = steady.get("warmup_share")
    if is_steady and share is not None and share > MOST_WARM_UP:
        much = quantity(share, "ratio")
        text, brief = f"{much} of the load were warm-up: {text}", f"window {much} warm-up"
        return Trust(what="window", mark=Mark.BAD, text=text, brief=brief)
    mark, brief = {
        True: (Mark.GOOD, "window steady"),
        False: (Mark.BAD, "window not steady"),
        None: (Mark.UNKNOWN, "window not judged"),
    }[is_steady]
    return Trust(what="window", mark=mark, text=text, brief=brief)


def _answers(run: Run) -> Trust:
    outcomes = run.summary.outcomes
    wrong = {one: n for one in WRONG if (n := outcomes.get(one.value, 0))}
    if not wrong:
        return Trust(what="answers", mark=Mark.GOOD, text="no request went wrong")
    said = ", ".join(f"{n:,} {one.value.replace('_', ' ')}" for one, n in wrong.items())
    text = f"{said}, of {sum(outcomes.values()):,} requests"
    brief = f"{sum(wrong.values()):,} went wrong"
    return Trust(what="answers", mark=Mark.BAD, text=text, brief=brief)


def _floor(run: Run) -> Iterator[Trust]:
    lag = run.metrics.get("client_lag_s")
    if lag is None or lag.p99 is None:
        return
    flagged = len(run.summary.flags)
    text = f"{figure_of(lag, 'p99')}: what a client stamped and is shorter is flagged ({flagged})"
    yield Trust(what="floor", mark=Mark.BAD if flagged else Mark.GOOD, text=text)


def _known(run: Run) -> Trust:
    n = len(run.summary.not_measurable)
    if not n:
        return Trust(what="known", mark=Mark.GOOD, text="every figure could be measured")
    figures = "figure" if n == 1 else "figures"
    text = f"{n} {figures} could not be measured; each with its reason below"
    return Trust(what="known", mark=Mark.UNKNOWN, text=text, brief=f"{n} not measurable")
