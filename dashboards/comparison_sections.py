"""The pictures of a comparison, each with what it shows, what is good, or why it is not there."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from dashboards import comparison_figures as draw
from dashboards.comparison_figures import Ratio
from dashboards.contenders import Contender, Match
from dashboards.section import Picture, Section, median_and_p99
from harness.analysis.compare import Limits, Pair, standing
from harness.analysis.stats import Curve
from harness.export.comparison import name_of, steps_differ, times
from harness.formatting import between, bounded
from harness.metrics import METRICS
from harness.records import Metric

WAITS: Final = (
    ("slot_recovery_s", "from leaving to the first token of somebody who waited, seen by a client"),
    ("slot_refill_s", "from the slot coming free to the next request in it"),
    ("ttft_s", "first token of those who stayed"),
    ("itl_s", "between tokens of those who stayed"),
)
_IN_STEPS: Final = (
    "Times in steps of each engine. What does not wait for a step looks better here the longer the "
    "steps are: a time counts as surely better or worse only where it is so as measured, too."
)
_BESIDE_STEPS: Final = "As measured. What waits for a step looks worse the longer the steps are."


def sections(match: Match) -> list[Section]:
    """In reading order."""
    return [_ratios(match), _curves(match), _waste(match), _waits(match)]


def _ratios(match: Match) -> Section:
    section = Section(
        name="ratios",
        title="Every figure against the baseline",
        shows="Each dot is a figure of the candidate as so many times that of the baseline, with "
        "its 95 % interval where there is one. A filled circle is surely better, a cross surely "
        "worse, a hollow circle could be either; a hollow diamond is not judged. Of several "
        "candidates each has its number behind its dots.",
        good="left of 1, but for figures of which more is better, whose names say so.",
    )
    if any(steps_differ(comparison) for _, comparison in match.candidates):
        pictures = [
            _ratio_picture("ratios-in-steps", list(_dots(match, _in_steps)), _IN_STEPS),
            _ratio_picture("ratios", list(_dots(match, _as_measured)), _BESIDE_STEPS),
        ]
    else:
        pictures = [_ratio_picture("ratios", list(_dots(match, _as_measured)), "As measured.")]
    drawn = [picture for picture in pictures if picture is not None]
    if not drawn:
        return section.without("No figure is above 0 in both runs, so there is no ratio.")
    return section.drawn(*drawn)


def _ratio_picture(name: str, dots: list[Ratio], note: str) -> Picture | None:
    if not dots:
        return None
    alt = f"Ratios to the baseline with intervals. {' '.join(f'{dot.words}.' for dot in dots)}"
    return Picture(name=name, figure=draw.ratios(dots), alt=alt, note=note)


def _as_measured(pair: Pair) -> tuple[float | None, Limits | None]:
    return pair.ratio, pair.ratio_ci95


def _in_steps(pair: Pair) -> tuple[float | None, Limits | None]:
    return pair.ratio_in_steps, pair.ratio_in_steps_ci95


def _dots(
    match: Match, ratio_of: Callable[[Pair], tuple[float | None, Limits | None]]
) -> Iterator[Ratio]:
    for candidate, comparison in match.candidates:
        for pair in comparison.pairs:
            ratio, limits = ratio_of(pair)
            if ratio is None:
                continue
            name, stands = name_of(pair), standing(pair)
            sure = "" if limits is None else f" ({between(limits, '')})"
            yield Ratio(
                candidate=candidate.label,
                figure=f"{name} (more is better)"
                if METRICS[pair.metric].better == "more"
                else name,
                ratio=ratio,
                limits=limits,
                standing=stands,
                words=f"{candidate.label}: {name} {times(ratio)}{sure}, {stands}",
            )


def _curves(match: Match) -> Section:
    section = Section(
        name="cancel-latency",
        title="How long until each server let go",
        shows="The share of abandoned requests whose slot and blocks were free again, by time "
        "since the user left. A curve that does not reach 100 % has ghosts: requests that were "
        "never stopped. Of more than 400 requests every so many are drawn.",
        good="the steeper and the further left, the better.",
    )
    found = {one.label: (one, curve) for one in match.contenders if (curve := one.cancel_curve())}
    if not found:
        return section.without("No run has a log of single cancels.")
    missing = [one.label for one in match.contenders if one.label not in found]
    curves = {_with_ghosts(label, curve): curve for label, (_, curve) in found.items()}
    of_ms = dict.fromkeys(curves, 1e-3)
    words = " ".join(
        f"{label}: {median_and_p99(one.metrics.get('cancel_latency_s'))}"
        for label, (one, _) in found.items()
    )
    figure = draw.cancel_curves(curves, units=of_ms, of="milliseconds")
    pictures = [Picture(name="curves", figure=figure, alt=f"Curves of cancel latency. {words}")]
    step_times = [_step_s(one) for one, _ in found.values()]
    if all(step_times) and len(set(step_times)) > 1:
        of_steps = dict(zip(curves, (step or 1.0 for step in step_times), strict=True))
        pictures.append(
            Picture(
                name="curves-in-steps",
                figure=draw.cancel_curves(curves, units=of_steps, of="steps of each engine"),
                alt="The same with each run's time in steps of its own engine.",
                note="The same in steps: each run's times divided by the median of its step time.",
            )
        )
    if missing:
        section = section.without(f"No log of single cancels in: {', '.join(missing)}.")
    return section.drawn(*pictures)


def _with_ghosts(label: str, curve: Curve) -> str:
    ghosts = int(curve.censored.sum())
    return f"{label} ({ghosts:,} of {curve.n:,} never)" if ghosts else label


def _step_s(one: Contender) -> float | None:
    return one.metrics["step_s"].p50 if "step_s" in one.metrics else None


def _waste(match: Match) -> Section:
    section = Section(
        name="waste",
        title="Tokens generated for nobody",
        shows="Mean of the abandoned requests; the whisker is the 95 % interval of the sum.",
        good="one or two: the token on its way and the step in flight.",
    )
    known = [one for one in match.contenders if _is_known(one.metrics, "wasted_tokens")]
    runs = {_with_bound(one.label, one.metrics["wasted_tokens"]): one.metrics for one in known}
    if not runs:
        return section.without("No run can tell what was generated for those who had left.")
    words = "; ".join(f"{run}: {bounded(of['wasted_tokens'], 'mean')}" for run, of in runs.items())
    missing = [one.label for one in match.contenders if one not in known]
    if missing:
        section = section.without(f"Not measurable in: {', '.join(missing)}.")
    return section.drawn(
        Picture(name="waste", figure=draw.waste(runs), alt=f"Bars of wasted tokens. {words}.")
    )


def _with_bound(label: str, metric: Metric) -> str:
    """A bar that is a bound says so under it."""
    words = {"lower": " (at least)", "upper": " (at most)"}
    return label + words.get(metric.bound, "")


def _is_known(metrics: Mapping[str, Metric], name: str) -> bool:
    return name in metrics and metrics[name].mean is not None


def _waits(match: Match) -> Section:
    section = Section(
        name="waits",
        title="What the others waited",
        shows="Median with its 95 % interval (dot), 90th (diamond) and 99th percentile (bar).",
        good="the further left, the better.",
    )
    pictures = []
    for name, what in WAITS:
        runs = {
            one.label: one.metrics[name]
            for one in match.contenders
            if name in one.metrics and one.metrics[name].p50 is not None
        }
        if runs:
            words = " ".join(f"{run}: {median_and_p99(of)}" for run, of in runs.items())
            pictures.append(
                Picture(
                    name=name,
                    figure=draw.ladders(runs),
                    alt=f"{what}. {words}",
                    note=f"{name}: {what}",
                )
            )
    if not pictures:
        return section.without("No run knows of anybody who waited.")
    return section.drawn(*pictures)
