"""Does the search find what it does not know? `python -m tools.truth.search_faults [FAULT...]
[--minutes M]`.

`walkaway search` runs on the bundled engine with one fault each, and without any, and must find
something, or nothing. The table goes to docs/search.md; lines of faults that were not tried now are
kept. The exit status is 1 if something was found on the engine without a fault.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from harness.conform.config import OWN_ENGINE
from harness.run.process import free_port, python_module
from harness.run.server import engine_command
from harness.store.manifest import utc_now
from harness.store.search_result import SearchResult, read_search
from tools.truth.conform_cases import ROWS

PAGE: Final = Path(__file__).parents[2] / "docs" / "search.md"
BEGIN, END = "<!-- faults: begin -->\n", "<!-- faults: end -->\n"
NONE: Final = "none"
HEAD: Final = (
    "| fault | found | what | after | made small in | visits drawn | visits left | comes back | "
    "schedules played | measured |\n|---|---|---|---:|---:|---:|---:|---|---:|---|\n"
)


def searched(fault: str, minutes: float, seed: int, folder: Path) -> SearchResult:
    settings = OWN_ENGINE.model_copy(update={"faults": [] if fault == NONE else [fault]})
    port = free_port()
    command = engine_command(settings, "simulated", model=None, port=port)
    argv = [*python_module("harness", "search"), "--target", f"http://127.0.0.1:{port}"]
    argv += ["--engine", "reference", "--restart", shlex.join(command)]
    argv += ["--minutes", f"{minutes:g}", "--seed", str(seed), "--out", str(folder), "--quiet"]
    subprocess.run(argv, check=False, cwd=folder.parent)
    return read_search(folder)


def line(fault: str, result: SearchResult) -> str:
    sure = [one for one in result.findings if one.is_sure]
    cells = [f"`{fault}`", "yes" if sure else "no"]
    if sure:
        one = sure[0]
        cells += [one.broken, f"{one.after_s:.0f} s", f"{one.took_s:.0f} s"]
        cells += [str(one.drawn_visits), str(len(one.schedule["visits"])), str(one.rate)]
    else:
        cells += [""] * 6
    cells += [str(result.played), f"{utc_now():%Y-%m-%d}"]
    return "| " + " | ".join(cells) + " |\n"


def write(lines: dict[str, str]) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    rows = {one.split("`")[1]: f"{one}\n" for one in old.splitlines() if "`" in one}
    text = HEAD + "".join((rows | lines).values())
    PAGE.write_text(before + BEGIN + text + END + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    faults = asked.faults or [NONE, *dict.fromkeys(row.fault for row in ROWS if row.fault)]
    is_clean = True
    for number, fault in enumerate(faults, start=1):
        with tempfile.TemporaryDirectory() as name:
            result = searched(fault, asked.minutes, asked.seed, Path(name) / "out")
        written = line(fault, result)
        sys.stdout.write(f"{number}/{len(faults)} {written}")
        sys.stdout.flush()
        write({fault: written})
        is_clean &= fault != NONE or (result.end == "the time was up" and not result.findings)
    sys.exit(0 if is_clean else 1)


if __name__ == "__main__":
    main()
