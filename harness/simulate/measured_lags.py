"""The lags of a measured run, from what clients and server stamped: distributions, and how some
of them grow with the load.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.analysis.cancellations import cancellations
from harness.analysis.run_facts import run_facts
from harness.errors import ConfigError
from harness.records import Delivery, Outcome, Way
from harness.simulate.machine import Growth, Lags
from harness.simulate.measured_steps import MeasuredSteps, prompt_tokens
from harness.stats import Floats
from harness.store.frames import RunFrames

LEVELS: Final = 201  # quantiles of a lag
FEWEST_LAGS: Final = 20
MOST_TOKENS: Final = 200_000  # lags of tokens looked at
LEAST_SPAN: Final = 2  # high over low load, for a lag's growth with it to be fitted
COUNTED: Final = 0.99  # of the lags, when their growth is fitted


def lags_of(runs: Sequence[RunFrames], steps: MeasuredSteps, beyond_s: Floats) -> Lags:
    """`beyond_s`: what each step took beyond its terms."""
    cancels = pd.concat(map(_cancel_lags, runs))
    signals = _joined([cancels["signal_s"]])
    if len(signals) < FEWEST_LAGS:
        raise ConfigError(
            f"{len(signals)} aborts reached the worker, too few to know how long they take: "
            f"{FEWEST_LAGS} are needed; let more users leave"
        )
    signal_s = quantiles(signals)
    deliver_s, [of_token] = _without_growth(map(_delivery_lags, runs))
    schedule_s, [of_request, of_prompt_token] = _without_growth(map(_schedule_lags, runs))
    between = np.stack([steps.running, steps.took_s - steps.computed_s])
    between_s, [between_request] = _without_growth([between])
    # Ways differ, and need not be spread alike over the loads.
    seen_s = cancels["detect_s"] / cancels.groupby("way")["detect_s"].transform("median")
    _, [detect_request] = _without_growth([np.stack([cancels["running"], seen_s]).astype(float)])
    arrive_s = quantiles(_joined(map(_arrival_lags, runs)))
    return Lags(
        # The worker does not log when it hears of a request: the way to it is that of an abort.
        send_s=[_rounded(a + b) for a, b in zip(arrive_s, signal_s, strict=True)],
        deliver_s=quantiles(deliver_s),
        detect_s=_detection_lags(cancels, detect_request),
        signal_s=signal_s,
        step_s=quantiles(beyond_s),
        between_s=quantiles(between_s),
        schedule_s=quantiles(schedule_s),
        rest_s=quantiles(_joined(map(_rests, runs))),
        growth=Growth(
            between_request=between_request,
            detect_request=detect_request,
            deliver_token=of_token,
            schedule_request=of_request,
            schedule_prompt_token=of_prompt_token,
            up_to=int(steps.running.max()),
        ),
    )


def _without_growth(parts: Iterable[Floats]) -> tuple[Floats, list[float]]:
    """Each part: rows of what a lag grows with, then a row of lags. Returns the lags that are left
    and the shares by which one grows with each. Growth is not fitted if the load hardly varied. For
    the fit the longest lags are shortened, and at least a tenth of the mean is there without load.
    """
    from scipy.optimize import lsq_linear

    *loads, lags_s = np.concatenate(list(parts), axis=1)
    terms = np.stack([np.ones(len(lags_s)), *loads])
    known = ~np.isnan(lags_s + terms.sum(axis=0))
    lags_s, terms = lags_s[known], terms[:, known]
    if not lags_s.any():
        return lags_s, [0.0] * len(loads)
    low, high = np.quantile(terms, (0.05, 0.95), axis=1)
    varies = high >= LEAST_SPAN * np.maximum(low, 1)
    varies[0] = True
    capped_s = np.minimum(lags_s, np.quantile(lags_s, COUNTED))
    least = np.zeros(varies.sum())
    least[0] = capped_s.mean() / 10
    scale = terms[varies].max(axis=1)
    fit = lsq_linear(terms[varies].T / scale, capped_s, bounds=(least, np.inf))
    found = np.zeros(len(terms))
    found[varies] = fit.x / scale
    shares = [_rounded(one / found[0]) for one in found[1:]]
    return lags_s / (np.array([1.0, *shares]) @ terms), shares


def _joined(parts: Iterable[Any]) -> Floats:
    found = [np.asarray(one, dtype=float) for one in parts]
    values = np.concatenate(found) if found else np.empty(0)
    return values[~np.isnan(values)]


def quantiles(values: Floats) -> list[float]:
    """Linear between them. The last is such that the mean is that of the values: their largest
    would stand for more than it is."""
    if not len(values):
        return [0.0, 0.0]
    values = np.maximum(0.0, values)
    levels = np.quantile(values, np.linspace(0, 1, LEVELS))
    inner = levels[0] / 2 + levels[1:-1].sum()
    last = 2 * (values.mean() * (LEVELS - 1) - inner)
    levels[-1] = min(max(last, levels[-2]), levels[-1])
    return [_rounded(one) for one in levels]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _arrival_lags(frames: RunFrames) -> Floats:
    requests = frames.requests.set_index("request_id")
    lag = _first(frames.lifecycle, "arrived").reindex(requests.index) - requests["sent_ns"]
    return lag.to_numpy(dtype=float, na_value=np.nan) / 1e9


def _first(log: pd.DataFrame, event: str) -> pd.Series:
    """The first such event of each request, by the client's id."""
    found = log[log["event"] == event].drop_duplicates("client_request_id")
    stamps: pd.Series = found.set_index("client_request_id")["t_ns"].astype("Int64")
    return stamps


def _cancel_lags(frames: RunFrames) -> pd.DataFrame:
    """way, detect_s and signal_s of each abandoned request, and how many requests ran. A cancel
    that a user asks for is no disconnect: there the frontend's notice is the abort that it sends.
    """
    cancels = cancellations(frames)
    cancels = cancels[cancels["arrived_ns"].notna() & cancels["worker"].notna()]
    t0_ns, heard_ns = cancels["t0_ns"], cancels["heard_ns"]
    sent = _first(frames.lifecycle, "abort_sent").reindex(cancels["request_id"])
    sent_ns = sent.set_axis(cancels.index).where(cancels["way"] == Way.CANCEL)
    return pd.DataFrame(
        {
            "way": cancels["way"],
            "detect_s": cancels["detect_s"].fillna(((sent_ns - t0_ns) / 1e9).astype("Float64")),
            "signal_s": cancels["signal_s"].fillna(((heard_ns - sent_ns) / 1e9).astype("Float64")),
            "running": _running(frames.steps, cancels),
        }
    )


def _running(steps: pd.DataFrame, cancels: pd.DataFrame) -> pd.Series:
    """Requests of the latest step that had begun at t0."""
    log = steps[["started_ns", "worker", "num_running"]].sort_values("started_ns")
    asked = cancels[["t0_ns", "worker"]].astype({"t0_ns": "int64", "worker": log["worker"].dtype})
    found = pd.merge_asof(asked, log, left_on="t0_ns", right_on="started_ns", by="worker")
    return found["num_running"].set_axis(cancels.index)


def _detection_lags(cancels: pd.DataFrame, growth: float) -> dict[str, list[float]]:
    cancels = cancels[cancels["detect_s"].notna()]
    lags_s = cancels["detect_s"] / (1 + growth * cancels["running"].fillna(0))
    found = {
        str(way): quantiles(one.to_numpy(dtype=float))
        for way, one in lags_s.groupby(cancels["way"])
        if len(one) >= FEWEST_LAGS
    }
    if not found:
        raise ConfigError(f"no way of leaving was seen {FEWEST_LAGS} times: let more users leave")
    return found


def _delivery_lags(frames: RunFrames) -> Floats:
    """The tokens of a step, and how long after its end a client read one of them: of streams with
    one answer that read all they had, where the first events and steps belong together."""
    requests = frames.requests
    streams = requests[
        (requests["delivery"] == Delivery.STREAM)
        & (requests["n"] == 1)
        & requests["outcome"].isin([Outcome.COMPLETED, Outcome.ABANDONED])
    ]
    sampled = _sampled(frames)
    rows, found = [np.empty((2, 0))], 0
    for name, read_ns in zip(streams["request_id"], streams["token_times_ns"], strict=True):
        made = sampled.get(name)
        if made is None or not len(read_ns) or found > MOST_TOKENS:
            continue
        num = min(made.shape[1], len(read_ns))
        ended_ns, tokens = made[:, :num]
        lag_s = (np.asarray(read_ns, dtype=np.int64)[:num] - ended_ns) / 1e9
        rows.append(np.stack([tokens, lag_s]))
        found += num
    return np.concatenate(rows, axis=1)


def _sampled(frames: RunFrames) -> dict[str, npt.NDArray[np.int64]]:
    """The ends of the steps that sampled its tokens, and all their tokens, by the client's id."""
    steps = frames.steps.sort_values("ended_ns", kind="stable")
    lengths = steps["request_ids"].map(len).to_numpy(dtype=np.int64)
    ids = np.concatenate(steps["request_ids"].to_list())
    sampled = np.concatenate(steps["sampled_tokens"].to_list()) > 0
    step = np.repeat(np.arange(len(steps)), lengths)[sampled]
    tokens = np.bincount(step, minlength=len(steps))[step]
    ended_ns = steps["ended_ns"].to_numpy(dtype=np.int64)[step]
    events = frames.lifecycle.drop_duplicates("request_id").set_index("request_id")
    names: dict[Any, str] = events["client_request_id"].to_dict()
    by_server = pd.DataFrame({"ended_ns": ended_ns, "tokens": tokens}).groupby(ids[sampled])
    return {names[one]: rows.to_numpy().T for one, rows in by_server if one in names}


def _schedule_lags(frames: RunFrames) -> Floats:
    """The requests of a step, the tokens of the prompts admitted to it, and the time from the last
    aborted request that its boundary freed to the first admission."""
    log, key = frames.lifecycle, ["worker", "step"]
    steps = frames.steps.drop_duplicates(key).set_index(key)[["started_ns", "num_running"]]
    taken = log[log["event"].isin(["admitted", "resumed"])]
    prompts = taken["request_id"].map(prompt_tokens(frames)).where(taken["event"] == "admitted", 0)
    by_step = taken.assign(prompt=prompts).groupby(key)
    admitted = by_step.agg(admitted_ns=("t_ns", "min"), prompt=("prompt", "sum")).join(steps)
    freed = log[log["event"] == "blocks_freed"].join(admitted, on=key)
    # At a boundary without a step, one is freed for a later step, at another boundary.
    freed = freed[freed["t_ns"].between(freed["started_ns"], freed["admitted_ns"])]
    last = freed.sort_values("t_ns", kind="stable").drop_duplicates(key, keep="last")
    lag_ns = last["admitted_ns"] - last["t_ns"]
    return np.stack([last["num_running"], last["prompt"], lag_ns / 1e9]).astype(float)


def _rests(frames: RunFrames) -> Floats:
    """Lags of a closed loop; the pause of a user that asks again is the workload's, not a lag. A
    user that leaves and reads on rests when the server has ended the answer."""
    if run_facts(frames).is_open_loop:
        return np.empty(0)
    requests = frames.requests.sort_values(["user", "sent_ns"], kind="stable")
    over_ns = requests["server_ended_ns"].fillna(requests["ended_ns"]).astype("Int64")
    before = over_ns.groupby(requests["user"]).shift(1)
    rest_ns = (requests["sent_ns"] - before).where(requests["repeats"].isna())
    return rest_ns.to_numpy(dtype=float, na_value=np.nan) / 1e9
