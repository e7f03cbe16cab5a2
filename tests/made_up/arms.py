"""A run of three arms, made up: a chunk size each, with figures that differ for certain."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.store.manifest import Manifest
from harness.store.run_folder import RunFolder
from tests.made_up.rows import made_up_manifest, target_facts
from tests.made_up.summaries import made_up_arms_summary, made_up_summary

ITL = [0.005, 0.011, 0.030]
TTFT = [0.640, 0.270, 0.180]
CANCEL = [0.003, 0.006, 0.016]
SIZES = [32, 128, 512]
STEADY = {"is_steady": True, "rule": "MSER-5", "warmup_s": 0.1, "steady_tps": 400.0}


def metric(value: float, unit: str) -> dict[str, Any]:
    figures = {"mean": value, "p50": value, "p99": 2 * value}
    return {"unit": unit, "n": 9, "method": "exact", **figures}


def difference(arm: str, ratio: float, *, width: float = 0.1) -> dict[str, Any]:
    return {
        "arm": arm,
        "reference": "32",
        "n": 3,
        "difference": -0.4,
        "difference_ci95": [-0.5, -0.3],
        "ratio": ratio,
        "ratio_ci95": [ratio - width, ratio + width],
    }


def arm(index: int) -> dict[str, Any]:
    times = {"itl_s": ITL, "ttft_s": TTFT, "cancel_latency_prefill_s": CANCEL}
    return {
        "outcomes": {"completed": 5, "abandoned": 4},
        "metrics": {name: metric(values[index], "s") for name, values in times.items()}
        | {"preemptions": metric(12.0, "preemptions")},
        "not_measurable": {"gpu_seconds_after_abandon": "no GPU"},
        "per_round": {
            "itl_s": {"p50": [ITL[index], None, 2 * ITL[index]], "p99": [0.1, 0.2, 0.3]},
            "preemptions": {"mean": [10.0, 12.0, 14.0]},
        },
    }


def save_arms(folder: Path, *, kind: str, **changes: Any) -> Path:
    run = RunFolder.claim(folder / "arms")
    run.rounds.mkdir()
    names = [str(size) for size in SIZES]
    arms = [
        {"name": name, "engine": {"max_num_batched_tokens": int(name)}, "load": {}}
        for name in names
    ]
    manifest = made_up_manifest(
        run_id="20260102-030405-arms",
        created_at="2026-01-02T03:04:05Z",
        command=["walkaway", "run", "w"],
        seed=7,
        versions={"python": "3.11"},
        hardware={"cores": 2},
        workload={"question": "Which arm?", "load": {"kind": kind}, "arms": arms},
        target=None,
    )
    summary: dict[str, Any] = {
        "run_id": "20260102-030405-arms",
        "rounds": 3,
        "headlines": ["preemptions"],
        "arms": {name: arm(index) for index, name in enumerate(names)},
        "differences": {
            "preemptions": {"mean": [difference("128", 0.5), difference("512", 0.9, width=0.2)]},
            "itl_s": {"p99": [difference("128", 2.0)]},
        },
        "validity": [{"level": "warning", "text": "too few rounds"}],
    }
    run.write_manifest(manifest)
    run.write_summary(made_up_arms_summary({**summary, **changes}))
    return run.path


def task_savings(task: str, share: float | None, **more: Any) -> dict[str, Any]:
    """The entry of a summary's breakdown; no share: without early stopping."""
    saved = 0.0 if share is None else share
    return {
        "task": task,
        "n": 40,
        "after_answer": share or 0.4,
        "stops_early": share is not None,
        "saved": saved,
        "saved_of_max": 1 - 0.22 * (1 - saved),
        "cut_short": 0.0,
        "source_saved": 0.7,
        **more,
    }


def with_savings(names: Sequence[str]) -> dict[str, Any]:
    """The content of a summary with these arms; the first is without early stopping."""
    shares = [None, 0.2, 0.6]
    arms = {
        name: [
            task_savings("extraction", share),
            task_savings("code", share, source_saved=0.4, cut_short=0.031),
        ][: len(shares) - place]
        for place, (name, share) in enumerate(zip(names, shares, strict=True))
    }
    return {
        "arms": {name: {"breakdown": {"early_stop_by_task": of}} for name, of in arms.items()},
        "differences": {},
    }


def save_rounds(run: Path, lags_s: dict[str, float]) -> None:
    """A round of each of these names, whose client noticed its ticks so late."""
    for slots, (name, lag_s) in enumerate(lags_s.items(), start=8):
        folder = RunFolder.claim(run / "rounds" / name)
        manifest = msgspec.convert(RunFolder(run).read_manifest(), Manifest)
        config = {"runner": "simulated", "max_num_seqs": slots, "num_blocks": 512}
        target = target_facts(config=config)
        folder.write_manifest(msgspec.structs.replace(manifest, target=target))
        side = {"host": "h", "pid": 1, "cpu_share": 0.25, "lag_p95_s": lag_s}
        content = {"outcomes": {"completed": 5}, "load_processes": [side], "steady": STEADY}
        folder.write_summary(made_up_summary({"run_id": name, **content}))
