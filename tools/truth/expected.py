"""Hold a run against the truth: each figure of its summary, computed from the server's own account.

A second opinion: nothing of the harness is imported. `complaints` names every disagreement.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from tools.truth.known import Truth, Work, seconds

EXACT_S = 1e-6  # the same stamps were subtracted: only rounding may differ
Limits = tuple[float, float]  # from and to; infinity: there is no such figure
NONE: Limits = (math.inf, math.inf)
QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
OF_A_GPU = {
    *("gpu_utilisation", "gpu_memory_bytes", "gpu_power_w", "gpu_energy_j", "gpu_interval_s"),
    *("energy_per_token_j", "energy_wasted_j"),
}
# About the harness itself, and about a GPU of this machine, which computes for no truth server.
NOT_THE_SERVERS = {"client_lag_s", "over_read_tokens", "start_delay_s", *OF_A_GPU}
PROMPT_SHARE = 0.9  # of the requests: on a busy machine all that falls into one stall is late
GONE = ("abandoned", "cut_off", "timed_out")


def around(value: float, tolerance: float = 0.0) -> Limits:
    return (value - tolerance, value + tolerance)


@dataclass(frozen=True, slots=True)
class Sample:
    """Values with whether each is only known to be exceeded, and how far a figure may be off."""

    values: Sequence[tuple[float, bool]]
    tolerance: float = EXACT_S

    def quantile(self, share: float, *, looks_later: float) -> float:
        """Kaplan-Meier: where the surviving share falls to 1 - share, or infinity.

        Every look that saw no end yet is taken `looks_later` later: then more are still there at
        each end, and the quantile comes later or not at all.
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
        """Least and most: a quantile moves with its own value and with the order of the values."""
        num_censored = sum(is_censored for _, is_censored in self.values)
        found = {"n": around(len(self.values)), "n_censored": around(num_censored)}
        for name, share in QUANTILES.items():
            low = self.quantile(share, looks_later=-2 * self.tolerance) - self.tolerance
            high = self.quantile(share, looks_later=2 * self.tolerance) + self.tolerance
            found[name] = (low, high)
        plain = [value for value, _ in self.values]
        if num_censored or not plain:
            return found | {"mean": NONE, "max": NONE}
        mean = around(math.fsum(plain) / len(plain), self.tolerance)
        return found | {"mean": mean, "max": around(max(plain), self.tolerance)}


@dataclass(frozen=True, slots=True)
class Number:
    value: float
    tolerance: float = EXACT_S

    def limits(self) -> dict[str, Limits]:
        return {"mean": around(self.value, self.tolerance)}


Figure = Sample | Number


def all_known(values: Iterable[float], tolerance: float = EXACT_S) -> Sample:
    return Sample([(value, False) for value in values], tolerance)


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
    settle_ns = int(settle_s * 1e9)
    done, ghosts = [], []
    for t0, _, work in known.left:
        if work["finish_reason"] == "abort":
            done.append((t0, work))
        else:
            ghosts.append((t0, min(t0 + settle_ns, known.settled_ns), work))
    first_boundary = [known.steps_within(w["closed_ns"], w["removed_ns"]) <= 1 for _, w in done]
    heard = [(0.0, False) for _ in done]
    unheard = [(seconds(work["closed_ns"], until), True) for _, until, work in ghosts]
    freed = [(seconds(t0, w["freed_ns"]), False) for t0, w in done]
    held = [(seconds(t0, until), True) for t0, until, _ in ghosts]
    freed_steps = [(float(known.steps_within(t0, w["freed_ns"])), False) for t0, w in done]
    held_steps = [(float(known.steps_within(t0, until)), True) for t0, until, _ in ghosts]
    return {
        "detect_s": all_known(seconds(t0, work["closed_ns"]) for t0, _, work in known.left),
        "signal_s": Sample(heard + unheard),
        "wait_s": all_known(seconds(w["closed_ns"], w["removed_ns"]) for _, w in done),
        "free_s": all_known(seconds(w["removed_ns"], w["freed_ns"]) for _, w in done),
        "cancel_latency_s": Sample(freed + held),
        "cancel_latency_steps": Sample(freed_steps + held_steps),
        "removed_at_first_boundary": Number(sum(first_boundary) / len(first_boundary)),
        "ghost_rate": Number(len(ghosts) / len(known.left)),
    }


def waste(known: Truth) -> dict[str, Figure]:
    generated = [(t0, row, work["token_times_ns"]) for t0, row, work in known.left]
    total = [len(tokens) - row["tokens_read"] for _, row, tokens in generated]
    after = [sum(t > t0 for t in tokens) for t0, _, tokens in generated]
    batch = known.batch()
    gone = [row for row, _ in known.rows] + list(known.unseen)
    unread = [row for row in gone if not row["tokens_read"] and row["outcome"] in GONE]
    computed = sum(work["prompt_tokens"] for work in known.works.values() if work["token_times_ns"])
    read = sum(work["prompt_tokens"] for row, work in known.rows if row["tokens_read"])
    return {
        "wasted_prompt_tokens": Number((computed - read) / len(unread)),
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


def block_seconds(known: Truth, work: Work, t0: int) -> float:
    """The area under the number of blocks that it held, from t0 until they were given back."""
    end = work["freed_ns"] or known.settled_ns
    levels = [*known.blocks_held(work), (end, 0)]
    return sum(
        blocks * seconds(max(since, t0), max(min(until, end), t0, since))
        for (since, blocks), (until, _) in pairwise(levels)
        if until > t0
    )


def blocks_at(known: Truth, work: Work, t_ns: int) -> int:
    return [blocks for since, blocks in known.blocks_held(work) if since <= t_ns][-1]


def gpu_seconds(known: Truth, work: Work, t0: int, batch: dict[int, dict[str, int]]) -> float:
    """Each step's time after t0, times its share of the tokens that the step computed."""
    return sum(
        seconds(max(t0, known.started_ns(ended)), ended)
        * batch[ended][work["client_id"]]
        / sum(batch[ended].values())
        for ended in work["token_times_ns"]
        if ended > t0
    )


def refills(known: Truth) -> dict[str, Figure]:
    ids = {work["client_id"] for _, _, work in known.left}
    gaps = [
        seconds(known.works[work["slot_from"]]["freed_ns"], work["admitted_ns"])
        for work in known.works.values()
        if work["slot_from"] in ids
    ]
    if not gaps:
        return {}
    return {"slot_refill_s": all_known(gaps), "refilled_next_schedule": Number(1.0)}


def survivors(known: Truth, tolerance: float) -> dict[str, Figure]:
    """Latencies of the users who were to stay and were served, from their asking until the server
    sent. The first stamp is their own: the comparison of the rows holds it against when the server
    heard of it."""
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
        "ttft_s": Sample(waits, tolerance),
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
        "goodput_rps": Number(served / seconds(*known.window_ns)),
    }


def leaks(known: Truth) -> dict[str, Figure]:
    now = known.metrics_read_ns[-1]
    admitted = [work for work in known.all_works if (work["admitted_ns"] or now) < now]
    there = [work for work in admitted if (work["freed_ns"] or now) >= now]
    lost = sum(work["has_leaked_slot"] for work in known.all_works)
    held = sum(blocks_at(known, work, now) for work in there)
    leaked = sum(work["leaked_blocks"] for work in known.all_works)
    return {
        "leaked_slots": Number(len(there) + lost),
        "leaked_blocks": Number(held + leaked),
        "preemptions": Number(0),
        "recomputed_tokens": Number(0),
    }


def capacity(known: Truth) -> dict[str, Figure]:
    began, over = known.window_ns
    window_s = seconds(began, over)
    batch = known.batch()
    inside = [(start, end) for start, end in known.steps if start < over and end > began]
    busy = sum(len(batch[e]) * seconds(max(s, began), min(e, over)) for s, e in inside)
    tokens = sum(len(batch[end]) for _, end in inside if end <= over)
    reads = known.metrics_read_ns[1:-1]  # without the two that look at the idle server
    return {
        "slot_utilisation": Number(busy / (known.script["slots"] * window_s)),
        "throughput_tps": Number(tokens / window_s),
        "step_s": all_known(seconds(start, end) for start, end in inside),
        "scrape_interval_s": Number(
            seconds(reads[0], reads[-1]) / (len(reads) - 1), known.script["step_s"]
        ),
    }


# Where they disagree...


def complaints(
    summary: dict[str, Any],
    manifest: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    truth: dict[str, Any],
) -> list[str]:
    """Everything in which a run and the server disagree; empty if they agree."""
    known = Truth(truth, rows, manifest["window"])
    metrics = summary["metrics"]
    figures = expected_figures(known, settle_s=manifest["settle_s"])
    unchecked = metrics.keys() - figures.keys() - NOT_THE_SERVERS
    wrong = [f"{name}: not checked" for name in unchecked]
    wrong += [f"{name}: is missing" for name in figures.keys() - metrics.keys()]
    for name in figures.keys() & metrics.keys():
        wrong += compare(name, metrics[name], figures[name])
    wrong += compare_rows(known)
    wrong += compare_window(known)
    wrong += compare_breakdown(known, summary["breakdown"])
    wrong += compare_outcomes(known, summary["outcomes"])
    return sorted(wrong)


def compare(name: str, metric: dict[str, Any], figure: Figure) -> Iterator[str]:
    for key, (low, high) in figure.limits().items():
        value = math.inf if metric[key] is None else metric[key]
        if not low <= value <= high:
            yield f"{name}.{key}: the summary says {metric[key]}, the server {low} to {high}"


def compare_rows(known: Truth) -> Iterator[str]:
    """A token is read once, after it was sent."""
    for row, work in known.rows:
        sent, read = work["sent_times_ns"], row["token_times_ns"]
        if row["tokens_read"] != len(read) or len(read) > len(sent):
            yield f"{row['request_id']}: {row['tokens_read']} read of {len(sent)} sent"
        if row["outcome"] == "completed" and not len(read) == len(sent) == work["max_tokens"]:
            yield f"{row['request_id']}: completed with {len(read)} tokens"
    step_s = known.script["step_s"]
    for t0, row, work in known.left:
        if sum(t < t0 - step_s * 1e9 for t in work["sent_times_ns"]) > row["tokens_read"]:
            yield f"{row['request_id']}: tokens that were there at t0 were not read"
    arrivals = ((row, seconds(row["sent_ns"], work["arrived_ns"])) for row, work in known.rows)
    closes = ((row, seconds(t0, work["closed_ns"])) for t0, row, work in known.left)
    yield from compare_lags("arrival", by_plan(arrivals), step_s)
    yield from compare_lags("close", by_plan(closes), step_s)
    yield from compare_lags("token", known.token_lags_s, step_s, prompt_share=PROMPT_SHARE)


def by_plan(lags: Iterable[tuple[dict[str, Any], float]]) -> list[list[float]]:
    """Grouped by when their users meant to leave, if at all: the median of all would hide it if the
    clients stamped only some kinds wrongly."""
    found: dict[int | None, list[float]] = {}
    for row, lag_s in lags:
        found.setdefault(row["planned_abandon"], []).append(lag_s)
    return list(found.values())


def compare_lags(
    what: str, groups: list[list[float]], step_s: float, *, prompt_share: float = 1.0
) -> Iterator[str]:
    """Nothing is seen before it happened, and in `prompt_share` of the groups it typically takes no
    more than a step until it is seen."""
    first, last = min(map(min, groups)), max(map(max, groups))
    if first < 0:
        yield f"{what}: seen {-first} s before it happened"
    elif sum(median(lags) <= step_s for lags in groups) < prompt_share * len(groups):
        yield f"{what}: seen late, by up to {last} s"


def compare_window(known: Truth) -> Iterator[str]:
    """The load's window begins with the first request and ends with the last end of one; the server
    hears of the first after that, and what is read it has sent before."""
    rows = [row for row, _ in known.rows] + known.unseen
    ends = min(row["sent_ns"] for row in rows), max(row["ended_ns"] for row in rows)
    (began, ended), (first, last) = known.window_ns, known.load_ns()
    if (began, ended) != ends:
        yield f"window: {began} to {ended}, the requests say {ends}"
    if not began <= first <= last <= ended:
        yield f"window: {began} to {ended}, the server knows {first} to {last}"


def compare_breakdown(known: Truth, breakdown: dict[str, Any]) -> Iterator[str]:
    found: dict[int, list[int]] = {}
    for t0, row, work in known.left:
        after = sum(t > t0 for t in work["token_times_ns"])
        found.setdefault(row["planned_abandon"], []).append(after)
    groups = {
        group["planned_abandon"]: (group["n"], group["after_close_mean"])
        for group in breakdown["waste_by_abandon_point"]
    }
    if groups.keys() != found.keys():
        yield f"waste by abandon point: {sorted(groups)}, the users left at {sorted(found)}"
        return
    for point, tokens in found.items():
        n, mean = groups[point]
        if n != len(tokens) or abs(mean * n - sum(tokens)) > 1e-6:
            yield f"waste at abandon point {point}: {groups[point]}, the server knows {tokens}"


def compare_outcomes(known: Truth, outcomes: dict[str, int]) -> Iterator[str]:
    """The server sees no difference between a cut-off and an abandon; it can count both.

    The end of the load may cut off an answer whose last token the server has just sent.
    """
    finished = sum(
        work["closed_ns"] is None
        and not (row["outcome"] == "cut_off" and work["token_times_ns"][-1] < row["ended_ns"])
        for row, work in known.rows
    )
    gone = outcomes["abandoned"] + outcomes["cut_off"]
    everything = len(known.rows) + len(known.unseen)
    if outcomes["completed"] != finished or gone != everything - finished:
        yield f"outcomes {outcomes}: the server finished {finished} of {everything}"
