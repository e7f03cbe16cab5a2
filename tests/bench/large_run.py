"""A million requests of 100 tokens each, analysed: seconds and memory, against what they may take.

The runs are made up (`tests/made_up/large.py`). One of a million requests and a thousand users is
seen from outside only: requests, the load processes' ticks and a scraped page. The other has the
exact logs, too, a tenth of the requests and a hundred users. Each is written by a child process,
and each measurement is a fresh one:

`python -m tests.bench.large_run analyse FOLDER` reads the rows of a run and writes its summary, and
`... draw FOLDER` reads both and writes the report. Each prints how long it took and how much memory
it had at most, as JSON.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Final

from dashboards.report import write_report
from harness.run.pipeline import write_summary
from harness.store.run_folder import RunFolder
from tests.bench.ratio import Bound, Ratio, share
from tests.made_up.large import Plan

RUNS: Final = {
    "seen from outside": Plan(requests=1_000_000, users=1_000, is_exact=False),
    "with its logs": Plan(requests=100_000, users=100, is_exact=True),
}
FEW: Final = Plan(requests=2_000, users=100, is_exact=True)
MOST_S: Final = 60.0
MOST_GIB: Final = 4.0
ROUNDS: Final = 3


def measure(*, quick: bool = False) -> Iterable[Ratio]:
    runs, rounds = ({"with its logs": FEW}, 1) if quick else (RUNS, ROUNDS)
    for name, plan in runs.items():
        with TemporaryDirectory(prefix="walkaway-bench-") as folder:
            write_by_child(Path(folder), plan)
            measured = [measured_by_child("analyse", Path(folder)) for _ in range(rounds)]
        for what, unit, key, most in (
            ("time", "s", "seconds", MOST_S),
            ("peak memory", "GiB", "peak_gib", MOST_GIB),
        ):
            yield share(
                f"{plan.requests:,} requests {name}: {what} (theirs: what it may take)",
                unit,
                [one[key] for one in measured],
                [most] * rounds,
                Bound("at most", 1.0),
            )


def write_by_child(path: Path, plan: Plan) -> None:
    sizes = [str(path), str(plan.requests), str(plan.users)]
    kind = ["exact"] if plan.is_exact else []
    command = [sys.executable, "-m", "tests.made_up.large", *sizes, *kind]
    subprocess.run(command, check=True)


def measured_by_child(what: str, path: Path) -> dict[str, float]:
    """`seconds`, of them `cpu_s` of a processor, and `peak_gib`."""
    command = [sys.executable, "-m", "tests.bench.large_run", what, str(path)]
    measured = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    found: dict[str, float] = json.loads(measured)
    return found


def analyse(path: Path) -> None:
    write_summary(RunFolder(path))


def draw(path: Path) -> None:
    write_report([path], RunFolder(path).report)


TASKS: Final = {"analyse": analyse, "draw": draw}


def main() -> None:
    what, path = sys.argv[1], Path(sys.argv[2])
    started_s, cpu_s = perf_counter(), process_time()
    TASKS[what](path)
    measured = {
        "seconds": perf_counter() - started_s,
        "cpu_s": process_time() - cpu_s,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    print(json.dumps(measured))  # noqa: T201


if __name__ == "__main__":
    main()
