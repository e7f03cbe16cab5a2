"""The cases of the gate's trials: a build without a fault, and builds with one fault each.

A build is the bundled engine with settings of its own. All are run on the same workload; the one
that decides about the size of chunks needs long prompts, several rounds and a baseline. Black boxes
are run on `gate_black_box`: the engine is then another's, of which neither log nor metrics is read.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from harness.run.pipeline import execute
from harness.run.process import Interruption
from harness.run.progress import Progress
from harness.run.rounds import execute_rounds
from harness.run.run_config import RunConfig, resolve_run
from tests.reference_engine.running_engine import RunningEngine
from tools.truth.conform_cases import engine_flags

MOST_TRIES: Final = 4

PREFILL: Final = (
    'arms=[{name="build"}]',
    "run.rounds=3",
    "run.max_seconds=40",
    "load.stop_after_abandons=80",
    "collect.scrape=false",
)
CHUNK_LIMITS: Final = "build / baseline: step_s.p50 <= 1.25\n"  # a cancel waits for a step's end
# One build under two names, in turn, in short rounds: no difference between them, nor since then.
TWO: Final = ('arms=[{name="old"}, {name="new"}]', "run.rounds=3", "load.stop_after_abandons=84")
TWO_LIMITS: Final = """\
new - old: cancel_latency_steps.mean <= 0.5
new / baseline: cancel_latency_steps.mean <= 1.5
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateTrial:
    """One row of the table. `limits`: by what it is judged, against a baseline: a run of the build
    without a fault; none: by the limits of the workload itself. `server`: the flags of the engine
    that is measured as a black box; none: the run starts the engine itself."""

    name: str
    workload: str = "gate"
    settings: tuple[str, ...] = ()
    limits: str | None = None
    is_clean: bool = False
    server: tuple[str, ...] | None = None


def with_fault(fault: str) -> GateTrial:
    settings = (f'engine.faults=["{fault}"]', "engine.allow_faults=true")
    return GateTrial(name=fault, settings=settings)


def black_box(fault: str) -> GateTrial:
    name = f"black box, {fault or 'clean'}"
    server = tuple(engine_flags(fault))
    return GateTrial(name=name, workload="gate_black_box", is_clean=not fault, server=server)


CLEAN: Final = GateTrial(name="clean", is_clean=True)
CLEAN_PREFILL: Final = GateTrial(
    name="clean, long prompts",
    workload="prefill_abandon",
    settings=PREFILL,
    limits=CHUNK_LIMITS,
    is_clean=True,
)
CLEAN_TWO: Final = GateTrial(
    name="clean against clean, in turn", settings=TWO, limits=TWO_LIMITS, is_clean=True
)
BASELINES: Final = {CHUNK_LIMITS: CLEAN_PREFILL, TWO_LIMITS: CLEAN_TWO}
FAULTY: Final = (
    with_fault("delay-abort=0.02"),
    with_fault("lose-abort=0.02"),
    with_fault("leak-blocks=1"),
    with_fault("ignore-disconnect-while-waiting"),
    GateTrial(
        name="chunks of 512 tokens, not 256",
        workload="prefill_abandon",
        settings=(*PREFILL, "engine.max_num_batched_tokens=512"),
        limits=CHUNK_LIMITS,
    ),
)
BLACK_BOXES: Final = tuple(
    black_box(fault) for fault in ("", "delay-abort=0.1", "lose-abort=0.1", "leak-slot")
)
ALL: Final = (CLEAN, CLEAN_TWO, CLEAN_PREFILL, *FAULTY, *BLACK_BOXES)


# One trial: a whole run of the bundled engine, without a report...


def measure(case: GateTrial, seed: int, folder: Path) -> None:
    """Run the case into `folder`, unless that was done already. Raises how it failed.

    A run that is invalid, because the machine was too busy with something else, is put aside and
    made again; the last one counts, whatever it is.
    """
    for number in range(1, MOST_TRIES + 1):
        if not (folder / "summary.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)  # of trials that were stopped
            _run(case, seed, folder)
        if number == MOST_TRIES or not _is_invalid(folder):
            return
        folder.rename(_aside(folder, number))


def times_made_again(folder: Path) -> int:
    return sum(_aside(folder, number).exists() for number in range(1, MOST_TRIES + 1))


def _aside(folder: Path, number: int) -> Path:
    return folder.with_name(f"{folder.name}-invalid-{number}")


def _is_invalid(folder: Path) -> bool:
    said = json.loads((folder / "summary.json").read_text())["validity"]
    return any(one["level"] == "invalid" for one in said)


def _run(case: GateTrial, seed: int, folder: Path) -> None:
    settings = [*case.settings, f"run.seed={seed}"]
    config = RunConfig(workload=case.workload, settings=settings, out=folder)
    if case.server is None:
        return _execute(config)
    server = RunningEngine(*case.server, stderr=subprocess.DEVNULL)
    try:
        _execute(replace(config, target_url=server.url, engine="openai"))
    finally:
        server.stop()


def _execute(config: RunConfig) -> None:
    resolved = resolve_run(config)
    run = execute_rounds if resolved.arm_runs else execute
    finished = run(resolved, progress=Progress(), interruption=Interruption())
    if finished.failure is not None:
        raise finished.failure
