"""Hold a run against the truth: `complaints` names everything in which they disagree."""

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from tests.truth.expected import Figure, expected_figures
from tests.truth.known import Truth, seconds

NOT_THE_SERVERS = {"client_lag_s", "over_read_tokens", "start_delay_s"}  # about the harness itself
PROMPT_SHARE = 0.9  # of the requests: on a busy machine all that falls into one stall is late


def compare(name: str, metric: dict[str, Any], figure: Figure) -> list[str]:
    """The errors of a metric of the summary."""
    wrong = []
    for key, (low, high) in figure.limits().items():
        value = math.inf if metric[key] is None else metric[key]
        if not low <= value <= high:
            wrong.append(
                f"{name}.{key}: the summary says {metric[key]}, the server {low} to {high}"
            )
    return wrong


def compare_rows(known: Truth) -> list[str]:
    """The errors of the clients' rows: a token is read once, after it was sent."""
    wrong = []
    for row, work in known.rows:
        sent, read = work["sent_times_ns"], row["token_times_ns"]
        if row["tokens_read"] != len(read) or len(read) > len(sent):
            wrong.append(f"{row['request_id']}: {row['tokens_read']} read of {len(sent)} sent")
        if row["outcome"] == "completed" and not len(read) == len(sent) == work["max_tokens"]:
            wrong.append(f"{row['request_id']}: completed with {len(read)} tokens")
    step_s = known.script["step_s"]
    for t0, row, work in known.left:
        if sum(t < t0 - step_s * 1e9 for t in work["sent_times_ns"]) > row["tokens_read"]:
            wrong.append(f"{row['request_id']}: tokens that were there at t0 were not read")
    arrivals = ((row, seconds(row["sent_ns"], work["arrived_ns"])) for row, work in known.rows)
    closes = ((row, seconds(t0, work["closed_ns"])) for t0, row, work in known.left)
    wrong += compare_lags("arrival", by_plan(arrivals), step_s)
    wrong += compare_lags("close", by_plan(closes), step_s)
    wrong += compare_lags("token", known.token_lags_s, step_s, prompt_share=PROMPT_SHARE)
    return wrong


def by_plan(lags: Iterable[tuple[dict[str, Any], float]]) -> list[list[float]]:
    """Grouped by when their users meant to leave, if at all: the median of all would hide it if the
    clients stamped only some kinds wrongly."""
    found: dict[int | None, list[float]] = {}
    for row, lag_s in lags:
        found.setdefault(row["planned_abandon"], []).append(lag_s)
    return list(found.values())


def compare_lags(
    what: str, groups: list[list[float]], step_s: float, *, prompt_share: float = 1.0
) -> list[str]:
    """Nothing is seen before it happened, and in so many groups it typically takes no more than a
    step until it is seen."""
    first, last = min(map(min, groups)), max(map(max, groups))
    if first < 0:
        return [f"{what}: seen {-first} s before it happened"]
    if sum(median(lags) <= step_s for lags in groups) < prompt_share * len(groups):
        return [f"{what}: seen late, by up to {last} s"]
    return []


def compare_window(known: Truth) -> list[str]:
    """The load's window begins with the first request and ends with the last end of one; the server
    hears of the first after that, and what is read it has sent before."""
    rows = [row for row, _ in known.rows] + known.unseen
    ends = min(row["sent_ns"] for row in rows), max(row["ended_ns"] for row in rows)
    (began, ended), (first, last) = known.window_ns, known.load_ns()
    wrong = []
    if (began, ended) != ends:
        wrong.append(f"window: {began} to {ended}, the requests say {ends}")
    if not began <= first <= last <= ended:
        wrong.append(f"window: {began} to {ended}, the server knows {first} to {last}")
    return wrong


def compare_breakdown(known: Truth, breakdown: dict[str, Any]) -> list[str]:
    """The waste by abandon point: the means of the groups."""
    found: dict[int, list[int]] = {}
    for t0, row, work in known.left:
        after = sum(t > t0 for t in work["token_times_ns"])
        found.setdefault(row["planned_abandon"], []).append(after)
    groups = {
        group["planned_abandon"]: (group["n"], group["after_close_mean"])
        for group in breakdown["waste_by_abandon_point"]
    }
    if groups.keys() != found.keys():
        return [f"waste by abandon point: {sorted(groups)}, the users left at {sorted(found)}"]
    return [
        f"waste at abandon point {point}: {groups[point]}, the server knows {tokens}"
        for point, tokens in found.items()
        if groups[point][0] != len(tokens)
        or abs(groups[point][1] * len(tokens) - sum(tokens)) > 1e-6
    ]


def compare_outcomes(known: Truth, outcomes: dict[str, int]) -> list[str]:
    """The server sees no difference between a cut-off and an abandon; it can count both."""
    finished = sum(work["closed_ns"] is None for _, work in known.rows)
    gone = outcomes["abandoned"] + outcomes["cut_off"]
    everything = len(known.rows) + len(known.unseen)
    if outcomes["completed"] == finished and gone == everything - finished:
        return []
    return [f"outcomes {outcomes}: the server finished {finished} of {everything}"]


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
