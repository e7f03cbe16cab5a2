"""Virtual time: tokens scheduled in a second of processor time, with one replica of 64 slots.

All of it is counted: users, frontend, lags, scheduler, cache, and thin rows on disk. More users
than slots ask for 500 tokens each; a sixth of them leaves after 120.
"""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Final

from harness.simulate.cell import Cell
from harness.simulate.machine import Cost, Lags, SimulatedMachine
from harness.simulate.plan import Plan
from harness.simulate.rows import CellFacts, CellFiles
from harness.workload.workload import Workload
from tools.bench.ratio import BenchRatio, RatioLimit, share

GOAL: Final = 300_000.0  # scheduled tokens a second, at 64 running
SLOTS: Final = 64
USERS: Final = 72
ENGINE: Final = {
    "runner": "simulated",
    "max_num_seqs": SLOTS,
    "num_blocks": 8192,
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
}
LOAD: Final = {
    "kind": "abandon",
    "prompt_tokens": [300, 300],
    "abandon_after_tokens": [120],
    "stay_share": 5 / 6,
    "answer_tokens": 800,
    "stay_tokens": 500,
}
MACHINE: Final = SimulatedMachine(
    name="bench",
    title="Made up",
    kind="assumed",
    gpus=0,
    cost=Cost(
        fixed_s=0.015,
        prefill_token_s=2e-5,
        decode_token_s=5e-5,
        context_token_s=1e-7,
        swap_block_s=0.0,
    ),
    lags=Lags(
        send_s=[0.0005, 0.001],
        deliver_s=[0.0002, 0.0006, 0.002],
        detect_s={"fin": [0.0001, 0.0004]},
        signal_s=[0.0001, 0.0003],
        step_s=[0.0, 0.0],
        between_s=[0.0002, 0.0004],
        schedule_s=[0.0, 0.0],
        rest_s=[0.0002, 0.0002],
    ),
)


def virtual_time(*, quick: bool = False) -> Iterable[BenchRatio]:
    seconds = 1.0 if quick else 200.0
    scheduled, decoded = [], []
    for seed in range(1 if quick else 5):
        facts, took_s = _simulate(seed, seconds)
        scheduled.append(facts.scheduled_tokens / took_s)
        decoded.append(facts.generated_tokens / took_s)
    what, goals = f"virtual time, {SLOTS} running: tokens scheduled", [GOAL] * len(scheduled)
    bound = RatioLimit("at least", 1.0)
    yield share(f"{what}, against the goal", "tokens/s", scheduled, goals, bound)
    yield share(f"{what}: the answers' own", "tokens/s", decoded, scheduled)


def _simulate(seed: int, seconds: float) -> tuple[CellFacts, float]:
    workload = Workload.model_validate(
        {
            "name": "bench",
            "question": "How fast?",
            "run": {"seed": seed, "users": USERS, "max_seconds": seconds},
            "load": LOAD,
            "engine": ENGINE,
            "simulate": {"keep": "thin"},
        }
    )
    plan = Plan(workload=workload, machine=MACHINE, arm="", settle_s=2.0)
    with TemporaryDirectory() as folder:
        began_s = process_time()
        files = CellFiles(Path(folder) / "cell", keeps_tokens=False)
        cell = Cell(plan, 0, files)
        cell.run(lambda *_: None)
        return cell.facts(is_complete=True), process_time() - began_s
