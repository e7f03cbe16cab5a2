"""The pictures of the documents: `python -m tools.pictures [NAME...]`, or `make pictures`.

Each is made by the command that its document names, in a folder of its own, and taken in a headless
Chromium. The live page shows the client's lag: take it on a machine that has nothing else to do.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from playwright.sync_api import Browser, Page

from harness.run.process import free_port
from tests.dashboards.browsing import WAIT_MS, chromium, opened
from tests.e2e.running import page_served
from tests.made_up.gated import save_night, save_nights
from tests.reference_engine.running_engine import running

DOCS: Final = Path(__file__).parents[2] / "docs"
DEMO: Final = ("demo", "--set", "engine.runner=simulated", "--set", "engine.sim_fixed_ms=10")
FORGETFUL: Final = ("--set", 'engine.faults=["lose-abort=0.03"]')
GATES: Final = {
    "before": (),
    "slow-abort": ("--set", 'engine.faults=["delay-abort=0.03"]', "--set", "run.seed=23"),
    "other-machine": (
        *("--set", 'engine.faults=["lose-abort=0.05"]'),
        *("--set", "engine.sim_fixed_ms=40"),
    ),
}
# Abandons by the time when the live page is taken: what the browser cost the load when it opened is
# no longer among the latest ticks.
LEFT: Final = 450
Scheme = Literal["light", "dark"]
SCREENS: Final[Sequence[tuple[int, Scheme]]] = (
    (1440, "light"),
    (1440, "dark"),
    (390, "light"),
    (390, "dark"),
)


def walkaway(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "harness", *arguments], cwd=folder, check=True)


def report(browser: Browser, folder: Path) -> None:
    """The first screen, wide and on a phone, in the light and in the dark; that of a server which
    forgets some requests; and one request."""
    walkaway(folder, "run", *DEMO, "--out", "demo")
    for width, scheme in SCREENS:
        height = 1840 if width == SCREENS[0][0] else 2300
        file = folder / "demo/report.html"
        with opened(browser, file, width=width, scheme=scheme) as (page, _):
            take(page, f"report-{width}-{scheme}", height=height)
    walkaway(folder, "run", *DEMO, *FORGETFUL, "--out", "forgetful")
    with opened(browser, folder / "forgetful/report.html", width=1100) as (page, _):
        take(page, "forgetful", height=800)
    with opened(browser, folder / "demo/report.html") as (page, _):
        page.get_by_label("Find").fill("tokens:64 abandoned")
        page.locator(".requests tbody a").first.click()
        page.evaluate("scrollTo(0, 0)")  # the box is measured from the top of what is seen
        box = page.locator(".requests").bounding_box()
        assert box is not None
        page.screenshot(
            path=DOCS / "report-request.png",
            full_page=True,
            clip={"x": box["x"] - 40, "y": box["y"], "width": box["width"] + 80, "height": 1210},
        )


def comparison(browser: Browser, folder: Path) -> None:
    """Three builds of the gate's workload: as it should be, slow to abort, on a slow machine."""
    for name, settings in GATES.items():
        walkaway(folder, "run", "gate", "--out", name, *settings)
    walkaway(folder, "compare", *GATES, "-o", "comparison.html")
    with opened(browser, folder / "comparison.html") as (page, _):
        take(page, "comparison", height=1500)


def frontier(browser: Browser, folder: Path) -> None:
    walkaway(folder, "run", "chunk_frontier", "--out", "frontier")
    with opened(browser, folder / "frontier/report.html", width=1200) as (page, _):
        section = page.locator("#run0-section-frontier")
        section.screenshot(path=DOCS / "chunk-frontier.png")


def trend(browser: Browser, folder: Path) -> None:
    """Forty nights: another version on 25 January, another machine on the 31st, a bad one last."""
    save_nights(folder / "nightly", [0.020 + 2e-4 * (day * 7 % 5) for day in range(24)])
    newer: dict[str, Any] = {"versions": {"walkaway": "0.2"}}
    other: dict[str, Any] = {"hardware": {"cpu": "another processor", "cores": 2, "gpus": []}}
    for day in range(24, 40):
        usual = 0.020 if day < 30 else 0.028
        p50 = 0.044 if day == 39 else usual + 2e-4 * (day * 7 % 5)
        save_night(folder / "nightly", day, p50, **newer, **(other if day >= 30 else {}))
    walkaway(folder, "trend", "nightly", "-o", "trend.html")
    with opened(browser, folder / "trend.html") as (page, _):
        take(page, "trend", height=1500)


def conform(browser: Browser, folder: Path) -> None:
    """A server that is slow to abort, as its page draws it."""
    engine = ("--runner", "simulated", "--sim-fixed-ms", "10", "--fault", "delay-abort=0.3")
    with running(*engine) as server:
        found = ("conform", "unary/", "stream/fin-decode", "queue/", "--target", server.url)
        command = [sys.executable, "-m", "harness", *found, "--out", "checked"]
        subprocess.run(command, cwd=folder, check=False)  # 3: it fails
    with opened(browser, folder / "checked/index.html") as (page, _):
        take(page, "conform", height=1500)


def matrix(browser: Browser, folder: Path) -> None:
    """The kept results of real engines and gateways."""
    # Wide enough for the table (a narrow page has cards), and without what a case demands.
    for name, picture, width in (("engines", "matrix", 1240), ("gateways", "gateways", 1440)):
        with opened(browser, DOCS.parent / f"results/{name}/matrix.html") as (page, _):
            page.set_viewport_size({"width": width, "height": 2400})
            page.locator(".matrix").screenshot(path=DOCS / f"{picture}.png")


def web(browser: Browser, folder: Path) -> None:
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "harness", "run", *DEMO, "--web", "--web-port", port]
    with page_served(command, url, folder=folder):
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.set_default_timeout(WAIT_MS)
        page.goto(url)
        page.get_by_text("Custom parameters").click()
        start = page.get_by_role("button", name="Start", exact=True)
        page.screenshot(path=DOCS / "web-form.png", full_page=True, animations="disabled")
        start.click()
        page.get_by_role("tab", name="walkaway").click()
        page.wait_for_function(
            "(least) => [...document.querySelectorAll('tbody tr')].some((row) =>"
            " row.cells[0].innerText === 'abandoned' && Number(row.cells[1].innerText) >= least)",
            arg=LEFT,
        )
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=DOCS / "web-tab.png")
        page.close()  # one page alone: drawing takes processor time from the load that it shows
        for width, scheme in SCREENS:
            take_live(browser, url, width, scheme)


def take_live(browser: Browser, url: str, width: int, scheme: Scheme) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(f"{url}/walkaway/live")
    page.locator("#latency circle").first.wait_for(state="attached")
    page.screenshot(path=DOCS / f"live-{width}-{scheme}.png", full_page=True)
    context.close()


def take(page: Page, name: str, *, height: int) -> None:
    width = (page.viewport_size or {"width": 1440})["width"]
    page.set_viewport_size({"width": width, "height": height})
    page.screenshot(path=DOCS / f"{name}.png")


PICTURES: Final = {
    "report": report,
    "comparison": comparison,
    "frontier": frontier,
    "trend": trend,
    "conform": conform,
    "matrix": matrix,
    "web": web,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    names = parser.parse_args().names or list(PICTURES)
    with chromium() as browser:
        for name in names:
            with TemporaryDirectory(prefix="walkaway-") as folder:
                PICTURES[name](browser, Path(folder))


if __name__ == "__main__":
    main()
