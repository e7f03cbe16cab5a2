"""Any name from a server, a workload or a user may be hostile: on the page it stays text."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from playwright.sync_api import Browser

from dashboards.__main__ import main
from tests.dashboards.browsing import CHROMIUM, chromium, opened
from tests.dashboards.reading import Page
from tests.made_up.arms import SIZES, save_arms, with_savings
from tests.made_up.changed import change, change_workload
from tests.made_up.conform import save_conform, save_engines
from tests.made_up.gated import GOOD, arm, save_night, summary_of_arms
from tests.made_up.played import save_played

EVIL: Final = (
    "</script></style></title><script>window.pwned=1;alert(1)</script><!-- <img src=x "
    'onerror="window.pwned=2"><svg onload=window.pwned=3><a href="javascript:window.pwned=4">x</a>'
    "<b>bold</b>&lt;i&gt;{{7*7}}{%x%}]]>'\"`\u2028</td></main>%s"
)
EVIL_NAME: Final = "<img src=x onerror=window.pwned=5><b>bold<b>"  # of a folder: without a slash
# Keys and columns whose values are choices of ours, not text.
OURS: Final = {
    *("status", "level", "created_at", "outcome", "role", "event", "wire_close", "delivery"),
    *("token_counting", "labels", "kind", "verdict", "aftermath", "expected", "wire_log"),
    *("what", "sent", "disconnect"),
}
# Mappings whose keys are not ours either.
NAMES: Final = {
    *("not_measurable", "hardware", "versions", "others", "arms", "metrics", "per_round"),
    *("client", "leaks_in_use"),
}
KNOWN: Final = {"itl_s", "ttft_s", "preemptions", "cancel_latency_prefill_s"}


def poisoned(content: Any, key: str = "") -> Any:
    if isinstance(content, str):
        return content if key in OURS or content in KNOWN else content + EVIL
    if isinstance(content, list):
        return [poisoned(one, key if isinstance(one, str) else "") for one in content]
    if isinstance(content, dict):
        return {
            name + EVIL if key in NAMES and _is_outside(key, name, one) else name: poisoned(
                one, name
            )
            for name, one in content.items()
        }
    return content


def _is_outside(key: str, name: str, value: Any) -> bool:
    """A metric's own name is ours: the report looks for it."""
    if key in ("metrics", "per_round"):
        return name not in KNOWN and isinstance(value, int)
    return not (key == "hardware" and name == "memory_bytes")


def poison(run: Path, **more: Any) -> None:
    for name in ("summary.json", "manifest.json"):
        content = json.loads((run / name).read_text())
        if name == "summary.json":
            content |= more
        (run / name).write_text(json.dumps(poisoned(content)))
    for file in run.glob("*.parquet"):
        table = pq.read_table(file)
        for place, field in enumerate(table.schema):
            column = table.column(place)
            if field.name == "error":
                column = pa.array([EVIL] * len(table))
            elif pa.types.is_string(field.type) and field.name not in OURS:
                column = pc.binary_join_element_wise(column, EVIL, "")
            table = table.set_column(place, field, column)
        pq.write_table(table, file)


def report(folder: Path) -> Path:
    run = save_played(folder / "run", ghosts=3)
    entry = {"role": "running", "name": "gauge", "due": [0, 1], "told": 2.0, "verdict": "gross"}
    remarks = [{"level": level, "text": "said"} for level in ("invalid", "warning", "info")]
    poison(
        run,
        validity=remarks,
        not_measurable={"figure": "why not"},
        flags={"itl_s": "too small"},
        audit={"client": {"sent": 40.0}, "counters": [entry]},
        token_counting="some way",
    )
    change_workload(run, gate={"limits": [EVIL]})
    return page_of("report", run)


def report_of_arms(folder: Path) -> Path:
    run = save_arms(folder, kind="abandon")
    poison(run)
    return page_of("report", run)


def report_of_tasks(folder: Path) -> Path:
    names = [str(size) for size in SIZES]
    run = save_arms(folder, kind="abandon", **with_savings(names))
    poison(run)
    return page_of("report", run)


def comparison(folder: Path) -> Path:
    before, after = (save_played(folder / name, ghosts=3) for name in ("before", "after"))
    for run in (before, after):
        poison(run, validity=[{"level": "warning", "text": "said"}], token_counting="some way")
    change(after, "manifest.json", hardware={"cpu": EVIL}, versions={EVIL: EVIL}, seed=8)
    evil = after.rename(folder / EVIL_NAME)
    return page_of("compare", before, evil, evil)


def trend(folder: Path) -> Path:
    nights = [save_night(folder / "nights", day, 0.02, others=GOOD) for day in range(3)]
    for day, run in enumerate(nights):
        poison(run, validity=[{"level": "invalid", "text": "said"}] if day == 1 else [])
    run = nights[-1]
    change(run, "manifest.json", versions={EVIL: EVIL}, hardware={EVIL: EVIL})
    run.rename(run.parent / EVIL_NAME)
    (folder / "nights" / f"{EVIL_NAME}, no run").mkdir()
    return page_of("trend", folder / "nights")


def trend_of_arms(folder: Path) -> Path:
    of = summary_of_arms({"old": arm(GOOD), "new": {**arm(GOOD), "outcomes": {}}})
    for day in range(2):
        poison(save_night(folder / "nights", day, 0.02, of=of, arms=("old", "new")))
    return page_of("trend", folder / "nights")


def conform(folder: Path) -> Path:
    made = save_conform(folder / "conform")
    for file in (made / "conform.json", *made.glob("wire/*")):
        lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
        whole = [json.dumps(poisoned(json.loads(one))) for one in lines if one != "{cut off"]
        file.write_text("\n".join(whole))
    return page_of("conform", made)


def matrix(folder: Path) -> Path:
    files = save_engines(folder / EVIL_NAME)
    for file in files:
        file.write_text(json.dumps(poisoned(json.loads(file.read_text()))))
    return page_of("matrix", *files)


def page_of(command: str, *paths: Path) -> Path:
    page = paths[0].parent / "page.html"
    assert main([command, *map(str, paths), "-o", str(page)]) == 0
    return page


# Each page: how it is made, and words that stand on it besides the hostile text.
SHOWN: Final = (
    (report, ("why not", "too small", "gauge", "abacus", "tiny", "some way", "7*7")),
    (report_of_arms, (f"128{EVIL.partition('<b>')[0]}",)),
    (report_of_tasks, (f"extraction{EVIL.partition('<b>')[0]}",)),
    (comparison, (EVIL_NAME, "different machines (cpu", "some way", "7*7")),
    (trend, (EVIL_NAME, "said", "7*7", "no run")),
    (trend_of_arms, (f"new{EVIL.partition('<b>')[0]}",)),
    (matrix, ("7*7", "The server closed all.")),
    (conform, ("7*7", f"leaver 3{EVIL.partition('<b>')[0]}")),
)


@pytest.mark.parametrize(("make", "words"), SHOWN)
def test_text_from_outside_is_no_markup(
    make: Callable[[Path], Path], words: tuple[str, ...], tmp_path: Path
) -> None:
    html = make(tmp_path).read_text(encoding="utf-8")
    page = Page(html)
    assert not [tag for tag, _, _ in page.elements if tag == "img"]
    assert all(word in page.body for word in words)
    data = re.search(r'id="figures">(.*?)</script>', html, re.DOTALL)
    assert data is not None
    assert "<" not in data[1]
    assert "<img" not in str(page.figures())


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
@pytest.mark.parametrize(("make", "words"), SHOWN)
def test_hostile_text_runs_nothing_in_a_browser(
    make: Callable[[Path], Path], words: tuple[str, ...], tmp_path: Path, browser: Browser
) -> None:
    with opened(browser, make(tmp_path)) as (page, noise):
        if page.locator(".requests").count():
            page.get_by_label("Find").fill("onerror")
            page.locator(".requests tbody a").first.click()
            assert EVIL in page.locator(".one dd").last.inner_text()
        assert page.evaluate("window.pwned") is None
        assert page.locator("img, main b:has-text('bold'), a[href^=javascript]").count() == 0
        assert page.locator("footer").count() == 1
        assert noise == []
        text = page.locator("main").inner_text() + page.title()
        assert all(word in text for word in words)
