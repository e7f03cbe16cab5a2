"""The page itself: nothing is fetched, text stays text, and it is written whole or not at all."""

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from dashboards.__main__ import main
from dashboards.page import GENERATOR, save
from tests.dashboards.pages import PAGES
from tests.dashboards.reading import page_by

MakeRun = Callable[..., Path]


@pytest.mark.parametrize(("name", "num_scripts"), [("plain", 3), ("comparison", 2), ("trend", 2)])
def test_nothing_is_fetched_and_only_our_scripts_may_run(
    tmp_path: Path, name: str, num_scripts: int
) -> None:
    page = PAGES[name](tmp_path)
    for tag, attributes, _ in page.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base"}
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    style = "".join(page.texts("style"))
    assert "url(" not in style
    assert "@import" not in style
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in page.scripts()
    ]
    assert len(hashes) == num_scripts
    assert page.policy() == (
        f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def test_only_a_page_of_ours_is_written_over(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    page = run / "page.html"
    for _ in range(2):  # the second time over the first
        assert main(["report", str(run), "-o", str(page)]) == 0
    whole = page.read_bytes()
    assert main(["report", str(run), "-o", str(run / "manifest.json")]) == 2
    assert "is not a page of walkaway" in capsys.readouterr().err
    assert (run / "manifest.json").read_bytes().startswith(b"{")
    assert page.read_bytes() == whole
    assert not list(run.glob("*.part"))


def test_a_page_that_cannot_be_finished_leaves_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    save(f"{GENERATOR.decode()} before", page)
    with pytest.raises(UnicodeEncodeError):
        save("half of it\udc80", page)
    assert page.read_text() == f"{GENERATOR.decode()} before"
    assert list(tmp_path.iterdir()) == [page]


def without_colour(trace: dict[str, object]) -> tuple[str, ...]:
    """The look of a trace to a reader who sees no colours."""
    line, marker = trace.get("line", {}), trace.get("marker", {})
    assert isinstance(line, dict)
    assert isinstance(marker, dict)
    shape = marker.get("pattern", {}).get("shape")
    return (
        str(trace["type"]),
        str(trace.get("mode")),
        str(line.get("dash", "solid")),
        str(marker.get("symbol")),
        str(shape if isinstance(shape, list) else [shape]),
    )


@pytest.mark.parametrize("name", ["ghosts", "arms", "frontier", "comparison", "trend"])
def test_no_two_marks_of_a_legend_differ_by_colour_alone(name: str, tmp_path: Path) -> None:
    for picture, figure in PAGES[name](tmp_path).figures().items():
        told = [one for one in figure["data"] if one.get("name") and one.get("showlegend", True)]
        # Some marks bear a number, which their name begins with.
        borne = {text.strip("\xa0 ") for one in figure["data"] for text in one.get("text") or ()}
        numbers = [one["name"].partition(" ")[0] for one in told]
        looks = [
            (*without_colour(one), number if number in borne else "")
            for one, number in zip(told, numbers, strict=True)
        ]
        assert len(set(looks)) == len(looks), (picture, looks)


def test_paper_keeps_together_what_belongs_together(make_run: MakeRun) -> None:
    style = "".join(page_by("report", make_run()).texts("style"))
    paper = style.rsplit("@media print", 1)[1]
    assert ".card, figure, tr, .remarks li { break-inside: avoid; }" in paper
