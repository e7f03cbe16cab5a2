"""The GPU's figures, all in one command: `python -m tests.gpu [STAGE...] [--rehearse] [--out DIR]`.

Each stage is a process with a time limit. A run that fails, or takes too long, loses its own
results alone: those of an earlier call stay. `stages.json` in the folder says when each stage last
ran and how it ended, so stages can also be run one by one; the stage `table` writes README.md from
what lies there. The exit status is 1 if a stage failed, 2 if there is nothing to run on.

With `--rehearse` the same stages run on the CPU in a few minutes, into another folder: what needs a
device is skipped, and the figures of GPUs are not measurable.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.gpu.table import STAGES_FILE, page

ROOT: Final = Path(__file__).parents[2]
KEPT: Final = ("manifest.json", "summary.json", "report.html")
TABLE: Final = "table"


class Stage(NamedTuple):
    """`arguments` and `rehearsal` are of Python. A workload's run leaves a folder, any other stage
    the text that it printed."""

    name: str
    limit_s: float
    arguments: Sequence[str]
    rehearsal: Sequence[str]
    is_run: bool = False


def _workload(name: str, limit_s: float, *settings: str, short: Sequence[str]) -> Stage:
    def flags(keys: Iterable[str]) -> list[str]:
        return [f"--set={key}" for key in keys]

    arguments = [
        "-m",
        "harness",
        "run",
        name,
        *flags(["engine.runner=torch", "engine.compile=true", *settings]),
    ]
    return Stage(
        name,
        limit_s,
        arguments,
        [*arguments, *flags(["engine.compile=false", *short])],
        is_run=True,
    )


TESTS: Final = ("-m", "pytest", "-q", "-m", "gpu", "tests/reference_engine")
BENCH: Final = ("-m", "tests.bench")


# A device decides between computing and copying; the other arms cost the same anywhere.
ARMS: Final = """[{name="off"}, {name="watermark", engine={watermark=0.15}},
  {name="swap", engine={preemption="swap"}}]"""
# At most 20 minutes together.
STAGES: Final = {
    one.name: one
    for one in (
        Stage("tests", 180, TESTS, TESTS),
        Stage(
            "bench",
            420,
            [*BENCH, "model_speed_gpu", "swap_or_recompute"],
            [*BENCH, "model_speed_gpu", "swap_or_recompute", "--quick"],
        ),
        _workload("demo", 150, short=["run.max_seconds=10"]),
        _workload("cancel_steps", 150, short=["run.max_seconds=10"]),
        _workload("memory_pressure", 300, f"arms={ARMS}", "run.rounds=3", short=["run.rounds=1"]),
    )
}
Execute = Callable[[Sequence[str], float, Path | None], int]


def execute(command: Sequence[str], limit_s: float, output: Path | None) -> int:
    """The exit status of the process, with its output in a file if one is given; 124: it took too
    long, and it and all that it started was killed."""
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with contextlib.ExitStack() as until_over:
        out = None if output is None else until_over.enter_context(output.open("wb"))
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return 124
            raise


def run_stage(stage: Stage, out: Path, *, rehearses: bool, run: Execute) -> int:
    """A run's results replace those of an earlier call only if it went well; a text always does."""
    work = out / ".work" / stage.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    command = [sys.executable, *(stage.rehearsal if rehearses else stage.arguments)]
    if not stage.is_run:
        status = run(command, stage.limit_s, work / "said")
        print((work / "said").read_text(), flush=True)  # noqa: T201
        shutil.copy(work / "said", out / f"{stage.name}.txt")
        return status
    device = f"--set=engine.device={'cpu' if rehearses else 'cuda'}"
    folder = work / "run"
    status = run([*command, device, "--out", str(folder)], stage.limit_s, None)
    if status == 0:
        (out / stage.name).mkdir(exist_ok=True)
        for name in KEPT:
            shutil.copy(folder / name, out / stage.name / name)
    return status


def run_all(names: Sequence[str], out: Path, *, rehearses: bool, run: Execute = execute) -> int:
    started = time.monotonic()

    def say(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - started), 60)
        print(f"[{minutes:2}:{seconds:02}] {text}", flush=True)  # noqa: T201

    out.mkdir(parents=True, exist_ok=True)
    ended: dict[str, Any] = _stages_so_far(out)
    failed = []
    for name in names:
        if name == TABLE:
            continue
        say(f"{name}: at most {STAGES[name].limit_s:.0f} s")
        began = time.monotonic()
        status = run_stage(STAGES[name], out, rehearses=rehearses, run=run)
        seconds = time.monotonic() - began
        how = {0: "good", 124: "took too long"}.get(status, f"failed with status {status}")
        at = datetime.now(UTC).isoformat(timespec="seconds")
        ended[name] = {"at": at, "seconds": round(seconds), "result": how, "rehearsal": rehearses}
        ended = {one: ended[one] for one in STAGES if one in ended}
        (out / STAGES_FILE).write_text(json.dumps(ended, indent=2) + "\n")
        failed += [name] * (status != 0)
        say(f"{name}: {how}, in {seconds:.0f} s")
    (out / "README.md").write_text(page(out, ended))
    say(f"the table is in {out / 'README.md'}" + (f"; failed: {', '.join(failed)}" * bool(failed)))
    return 1 if failed else 0


def _stages_so_far(out: Path) -> dict[str, Any]:
    file = out / STAGES_FILE
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def sees_a_device() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def main() -> int:
    names = [*STAGES, TABLE]
    parser = argparse.ArgumentParser(prog="python -m tests.gpu")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"{', '.join(names)}; all")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, and short")
    parser.add_argument("--out", type=Path, help="default: results/gpu, or build/gpu-rehearsal")
    given = parser.parse_args()
    if unknown := set(given.stages) - set(names):
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = given.stages or names
    if not given.rehearse and chosen != [TABLE] and not sees_a_device():
        parser.error("torch sees no CUDA device here: rehearse on the CPU with --rehearse")
    default = Path("build/gpu-rehearsal") if given.rehearse else Path("results/gpu")
    return run_all(chosen, given.out or default, rehearses=given.rehearse)


if __name__ == "__main__":
    sys.exit(main())
