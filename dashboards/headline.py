"""The first screen in words: one sentence that answers the question, and a card for each figure.

Nothing here judges a run (limits and verdicts are the gate's): a card says what was found, how
sure it is, and what a good server would show.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from harness.records import Metric
from harness.words import figure_of, interval, number, quantity

Metrics = Mapping[str, Metric]
NOTHING: Final[Mapping[str, float]] = {}

GOOD: Final = {
    "cancel": "the step in progress is finished, then slot and blocks are free: one or two steps.",
    "waste": "what was on its way when the user left, plus the one step in flight.",
    "ghosts": "none: every abandoned request is aborted.",
    "leaks": "0 slots and 0 blocks missing once everything is idle again.",
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


def sentence(
    outcomes: Mapping[str, int], metrics: Metrics, in_use: Mapping[str, float] = NOTHING
) -> str:
    """What the run found, in plain words, for somebody who reads nothing else.

    `in_use`: what of the leaked slots and blocks requests hold that still run.
    """
    abandoned = outcomes.get("abandoned", 0)
    if not sum(outcomes.values()):
        return "No request was made, so there is nothing to tell."
    if not abandoned:
        return "Nobody left early in this run, so it says nothing about cancellation."
    parts = [
        *_latency_words(metrics),
        *_recovery_words(metrics),
        *_waste_words(metrics),
        *_ghost_words(metrics),
        *_leak_words(metrics, in_use),
    ]
    if not parts:
        return (
            f"{abandoned:,} users left early, but this server does not show what happened then. "
            "What could not be measured, and why, is listed below."
        )
    return " ".join(parts)


def _latency_words(metrics: Metrics) -> list[str]:
    latency = metrics.get("cancel_latency_s")
    return [_let_go_words(latency)] if latency is not None and latency.n else []


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
    return [f"{words}, against {waited} when nobody leaves and a stream must end by itself."]


def _let_go_words(latency: Metric) -> str:
    if latency.p50 is None:
        return "More than half of the abandoned requests were not stopped while they were watched."
    median = f"When a user left, the server let go after {figure_of(latency, 'p50')} (median"
    if latency.p99 is None:
        return f"{median}), but some requests were not stopped while they were watched."
    return f"{median}; 99 % within {figure_of(latency, 'p99')})."


def _waste_words(metrics: Metrics) -> list[str]:
    wasted = metrics.get("wasted_tokens")
    if wasted is None or wasted.mean is None:
        return []
    least = "at least " if wasted.bound == "lower" else ""
    return [f"It generated {least}{quantity(wasted.mean, 'tokens')} per abandon for nobody."]


def _ghost_words(metrics: Metrics) -> list[str]:
    ghosts = metrics.get("ghost_rate")
    if ghosts is None or ghosts.mean is None or not ghosts.n:
        return []
    count = ghost_count(ghosts)
    if count:
        return [f"{count:,} of {ghosts.n:,} abandoned requests went on as if nobody had left."]
    return [f"All {ghosts.n:,} abandoned requests were stopped."]


def _leak_words(metrics: Metrics, in_use: Mapping[str, float]) -> list[str]:
    known = _leaks(metrics)
    if not known:
        return []
    gone = {name: value - in_use.get(name, 0) for name, value in known.items()}
    words = []
    if in_use:
        words.append(f"{_amounts(in_use)} are still held by requests whose users have gone.")
    if lost := {name: value for name, value in gone.items() if value > 0}:
        words.append(f"{_amounts(lost)} never came back.")
    return words or ["Nothing leaked."]


def _leaks(metrics: Metrics) -> dict[str, float]:
    leaks = {name: level(metrics.get(f"leaked_{name}")) for name in ("slots", "blocks")}
    return {name: value for name, value in leaks.items() if value is not None}


def _amounts(of: Mapping[str, float]) -> str:
    return " and ".join(quantity(value, name) for name, value in of.items())


def ghost_count(ghosts: Metric) -> int:
    """The ghost rate as a number of requests."""
    return round((ghosts.mean or 0.0) * ghosts.n)


def level(metric: Metric | None) -> float | None:
    """The single value of a metric that is one reading."""
    if metric is None:
        return None
    return next((one for one in (metric.mean, metric.p50, metric.max) if one is not None), None)


def cards(
    metrics: Metrics, flags: Mapping[str, str], in_use: Mapping[str, float] = NOTHING
) -> list[Card]:
    """The headline figures that this run has, in reading order."""
    found = {
        "cancel_latency_s": _cancel_card(metrics),
        "slot_recovery_s": _recovery_card(metrics),
        "wasted_tokens": _waste_card(metrics),
        "ghost_rate": _ghost_card(metrics),
        "leaked_slots": _leak_card(metrics, in_use),
        "slot_refill_s": _refill_card(metrics),
        "ttft_s": _timed_card(
            metrics, "ttft_s", "First token, those who stayed", GOOD["survivors"]
        ),
    }
    return [replace(card, flag=flags.get(name)) for name, card in found.items() if card is not None]


def _timed_card(metrics: Metrics, name: str, label: str, good: str) -> Card | None:
    metric = metrics.get(name)
    if metric is None or not metric.n:
        return None
    return Card(label=label, value=figure_of(metric, "p50"), details=_spread(metric), good=good)


def _spread(metric: Metric) -> tuple[str, ...]:
    lines = [f"median; p99 {figure_of(metric, 'p99')}"]
    if limits := interval(metric, "p50"):
        lines.append(f"median's 95 % interval {limits}")
    if limits := interval(metric, "p99"):
        lines.append(f"p99's 95 % interval {limits}")
    return tuple(lines)


def _cancel_card(metrics: Metrics) -> Card | None:
    latency, steps = metrics.get("cancel_latency_s"), metrics.get("cancel_latency_steps")
    if latency is None or not latency.n:
        return None
    details = list(_spread(latency))
    if steps is not None and steps.n:
        details.insert(1, f"in engine steps: {_median_and_p99(steps)}")
    details += _share_words(metrics, "removed_at_first_boundary")
    return Card(
        label="Cancel latency",
        value=figure_of(latency, "p50"),
        details=tuple(details),
        good=GOOD["cancel"],
    )


def _median_and_p99(metric: Metric) -> str:
    return f"median {figure_of(metric, 'p50', unit='')}, p99 {figure_of(metric, 'p99', unit='')}"


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


def _waste_card(metrics: Metrics) -> Card | None:
    wasted = metrics.get("wasted_tokens")
    if wasted is None or wasted.mean is None:
        return None
    details = ["mean per abandon"]
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
    least = "≥ " if wasted.bound == "lower" else ""
    return Card(
        label="Wasted tokens",
        value=f"{least}{number(wasted.mean)}",
        details=tuple(details),
        good=GOOD["waste"],
    )


def _ghost_card(metrics: Metrics) -> Card | None:
    ghosts = metrics.get("ghost_rate")
    if ghosts is None or ghosts.mean is None or not ghosts.n:
        return None
    count = ghost_count(ghosts)
    details = [f"of {ghosts.n:,} abandoned requests ({quantity(ghosts.mean, 'ratio')})"]
    if ghosts.upper95 is not None:
        details.append(f"true rate at most {quantity(ghosts.upper95, 'ratio')} (95 %)")
    return Card(
        label="Ghosts",
        value=f"{count:,}",
        details=tuple(details),
        good=GOOD["ghosts"],
        is_clean=count == 0,
    )


def _leak_card(metrics: Metrics, in_use: Mapping[str, float]) -> Card | None:
    known = _leaks(metrics)
    if not known:
        return None
    details = ["idle gauges after the settle time, less those before the load"]
    if in_use:
        details.append(f"of these, {_amounts(in_use)} held by requests that still run (ghosts)")
    return Card(
        label="Leaked",
        value=", ".join(quantity(value, name) for name, value in known.items()),
        details=tuple(details),
        good=GOOD["leaks"],
        is_clean=not any(known.values()),
    )
