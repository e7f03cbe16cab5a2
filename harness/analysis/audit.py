"""The accounting audit: what the clients counted against each of the server's counters.

Each counter's change is read while nothing runs, before the load and after the settle time. The
rows give the range in which it must lie:

    generated_tokens  from the tokens read to the tokens read plus the largest possible waste (see
                      `black_box.waste_by_counter`); known exactly from the exact log
    prompt_tokens     from all requests that had a first token to all that were taken; servers count
                      the prompt of a request for n answers once or n times (vLLM)
    aborted           from requests left while they were read to all that were left: a client that
                      leaves before the first token may be gone before the server has seen the
                      request, and one that races the last token may find it made
    ended             likewise, of all requests that the server took
    *_cancelled       from the log, else like aborted, but once for all answers to a request
    running           0: nothing is left. Stuck, if it never moved although scrapes fell into
                      answers that had been going on for longer than a page can be old

The tolerance is one token for each request that can be in flight at once (tokens), else 0. Requests
that the run cut off count as left. The verdict is the first that holds: see `_entry`, `_verdict`.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import pandas as pd

from harness.analysis.agreement import left_on_the_server
from harness.analysis.figure import Figure
from harness.analysis.open_requests import (
    LEFT,
    RACE,
    OpenRequests,
    is_unopened,
    let_go_ns,
    most_open,
    open_in_run,
)
from harness.analysis.run_facts import RunFacts
from harness.analysis.scraped import readings_of
from harness.analysis.timeline import OF_WORKERS, log_of
from harness.analysis.tokens import (
    prompt_total,
    read_by,
    tokens_per_event,
    tokens_read,
    without_tokens,
)
from harness.records import Audit, AuditEntry, AuditVerdict, Metric, Outcome
from harness.store.frames import RunFrames

ROLES: Final = ("generated_tokens", "prompt_tokens", "aborted", "ended", "running")
CANCELS: Final = ("frontend_cancelled", "worker_cancelled")  # audited where they are shown
FEWEST_GROSS: Final = 2  # counters
_MOST_STRETCHED: Final = 2.0  # times the usual reading
_FEWEST_TELLING: Final = 3  # scrapes


class Due(NamedTuple):
    low: float
    high: float
    tolerance: float = 0.0


def audit(frames: RunFrames, facts: RunFacts, waste: Figure) -> Audit:
    held = open_in_run(frames)
    roles = [*ROLES, *(role for role in CANCELS if role in facts.idle_after)]
    entries = [
        _entry(frames, facts, role, _due(frames, facts, role, held, waste)) for role in roles
    ]
    if frames.manifest.get("kills"):
        entries = _not_judged(entries, "processes were killed, and count from 0 again")
    foreign = _foreign_traffic(frames, entries)
    if foreign is not None:
        entries = _not_judged(entries, "the server had other users")
    return Audit(client=client_account(frames.requests), counters=entries, foreign_traffic=foreign)


def _not_judged(entries: Sequence[AuditEntry], note: str) -> list[AuditEntry]:
    return [
        one
        if one.moved is None
        else msgspec.structs.replace(one, verdict="cannot be judged", note=note)
        for one in entries
    ]


def _foreign_traffic(frames: RunFrames, entries: Sequence[AuditEntry]) -> str | None:
    so = "gauges and counters are not this run's alone, and no counter is judged"
    if foreign := foreign_requests(frames):
        return f"the server had other users while the load ran (requests: {foreign}): {so}"
    names = [
        one.name or one.role
        for one in entries
        if one.role != "running" and one.verdict in ("gross", "double")
    ]
    if len(names) < FEWEST_GROSS:
        return None
    return (
        f"{', '.join(dict.fromkeys(names))} all moved by more than this run's clients caused; the "
        f"server seems to have had other users; {so}"
    )


def foreign_requests(frames: RunFrames) -> int:
    """How many requests in the lifecycle log no process of this load sent.

    An id is the process's tag, the user and a number: a request whose row was lost has its tag.
    """
    log = frames.lifecycle
    arrived = log.loc[log["event"] == "arrived", "client_request_id"]
    tags = {_tag(one) for one in frames.requests["request_id"]}
    return sum(_tag(one) not in tags for one in arrived.fillna(""))


def _tag(request_id: str) -> str:
    return request_id.rsplit("-", 2)[0]


def client_account(requests: pd.DataFrame) -> dict[str, float]:
    left = without_tokens(requests)[requests["outcome"] == Outcome.ABANDONED]
    has_token = left["first_token_ns"].notna()
    counts = {outcome.value: int((requests["outcome"] == outcome).sum()) for outcome in Outcome}
    return {
        "sent": len(requests),
        **counts,
        "abandoned_before_first_token": int((~has_token).sum()),
        "abandoned_while_reading": int(has_token.sum()),
        "tokens_read": float(tokens_read(requests).sum()),
        "prompt_tokens_known": float(requests["prompt_tokens"].fillna(0).sum()),
    }


def _due(
    frames: RunFrames, facts: RunFacts, role: str, held: OpenRequests, waste: Figure
) -> Due | None:
    most = most_open(held.started_ns, held.ended_ns)
    taken = len(held.started_ns)
    match role:
        case "generated_tokens":
            return _tokens_due(frames, facts, held, waste, most)
        case "prompt_tokens":
            return _prompts_due(frames.requests, most)
        case "aborted":
            return Due(held.n_left - len(held.uncounted_ns), held.n_left)
        case "ended":
            return Due(taken - len(held.unanswered_ns), taken)
        case "frontend_cancelled" | "worker_cancelled":
            return _cancels_due(frames, facts, role)
        case _:
            return Due(0.0, 0.0)


def _cancels_due(frames: RunFrames, facts: RunFacts, role: str) -> Due:
    """A worker's counter by the log: once for each worker that had the request when its frontend
    sent the abort, unless that crossed the request's end."""
    requests, log = without_tokens(frames.requests), log_of(frames)
    if facts.has_lifecycle and role == "frontend_cancelled":
        seen = log.loc[log["event"] == "disconnected", "client_request_id"].nunique()
        return Due(seen, seen)
    if facts.has_lifecycle:
        sent = log.loc[log["event"] == "abort_sent", "client_request_id"]
        heard = log.loc[log["event"] == "abort_received", "client_request_id"]
        had = log[log["event"].isin(OF_WORKERS)].groupby("client_request_id")["worker"].nunique()
        return Due(int(had[had.index.isin(heard)].sum()), int(had[had.index.isin(sent)].sum()))
    is_left = requests["outcome"].isin(LEFT) & ~is_unopened(requests)
    is_sure = is_left & requests["first_token_ns"].notna() & (requests["plan"] != RACE)
    most = int(is_left.sum()) if role == "frontend_cancelled" else float("inf")
    return Due(int(is_sure.sum()), most)


def _tokens_due(
    frames: RunFrames, facts: RunFacts, held: OpenRequests, waste: Figure, most: float
) -> Due:
    read = float(tokens_read(frames.requests).sum())
    if facts.has_lifecycle and facts.clocks_agree:
        left = left_on_the_server(frames, facts)
        if not left["wasted"].isna().any():
            exact = read + float(left["wasted"].sum())
            return Due(exact, exact, most)
    if not held.n_left:
        return Due(read, read, most)
    upper = waste.others.get("upper") if isinstance(waste, Metric) else None
    wasted = upper.mean * upper.n if isinstance(upper, Metric) and upper.mean else float("inf")
    return Due(read, read + wasted, most)


def _prompts_due(requests: pd.DataFrame, most: float) -> Due | None:
    each = without_tokens(requests).loc[requests.index.repeat(requests["n"])]
    has_token = requests["first_token_ns"].notna().to_numpy(dtype=bool)
    was_taken = (each["outcome"] != Outcome.REJECTED).to_numpy(dtype=bool)
    low, high = prompt_total(requests, has_token), prompt_total(each, was_taken)
    if low is None or high is None:
        return None
    return Due(low[0] - low[1], high[0] + high[1], most)


def _entry(frames: RunFrames, facts: RunFacts, role: str, due: Due | None) -> AuditEntry:
    name, moved = facts.metric_names.get(role), facts.idle_change(role)
    verdict: AuditVerdict = "unknown"
    note = None
    if name is None or moved is None:
        moved = None
    elif due is None:
        note = "too few prompts have a known length"
    elif _is_still_moving(facts, role):
        verdict = "cannot be judged"
        note = "it is right only when nothing runs, and something still runs"
    else:
        verdict, note = _verdict(frames, facts, role, due, moved)
    return AuditEntry(
        role=role,
        name=name,
        due=None if due is None else (due.low, due.high if np.isfinite(due.high) else None),
        moved=moved,
        verdict=verdict,
        note=note,
    )


def _is_still_moving(facts: RunFacts, role: str) -> bool:
    is_right_when_idle = role != "running" and facts.trust.get(role) == "exact_when_idle"
    return is_right_when_idle and (facts.idle_change("running") or 0) > 0


def _verdict(
    frames: RunFrames, facts: RunFacts, role: str, due: Due, moved: float
) -> tuple[AuditVerdict, str | None]:
    low, high, slack = due
    if role == "running" and not _has_moved(frames, facts):
        return "stuck", "it did not move while answers came"
    if moved == 0 and low > slack:
        return "stuck", None
    if moved == 0 and high > 0 and facts.trust.get(role) == "stuck":
        return "stuck", "as its description says; whether it had to move here is not known"
    if low > 0 and moved > high + slack and 2 * (low - slack) <= moved <= 2 * (high + slack):
        return "double", None
    for sign in _signs_of_lateness(frames, facts, role, due):
        return "late", sign
    if moved < low - slack:
        return "lower", None
    if moved > high + slack:
        return "gross", None
    if facts.trust.get(role) == "lower":
        return "lower", "within the range, but its description calls it a lower bound"
    if not np.isfinite(high):
        return "cannot be judged", "how much is due at most is not known"
    return "exact", None


def _signs_of_lateness(frames: RunFrames, facts: RunFacts, role: str, due: Due) -> Iterator[str]:
    if role == "running":
        return
    later = facts.idle_later.get(role)
    after = facts.idle_after.get(role, 0.0)
    if later is not None and later > after and not facts.generated_later:
        yield f"it moved by {later - after:g} more after the settle time"
    readings = readings_of(frames, facts, role)
    if role != "generated_tokens" or readings is None:
        return
    scale = tokens_per_event(frames.requests) or 1.0
    # The page is at least as new as the reading's beginning; a slow reading shows least.
    is_calm = readings.took_ns <= _MOST_STRETCHED * np.median(readings.took_ns)
    then = readings.began_ns[is_calm] - readings.lag_ns
    behind = read_by(frames.requests, then) * scale
    counted = readings.level[is_calm] - facts.idle_before.get(role, 0.0)
    missing = float((behind - counted).max(initial=0))
    if missing > due.tolerance + 1 and missing > 0.02 * max(due.low, 1.0):
        yield f"in the run it lay up to {missing:.0f} tokens below what clients had read"


def _has_moved(frames: RunFrames, facts: RunFacts) -> bool:
    readings = readings_of(frames, facts, "running")
    if readings is None or np.ptp(readings.level):
        return True
    rows = without_tokens(frames.requests)
    rows = rows[rows["first_token_ns"].notna()]
    since = rows["first_token_ns"].to_numpy(dtype=np.int64) + readings.lag_ns
    until = let_go_ns(rows).to_numpy()
    since, until = np.sort(since[until > since]), np.sort(until[until > since])
    begun, over = (np.searchsorted(times, readings.t_ns, "right") for times in (since, until))
    return int((begun > over).sum()) < _FEWEST_TELLING
