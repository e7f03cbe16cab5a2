"""The cards of a report's first screen: each headline figure, how sure it is, and what a good
server would show. `harness.text.headlines` has the sentences.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dashboards.verdict import CardVerdict, Mark
from harness.formatting import bounded, figure_of, interval, is_p99_the_largest, number, quantity
from harness.metrics import (
    CANCEL_LATENCY,
    CANCEL_LATENCY_STEPS,
    SLOT_RECOVERY,
    WASTED_TOKENS,
    titled,
)
from harness.records import Metric
from harness.text.headlines import (
    HEADLINES,
    NO_DATA,
    NOTHING,
    Metrics,
    amounts,
    ghost_count,
    has_quantiles,
    known_leaks,
    left_requests,
    level,
)

NO_LIMIT: Final = CardVerdict(mark=Mark.UNKNOWN, text="no limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One headline figure. `is_clean` is set only if good means exactly zero; `flag` is the reason
    not to believe the figure. `verdict`: by its limits, of a card on the first screen.
    """

    label: str
    value: str
    details: Sequence[str]
    good: str
    is_clean: bool | None = None
    flag: str | None = None
    verdict: CardVerdict | None = None
    is_known: bool = True


def cards(
    metrics: Metrics,
    flags: Mapping[str, str],
    in_use: Mapping[str, float] = NOTHING,
    unsure: int = 0,
) -> dict[str, Card]:
    """The cards by the names of their metrics."""
    found = {
        CANCEL_LATENCY: _timed_card(
            metrics,
            CANCEL_LATENCY,
            "the step in progress is finished, then slot and blocks are free: one or two steps.",
            *_in_steps(metrics),
            *_share(metrics, "removed_at_first_boundary", "removed at the first step boundary"),
        ),
        SLOT_RECOVERY: _timed_card(
            metrics,
            SLOT_RECOVERY,
            "about a step more than after a natural end.",
            *_other_waits(metrics),
        ),
        WASTED_TOKENS: _waste_card(metrics),
        "ghost_rate": _ghost_card(metrics, unsure),
        "leaked_slots": _leak_card(metrics, in_use),
        "slot_refill_s": _timed_card(
            metrics,
            "slot_refill_s",
            "the very next step, while a request waits.",
            *_share(metrics, "refilled_next_schedule", "taken in the very next schedule"),
        ),
        "ttft_s": _timed_card(
            metrics,
            "ttft_s",
            "as fast as in a run without abandons (compare two runs).",
            label="First token, users who stayed",
        ),
    }
    known = {name: card for name, card in found.items() if card is not None}
    return {name: replace(card, flag=flags.get(name)) for name, card in known.items()}


def without_praise(found: Mapping[str, Card]) -> dict[str, Card]:
    return {
        name: replace(card, is_clean=None) if card.is_clean else card
        for name, card in found.items()
    }


def first_cards(
    found: Mapping[str, Card], missing: Mapping[str, str], verdicts: Mapping[str, CardVerdict]
) -> list[Card]:
    """The three headlines with their verdicts, also one that was not measured, with the reason:
    other figures on its card may fail it, but none makes it good.
    """
    shown = []
    for name in HEADLINES:
        card, verdict = found.get(name), verdicts.get(name, NO_LIMIT)
        if card is None:
            card = _missing_card(name, missing.get(name, NO_DATA), found)
            if verdict.mark is Mark.GOOD:
                verdict = replace(verdict, mark=Mark.UNKNOWN)
        shown.append(replace(card, verdict=verdict))
    return shown


def _missing_card(name: str, reason: str, found: Mapping[str, Card]) -> Card:
    refill = found.get("slot_refill_s") if name == SLOT_RECOVERY else None
    nearest = [] if refill is None else [f"{refill.label}: {refill.value}, {refill.details[0]}"]
    return Card(
        label=titled(name),
        value="not measurable here",
        details=[reason, *nearest],
        good="",
        is_known=False,
    )


def _timed_card(metrics: Metrics, name: str, good: str, *more: str, label: str = "") -> Card | None:
    metric, label = metrics.get(name), label or titled(name)
    if metric is None or not metric.n:
        return None
    if has_quantiles(metric):
        largest = f", the largest of {metric.n:,}" if is_p99_the_largest(metric) else ""
        first = f"median; p99 {bounded(metric, 'p99')}{largest}"
        details = [first, *more, *_intervals(metric, p50="median's", p99="p99's")]
        return Card(label=label, value=bounded(metric, "p50"), details=details, good=good)
    details = [f"mean of {metric.n:,}, from totals", *more, *_intervals(metric, mean="mean's")]
    return Card(label=label, value=bounded(metric, "mean"), details=details, good=good)


def _intervals(metric: Metric, **names: str) -> list[str]:
    found = {name: interval(metric, key) for key, name in names.items()}
    return [f"{name} 95 % interval {limits}" for name, limits in found.items() if limits]


def _in_steps(metrics: Metrics) -> Iterator[str]:
    steps = metrics.get(CANCEL_LATENCY_STEPS)
    if steps is not None and steps.n:
        yield f"in engine steps: {_median_and_p99(steps)}"


def _median_and_p99(metric: Metric) -> str:
    return f"median {bounded(metric, 'p50', unit='')}, p99 {bounded(metric, 'p99', unit='')}"


def _other_waits(metrics: Metrics) -> Iterator[str]:
    for name, words in (
        ("probe_ttft_unloaded_s", "unloaded"),
        ("probe_ttft_control_s", "after a stream that ended by itself"),
    ):
        if one := metrics.get(name):
            yield f"{words} {figure_of(one, 'p50')} (median)"


def _share(metrics: Metrics, name: str, words: str) -> Iterator[str]:
    share = metrics.get(name)
    if share is not None and share.mean is not None:
        sure = share.lower95
        least = "" if sure is None else f" (at least {quantity(sure, 'ratio')})"
        yield f"{quantity(share.mean, 'ratio')}{least} {words}"


def _waste_card(metrics: Metrics) -> Card | None:
    wasted = metrics.get(WASTED_TOKENS)
    if wasted is None or wasted.mean is None:
        return None
    mean = "mean per abandon"
    if wasted.method != "exact":  # a counter does not separate abandoned requests from cut off ones
        cut_off = wasted.others.get("cut_off")
        mean = f"mean per request left, of {wasted.n:,}"
        mean += f"; the run cut off {cut_off:,} of these" if cut_off else ""
    details = [mean if wasted.p50 is None else f"mean per abandon; {_median_and_p99(wasted)}"]
    for name, words in (
        ("wasted_in_flight_tokens", "on the way when the user left"),
        ("wasted_after_close_tokens", "after the user had left"),
    ):
        if (value := level(metrics.get(name))) is not None:
            details.append(f"{number(value)} {words}")
    return Card(
        label=titled(WASTED_TOKENS),
        value=bounded(wasted, "mean", unit=""),
        details=[*details, *_intervals(wasted, mean="mean's")],
        good="what was on its way when the user left, plus the one step in flight.",
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
        details=details,
        good="none: every abandoned request is aborted.",
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
        details=details,
        good=f"0 {' and 0 '.join(known)} missing once everything is idle again.",
        is_clean=not any(known.values()),
    )
