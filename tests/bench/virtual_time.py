"""Virtual time: tokens scheduled in a second of processor time, with one replica of 64 slots.

All of it is counted: users, frontend, lags, scheduler, cache, and thin rows on disk. More users
than slots ask for 500 tokens each; a sixth of them leaves after 120.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Final

from reference_engine.simulate.cell import Cell
from reference_engine.simulate.plan import (
    CellPlan,
    Lags,
    PlannedRequest,
    Simulation,
    engine_settings,
)
from reference_engine.simulate.rows import CellFacts, CellFiles
from tests.bench.ratio import Bound, Ratio, share

GOAL: Final = 300_000.0  # scheduled tokens a second, at 64 running
SLOTS: Final = 64
USERS: Final = 72
_LEAVER: Final = 6  # each sixth request
FLAGS: Final = [
    *("--runner", "simulated", "--max-num-seqs", str(SLOTS), "--num-blocks", "8192"),
    *("--max-model-len", "4096", "--max-num-batched-tokens", "2048", "--sim-fixed-ms", "15"),
    *("--sim-prefill-token-ms", "0.02", "--sim-decode-token-ms", "0.05"),
    *("--sim-context-token-ms", "0.0001"),
]
LAGS: Final = Lags(
    name="bench",
    send_s=[0.0005, 0.001],
    deliver_s=[0.0002, 0.0006, 0.002],
    detect_s={"fin": [0.0001, 0.0004]},
    signal_s=[0.0001, 0.0003],
    step_s=[0.0, 0.0],
    between_s=[0.0002, 0.0004],
)


def virtual_time(*, quick: bool = False) -> Iterable[Ratio]:
    seconds = 1.0 if quick else 200.0
    scheduled, decoded = [], []
    for seed in range(1 if quick else 5):
        facts, took_s = _simulate(seed, seconds)
        scheduled.append(facts.scheduled_tokens / took_s)
        decoded.append(facts.generated_tokens / took_s)
    what, goals = f"virtual time, {SLOTS} running: tokens scheduled", [GOAL] * len(scheduled)
    bound = Bound("at least", 1.0)
    yield share(f"{what}, against the goal", "tokens/s", scheduled, goals, bound)
    yield share(f"{what}: the answers' own", "tokens/s", decoded, scheduled)


def _simulate(seed: int, seconds: float) -> tuple[CellFacts, float]:
    plan = Simulation(
        seed=seed,
        engine_flags=FLAGS,
        lags=LAGS,
        cells=[CellPlan(replicas=1, simulated=1)],
        load_s=seconds,
        settle_s=2.0,
        keep="thin",
    )
    with TemporaryDirectory() as folder:
        began_s = process_time()
        files = CellFiles(Path(folder) / "cell", keeps_tokens=False)
        cell = Cell(plan, 0, engine_settings(plan, {}), _requests(seconds), files)
        cell.run(lambda *_: None)
        return cell.facts(is_complete=True), process_time() - began_s


def _requests(seconds: float) -> Iterator[PlannedRequest]:
    """So many that no user runs out of them: one lasts two seconds at least."""
    each = int(seconds / 2) + 2
    for number in range(USERS * each):
        is_left = number % _LEAVER == 0
        yield PlannedRequest(
            cell=0,
            number=number,
            user=number // each,
            offset_s=None,
            prompt_tokens=300,
            shared_prefix_tokens=0,
            pages=None,
            page_tokens=None,
            max_tokens=800 if is_left else 500,
            stay_tokens=None,
            stream=True,
            n=1,
            role="user",
            plan="tokens:120" if is_left else "never",
            way="fin" if is_left else "",
            leave_after_tokens=120 if is_left else None,
            pause="think",
            pause_ns=None,
            think_fraction=number % 97 / 97,
            ttft_share=None,
            arm="",
            text=None,
        )
