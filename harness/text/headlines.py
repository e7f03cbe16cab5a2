"""The headlines in sentences: three for the terminal (cancel latency, waste, slot recovery), and
for a report also the ghosts and the leaks, as far as they are known.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from harness.formatting import DASH, bounded, in_all, quantity
from harness.metrics import (
    CANCEL_LATENCY,
    CANCEL_LATENCY_STEPS,
    NOBODY_LEFT,
    SLOT_RECOVERY,
    WASTED_TOKENS,
    titled,
)
from harness.records import Metric

Metrics = Mapping[str, Metric]
NOTHING: Final[Mapping[str, float]] = {}
HEADLINES: Final = (CANCEL_LATENCY, WASTED_TOKENS, SLOT_RECOVERY)
NO_DATA: Final = "the run gives no data for it"
# A slot that was held for longer was not given back for the leave.
_HELD_S: Final = 2.0
_HELD_STEPS: Final = 12
_BY_PROBES: Final = "`walkaway run slot_recovery`, with the same flags, measures it by probes."
_MEASURED_BY: Final = {
    CANCEL_LATENCY: _BY_PROBES,
    WASTED_TOKENS: "A metrics page with the tokens that it generated shows it (--metrics-url).",
    SLOT_RECOVERY: _BY_PROBES,
}
_ALL_HIDDEN: Final = (
    "Cancel latency, wasted tokens and slot recovery are not measurable here: the server shows no "
    "log of its requests and no metrics that say it (--metrics-url names a page), and this run has "
    "no probes."
)
_SENDS_PROBES: Final = " `walkaway run slot_recovery`, with the same flags, sends them."
_VERBS: Final = {WASTED_TOKENS: "are"}


def headline_sentences(metrics: Metrics, missing: Mapping[str, str]) -> list[str]:
    """One for each headline."""
    said = _known_sentences(metrics)
    return [said.get(name) or _missing_sentence(name, missing.get(name)) for name in HEADLINES]


def brief_sentences(
    metrics: Metrics, missing: Mapping[str, str], *, can_probe: bool = True
) -> list[str]:
    """As `headline_sentences`, but one for all that a server hides, if that is all. `can_probe`:
    probes can be sent to it, as far as is known."""
    is_hidden = all(missing.get(name) not in (None, NOBODY_LEFT) for name in HEADLINES)
    if _known_sentences(metrics) or not is_hidden:
        return headline_sentences(metrics, missing)
    return [f"{_ALL_HIDDEN}{_SENDS_PROBES if can_probe else ''}"]


def _missing_sentence(name: str, reason: str | None) -> str:
    why = reason or NO_DATA
    more = "" if reason in (None, NOBODY_LEFT) else f" {_MEASURED_BY[name]}"
    return f"{titled(name)} {_VERBS.get(name, 'is')} not measurable here: {why}.{more}"


class StopVerdict(NamedTuple):
    """Whether the server stops the requests whose clients have left; `stops` None: not known."""

    stops: bool | None
    text: str


def stop_verdict(metrics: Metrics, *, is_silent: bool) -> StopVerdict:
    """`is_silent`: the server answered no short request after the load had settled."""
    ghosts, latency = metrics.get("ghost_rate"), metrics.get(CANCEL_LATENCY)
    if is_silent:
        return StopVerdict(
            stops=False,
            text="after its users had left, the server answered nobody any more: it works on for "
            "nobody, or it is wedged",
        )
    by_ghosts, by_slots = _by_ghosts(ghosts), None
    if latency is not None and latency.n and latency.method == "probe":
        by_slots = _by_slots(latency, metrics.get(CANCEL_LATENCY_STEPS))
    found = [one for one in (by_ghosts, by_slots) if one is not None and one.stops is not None]
    if found:
        return next((one for one in found if not one.stops), found[0])
    return by_slots or StopVerdict(
        stops=None, text="this run does not show whether the server stops"
    )


def _by_ghosts(ghosts: Metric | None) -> StopVerdict | None:
    """A lower bound of nothing acquits only a server that holds nothing and computes nothing."""
    if ghosts is None or ghosts.mean is None or not ghosts.n:
        return None
    left = left_requests(ghosts)
    if count := ghost_count(ghosts):
        text = f"the server does not stop each request: {count:,} of {ghosts.n:,} {left} ran on"
        return StopVerdict(stops=False, text=text)
    if ghosts.others.get("still_generating") or ghosts.others.get("lost_slots"):
        text = f"after the settle time the server still works, or holds slots, for {left}"
        return StopVerdict(stops=False, text=text)
    was = "was still there after the settle time" if ghosts.bound == "lower" else "ran on"
    return StopVerdict(stops=True, text=f"the server stops: none of {ghosts.n:,} {left} {was}")


def _by_slots(latency: Metric, steps: Metric | None) -> StopVerdict:
    """A slot is censored where it did not come back, or where another stream's own end hid when."""
    longest_s = max(latency.max or 0.0, latency.lower_bounds.get("max", 0.0))
    most = (
        _HELD_STEPS + 1 if steps is None else max(steps.max or 0, steps.lower_bounds.get("max", 0))
    )
    if longest_s > _HELD_S and most > _HELD_STEPS:
        text = (
            f"the server does not stop each request: a slot was held for {quantity(longest_s, 's')}"
        )
        return StopVerdict(stops=False, text=f"{text} after its user left")
    if latency.n_censored:
        text = f"when {latency.n_censored:,} of {latency.n:,} slots came back is not known"
        return StopVerdict(stops=None, text=text)
    text = f"the server stops: each of {latency.n:,} slots worked for the next request within"
    return StopVerdict(stops=True, text=f"{text} {quantity(longest_s, 's')}")


def arm_sentences(arms: Mapping[str, Metrics]) -> Iterator[str]:
    for name in HEADLINES:
        found = {arm: typical(metrics[name]) for arm, metrics in arms.items() if name in metrics}
        clauses = ", ".join(f"{arm} {figure}" for arm, figure in found.items())
        unit = " per user who left" if name == WASTED_TOKENS else ""
        yield f"{titled(name)}{unit}: {clauses or 'not measurable here'}."


def report_sentence(
    outcomes: Mapping[str, int],
    metrics: Metrics,
    in_use: Mapping[str, float] = NOTHING,
    lost: Collection[str] = (),
    unsure: int = 0,
) -> str:
    abandoned = outcomes.get("abandoned", 0)
    if not sum(outcomes.values()):
        return "No request was made, so there is nothing to report."
    if not abandoned:
        return "No user left early in this run, so it says nothing about cancellation."
    parts = [
        *_known_sentences(metrics).values(),
        *_prompt_words(metrics),
        *_ghost_words(metrics, unsure),
        *_leak_words(metrics, in_use, lost),
    ]
    return " ".join(parts) or (
        f"{abandoned:,} users left early, but this server does not show what happened then. "
        "The figures that could not be measured are listed below, with the reasons."
    )


def _known_sentences(metrics: Metrics) -> dict[str, str]:
    found = {name: metrics[name] for name in HEADLINES if name in metrics and metrics[name].n}
    said = {}
    if latency := found.get(CANCEL_LATENCY):
        steps = metrics.get(CANCEL_LATENCY_STEPS)
        in_steps = "" if steps is None else f", that is {typical(steps)}"
        about = _about(latency, "not stopped")
        said[CANCEL_LATENCY] = f"A cancel took {typical(latency, *about)}{in_steps}."
    if waste := found.get(WASTED_TOKENS):
        said[WASTED_TOKENS] = f"The server wasted {_waste(waste)}."
    if recovery := found.get(SLOT_RECOVERY):
        about = _about(recovery, "without a token")
        text = f"A freed slot served the next user after {typical(recovery, *about)}"
        waits = ", ".join(_other_waits(metrics))
        said[SLOT_RECOVERY] = f"{text}; {waits}." if waits else f"{text}."
    return {name: text for name, text in said.items() if DASH not in text}


def _waste(waste: Metric) -> str:
    who = "user who left" if waste.method == "exact" else "request left"
    total = "" if waste.mean is None else f", {in_all(waste, unit='tokens')}"
    return f"{bounded(waste, 'mean')} on each {who}{total}{_in_brackets(*_method(waste))}"


def _other_waits(metrics: Metrics) -> Iterator[str]:
    waits = {
        "an idle server takes": metrics.get("probe_ttft_unloaded_s"),
        "after a natural end it takes": metrics.get("probe_ttft_control_s"),
    }
    for name, one in waits.items():
        if one is not None and one.p50 is not None:
            yield f"{name} {quantity(one.p50, 's')}"


def has_quantiles(metric: Metric) -> bool:
    return metric.p50 is not None or ("p50" in metric.lower_bounds and metric.bound != "upper")


def typical(metric: Metric, *more: str) -> str:
    if not has_quantiles(metric):
        return f"{bounded(metric, 'mean')} on average{_in_brackets(*more)}"
    p99 = [f"p99 {bounded(metric, 'p99')}"] if bounded(metric, "p99") != DASH else []
    return f"{bounded(metric, 'p50')}{_in_brackets(*p99, *more)}"


def _in_brackets(*texts: str) -> str:
    return f" ({'; '.join(texts)})" if texts else ""


def _about(metric: Metric, endless: str) -> list[str]:
    is_stuck = metric.n_censored and metric.bound != "upper"
    stuck = f", {metric.n_censored:,} {endless}" if is_stuck else ""
    return [f"n = {metric.n:,}{stuck}", *_method(metric)]


def _method(metric: Metric) -> list[str]:
    is_usual = metric.method in ("exact", "probe")
    return [] if is_usual else [f"by {metric.method.replace('_', ' ')}"]


def _prompt_words(metrics: Metrics) -> Iterator[str]:
    wasted = metrics.get("wasted_prompt_tokens")
    if wasted is None or not wasted.mean:
        return
    lowest, _ = wasted.mean_ci95 or (wasted.mean, wasted.mean)
    if lowest > 0:
        least = "at least " if wasted.bound == "lower" else ""
        mean = quantity(wasted.mean, "tokens")
        yield f"It computed {least}{mean} of each prompt that was left before a first token."


def _ghost_words(metrics: Metrics, unsure: int) -> Iterator[str]:
    ghosts = metrics.get("ghost_rate")
    if ghosts is None or ghosts.mean is None or not ghosts.n:
        return
    count, left = ghost_count(ghosts), left_requests(ghosts)
    if count:
        least = "At least " if ghosts.bound == "lower" else ""
        perhaps = "" if ghosts.of is None else ", or their slots are lost"
        more = f"; {unsure:,} more undecided" if unsure else ""
        ran_on = f"of {ghosts.n:,} {left} kept running as if their users had stayed"
        yield f"{least}{count:,} {ran_on}{perhaps}{more}."
    elif ghosts.bound == "lower":
        yield f"None of the {ghosts.n:,} {left} was still there after the settle time."
    elif unsure:
        of = f"{ghosts.n:,} of {ghosts.n + unsure:,} {left}"
        yield f"{of} were stopped, {unsure:,} undecided."
    elif ghosts.n == 1:
        yield "The only request whose user left was stopped."
    else:
        yield f"All {ghosts.n:,} {left} were stopped."


def ghost_count(ghosts: Metric) -> int:
    return round((ghosts.mean or 0.0) * ghosts.n)


def left_requests(metric: Metric) -> str:
    return "abandoned requests" if metric.method == "exact" else "requests left"


def _leak_words(
    metrics: Metrics, in_use: Mapping[str, float], lost: Collection[str]
) -> Iterator[str]:
    known = known_leaks(metrics)
    missing = {
        name: gone for name, value in known.items() if (gone := value - in_use.get(name, 0)) > 0
    }
    never_back = {name: value for name, value in missing.items() if name in lost}
    held = {name: value for name, value in missing.items() if name not in lost}
    if not known:
        return
    if in_use:
        yield f"{amounts(in_use)} are still held by requests whose users have gone."
    if never_back:
        yield f"{amounts(never_back)} never came back."
    if held:
        yield f"{amounts(held)} are still held after the settle time."
    if not in_use and not missing:
        yield "Nothing leaked."


def known_leaks(metrics: Metrics) -> dict[str, float]:
    leaks = {name: level(metrics.get(f"leaked_{name}")) for name in ("slots", "blocks")}
    return {name: value for name, value in leaks.items() if value is not None}


def amounts(of: Mapping[str, float]) -> str:
    return " and ".join(quantity(value, name) for name, value in of.items())


def level(metric: Metric | None) -> float | None:
    figures = () if metric is None else (metric.mean, metric.p50, metric.max)
    return next((one for one in figures if one is not None), None)
