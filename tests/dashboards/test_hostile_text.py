"""Any name from a server, a workload or a user may be hostile: on the page it stays text."""

import json
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
from tests.made_up.arms import save_arms
from tests.made_up.changed import change, change_workload
from tests.made_up.gated import GOOD, save_night

MakeRun = Callable[..., Path]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
]

EVIL: Final = (
    "</script></style></title><script>window.pwned=1;alert(1)</script><!-- <img src=x "
    'onerror="window.pwned=2"><svg onload=window.pwned=3><a href="javascript:window.pwned=4">x</a>'
    "<b>bold</b>&lt;i&gt;{{7*7}}{%x%}]]>'\"`\u2028</td></main>%s"
)
EVIL_NAME: Final = "<img src=x onerror=window.pwned=5><b>bold<b>"  # of a folder: without a slash
# What is no text but a choice of ours, by the name of its key or column.
OURS: Final = frozenset(
    [
        "status",
        "level",
        "created_at",
        "outcome",
        "role",
        "event",
        "wire_close",
        "delivery",
        "token_counting",
        "labels",
        "kind",
        "verdict",
    ]
)
# Mappings whose keys are not ours either.
NAMES: Final = frozenset(
    [
        "not_measurable",
        "hardware",
        "versions",
        "others",
        "arms",
        "metrics",
        "per_round",
        "client",
        "leaks_in_use",
    ]
)
KNOWN: Final = {"itl_s", "ttft_s", "preemptions", "cancel_latency_prefill_s"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def poisoned(content: Any, key: str = "") -> Any:
    """The same with every text made hostile, always in the same way, so that names still meet."""
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
    """Every text in every file of a run."""
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


def unharmed(browser: Browser, report: Path) -> str:
    """Open every request of the page; nothing may run, be asked for, or break. Its text."""
    with opened(browser, report) as (page, noise):
        if page.locator(".requests").count():
            page.get_by_label("Find").fill("onerror")
            page.locator(".requests tbody a").first.click()
            assert EVIL in page.locator(".one dd").last.inner_text()
        assert page.evaluate("window.pwned") is None
        assert page.locator("img, main b:has-text('bold'), a[href^=javascript]").count() == 0
        assert page.locator("footer").count() == 1
        assert noise == []
        return page.locator("main").inner_text() + page.title()


def test_every_text_of_a_run_stays_text(browser: Browser, make_run: MakeRun) -> None:
    run = make_run(ghosts=3)
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
    report = run / "report.html"
    assert main(["report", str(run), "-o", str(report)]) == 0
    text = unharmed(browser, report)
    for word in ("said", "why not", "too small", "gauge", "abacus", "tiny", "some way", "7*7"):
        assert word in text


def test_names_of_arms_stay_text(browser: Browser, tmp_path: Path) -> None:
    run = save_arms(tmp_path, kind="abandon")
    poison(run)
    report = tmp_path / "report.html"
    assert main(["report", str(run), "-o", str(report)]) == 0
    assert f"128{EVIL.partition('<b>')[0]}" in unharmed(browser, report)


def test_a_comparison_keeps_names_text(browser: Browser, make_run: MakeRun) -> None:
    before, after = make_run(name="before"), make_run(name="after", ghosts=3)
    for run in (before, after):
        poison(run, validity=[{"level": "warning", "text": "said"}], token_counting="some way")
    change(after, "manifest.json", hardware={"cpu": EVIL}, versions={EVIL: EVIL}, seed=8)
    evil = after.rename(after.parent / EVIL_NAME)
    page = before / "comparison.html"
    assert main(["compare", str(before), str(evil), str(evil), "-o", str(page)]) == 0
    text = unharmed(browser, page)
    for word in (EVIL_NAME, "different machines (cpu", "some way", "7*7"):
        assert word in text


def test_a_trend_keeps_names_text(browser: Browser, tmp_path: Path) -> None:
    nights = [save_night(tmp_path / "nights", day, 0.02, others=GOOD) for day in range(3)]
    for day, run in enumerate(nights):
        poison(run, validity=[{"level": "invalid", "text": "said"}] if day == 1 else [])
    run = nights[-1]
    change(run, "manifest.json", versions={EVIL: EVIL}, hardware={EVIL: EVIL})
    run.rename(run.parent / EVIL_NAME)
    (tmp_path / "nights" / f"{EVIL_NAME}, no run").mkdir()
    page = tmp_path / "trend.html"
    assert main(["trend", str(tmp_path / "nights"), "-o", str(page)]) == 0
    text = unharmed(browser, page)
    for word in (EVIL_NAME, "said", "7*7", "no run"):
        assert word in text
