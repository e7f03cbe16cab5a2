"""Two methods for one quantity, side by side: how far they lie apart, and whether they may.

The bundled engine logs exactly what it did, and also shows what any engine shows. So its runs test
the methods that work without logs. Differences are `value - exact`. Where both come in blocks of
time, differences are taken block by block, so that variation between blocks drops out of the
interval.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import pandas as pd

from harness.analysis.cancellation import branches_of, ends_of
from harness.analysis.facts import Facts, is_among
from harness.analysis.figure import Figures
from harness.analysis.littles_law import (
    Balance,
    delay_of_aborts,
    held_for_nobody,
    sum_by_block,
    unread_tokens,
)
from harness.analysis.open_requests import LEFT
from harness.analysis.recovery import probes
from harness.analysis.stats import mean_ci95, ratio_ci95
from harness.analysis.tokens import tokens_read, without_tokens
from harness.metrics import CANCEL_LATENCY
from harness.records import Agreement, Metric
from harness.store.frames import RunFrames

_BY_BLOCKS = {
    (CANCEL_LATENCY, "counter"): (delay_of_aborts, "held_s"),
    (CANCEL_LATENCY, "gauge"): (held_for_nobody, "held_s"),
    ("wasted_tokens", "counter"): (unread_tokens, "wasted"),
}
# A token's way from the sampler to the client: written, sent over loopback, read and parsed. The
# client's own lag is added to it.
_TOKENS_WAY_S: Final = 0.010
_PLAIN_EXACT = "the difference is of two counts: it has no interval"


def agreement(frames: RunFrames, figures: Figures, facts: Facts) -> list[Agreement]:
    """Every pair of an exact figure and another method; empty without exact logs."""
    if not facts.has_lifecycle or not facts.clocks_agree:
        return []
    left = left_on_the_server(frames, facts)
    return [
        *_by_blocks(frames, left, facts),
        *_of_probes(frames, figures),
        *_of_the_rest(figures),
    ]


def left_on_the_server(frames: RunFrames, facts: Facts) -> pd.DataFrame:
    """One row for each request that its client left before the end.

    `t_ns`: when; `answers`: how many it asked for; `held_s`: how long the server still held these,
    summed, at most until the end of the observation; `wasted`: tokens generated and not read, NaN
    if it never finished. A request that the log does not know never arrived: nothing of it was
    held.
    """
    requests, log = frames.requests, frames.lifecycle
    rows = without_tokens(requests)[requests["outcome"].isin(LEFT)]
    if rows.empty:
        return pd.DataFrame({"t_ns": [], "answers": [], "held_s": [], "wasted": []})
    known = is_among(rows["request_id"], log["client_request_id"])
    left_ns = rows["abandoned_ns"].fillna(rows["ended_ns"]).astype("int64")
    rows = rows.assign(t0_ns=left_ns)
    branches = branches_of(rows, log)
    end_ns = branches["freed_ns"].fillna(branches["removed_ns"]).fillna(facts.observed_until_ns)
    held_s = ((end_ns - branches["t0_ns"]).astype(float) / 1e9).clip(lower=0.0)
    held_s = held_s.groupby(branches["owner"]).sum().reindex(range(len(rows)), fill_value=0.0)
    generated = ends_of(rows, branches)["final_num_generated"].astype(float)
    read = pd.Series(tokens_read(requests), index=requests.index)[rows.index]
    return pd.DataFrame(
        {
            "t_ns": left_ns,
            "answers": rows["n"],
            "held_s": held_s.to_numpy(),
            "wasted": (generated - read).where(known, 0.0),
        }
    )


def _by_blocks(frames: RunFrames, left: pd.DataFrame, facts: Facts) -> Iterator[Agreement]:
    for (metric, method), (balance_of, column) in _BY_BLOCKS.items():
        balance = balance_of(frames, facts)
        if not isinstance(balance, Balance) or left[column].isna().any() or left.empty:
            continue
        is_time = column == "held_s"
        slack = balance.bias[0] - balance.grain, balance.bias[1] + balance.grain
        each = left["answers"] if is_time else left["answers"].clip(upper=1)
        exact = sum_by_block(balance, left["t_ns"], left[column])
        counts = sum_by_block(balance, left["t_ns"], each).astype(np.int64)
        yield _judged(
            Agreement(
                metric=metric,
                unit="s" if is_time else "tokens",
                method=method,
                exact=float(exact.sum() / counts.sum()),
                value=balance.mean,
                n=int(counts.sum()),
                difference_ci95=ratio_ci95(balance.sums - exact, counts),
                bias=slack if is_time else None,
                note="of all requests left, including those cut off at the end",
            )
        )


def _of_probes(frames: RunFrames, figures: Figures) -> Iterator[Agreement]:
    """The probe's first token: seen by the client, and sampled by the server."""
    lag = figures.get("client_lag_s")
    late_s = (lag.p99 or 0.0) if isinstance(lag, Metric) else 0.0
    rows = without_tokens(frames.requests)[frames.requests["role"] == "probe"]
    rows = rows[(rows["arm"] == "abandon") & rows["first_token_ns"].notna()]
    rows = rows[rows["reference_ns"].notna()]
    log = frames.lifecycle
    sampled = log[log["event"] == "first_token"].groupby("client_request_id")["t_ns"].min()
    told = rows["request_id"].map(sampled)
    is_known = told.notna()
    if not is_known.any() or probes(frames.requests).empty:
        return
    reference = rows.loc[is_known, "reference_ns"].astype("int64")
    exact = (told[is_known] - reference).to_numpy(dtype=float) / 1e9
    seen = (rows.loc[is_known, "first_token_ns"].astype("int64") - reference).to_numpy() / 1e9
    yield _judged(
        Agreement(
            metric="slot_recovery_s",
            unit="s",
            method="probe",
            exact=float(exact.mean()),
            value=float(seen.mean()),
            n=len(exact),
            difference_ci95=mean_ci95(seen - exact),
            bias=(0.0, _TOKENS_WAY_S + late_s),
            note="the difference is the token's way from the server's sampler to the client",
        )
    )


def _of_the_rest(figures: Figures) -> Iterator[Agreement]:
    for name, figure in figures.items():
        if not isinstance(figure, Metric) or figure.method != "exact":
            continue
        for method, other in figure.others.items():
            if (name, method) in _BY_BLOCKS or not isinstance(other, Metric):
                continue
            if (pair := _of_means(name, figure, method, other)) is not None:
                yield pair


def _of_means(name: str, figure: Metric, method: str, other: Metric) -> Agreement | None:
    exact, value = figure.mean, other.mean
    if exact is None or value is None:
        return None
    bias, note = None, _PLAIN_EXACT
    if figure.unit == "ratio":
        bias, note = _of_others_too(figure, exact, other)
    if other.bound == "lower":
        bias, note = (
            (-abs(exact), 0.0 if bias is None else bias[1]),
            "the method gives a lower bound",
        )
    return _judged(
        Agreement(
            metric=name,
            unit=figure.unit,
            method=method,
            exact=exact,
            value=value,
            n=other.n,
            difference_ci95=None,
            bias=bias,
            note=note,
        )
    )


def _of_others_too(figure: Metric, exact: float, other: Metric) -> tuple[tuple[float, float], str]:
    """From outside, the share includes requests that the run cut off: all or none may be hits."""
    share = max(0.0, 1 - figure.n / other.n)
    return (
        -exact * share,
        (1 - exact) * share,
    ), f"of {other.n} requests, and exactly of {figure.n}"


def _judged(one: Agreement) -> Agreement:
    difference = one.value - one.exact
    low, high = one.difference_ci95 or (difference, difference)
    least, most = one.bias or (0.0, 0.0)
    rounding = 1e-9 + 1e-9 * abs(one.exact)
    return msgspec.structs.replace(
        one,
        difference=difference,
        agrees=bool(low - most <= rounding and high - least >= -rounding),
    )


def disagreements(found: Sequence[Agreement]) -> Mapping[str, str]:
    """A sentence for each pair that its own rules do not explain."""
    return {
        f"{one.metric}/{one.method}": (
            f"{one.metric} by {one.method} is {one.value:.4g} {one.unit}, but {one.exact:.4g} by "
            "the exact log: more apart than interval and refresh rule explain"
        )
        for one in found
        if not one.agrees
    }
