"""README.md of a card's folder: the card, how each stage ended, and the figures that it left."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from harness.formatting import DASH, RATES, bounded, number, quantity, unit_in_figure
from harness.gate.limits import DEFAULT_LIMITS, Limit, parse_limits
from harness.metrics import METRICS, titled
from harness.records import Metric, Summary
from tools.gpu.results import SAID, Results
from tools.gpu.stages import DEMO, FIGURES, REPORT, STAGES, WHICH_ARMS, GpuStage, Kind

_ROWS: Final = (
    ("step_s", "p50"),
    ("step_s", "p99"),
    ("cancel_latency_s", "p50"),
    ("cancel_latency_s", "p99"),
    ("cancel_latency_steps", "p50"),
    ("cancel_latency_steps", "p99"),
    ("removed_at_first_boundary", "mean"),
    ("slot_refill_s", "p50"),
    ("refilled_next_schedule", "mean"),
    ("slot_recovery_s", "p50"),
    ("slot_recovery_s", "p99"),
    ("ghost_rate", "mean"),
    ("leaked_slots", "mean"),
    ("leaked_blocks", "mean"),
    ("wasted_tokens", "mean"),
    ("wasted_after_close_tokens", "mean"),
    ("ttft_s", "p50"),
    ("itl_s", "p50"),
    ("itl_s", "p99"),
    ("throughput_tps", "mean"),
    ("goodput_rps", "mean"),
    ("slot_utilisation", "mean"),
    ("preemptions", "mean"),
    ("recomputed_tokens", "mean"),
    ("client_lag_s", "p99"),
    ("gpu_utilisation", "mean"),
    ("gpu_memory_bytes", "mean"),
    ("gpu_power_w", "mean"),
    ("gpu_energy_j", "mean"),
    ("energy_per_token_j", "mean"),
    ("energy_wasted_j", "mean"),
    ("gpu_interval_s", "p50"),
)
_SIDES: Final = {  # of a benchmark's lines: what is measured, and what it is held against
    "decode_step": ("measured", "against"),
    "swap_or_recompute": ("copied", "computed again"),
}
_HOW_TO_READ: Final = f"""\
`make gpu` wrote this page from the files in this folder. {DASH}: not measurable here, or not asked.
≥ and ≤: the true figure is at least, or at most, this. A figure that misses its goal is **bold**;
that is a finding and no failure. [methods.md](../../../docs/methods.md) says how each figure is
measured, and `stages.json` and `device.json` have what this page rounds.
"""


def page(results: Results) -> str:
    return "\n".join(
        [
            *_head(results.device),
            *_stages(results),
            *_runs(results.folder),
            *_benchmarks(results.folder),
            *_tests(results.folder / "tests" / SAID),
        ]
    )


def _head(device: Mapping[str, Any]) -> Iterator[str]:
    yield f"# Figures of {device.get('card', 'an unknown card')}\n"
    if device.get("card") == "CPU":
        yield "**A rehearsal on a CPU: no figure here is of a GPU.**\n"
    yield _HOW_TO_READ
    yield "| | |"
    yield "|---|---|"
    yield f"| card | {_card(device)} |"
    yield f"| driver, CUDA | {_known(device, 'driver')}, {_known(device, 'cuda')} |"
    versions = ", ".join(_known(device, name) for name in ("torch", "triton", "python"))
    yield f"| torch, Triton, Python | {versions} |"
    yield f"| clocks after copying (largest) | {_clocks(device)} |"
    yield f"| power limit | {quantity(device.get('power_limit_w'), 'W')} |"
    yield f"| copies within its memory, read + written | {_copies(device)} |"
    yield f"| date | {_date(device.get('at'))} |"
    yield ""


def _known(facts: Mapping[str, Any], name: str) -> str:
    return DASH if facts.get(name) is None else str(facts[name])


def _card(device: Mapping[str, Any]) -> str:
    parts = [_known(device, "card")]
    if "memory_bytes" in device:
        parts += [
            quantity(device["memory_bytes"], "bytes"),
            f"{device['multiprocessors']} multiprocessors",
            f"compute capability {device['compute_capability']}",
        ]
    if device.get("mig"):
        parts.append("MIG is on: a part of the card")
    return ", ".join(parts)


def _clocks(device: Mapping[str, Any]) -> str:
    def shown(mhz: int | None) -> str:
        return DASH if mhz is None else f"{mhz:,} MHz"

    clocks = device.get("clocks_mhz") or {}
    said = (f"{kind} {shown(now)} ({shown(most)})" for kind, (now, most) in clocks.items())
    return ", ".join(said) or DASH


def _copies(device: Mapping[str, Any]) -> str:
    if "copy_bytes_s" not in device:
        return DASH
    low, middle, high = (number(rate / 1e9) for rate in device["copy_bytes_s"])
    return f"{middle} GB/s (quartiles {low} to {high})"


def _date(at: str | None) -> str:
    return DASH if at is None else f"{at[:16].replace('T', ' ')} UTC"


def _stages(results: Results) -> Iterator[str]:
    yield "## Stages\n"
    yield f"{_how_many(results)}\n"
    yield "| stage | what it measures | result | took, of at most | figures here | remark |"
    yield "|---|---|---|---:|---|---|"
    for name, one in results.stages.items():
        took = f"{one['seconds']:.0f} s of {one['box_s']:.0f} s"
        figures = f"{one['figures']}, of {_date(one['figures_at'])}" if one["figures"] else "none"
        cells = (
            name,
            STAGES[name].about,
            one["result"],
            DASH if one["result"] == "skipped" else took,
            figures,
            one["note"],
        )
        yield _row(cells)
    yield f"\n{WHICH_ARMS}\n"


def _how_many(results: Results) -> str:
    by_result: dict[str, list[str]] = {}
    for name in STAGES:
        result = results.stages.get(name, {}).get("result", "not tried")
        by_result.setdefault(result, []).append(name)
    good = len(by_result.pop("good", []))
    others = "".join(f"; {result}: {', '.join(names)}" for result, names in by_result.items())
    return f"Good: {good} of {len(STAGES)}{others}."


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _runs(folder: Path) -> Iterator[str]:
    runs: dict[str, Summary] = {}
    for stage in _of_kind("run", folder):
        content = (folder / stage.name / "summary.json").read_bytes()
        runs[stage.name] = msgspec.json.decode(content, type=Summary)
    if not runs:
        return
    yield "## Runs\n"
    yield "A column for each; the goals are the limits that `walkaway gate` has by default."
    yield f"Only the report of `{DEMO}` is kept; `walkaway report` cannot make the others again,"
    yield "since the rows of the runs are not here.\n"
    for name, summary in runs.items():
        manifest = json.loads((folder / name / "manifest.json").read_text())
        yield from _about_run(name, summary, manifest)
    yield ""
    yield _row(["figure", "goal", *runs, "what it is"])
    yield f"|---|---:|{'---:|' * len(runs)}---|"
    goals = parse_limits(DEFAULT_LIMITS, source="the default limits", arms=[])
    explained = set()
    for metric, key in _ROWS:
        goal = next((one for one in goals if _judges(one, metric, key)), None)
        cells = [_cell(summary.metrics.get(metric), key, goal) for summary in runs.values()]
        shows = "" if metric in explained else METRICS[metric].shows
        explained.add(metric)
        yield _row([_title(metric, key), _goal(goal), *cells, shows])
    yield ""


def _title(metric: str, key: str) -> str:
    """The title, with the unit where neither the figures nor the name say it."""
    title, unit = titled(metric, key), METRICS[metric].unit
    says_it = unit_in_figure(unit) or unit in title.lower()
    return title if says_it else f"{title} ({RATES.get(unit, unit)})"


def _about_run(name: str, summary: Summary, manifest: Mapping[str, Any]) -> Iterator[str]:
    config = (manifest.get("target") or {}).get("config") or {}
    engine = ""
    if config:
        steps = "compiled" if config["compile"] else "eager"
        engine = (
            f" in {config['dtype']}, {steps} steps, {config['max_num_seqs']} slots, "
            f"{config['num_blocks']:,} blocks"
        )
    outcomes = ", ".join(
        f"{n:,} {what.replace('_', ' ')}" for what, n in summary.outcomes.items() if n
    )
    how = "" if summary.status == "complete" else f" ({summary.status.replace('_', ' ')})"
    file = REPORT if name == DEMO else FIGURES["run"][0]
    yield f"- [{name}]({name}/{file}){how}: {summary.model}{engine}; requests: {outcomes}."
    for remark in summary.validity:
        if remark.level == "warning":
            yield f"  - {remark.text}"


def _judges(goal: Limit, metric: str, key: str) -> bool:
    return goal.metric == metric and (goal.key == key or METRICS[metric].kind == "idle")


def _goal(goal: Limit | None) -> str:
    if goal is None:
        return ""
    sign = {"<=": "≤ ", ">=": "≥ ", "==": ""}.get(goal.operator, f"{goal.operator} ")
    return f"{sign}{quantity(goal.number, unit_in_figure(METRICS[goal.metric].unit))}"


def _cell(metric: Metric | None, key: str, goal: Limit | None) -> str:
    if metric is None:
        return DASH
    value, text = getattr(metric, key), bounded(metric, key, unit=unit_in_figure(metric.unit))
    is_missed = goal is not None and value is not None and not goal.holds(value)
    return f"**{text}**" if is_missed else text


def _benchmarks(folder: Path) -> Iterator[str]:
    for stage in _of_kind("bench", folder):
        yield f"## {stage.name}: {stage.about}\n"
        ours, theirs = _SIDES[stage.name]
        yield _row(["what", ours, theirs, f"{ours} / {theirs}", "quartiles", "goal"])
        yield "|---|---:|---:|---:|---:|---:|"
        for text in (folder / stage.name / FIGURES["bench"][0]).read_text().splitlines():
            yield _bench_line(json.loads(text))
        yield ""


def _bench_line(line: Mapping[str, Any]) -> str:
    low, high = line["spread"]
    ratio = f"{line['ratio']:.2f}"
    goal = "" if line["bound"] is None else "{} {:g}".format(*line["bound"])
    return _row(
        [
            line["what"],
            *(quantity(line[side], line["unit"]) for side in ("ours", "theirs")),
            ratio if line["holds"] else f"**{ratio}**",
            f"{low:.2f} to {high:.2f}",
            goal,
        ]
    )


def _tests(said: Path) -> Iterator[str]:
    if not said.exists():
        return
    lines = said.read_text(errors="replace").splitlines()
    names = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    yield "## tests: the tests that need a device\n"
    yield f"[What pytest said](tests/{SAID}), at its end:\n"
    yield "\n".join(["```", *names, lines[-1].strip("= "), "```", ""])


def _of_kind(kind: Kind, folder: Path) -> list[GpuStage]:
    """The stages that have left figures."""
    file = FIGURES[kind][0]
    return [
        stage
        for stage in STAGES.values()
        if stage.kind == kind and (folder / stage.name / file).exists()
    ]
