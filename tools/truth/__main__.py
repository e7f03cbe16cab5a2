"""The proof that the harness measures right: `python -m tools.truth [--settings N...]
[--clean N...] [--train N...] [--seed N]`.

Twenty seeded settings of the scripted server are measured as a black box and held to the truth,
twenty servers with nothing wrong must raise no alarm, and twenty more, drawn fresh from `--seed`,
are measured by a train of probes and by occupancy. The exit status is 1 if anything misses.
"""

import argparse
import math
import random
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from tools.truth.black_box import Line, alarms, hold_to_truth, look_at_users
from tools.truth.scripted_engine import Script
from tools.truth.settings import Setting, draw, draw_clean
from tools.truth.train import (
    cover_lines,
    draw_train,
    occupancy_lines,
    rate_lines,
    run_occupancy,
    run_train,
    train_lines,
    variant_lines,
)

SETTINGS = range(1, 21)
FEWEST_COVER = 0.85  # 17 of 20 intervals of 95 %


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def describe(script: Script) -> str:
    plain = asdict(Script())
    return ", ".join(f"{k} {v}" for k, v in asdict(script).items() if v != plain[k])


def row(line: Line) -> str:
    shown = "not shown" if line.shown is None else f"{line.shown:.4g}"
    limits = f"{line.limits[0]:.4g} to {line.limits[1]:.4g}"
    verdict = "" if line.is_right else "MISS"
    cells = f"  {line.what:<46}{line.known:>9.4g}{shown:>10}  {limits:<20}{verdict:<5}{line.note}"
    return cells.rstrip()


def check_setting(setting: Setting, folder: Path) -> int:
    say(f"setting {setting.number}: {describe(setting.script)}")
    lines = hold_to_truth(setting, folder)
    for line in lines:
        say(row(line))
    return sum(not line.is_right for line in lines)


def check_clean(setting: Setting, folder: Path) -> int:
    found = alarms(look_at_users(setting, folder).run.summary)
    said = "no alarm" if not found else "; ".join(found) + "  MISS"
    say(f"nothing wrong, {setting.number}: {said}")
    return len(found)


def check_train(number: int, seed: int, folder: Path) -> tuple[int, list[Line]]:
    """How many lines miss, and the intervals, of which one in twenty may."""
    setting = draw_train(number, seed)
    script = replace(setting.script, ghost_share=setting.ghost_share)
    say(f"train {number} of seed {seed}: {describe(script)}, {setting.max_seconds:g} s")
    seen = run_train(setting, folder)
    covers = list(cover_lines(seen))
    counted = list(occupancy_lines(run_occupancy(setting, folder)))
    lines = [*train_lines(seen), *counted[:-1]]
    covers.append(counted[-1])
    for line in (*lines, *covers):
        say(row(line))
    return sum(not line.is_right for line in lines), covers


def check_trains(numbers: list[int], seed: int, folder: Path) -> int:
    misses, covers = 0, Counter[str]()
    of: Counter[str] = Counter()
    for number in numbers:
        missed, intervals = check_train(number, seed, folder / f"train-{number}")
        misses += missed
        of.update(line.what for line in intervals)
        covers.update(line.what for line in intervals if line.is_right)
    for what, n in of.items():
        least = math.floor(FEWEST_COVER * n)
        is_right = covers[what] >= least
        say(f"  {what} covers in {covers[what]} of {n}{'' if is_right else '  MISS'}")
        misses += not is_right
    if numbers:
        for line in (*rate_lines(folder), *variant_lines(folder)):
            say(row(line))
            misses += not line.is_right
    return misses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, nargs="*", default=list(SETTINGS))
    parser.add_argument("--clean", type=int, nargs="*", default=list(SETTINGS))
    parser.add_argument("--train", type=int, nargs="*", default=list(SETTINGS))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    misses = 0
    say(f"  {'quantity':<46}{'truth':>9}{'shown':>10}  allowed")
    with tempfile.TemporaryDirectory() as folder:
        for number in arguments.settings:
            misses += check_setting(draw(number), Path(folder, f"setting-{number}"))
        for number in arguments.clean:
            misses += check_clean(draw_clean(number), Path(folder, f"clean-{number}"))
        misses += check_trains(arguments.train, arguments.seed, Path(folder, "trains"))
    say(
        f"{misses} misses in {len(arguments.settings)} settings, {len(arguments.clean)} clean "
        f"runs, {len(arguments.train)} trains"
    )
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
