"""The first screen in figures: a card for each. The sentence above them is in `sentence`.

Nothing here judges a run (limits and verdicts are the gate's): a card says what was found, how
sure it is, and what a good server would show.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dashboards.sentence import (
    NOTHING,
    Metrics,
    amounts,
    ghost_count,
    has_quantiles,
    known_leaks,
    level,
    who_left,
)
from harness.formatting import bounded, figure_of, interval, is_p99_the_largest, number, quantity
from harness.records import Metric

GOOD: Final = {
    "cancel": "the step in progress is finished, then slot and blocks are free: one or two steps.",
    "waste": "what was on its way when the user left, plus the one step in flight.",
    "ghosts": "none: every abandoned request is aborted.",
    "refill": "the very next step, while somebody waits.",
    "recovery": "near the unloaded time, far below the wait when nobody leaves.",
    "survivors": "as fast as without anybody leaving (compare two runs).",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One headline figure. `is_clean` is only set where good is exactly zero; `flag` says why the
    figure is not to be believed.
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
    """The headline figures that this run has, in reading order. `in_use`, `unsure`: as for the
    sentence."""
    found = {
        "cancel_latency_s": _cancel_card(metrics),
        "slot_recovery_s": _recovery_card(metrics),
        "wasted_tokens": _waste_card(metrics),
        "ghost_rate": _ghost_card(metrics, unsure),
        "leaked_slots": _leak_card(metrics, in_use),
        "slot_refill_s": _refill_card(metrics),
        "ttft_s": _timed_card(
            metrics, "ttft_s", "First token, those who stayed", GOOD["survivors"]
        ),
    }
    return [replace(card, flag=flags.get(name)) for name, card in found.items() if card is not None]


def without_praise(found: Sequence[Card]) -> list[Card]:
    """The same of a run that cannot show that anything is as it should be."""
    return [replace(card, is_clean=None) if card.is_clean else card for card in found]


def _timed_card(metrics: Metrics, name: str, label: str, good: str) -> Card | None:
    metric = metrics.get(name)
    if metric is None or not metric.n:
        return None
    return Card(label=label, value=figure_of(metric, "p50"), details=_spread(metric), good=good)


def _spread(metric: Metric) -> tuple[str, ...]:
    largest = f", the largest of {metric.n:,}" if is_p99_the_largest(metric) else ""
    lines = [f"median; p99 {bounded(metric, 'p99')}{largest}"]
    if limits := interval(metric, "p50"):
        lines.append(f"median's 95 % interval {limits}")
    if limits := interval(metric, "p99"):
        lines.append(f"p99's 95 % interval {limits}")
    return tuple(lines)


def _mean_spread(metric: Metric) -> list[str]:
    lines = [f"mean of {metric.n:,}, from totals"]
    if limits := interval(metric, "mean"):
        lines.append(f"mean's 95 % interval {limits}")
    return lines


def _cancel_card(metrics: Metrics) -> Card | None:
    latency, steps = metrics.get("cancel_latency_s"), metrics.get("cancel_latency_steps")
    if latency is None or not latency.n:
        return None
    details = list(_spread(latency) if has_quantiles(latency) else _mean_spread(latency))
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


def _recovery_card(metrics: Metrics) -> Card | None:
    card = _timed_card(metrics, "slot_recovery_s", "Slot recovery", GOOD["recovery"])
    if card is None:
        return None
    compared = [
        f"{label} {figure_of(metrics[name], 'p50')} (median)"
        for name, label in (
            ("probe_ttft_unloaded_s", "unloaded"),
            ("probe_ttft_control_s", "nobody leaves, a stream ends by itself:"),
        )
        if name in metrics
    ]
    return replace(card, details=(*card.details, *compared))


def _refill_card(metrics: Metrics) -> Card | None:
    card = _timed_card(metrics, "slot_refill_s", "Slot refill", GOOD["refill"])
    if card is None:
        return None
    return replace(card, details=(*card.details, *_share_words(metrics, "refilled_next_schedule")))


def _share_words(metrics: Metrics, name: str) -> list[str]:
    """A share that ought to be all: "99.8 % in the very next schedule"."""
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
    """A counter does not tell those who left from those whom the run cut off."""
    cut_off = wasted.others.get("cut_off")
    what = f"mean per request left, of {wasted.n:,}"
    return f"{what}, of whom the run cut off {cut_off:,}" if cut_off else what


def _waste_card(metrics: Metrics) -> Card | None:
    wasted = metrics.get("wasted_tokens")
    if wasted is None or wasted.mean is None:
        return None
    details = ["mean per abandon" if wasted.method == "exact" else _per_request_left(wasted)]
    if wasted.p50 is not None:
        details = [f"mean per abandon; {_median_and_p99(wasted)}"]
    if limits := interval(wasted, "mean"):
        details.append(f"mean's 95 % interval {limits}")
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
    details = [f"of {ghosts.n:,} {who_left(ghosts)} ({bounded(ghosts, 'mean')})"]
    if unsure:
        details.append(f"of {unsure:,} more it is not known")
    if is_lower:
        details.append("still there after the settle time; who ended before then is not seen")
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
        details.append(f"of these, {amounts(in_use)} held by requests that still run (ghosts)")
    return Card(
        label="Leaked",
        value=", ".join(quantity(value, name) for name, value in known.items()),
        details=tuple(details),
        good=f"0 {' and 0 '.join(known)} missing once everything is idle again.",
        is_clean=not any(known.values()),
    )
