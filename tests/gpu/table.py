"""The page of the GPU's figures, from what the stages of `python -m tests.gpu` left in a folder."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from harness.formatting import DASH, bounded
from harness.metrics import METRICS
from harness.records import Metric

STAGES_FILE: Final = "stages.json"
FIGURES: Final = (
    ("step_s", "p50"),
    ("cancel_latency_s", "p50"),
    ("cancel_latency_s", "p99"),
    ("cancel_latency_steps", "p50"),
    ("cancel_latency_steps", "p99"),
    ("slot_refill_s", "p50"),
    ("refilled_next_schedule", "mean"),
    ("ghost_rate", "mean"),
    ("wasted_tokens", "mean"),
    ("throughput_tps", "mean"),
    ("preemptions", "mean"),
    ("gpu_utilisation", "mean"),
    ("gpu_memory_bytes", "mean"),
    ("gpu_power_w", "mean"),
    ("gpu_energy_j", "mean"),
    ("energy_per_token_j", "mean"),
    ("energy_wasted_j", "mean"),
    ("gpu_interval_s", "p50"),
)
_HEAD: Final = """\
# GPU figures

Written by `python -m tests.gpu table` from the files beside it, which `make gpu` makes. A dash is
*not measurable here*; `gpu_interval_s` says how often the GPU gave a new reading. docs/methods.md
says what each figure means.
"""


def page(folder: Path, stages: Mapping[str, Mapping[str, Any]]) -> str:
    return "\n".join([_HEAD, *_how_they_ended(stages), *_runs(folder), *_texts(folder)])


def _how_they_ended(stages: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    if any(one["rehearsal"] for one in stages.values()):
        yield "**A rehearsal on a CPU: no figure here is of a GPU.**\n"
    yield "| stage | result | took | at |"
    yield "|---|---|---:|---|"
    for name, one in stages.items():
        yield f"| {name} | {one['result']} | {one['seconds']} s | {one['at']} |"
    yield ""


def _runs(folder: Path) -> Iterator[str]:
    columns: dict[str, Mapping[str, Metric]] = {}
    for file in sorted(folder.glob("*/summary.json")):
        name, summary = file.parent.name, json.loads(file.read_text())
        manifest = json.loads(file.with_name("manifest.json").read_text())
        arms = summary.get("arms") or {"": summary}
        for arm, of_arm in arms.items():
            metrics = msgspec.convert(of_arm["metrics"], dict[str, Metric])
            columns[f"{name} {arm}".strip()] = metrics
        yield f"- [{name}]({name}/report.html): {', '.join(_machine(manifest))}"
    yield ""
    if not columns:
        return
    yield f"| figure | {' | '.join(columns)} |"
    yield f"|---|{'---:|' * len(columns)}"
    for figure, key in FIGURES:
        cells = [_cell(metrics.get(figure), key) for metrics in columns.values()]
        yield f"| `{figure}` {key} | {' | '.join(cells)} |"
    yield ""


def _machine(manifest: Mapping[str, Any]) -> list[str]:
    config = (manifest.get("target") or {}).get("config") or {}
    versions, hardware = manifest.get("versions") or {}, manifest.get("hardware") or {}
    gpu = config.get("gpu_name") or ", ".join(hardware.get("gpus") or []) or hardware.get("cpu")
    torch = f"torch {versions['torch']}" if "torch" in versions else None
    model = f"model {config['model']}" if "model" in config else None
    return [str(part) for part in (gpu, torch, model) if part]


def _cell(metric: Metric | None, key: str) -> str:
    return DASH if metric is None else bounded(metric, key)


def _texts(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.txt")):
        said = file.read_text().strip("\n")
        yield f"## {file.stem}\n\n```\n{said}\n```\n"


assert {name for name, _ in FIGURES} <= METRICS.keys()
