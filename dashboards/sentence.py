"""The run in one sentence: what was found, in plain words, for somebody who reads nothing else."""

from collections.abc import Collection, Mapping
from typing import Final

from harness.formatting import figure_of, interval, is_only_limited, quantity
from harness.records import Metric

Metrics = Mapping[str, Metric]
NOTHING: Final[Mapping[str, float]] = {}


def sentence(
    outcomes: Mapping[str, int],
    metrics: Metrics,
    in_use: Mapping[str, float] = NOTHING,
    lost: Collection[str] = (),
    unsure: int = 0,
) -> str:
    """The sentence.

    `in_use`: what of the leaked slots and blocks requests hold that still run;
    `lost`: which of `slots` and `blocks` are known to be lost where they are missing;
    `unsure`: of how many more who left it is not known whether they are ghosts.
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
        *_prompt_words(metrics),
        *_ghost_words(metrics, unsure),
        *_leak_words(metrics, in_use, lost),
    ]
    if not parts:
        return (
            f"{abandoned:,} users left early, but this server does not show what happened then. "
            "What could not be measured, and why, is listed below."
        )
    return " ".join(parts)


def _latency_words(metrics: Metrics) -> list[str]:
    latency = metrics.get("cancel_latency_s")
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
    return [f"{words}, against {waited} when nobody leaves and a stream must end by itself."]


def has_quantiles(metric: Metric) -> bool:
    """Whether it is known of single requests; totals tell at most a mean."""
    return metric.p50 is not None or "p50" in metric.lower_bounds


def _let_go_words(latency: Metric) -> str:
    if latency.p50 is None:
        return "More than half of the abandoned requests were not stopped while they were watched."
    median = f"When a user left, the server let go after {figure_of(latency, 'p50')} (median"
    if latency.p99 is None:
        return f"{median}), but some requests were not stopped while they were watched."
    return f"{median}; 99 % within {figure_of(latency, 'p99')})."


def _limited_words(latency: Metric) -> list[str]:
    """Where it is only known not to exceed something: on average, or half of the requests. That
    such a limit is not known says nothing against the server."""
    if is_only_limited(latency):
        most = quantity(latency.upper95, latency.unit)
        return [f"When a user left, the server let go after at most {most} on average."]
    if latency.bound != "upper" or latency.p50 is None:
        return []
    most, late = figure_of(latency, "p50"), figure_of(latency, "p99")
    which = "median" if latency.p99 is None else f"median; 99 % within {late}"
    return [f"When a user left, the server let go after at most {most} ({which})."]


def _mean_words(latency: Metric) -> list[str]:
    """Totals tell the mean and nothing of single requests."""
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
    return [f"It generated {least}{quantity(wasted.mean, 'tokens')} {which} for nobody."]


def _prompt_words(metrics: Metrics) -> list[str]:
    wasted = metrics.get("wasted_prompt_tokens")
    if wasted is None or not wasted.mean:
        return []
    lowest, _ = wasted.mean_ci95 or (wasted.mean, wasted.mean)
    if lowest <= 0:
        return []
    least = "at least " if wasted.bound == "lower" else ""
    mean = quantity(wasted.mean, "tokens")
    return [f"Of each prompt that was left before a first token it computed {least}{mean}."]


def _ghost_words(metrics: Metrics, unsure: int) -> list[str]:
    """By gauge only those are seen who are still there: that there are none does not say that all
    were stopped."""
    ghosts = metrics.get("ghost_rate")
    if ghosts is None or ghosts.mean is None or not ghosts.n:
        return []
    count, who = ghost_count(ghosts), f"{ghosts.n:,} {who_left(ghosts)}"
    if ghosts.bound == "lower" and not count:
        return [f"None of the {who} was still there after the settle time."]
    if not count:
        stopped = stopped_words(ghosts, unsure)
        return [f"{stopped[0].upper()}{stopped[1:]}."]
    least = "At least " if ghosts.bound == "lower" else ""
    perhaps = "" if ghosts.of is None else ", or their slots are lost"
    more = f"; of {unsure:,} more it is not known" if unsure else ""
    return [f"{least}{count:,} of {who} went on as if nobody had left{perhaps}{more}."]


def stopped_words(ghosts: Metric, unsure: int) -> str:
    """Of a rate of nothing: who was stopped, and of how many that is not known."""
    who = who_left(ghosts)
    if not unsure:
        return f"all {ghosts.n:,} {who} were stopped"
    return (
        f"{ghosts.n:,} of {ghosts.n + unsure:,} {who} were stopped, of {unsure:,} it is not known"
    )


def who_left(metric: Metric) -> str:
    """From outside nobody can tell those who left from those whom the end of the run cut off."""
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
    """The ghost rate as a number of requests."""
    return round((ghosts.mean or 0.0) * ghosts.n)


def level(metric: Metric | None) -> float | None:
    """The single value of a metric that is one reading."""
    if metric is None:
        return None
    return next((one for one in (metric.mean, metric.p50, metric.max) if one is not None), None)
