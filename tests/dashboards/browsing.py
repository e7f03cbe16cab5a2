"""Pages in a real Chromium, with every complaint and every request that they make."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, Dialog, Page, Request, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
WAIT_MS = 60_000  # for what takes a moment: the machine may be busy
expect.set_options(timeout=WAIT_MS)
ALL_DRAWN = """() => {
  const missing = [...document.querySelectorAll(".plot")].find(
    (plot) => !plot.querySelector(".main-svg"));
  missing?.scrollIntoView();
  return missing === undefined;
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser,
    file: Path,
    *,
    width: int = 1440,
    scheme: Literal["light", "dark"] = "light",
    fragment: str = "",
) -> Iterator[tuple[Page, list[str]]]:
    """The top of a file's page, once all its pictures have been scrolled to and drawn, and its
    noise: what it wrote to the console, errors, dialogs, and requests for anything but itself."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(WAIT_MS)
    page, noise = context.new_page(), list[str]()
    url = file.absolute().as_uri()

    def on_dialog(dialog: Dialog) -> None:
        noise.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def on_request(request: Request) -> None:
        if request.url != url:
            noise.append(f"asked for {request.url}")

    page.on("console", lambda message: noise.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: noise.append(f"error: {error}"))
    page.on("dialog", on_dialog)
    page.on("request", on_request)
    page.goto(url + fragment)
    page.wait_for_function(ALL_DRAWN)
    page.evaluate("scrollTo(0, 0)")
    try:
        yield page, noise
    finally:
        context.close()


def violations(found: dict[str, Any]) -> list[str]:
    return [
        f"{one['id']} ({one['impact']}): {one['help']}: "
        + "; ".join(node["html"][:200] for node in one["nodes"][:3])
        for one in found["violations"]
        if one["impact"] in {"serious", "critical"}
    ]
