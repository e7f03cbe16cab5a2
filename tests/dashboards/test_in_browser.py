"""Pages as a real browser shows them: everything is drawn, fits, and is accessible."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.dashboards.browsing import CHROMIUM, chromium, opened, violations
from tests.dashboards.reading import page_by
from tests.made_up.arms import arm, difference, save_arms
from tests.made_up.changed import change, without_an_end
from tests.made_up.conform import save_conform, save_engines
from tests.made_up.gated import GOOD, save_night, save_nights
from tests.made_up.played import save_played
from tests.made_up.run import save_judged

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
]

LONG = "a-name-of-a-run-that-cannot-be-broken-anywhere" * 4
STICKS_OUT = """() => [...document.querySelectorAll("main *")].filter((one) =>
    !one.closest(".scroll") && !one.parentElement.closest("svg") &&
    one.getBoundingClientRect().right > innerWidth).map((one) => one.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def report_of(run: Path) -> Path:
    page_by("report", run)
    return run / "report.html"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    hidden = {"a_very_long_name_of_a_figure_" * 3: "no" * 90}
    made = {
        name: report_of(save_played(folder / name, ghosts=ghosts, not_measurable=hidden))
        for name, ghosts in (("clean", 0), ("ghosts", 6))
    }
    runs = [save_judged(folder / "before"), save_judged(folder / LONG, step_ms=20)]
    save_nights(folder / "runs", [0.020, 0.0201, 0.0202])
    save_night(folder / "runs", 3, 0.090, others=GOOD, versions={"a" * 80: "b" * 80})
    save_night(folder / "runs", 4, 0.020, of={"model": LONG})
    (folder / "runs" / LONG).mkdir()
    page_by("compare", *runs, output=folder / "comparison.html")
    page_by("trend", folder / "runs", output=folder / "trend.html")
    page_by("conform", save_conform(folder / "conform"), output=folder / "conform.html")
    page_by("matrix", *save_engines(folder / "engines"), output=folder / "matrix.html")
    others = ("comparison", "trend", "conform", "matrix")
    return {**made, **{name: folder / f"{name}.html" for name in others}}


@pytest.mark.parametrize(
    ("name", "pictures", "width", "scheme"),
    [
        ("clean", 11, 390, "light"),
        ("ghosts", 11, 1440, "dark"),
        ("comparison", 9, 390, "dark"),
        ("comparison", 9, 1440, "light"),
        ("comparison", 9, 320, "light"),
        ("trend", 8, 320, "light"),
        ("trend", 8, 390, "dark"),
        ("trend", 8, 1440, "light"),
        ("conform", 0, 390, "dark"),
        ("conform", 0, 1440, "light"),
        ("matrix", 0, 390, "light"),
        ("matrix", 0, 1440, "dark"),
    ],
)
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
        if page.locator(".requests").count():
            page.locator(".requests tbody a").first.click()
            expect(page.locator(".one ol")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(STICKS_OUT) == []
        assert noise == []
        assert violations(Axe().run(page).response) == []


def test_a_failed_case_is_opened_by_the_keyboard_and_shows_its_wire(
    browser: Browser, pages: dict[str, Path]
) -> None:
    with opened(browser, pages["conform"]) as (page, noise):
        wire = page.locator("#case-bystander-pace svg[role=img]").first
        expect(wire).to_be_hidden()
        page.get_by_role("link", name="bystander/pace").first.focus()
        page.keyboard.press("Enter")
        expect(wire).to_be_visible()
        expect(wire).to_contain_text("first token, t0 + 213 ms")
        words = page.locator("#case-bystander-pace .words").first
        words.locator("summary").focus()
        page.keyboard.press("Space")
        expect(words.get_by_role("row", name="leaves: close(), FIN")).to_be_visible()
        assert violations(Axe().run(page).response) == []
        assert noise == []


def test_a_cell_of_the_matrix_says_its_sentence_when_focused(
    browser: Browser, pages: dict[str, Path]
) -> None:
    with opened(browser, pages["matrix"]) as (page, noise):
        said = page.get_by_text("It looks for a disconnect only when it writes.")
        expect(said.first).to_be_hidden()
        page.locator(".matrix").get_by_role("link", name="never").first.focus()
        expect(said.first).to_be_visible()
        page.keyboard.press("Enter")
        assert page.url.endswith("#column0-case-unary-leave")
        page.locator(".matrix td[tabindex='0']").focus()
        for key in ("ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft", "ArrowDown"):
            page.keyboard.press(key)
        said = page.locator(".matrix td:focus .tip")
        expect(said).to_be_visible()
        page.keyboard.press("Escape")
        expect(said).to_be_hidden()
        expect(page.get_by_role("link", name="an/engine#8")).to_be_visible()
        assert noise == []


@pytest.mark.parametrize("abandons", [0, 750])
def test_reports_of_no_one_and_a_thousand_requests_open_in_silence(
    browser: Browser, tmp_path: Path, abandons: int
) -> None:
    run = save_played(tmp_path / "run", abandons=abandons)
    with opened(browser, report_of(run)) as (page, noise):
        expect(page.locator("h1")).to_have_text("What does a synthetic server do?")
        if abandons:
            expect(page.get_by_role("status")).to_contain_text(f"{abandons * 4 // 3} are listed")
        assert noise == []


def test_a_script_that_is_not_ours_is_refused(browser: Browser, tmp_path: Path) -> None:
    report = report_of(save_played(tmp_path / "run", abandons=0))
    html = report.read_text(encoding="utf-8")
    injected = html.replace("</main>", "<script>document.title = 'mine'</script></main>")
    report.write_text(injected, encoding="utf-8")
    with opened(browser, report) as (page, noise):
        assert page.title() != "mine"
        assert any("Content Security Policy" in line for line in noise)


def rows(page: Page) -> list[str]:
    return page.locator(".requests tbody th").all_inner_texts()


def test_requests_are_found_sorted_and_paged(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, report_of(save_played(tmp_path / "run", ghosts=3))) as (page, noise):
        status = page.get_by_role("status")
        expect(status).to_have_text("1 to 25 of 40 shown; 40 are listed.")
        assert rows(page)[:3] == ["u-0", "u-1", "u-2"]  # the ghosts
        page.get_by_role("button", name="Later rows").click()
        expect(status).to_have_text("26 to 40 of 40 shown; 40 are listed.")
        page.get_by_label("Find").fill("completed")
        expect(status).to_have_text("1 to 10 of 10 shown; 40 are listed.")
        page.get_by_label("Find").fill("GHOST abandoned")
        expect(status).to_have_text("1 to 3 of 3 shown; 40 are listed.")
        page.get_by_label("Find").fill("nothing like it")
        expect(status).to_have_text("none shown; 40 are listed.")
        page.get_by_label("Find").fill("")
        read = page.get_by_role("columnheader", name="tokens read")
        read.get_by_role("button").click()
        expect(read).to_have_attribute("aria-sort", "descending")
        most = page.locator(".requests tbody tr").first.locator("td").nth(3)
        expect(most).to_have_text("24")
        read.get_by_role("button").click()
        expect(read).to_have_attribute("aria-sort", "ascending")
        expect(most).to_have_text("0")
        assert noise == []


def test_one_request_is_opened_by_the_keyboard_and_by_its_address(
    browser: Browser, tmp_path: Path
) -> None:
    report = report_of(save_played(tmp_path / "run", ghosts=3))
    with opened(browser, report) as (page, _):
        page.get_by_role("link", name="u-0", exact=True).focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Request u-0")).to_be_focused()
        facts = page.locator(".one dl").inner_text()
        assert "a ghost: not stopped within 2 s" in facts
        assert "never while it was watched: counts as longer than 2 s" in facts
        assert page.url.endswith("#run0-request-u-0")
        page.get_by_role("link", name="back to the list").click()
        expect(page.locator(".one")).to_be_hidden()
    with opened(browser, report, fragment="#run0-request-u-4") as (page, noise):
        moments = page.locator(".moments li").all_inner_texts()
        told = [re.sub(r"^\w+\s+[\d.,]+ ms: ", "", one) for one in moments]
        assert told[0] == "sent"
        assert told[-5:] == [
            "over for the client",
            "the server saw it (1 ms after leaving)",
            "the worker heard of it (2 ms after leaving)",
            "out of the batch (8 ms after leaving)",
            "blocks reclaimed (8.1 ms after leaving)",
        ]
        assert noise == []
    with opened(browser, report, fragment="#run0-request-none") as (page, _):
        expect(page.get_by_role("status")).to_contain_text("not among the requests listed")


def test_the_timeline_of_a_request_without_an_end_is_open(browser: Browser, tmp_path: Path) -> None:
    run = save_played(tmp_path / "run", ghosts=3)
    without_an_end(run, "u-0")
    with opened(browser, report_of(run), fragment="#run0-request-u-0") as (page, noise):
        whole, since = page.locator(".one figure").all()
        expect(whole.locator("figcaption")).to_have_text(
            "The whole request, > 2.02 s in all; its end was never seen."
        )
        expect(since.locator("figcaption")).to_have_text(
            "From the user's leaving on: > 2 s; its end was never seen."
        )
        bar, line = since.locator(".open").bounding_box(), since.locator(".track").bounding_box()
        assert bar is not None
        assert line is not None
        assert bar["width"] == pytest.approx(line["width"], abs=2)  # all of what was watched
        expect(page.locator(".one dl")).to_contain_text("≥ ")
        assert noise == []
    with opened(browser, report_of(run), fragment="#run0-request-u-1") as (page, _):
        expect(page.locator(".one .held").first).to_be_visible()  # it ended by itself
        assert page.locator(".one .open").count() == 0


def test_how_far_to_trust_the_run_is_said_on_the_first_screen(
    browser: Browser, tmp_path: Path
) -> None:
    said = [
        {"level": "invalid", "text": "the load could not keep up " * 6},
        {"level": "warning", "text": "a long story " * 12},
    ]
    hidden = {f"figure_{n}": "the server does not tell" for n in range(6)}
    steady = {"is_steady": True, "rule": "MSER-5", "warmup_s": 0.1, "steady_tps": 400.0}
    run = save_played(
        tmp_path / "run", ghosts=6, validity=said, not_measurable=hidden, steady=steady
    )
    with opened(browser, report_of(run)) as (page, _):
        line = page.get_by_role("link", name="client")
        expect(line).to_have_text(
            "client not watched · window steady · 6 not measurable · 1 warning", use_inner_text=True
        )
        for width, height in ((1440, 900), (390, 844)):
            page.set_viewport_size({"width": width, "height": height})
            box = line.bounding_box()
            assert box is not None
            assert box["y"] + box["height"] < height
        line.click()
        expect(page).to_have_url(re.compile("#run0-trust$"))
        expect(page.locator("#run0-trust .warning")).to_have_count(1)


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
def test_the_first_screen_is_one_picture_and_three_cards(
    browser: Browser, tmp_path: Path, width: int, height: int
) -> None:
    """On a phone the third card may begin there."""
    with opened(browser, report_of(save_played(tmp_path / "run", ghosts=6)), width=width) as (
        page,
        noise,
    ):
        shown = [page.locator(".first .plot"), *page.locator(".first .card").all()]
        boxes = [one.bounding_box() for one in shown]
        assert len(boxes) == 4
        tops = [box["y"] + (box["height"] if width > 1000 else 20) for box in boxes if box]
        assert max(tops) < height
        drawn = page.locator(".first .main-svg").first.bounding_box()
        assert drawn is not None
        assert drawn["y"] + drawn["height"] < height
        assert "never let go (ghosts): 5" in str(shown[0].get_attribute("aria-label")).lower()
        assert noise == []


def test_names_without_end_and_hundreds_of_arms_fit_a_narrow_phone(
    browser: Browser, tmp_path: Path
) -> None:
    endless = {"model": "m" * 200, "engine": "e" * 200, "run_id": "r" * 200}
    run = save_played(tmp_path / "run", ghosts=6)
    change(run, "summary.json", **endless)
    arms = {f"{LONG}{n}": arm(n % 3) for n in range(200)}
    differences = {"preemptions": {"mean": [difference(one, 0.5) for one in [*arms][1:]]}}
    of_arms = save_arms(tmp_path, kind="abandon", arms=arms, differences=differences)
    for one in (run, of_arms):
        with opened(browser, report_of(one), width=320) as (page, noise):
            assert page.evaluate("document.documentElement.scrollWidth") == 320
            assert page.evaluate(STICKS_OUT) == []
            assert noise == []


def test_without_scripts_the_words_of_pictures_and_the_tables_stand(
    browser: Browser, tmp_path: Path
) -> None:
    report = report_of(save_played(tmp_path / "run", ghosts=6))
    page = browser.new_page(java_script_enabled=False)
    page.goto(report.as_uri())
    said = page.locator(".first figure .reason")
    expect(said).to_be_visible()
    assert "Never let go (ghosts): 5" in said.inner_text()
    expect(page.locator(".plot").first).to_be_hidden()
    expect(page.get_by_role("region", name="Every figure").locator("table")).to_be_visible()
    page.close()


NOTES_PAPER = """() => addEventListener("afterprint", () => {
  window.onPaper = [...document.querySelectorAll(".plot")].map((plot) => {
    const drawn = plot.querySelector(".main-svg");
    return drawn === null ? 0 : drawn.getBoundingClientRect().width;
  });
})"""
IDS_OF_DRAWN = """() => [...document.querySelectorAll(".plot")].filter((plot) =>
    plot.querySelector(".main-svg")).map((plot) => plot.id)"""


def test_a_picture_is_drawn_when_it_comes_near_the_screen(browser: Browser, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(report_of(save_played(tmp_path / "run")).as_uri())
    last = page.locator(".plot").last
    last.scroll_into_view_if_needed()
    expect(last.locator(".main-svg").first).to_be_visible()
    drawn = page.evaluate(IDS_OF_DRAWN)
    page.close()
    assert 0 < len(drawn) < 11  # pictures far above the screen are not drawn


def test_paper_has_all_pictures_however_early_it_is_printed(
    browser: Browser, tmp_path: Path
) -> None:
    page = browser.new_page()
    page.add_init_script(f"({NOTES_PAPER})()")  # before the page's own listeners
    page.goto(report_of(save_played(tmp_path / "run")).as_uri())
    assert len(page.evaluate(IDS_OF_DRAWN)) < 11
    assert page.pdf().startswith(b"%PDF")
    on_paper = page.evaluate("onPaper")
    page.close()
    assert on_paper == [640] * 11
