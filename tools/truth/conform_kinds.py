"""Kinds of servers of the field against `walkaway conform`, clean and defective, each with several
numbers of slots: `python -m tools.truth.conform_kinds [KIND...] [--slots 4,64,256]`.

Each server gets a run of `walkaway conform`: a clean one `--quick` or the cases that concern its
kind, a defective one the cases that it must turn red, and one that must stay green. The table goes
to docs/conform/kinds.md; lines of other kinds and slots that are there already are kept. The exit
status is 1 if a case is red that should not be, if a defect stays green or is red in another way,
if more than one in ten of the `must` cases of a clean server are undecided, or if a reason has a
word that no reader can use.

With `--runs N` only clean servers are run, N times, in turn; with `--busy K` while K busy processes
run.
"""

import argparse
import fcntl
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Final, NamedTuple

from harness.store.conform_result import Aftermath, CaseResult, ConformResult, Level, Verdict
from harness.store.manifest import utc_now
from tools.truth.conform_cases import conform
from tools.truth.kinds import KINDS, QUICK, STEP_S, Defect, Kind, step_for

PAGE: Final = Path(__file__).parents[2] / "docs" / "conform" / "kinds.md"
SLOTS: Final = (4, 64, 256)
TRIES: Final = ("--tries", "4")  # as of --quick
MOST_OPEN: Final = 0.1  # of the `must` cases of a clean server
FIRST_RED_S: Final = 10.0
QUICK_S: Final = (60.0, 90.0)  # of a clean server, of a defective one
TIMED_SLOTS: Final = (4, 8)
UNJUDGED: Final = (Verdict.INFO, Verdict.NOT_SUPPORTED)
UNDECIDED: Final = (Verdict.CANNOT_DECIDE, Verdict.HARNESS)
UNREADABLE: Final = re.compile(
    r"-\d[\d.]* (steps|s|ms|µs)\b|\bis -?\d+\.0\b|\w+Error\b|start it with|check itself crashed"
)
HEADS: Final = (
    *("kind", "slots", "server", "s", "first red, s", "pass", "fail", "undecided"),
    *("not judged", "must undecided", "red", "slow", "right", "measured"),
)


class Cell(NamedTuple):
    """A run to make. `defect` None: of the clean server."""

    kind: Kind
    slots: int
    defect: Defect | None

    @property
    def asked(self) -> tuple[str, ...]:
        if self.defect is None:
            return self.kind.cases + TRIES if self.kind.cases else QUICK
        asked = self.defect.red + self.defect.green
        return QUICK if QUICK[0] in asked else asked + TRIES

    @property
    def cases(self) -> tuple[str, ...]:
        """The cases that are asked for by name."""
        return tuple(one for one in self.asked if "/" in one)

    @property
    def key(self) -> tuple[str, str, str]:
        """The first cells of its line."""
        server = "clean" if self.defect is None else f"`{self.defect}`"
        return f"{self.kind.name}: {self.kind.about}", str(self.slots or "any"), server


class Seen(NamedTuple):
    took_s: float
    result: ConformResult

    @property
    def reds(self) -> list[CaseResult]:
        return [one for one in self.result.cases if one.verdict is Verdict.FAIL]

    @property
    def open_share(self) -> float:
        """The undecided share of the `must` cases that the server supports."""
        musts = [
            one
            for one in self.result.cases
            if one.level is Level.MUST and one.verdict is not Verdict.NOT_SUPPORTED
        ]
        return sum(one.verdict in UNDECIDED for one in musts) / max(1, len(musts))

    def told_open(self) -> list[str]:
        return [
            f"  {one.id} is {one.verdict}: {one.reason}"
            for one in self.result.cases
            if one.verdict in UNDECIDED
        ]

    @property
    def first_red_s(self) -> float | None:
        """The seconds from the start to the first red: what came after it is taken off."""
        verdicts = [one.verdict for one in self.result.cases]
        if Verdict.FAIL not in verdicts:
            return None
        later = self.result.cases[verdicts.index(Verdict.FAIL) + 1 :]
        return self.took_s - sum(one.took_s for one in later)


def run(cell: Cell) -> Seen:
    settings = {**cell.kind.clean, **(cell.defect.settings if cell.defect else {})}
    with tempfile.TemporaryDirectory() as name, ExitStack() as servers:
        folder = Path(name)
        flags = servers.enter_context(cell.kind.server(settings, cell.slots, folder))
        began_s = time.monotonic()
        result = conform(folder / "out", *cell.asked, *flags)
        return Seen(time.monotonic() - began_s, result)


def wrong(cell: Cell, seen: Seen) -> list[str]:
    """What should not be, each in a sentence."""
    problems = [
        f"{one.id} says: {one.reason}" for one in seen.result.cases if UNREADABLE.search(one.reason)
    ]
    notes = "; ".join(seen.result.notes)
    ran = {one.id for one in seen.result.cases}
    missing = [one for one in cell.cases if one not in ran]
    problems += [f"{name} did not run: {notes}" for name in missing]
    if not ran and not missing:
        problems.append(f"no case ran: {notes}")
    if cell.defect is None:
        problems += [f"{one.id} is red on a clean server: {one.reason}" for one in seen.reds]
        if seen.open_share > MOST_OPEN and not cell.kind.may_be_open:
            problems.append(f"{seen.open_share:.0%} of the must cases are undecided")
        return problems
    return problems + wrong_reds(cell.defect, seen)


def wrong_reds(defect: Defect, seen: Seen) -> list[str]:
    problems, found = [], {one.id: one for one in seen.result.cases}
    for name in defect.red:
        one = found.get(name)
        if one is None:
            continue
        if one.verdict is not Verdict.FAIL:
            problems.append(f"{name} is {one.verdict}, not red: {one.reason}")
        elif defect.ways and one.kind not in defect.ways:
            problems.append(
                f"{name} is red by {one.kind}, not {' or '.join(defect.ways)}: {one.reason}"
            )
    problems += [f"{one.id} is red: {one.reason}" for one in seen.reds if one.id in defect.green]
    if defect.settings.get("forgets"):  # it answers again when what was left has ended
        wedged = [one.id for one in seen.result.cases if one.aftermath is Aftermath.WEDGED]
        problems += [f"{name} calls its own ghosts a wedged server" for name in wedged]
    return problems


def slow(cell: Cell, seen: Seen) -> list[str]:
    """What took longer than it should, at few slots and steps of 20 ms."""
    settings = {**cell.kind.clean, **(cell.defect.settings if cell.defect else {})}
    if cell.slots not in TIMED_SLOTS or step_for(settings, cell.slots) != STEP_S:
        return []
    first_s, most_s = seen.first_red_s, QUICK_S[cell.defect is not None]
    late = ["first red"] if first_s is not None and first_s > FIRST_RED_S else []
    return late + (["quick"] if cell.asked == QUICK and seen.took_s > most_s else [])


def line(cell: Cell, seen: Seen, problems: Sequence[str], measured: str) -> str:
    verdicts = [one.verdict for one in seen.result.cases]
    first = seen.first_red_s
    cells = [
        *cell.key,
        f"{seen.took_s:.0f}",
        "" if first is None else f"{first:.0f}",
        str(verdicts.count(Verdict.PASS)),
        str(len(seen.reds)),
        str(sum(one in UNDECIDED for one in verdicts)),
        str(sum(one in UNJUDGED for one in verdicts)),
        f"{seen.open_share:.0%}",
        ", ".join(f"`{one.id}` {one.kind}" for one in seen.reds),
        ", ".join(slow(cell, seen)),
        "no" if problems else "yes",
        measured,
    ]
    return f"| {' | '.join(cells)} |"


def cells_of(kinds: Sequence[Kind], sizes: Sequence[int]) -> list[Cell]:
    return [
        Cell(kind, slots, defect)
        for kind in kinds
        for slots in (kind.sizes or sizes)
        for defect in (None, *kind.defects)
    ]


def measure(cells: Sequence[Cell]) -> int:
    problems, began_s = 0, time.monotonic()
    measured = f"{utc_now():%Y-%m-%d} {revision()}"
    for number, cell in enumerate(cells, start=1):
        try:
            seen = run(cell)
            found = wrong(cell, seen)
            row, left_open = line(cell, seen, found, measured), seen.told_open()
        except Exception as error:  # noqa: BLE001  one server that fails ends no table
            found = [f"{type(error).__name__}: {error}"]
            gaps = " |" * (len(HEADS) - 5)
            row = f"| {' | '.join(cell.key)} |{gaps} no | {measured} |"
            left_open = []
        problems += len(found)
        keep_line(cell.key, row)
        left_s = (time.monotonic() - began_s) / number * (len(cells) - number)
        said = [row, *(f"  WRONG: {one}" for one in found), *left_open]
        print("\n".join(said), flush=True)  # noqa: T201
        print(f"{number}/{len(cells)}, about {left_s / 60:.0f} min left", file=sys.stderr)  # noqa: T201
    return 1 if problems else 0


def revision() -> str:
    """The revision of the suite; with a + if its files are changed."""
    asked = ["git", "-C", str(PAGE.parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    described = subprocess.run(asked, capture_output=True, text=True, check=False)
    return described.stdout.strip() or "unknown"


def kept_lines() -> dict[tuple[str, str, str], str]:
    """The lines of the page, by their first cells."""
    if not PAGE.exists():
        return {}
    rows = [one for one in PAGE.read_text().splitlines() if one.startswith("| ")][1:]
    first_ones = (row.removeprefix("| ").split(" | ")[:3] for row in rows)
    return {
        (kind, slots, server): row
        for (kind, slots, server), row in zip(first_ones, rows, strict=True)
    }


def keep_line(key: tuple[str, str, str], row: str) -> None:
    """Writes it on the page, into which other runs of this command may write at the same time."""
    with PAGE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_page(kept_lines() | {key: row})


def write_page(lines: dict[tuple[str, str, str], str]) -> None:
    order = [cell.key for cell in cells_of(KINDS, sorted({*SLOTS, 1024}))]
    ordered = [lines[key] for key in order if key in lines]
    rule = f"|{'---|' * len(HEADS)}"
    PAGE.write_text("\n".join([head(), f"| {' | '.join(HEADS)} |", rule, *ordered, ""]))


def head() -> str:
    return f"""\
# Kinds of servers

`make conform-kinds` runs `walkaway conform` on scripted servers whose truth is known, of the kinds
that the field has, with several numbers of slots, clean and with one defect each, and writes this
table. Each line has the day and the revision that it was measured at (+: with changes). The latest
machine has {os.cpu_count()} processors ({platform.machine()}).

Steps last 20 ms, or as long as it takes to make 10,000 tokens a second. A clean server is right
without a red case, and with at most one in ten of its `must` cases undecided; a defect is right if
the cases that concern it are red, in the way of the defect, and no other case is. "Not
judged" are cases that the server does not support, or that inform only (`?`: they are among the
passes). "Slow" is a first red after more than {FIRST_RED_S:.0f} s, or a `--quick` of more than
{QUICK_S[0]:.0f} s (clean) or {QUICK_S[1]:.0f} s (defective), at 4 or 8 slots and steps of 20 ms.
"""


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """`processes` processes compute all the time."""
    with ExitStack() as stack:
        for _ in range(processes):
            one = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(one.kill)
        yield


def count_clean(cells: Sequence[Cell], runs: int) -> int:
    """How often a case of a clean server was red or undecided."""
    reds, shares = 0, []
    for number, cell in enumerate(islice(cycle(cells), runs), start=1):
        seen = run(cell)
        reds += len(seen.reds)
        shares.append(seen.open_share)
        said = line(cell, seen, wrong(cell, seen), "now")
        print(f"{number}/{runs} {said}", flush=True)  # noqa: T201
        for one in (*(f"  {red.id} is red: {red.reason}" for red in seen.reds), *seen.told_open()):
            print(one, flush=True)  # noqa: T201
    mean = sum(shares) / len(shares)
    print(f"{runs} clean runs: {reds} red, {mean:.1%} of the must cases undecided")  # noqa: T201
    return 1 if reds or mean > MOST_OPEN else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.truth.conform_kinds")
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(one.name for one in KINDS)}")
    parser.add_argument("--slots", default=",".join(map(str, SLOTS)), help="such as 4,64")
    parser.add_argument(
        "--runs", type=int, default=0, help="the number of runs, of clean servers alone"
    )
    parser.add_argument(
        "--busy", type=int, default=0, help="the number of busy processes beside it"
    )
    given = parser.parse_args()
    names = [one.name for one in KINDS]
    if unknown := [one for one in given.kinds if one not in names]:
        parser.error(f"there is no kind {unknown[0]}: {', '.join(names)}")
    kinds = [one for one in KINDS if not given.kinds or one.name in given.kinds]
    cells = cells_of(kinds, [int(one) for one in given.slots.split(",")])
    with busy(given.busy):
        if given.runs:
            clean = [one for one in cells if one.defect is None]
            return count_clean(clean, given.runs)
        return measure(cells)


if __name__ == "__main__":
    sys.exit(main())
