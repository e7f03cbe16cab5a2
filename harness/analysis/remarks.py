"""How far a run's figures may be believed, in sentences: a run that shows nothing is `invalid`,
what makes a figure mean less than its name says is a `warning`, a reader's background is `info`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from harness.analysis.agreement import disagreements
from harness.analysis.early_stop import EARLY_STOP_FIGURES
from harness.analysis.figure import Figure, Figures, NotMeasurable
from harness.analysis.gpu import FEWEST_CHANGES
from harness.analysis.kills import KillEffects, about_kills
from harness.analysis.leaks import health_warnings
from harness.analysis.load_side import (
    arrival_warnings,
    losses,
    saturations,
    why_schedule_means_nothing,
)
from harness.analysis.next_requests import session_remarks
from harness.analysis.open_requests import LEFT, QUEUED, RACE, reset_warnings
from harness.analysis.plan_failure import (
    NOTHING_SHOWN,
    answered_too_soon,
    planned_to_leave,
    textless_answers,
)
from harness.analysis.probe_train import TrainLatencies
from harness.analysis.run_facts import RunFacts
from harness.analysis.scraped import readings_of, typical_step_s
from harness.analysis.tokens import (
    COUNTED_BY,
    came_whole,
    taken_for,
    token_counting,
    tokens_per_event,
    tokens_read,
    without_tokens,
)
from harness.formatting import error_kind, number, quantity, spoken_outcome
from harness.intervals import fewest_for_rate_below
from harness.metrics import CANCEL_LATENCY
from harness.records import (
    WENT_WRONG,
    Audit,
    Delivery,
    Level,
    Metric,
    Outcome,
    Remark,
    Simulated,
    Steady,
    Summary,
)
from harness.store.frames import RunFrames
from harness.workload.target import NO_LIMIT_KEY
from harness.workload.tasks import parse_text

_MOST_KINDS: Final = 3  # of errors that are listed
MOST_WARM_UP: Final = 1 / 3  # of the load: less may be chance
_MOST_STRETCHED: Final = 1.5  # times the interval that was asked for
_FLOOR_OF: Final = {"client": "client_lag_s", "probe": "client_lag_s", "gauge": "scrape_interval_s"}
_NO_TIMES: Final = {*_FLOOR_OF.values(), "gpu_interval_s", "start_delay_s"}  # to be judged by it
_BROKEN_OFF: Final = {
    "interrupted": "the run was interrupted: the figures are of what had happened until then",
    "target_failed": "the target or the load failed: the figures are of what had been collected "
    "until then",
}


def remarks(
    frames: RunFrames,
    observed: tuple[pd.DataFrame, KillEffects, TrainLatencies | NotMeasurable],
    facts: RunFacts,
    figures: Figures,
    summary: Summary,
) -> list[Remark]:
    cancels, kills, train = observed
    requests, manifest = without_tokens(frames.requests), frames.manifest
    audit = summary.audit
    texts: dict[Level, list[Iterable[str]]] = {
        "invalid": [
            ["no request ended: there is nothing to report"] if requests.empty else [],
            [] if summary.plan_failed is None else [summary.plan_failed],
            why_schedule_means_nothing(frames, facts),
            saturations(summary.load_processes, figures),
        ],
        "warning": [
            [_BROKEN_OFF[facts.status]] if facts.status in _BROKEN_OFF else [],
            _about_outcomes(requests[~kills.is_killed], summary.plan_failed),
            _too_long(requests, manifest),
            _empty(requests),
            _errors(requests[~kills.is_killed], summary.plan_failed),
            _unread(requests),
            answered_too_soon(requests),
            textless_answers(requests),
            _sent_again(requests),
            _about_the_server(facts),
            _not_in_the_log(cancels, facts),
            _about_leaks(summary.breakdown["leaks_in_use"]),
            _too_little_left(frames, cancels, facts),
            _about_queued(frames, facts),
            reset_warnings(requests, cancels, facts),
            _about_the_train(train),
            (f"{name}: {why}" for name, why in summary.flags.items()),
            [] if summary.simulated is not None else _unwatched_load(frames),
            map(str, manifest.get("warnings") or []),
            [] if audit is None or audit.foreign_traffic is None else [audit.foreign_traffic],
            [] if audit is None else _about_cancels_counted(audit),
            losses(manifest, facts),
            health_warnings(manifest.get("probing") or {}),
            _about_leftovers(facts, figures),
            _about_scraping(frames, figures),
            _about_gpu(frames, figures),
            disagreements(summary.agreement),
            arrival_warnings(frames, figures),
            _about_warm_up(summary.steady),
            _about_known_texts(figures),
        ],
        "info": [
            [] if summary.simulated is None else _about_simulation(summary.simulated),
            _ended_before(cancels, facts),
            _about_races(requests, cancels, facts),
            about_kills(frames, kills),
            _about_counting(requests),
            session_remarks(requests),
            map(str, manifest.get("notes") or []),
            _too_few(figures),
        ],
    }
    said = [
        Remark(level=level, text=text)
        for level, found in texts.items()
        for some in found
        for text in some
    ]
    return in_level_order(said)


def in_level_order(said: Sequence[Remark]) -> list[Remark]:
    order = {"invalid": 0, "warning": 1, "info": 2}
    return sorted(said, key=lambda remark: order[remark.level])


def flags(figures: Mapping[str, Figure]) -> dict[str, str]:
    """Time figures whose median lies below the measurement floor, each with the reason.

    The floor of a client's stamps is its own lag (p99 of its ticks in the load window), the floor
    of scraped gauges the scrape interval.
    """
    found = {}
    for name, figure in figures.items():
        if not isinstance(figure, Metric) or figure.unit != "s" or figure.p50 is None:
            continue
        floor_name = _FLOOR_OF.get(figure.method, "")
        floor = figures.get(floor_name)
        if name in _NO_TIMES or not isinstance(floor, Metric):
            continue
        if floor.p99 is not None and figure.p50 < floor.p99:
            found[name] = (
                f"its median {quantity(figure.p50, 's')} is below the measurement floor: "
                f"{floor_name} p99 is {quantity(floor.p99, 's')}"
            )
    return found


def _about_outcomes(requests: pd.DataFrame, plan_failed: str | None) -> Iterator[str]:
    if requests.empty:
        return
    counts = requests["outcome"].value_counts()
    may_leave = requests["plan"].map(parse_text).isna().any()
    if Outcome.ABANDONED not in counts and may_leave and plan_failed is None:
        yield _why_nobody_left(requests)
    wrong = {outcome.value: int(counts[outcome]) for outcome in WENT_WRONG if outcome in counts}
    if wrong:
        what = ", ".join(f"{n} {spoken_outcome(name)}" for name, n in wrong.items())
        yield f"{sum(wrong.values())} of {len(requests)} requests went wrong: {what}"


def _about_simulation(simulated: Simulated) -> Iterator[str]:
    yield (
        f"{simulated}: no server ran; the engine's own scheduler was driven in virtual time, and "
        "each step took as long as the cost model says"
    )


def _about_the_server(facts: RunFacts) -> Iterator[str]:
    busy = facts.idle_before.get("running", 0) + facts.idle_before.get("waiting", 0)
    if busy:
        yield (
            f"{number(busy)} requests of other users were on the server before the load: "
            "differences of gauges and counters are not this run's alone"
        )
    if facts.has_lifecycle and not facts.clocks_agree:
        yield f"{facts.lacks('clock')}; figures that rest on both are not measurable"


def _not_in_the_log(cancels: pd.DataFrame, facts: RunFacts) -> Iterator[str]:
    if cancels.empty or not facts.has_lifecycle:
        return
    if unseen := int(cancels["arrived_ns"].isna().sum()):
        yield (
            f"{unseen} of {len(cancels)} abandoned requests are not in the lifecycle log: they are "
            "in no figure that rests on it"
        )
    if unwatched := int((cancels["censored"] & cancels["ghost"].isna()).sum()):
        yield (
            f"{unwatched} abandoned requests were still there when the observation ended, before "
            "the settle time was over: not in ghost_rate"
        )


def _ended_before(cancels: pd.DataFrame, facts: RunFacts) -> Iterator[str]:
    if facts.has_lifecycle and (ended := int((cancels["phase"] == "ended").sum())):
        yield (
            f"{ended} abandoned requests were finished by the server before their user left, or "
            "with the step that ran then: nothing was left to cancel"
        )


def _about_leaks(in_use: Mapping[str, float]) -> Iterator[str]:
    if in_use:
        what = " and ".join(f"{number(value)} {name}" for name, value in in_use.items())
        names = " and ".join(f"leaked_{name}" for name in in_use)
        yield f"{names}: of these, {what} are held by requests that are still running (ghosts)"


def _too_little_left(frames: RunFrames, cancels: pd.DataFrame, facts: RunFacts) -> Iterator[str]:
    """An abandoned request must have twice the settle time left to run on its own. Races for the
    last token have not, by their plan."""
    step_s, settle_s = typical_step_s(frames), facts.settle_s
    watched = cancels[cancels["plan"] != RACE]
    if watched.empty or step_s is None or not np.isfinite(settle_s):
        return
    at_t0 = watched["generated_tokens"] - watched["wasted_after_close_tokens"]
    at_t0 = at_t0.astype(float).fillna(watched["tokens_read"])
    short = int(((watched["max_tokens"] - at_t0) * step_s < 2 * settle_s).sum())
    if short:
        yield (
            f"{short} of {len(watched)} abandoned requests had less than twice the settle time "
            f"({quantity(settle_s, 's')}) left to run: a ghost among them looks like a natural "
            f"end; {_remedy(frames, step_s, settle_s)}"
        )


def _remedy(frames: RunFrames, step_s: float, settle_s: float) -> str:
    config = (frames.manifest.get("target") or {}).get("config") or {}
    context = config.get("max_model_len")
    if context is None:
        return "raise `answer_tokens` if the model's context allows it, else lower `settle.seconds`"
    room_s = (context - frames.requests["prompt_tokens"].fillna(0).max()) * step_s
    if room_s >= 2 * settle_s:
        return "raise `answer_tokens`, or lower `settle.seconds`"
    return (
        f"longer answers do not help, since a whole context of {context} tokens takes "
        f"{quantity(context * step_s, 's')}: lower `settle.seconds`, if the server lets go in less"
    )


def _about_queued(frames: RunFrames, facts: RunFacts) -> Iterator[str]:
    planned = int((frames.requests["plan"] == QUEUED).sum())
    if not planned or facts.has_lifecycle or "waiting" not in facts.metric_names:
        return
    what, name = f"{planned} were to leave while queued", facts.metric_names["waiting"]
    readings = readings_of(frames, facts, "waiting")
    if readings is None:
        yield f"{what}, but {name} was not scraped: whether they had waited is not known"
        return
    shown = readings.level[facts.is_in_load(readings.t_ns)] - facts.idle_before.get("waiting", 0.0)
    if not (shown > 0).any():
        yield (
            f"{what}, but {name} was 0 at all of {len(shown)} scrapes: the server "
            "seems to have had room for all, so they left during their prefill or later; take more "
            "users than it has batch slots"
        )


def _about_the_train(train: TrainLatencies | NotMeasurable) -> Iterator[str]:
    if isinstance(train, TrainLatencies) and train.drops_differ():
        (after, n), (controls, m) = train.dropped, train.dropped_controls
        yield (
            f"the stall guard dropped {after} of {n} readings after a cancel, but {controls} of "
            f"{m} controls: the server may stall because of a cancel, and cancel_latency_s by the "
            "train leaves these stalls out"
        )


def _unwatched_load(frames: RunFrames) -> Iterator[str]:
    if frames.client.empty and not frames.requests.empty:
        yield "the load did not watch itself: how late its stamps are is not known"


def _about_leftovers(facts: RunFacts, figures: Mapping[str, Figure]) -> Iterator[str]:
    ghosts = figures.get("ghost_rate")
    left = facts.idle_change("running")
    if not isinstance(ghosts, Metric) or ghosts.method == "exact" or not left or left < 0:
        return
    if going_on := facts.generated_later:
        why = f"ghosts: {number(going_on)} more tokens were counted while no client waited for any"
    elif facts.still_computing:
        why = "ghosts: the server still computed while no client waited for anything"
    elif facts.still_computing is None:
        why = "whether they still generate is not known: lost slots count as ghosts, too"
    else:
        why = (
            "no token was counted any more: lost slots, or a gauge that does not come back; they "
            "are not in ghost_rate"
        )
    yield f"{number(left)} requests still run after the settle time; {why}"


def _about_cancels_counted(audit: Audit) -> Iterator[str]:
    for one in audit.counters:
        if one.role.endswith("_cancelled") and one.verdict in ("stuck", "double", "gross", "lower"):
            low, high = one.due or (None, None)
            yield (
                f"{one.name} moved by {one.moved:g}, but the log says {low} to {high}: not every "
                "cancellation was counted once at every process that had the request"
            )


def _about_scraping(frames: RunFrames, figures: Mapping[str, Figure]) -> Iterator[str]:
    asked_s, found = frames.manifest.get("scrape_interval_s"), figures.get("scrape_interval_s")
    if asked_s is None or not isinstance(found, Metric) or found.p50 is None:
        return
    if found.p50 > _MOST_STRETCHED * asked_s:
        yield (
            f"/metrics was to be read every {quantity(asked_s, 's')} and was read every "
            f"{quantity(found.p50, 's')} (median): the server answers no faster, or this machine "
            "is too busy"
        )


def _about_gpu(frames: RunFrames, figures: Mapping[str, Figure]) -> Iterator[str]:
    interval = figures.get("gpu_interval_s")
    changes = interval.n + 1 if isinstance(interval, Metric) else 0
    if not frames.gpu.empty and changes < FEWEST_CHANGES:
        yield (
            f"the GPU's readings changed {quantity(changes, 'times')} during the load, so its "
            "figures may be of before it: make the load longer, or let the DCGM exporter collect "
            "more often than every 30 s (--collect-interval)"
        )


def _about_known_texts(figures: Mapping[str, Figure]) -> Iterator[str]:
    unknown = {name: figures.get(name) for name in EARLY_STOP_FIGURES}
    reasons = {one.reason for one in unknown.values() if isinstance(one, NotMeasurable)}
    for reason in reasons:
        yield f"{', '.join(unknown)}: not measurable: {reason}"


def _about_warm_up(steady: Steady | None) -> Iterator[str]:
    if steady is None or steady.is_steady is None:
        return
    if not steady.is_steady:
        yield (
            f"the load window is not steady ({steady.rule}): until its middle at least the "
            "throughput was still changing; make the load longer"
        )
    elif steady.warmup_share is not None and steady.warmup_share > MOST_WARM_UP:
        yield (
            f"the first {quantity(steady.warmup_share, 'ratio')} of the load were warm-up "
            f"({steady.rule}), and the figures are of all of it; make the load longer"
        )


def _about_races(requests: pd.DataFrame, cancels: pd.DataFrame, facts: RunFacts) -> Iterator[str]:
    raced = requests[requests["plan"] == RACE]
    late = int((raced["outcome"] == Outcome.COMPLETED).sum())
    left = cancels[cancels["plan"] == RACE]
    if not late and left.empty:
        return
    what = f"of {late + len(left)} races for the last token"
    if not facts.has_lifecycle or not facts.clocks_agree:
        yield (
            f"{what}, {late} read the whole answer; which of the other {len(left)} had finished by "
            "then, this server does not show"
        )
        return
    is_cancelled = left["finish_reason"] == "abort"
    was_over = (left["removed_ns"] <= left["t0_ns"]).fillna(value=False).astype(bool)
    yield (
        f"{what}, {int(is_cancelled.sum())} were cancelled, "
        f"{int((~is_cancelled & ~was_over).sum())} left before the server had finished and were "
        f"not (the last token was being made), {int((~is_cancelled & was_over).sum())} left after "
        f"it had finished, and {late} had read the whole answer"
    )


def _about_counting(requests: pd.DataFrame) -> Iterator[str]:
    unread = int((requests["outcome"].isin(LEFT) & (requests["delivery"] == Delivery.UNARY)).sum())
    if unread:
        yield (
            f"{unread} abandoned requests asked for an answer in one piece, so their clients had "
            "read nothing: all tokens generated for them are wasted_tokens, also those before t0"
        )
    if not requests["tokens_read"].any():
        return  # whatever was read came in one piece
    counting = token_counting(requests)
    if counting in (None, "usage"):
        return
    ratio = tokens_per_event(requests) if counting == "events_calibrated" else None
    at = "" if ratio is None else f": {quantity(ratio, 'tokens')} an event"
    if ratio is not None and ratio > 1 and came_whole(requests):
        at = "; each answer came in one event, so that the tokens of a part of one are not known"
    if (known := taken_for(requests)) is not None:
        at = f": {quantity(known[0], 'tokens')} an event{_how_sure(known[1])}"
    yield f"tokens read were counted by {COUNTED_BY[counting]}{at}"


def _how_sure(error: float) -> str:
    """`error`: a share of what was read."""
    if not error:
        return ", as the server's own counts confirm"
    if error >= 1:
        return "; how many tokens the users who left had read is not known"
    return f"; what the users who left had read is known within {quantity(error, 'ratio')} (median)"


def _unread(requests: pd.DataFrame) -> Iterator[str]:
    unread = requests["unread"].dropna()
    if not unread.empty:
        yield (
            f"{len(unread)} of {len(requests)} answers held data that could not be read, and was "
            f"left out: {unread.iloc[0]}"
        )


def _too_few(figures: Mapping[str, Figure]) -> Iterator[str]:
    latency, ghosts = figures.get(CANCEL_LATENCY), figures.get("ghost_rate")
    if isinstance(latency, Metric):
        if "p99_ci95" in latency.needs and latency.p50 is not None:
            yield (
                f"{CANCEL_LATENCY}: not enough data for an interval of p99: n is "
                f"{latency.n}, and {latency.needs['p99_ci95']} would be enough"
            )
        for one in (latency, *latency.others.values()):
            if isinstance(one, Metric) and one.mean is None and one.upper95 is not None:
                yield _only_a_bound(one)
    if not isinstance(ghosts, Metric) or ghosts.mean != 0 or ghosts.upper95 is None:
        return
    for rate in (rate for rate in (0.01, 0.001) if ghosts.upper95 >= rate):
        yield (
            f"ghost_rate: none of {ghosts.n} shows at 95 % that it is below "
            f"{ghosts.upper95:.2%}; for below {rate:.1%} it takes "
            f"{fewest_for_rate_below(rate)} abandons without a ghost"
        )
        return


def _only_a_bound(latency: Metric) -> str:
    enough = latency.needs.get("mean")
    what = "more would not do, take slot_recovery" if enough is None else f"{enough} would be"
    return (
        f"{CANCEL_LATENCY}: {latency.n} requests left are too few for a mean by {latency.method} "
        f"({what}): it is at most {quantity(latency.upper95, 's')} (95 %, with what old pages hide)"
    )


def _why_nobody_left(requests: pd.DataFrame) -> str:
    planned = requests[planned_to_leave(requests)]
    if planned.empty:
        return NOTHING_SHOWN
    fates = planned["outcome"].value_counts()
    what = ", ".join(f"{n} {str(name).replace('_', ' ')}" for name, n in fates.items())
    return f"{NOTHING_SHOWN}. Planned to be abandoned: {len(planned)}; they ended as: {what}"


def _too_long(requests: pd.DataFrame, manifest: Mapping[str, Any]) -> Iterator[str]:
    if ((manifest.get("target") or {}).get("spec") or {}).get("limit_key") == NO_LIMIT_KEY:
        return  # no length was asked for
    asked = (requests["max_tokens"] * requests["n"]).to_numpy(dtype=float)
    got = np.maximum(
        requests["tokens_read"].to_numpy(dtype=float),
        requests["completion_tokens"].to_numpy(dtype=float, na_value=0.0),
    )
    too_many = int((got > asked).sum())
    if too_many:
        yield (
            f"{too_many} of {len(requests)} answers were longer than their `max_tokens` (up to "
            f"{quantity(np.nanmax(got - asked), 'tokens')} more): the target ignores it, or counts "
            "otherwise; what a forgotten request costs is not bounded by it"
        )


def _empty(requests: pd.DataFrame) -> Iterator[str]:
    completed = requests[requests["outcome"] == Outcome.COMPLETED]
    empty = int((tokens_read(completed) == 0).sum()) if len(completed) else 0
    if empty:
        yield (
            f"{empty} of {len(completed)} completed answers held no token at all: their streams "
            "ended well, and empty"
        )


def _errors(requests: pd.DataFrame, plan_failed: str | None) -> Iterator[str]:
    """The error that is the reason why the plan failed is left out."""
    failed = requests[requests["outcome"].isin([Outcome.FAILED, Outcome.REJECTED])]
    texts = failed["error"].dropna().astype(str)
    if texts.empty:
        return
    kinds = texts.map(error_kind)
    counts = kinds.value_counts()
    for kind, n in counts.head(_MOST_KINDS).items():
        found = texts[kinds == kind]
        if plan_failed is None or found.min() not in plan_failed:
            yield f"{n} of {len(requests)} requests ended with: {found.iloc[0]}"
    if len(counts) > _MOST_KINDS:
        yield f"and {len(counts) - _MOST_KINDS} more kinds of errors: see requests.parquet"


def _sent_again(requests: pd.DataFrame) -> Iterator[str]:
    resent = int(requests["resent"].sum())
    if not resent:
        return
    yield (
        f"{resent} of {len(requests)} requests were sent once more: the connection that was kept "
        "ended without a byte of an answer. A server that closes idle connections does that, and "
        "one that drops requests, too; without `run.keep_alive` the latter is an error of its own"
    )
