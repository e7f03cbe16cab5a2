"""The trials of the gate: `python -m tools.gate_trials [--clean N] [--faulty N] [--runs FOLDER]`.

Good builds must hardly ever be called bad, and builds with a fault always. Every trial is a run of
its own, judged by `walkaway gate`; the table of the verdicts is written into docs/gate.md. Takes
two hours or so; with --runs, runs that are there already are not made again; with --build NAME only
the rows of that build are made, and the others left as they are. The exit status is 1 where more
than one good build in a hundred is red, fewer than nine in ten are green, or a bad one is not red.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from harness.commands.gate import GateOrder, gate_and_show
from harness.gate.judge import EXIT_CODES, GateVerdict
from harness.workload.workload import load_workload
from tools.gate_trials.cases import (
    ALL,
    BASELINES,
    CLEAN,
    CLEAN_TWO,
    GateTrial,
    measure,
    times_made_again,
)

PAGE: Final = Path(__file__).parents[2] / "docs" / "gate.md"
BEGIN, END = "<!-- trials: begin -->\n", "<!-- trials: end -->\n"
BASELINE_SEED: Final = 1000
AT_ONCE: Final = 3
MOST_FALSE: Final = 0.01  # of the good builds
FEWEST_GREEN: Final = 0.9  # of them: a gate that can never decide would not be of use

HEAD = """\
| build | runs | pass | fail | cannot decide | made again |
|---|---:|---:|---:|---:|---:|
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    case: GateTrial
    verdicts: Counter[GateVerdict]
    made_again: int

    @property
    def is_right(self) -> bool:
        red, green = self.verdicts[GateVerdict.FAIL], self.verdicts[GateVerdict.PASS]
        runs = self.verdicts.total()
        if self.case.is_clean:
            return red <= MOST_FALSE * runs and green >= FEWEST_GREEN * runs
        return red == runs

    def __str__(self) -> str:
        counts = " | ".join(str(self.verdicts[verdict]) for verdict in GateVerdict)
        return f"| {self.case.name} | {self.verdicts.total()} | {counts} | {self.made_again} |"


def place(root: Path, case: GateTrial, seed: int) -> Path:
    return root / "".join(c if c.isalnum() else "-" for c in case.name) / str(seed)


def baseline_of(root: Path, limits: str) -> Path:
    return place(root, BASELINES[limits], BASELINE_SEED).with_suffix(".json")


def _written(root: Path, limits: str) -> Path:
    file = root / "limits.txt"
    file.write_text(limits)
    return file


def judge(root: Path, case: GateTrial, seed: int) -> GateVerdict:
    order = GateOrder(
        run=place(root, case, seed),
        limits=_written(root, case.limits or "\n".join(load_workload(case.workload).gate.limits)),
        baseline=baseline_of(root, case.limits) if case.limits else None,
    )
    code = gate_and_show(order, as_json=False, quiet=True)
    return next(verdict for verdict, of in EXIT_CODES.items() if of == code)


def rows(root: Path, seeds: Sequence[tuple[GateTrial, range]]) -> Iterator[Row]:
    for limits in _limits(seeds):
        case = BASELINES[limits]
        order = GateOrder(
            run=place(root, case, BASELINE_SEED),
            limits=_written(root, "leaked_blocks.max == 0"),
            baseline=baseline_of(root, limits),
            saves_baseline=True,
            may_overwrite=True,
        )
        gate_and_show(order, as_json=False, quiet=True)
    for case, of_case in seeds:
        yield Row(
            case=case,
            verdicts=Counter(judge(root, case, seed) for seed in of_case),
            made_again=sum(times_made_again(place(root, case, seed)) for seed in of_case),
        )


def _limits(seeds: Sequence[tuple[GateTrial, range]]) -> list[str]:
    """The limits by which these cases are judged, each once, where that takes a baseline."""
    return list(dict.fromkeys(case.limits for case, _ in seeds if case.limits))


def write_table(found: Sequence[Row]) -> None:
    """Put the rows between the table's marks, each in its place; others are left as they are."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    lines = {line.split(" | ")[0].strip("| "): line for line in old.splitlines()[2:]}
    lines |= {row.case.name: str(row) for row in found}
    table = HEAD + "".join(f"{lines[case.name]}\n" for case in ALL if case.name in lines)
    PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clean", type=int, default=100)
    parser.add_argument("--faulty", type=int, default=20)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--build", choices=[case.name for case in ALL])
    arguments = parser.parse_args()
    seeds = [
        (case, range(1, 1 + (arguments.clean if case in (CLEAN, CLEAN_TWO) else arguments.faulty)))
        for case in ALL
        if arguments.build in (None, case.name)
    ]
    with tempfile.TemporaryDirectory() as temporary:
        root: Path = arguments.runs or Path(temporary)
        trials = [(BASELINES[limits], BASELINE_SEED) for limits in _limits(seeds)]
        trials += [(case, seed) for case, of_case in seeds for seed in of_case]
        places = [place(root, *trial) for trial in trials]
        with ProcessPoolExecutor(AT_ONCE, mp_context=get_context("spawn")) as pool:
            measured = pool.map(measure, *zip(*trials, strict=True), places)
            for number, _ in enumerate(measured, start=1):
                print(f"{number} of {len(trials)} runs", file=sys.stderr)  # noqa: T201
        found = []
        for row in rows(root, seeds):
            print(row if row.is_right else f"{row} WRONG", flush=True)  # noqa: T201
            found.append(row)
    write_table(found)
    return 0 if all(row.is_right for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
