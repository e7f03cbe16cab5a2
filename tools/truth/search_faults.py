"""Does the search find what it does not know? `python -m tools.truth.search_faults [NAME...]
[--minutes M] [--seed S]`.

`walkaway search` runs on a server with one defect, which it does not know, and must find something;
and on the same server without any, and must find nothing. A NAME is a fault of the bundled engine,
a defect of tools/truth/pair_engine.py, `faults`, `pairs`, `none` (the engine without a fault) or
`no-pair` (the scripted engine without a defect). Each row goes to docs/search.md as soon as it is
measured; the rows that were not measured now are kept. The exit status is 1 if something was found
on a server without a defect, or a search broke off on one.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from harness.conform.config import OWN_ENGINE
from harness.errors import ConfigError
from harness.run.process import free_port, python_module
from harness.run.server import engine_command
from harness.store.manifest import utc_now
from harness.store.search_result import SEARCH_FILE, SearchResult, read_search
from tools.truth.conform_cases import ROWS
from tools.truth.pair_engine import ADAPTER, DEFECTS
from tools.truth.pair_server import TARGET

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "search.md"
NONE, NO_PAIR = "none", "no-pair"
FAULTS: Final = (NONE, *dict.fromkeys(row.fault for row in ROWS if row.fault))
PAIRS: Final = (NO_PAIR, *DEFECTS)
HEAD: Final = (
    "| {what} | found | what | after | made small in | visits drawn | visits left | comes back | "
    "schedules played | minutes | measured |\n|---|---|---|---:|---:|---:|---:|---|---:|---:|---|\n"
)


class Table(NamedTuple):
    """A table between two marks in docs/search.md."""

    mark: str
    what: str

    def write(self, lines: dict[str, str]) -> None:
        begin, end = f"<!-- {self.mark}: begin -->\n", f"<!-- {self.mark}: end -->\n"
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
        old, _, after = rest.partition(end)
        rows = {one.split("`")[1]: f"{one}\n" for one in old.splitlines() if "`" in one}
        text = HEAD.format(what=self.what) + "".join((rows | lines).values())
        PAGE.write_text(before + begin + text + end + after, encoding="utf-8")


def server_of(name: str, port: int, folder: Path) -> tuple[list[str], list[str]]:
    """The command that starts it, and flags of the search."""
    if name in PAIRS:
        defect = "" if name == NO_PAIR else name
        (folder / "pairs.toml").write_text(TARGET)
        command = python_module("tools.truth.pair_server", "--port", str(port), "--defect", defect)
        return command, ["--engine", str(folder / "pairs.toml"), "--adapter", ADAPTER]
    settings = OWN_ENGINE.model_copy(update={"faults": [] if name == NONE else [name]})
    return engine_command(settings, "simulated", model=None, port=port), ["--engine", "reference"]


def searched(name: str, minutes: float, seed: int, folder: Path) -> SearchResult | None:
    """None: it left no result."""
    port, out = free_port(), folder / "out"
    command, flags = server_of(name, port, folder)
    argv = [*python_module("harness", "search"), "--target", f"http://127.0.0.1:{port}", *flags]
    argv += ["--restart", shlex.join(command), "--minutes", f"{minutes:g}", "--seed", str(seed)]
    subprocess.run([*argv, "--out", str(out), "--quiet"], check=False, cwd=ROOT)
    try:
        return read_search(out) if (out / SEARCH_FILE).exists() else None
    except ConfigError:
        return None


def line(name: str, result: SearchResult | None, minutes: float) -> str:
    cells = [f"`{name}`", "broke off" if result is None else "no", *[""] * 6]
    sure = [] if result is None else [one for one in result.findings if one.is_sure]
    if sure:
        one = sure[0]
        left = str(len(one.schedule.get("visits", ()))) if one.schedule else "not made small"
        cells[1:] = ["yes", one.broken, f"{one.after_s:.0f} s", f"{one.took_s:.0f} s"]
        cells += [str(one.drawn_visits), left, str(one.rate)]
    cells += ["" if result is None else str(result.played), f"{minutes:g}"]
    return "| " + " | ".join([*cells, f"{utc_now():%Y-%m-%d}"]) + " |\n"


def is_as_wanted(name: str, result: SearchResult | None) -> bool:
    """Nothing may be found on a server without a defect."""
    if name not in (NONE, NO_PAIR):
        return True
    return result is not None and result.end == "the time was up" and not result.exit_code


def wanted_names(asked: Sequence[str]) -> list[str]:
    """Raises ValueError."""
    groups = {"faults": FAULTS, "pairs": PAIRS}
    names = list[str]()
    for one in asked or groups:
        names += groups.get(one, (one,))
    if unknown := [one for one in names if one not in (*FAULTS, *PAIRS)]:
        raise ValueError(f"{unknown[0]}: there are {', '.join((*groups, *FAULTS, *PAIRS))}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    try:
        names = wanted_names(asked.names)
    except ValueError as error:
        parser.error(str(error))
    is_good = True
    for number, name in enumerate(names, start=1):
        with tempfile.TemporaryDirectory() as folder:
            result = searched(name, asked.minutes, asked.seed, Path(folder))
        written = line(name, result, asked.minutes)
        sys.stdout.write(f"{number}/{len(names)} {written}")
        for one in () if result is None else result.findings:
            sys.stdout.write(f"    {one.broken}, {one.rate}, {one.control}: {one.sentence}\n")
        sys.stdout.flush()
        table = Table("pairs", "defect") if name in PAIRS else Table("faults", "fault")
        table.write({name: written})
        is_good &= is_as_wanted(name, result)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
