"""The report of a large run: how long it takes to be built, how large it is, and how soon a browser
has drawn it.

The runs are made up, as `made_up_run` says: one of a million requests that was seen from outside
only, and one of 100,000 with the exact logs, of which there is more to draw. Their summaries are
written beforehand. The page is opened by Chromium from the disk. It is interactive when every
picture on its first screen is drawn and its table of requests has answered a word that was typed;
from then on it is scrolled from picture to picture, and the longest wait for one counts. `python -m
tests.bench.report FOLDER` only opens the page of a run.
"""

import shutil
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Final

from harness.store.run_folder import RunFolder
from tests.bench.large_run import measured_by_child, write_by_child
from tests.bench.ratio import Bound, Ratio, share
from tests.made_up.large import Plan

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

BUILT: Final = Plan(requests=1_000_000, users=1_000, is_exact=False)
OPENED: Final = Plan(requests=100_000, users=100, is_exact=True)
FEW: Final = Plan(requests=2_000, users=100, is_exact=True)
MOST_S: Final = 90.0
MOST_GIB: Final = 4.0
MOST_MIB: Final = 8.0
MOST_OPENED_S: Final = 3.0
MOST_SCROLLED_S: Final = 1.0
ROUNDS: Final = 3
CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser")
CAN_OPEN: Final = CHROMIUM is not None and find_spec("playwright") is not None
AT_MOST: Final = Bound("at most", 1.0)
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


def measure(*, quick: bool = False) -> Iterable[Ratio]:
    rounds = 1 if quick else ROUNDS
    for plan in (FEW,) if quick else (BUILT, OPENED):
        with TemporaryDirectory(prefix="walkaway-bench-") as folder:
            yield from _of_one(Path(folder), plan, rounds)


def _of_one(path: Path, plan: Plan, rounds: int) -> Iterable[Ratio]:
    write_by_child(path, plan)
    measured_by_child("analyse", path)
    measured = [measured_by_child("draw", path) for _ in range(rounds)]
    what, page = f"report of {plan.requests:,} requests", RunFolder(path).report
    built = [one["seconds"] for one in measured]
    yield share(f"{what}: built (theirs: its most)", "s", built, [MOST_S] * rounds, AT_MOST)
    held = [one["peak_gib"] for one in measured]
    yield share(f"{what}: peak memory (likewise)", "GiB", held, [MOST_GIB] * rounds, AT_MOST)
    size = page.stat().st_size / 2**20
    yield share(f"{what}: size (likewise)", "MiB", [size], [MOST_MIB], AT_MOST)
    if CAN_OPEN:
        opened_s, scrolled_s = zip(*(_opened_s(page) for _ in range(rounds)), strict=True)
        most = [MOST_OPENED_S] * rounds
        yield share(f"{what}: interactive (likewise)", "s", opened_s, most, AT_MOST)
        most = [MOST_SCROLLED_S] * rounds
        yield share(f"{what}: longest wait for a picture", "s", scrolled_s, most, AT_MOST)


def _opened_s(page: Path) -> tuple[float, float]:
    """From the opening until the page is interactive, and the longest wait for a picture to which
    it is scrolled then, top to bottom without a rest.

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
        opened_s = perf_counter() - started_s
        waits_s = [_scrolled_s(tab, plot) for plot in tab.locator(".plot").all()]
        browser.close()
    if said:
        raise RuntimeError(f"{page.name} complained: {'; '.join(said)}")
    return opened_s, max(waits_s)


def _scrolled_s(tab: "Page", plot: "Locator") -> float:
    """From scrolling to a picture until all that is then on the screen is drawn."""
    started_s = perf_counter()
    plot.evaluate("(plot) => plot.scrollIntoView()")
    tab.wait_for_function(IS_DRAWN)
    return perf_counter() - started_s


def main() -> None:
    """Open the page of a run `ROUNDS` times: `python -m tests.bench.report FOLDER`."""
    for _ in range(ROUNDS):
        opened_s, scrolled_s = _opened_s(RunFolder(Path(sys.argv[1])).report)
        print(f"interactive {opened_s:.2f} s, wait for a picture {scrolled_s:.2f} s")  # noqa: T201


if __name__ == "__main__":
    main()
