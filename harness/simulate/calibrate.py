"""A machine measured from runs: the terms of a step from step logs, the lags from what clients and
server stamped.

Only steps after which requests were left count: the next one then began as soon as it could. The
terms are fitted, by non-negative least squares, to the time until a step's tokens were there. They
are then lowered alike until a twentieth of the steps were shorter. The time beyond them becomes the
distribution `step_s`, whose mean makes up for it. The error, of the time from one beginning to the
next, is that of fits to four fifths of the log on the fifth left out.

The bundled engine's simulated runner sleeps for a stated cost. Then only what steps took beyond
that is fitted, and the machine `adds_to_stated` costs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.analysis.cancellations import cancellations
from harness.analysis.run_facts import run_facts
from harness.errors import ConfigError
from harness.records import Delivery, Outcome, Way
from harness.simulate.machine import (
    Cost,
    Covered,
    EngineDefaults,
    FitError,
    Growth,
    Lags,
    SimulatedMachine,
)
from harness.store.frames import RunFrames
from harness.store.run_folder import open_run

Floats = npt.NDArray[np.float64]

LEVELS: Final = 201  # quantiles of a lag
FEWEST_STEPS: Final = 200
FEWEST_LAGS: Final = 20
MOST_TOKENS: Final = 200_000  # lags of tokens looked at
FOLDS: Final = 5
LEAST_SPAN: Final = 2  # high over low load, for a lag's growth with it to be fitted
COUNTED: Final = 0.99  # of the lags, when their growth is fitted
SHORTER: Final = 0.05  # the share of steps that may be shorter than their terms say
LEAST_FIXED_S: Final = 1e-6
TERMS: Final = ("fixed_s", "prefill_token_s", "decode_token_s", "context_token_s")


class MeasuredSteps(NamedTuple):
    """A row a step: the work (TERMS), the cost stated for it, and the time it took until its tokens
    were there, and until the next began."""

    work: Floats
    stated_s: Floats
    computed_s: Floats
    took_s: Floats
    running: Floats


class Fit(NamedTuple):
    terms: Floats
    beyond_s: Floats  # of each step, beyond its terms
    error: FitError


def calibrate(runs: Mapping[str, RunFrames], name: str) -> SimulatedMachine:
    """`runs`: by the name they are to be cited with. Raises ConfigError."""
    for one, frames in runs.items():
        facts = run_facts(frames)
        if (why := facts.lacks("steps", "lifecycle", "clock", "load")) is not None:
            raise ConfigError(f"{one}: cannot be calibrated from: {why}")
    _refuse_mix(runs)
    steps = _pooled([step_work(frames) for frames in runs.values()])
    if len(steps.took_s) < FEWEST_STEPS:
        raise ConfigError(
            f"{', '.join(runs)}: {len(steps.took_s)} steps follow each other without a pause, too "
            f"few to calibrate: {FEWEST_STEPS} are needed; let the load last longer"
        )
    fit = fit_steps(steps)
    lags = lags_of(list(runs.values()), steps, fit.beyond_s)
    frames, is_stated = next(iter(runs.values())), bool(steps.stated_s.any())
    return SimulatedMachine(
        name=name,
        title=f"{_model_of(frames)}, measured",
        kind="measured",
        gpus=len(_gpus(frames)),
        gpu=next(iter(_gpus(frames)), None),
        model=None if is_stated else frames.manifest["target"]["model"],
        sources=[_citation(one, frames) for one, frames in runs.items()],
        assumptions=_assumptions(steps, lags),
        adds_to_stated=is_stated,
        cost=Cost(**dict(zip(TERMS, map(float, fit.terms), strict=True)), swap_block_s=0.0),
        range=Covered(
            running=_span(steps.running),
            batched_tokens=_span(steps.work[:, 1] + steps.work[:, 2]),
            context_tokens=_span(steps.work[:, 3]),
        ),
        engine=EngineDefaults() if is_stated else _engine_of(runs.values()),
        lags=lags,
        error=fit.error,
    )


def _refuse_mix(runs: Mapping[str, RunFrames]) -> None:
    """A fit to steps of two machines is of neither."""
    (first, frames), *others = runs.items()
    own = _measured_on(frames)
    for other, theirs in ((name, _measured_on(one)) for name, one in others):
        for what, value in own.items():
            if theirs[what] != value:
                raise ConfigError(
                    f"{first} has {what} {value}, and {other} {theirs[what]}: one machine is "
                    "calibrated from runs of one; name them apart"
                )


def _measured_on(frames: RunFrames) -> dict[str, Any]:
    target, hardware = frames.manifest["target"], frames.manifest.get("hardware") or {}
    config, gpus = target.get("config") or {}, _gpus(frames)
    return {
        "engine": target["engine"],
        "runner": config.get("runner"),
        "model": None if config.get("runner") == "simulated" else target["model"],
        "GPUs": ", ".join(gpus) or "none",
        "processor": hardware.get("cpu"),
    }


def read_runs(paths: Sequence[Path]) -> dict[str, RunFrames]:
    """Raises ConfigError."""
    folders = {path: open_run(path) for path in paths}
    for path, folder in folders.items():
        if folder.has_arms:
            raise ConfigError(f"{path}: has arms; name the run of one of them, in {folder.rounds}")
        if folder.read_manifest().get("simulated"):
            raise ConfigError(f"{path}: is simulated itself; calibrate from runs of a live server")
    count = Counter(folder.name for folder in folders.values())
    return {
        folder.name if count[folder.name] == 1 else str(path): folder.frames()
        for path, folder in folders.items()
    }


# Steps


def step_work(frames: RunFrames) -> MeasuredSteps:
    parts = [_worker_steps(rows, frames) for _, rows in frames.steps.groupby("worker")]
    return _pooled(parts) if parts else MeasuredSteps(np.empty((0, len(TERMS))), *[np.empty(0)] * 4)


def _pooled(parts: Sequence[MeasuredSteps]) -> MeasuredSteps:
    return MeasuredSteps(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _worker_steps(steps: pd.DataFrame, frames: RunFrames) -> MeasuredSteps:
    """Steps after which requests were left: the next one then began as soon as it could."""
    steps = steps.sort_values("step", kind="stable").reset_index(drop=True)
    number = steps["step"].to_numpy(dtype=np.int64)
    started = steps["started_ns"].to_numpy(dtype=np.int64)
    computed = _computed(steps, frames)
    work = _by_step(computed, len(steps))
    goes_on = np.zeros(len(steps), dtype=bool)
    goes_on[:-1] = (number[1:] == number[:-1] + 1) & _has_more(computed, len(steps))[:-1]
    took_s = np.zeros(len(steps))
    took_s[:-1] = np.diff(started) / 1e9
    stated = _stated_cost(frames)
    stated_s = work @ stated
    computed_s = (steps["ended_ns"].to_numpy(dtype=np.int64) - started) / 1e9
    running = steps["num_running"].to_numpy(dtype=float)
    return MeasuredSteps(*(one[goes_on] for one in (work, stated_s, computed_s, took_s, running)))


def _computed(steps: pd.DataFrame, frames: RunFrames) -> pd.DataFrame:
    """A row for each step and request: the tokens scheduled, whether one was sampled, and the
    tokens of context before them."""
    lengths = steps["request_ids"].map(len).to_numpy(dtype=np.int64)
    rows = pd.DataFrame(
        {
            "step": np.repeat(np.arange(len(steps)), lengths),
            "request": pd.factorize(np.concatenate(steps["request_ids"].to_list()))[0],
            "id": np.concatenate(steps["request_ids"].to_list()),
            "scheduled": np.concatenate(steps["scheduled_tokens"].to_list()).astype(np.int64),
            "sampled": np.concatenate(steps["sampled_tokens"].to_list()).astype(np.int64),
        }
    )
    by_request = rows.groupby("request")
    generated = by_request["sampled"].cumsum() - rows["sampled"]
    # A prompt computed in chunks ends with the chunk that samples; one that never got there counts
    # from its beginning.
    stretch = [rows["request"], generated]
    whole = rows.groupby(stretch)["sampled"].transform("max") > 0
    before = rows.groupby(stretch)["scheduled"].cumsum() - rows["scheduled"]
    in_all = rows.groupby(stretch)["scheduled"].transform("sum")
    prompt = rows["id"].map(_prompt_tokens(frames))
    context = (prompt + generated - in_all + before).where(whole & prompt.notna(), before)
    return rows.drop(columns="id").assign(context=context.clip(lower=0))


def _prompt_tokens(frames: RunFrames) -> pd.Series:
    """By the server's id."""
    known = frames.lifecycle.drop_duplicates("request_id").set_index("request_id")
    prompts = frames.requests.drop_duplicates("request_id").set_index("request_id")["prompt_tokens"]
    return known["client_request_id"].map(prompts.astype(float))


def _by_step(computed: pd.DataFrame, num_steps: int) -> Floats:
    """As the runner counts: a request that is owed one token decodes, any other prefills."""
    decodes = (computed["scheduled"] == 1) & (computed["sampled"] == 1)

    def total(values: pd.Series) -> Floats:
        return np.bincount(computed["step"], values, num_steps).astype(float)

    columns = (
        np.ones(num_steps),
        total(computed["scheduled"].where(~decodes, 0)),
        total(decodes.astype(float)),
        total(computed["context"]),
    )
    return np.stack(columns, axis=1)


def _has_more(computed: pd.DataFrame, num_steps: int) -> npt.NDArray[np.bool_]:
    """Steps of which some request was computed again in the next one."""
    ordered = computed.sort_values(["request", "step"])
    again = ordered["request"].diff(-1).eq(0) & ordered["step"].diff(-1).eq(-1)
    return np.bincount(ordered.loc[again, "step"], minlength=num_steps) > 0


def _stated_cost(frames: RunFrames) -> Floats:
    config = frames.manifest["target"].get("config") or {}
    cost = config.get("step_cost") if config.get("runner") == "simulated" else None
    return np.array([(cost or {}).get(term, 0.0) for term in TERMS])


def fit_steps(steps: MeasuredSteps) -> Fit:
    terms = _terms(steps.work, steps.computed_s - steps.stated_s)
    return Fit(terms, _beyond(steps, terms), _cross_validated(steps))


def _beyond(steps: MeasuredSteps, terms: Floats) -> Floats:
    return np.maximum(0.0, steps.computed_s - steps.stated_s - steps.work @ terms)


def _terms(work: Floats, took_s: Floats) -> Floats:
    from scipy.optimize import nnls

    scale = np.maximum(work.max(axis=0), 1e-12)
    found, _ = nnls(work / scale, took_s)
    terms: Floats = found / scale
    expected = work @ terms
    lowered = np.quantile(took_s / np.maximum(expected, 1e-12), SHORTER)
    terms *= min(1.0, max(0.0, float(lowered)))
    terms[0] = max(terms[0], LEAST_FIXED_S)
    return terms


def _cross_validated(steps: MeasuredSteps) -> FitError:
    """Folds of steps that follow each other, so that none is judged by its neighbours."""
    fold = np.arange(len(steps.took_s)) * FOLDS // len(steps.took_s)
    expected = np.empty(len(steps.took_s))
    for number in range(FOLDS):
        own = fold == number
        rest = MeasuredSteps(*(column[~own] for column in steps))
        terms = _terms(rest.work, rest.computed_s - rest.stated_s)
        beyond_s = (_beyond(rest, terms) + rest.took_s - rest.computed_s).mean()
        expected[own] = steps.stated_s[own] + steps.work[own] @ terms + beyond_s
    off = expected / steps.took_s - 1
    return FitError(
        n=len(off),
        mape=float(np.abs(off).mean()),
        p99=float(np.quantile(np.abs(off), 0.99)),
        bias=float(off.mean()),
    )


# Lags


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
    """By the client's id: when the steps ended that sampled its tokens, and their tokens in all."""
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
    prompts = taken["request_id"].map(_prompt_tokens(frames)).where(taken["event"] == "admitted", 0)
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


# The machine's own description


def _span(values: Floats) -> list[float]:
    return [float(values.min()), float(values.max())]


def _assumptions(steps: MeasuredSteps, lags: Lags) -> list[str]:
    names = ("", "tokens of prompts", "tokens of answers", "tokens of context")
    said = [
        f"the number of {what} never changed: their time is in fixed_s"
        for what, column in zip(names, steps.work.T, strict=True)
        if what and column.min() == column.max()
    ]
    for what, lag_s in (
        ("a user of a closed loop asks again", lags.rest_s),
        ("a slot that was freed is taken", lags.schedule_s),
    ):
        said += [] if lag_s[-1] else [f"{what} at once: it was not measured"]
    return [
        *said,
        "blocks are copied in no time beyond what is stated: it was not measured",
        "a request reaches the worker as fast as an abort, from the frontend on",
    ]


def _gpus(frames: RunFrames) -> list[str]:
    found: list[str] = (frames.manifest.get("hardware") or {}).get("gpus") or []
    config = frames.manifest["target"].get("config") or {}
    return found if config.get("gpu_name") else []


def _model_of(frames: RunFrames) -> str:
    target = frames.manifest["target"]
    config = target.get("config") or {}
    is_simulated = config.get("runner") == "simulated"
    where = (frames.manifest.get("hardware") or {}).get("cpu") or "an unknown machine"
    what = "the simulated runner" if is_simulated else target["model"]
    return f"{what} of engine {target['engine']} on {config.get('gpu_name') or where}"


def _citation(name: str, frames: RunFrames) -> str:
    manifest = frames.manifest
    version = (manifest.get("versions") or {}).get("walkaway")
    workload = (manifest.get("workload") or {}).get("name")
    return f"run {name} of {manifest['created_at'][:10]}, workload {workload}, walkaway {version}"


def _engine_of(runs: Iterable[RunFrames]) -> EngineDefaults:
    """Settings in which all runs agree."""
    configs = [one.manifest["target"].get("config") or {} for one in runs]
    found = {name: [one.get(name) for one in configs] for name in EngineDefaults.model_fields}
    return EngineDefaults(
        **{name: each[0] for name, each in found.items() if each.count(each[0]) == len(each)}
    )


def as_toml(machine: SimulatedMachine) -> str:
    """The machine's file."""
    plain = machine.model_dump(exclude_none=True, exclude={"name"})
    tables = {key: value for key, value in plain.items() if isinstance(value, dict)}
    lines = [_line(key, value) for key, value in plain.items() if key not in tables]
    for key, table in tables.items():
        inner = {name: value for name, value in table.items() if isinstance(value, dict)}
        lines += ["", f"[{key}]"] if table else []
        lines += [_line(name, value) for name, value in table.items() if name not in inner]
        for name, values in inner.items():
            lines += ["", f"[{key}.{name}]", *(_line(*item) for item in values.items())]
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any) -> str:
    return f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            quoted = value.replace("\\", "\\\\").replace('"', '\\"')
            return f'"{quoted}"'
        case list() if value and isinstance(value[0], str):
            return "[\n" + "".join(f"  {_value(one)},\n" for one in value) + "]"
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case float():
            return f"{value:.6g}"
        case _:
            return str(value)
