"""A run of 100,000 requests, judged: `walkaway gate` from its start to its exit code, against what
it may take. The run is made up, as in `analysis`, and summarised beforehand."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Final

from harness.run.pipeline import write_summary
from harness.store.run_folder import RunFolder
from harness.workload.workload import as_plain_data, load_workload
from tests.bench.ratio import Bound, Ratio, share
from tests.made_up.large import Plan, write

REQUESTS: Final = 100_000
FEW_REQUESTS: Final = 2_000
USERS: Final = 1_000
MOST_S: Final = 10.0
ROUNDS: Final = 5
LIMITS: Final = "ttft_s.p99 <= 1\nitl_s.mean <= 0.1\n"
PASS: Final = 0


def measure(*, quick: bool = False) -> Iterable[Ratio]:
    requests, rounds = (FEW_REQUESTS, 1) if quick else (REQUESTS, ROUNDS)
    with TemporaryDirectory(prefix="walkaway-bench-") as path:
        run = _made_up(Path(path), requests)
        took = [_gate(run) for _ in range(rounds)]
    yield share(
        f"{requests:,} requests of 100 tokens judged (theirs: what it may take)",
        "s",
        took,
        [MOST_S] * rounds,
        Bound("at most", 1.0),
    )


def _made_up(path: Path, requests: int) -> RunFolder:
    run = RunFolder(path)
    write(run, Plan(requests=requests, users=USERS, is_exact=False))
    manifest = run.read_manifest()
    manifest["workload"] = as_plain_data(load_workload("gate"))
    (path / "manifest.json").write_text(json.dumps(manifest))
    write_summary(run)
    (path / "limits.txt").write_text(LIMITS)
    return run


def _gate(run: RunFolder) -> float:
    """Seconds, with Python's start and all imports."""
    command = [sys.executable, "-m", "harness", "gate", str(run.path), "--quiet"]
    started_s = perf_counter()
    done = subprocess.run([*command, "--limits", str(run.path / "limits.txt")], check=False)
    took_s = perf_counter() - started_s
    assert done.returncode == PASS
    return took_s
