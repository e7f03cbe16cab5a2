"""The proof that the harness measures right: `python -m tests.truth [--settings A-B] [--clean N]`.

Twenty seeded settings of the scripted server are measured as a black box and held to the truth, and
twenty servers with nothing wrong must raise no alarm. The exit status is 1 if anything misses.
"""

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.truth.black_box import Line, alarms, hold_to_truth, look_at_users
from tests.truth.scripted_engine import Script
from tests.truth.settings import Setting, draw, draw_clean

SETTINGS = range(1, 21)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, nargs="*", default=list(SETTINGS))
    parser.add_argument("--clean", type=int, nargs="*", default=list(SETTINGS))
    arguments = parser.parse_args()
    misses = 0
    say(f"  {'quantity':<46}{'truth':>9}{'shown':>10}  allowed")
    with tempfile.TemporaryDirectory() as folder:
        for number in arguments.settings:
            misses += check_setting(draw(number), Path(folder, f"setting-{number}"))
        for number in arguments.clean:
            misses += check_clean(draw_clean(number), Path(folder, f"clean-{number}"))
    say(f"{misses} misses in {len(arguments.settings)} settings, {len(arguments.clean)} clean runs")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
