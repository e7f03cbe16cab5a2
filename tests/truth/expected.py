"""The figures that a run's summary must show, computed from the server's own account.

A second opinion: nothing of the harness is imported.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.truth.known import Truth, seconds

EXACT_S = 1e-6  # the same stamps were subtracted: only rounding may differ
Limits = tuple[float, float]  # from and to; infinity: there is no such figure
NONE: Limits = (math.inf, math.inf)
QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


def exactly(value: float) -> Limits:
    return (value, value)


def around(value: float, tolerance: float) -> Limits:
    return (value - tolerance, value + tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Values with whether each is only known to be exceeded, and how far a figure may be off."""

    values: Sequence[tuple[float, bool]]
    tolerance: float = EXACT_S

    def quantile(self, share: float, *, looks_later: float = 0.0) -> float:
        """Kaplan-Meier: where the surviving share falls to 1 - share, or infinity.

        With every look that saw no end yet so much later: then more are still there at each end,
        and the quantile comes later or not at all.
        """
        shifted = [(v + looks_later * is_censored, is_censored) for v, is_censored in self.values]
        left, at_risk = 1.0, len(shifted)
        for value, is_censored in sorted(shifted):
            if not is_censored:
                left *= 1 - 1 / at_risk
                if 1 - left >= share - 1e-9:
                    return value
            at_risk -= 1
        return math.inf

    def limits(self) -> dict[str, Limits]:
        """From and to: a quantile moves with its own value and with the order of the values."""
        num_censored = sum(is_censored for _, is_censored in self.values)
        found = {"n": exactly(len(self.values)), "n_censored": exactly(num_censored)}
        for name, share in QUANTILES.items():
            low = self.quantile(share, looks_later=-2 * self.tolerance) - self.tolerance
            high = self.quantile(share, looks_later=2 * self.tolerance) + self.tolerance
            found[name] = (low, high)
        plain = [value for value, _ in self.values]
        if num_censored == 0 and plain:
            found |= {
                "mean": around(math.fsum(plain) / len(plain), self.tolerance),
                "max": around(max(plain), self.tolerance),
            }
        else:
            found |= {"mean": NONE, "max": NONE}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A figure that is one number."""

    value: float
    tolerance: float = EXACT_S

    def limits(self) -> dict[str, Limits]:
        return {"mean": around(self.value, self.tolerance)}


Figure = Sample | Number


GONE = ("abandoned", "cut_off", "timed_out")


def is_let_go(work: dict[str, Any]) -> bool:
    return bool(work["finish_reason"] == "abort")


def all_known(values: Iterable[float], tolerance: float = EXACT_S) -> Sample:
    return Sample(values=[(value, False) for value in values], tolerance=tolerance)


def expected_figures(known: Truth, *, settle_s: float) -> dict[str, Figure]:
    """Every figure of the summary that the server can know, by name.

    When clients read may be off by one step, and as much as they were late at the worst.
    """
    client_s = known.script["step_s"] + known.longest_token_lag_s
    return {
        **latency(known, settle_s),
        **waste(known),
        **refills(known),
        **survivors(known, client_s),
        **leaks(known),
        **capacity(known),
    }


def latency(known: Truth, settle_s: float) -> dict[str, Figure]:
    """The way of an abort, stage by stage; a ghost got no further than being seen. It was watched
    for the settle time, or less where that ended as soon as all was over."""
    done = [(t0, work) for t0, _, work in known.left if is_let_go(work)]
    ghosts = [
        (t0, min(t0 + int(settle_s * 1e9), known.settled_ns), work)
        for t0, _, work in known.left
        if not is_let_go(work)
    ]
    first_boundary = [known.steps_within(w["closed_ns"], w["removed_ns"]) <= 1 for _, w in done]
    return {
        "detect_s": all_known(seconds(t0, work["closed_ns"]) for t0, _, work in known.left),
        "signal_s": Sample(
            values=[(0.0, False) for _ in done]
            + [(seconds(work["closed_ns"], until), True) for _, until, work in ghosts]
        ),
        "wait_s": all_known(seconds(w["closed_ns"], w["removed_ns"]) for _, w in done),
        "free_s": all_known(seconds(w["removed_ns"], w["freed_ns"]) for _, w in done),
        "cancel_latency_s": Sample(
            values=[(seconds(t0, w["freed_ns"]), False) for t0, w in done]
            + [(seconds(t0, until), True) for t0, until, _ in ghosts]
        ),
        "cancel_latency_steps": Sample(
            values=[(known.steps_within(t0, w["freed_ns"]), False) for t0, w in done]
            + [(known.steps_within(t0, until), True) for t0, until, _ in ghosts]
        ),
        "removed_at_first_boundary": Number(value=sum(first_boundary) / len(first_boundary)),
        "ghost_rate": Number(value=len(ghosts) / len(known.left)),
    }


def waste(known: Truth) -> dict[str, Figure]:
    """Tokens, slots, blocks and device time spent on abandoned requests."""
    generated = [(t0, row, work["token_times_ns"]) for t0, row, work in known.left]
    total = [len(tokens) - row["tokens_read"] for _, row, tokens in generated]
    after = [sum(t > t0 for t in tokens) for t0, _, tokens in generated]
    batch = known.batch()
    gone = [row for row, _ in known.rows] + list(known.unseen)
    unread = [row for row in gone if not row["tokens_read"] and row["outcome"] in GONE]
    computed = sum(work["prompt_tokens"] for work in known.works.values() if work["token_times_ns"])
    read = sum(work["prompt_tokens"] for row, work in known.rows if row["tokens_read"])
    return {
        "wasted_prompt_tokens": Number(value=(computed - read) / len(unread)),
        "wasted_tokens": all_known(total),
        "wasted_after_close_tokens": all_known(after),
        "wasted_in_flight_tokens": all_known(a - b for a, b in zip(total, after, strict=True)),
        "slot_seconds_after_abandon": all_known(
            seconds(max(t0, w["admitted_ns"] or end), end) if end > t0 else 0.0
            for t0, w, end in (
                (t, w, w["removed_ns"] or known.settled_ns) for t, _, w in known.left
            )
        ),
        "block_seconds_after_abandon": all_known(
            block_seconds(known, work, t0) for t0, _, work in known.left
        ),
        "gpu_seconds_after_abandon": all_known(
            gpu_seconds(known, work, t0, batch) for t0, _, work in known.left
        ),
    }


def block_seconds(known: Truth, work: dict[str, Any], t0: int) -> float:
    """The area under the number of blocks that it held, from t0 until they were given back."""
    end = work["freed_ns"] or known.settled_ns
    levels = [*known.blocks_held(work), (end, 0)]
    return sum(
        blocks * seconds(max(since, t0), max(min(until, end), t0, since))
        for (since, blocks), (until, _) in pairwise(levels)
        if until > t0
    )


def blocks_at(known: Truth, work: dict[str, Any], t_ns: int) -> int:
    """How many it held then."""
    return [blocks for since, blocks in known.blocks_held(work) if since <= t_ns][-1]


def gpu_seconds(
    known: Truth, work: dict[str, Any], t0: int, batch: dict[int, dict[str, int]]
) -> float:
    """Each step's time after t0, times its share of the tokens that the step computed."""
    return sum(
        seconds(max(t0, known.started_ns(ended)), ended)
        * batch[ended][work["client_id"]]
        / sum(batch[ended].values())
        for ended in work["token_times_ns"]
        if ended > t0
    )


def refills(known: Truth) -> dict[str, Figure]:
    """From giving back a slot to its next owner's admission, where that one had been waiting."""
    ids = {work["client_id"] for _, _, work in known.left}
    gaps = [
        seconds(known.works[work["slot_from"]]["freed_ns"], work["admitted_ns"])
        for work in known.works.values()
        if work["slot_from"] in ids
    ]
    if not gaps:
        return {}
    return {"slot_refill_s": all_known(gaps), "refilled_next_schedule": Number(value=1.0)}


def survivors(known: Truth, tolerance: float) -> dict[str, Figure]:
    """What those who were to stay saw, told by when they asked and when the server sent; all who
    were served. When they asked is their own word: the comparison of the rows holds it against when
    the server heard of it."""
    sent = [work["sent_times_ns"][: row["tokens_read"]] for row, work in known.stayed]
    finished = [pair for pair in known.stayed if pair[0]["outcome"] == "completed"]
    served = sum(row["outcome"] == "completed" for row, _ in known.rows)
    waits = [
        (seconds(row["sent_ns"], times[0] if times else row["ended_ns"]), not times)
        for times, (row, _) in zip(sent, known.stayed, strict=True)
    ]
    waits += [
        (seconds(row["sent_ns"], row["ended_ns"]), True)
        for row in known.unseen
        if row["planned_abandon"] is None
    ]
    return {
        "ttft_s": Sample(values=waits, tolerance=tolerance),
        "itl_s": all_known(
            (seconds(a, b) for times in sent for a, b in pairwise(times)), tolerance
        ),
        "tpot_s": all_known(
            (seconds(t[0], t[-1]) / (len(t) - 1) for t in sent if len(t) > 1), tolerance
        ),
        "e2e_s": all_known(
            (seconds(row["sent_ns"], work["sent_times_ns"][-1]) for row, work in finished),
            tolerance,
        ),
        "goodput_rps": Number(value=served / seconds(*known.window_ns)),
    }


def leaks(known: Truth) -> dict[str, Figure]:
    """What was missing when the harness looked for the last time."""
    now = known.metrics_read_ns[-1]
    admitted = [work for work in known.all_works if (work["admitted_ns"] or now) < now]
    there = [work for work in admitted if (work["freed_ns"] or now) >= now]
    lost = sum(work["has_leaked_slot"] for work in known.all_works)
    held = sum(blocks_at(known, work, now) for work in there)
    leaked = sum(work["leaked_blocks"] for work in known.all_works)
    return {
        "leaked_slots": Number(value=len(there) + lost),
        "leaked_blocks": Number(value=held + leaked),
        "preemptions": Number(value=0),
        "recomputed_tokens": Number(value=0),
    }


def capacity(known: Truth) -> dict[str, Figure]:
    """How busy it was while there was load."""
    began, over = known.window_ns
    window_s = seconds(began, over)
    batch = known.batch()
    inside = [(start, end) for start, end in known.steps if start < over and end > began]
    busy = sum(len(batch[e]) * seconds(max(s, began), min(e, over)) for s, e in inside)
    tokens = sum(len(batch[end]) for _, end in inside if end <= over)
    reads = known.metrics_read_ns[1:-1]  # without the two that look at the idle server
    return {
        "slot_utilisation": Number(value=busy / (known.script["slots"] * window_s)),
        "throughput_tps": Number(value=tokens / window_s),
        "step_s": all_known(seconds(start, end) for start, end in inside),
        "scrape_interval_s": Number(
            value=seconds(reads[0], reads[-1]) / (len(reads) - 1), tolerance=known.script["step_s"]
        ),
    }
