"""No page tells anything by colour alone, be it of arms, of a comparison or of a trend."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboards.__main__ import main
from tests.dashboards.reading import Page, page_of
from tests.dashboards.test_arms import make_arms
from tests.dashboards.test_report_honesty import without_colour
from tests.made_up.gated import GOOD, latency, save_night
from tests.made_up.run import save_judged


def frontier(folder: Path) -> Page:
    return page_of(make_arms(folder, kind="chunk_frontier"))


def comparison(folder: Path) -> Page:
    """Three runs; of one the parts of the waste are not known."""
    runs = [save_judged(folder / name, step_ms=step) for name, step in (("a", 10), ("b", 20))]
    runs.append(save_judged(folder / "c"))
    summary = json.loads((runs[2] / "summary.json").read_text())
    del summary["metrics"]["wasted_in_flight_tokens"]
    (runs[2] / "summary.json").write_text(json.dumps(summary))
    return drawn(folder, "compare", *runs)


def trend(folder: Path) -> Page:
    """With a run that is not joined, one that is known only to be more, and a change."""
    nights = folder / "nights"
    save_night(nights, 0, 0.020, others=GOOD)
    save_night(nights, 1, 0.021, of={"status": "interrupted"})
    save_night(nights, 2, latency(0.02, p99=None, n_censored=20, lower_bounds={"p99": 2.0}))
    save_night(nights, 3, 0.020, versions={"walkaway": "2"})
    return drawn(folder, "trend", nights)


def drawn(folder: Path, command: str, *paths: Path) -> Page:
    output = folder / "page.html"
    assert main([command, *map(str, paths), "-o", str(output)]) == 0
    return Page(output.read_text(encoding="utf-8"))


@pytest.mark.parametrize("make_page", [frontier, comparison, trend])
def test_no_two_marks_of_a_legend_differ_by_colour_alone(
    make_page: Callable[[Path], Page], tmp_path: Path
) -> None:
    figures = make_page(tmp_path).figures()
    assert figures
    for name, figure in figures.items():
        told = [one for one in figure["data"] if one.get("name") and one.get("showlegend", True)]
        looks = [(*without_colour(one), *number_of(one, figure)) for one in told]
        assert len(set(looks)) == len(looks), (name, looks)


def number_of(trace: dict[str, Any], figure: dict[str, Any]) -> Iterator[str]:
    """The number in a name of the legend, where marks bear it."""
    number = trace["name"].partition(" ")[0]
    borne = {text.strip("\xa0 ") for one in figure["data"] for text in one.get("text") or ()}
    if number in borne:
        yield number
