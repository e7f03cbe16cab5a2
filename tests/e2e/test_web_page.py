"""The web page in a real browser: start, watch, stop, start again, read the report."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import FrameLocator, Locator, Page, expect

from harness.metrics import METRICS
from harness.run.process import free_port
from tests.dashboards.browsing import CHROMIUM, chromium, violations
from tests.e2e.running import ROOT, Run, page_served

pytestmark = [
    pytest.mark.browser,
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
]
WAIT_MS = 60_000
ENGINE = "input[name='Kind of server']"
HOSTILE = "<img src=x onerror='window.taken=1'><script>window.taken=1</script></td>\"${1}"


@contextmanager
def served(
    *command: str, is_ready: Callable[[str], bool]
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    whole = [sys.executable, "-m", *command, "--web-port", port]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with page_served(whole, url, is_ready=is_ready, env=environment) as process:
        yield url, process


@pytest.fixture
def page() -> Iterator[Page]:
    with chromium() as browser:
        page = browser.new_context().new_page()
        page.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        yield page


def start(page: Page) -> None:
    page.get_by_role("button", name="Start", exact=True).click()


def look_at_our_tab(page: Page) -> None:
    page.get_by_role("tab", name="walkaway").click()


def wait_for_row(page: Page, figure: str, condition: str) -> None:
    page.wait_for_function(
        "([figure, condition]) => [...document.querySelectorAll('tbody tr')].some((row) =>"
        " row.cells[0].innerText === figure && eval(condition)(row.cells[1].innerText))",
        arg=[figure, condition],
    )


def fill_in(page: Page) -> None:
    """A mistake, which is refused in the form (test_form has all of them); then a setting."""
    page.get_by_text("Custom parameters").click()
    engine = page.input_value(ENGINE)
    page.fill(ENGINE, HOSTILE)
    start(page)
    expect(now(page)).to_have_text("starting …")
    expect(page.get_by_role("alert").last).to_contain_text(f"unknown engine `{HOSTILE}`")
    expect(now(page)).to_contain_text(f'started: "Kind of server": unknown engine `{HOSTILE}`')
    wrong = page.locator(".walkaway-wrong")
    expect(wrong.locator("input")).to_have_attribute("name", "Kind of server")
    expect(wrong.get_by_role("alert")).to_contain_text(f"unknown engine `{HOSTILE}`")
    page.fill(ENGINE, engine)
    page.select_option("select[name='When users leave']", "tokens")
    page.fill("input[name='Leave after (tokens)']", "1,4")
    page.select_option("select[name='Way to leave']", "rst")


def now(page: Page) -> Locator:
    """What the page says of the test, on each of its tabs."""
    return page.locator("#walkaway-now").get_by_role("status")


def start_by_a_schedule(page: Page) -> None:
    page.get_by_role("button", name="New").click()
    page.get_by_text("Advanced options").click()
    page.fill("input[name=runTime]", "1")
    page.get_by_text("Custom parameters").click()
    page.select_option("select[name='Arrivals']", "constant")
    page.fill("input[name='Rate (requests a second)']", "20")
    start(page)
    look_at_our_tab(page)


def check_run(run: Run) -> None:
    assert (run.summary["outcomes"]["failed"], run.summary["engine"]) == (0, "reference")
    processes = run.manifest["load_processes"]
    assert {process["worker"] for process in processes} == {0, 1}
    assert all(process["ended_ns"] for process in processes)


def check_text_stays_text(page: Page, url: str) -> None:
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


def check_report_is_linked(page: Page, url: str) -> None:
    expect(now(page)).to_have_text("the run is judged")
    link = page.locator("#walkaway-now").get_by_role("link", name="open the report")
    assert page.context.request.get(f"{url}/{link.get_attribute('href')}").ok
    assert violations(Axe().run(page, "#walkaway-now").response) == []


def watch_charts(page: Page) -> FrameLocator:
    charts = page.frame_locator("#walkaway-run")
    expect(charts.locator("#latency circle").first).to_be_attached()
    expect(charts.locator(".plot:visible svg")).to_have_count(2)
    return charts


def check_nothing_changes(page: Page, live: Page, url: str) -> None:
    """Another start, as Locust's Edit sends it, changes nothing, and both pages say so."""
    why = "nothing can change while a test runs"
    changed = httpx.post(f"{url}/swarm", data={"user_count": "6", "spawn_rate": "1"}).json()
    assert not changed["success"]
    assert why in changed["message"]
    expect(page.locator("tbody tr").first).to_contain_text(f"not changed: {why}")
    expect(live.locator("#state.bad")).to_contain_text(f"not changed: {why}")


def addresses(process: subprocess.Popen[bytes]) -> set[str]:
    ours = psutil.Process(process.pid)
    return {
        at.laddr.ip
        for one in (ours, *ours.children(recursive=True))
        for at in one.net_connections("tcp")
        if at.status == psutil.CONN_LISTEN
    }


def has_workers(url: str) -> bool:
    return bool(httpx.get(f"{url}/worker-count").json()["worker_count"] == 2)


def test_a_test_is_started_watched_stopped_and_read(tmp_path: Path, page: Page) -> None:
    out, said = tmp_path / "runs", list[str]()
    quick = ("--set", "engine.runner=simulated", "--set", "engine.sim_fixed_ms=5")
    command = ("harness", "run", "harness/workload/by_hand.toml", "--web", "--processes", "2")
    with served(*command, *quick, "--out", str(out), is_ready=has_workers) as (url, process):
        page.context.on("console", lambda message: said.append(message.text))
        page.context.on("weberror", lambda error: said.append(str(error.error)))
        check_text_stays_text(page.context.new_page(), url)
        page.goto(url)
        fill_in(page)
        start(page)
        expect(now(page)).to_contain_text("starting the ")
        wait_for_row(page, "abandoned", "(n) => Number(n) > 20")  # our tab opens by itself
        charts = watch_charts(page)
        assert addresses(process) == {"127.0.0.1"}

        live = page.context.new_page()
        live.goto(f"{url}/walkaway/live")
        expect(live.locator("#latency circle").first).to_be_attached()
        expect(live.locator("#slots path")).to_have_count(2)

        check_nothing_changes(page, live, url)
        page.get_by_role("button", name="Stop").click()
        header = page.wait_for_function(
            "() => document.querySelector('tbody tr')?.innerText.includes('judged: its report')"
            " && document.querySelector('header').innerText"
        )
        assert "STOPPED" in str(header.json_value())
        row = page.locator("tbody tr").first
        expect(row).to_contain_text(f"its report is at {url}/walkaway/report")
        check_report_is_linked(page, url)
        expect(charts.get_by_role("link", name="open the report")).to_be_visible()
        live.get_by_role("link", name="open the report").click(timeout=WAIT_MS)
        assert "What do these users cost" in live.title()
        wait_for_row(page, METRICS["ghost_rate"].label, "(n) => n.endsWith('%')")
        check_run(Run(out / "1"))
        page.get_by_role("tab", name="Failures").click()
        expect(page.locator("tbody tr")).to_have_count(0)
        assert said == []

        start_by_a_schedule(page)
        wait_for_row(page, "run", "(n) => n === '2'")
        expect(row).not_to_contain_text("load: about 20 arrivals")
        process.terminate()  # while the run is being judged
        process.wait(60)
    assert Run(out / "2").summary["arrivals"] == {"planned": 20, "sent": 20}
    assert (out / "2/report.html").exists()


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
    pages = ("live", "live.json", "live.js", "live.css", "now.js", "now.json", "report")
    command = ("locust", "-f", str(locustfile), "--web-login", "--web-host", "127.0.0.1")

    def has_login(url: str) -> bool:
        return httpx.get(f"{url}/login").status_code > 0

    with served(*command, is_ready=has_login) as (url, _):
        for page in pages:
            answer = httpx.get(f"{url}/walkaway/{page}")
            assert (answer.status_code, answer.headers["location"][:6]) == (302, "/login")
        assert httpx.post(f"{url}/swarm", data={"user_count": "1"}).status_code == 302
        with httpx.Client(base_url=url) as somebody:
            assert somebody.get("/enter").text == "True"
            answers_to = [somebody.get(f"/walkaway/{page}") for page in pages]
        assert [answer.status_code for answer in answers_to] == [200] * 6 + [404]
        assert "default-src 'none'" in answers_to[0].headers["content-security-policy"]
