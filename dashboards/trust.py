"""How far to trust a run, at a glance: did the load keep up, was it steady, what is not known?"""

from collections.abc import Iterator
from dataclasses import dataclass

from dashboards.source import Run
from dashboards.verdict import Mark
from harness.accounts import steady_in_words
from harness.analysis.load_side import saturations
from harness.analysis.validity import MOST_WARM_UP
from harness.records import Outcome
from harness.words import figure_of, quantity

WRONG = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.REJECTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """One thing that figures rest on, and what is known of it."""

    what: str
    mark: Mark
    text: str


def trust(run: Run) -> list[Trust]:
    """What must hold for a figure to mean what its name says."""
    return [_client(run), _steady(run), _answers(run), *_floor(run), _known(run)]


def _client(run: Run) -> Trust:
    sides = run.summary.load_processes
    if not sides:
        text = "whether it kept up is not known: it was watched for under a second"
        return Trust(what="client", mark=Mark.UNKNOWN, text=text)
    busiest = quantity(max(side.cpu_share for side in sides), "ratio")
    latest = quantity(max(side.lag_p95_s for side in sides), "s")
    used = f"{busiest} of a core, 95 % of its ticks noticed within {latest}"
    if any(saturations(sides, run.metrics)):
        return Trust(what="client", mark=Mark.BAD, text=f"saturated: {used}")
    return Trust(what="client", mark=Mark.GOOD, text=f"not saturated: {used}")


def _steady(run: Run) -> Trust:
    steady = run.summary.steady
    marks = {True: Mark.GOOD, False: Mark.BAD, None: Mark.UNKNOWN}
    is_steady = steady.get("is_steady")
    text = f"{'steady ' if is_steady else ''}{steady_in_words(steady)}"
    share = steady.get("warmup_share")
    if is_steady and share is not None and share > MOST_WARM_UP:
        text = f"{quantity(share, 'ratio')} of the load were warm-up: {text}"
        return Trust(what="window", mark=Mark.BAD, text=text)
    return Trust(what="window", mark=marks[is_steady], text=text)


def _answers(run: Run) -> Trust:
    outcomes = run.summary.outcomes
    wrong = {one: n for one in WRONG if (n := outcomes.get(one.value, 0))}
    if not wrong:
        return Trust(what="answers", mark=Mark.GOOD, text="no request went wrong")
    said = ", ".join(f"{n:,} {one.value.replace('_', ' ')}" for one, n in wrong.items())
    text = f"{said}, of {sum(outcomes.values()):,} requests"
    return Trust(what="answers", mark=Mark.BAD, text=text)


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
    return Trust(what="known", mark=Mark.UNKNOWN, text=text)
