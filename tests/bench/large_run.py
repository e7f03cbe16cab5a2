"""What a large run takes to be analysed and drawn: the child processes of `analysis` and `report`.

`python -m tests.bench.large_run analyse FOLDER` reads the rows of a run and writes its summary, and
`... draw FOLDER` reads both and writes the report. Each tells how long it took and how much memory
it had at most, as JSON.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Final

from dashboards.report import write_report
from harness.run.pipeline import write_summary
from harness.store.run_folder import RunFolder
from tests.made_up.large import Plan


def write_by_child(path: Path, plan: Plan) -> None:
    sizes = [str(path), str(plan.requests), str(plan.users)]
    kind = ["exact"] if plan.is_exact else []
    command = [sys.executable, "-m", "tests.made_up.large", *sizes, *kind]
    subprocess.run(command, check=True)


def told_by_child(what: str, path: Path) -> dict[str, float]:
    """`seconds`, of them `cpu_s` of a processor, and `peak_gib`."""
    command = [sys.executable, "-m", "tests.bench.large_run", what, str(path)]
    told = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    found: dict[str, float] = json.loads(told)
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
    told = {
        "seconds": perf_counter() - started_s,
        "cpu_s": process_time() - cpu_s,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    print(json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main()
