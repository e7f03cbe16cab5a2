"""The web page in a real browser: start, watch, stop, start again, read the report."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from harness.formatting import DASH
from harness.metrics import METRICS
from harness.records import Metric
from harness.web.tab import FINAL, figure_text
from tests.dashboards.browsing import CHROMIUM, chromium, violations
from tests.e2e.running import ROOT, wait_until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
]
WAIT_MS = 60_000
HOSTILE = "<img src=x onerror='window.taken=1'><script>window.taken=1</script></td>\"${1}"


class WebRun:
    """`walkaway run by_hand --web` with two workers on a quick engine."""

    def __init__(self, out: Path) -> None:
        self.out = out
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = out.with_suffix(".output")
        command = [sys.executable, "-m", "harness", "run", "harness/workload/by_hand.toml", "--web"]
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

    def listens_at(self) -> set[str]:
        """The addresses at which it and its processes answer."""
        ours = psutil.Process(self._process.pid)
        return {
            at.laddr.ip
            for one in (ours, *ours.children(recursive=True))
            for at in one.net_connections("tcp")
            if at.status == psutil.CONN_LISTEN
        }

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
        wait_until(run.has_workers, "the page is there, and both workers", 90)
        yield run
    finally:
        run.end()


@pytest.fixture
def page() -> Iterator[Page]:
    with chromium() as browser:
        page = browser.new_context().new_page()
        page.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        yield page


def rows_of(page: Page) -> dict[str, str]:
    """The figures of our tab, by name."""
    cells = page.locator("table tbody tr").all_inner_texts()
    return {row.split("\t")[0]: row.split("\t")[1] for row in cells}


def start(page: Page) -> None:
    """Press Start."""
    page.get_by_role("button", name="Start", exact=True).click()


def look_at_our_tab(page: Page) -> None:
    page.get_by_role("tab", name="walkaway").click()


def wait_for_row(page: Page, figure: str, condition: str) -> None:
    """Until the value of this row of our tab is as the condition says, a function in JavaScript."""
    page.wait_for_function(
        "([figure, condition]) => [...document.querySelectorAll('tbody tr')].some((row) =>"
        " row.cells[0].innerText === figure && eval(condition)(row.cells[1].innerText))",
        arg=[figure, condition],
    )


def fill_in(page: Page) -> None:
    """First a mistake, which is refused in the form (test_form has all of them); then a setting."""
    page.get_by_text("Custom parameters").click()
    engine = page.input_value("input[name=walkawayEngine]")
    page.fill("input[name=walkawayEngine]", HOSTILE)
    start(page)
    expect(page.get_by_role("alert")).to_contain_text(f"unknown engine `{HOSTILE}`")
    page.fill("input[name=walkawayEngine]", engine)
    page.select_option("select[name=walkawayLeave]", "tokens")
    page.fill("input[name=walkawayTokens]", "1,4")
    page.select_option("select[name=walkawayWay]", "rst")


def edit(page: Page, field: str, text: str) -> None:
    """Change the running test in Locust's dialog, which closes whatever the answer is."""
    page.get_by_role("button", name="Edit").click()
    page.get_by_text("Custom parameters").click()
    page.fill(f"input[name={field}]", text)
    page.get_by_role("button", name="Update").click()
    expect(page.get_by_text("Edit running load test")).to_have_count(0)


def change_while_it_runs(page: Page, live: Page) -> None:
    """Nothing changes, and the tab and the live page say so."""
    why = "not changed: nothing can change while a test runs"
    edit(page, "userCount", "6")
    expect(page.locator("tbody tr").first).to_contain_text(why)
    expect(live.locator("#state.bad")).to_contain_text(why)


def start_by_a_schedule(page: Page) -> None:
    """A second test, which ends by itself after a second."""
    page.get_by_role("button", name="New").click()
    page.get_by_text("Advanced options").click()
    page.fill("input[name=runTime]", "1")
    page.get_by_text("Custom parameters").click()
    page.select_option("select[name=walkawayArrivals]", "constant")
    page.fill("input[name=walkawayRate]", "20")
    start(page)
    look_at_our_tab(page)


def state_when_judged(page: Page) -> str:
    """What Locust's header says as soon as our tab says that the run was judged."""
    said = page.wait_for_function(
        "() => document.querySelector('tbody tr')?.innerText.includes('judged: its report is at ')"
        " && document.querySelector('header').innerText"
    )
    return str(said.json_value())


def check_figures(shown: Mapping[str, str], folder: Path) -> None:
    """The tab at the end is the run's summary: every figure in it, and none beside."""
    summary = read(folder / "summary.json")
    expected = {name.replace("_", " "): str(n) for name, n in summary["outcomes"].items()}
    expected["run"] = folder.name
    for one in FINAL:
        if one.name in summary["metrics"]:
            metric = msgspec.convert(summary["metrics"][one.name], Metric)
            expected[one.label] = figure_text(metric)
        else:
            assert one.name in summary["not_measurable"]
            expected[one.label] = DASH
    for statement in summary["validity"]:  # a busy machine has something to say
        if statement["level"] in ("warning", "invalid"):
            expected[statement["level"]] = DASH
    assert shown == expected
    assert (summary["outcomes"]["failed"], summary["engine"]) == (0, "reference")
    processes = read(folder / "manifest.json")["load_processes"]
    assert {process["worker"] for process in processes} == {0, 1}
    assert all(process["ended_ns"] for process in processes)


def show_text_from_outside(page: Page, url: str) -> None:
    """In Locust's page, with the answers that it would get: in each cell of our tab."""

    row = dict.fromkeys(("figure", "value", "about"), HOSTILE)
    ours = {"extended_stats": [{"key": "walkaway", "data": [row]}]}
    answer = httpx.get(f"{url}/stats/requests").json() | ours | {"state": "running"}
    page.set_default_timeout(WAIT_MS)
    page.route("**/stats/requests", lambda route: route.fulfill(json=answer))
    page.goto(url)
    look_at_our_tab(page)
    expect(page.locator("table tbody td")).to_have_text([HOSTILE] * 3)
    expect(page.locator("table img, table script")).to_have_count(0)
    assert violations(Axe().run(page, "table").response) == []
    assert page.evaluate("window.taken") is None
    page.close()


def test_a_test_is_started_watched_stopped_and_read(web_run: WebRun, page: Page) -> None:
    said: list[str] = []
    page.context.on("console", lambda message: said.append(message.text))
    page.context.on("weberror", lambda error: said.append(str(error.error)))
    show_text_from_outside(page.context.new_page(), web_run.url)
    page.goto(web_run.url)
    fill_in(page)
    start(page)
    look_at_our_tab(page)
    wait_for_row(page, "abandoned", "(n) => Number(n) > 20")
    assert web_run.listens_at() == {"127.0.0.1"}

    live = page.context.new_page()
    live.goto(f"{web_run.url}/walkaway/live")
    expect(live.locator("#latency circle").first).to_be_attached()
    expect(live.locator("#slots path")).to_have_count(2)

    change_while_it_runs(page, live)
    page.get_by_role("button", name="Stop").click()
    assert "STOPPED" in state_when_judged(page)
    row = page.locator("tbody tr").first
    expect(row).to_contain_text(f"its report is at {web_run.url}/walkaway/report")
    live.get_by_role("link", name="open the report").click(timeout=WAIT_MS)
    assert "What do these users cost" in live.title()
    wait_for_row(page, METRICS["ghost_rate"].label, "(n) => n.endsWith('%')")
    check_figures(rows_of(page), web_run.out / "1")
    page.get_by_role("tab", name="Failures").click()
    expect(page.locator("tbody tr")).to_have_count(0)
    assert said == []

    start_by_a_schedule(page)  # and once more
    wait_for_row(page, "run", "(n) => n === '2'")
    expect(page.locator("tbody tr").first).not_to_contain_text("load: about 20 arrivals")
    assert web_run.end() == 0  # while it is being judged
    arrivals = read(web_run.out / "2/summary.json")["arrivals"]
    assert arrivals == {"planned": 20, "sent": 20}
    assert (web_run.out / "2/report.html").exists()


WITH_LOGIN = """
from flask_login import UserMixin, login_user
from locust import events
from workloads.locustfile import *

class Somebody(UserMixin):
    id = "somebody"

@events.init.add_listener
def keep_secret(environment, **_):
    page = environment.web_ui
    page.app.secret_key = "secret"
    page.login_manager.user_loader(lambda name: Somebody())
    page.app.add_url_rule("/enter", "enter", lambda: str(login_user(Somebody())))
"""


def test_with_a_login_nothing_is_shown_without_it(tmp_path: Path) -> None:
    locustfile = tmp_path / "with_login.py"  # a login needs a secret and users of the host's own
    locustfile.write_text(WITH_LOGIN)
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
    pages = ("live", "live.json", "live.js", "live.css", "report")
    try:
        wait_until(lambda: answers(url), "the page is there", 90)
        for page in pages:
            answer = httpx.get(f"{url}/walkaway/{page}")
            assert (answer.status_code, answer.headers["location"][:6]) == (302, "/login")
        assert httpx.post(f"{url}/swarm", data={"user_count": "1"}).status_code == 302
        with httpx.Client(base_url=url) as somebody:
            assert somebody.get("/enter").text == "True"
            answers_to = [somebody.get(f"/walkaway/{page}") for page in pages]
        assert [answer.status_code for answer in answers_to] == [200, 200, 200, 200, 404]
        assert "default-src 'none'" in answers_to[0].headers["content-security-policy"]
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
