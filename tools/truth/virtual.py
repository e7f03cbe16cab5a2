"""Live against virtual: `python -m tools.truth.virtual [--fit] [--settings N] [--torch N]
[--seed S] [--seconds T] [--twice] [--folder DIR] [--markdown FILE]`.

Each setting, drawn from the seed, is run live (the simulated runner in real processes, real users
over loopback) and simulated from the same workload. `--fit` first measures settings of its own and
writes the machine `live-simulated` anew; leave the machine alone meanwhile. `--torch` adds settings
in which a model computes on the CPU, after a machine was fitted to others of that kind. `--twice`
runs each setting live once more: no simulation can be nearer than these two are to each other.

Exit status 1: the mean error of a figure is beyond its goal.
"""

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from harness.formatting import DASH

MACHINE: Final = Path(__file__).parents[2] / "harness" / "machines" / "live-simulated.toml"
FIT_SETTINGS: Final = 12
TORCH_SLOTS: Final = 8
TORCH_BLOCKS: Final = 2048
LONGEST_TORCH_PROMPT: Final = 128
WAYS: Final = ("fin", "rst", "half_close", "cancel")  # whose lags are measured
# What is compared: the metric, its figures, and the goal for the error.
COMPARED: Final = (
    ("requests", "count", 0.0),  # in open loops, where the schedule alone decides
    ("abandoned", "count", 0.0),
    ("cancel_latency_s", "mean", 0.05),
    ("cancel_latency_s", "p99", 0.10),
    ("cancel_latency_steps", "mean", 0.05),
    ("wasted_tokens", "mean", 0.05),
    ("wasted_tokens", "p99", 0.10),
    ("slot_refill_s", "mean", 0.05),
    ("slot_refill_s", "p50", 0.05),
    ("slot_refill_s", "p99", 0.10),
    ("ttft_s", "mean", 0.05),
    ("ttft_s", "p50", 0.05),
    ("ttft_s", "p99", 0.10),
    ("throughput_tps", "mean", 0.05),
)


class Setting(NamedTuple):
    name: str
    workload: dict[str, Any]

    @property
    def about(self) -> str:
        run, load, engine = (self.workload[key] for key in ("run", "load", "engine"))
        came = self.workload.get("arrivals")
        who = f"{run['users']} users" if came is None else f"{came['rate']:g} requests/s"
        ways = ", ".join(one["way"] for one in load["mix"])
        step = "a model on the CPU"
        if engine["runner"] == "simulated":
            prefill_ms = engine["sim_prefill_token_ms"]
            step = f"step {engine['sim_fixed_ms']:g} ms + {prefill_ms:g} a prompt token"
        return (
            f"{who}, {engine['max_num_seqs']} slots, {step}, "
            f"{1 - load['stay_share']:.0%} leave ({ways})"
        )


Draw = Callable[[int, str, float], Setting]


def draw(number: int, seed: str, seconds: float) -> Setting:
    rng = random.Random(f"{seed}/{number}")
    slots = rng.choice((8, 16, 32))
    fixed_ms = rng.choice((10, 15, 20, 30))
    stays, prompt = rng.randint(20, 100), rng.choice((32, 128, 512))
    tokens = sorted(rng.sample(range(1, 49), 4))
    ways = rng.choice((("fin",), ("rst",), ("fin", "rst")))
    stay_share = rng.choice((0.3, 0.5, 0.7))
    workload: dict[str, Any] = {
        "question": "Is the simulation right?",
        "run": {
            "seed": rng.randint(1, 10_000),
            "users": round(slots * rng.uniform(0.75, 1.75)),
            "max_seconds": seconds,
        },
        "load": {
            "kind": "abandon",
            "mix": [{"plan": "tokens", "tokens": tokens, "way": way} for way in ways],
            "stay_share": stay_share,
            "prompt_tokens": [16, prompt],
            "answer_tokens": 3000,
            "stay_tokens": stays,
        },
        "engine": {
            "runner": "simulated",
            "sim_fixed_ms": fixed_ms,
            "sim_prefill_token_ms": rng.choice((0.0, 0.01, 0.03)),
            "sim_decode_token_ms": rng.choice((0.0, 0.05)),
            "max_num_seqs": slots,
            "num_blocks": 8192,
        },
    }
    if rng.random() < 1 / 3:
        answer = stay_share * stays + (1 - stay_share) * fmean(tokens)
        rate = round(rng.uniform(0.7, 0.9) * slots / (answer * fixed_ms * 1.2 / 1e3), 2)
        workload["arrivals"] = {"kind": "poisson", "rate": rate, "seconds": seconds - 5}
        workload["run"]["users"] = 1
    return Setting(f"{number}", workload)


def draw_torch(number: int, seed: str, seconds: float) -> Setting:
    """A setting with users, whose number needs no knowledge of a step's length."""
    workload = draw(number, seed, seconds).workload
    workload.pop("arrivals", None)
    slots = TORCH_SLOTS
    workload["run"]["users"] = random.Random(f"{seed}/{number}/users").randint(slots - 2, slots * 2)
    shortest, longest = workload["load"]["prompt_tokens"]
    workload["load"]["prompt_tokens"] = [shortest, min(longest, LONGEST_TORCH_PROMPT)]
    workload["engine"] = {
        "runner": "torch",
        "device": "cpu",
        "max_num_seqs": slots,
        "num_blocks": TORCH_BLOCKS,
    }
    return Setting(f"torch-{number}", workload)


def as_toml(workload: dict[str, Any]) -> str:
    lines = [f"question = {json.dumps(workload['question'])}"]
    for name in ("run", "arrivals", "load", "engine"):
        if name in workload:
            lines += [f"[{name}]", *(f"{k} = {_inline(v)}" for k, v in workload[name].items())]
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    return json.dumps(value)


def walkaway(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"walkaway {' '.join(arguments)}: {done.stderr}")


def run(setting: Setting, how: str, folder: Path, machine: Path | None = None) -> dict[str, Any]:
    """`how`: live, again or virtual. Returns its summary; a finished live one is read again."""
    out = folder / f"{setting.name}-{how}"
    if how == "virtual":  # its machine may be another one
        shutil.rmtree(out, ignore_errors=True)
    if not (out / "summary.json").is_file():
        file = folder / f"{setting.name}.toml"
        file.write_text(as_toml(setting.workload))
        verb = "simulate" if how == "virtual" else "run"
        more = [] if how == "virtual" else ["--no-scrape"]
        if how == "virtual" and machine is not None:
            more = ["--machine", str(machine)]
        walkaway(verb, str(file), "--out", str(out), "--quiet", *more)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


class Line(NamedTuple):
    """A figure in one setting."""

    setting: str
    metric: str
    figure: str
    live: float
    virtual: float
    again: float | None

    @property
    def error(self) -> float:
        return self.virtual / self.live - 1

    @property
    def noise(self) -> float | None:
        return None if self.again is None else self.again / self.live - 1


def value_of(summary: Any, metric: str, figure: str) -> float | None:
    if figure != "count":
        value: float | None = summary["metrics"].get(metric, {}).get(figure)
        return value
    if summary["arrivals"] is None:
        return None
    counts = summary["outcomes"]
    return float(counts.get(metric, 0) if metric in counts else sum(counts.values()))


def compare(setting: Setting, live: Any, virtual: Any, again: Any | None) -> Iterator[Line]:
    for metric, figure, _ in COMPARED:
        first, second, third = (
            None if one is None else value_of(one, metric, figure) for one in (live, virtual, again)
        )
        is_closed = "arrivals" not in setting.workload
        is_cut = is_closed and (metric, figure) == ("ttft_s", "mean") and second is None
        if first and not is_cut:  # the end of a closed loop cuts off one without a token
            shown = math.nan if second is None else second
            yield Line(setting.name, metric, figure, first, shown, third)


def misses(lines: Sequence[Line]) -> list[str]:
    """Figures whose mean error is beyond its goal, or not known."""
    found = []
    for metric, figure, goal in COMPARED:
        sizes = [abs(one.error) for one in lines if (one.metric, one.figure) == (metric, figure)]
        if sizes and not fmean(sizes) <= goal:
            found.append(f"{metric}, {figure}: {fmean(sizes):.1%}, where the goal is {goal:.0%}")
    return found


def table(lines: Sequence[Line]) -> list[str]:
    heads = "figure", "settings", "error", "median", "bias", "worst", "goal", "within", "live again"
    rows = [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1)]
    for metric, figure, goal in COMPARED:
        own = [one for one in lines if (one.metric, one.figure) == (metric, figure)]
        if not own:
            rows.append(f"| `{metric}`, {figure} | 0 |" + f" {DASH} |" * (len(heads) - 2))
            continue
        sizes = [abs(one.error) for one in own]
        noise = [abs(one.noise) for one in own if one.noise is not None]
        cells = (
            f"`{metric}`, {figure}",
            str(len(own)),
            f"{fmean(sizes):.1%}",
            f"{median(sizes):.1%}",
            f"{fmean(one.error for one in own):+.1%}",
            f"{max(sizes):.1%}",
            f"{goal:.0%}",
            f"{sum(size <= goal for size in sizes)} of {len(own)}",
            f"{fmean(noise):.1%}" if noise else DASH,
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def details(settings: Sequence[Setting], lines: Sequence[Line]) -> list[str]:
    rows = ["| setting | " + " | ".join(f"{m}, {f}" for m, f, _ in COMPARED) + " |"]
    rows.append("| --- |" + " ---: |" * len(COMPARED))
    for setting in settings:
        own = {(one.metric, one.figure): one for one in lines if one.setting == setting.name}
        cells = [
            f"{own[m, f].live:.3g} → {own[m, f].virtual:.3g}" if (m, f) in own else DASH
            for m, f, _ in COMPARED
        ]
        rows.append(f"| {setting.name}: {setting.about} | {' | '.join(cells)} |")
    return rows


def fit(draws: Draw, machine: Path, folder: Path, seconds: float) -> None:
    settings = [draws(number, "fit", seconds) for number in range(FIT_SETTINGS)]
    for setting in settings:
        load = setting.workload["load"]
        tokens = load["mix"][0]["tokens"]
        load["mix"] = [{"plan": "tokens", "tokens": tokens, "way": way} for way in WAYS]
        load["stay_share"] = 0.3
        print(f"fit {setting.name}: {setting.about}", flush=True)  # noqa: T201
        run(setting._replace(name=f"fit-{setting.name}"), "live", folder)
    runs = [str(folder / f"fit-{one.name}-live") for one in settings]
    walkaway("calibrate", *runs, "-o", str(machine), "--force")


def measure(
    settings: Sequence[Setting], folder: Path, machine: Path | None, *, twice: bool
) -> list[Line]:
    lines: list[Line] = []
    for setting in settings:
        live = run(setting, "live", folder)
        again = run(setting, "again", folder) if twice else None
        found = list(compare(setting, live, run(setting, "virtual", folder, machine), again))
        lines += found
        shown = ", ".join(f"{one.metric} {one.figure} {one.error:+.1%}" for one in found)
        print(f"{setting.name}: {setting.about}: {shown}", flush=True)  # noqa: T201
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--settings", type=int, default=12)
    parser.add_argument("--torch", type=int, default=0, metavar="SETTINGS")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="walkaway-virtual-"))
    folder.mkdir(parents=True, exist_ok=True)
    if options.fit:
        fit(draw, MACHINE, folder, options.seconds)
    torch_machine = folder / "torch-cpu.toml"
    if options.torch and (options.fit or not torch_machine.is_file()):
        fit(draw_torch, torch_machine, folder, options.seconds)
    text, missed = [], []
    legs: tuple[tuple[Draw, int, Path | None], ...] = (
        (draw, options.settings, None),
        (draw_torch, options.torch, torch_machine),
    )
    for draws, number, machine in legs:
        settings = [draws(n, options.seed, options.seconds) for n in range(1, number + 1)]
        if settings:
            lines = measure(settings, folder, machine, twice=options.twice)
            text += [*table(lines), "", *details(settings, lines), ""]
            missed += misses(lines)
    print("\n".join([*text, *(f"missed: {one}" for one in missed)]))  # noqa: T201
    if options.markdown is not None:
        options.markdown.write_text("\n".join(text))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
