"""The sections of a run with several arms, and of the chunk frontier if that is its question."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from dashboards.figures import dots
from dashboards.figures.look import SCALES
from dashboards.sections.section import (
    CLIENT_TIMES,
    Part,
    Picture,
    Section,
    ladder_pictures,
    section,
)
from harness.compare.pairs import FEWEST_ROUNDS, headline_differences, is_certain
from harness.export.library import Run
from harness.formatting import DASH, change_in_words, figure_of
from harness.metrics import METRICS, headline_figures, spoken, titled
from harness.records import ArmsSummary, Difference, Metric

MOST_PICTURES: Final = 6
MOST_NAMED: Final = 6  # arms in a sentence, or as columns
FRONTIER: Final = "chunk_frontier"
GAPS, FIRST, CANCEL = "itl_s", "ttft_s", "cancel_latency_prefill_s"
BUDGET, THRESHOLD, WHOLE = "token budget", "long-prefill threshold", "no chunking"


def sections(run: Run) -> list[Section]:
    asked = [_frontier(run), _cancel_by_chunk(run)] if is_frontier(run.manifest.workload) else []
    return [*asked, _rounds(run), _survivors(run), _requests(run)]


def change(name: str, one: Difference) -> str:
    """ "0.41 times (0.35 to 0.48)" """
    value, limits = change_in_words(one, METRICS[name].unit)
    if (one.ratio_ci95 or one.difference_ci95) in ((1.0, 1.0), (0.0, 0.0)):
        return "unchanged in every round"
    if limits == DASH:  # the remarks say once how many rounds it takes
        return value if one.n < FEWEST_ROUNDS else f"{value}, {one.note}"
    return f"{value} ({limits})"


def listed(texts: Iterable[str], between: str = "; ") -> str:
    """The first few: there may be hundreds of arms."""
    known = list(texts)
    more = len(known[MOST_NAMED:])
    return between.join([*known[:MOST_NAMED], *([f"and {more:,} more"] if more else [])])


@section(
    "rounds",
    "Round by round",
    "A dot for each round; the bar is the mean of the rounds with its 95 % interval (Student's t, "
    "from three rounds on).",
    good="dots of an arm that lie close together, and arms that do not overlap.",
)
def _rounds(run: Run) -> Iterator[Part]:
    drawn = _worth_drawing(run.of_arms)
    if not drawn:
        yield "No headline figure has a value in any round."
    yield from (_round_picture(run.of_arms, name, key) for name, key in drawn)


def _round_picture(summary: ArmsSummary, name: str, key: str) -> Picture:
    values = {arm: one.per_round.get(name, {}).get(key, []) for arm, one in summary.arms.items()}
    changes = [
        f"{one.arm} against {one.reference}: {change(name, one)}"
        for one in summary.differences.get(name, {}).get(key, [])
    ]
    return Picture(
        name=f"rounds-{name}-{key}",
        figure=dots.per_round(values, title=spoken(name, key), unit=METRICS[name].unit),
        alt=f"{titled(name, key)} of each arm, one dot a round. {listed(changes)}",
    )


def _worth_drawing(summary: ArmsSummary) -> list[tuple[str, str]]:
    certain = {(name, key) for name, key, one in headline_differences(summary) if is_certain(one)}
    drawable = [
        (name, key)
        for name, key in headline_figures(summary.metrics, summary.headlines)
        if any(key in arm.per_round.get(name, {}) for arm in summary.arms.values())
    ]
    asked = [pair for pair in drawable if pair[0] in summary.headlines]
    others = [pair for pair in drawable if pair in certain and pair not in asked]
    return [*asked, *others][:MOST_PICTURES] or drawable[:1]


@section(
    "survivors",
    "The users who stayed, arm by arm",
    "Times of users who were to stay to the end, of all rounds together: median (dot), p90 "
    "(diamond), p99 (bar).",
    good="arms alike: the difference is what cancellation costs the users who stay.",
)
def _survivors(run: Run) -> Iterator[Part]:
    otherwise = "No user stayed to the end in any arm."
    return ladder_pictures(CLIENT_TIMES, run.of_arms.metrics, otherwise, prefix="survivors-")


@section("requests", "Single requests", "", good="")
def _requests(run: Run) -> Iterator[Part]:
    first = next(iter(run.of_arms.arms))
    yield (
        "Each round of each arm is a run of its own, with a report on its single "
        f"requests: walkaway report RUN/rounds/1-{first}, where RUN is this run's folder."
    )


def is_frontier(workload: Mapping[str, Any]) -> bool:
    return bool(workload["load"]["kind"] == FRONTIER)


class ChunkLimit(NamedTuple):
    """The most tokens of a prompt in a step of an arm, and the setting that limits them."""

    size: int
    kind: str

    def __str__(self) -> str:
        return {BUDGET: f"{self.size:,}", WHOLE: WHOLE}.get(self.kind, f"{self.size:,} (threshold)")


def frontier_sentence(run: Run) -> str | None:
    found = [(chunk, run.of_arms.arms[name].metrics) for name, chunk in _chunks(run).items()]
    found = [(chunk, metrics) for chunk, metrics in found if {GAPS, FIRST} <= metrics.keys()]
    ends = [(chunk.size, metrics) for chunk, metrics in found if chunk.kind != WHOLE]
    if len(ends) < 2:
        return None
    (small, at_small), (large, at_large) = ends[0], ends[-1]
    cancel = ""
    if CANCEL in at_small and CANCEL in at_large:
        cancel = (
            " A request abandoned during its prefill was let go of after "
            f"{figure_of(at_small[CANCEL], 'p50')} and {figure_of(at_large[CANCEL], 'p50')} "
            "(medians)."
        )
    return (
        f"From chunks of {small:,} tokens to {large:,}, the long prompt's first token comes after "
        f"{figure_of(at_large[FIRST], 'p50')} instead of {figure_of(at_small[FIRST], 'p50')} "
        f"(medians), and a bystander waits up to {figure_of(at_large[GAPS], 'p99')} instead of "
        f"{figure_of(at_small[GAPS], 'p99')} for the next token (99th percentiles).{cancel}"
        + "".join(
            f" Without chunking it comes after {figure_of(whole[FIRST], 'p50')}, and a bystander "
            f"waits up to {figure_of(whole[GAPS], 'p99')}."
            for chunk, whole in found
            if chunk.kind == WHOLE
        )
    )


def _chunks(run: Run) -> dict[str, ChunkLimit]:
    """The chunks by arm, the smallest first. Arms whose budget is not known are left out."""
    workload = run.manifest.workload
    chunks = {}
    for arm in workload["arms"]:
        engine = workload.get("engine", {}) | arm["engine"]
        if (size := engine.get("max_num_batched_tokens")) is None:
            continue
        kind = WHOLE if engine.get("enable_chunked_prefill") is False else BUDGET
        if threshold := engine.get("long_prefill_token_threshold"):
            size, kind = threshold, THRESHOLD
        chunks[arm["name"]] = ChunkLimit(size, kind)
    return dict(sorted(chunks.items(), key=lambda item: item[1]))


@section(
    "frontier",
    "Cost and gain of a larger chunk",
    "Each point is a chunk size (tokens a step) and the setting that limits it: to the right, "
    "bystanders wait longer between two tokens (99th percentile); further up, the long prompt "
    "waits longer for its first (median).",
    good="a point low and to the left; where the line bends is the size to choose.",
)
def _frontier(run: Run) -> Iterator[Part]:
    gaps, first = _by_chunk(run, GAPS, "p99"), _by_chunk(run, FIRST, "p50")
    points = [
        dots.FrontierPoint(chunk.kind, str(chunk), gaps[chunk], first[chunk])
        for chunk in gaps
        if chunk in first
    ]
    if not points:
        yield "No arm has both figures."
        return
    said = frontier_sentence(run) or ""
    yield Picture(name="frontier", figure=dots.frontier(points), alt=said)


@section(
    "frontier-cancel",
    "How long a prefill runs on without its user",
    "Cancel latency of prompts abandoned during their prefill, by chunk size: median, and 99th "
    "percentile. No request is let go of before the step in progress ends, and a step is as long "
    "as its chunk.",
    good="about half a step in the median, one step at most.",
)
def _cancel_by_chunk(run: Run) -> Iterator[Part]:
    by_figure = {key: _by_chunk(run, CANCEL, key) for key, *_ in dots.QUANTILES}
    if not by_figure["p50"]:
        yield "No arm has a cancel latency in prefill."
        return
    said = ", ".join(f"{chunk}: {y:.3g} ms" for chunk, y in by_figure["p50"].items())
    yield Picture(
        name="frontier-cancel",
        figure=dots.cancel_by_chunk(
            {key: {str(chunk): y for chunk, y in one.items()} for key, one in by_figure.items()}
        ),
        alt=f"Median cancel latency in prefill by chunk size: {said}.",
    )


def _by_chunk(run: Run, name: str, key: str) -> dict[ChunkLimit, float]:
    found = {}
    for arm, chunk in _chunks(run).items():
        metric: Metric | None = run.of_arms.arms[arm].metrics.get(name)
        value = None if metric is None else getattr(metric, key)
        if value is not None:
            found[chunk] = float(value) * SCALES["s"][0]
    return found
