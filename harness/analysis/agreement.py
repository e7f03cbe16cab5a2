"""Two methods for one quantity, side by side: how far they lie apart, and whether they may.

The bundled engine logs exactly what it did, and also shows what any engine shows. Differences are
`value - exact`, block by block where both come in blocks of time.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pandas as pd

from harness.analysis.black_box import Outside
from harness.analysis.cancellations import branches_of, ends_of
from harness.analysis.figure import Figures, NotMeasurable
from harness.analysis.littles_law import Balance, sum_by_block
from harness.analysis.open_requests import LEFT, let_go_ns
from harness.analysis.probe_train import TrainLatencies, probes
from harness.analysis.run_facts import RunFacts, is_among
from harness.analysis.timeline import log_of
from harness.analysis.tokens import tokens_read, without_tokens
from harness.metrics import CANCEL_LATENCY
from harness.records import Agreement, Metric, Role, TrialArm
from harness.stats import Floats, mean_ci95, ratio_ci95
from harness.store.frames import RunFrames

_BY_BLOCKS: Final = ((CANCEL_LATENCY, "gauge"), ("wasted_tokens", "counter"))
# A token's way from the sampler to the client: written, sent over loopback, read and parsed. The
# client's own lag is added to it.
_TOKENS_WAY_S: Final = 0.010
Bias = tuple[float, float]


def agreement(
    frames: RunFrames, figures: Figures, facts: RunFacts, outside: Outside
) -> list[Agreement]:
    if not facts.has_lifecycle or not facts.clocks_agree:
        return []
    left = left_on_the_server(frames, facts)
    lag = figures.get("client_lag_s")
    late_s = _TOKENS_WAY_S + ((lag.p99 or 0.0) if isinstance(lag, Metric) else 0.0)
    return [
        *_by_blocks(outside, left),
        *_of_probes(frames, late_s),
        *_of_the_train(outside.train, left, late_s),
        *of_the_rest(figures),
    ]


@lru_cache(maxsize=1)  # asked for by the audit, too
def left_on_the_server(frames: RunFrames, facts: RunFacts) -> pd.DataFrame:
    """One row for each request that its client left before the end.

    `t_ns`: when; `answers`: how many it asked for; `held_s`: how long the server still held these,
    summed, at most until the end of the observation; `wasted`: tokens generated and not read, NaN
    if it never finished. Nothing was held of a request that the log does not know.
    """
    requests, log = frames.requests, log_of(frames)
    rows = without_tokens(requests)[requests["outcome"].isin(LEFT)]
    if rows.empty:
        return pd.DataFrame({"t_ns": [], "answers": [], "held_s": [], "wasted": []})
    known = is_among(rows["request_id"], log["client_request_id"])
    left_ns = let_go_ns(rows)
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


def _by_blocks(outside: Outside, left: pd.DataFrame) -> Iterator[Agreement]:
    for metric, method in _BY_BLOCKS:
        is_time = metric == CANCEL_LATENCY
        balance = outside.total if is_time else outside.unread
        column = "held_s" if is_time else "wasted"
        if not isinstance(balance, Balance) or left[column].isna().any() or left.empty:
            continue
        each = left["answers"] if is_time else left["answers"].clip(upper=1)
        exact = sum_by_block(balance, left["t_ns"], left[column])
        counts = sum_by_block(balance, left["t_ns"], each).astype(np.int64)
        slack = balance.bias[0] - balance.grain, balance.bias[1] + balance.grain
        yield _agreement(
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


def _of_probes(frames: RunFrames, late_s: float) -> Iterator[Agreement]:
    if probes(frames.requests).empty:
        return
    rows, log = without_tokens(frames.requests), log_of(frames)
    rows = rows[(rows["role"] == Role.PROBE) & (rows["arm"] == TrialArm.ABANDON)]
    sampled_ns = log[log["event"] == "first_token"].groupby("client_request_id")["t_ns"].min()
    rows = rows.assign(sampled_ns=rows["request_id"].map(sampled_ns))
    times = rows[["reference_ns", "first_token_ns", "sampled_ns"]].dropna().astype("int64")
    if times.empty:
        return
    exact, seen = (
        (times[column] - times["reference_ns"]).to_numpy(dtype=float) / 1e9
        for column in ("sampled_ns", "first_token_ns")
    )
    note = "the difference is the token's way from the server's sampler to the client"
    yield _by_probe("slot_recovery_s", exact, seen, late_s, note)


def _of_the_train(
    train: TrainLatencies | NotMeasurable, left: pd.DataFrame, late_s: float
) -> Iterator[Agreement]:
    if isinstance(train, NotMeasurable):
        return
    held_s = left.drop_duplicates("t_ns").set_index("t_ns")["held_s"].reindex(train.t0_ns)
    is_known = ~train.censored & held_s.notna().to_numpy()
    exact, seen = held_s.to_numpy()[is_known], train.latency_s[is_known]
    if len(exact):
        note = "of streams that left while a probe waited; it includes a token's way to the client"
        yield _by_probe(CANCEL_LATENCY, exact, seen, late_s, note)


def _by_probe(metric: str, exact: Floats, seen: Floats, late_s: float, note: str) -> Agreement:
    return _agreement(
        metric=metric,
        unit="s",
        method="probe",
        exact=float(exact.mean()),
        value=float(seen.mean()),
        n=len(exact),
        difference_ci95=mean_ci95(seen - exact),
        bias=(0.0, late_s),
        note=note,
    )


def of_the_rest(figures: Figures) -> Iterator[Agreement]:
    for name, figure in figures.items():
        if not isinstance(figure, Metric) or figure.method != "exact" or figure.mean is None:
            continue
        for method, other in figure.others.items():
            is_known = isinstance(other, Metric) and other.mean is not None
            if is_known and (name, method) not in (*_BY_BLOCKS, (CANCEL_LATENCY, "probe")):
                bias, note = _slack(figure, figure.mean, other)
                yield _agreement(
                    metric=name,
                    unit=figure.unit,
                    method=method,
                    exact=figure.mean,
                    value=other.mean,
                    n=other.n,
                    bias=bias,
                    note=note,
                )


def _slack(figure: Metric, exact: float, other: Metric) -> tuple[Bias | None, str]:
    bias, note = None, "the difference is of two counts: it has no interval"
    if figure.unit == "ratio":  # from outside, all or none of the requests cut off may be hits
        share = max(0.0, 1 - figure.n / other.n)
        bias = -exact * share, (1 - exact) * share
        if other.n < figure.n:  # occupancy counts in its rounds alone
            hits, elsewhere = exact * figure.n, figure.n - other.n
            least, most = max(0.0, hits - elsewhere), min(hits, other.n)
            bias = least / other.n - exact, most / other.n - exact
        note = f"of {other.n} requests, and exactly of {figure.n}"
    if other.bound == "lower":
        bias = -abs(exact), 0.0 if bias is None else bias[1]
        note = "the method gives a lower bound"
    return bias, note


def _agreement(
    *,
    exact: float,
    value: float,
    difference_ci95: Bias | None = None,
    bias: Bias | None = None,
    **more: Any,
) -> Agreement:
    difference = value - exact
    low, high = difference_ci95 or (difference, difference)
    least, most = bias or (0.0, 0.0)
    rounding = 1e-9 + 1e-9 * abs(exact)
    return Agreement(
        exact=exact,
        value=value,
        difference=difference,
        difference_ci95=difference_ci95,
        bias=bias,
        agrees=bool(low - most <= rounding and high - least >= -rounding),
        **more,
    )


def disagreements(found: Sequence[Agreement]) -> list[str]:
    return [
        f"{one.metric} by {one.method} is {one.value:.4g} {one.unit}, but {one.exact:.4g} by "
        "the exact log: more apart than interval and refresh rule explain"
        for one in found
        if not one.agrees
    ]
