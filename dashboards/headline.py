"""The first screen: the run in one sentence, and a card for each headline figure.

Limits and verdicts are the gate's, not this file's. The sentence gives the findings in plain words,
for a reader who stops there. A card adds how sure a figure is, and what a good server would show.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from harness.formatting import (
    bounded,
    figure_of,
    interval,
    is_only_limited,
    is_p99_the_largest,
    number,
    quantity,
)
from harness.metrics import CANCEL_LATENCY, CANCEL_LATENCY_STEPS
from harness.records import Metric

Metrics = Mapping[str, Metric]
NOTHING: Final[Mapping[str, float]] = {}
GOOD: Final = {
    "cancel": "the step in progress is finished, then slot and blocks are free: one or two steps.",
    "waste": "what was on its way when the user left, plus the one step in flight.",
    "ghosts": "none: every abandoned request is aborted.",
    "refill": "the very next step, while a request waits.",
    "recovery": "near the unloaded time, far below the wait without abandons.",
    "survivors": "as fast as in a run without abandons (compare two runs).",
}


def sentence(
    outcomes: Mapping[str, int],
    metrics: Metrics,
    in_use: Mapping[str, float] = NOTHING,
    lost: Collection[str] = (),
    unsure: int = 0,
) -> str:
    """`in_use`: the leaked slots and blocks that requests which still run hold.
    `lost`: which of `slots` and `blocks` are known to be lost where they are missing.
    `unsure`: how many more abandoned requests may be ghosts.
    """
    abandoned = outcomes.get("abandoned", 0)
    if not sum(outcomes.values()):
        return "No request was made, so there is nothing to report."
    if not abandoned:
        return "No user left early in this run, so it says nothing about cancellation."
    parts = [
        *_latency_words(metrics),
        *_recovery_words(metrics),
        *_waste_words(metrics),
        *_prompt_words(metrics),
        *_ghost_words(metrics, unsure),
        *_leak_words(metrics, in_use, lost),
    ]
    if not parts:
        return (
            f"{abandoned:,} users left early, but this server does not show what happened then. "
            "The figures that could not be measured are listed below, with the reasons."
        )
    return " ".join(parts)


def _latency_words(metrics: Metrics) -> list[str]:
    latency = metrics.get(CANCEL_LATENCY)
    if latency is None or not latency.n:
        return []
    if latency.bound == "upper" or not has_quantiles(latency):
        return _limited_words(latency) or _mean_words(latency)
    return [_let_go_words(latency)]


def _recovery_words(metrics: Metrics) -> list[str]:
    recovery, control = metrics.get("slot_recovery_s"), metrics.get("probe_ttft_control_s")
    if recovery is None or not recovery.n:
        return []
    words = (
        "The next in the queue saw a first token "
        f"{figure_of(recovery, 'p50')} after a user had left (median)"
    )
    if control is None or not control.n:
        return [f"{words}."]
    waited = figure_of(control, "p50")
    return [f"{words}, against {waited} without abandons, when a stream must end by itself."]


def has_quantiles(metric: Metric) -> bool:
    """Whether single requests are known; totals give at most a mean."""
    return metric.p50 is not None or "p50" in metric.lower_bounds


def _let_go_words(latency: Metric) -> str:
    if latency.p50 is None:
        return "More than half of the abandoned requests were not stopped while they were watched."
    median = f"When a user left, the server let go after {figure_of(latency, 'p50')} (median"
    if latency.p99 is None:
        return f"{median}), but some requests were not stopped while they were watched."
    return f"{median}; 99 % within {figure_of(latency, 'p99')})."


def _limited_words(latency: Metric) -> list[str]:
    """For a known upper limit of the mean or of the median. A missing limit is no evidence against
    the server.
    """
    if is_only_limited(latency):
        most = quantity(latency.upper95, latency.unit)
        return [f"When a user left, the server let go after at most {most} on average."]
    if latency.bound != "upper" or latency.p50 is None:
        return []
    most, late = figure_of(latency, "p50"), figure_of(latency, "p99")
    which = "median" if latency.p99 is None else f"median; 99 % within {late}"
    return [f"When a user left, the server let go after at most {most} ({which})."]


def _mean_words(latency: Metric) -> list[str]:
    if latency.mean is None or latency.bound == "upper":
        return []
    least = "at least " if latency.bound == "lower" else ""
    limits = interval(latency, "mean")
    sure = "" if limits is None else f" (95 % interval {limits})"
    mean = figure_of(latency, "mean")
    return [f"When a user left, the server let go after {least}{mean} on average{sure}."]


def _waste_words(metrics: Metrics) -> list[str]:
    wasted = metrics.get("wasted_tokens")
    if wasted is None or wasted.mean is None:
        return []
    least = "at least " if wasted.bound == "lower" else ""
    which = "per abandon" if wasted.method == "exact" else "per request left"
    return [f"It generated {least}{quantity(wasted.mean, 'tokens')} {which} that no client read."]


def _prompt_words(metrics: Metrics) -> list[str]:
    wasted = metrics.get("wasted_prompt_tokens")
    if wasted is None or not wasted.mean:
        return []
    lowest, _ = wasted.mean_ci95 or (wasted.mean, wasted.mean)
    if lowest <= 0:
        return []
    least = "at least " if wasted.bound == "lower" else ""
    mean = quantity(wasted.mean, "tokens")
    return [f"It computed {least}{mean} of each prompt that was left before a first token."]


def _ghost_words(metrics: Metrics, unsure: int) -> list[str]:
    """A gauge shows only the requests that are still there, so a gauge of 0 does not prove that all
    were stopped.
    """
    ghosts = metrics.get("ghost_rate")
    if ghosts is None or ghosts.mean is None or not ghosts.n:
        return []
    count, left = ghost_count(ghosts), f"{ghosts.n:,} {left_requests(ghosts)}"
    if ghosts.bound == "lower" and not count:
        return [f"None of the {left} was still there after the settle time."]
    if not count:
        stopped = stopped_words(ghosts, unsure)
        return [f"{stopped[0].upper()}{stopped[1:]}."]
    least = "At least " if ghosts.bound == "lower" else ""
    perhaps = "" if ghosts.of is None else ", or their slots are lost"
    more = f"; {unsure:,} more undecided" if unsure else ""
    return [f"{least}{count:,} of {left} went on as if their users had stayed{perhaps}{more}."]


def stopped_words(ghosts: Metric, unsure: int) -> str:
    left = left_requests(ghosts)
    if not unsure:
        return f"all {ghosts.n:,} {left} were stopped"
    return f"{ghosts.n:,} of {ghosts.n + unsure:,} {left} were stopped, {unsure:,} undecided"


def left_requests(metric: Metric) -> str:
    """From outside an abandoned request looks like one that the end of the run cut off."""
    return "abandoned requests" if metric.method == "exact" else "requests left"


def _leak_words(metrics: Metrics, in_use: Mapping[str, float], lost: Collection[str]) -> list[str]:
    known = known_leaks(metrics)
    if not known:
        return []
    gone = {name: value - in_use.get(name, 0) for name, value in known.items()}
    words = []
    if in_use:
        words.append(f"{amounts(in_use)} are still held by requests whose users have gone.")
    missing = {name: value for name, value in gone.items() if value > 0}
    if never_back := {name: value for name, value in missing.items() if name in lost}:
        words.append(f"{amounts(never_back)} never came back.")
    if held := {name: value for name, value in missing.items() if name not in lost}:
        words.append(f"{amounts(held)} are still held after the settle time.")
    return words or ["Nothing leaked."]


def known_leaks(metrics: Metrics) -> dict[str, float]:
    leaks = {name: level(metrics.get(f"leaked_{name}")) for name in ("slots", "blocks")}
    return {name: value for name, value in leaks.items() if value is not None}


def amounts(of: Mapping[str, float]) -> str:
    return " and ".join(quantity(value, name) for name, value in of.items())


def ghost_count(ghosts: Metric) -> int:
    return round((ghosts.mean or 0.0) * ghosts.n)


def level(metric: Metric | None) -> float | None:
    if metric is None:
        return None
    return next((one for one in (metric.mean, metric.p50, metric.max) if one is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One headline figure. `is_clean` is set only if good means exactly zero; `flag` is the reason
    not to believe the figure.
    """

    label: str
    value: str
    details: tuple[str, ...]
    good: str
    is_clean: bool | None = None
    flag: str | None = None


def cards(
    metrics: Metrics,
    flags: Mapping[str, str],
    in_use: Mapping[str, float] = NOTHING,
    unsure: int = 0,
) -> list[Card]:
    """The headline figures that this run has, in reading order; parameters as in `sentence`."""
    found = {
        CANCEL_LATENCY: _cancel_card(metrics),
        "slot_recovery_s": _timed_card(
            metrics, "slot_recovery_s", "Slot recovery", GOOD["recovery"], _other_waits(metrics)
        ),
        "wasted_tokens": _waste_card(metrics),
        "ghost_rate": _ghost_card(metrics, unsure),
        "leaked_slots": _leak_card(metrics, in_use),
        "slot_refill_s": _timed_card(
            metrics,
            "slot_refill_s",
            "Slot refill",
            GOOD["refill"],
            _share_words(metrics, "refilled_next_schedule"),
        ),
        "ttft_s": _timed_card(
            metrics, "ttft_s", "First token, users who stayed", GOOD["survivors"]
        ),
    }
    return [replace(card, flag=flags.get(name)) for name, card in found.items() if card is not None]


def without_praise(found: Sequence[Card]) -> list[Card]:
    return [replace(card, is_clean=None) if card.is_clean else card for card in found]


def _timed_card(
    metrics: Metrics, name: str, label: str, good: str, more: Sequence[str] = ()
) -> Card | None:
    metric = metrics.get(name)
    if metric is None or not metric.n:
        return None
    details = (*_spread(metric), *more)
    return Card(label=label, value=figure_of(metric, "p50"), details=details, good=good)


def _spread(metric: Metric) -> list[str]:
    if not has_quantiles(metric):
        return [f"mean of {metric.n:,}, from totals", *_intervals(metric, mean="mean's")]
    largest = f", the largest of {metric.n:,}" if is_p99_the_largest(metric) else ""
    quantiles = f"median; p99 {bounded(metric, 'p99')}{largest}"
    return [quantiles, *_intervals(metric, p50="median's", p99="p99's")]


def _intervals(metric: Metric, **names: str) -> list[str]:
    found = {name: interval(metric, key) for key, name in names.items()}
    return [f"{name} 95 % interval {limits}" for name, limits in found.items() if limits]


def _cancel_card(metrics: Metrics) -> Card | None:
    latency, steps = metrics.get(CANCEL_LATENCY), metrics.get(CANCEL_LATENCY_STEPS)
    if latency is None or not latency.n:
        return None
    details = _spread(latency)
    if steps is not None and steps.n:
        details.insert(1, f"in engine steps: {_median_and_p99(steps)}")
    details += _share_words(metrics, "removed_at_first_boundary")
    return Card(
        label="Cancel latency",
        value=bounded(latency, "p50" if has_quantiles(latency) else "mean"),
        details=tuple(details),
        good=GOOD["cancel"],
    )


def _median_and_p99(metric: Metric) -> str:
    return f"median {bounded(metric, 'p50', unit='')}, p99 {bounded(metric, 'p99', unit='')}"


def _other_waits(metrics: Metrics) -> list[str]:
    waits = {
        "unloaded": metrics.get("probe_ttft_unloaded_s"),
        "without abandons, when a stream ends by itself:": metrics.get("probe_ttft_control_s"),
    }
    return [f"{name} {figure_of(one, 'p50')} (median)" for name, one in waits.items() if one]


def _share_words(metrics: Metrics, name: str) -> list[str]:
    words = {
        "removed_at_first_boundary": "removed at the first step boundary",
        "refilled_next_schedule": "taken in the very next schedule",
    }
    share = metrics.get(name)
    if share is None or share.mean is None:
        return []
    least = "" if share.lower95 is None else f" (at least {quantity(share.lower95, 'ratio')})"
    return [f"{quantity(share.mean, 'ratio')}{least} {words[name]}"]


def _per_request_left(wasted: Metric) -> str:
    """A counter does not separate abandoned requests from those that the run cut off."""
    cut_off = wasted.others.get("cut_off")
    mean = f"mean per request left, of {wasted.n:,}"
    return f"{mean}; the run cut off {cut_off:,} of these" if cut_off else mean


def _waste_card(metrics: Metrics) -> Card | None:
    wasted = metrics.get("wasted_tokens")
    if wasted is None or wasted.mean is None:
        return None
    details = ["mean per abandon" if wasted.method == "exact" else _per_request_left(wasted)]
    if wasted.p50 is not None:
        details = [f"mean per abandon; {_median_and_p99(wasted)}"]
    details += _intervals(wasted, mean="mean's")
    for name, words in (
        ("wasted_in_flight_tokens", "on the way when the user left"),
        ("wasted_after_close_tokens", "after the user had left"),
    ):
        if (value := level(metrics.get(name))) is not None:
            details.append(f"{number(value)} {words}")
    return Card(
        label="Wasted tokens",
        value=bounded(wasted, "mean", unit=""),
        details=tuple(details),
        good=GOOD["waste"],
    )


def _ghost_card(metrics: Metrics, unsure: int) -> Card | None:
    ghosts = metrics.get("ghost_rate")
    if ghosts is None or ghosts.mean is None or not ghosts.n:
        return None
    count, is_lower = ghost_count(ghosts), ghosts.bound == "lower"
    details = [f"of {ghosts.n:,} {left_requests(ghosts)} ({bounded(ghosts, 'mean')})"]
    if unsure:
        details.append(f"{unsure:,} more undecided")
    if is_lower:
        details.append("still there after the settle time; a ghost that ended before is not seen")
    if ghosts.upper95 is not None:
        details.append(f"true rate at most {quantity(ghosts.upper95, 'ratio')} (95 %)")
    return Card(
        label="Ghosts",
        value=("none seen" if not count else f"≥ {count:,}") if is_lower else f"{count:,}",
        details=tuple(details),
        good=GOOD["ghosts"],
        is_clean=None if (is_lower or unsure) and not count else count == 0,
    )


def _leak_card(metrics: Metrics, in_use: Mapping[str, float]) -> Card | None:
    known = known_leaks(metrics)
    if not known:
        return None
    details = ["idle gauges after the settle time, less those before the load"]
    if in_use:
        details.append(f"{amounts(in_use)} of these held by requests that still run (ghosts)")
    return Card(
        label="Leaked",
        value=", ".join(quantity(value, name) for name, value in known.items()),
        details=tuple(details),
        good=f"0 {' and 0 '.join(known)} missing once everything is idle again.",
        is_clean=not any(known.values()),
    )
