"""Large runs analysed, drawn, opened in a browser and judged, against what that may take.

The runs are made up (`tests/made_up/large.py`). One of a million requests of 100 tokens each, and a
thousand users, is seen from outside only: requests, the load processes' ticks and a scraped page.
The other has the exact logs, too, a tenth of the requests and a hundred users. Each is written by a
child process, and each measurement is a fresh one:

    python -m tools.bench.large_run analyse FOLDER    reads the rows of a run, writes its summary
    python -m tools.bench.large_run draw FOLDER       reads both, writes the report

Both print how long they took and how much memory they had at most, as JSON. Chromium opens the page
from the disk. It is interactive when every picture on its first screen is drawn and its table of
requests has answered a word that was typed. Then the page is scrolled from picture to picture, and
the longest wait for one counts. `gate` times `walkaway gate` from its start to its exit code.
"""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Final

from dashboards.report import write_report
from harness.run.pipeline import write_summary
from harness.store.run_folder import RunFolder
from harness.workload.workload import as_plain_data, load_workload
from tests.made_up.large import Plan, write
from tools.bench.ratio import BenchRatio, within

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

FROM_OUTSIDE: Final = Plan(requests=1_000_000, users=1_000, is_exact=False)
WITH_LOGS: Final = Plan(requests=100_000, users=100, is_exact=True)
FEW: Final = Plan(requests=2_000, users=100, is_exact=True)
ROUNDS: Final = 3
CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser")
CAN_OPEN: Final = CHROMIUM is not None and find_spec("playwright") is not None
IS_DRAWN: Final = """() => {
  const isSeen = (plot) => {
    const { top, bottom } = plot.getBoundingClientRect();
    return top < innerHeight && bottom > 0;
  };
  return [...document.querySelectorAll(".plot")].filter(isSeen)
    .every((plot) => plot.querySelector(".main-svg"));
}"""
IS_FILTERED: Final = """(before) => {
  const rows = [...document.querySelectorAll(".requests tbody tr")];
  return document.querySelector(".requests [role=status]").textContent !== before
    && rows.length > 0 && rows.every((row) => row.textContent.includes("completed"));
}"""


def analysis(*, quick: bool = False) -> Iterable[BenchRatio]:
    plans = {"seen from outside": FROM_OUTSIDE, "with its logs": WITH_LOGS}
    for name, plan in ({"with its logs": FEW} if quick else plans).items():
        with TemporaryDirectory(prefix="walkaway-bench-") as folder:
            write_by_child(Path(folder), plan)
            measured = measured_by_child("analyse", Path(folder), 1 if quick else ROUNDS)
        what = f"{plan.requests:,} requests {name}"
        yield within(f"{what}: time (theirs: what it may take)", "s", measured["seconds"], 60.0)
        what += ": peak memory (theirs: what it may take)"
        yield within(what, "GiB", measured["peak_gib"], 4.0)


def report(*, quick: bool = False) -> Iterable[BenchRatio]:
    rounds = 1 if quick else ROUNDS
    for plan in (FEW,) if quick else (FROM_OUTSIDE, WITH_LOGS):
        with TemporaryDirectory(prefix="walkaway-bench-") as folder:
            path = Path(folder)
            write_by_child(path, plan)
            measured_by_child("analyse", path, 1)
            measured = measured_by_child("draw", path, rounds)
            page = RunFolder(path).report
            what, size = f"report of {plan.requests:,} requests", page.stat().st_size / 2**20
            opened = [opened_s(page) for _ in range(rounds)] if CAN_OPEN else []
        yield within(f"{what}: built (theirs: its most)", "s", measured["seconds"], 90.0)
        yield within(f"{what}: peak memory (likewise)", "GiB", measured["peak_gib"], 4.0)
        yield within(f"{what}: size (likewise)", "MiB", [size], 8.0)
        if opened:
            drawn_s, scrolled_s = zip(*opened, strict=True)
            yield within(f"{what}: interactive (likewise)", "s", drawn_s, 3.0)
            yield within(f"{what}: longest wait for a picture", "s", scrolled_s, 1.0)


def gate(*, quick: bool = False) -> Iterable[BenchRatio]:
    requests, rounds = (2_000, 1) if quick else (100_000, 5)
    with TemporaryDirectory(prefix="walkaway-bench-") as folder:
        run, limits = RunFolder(Path(folder)), Path(folder) / "limits.txt"
        write(run, Plan(requests=requests, users=1_000, is_exact=False))
        manifest = run.read_manifest()
        manifest["workload"] = as_plain_data(load_workload("gate"))
        (run.path / "manifest.json").write_text(json.dumps(manifest))
        write_summary(run)
        limits.write_text("ttft_s.p99 <= 1\nitl_s.mean <= 0.1\n")
        command = [sys.executable, "-m", "harness", "gate", str(run.path), "--quiet"]
        took = []
        for _ in range(rounds):  # with Python's start and all imports
            started_s = perf_counter()
            subprocess.run([*command, "--limits", str(limits)], check=True)
            took.append(perf_counter() - started_s)
    what = f"{requests:,} requests of 100 tokens judged (theirs: what it may take)"
    yield within(what, "s", took, 10.0)


def write_by_child(path: Path, plan: Plan) -> None:
    sizes = [str(path), str(plan.requests), str(plan.users)]
    kind = ["exact"] if plan.is_exact else []
    subprocess.run([sys.executable, "-m", "tests.made_up.large", *sizes, *kind], check=True)


def measured_by_child(what: str, path: Path, rounds: int) -> dict[str, list[float]]:
    """`seconds` and `peak_gib`, one of each a round."""
    command = [sys.executable, "-m", "tools.bench.large_run", what, str(path)]
    said = [
        json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        for _ in range(rounds)
    ]
    return {key: [one[key] for one in said] for key in said[0]}


def opened_s(page: Path) -> tuple[float, float]:
    """The time from the opening until the page is interactive, and the longest wait for a picture
    to which it is scrolled then, top to bottom without a rest.

    Raises `RuntimeError` where the page complained.
    """
    from playwright.sync_api import sync_playwright

    said: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1440, "height": 900})
        tab.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: said.append(f"error: {error}"))
        started_s = perf_counter()
        tab.goto(page.as_uri())
        tab.wait_for_function(IS_DRAWN)
        all_listed = tab.get_by_role("status").inner_text()
        tab.get_by_label("Find").fill("completed")
        tab.wait_for_function(IS_FILTERED, arg=all_listed)
        interactive_s = perf_counter() - started_s
        waits_s = [_scrolled_s(tab, plot) for plot in tab.locator(".plot").all()]
        browser.close()
    if said:
        raise RuntimeError(f"{page.name} complained: {'; '.join(said)}")
    return interactive_s, max(waits_s)


def _scrolled_s(tab: "Page", plot: "Locator") -> float:
    """The time from scrolling to a picture until all that is then on the screen is drawn."""
    started_s = perf_counter()
    plot.evaluate("(plot) => plot.scrollIntoView()")
    tab.wait_for_function(IS_DRAWN)
    return perf_counter() - started_s


def main() -> None:
    what, run = sys.argv[1], RunFolder(Path(sys.argv[2]))
    started_s = perf_counter()
    if what == "analyse":
        write_summary(run)
    else:
        write_report([run.path], run.report)
    measured = {
        "seconds": perf_counter() - started_s,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    print(json.dumps(measured))  # noqa: T201


if __name__ == "__main__":
    main()
