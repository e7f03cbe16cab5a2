"""The train of probes and occupancy, held to the truth in settings drawn fresh from a seed.

    delays 0 to 0.5 s, steps 5 to 45 ms, 2 to 32 slots, ghosts 0, 0.1 and 0.3 of the leaves

Mean and median of the cancel latency must lie within max(2 ms, 0.2 steps) of what the server did to
requests that left, the 99th percentile within a step; occupancy must count the ghosts of each
round. An interval that does not cover the truth is reported; expect one setting in twenty.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np

from tools.truth.black_box import Line, count_line
from tools.truth.known import Observed, observe, seconds
from tools.truth.scripted_engine import Script

FEWEST_A_MINUTE: Final = 300
SAMPLES: Final = 400  # for an interval of the 99th percentile 368 are needed
CYCLE_STEPS: Final = 8
SETTLE_S: Final = 1.2
GHOSTS: Final = (0.0, 0.1, 0.3)
TARGET: Final = """
description = "The scripted server, without a metrics page"
stream_options = {{ include_usage = true, continuous_usage_stats = true }}
continuous_usage = true
bytes_are_tokens = true
lifecycle = false
slots_from = "workload"
settle_s = {settle_s}
"""
TRAIN: Final = """
question = "How soon does the server let go?"
[run]
seed = {seed}
users = 1
max_seconds = {max_seconds}
timeout_s = 20
[load]
kind = "slot_recovery"
slots = {slots}
{more}
prompt_tokens = [10, 20]
answer_tokens = 1500
probe_tokens = 2
abandon_after_tokens = 1
"""
OCCUPANCY: Final = """
question = "What is still held?"
[run]
seed = {seed}
users = 1
max_seconds = 120
timeout_s = 20
[load]
kind = "occupancy"
slots = {slots}
rounds = {rounds}
prompt_tokens = [10, 20]
answer_tokens = 4000
{more}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSetting:
    number: int
    script: Script
    ghost_share: float
    max_seconds: float


def draw_train(number: int, seed: int, *, longest_s: float = 60) -> TrainSetting:
    rng = random.Random(f"train/{seed}/{number}")
    step_s, delay_s = rng.uniform(0.005, 0.045), rng.choice((0.0, rng.uniform(0.0, 0.5)))
    script = Script(
        slots=rng.randint(2, 32),
        step_s=round(step_s, 4),
        free_delay_s=round(delay_s, 3),
        num_blocks=20_000,
    )
    enough_s = SAMPLES * (CYCLE_STEPS * step_s + delay_s)
    return TrainSetting(
        number=number,
        script=script,
        ghost_share=GHOSTS[number % len(GHOSTS)],
        max_seconds=round(min(longest_s, 3 + enough_s), 1),
    )


def measured(folder: Path, script: Script, workload: str, settle_s: float) -> Observed:
    folder.mkdir(parents=True)
    target = folder / "truth.toml"
    target.write_text(TARGET.format(settle_s=settle_s))
    return observe(folder, script, workload, engine=str(target))


def run_train(setting: TrainSetting, folder: Path, more: str = "") -> Observed:
    script, seconds_ = setting.script, setting.max_seconds
    workload = TRAIN.format(
        seed=setting.number, slots=script.slots, max_seconds=seconds_, more=more
    )
    return measured(folder / "train", script, workload, SETTLE_S + script.free_delay_s)


def train_lines(seen: Observed) -> Iterator[Line]:
    """These must hold in every setting."""
    known = known_latencies(seen)
    found, step_s = seen.run.metrics["cancel_latency_s"], seen.script.step_s
    near = max(0.002, 0.2 * step_s)
    middle = known[math.ceil(0.5 * len(known)) - 1]
    yield Line("mean", fmean(known), around(fmean(known), near), found["mean"], f"n {found['n']}")
    of_all = population_mean(seen)
    yield Line("mean, had clients left at any moment", of_all, around(of_all, near), found["mean"])
    yield Line("median", middle, around(middle, near), found["p50"])
    most = known[math.ceil(0.99 * len(known)) - 1]
    yield Line("p99", most, around(most, step_s), found["p99"])


def cover_lines(seen: Observed) -> Iterator[Line]:
    """Each of these may fail once in twenty."""
    known, found = known_latencies(seen), seen.run.metrics["cancel_latency_s"]
    for what, truth in (
        ("mean", fmean(known)),
        ("p50", known[math.ceil(0.5 * len(known)) - 1]),
        ("p99", known[math.ceil(0.99 * len(known)) - 1]),
    ):
        if (limits := found[f"{what}_ci95"]) is not None:
            yield Line(f"interval of {what}", truth, tuple(limits), truth, f"{limits}")


def known_latencies(seen: Observed) -> list[float]:
    """The times from t0 to the slot's return, where a stream left while a probe waited."""
    rows = seen.run.rows("requests")
    probes = [row for row in rows if row["arm"] == "abandon" and row["first_token_ns"]]
    sampled = {row["reference_ns"] for row in probes} - {None}
    left = [row for row in rows if row["abandoned_ns"] in sampled and row["role"] == "filler"]
    freed = [seen.works[row["request_id"]]["freed_ns"] for row in left]
    return sorted(map(seconds, [row["abandoned_ns"] for row in left], freed))


def population_mean(seen: Observed) -> float:
    """The mean over all moments of the run in which a client could have left: until its close was
    seen, the boundary after that, and the first one after the delay."""
    begins, _ends = np.array(seen.truth["steps_ns"], dtype=float).T
    window = seen.run.manifest["window"]
    is_under_load = (begins > window["load_started_ns"]) & (begins < window["load_ended_ns"])
    begins = begins[is_under_load]
    due = np.searchsorted(begins, begins[1:] + seen.script.free_delay_s * 1e9)
    is_known = due < len(begins)
    steps = np.diff(begins)[is_known]
    freed, middle = begins[due[is_known]], begins[1:][is_known] - steps / 2
    late = [
        seconds(row["abandoned_ns"], closed_ns)
        for row in seen.run.rows("requests")
        if row["outcome"] == "abandoned"
        and (closed_ns := seen.works[row["request_id"]]["closed_ns"]) is not None
    ]
    return float(np.average(freed - middle, weights=steps)) / 1e9 + fmean(late)


def around(known: float, off: float) -> tuple[float, float]:
    return known - off, known + off


def rate_lines(folder: Path) -> Iterator[Line]:
    """8 slots, steps of 20 ms, no delay: enough samples a minute, and it stops when asked to."""
    setting = TrainSetting(
        number=0, script=Script(slots=8, num_blocks=20_000), ghost_share=0.0, max_seconds=20
    )
    seen = run_train(setting, folder / "rate")
    n = seen.run.metrics["slot_recovery_s"]["n"]
    a_minute = 60 * n / setting.max_seconds
    yield Line("samples a minute", FEWEST_A_MINUTE, (FEWEST_A_MINUTE, math.inf), a_minute)
    width_s = 0.008
    seen = run_train(
        replace(setting, max_seconds=90), folder / "width", more=f"width_s = {width_s}"
    )
    low, high = seen.run.metrics["slot_recovery_s"]["p50_ci95"]
    yield Line("width of the interval", width_s, (0.5 * width_s, width_s), high - low)
    window = seen.run.manifest["window"]
    took_s = seconds(window["load_started_ns"], window["load_ended_ns"])
    yield Line("seconds until it is so narrow", 90, (0, 60), took_s)


def variant_lines(folder: Path) -> Iterator[Line]:
    """Leavers that go through one slot: 4 slots, steps of 10 ms, 30 ms until a slot is free."""
    script = Script(slots=4, step_s=0.01, free_delay_s=0.03, num_blocks=20_000)
    setting = TrainSetting(number=0, script=script, ghost_share=0.0, max_seconds=8)
    for variant in ("prefill", "unary"):
        seen = run_train(setting, folder / variant, more=f'variant = "{variant}"')
        yield from (line._replace(what=f"{variant}: {line.what}") for line in train_lines(seen))
    seen = run_train(setting, folder / "queue", more='variant = "queue"')
    waited = [
        seconds(row["reference_ns"], seen.works[row["request_id"]]["token_times_ns"][0])
        for row in seen.run.rows("requests")
        if row["arm"] == "abandon" and row["reference_ns"] and row["first_token_ns"]
    ]
    found = seen.run.metrics["slot_recovery_s"]["mean"]
    yield Line("queue: mean wait", fmean(waited), around(fmean(waited), 0.002), found)
    setting = replace(setting, number=3, ghost_share=0.3)
    more = "capacity_prompt_tokens = 500"
    seen = run_occupancy(setting, folder / "capacity", rounds=2, more=more)
    lines = list(occupancy_lines(seen))
    yield from (line._replace(what=f"capacity: {line.what}") for line in lines[:-1])
    is_known = "leaked_kv_share" in seen.run.metrics
    yield count_line("capacity: share, though slots ran out first", 0, float(is_known))


def run_occupancy(setting: TrainSetting, folder: Path, rounds: int = 4, more: str = "") -> Observed:
    """Steps of at most 15 ms: a ghost is waited for, and that takes three settle times."""
    script = replace(
        setting.script,
        step_s=min(setting.script.step_s, 0.015),
        ghost_share=setting.ghost_share,
        ghost_seed=setting.number,
    )
    workload = OCCUPANCY.format(seed=setting.number, slots=script.slots, rounds=rounds, more=more)
    return measured(folder / "occupancy", script, workload, SETTLE_S)


def occupancy_lines(seen: Observed) -> Iterator[Line]:
    rows, works = seen.run.rows("requests"), seen.works
    checks = [row for row in rows if row["reference_ns"] is not None]
    left = [
        row
        for row in rows
        if row["arm"] == "occupancy" and row["outcome"] == "abandoned" and row["first_token_ns"]
    ]
    since_ns, wrong = 0, []
    for trial in sorted({row["trial"] for row in checks}):
        of_it = [row for row in checks if row["trial"] == trial]
        until_ns = max(row["sent_ns"] for row in of_it)
        of_round = [row for row in left if since_ns < row["abandoned_ns"] <= until_ns]
        ghosts = sum(works[row["request_id"]]["is_ghost"] for row in of_round)
        held = sum((row["first_token_ns"] or 0) > row["reference_ns"] for row in of_it)
        wrong += [] if held == ghosts else [f"{held} for {ghosts}"]
        since_ns = until_ns
    yield Line("rounds counted wrong", 0, (0, 0), len(wrong), "; ".join(wrong))
    known = sum(
        works[row["request_id"]]["is_ghost"] for row in left if row["abandoned_ns"] <= since_ns
    )
    rate = seen.run.metrics["ghost_rate"]
    yield count_line("ghosts in all", known, rate["mean"] * rate["n"], f"of {rate['n']}")
    low, high = rate["mean_ci95"]
    share = seen.script.ghost_share
    yield Line("interval of the share", share, (low, high), share)
