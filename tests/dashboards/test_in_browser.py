"""The report as a real browser shows it: scripts allowed, everything drawn, nothing sticks out."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dashboards.__main__ import main

MakeRun = Callable[..., Path]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--enable-logging=stderr",
    "--v=0",
    "--allow-file-access-from-files",
    "--hide-scrollbars",
    "--virtual-time-budget=10000",
    "--window-size=1600,900",
    "--dump-dom",
]

# Chromium has a smallest window width, so the page is looked at in a frame of a phone's width.
MEASURE = """<!doctype html><iframe src="report.html" style="width:{width}px;height:800px"></iframe>
<script>
addEventListener("load", () => setTimeout(() => {{
  const page = document.querySelector("iframe").contentDocument;
  const sticks = [...page.querySelectorAll("main *")].filter((one) =>
    !one.closest(".scroll") && !one.parentElement.closest("svg") &&
    one.getBoundingClientRect().right > {width});
  document.title = JSON.stringify({{
    width: page.documentElement.scrollWidth,
    figures: Object.keys(JSON.parse(page.getElementById("figures").textContent)).length,
    drawn: page.querySelectorAll(".plot .main-svg:first-of-type").length,
    sticks: sticks.map((one) => one.outerHTML.slice(0, 80)),
  }});
}}, 3000));
</script>
"""


def look(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The title of the page once it is done, and what it wrote to the console."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", page.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=90,
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return (title[1] if title else ""), console


@pytest.mark.parametrize(("width", "ghosts"), [(390, 6), (1440, 0)])
def test_everything_is_drawn_and_fits(
    make_run: MakeRun, tmp_path: Path, width: int, ghosts: int
) -> None:
    run = make_run(ghosts=ghosts, not_measurable={"a_very_long_name_of_a_figure_" * 3: "no" * 90})
    assert main(["report", str(run), "-o", str(run / "report.html")]) == 0
    (run / "measure.html").write_text(MEASURE.format(width=width))
    seen, console = look(run / "measure.html", tmp_path / "profile")
    assert console == []
    assert seen == f'{{"width":{width},"figures":10,"drawn":10,"sticks":[]}}'


def test_a_script_that_is_not_ours_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(abandons=0)
    assert main(["report", str(run), "-o", str(run / "report.html")]) == 0
    html = (run / "report.html").read_text(encoding="utf-8")
    injected = html.replace("</main>", "<script>document.title = 'mine'</script></main>")
    (run / "injected.html").write_text(injected, encoding="utf-8")
    title, console = look(run / "injected.html", tmp_path / "profile")
    assert title != "mine"
    assert any("Content Security Policy" in line for line in console)
