"""The web page in a real browser: start, watch, stop, start again, read the report."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from harness.records import Metric
from harness.web.tab import figure_text
from tests.e2e.running import ROOT, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
]
WAIT_MS = 60_000


class WebRun:
    """`walkaway run by_hand --web` with two workers on a quick engine."""

    def __init__(self, out: Path) -> None:
        self.out = out
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = out.with_suffix(".output")
        command = [sys.executable, "-m", "harness", "run", "harness/web/by_hand.toml", "--web"]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *command,
                    *("--web-port", str(port), "--out", str(out), "--processes", "2"),
                    *("--set", "engine.runner=simulated", "--set", "engine.sim_fixed_ms=5"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )

    def has_workers(self) -> bool:
        assert self._process.poll() is None, self.output
        try:
            answer = httpx.get(f"{self.url}/worker-count")
        except httpx.TransportError:
            return False
        return bool(answer.json()["worker_count"] == 2)

    @property
    def output(self) -> str:
        return self._log.read_text()

    def end(self) -> int:
        """Ask it to end, in good order; its exit code."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGTERM)
        return self._process.wait(60)


@pytest.fixture
def web_run(tmp_path: Path) -> Iterator[WebRun]:
    run = WebRun(tmp_path / "runs")
    try:
        wait_until(run.has_workers, "the page is there, and both workers")
        yield run
    finally:
        run.end()


@pytest.fixture
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context().new_page()
        page.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        yield page
        browser.close()


def rows_of(page: Page) -> dict[str, str]:
    """The figures of our tab, by name."""
    cells = page.locator("table tbody tr").all_inner_texts()
    return {row.split("\t")[0]: row.split("\t")[1] for row in cells}


def start(page: Page) -> None:
    """Press Start, and look at our tab."""
    page.get_by_role("button", name="Start", exact=True).click()


def wait_for_row(page: Page, figure: str, condition: str) -> None:
    """Until the value of this row of our tab is as the condition says, a function in JavaScript."""
    page.wait_for_function(
        "([figure, condition]) => [...document.querySelectorAll('tbody tr')].some((row) =>"
        " row.cells[0].innerText === figure && eval(condition)(row.cells[1].innerText))",
        arg=[figure, condition],
    )


def fill_in(page: Page) -> None:
    """First a mistake, then what can be."""
    page.get_by_text("Custom parameters").click()
    page.fill("input[name=walkawayStayShare]", "7")
    start(page)
    expect(page.get_by_role("alert")).to_contain_text("must be at most 1.0, not 7")
    expect(page.get_by_role("alert")).to_contain_text("(allowed: 0 to 1)")
    page.fill("input[name=walkawayStayShare]", "0.25")
    page.select_option("select[name=walkawayLeave]", "tokens")
    page.fill("input[name=walkawayTokens]", "1,4")
    page.select_option("select[name=walkawayWay]", "rst")


def check_figures(shown: Mapping[str, str], folder: Path) -> None:
    """The tab at the end is the run's summary."""
    summary = read(folder / "summary.json")
    outcomes = {name.replace("_", " "): str(n) for name, n in summary["outcomes"].items()}
    assert {name: shown[name] for name in outcomes} == outcomes
    assert (summary["outcomes"]["failed"], summary["engine"]) == (0, "reference")
    for name, label in (
        ("cancel_latency_s", "cancel latency"),
        ("wasted_tokens", "wasted tokens, each"),
        ("client_lag_s", "client lag"),
    ):
        assert shown[label] == figure_text(msgspec.convert(summary["metrics"][name], Metric))
    processes = read(folder / "manifest.json")["load_processes"]
    assert {process["worker"] for process in processes} == {0, 1}
    assert all(process["ended_ns"] for process in processes)


def test_a_test_is_started_watched_stopped_and_read(web_run: WebRun, page: Page) -> None:
    said: list[str] = []
    page.context.on("console", lambda message: said.append(message.text))
    page.context.on("weberror", lambda error: said.append(str(error.error)))
    page.goto(web_run.url)
    fill_in(page)
    start(page)
    page.get_by_role("tab", name="walkaway").click()
    wait_for_row(page, "abandoned", "(n) => Number(n) > 20")

    live = page.context.new_page()
    live.goto(f"{web_run.url}/walkaway/live")
    expect(live.locator("#latency circle").first).to_be_attached()
    expect(live.locator("#slots path")).to_have_count(2)

    page.get_by_role("button", name="Stop").click()
    live.get_by_role("link", name="open the report").click(timeout=WAIT_MS)
    assert "What do these users cost" in live.title()
    wait_for_row(page, "ghosts", "(n) => n.endsWith('%')")
    check_figures(rows_of(page), web_run.out / "1")
    page.get_by_role("tab", name="Failures").click()
    expect(page.locator("tbody tr")).to_have_count(0)
    assert said == []

    page.get_by_role("button", name="New").click()  # and once more
    start(page)
    page.get_by_role("tab", name="walkaway").click()
    wait_for_row(page, "run", "(n) => n === '2'")
    assert web_run.end() == 0  # in the middle of it
    assert read(web_run.out / "2/summary.json")["run_id"] == "2"
    assert (web_run.out / "2/report.html").exists()


def test_with_a_login_nothing_is_shown_without_it(tmp_path: Path) -> None:
    locustfile = tmp_path / "with_login.py"  # a login needs a secret and users of the host's own
    locustfile.write_text(
        "from locust import events\n"
        "from workloads.locustfile import *\n"
        "@events.init.add_listener\n"
        "def keep_secret(environment, **_):\n"
        "    environment.web_ui.app.secret_key = 'secret'\n"
        "    environment.web_ui.login_manager.user_loader(lambda name: None)\n"
    )
    port = free_port()
    locust = subprocess.Popen(
        [
            *(sys.executable, "-m", "locust", "-f", str(locustfile), "--web-login"),
            *("--web-host", "127.0.0.1", "--web-port", str(port)),
        ],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(url), "the page is there")
        for page in ("live", "live.json", "live.js", "report"):
            answer = httpx.get(f"{url}/walkaway/{page}")
            assert (answer.status_code, answer.headers["location"][:6]) == (302, "/login")
        assert httpx.post(f"{url}/swarm", data={"user_count": "1"}).status_code == 302
    finally:
        locust.terminate()
        locust.wait(60)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/login").status_code > 0
    except httpx.TransportError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found
