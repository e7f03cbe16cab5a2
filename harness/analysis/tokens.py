"""Tokens that the clients read, as well as the run can show.

Tokens are not events. If the server did not say in each event how many there were, the requests
that were read to the end show it: their own final usage / the events that showed text.
"""

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from harness.analysis.figure import Figures, Sample, rate, sampled
from harness.intervals import t_quantile
from harness.records import Delivery, Metric, Outcome, TokenCounting, Way, WireClose
from harness.stats import Bools, Floats, Ints

COUNTED_BY: Final = {
    "usage": "the server's own count in each event",
    "ids": "the ids of the tokens in each event",
    "events": "text events, one taken for one token",
    "events_calibrated": "text events, calibrated on the usage of completed streams",
    "mixed": "the server's count in some requests, text events in others",
}
_ROWS_AT_ONCE: Final = 20_000
_LIST: Final = pa.list_(pa.int64())
_NEVER_NS: Final = np.iinfo(np.int64).max // 2
_MOST_UNSEEN: Final = 2  # tokens of an answer that no event shows, such as one that ends it
_HIDES: Final = 2.0  # times the tokens that were shown: fewer may be events that brought more


def token_gaps(requests: pd.DataFrame, wanted: Bools | None = None) -> tuple[Floats, Ints]:
    """All gaps between consecutive token events of one answer (s), request after request, and how
    many each of the `wanted` requests has. The n answers to one prompt grow in step, so there the
    event before is the n-th before."""
    answers = requests["n"].to_numpy(dtype=np.int64)
    lengths_of_parts = map(_lengths_of, _chunks(requests["token_times_ns"]))
    num_events = np.concatenate([np.empty(0, np.int64), *lengths_of_parts])
    if wanted is not None:
        answers, num_events = answers[wanted], num_events[wanted]
    num_gaps = np.maximum(num_events - answers, 0)
    gaps = np.empty(int(num_gaps.sum()))
    filled = seen = 0
    for times, lengths in _parts(requests["token_times_ns"], wanted):
        gaps_ns = _gaps(times, lengths, answers[seen : seen + len(lengths)])
        np.divide(gaps_ns, 1e9, out=gaps[filled : filled + len(gaps_ns)])
        filled, seen = filled + len(gaps_ns), seen + len(lengths)
    return gaps, num_gaps


def read_by(requests: pd.DataFrame, t_ns: Ints) -> Floats:
    ascending = np.sort(t_ns)
    read = np.zeros(len(t_ns) + 1)
    brought = _parts(requests["event_tokens"])
    for (times, _), (tokens, _) in zip(_parts(requests["token_times_ns"]), brought, strict=True):
        counted_from = np.searchsorted(ascending, times)
        read += np.bincount(counted_from, weights=tokens, minlength=len(read))
    return np.cumsum(read)[np.searchsorted(ascending, t_ns)]


def read_after(
    requests: pd.DataFrame,
    wanted: Bools,
    planned: Ints,
    *,
    pause_ns: Ints,
    sent_ns: Ints,
    scale: Floats,
) -> Floats:
    """How many tokens came, for each `wanted` request, after the `planned` ones: with the last of
    them, in one event, or no sooner than `pause_ns` after it (none planned: after the sending).
    `scale`: tokens that each of these requests had for one that it counted."""
    after, seen = [np.empty(0)], 0
    brought = _parts(requests["event_tokens"], wanted)
    arrived = _parts(requests["token_times_ns"], wanted)
    for (times, lengths), (counted, _) in zip(arrived, brought, strict=True):
        some = slice(seen, seen := seen + len(lengths))
        number = np.repeat(np.arange(len(lengths)), lengths)
        tokens = counted * scale[some][number]
        all_of_each = np.bincount(number, tokens, len(lengths))
        so_far = np.cumsum(tokens) - (np.cumsum(all_of_each) - all_of_each)[number]
        is_reached = so_far >= planned[some][number]
        last_ns = np.full(len(lengths), _NEVER_NS)
        np.minimum.at(last_ns, number[is_reached], times[is_reached])
        leaves_ns = np.where(planned[some] == 0, sent_ns[some], last_ns) + pause_ns[some]
        in_time = np.bincount(number, tokens * (times < leaves_ns[number]), len(lengths))
        reached_with = np.full(len(lengths), np.inf)
        np.minimum.at(reached_with, number[is_reached], so_far[is_reached])
        with_the_last = np.where(planned[some] == 0, 0, reached_with - planned[some])
        allowed = np.maximum(planned[some], in_time - with_the_last)
        too_many = np.maximum(all_of_each - allowed, 0)
        after.append(too_many.astype(np.float64))
    return np.concatenate(after)


def without_tokens(requests: pd.DataFrame) -> pd.DataFrame:
    return requests.drop(columns=["token_times_ns", "event_tokens"], errors="ignore")


def first_times(requests: pd.DataFrame, *, every_ns: int) -> Ints:
    firsts = [np.empty(0, dtype=np.int64)]
    for times, _ in _parts(requests["token_times_ns"]):
        interval, which = pd.factorize(times // every_ns)
        first = np.full(len(which), _NEVER_NS)
        np.minimum.at(first, interval, times)
        firsts.append(first)
    return np.sort(np.concatenate(firsts))


def _parts(lists: pd.Series, wanted: Bools | None = None) -> Iterator[tuple[Ints, Ints]]:
    seen = 0
    for chunk in _chunks(lists):
        for first in range(0, len(chunk), _ROWS_AT_ONCE):
            some = chunk.slice(first, _ROWS_AT_ONCE)
            num_rows = len(some)
            if wanted is not None:
                some = some.filter(pa.array(wanted[seen : seen + num_rows]))
            seen += num_rows
            yield some.flatten().to_numpy(), _lengths_of(some)


def _lengths_of(chunk: pa.ListArray) -> Ints:
    lengths: Ints = pc.list_value_length(chunk).to_numpy().astype(np.int64)
    return lengths


def _chunks(lists: pd.Series) -> list[pa.ListArray]:
    is_arrow = isinstance(lists.dtype, pd.ArrowDtype)
    column = pa.array(lists) if is_arrow else pa.array(lists, type=_LIST)
    return column.chunks if isinstance(column, pa.ChunkedArray) else [column]


def _gaps(times: Ints, lengths: Ints, answers: Ints) -> Ints:
    if (answers == 1).all():  # as nearly always: nothing more is made for millions of tokens
        first = np.cumsum(lengths) - lengths
        is_inside = np.ones(len(times), dtype=bool)
        is_inside[first[lengths > 0]] = False
        within: Ints = np.diff(times)[is_inside[1:]]
        return within
    number = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    place = np.arange(len(times))
    before = np.maximum(place - answers[number], 0)
    has_gap = (place >= answers[number]) & (number[before] == number)
    gaps: Ints = (times - times[before])[has_gap]
    return gaps


def _counted_by_events(requests: pd.DataFrame) -> pd.DataFrame:
    """Answers whose events and tokens are both known."""
    return without_tokens(requests)[
        (requests["token_counting"] == TokenCounting.EVENTS)
        & (requests["outcome"] == Outcome.COMPLETED)
        & requests["completion_tokens"].notna()
    ]


def came_whole(requests: pd.DataFrame) -> bool:
    """Each answer of `tokens_per_event` came in one event."""
    return bool((_counted_by_events(requests)["tokens_read"] <= 1).all())


def tokens_per_event(requests: pd.DataFrame) -> float | None:
    known = _counted_by_events(requests)
    events = int(known["tokens_read"].sum())
    return int(known["completion_tokens"].sum()) / events if events else None


def tokens_read(requests: pd.DataFrame) -> Floats:
    """Tokens that each client had read when it ended or left.

    A completed request's own final count if it has one; else the count of the row, with events
    turned into tokens by `tokens_per_event`.
    """
    scaled = requests["tokens_read"].to_numpy(dtype=float) * _scale(requests)
    final = requests["completion_tokens"].to_numpy(dtype=float, na_value=np.nan)
    completed = (requests["outcome"] == Outcome.COMPLETED).to_numpy(dtype=bool)
    return np.where(completed & ~np.isnan(final), final, scaled)


def tokens_shown(requests: pd.DataFrame) -> Floats:
    """As `tokens_read`, without reasoning that a server counts and does not show. A row that
    counted in calibrated events has it if the final count is more than its events can have
    brought: twice as much, beyond the error, which is a share of the true count."""
    tokens, shown = tokens_read(requests), requests["tokens_read"].to_numpy(dtype=float)
    error = requests["tokens_error"].to_numpy(dtype=float, na_value=np.nan)
    return np.where(tokens * (1 - error) > _HIDES * shown + _MOST_UNSEEN, shown, tokens)


def _scale(requests: pd.DataFrame) -> Floats:
    """Tokens for one that a row counted: events that were each taken for one token had more."""
    by_events = (requests["token_counting"] == TokenCounting.EVENTS).to_numpy(dtype=bool)
    return np.where(by_events, tokens_per_event(requests) or 1.0, 1.0)


def taken_for(requests: pd.DataFrame) -> tuple[float, float] | None:
    """What an event was taken for by rows that counted in calibrated events, on average, and the
    share by which that may miss what a user that left has read, else any user (the median of the
    rows); None if no row did."""
    if requests["tokens_per_event"].isna().all():
        return None
    of_each = requests["tokens_per_event"].astype(float)
    errors = requests["tokens_error"].astype(float)
    of_left = errors[requests["outcome"] == Outcome.ABANDONED]
    return float(of_each.mean()), float((errors if of_left.isna().all() else of_left).median())


def prompt_total(requests: pd.DataFrame, wanted: Bools) -> tuple[float, float] | None:
    """Prompt tokens of the `wanted` requests, and by how much that may be off (95 %).

    Many servers send the prompt's length only at the end of an answer, so it is not known for
    requests that were left: their mean is taken to be that of the k requests that got it. The sum
    of g such prompts lies within t(k - 1) * s * sqrt(g + g^2 / k), where the first term is their
    own scatter and the second that of the mean. None if too few are known to show a sum above 0.
    Source: Hahn and Meeker, Statistical Intervals, section 4.8 (prediction interval of a future
    mean).
    """
    known = requests["prompt_tokens"].dropna().astype(float)
    prompts = requests.loc[wanted, "prompt_tokens"].astype(float)
    guessed = int(prompts.isna().sum())
    if len(known) < (2 if guessed else 1):
        return None
    total = float(prompts.fillna(known.mean()).sum())
    if not guessed:
        return total, 0.0
    k, scatter = len(known), float(known.std(ddof=1))
    spread = t_quantile(0.975, k - 1) * scatter * math.sqrt(guessed + guessed**2 / k)
    return (total, spread) if spread < total else None


def token_counting(requests: pd.DataFrame) -> str | None:
    kinds = set(requests["token_counting"])
    if not kinds:
        return None
    is_calibrated = TokenCounting.CALIBRATED in kinds or tokens_per_event(requests) is not None
    if kinds <= {TokenCounting.EVENTS, TokenCounting.CALIBRATED} and is_calibrated:
        return "events_calibrated"
    return str(kinds.pop()) if len(kinds) == 1 else "mixed"


def over_read_figures(requests: pd.DataFrame) -> Figures:
    """The tokens that each request left had read beyond its plan.

    The plan allows `planned_abandon` tokens, or as many as came before the planned moment, if that
    is more: `think_ns` after the last planned token (after the sending, if none was planned). What
    came in one event with that token is beyond it.
    `others.unread_at_t0`: of clients that closed (way "fin"), the share with bytes still unread in
    the kernel, which turns the close into a reset.
    """
    plain = without_tokens(requests)
    has_left = (
        (plain["outcome"] == Outcome.ABANDONED)
        & (plain["delivery"] == Delivery.STREAM)
        & plain["planned_abandon"].notna()
        & plain["think_ns"].notna()
    ).to_numpy(dtype=bool)
    left = plain[has_left]
    over = read_after(
        requests,
        has_left,
        left["planned_abandon"].to_numpy(dtype=np.int64),
        pause_ns=left["think_ns"].to_numpy(dtype=np.int64),
        sent_ns=left["sent_ns"].to_numpy(dtype=np.int64),
        scale=_scale(requests)[has_left],
    )
    why_empty = "no stream was left by plan"
    figure = sampled("over_read_tokens", Sample(values=over), why_empty, method="client")
    closed = left[left["way"] == Way.FIN]
    if isinstance(figure, Metric) and len(closed):
        unread = int((closed["wire_close"] == WireClose.RST).sum())
        figure.others["unread_at_t0"] = rate(unread, len(closed), method="client")
    return {"over_read_tokens": figure}
