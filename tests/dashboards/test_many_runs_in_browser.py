"""Comparison and trend as a browser shows them: all is drawn and fits, and anybody can use it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from dashboards.__main__ import main
from tests.dashboards.browsing import CHROMIUM, chromium, opened, violations
from tests.dashboards.test_in_browser import STICKS_OUT
from tests.made_up.gated import GOOD, save_night, save_nights
from tests.made_up.run import save_judged

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
]
LONG = "a-name-of-a-run-that-nobody-would-break-anywhere" * 2


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A comparison of two runs, and a trend of four."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [save_judged(folder / "before"), save_judged(folder / LONG, step_ms=20)]
    save_nights(folder / "nights", [0.020, 0.021, 0.022])
    save_night(folder / "nights", 3, 0.030, others=GOOD, versions={"a" * 80: "b" * 80})
    (folder / "nights" / LONG).mkdir()
    compare = ["compare", *map(str, runs), "-o", str(folder / "comparison.html")]
    trend = ["trend", str(folder / "nights"), "-o", str(folder / "trend.html")]
    assert (main(compare), main(trend)) == (0, 0)
    return {name: folder / f"{name}.html" for name in ("comparison", "trend")}


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
@pytest.mark.parametrize(("name", "pictures"), [("comparison", 7), ("trend", 6)])
def test_everything_is_drawn_and_fits_and_axe_finds_nothing_serious(
    browser: Browser,
    pages: dict[str, Path],
    name: str,
    pictures: int,
    width: int,
    scheme: Literal["light", "dark"],
) -> None:
    with opened(browser, pages[name], width=width, scheme=scheme) as (page, noise):
        assert page.locator(".plot").count() == pictures
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(STICKS_OUT) == []
        assert noise == []
        assert violations(Axe().run(page).response) == []
