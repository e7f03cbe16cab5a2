"""The whole content of a page of each kind, text and figures."""

from pathlib import Path

import plotly.graph_objects as go
import pytest

from tests.conftest import Snapshot
from tests.dashboards.pages import PAGES
from tests.dashboards.reading import page_by
from tests.made_up.played import save_played


@pytest.mark.parametrize("name", PAGES)
def test_a_page_tells_what_it_told_before(name: str, tmp_path: Path, snapshot: Snapshot) -> None:
    snapshot(f"pages/{name}", PAGES[name](tmp_path).content().replace(str(tmp_path), "FOLDER"))


@pytest.mark.parametrize("name", ["ghosts", "arms", "frontier", "comparison", "trend"])
def test_plotly_knows_every_word_of_the_figures(name: str, tmp_path: Path) -> None:
    figures = PAGES[name](tmp_path).figures()
    assert figures
    for figure in figures.values():
        go.Figure(figure)  # raises ValueError for a property that there is not


def test_the_page_is_small(tmp_path: Path) -> None:
    page_by("report", save_played(tmp_path / "run", abandons=750))
    assert (tmp_path / "run" / "report.html").stat().st_size < 2_000_000
