"""The table of the faults: `python -m tests.truth.faults_table` measures it and writes it down.

Takes some minutes. The exit status is 1 if a figure lies outside its limits.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.truth.fault_cases import CASES, Case, Limits
from tests.truth.fault_runs import FaultRuns

TABLE = Path(__file__).parents[2] / "docs" / "faults.md"

HEAD = """\
# What each fault of the bundled engine moves

`walkaway engine --fault NAME[=VALUE]` is wrong on purpose. Both figures of a row were measured in
the same way, on a correct engine and on one with the fault: simulated runner, steps of 10 ms, 16
slots, 20 users of whom nine in ten leave an answer of 400 tokens, until 60 have left. Exceptions,
for both figures of the row:

- `ignore-disconnect`, `ignore-disconnect-while-waiting`, `lose-abort`: 100 tokens an answer, so
  that also those that were forgotten end while the run goes on;
- `abort-parent-only`: two answers of 100 tokens a request;
- `stall-survivors-on-abort`: one in two leaves;
- `leak-slot`: until 4 have left;
- `drop-prefix-on-cancel`: who left asks the same again;
- `ignore-disconnect-unary`: four requests that are not streamed, all left.

`tests/truth/fault_cases.py` says between which limits the figures must lie. Written by
`make faults-table`.

| fault | setting | figure | correct engine | with the fault |
|---|---|---|---:|---:|
"""


def names(case: Case) -> str:
    """The beginning of a case's row: all but the figures."""
    return f"| {case.fault} | {case.setting or '-'} | {case.figure} |"


def is_within(value: float, limits: Limits) -> bool:
    return limits[0] <= value <= limits[1]


def rows(runs: FaultRuns) -> Iterator[tuple[str, bool]]:
    """Each case's row, and whether both readings lie within their limits."""
    for case in CASES:
        clean, faulty = case.read(runs, ""), case.read(runs, case.argument)
        is_right = is_within(clean, case.clean) and is_within(faulty, case.faulty)
        yield f"{names(case)} {clean:.3g} | {faulty:.3g} |", is_right


def main() -> int:
    lines, all_right = [], True
    with tempfile.TemporaryDirectory() as folder:
        for line, is_right in rows(FaultRuns(Path(folder))):
            lines.append(line)
            all_right &= is_right
            print(line if is_right else f"{line} OUTSIDE ITS LIMITS", flush=True)  # noqa: T201
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(HEAD + "\n".join(lines) + "\n")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
