"""The live page in a real browser, on made-up figures."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from harness.run.live_figures import LiveRun
from harness.web.tab import FILES, HEADERS, NO_TEST, brief_text, live_rows
from tests.conftest import ServePages
from tests.dashboards.browsing import CHROMIUM, chromium, violations
from tests.harness.run.test_live import MS, event, left

pytestmark = [
    pytest.mark.browser,
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
]
TYPES: Final = {"live": "text/html", "live.js": "text/javascript", "live.css": "text/css"}
HOSTILE: Final = (
    "</td></table></script><script>document.title='taken'</script>"
    "<img src=x onerror=\"document.title='taken'\"> & \" ' ` ${1} javascript:alert(1)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def shown(*, ticks: int, has_log: bool = True) -> dict[str, Any]:
    """The state of a run after `ticks` ticks, in each of which a user left."""
    live = LiveRun(has_log=has_log, started_ns=0)
    for n in range(ticks):
        name, at_ms = str(n), 500 * n
        live.take_rows([left(name, at_ms=at_ms, read=1)])
        if has_log:
            live.take_events([event("blocks_freed", name, at_ms=at_ms + 1 + n % 20, tokens=2)])
        live.tick(at_ms * MS, {"running": 8.0, "waiting": float(n % 5)} if has_log else {})
    of_server = {"slots": 8, "step_s": 0.006} if has_log else {"slots": None, "step_s": None}
    rows, so_far = live_rows(live.shown()), live.shown() | of_server
    run = {"run": "night-1", "phase": "load: 12 users for 60 s", "state": "running"}
    return run | {"rows": rows, "live": so_far}


def with_text(text: str) -> dict[str, Any]:
    """A run that has failed, with this text wherever there can be any."""
    of_run = shown(ticks=3)
    rows = [dict.fromkeys(row, text) for row in of_run["rows"]]
    return of_run | {"run": text, "phase": text, "why": text, "state": "failed", "rows": rows}


@contextmanager
def opened(
    browser: Browser,
    serve_pages: ServePages,
    figures: Mapping[str, Any],
    *,
    width: int = 1440,
    scheme: Literal["light", "dark"] = "light",
) -> Iterator[tuple[Page, list[str]]]:
    """The page on these figures, and its noise: console messages and requests elsewhere."""
    figures = {**figures, "told": brief_text(figures)}

    def answer(path: str) -> tuple[int, dict[str, str], bytes]:
        name = path.rpartition("/")[2]
        if name == "live.json":
            return 200, {"content-type": "application/json"}, msgspec.json.encode(figures)
        return 200, {"content-type": TYPES[name], **HEADERS}, FILES[name].read_bytes()

    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, noise, url = context.new_page(), list[str](), serve_pages(answer)
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda one: None if one.url.startswith(url) else noise.append(one.url))
    try:
        page.goto(f"{url}/walkaway/live")
        expect(page.locator("#state")).not_to_have_text("asking the test …")
        yield page, noise
    finally:
        context.close()


@pytest.mark.parametrize(
    ("width", "scheme"), [(390, "light"), (390, "dark"), (1440, "light"), (1440, "dark")]
)
def test_it_fits_shows_all_and_axe_finds_nothing_serious(
    browser: Browser, serve_pages: ServePages, width: int, scheme: Literal["light", "dark"]
) -> None:
    figures = shown(ticks=40)  # latencies of 1 to 20 ms, each twice
    figures["live"]["lag_ms"] = {"n": 9, "p50": 0.1, "p99": 4.5}
    with opened(browser, serve_pages, figures, width=width, scheme=scheme) as (page, noise):
        expect(page.locator(".plot svg")).to_have_count(4)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        expect(page.locator("#thinned")).to_have_text(
            "Drawn: a point every 0.5 s; "
            "of abandoned requests, a stroke for each and a latency for each."
        )
        tops = [page.locator(where).bounding_box() for where in ("#slots", "#rows")]
        slots, table = (top["y"] for top in tops if top is not None)
        assert slots < table
        expect(page.locator("#slots")).to_contain_text("8 slots")
        assert "L" not in (page.locator("#slots path").last.get_attribute("d") or "")
        expect(page.locator("#latency")).to_contain_text("one step: 6 ms")
        expect(page.locator("#latency")).to_contain_text("client lag, p99: 4.5 ms")
        expect(page.locator("#latency circle.hollow")).to_have_count(8)
        assert violations(Axe().run(page).response) == []
        assert noise == []


def test_text_from_outside_stays_text(browser: Browser, serve_pages: ServePages) -> None:
    with opened(browser, serve_pages, with_text(HOSTILE), width=390) as (page, noise):
        expect(page.locator("#state")).to_have_text(f"{HOSTILE}: {HOSTILE}")
        cells = page.locator("tbody tr").first.locator("th, td")
        assert cells.all_text_contents() == [HOSTILE] * 3
        expect(page.locator(".plot svg")).to_have_count(4)
        assert page.locator("img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.title() == "walkaway: live"
        assert noise == []


def test_foreign_scripts_and_requests_are_refused(
    browser: Browser, serve_pages: ServePages
) -> None:
    put_in = """() => {
        const attribute = "<p onclick=\\"document.title='taken'\\">x</p>";
        document.body.insertAdjacentHTML("beforeend", attribute);
        document.body.lastElementChild.click();
        const script = document.createElement("script");
        script.textContent = "document.title = 'taken'";
        document.body.append(script);
        return fetch("http://127.0.0.1:9/").then(() => "asked", () => "refused");
    }"""
    with opened(browser, serve_pages, shown(ticks=1)) as (page, noise):
        assert page.evaluate(put_in) == "refused"
        assert page.title() == "walkaway: live"
        for what in ("inline event handler", "inline script", "Refused to connect"):
            assert any(what in said for said in noise), noise


@pytest.mark.parametrize(
    ("figures", "state", "empty"),
    [
        ({"state": "ready"}, NO_TEST, "Nothing was seen yet."),
        (shown(ticks=3, has_log=False), "night-1: load: 12 users for 60 s", "This server"),
    ],
    ids=["before the first run", "a server without a log"],
)
def test_a_missing_picture_has_its_reason(
    browser: Browser, serve_pages: ServePages, figures: dict[str, Any], state: str, empty: str
) -> None:
    with opened(browser, serve_pages, figures) as (page, noise):
        expect(page.locator("#state")).to_have_text(state)
        for plot in ("#slots", "#latency", "#wasted"):
            expect(page.locator(plot)).to_contain_text(empty)
        expect(page.get_by_role("link", name="open the report")).to_be_hidden()
        assert noise == []
