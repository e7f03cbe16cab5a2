"""The pages: what each kind shows, that nothing is fetched, and how a file is written."""

import base64
import hashlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import plotly.graph_objects as go
import pytest

from dashboards.__main__ import main
from dashboards.page import GENERATOR, save
from harness.conform.config import all_cases
from harness.conform.gateway.cases import gateway_cases
from harness.run.recipes import load_recipes
from harness.workload.workload import SHIPPED_TARGETS, shipped
from tests.conftest import Snapshot
from tests.dashboards.pages import PAGES
from tests.dashboards.reading import Page
from tests.made_up.conform import save_engines
from tests.made_up.played import save_played

RESULTS = Path(__file__).parents[2] / "results"


class Made(NamedTuple):
    name: str
    folder: Path
    page: Page


@pytest.fixture(scope="module", params=PAGES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    name, folder = str(request.param), tmp_path_factory.mktemp("page")
    return Made(name, folder, PAGES[name](folder))


def test_a_page_tells_what_it_told_before(made: Made, snapshot: Snapshot) -> None:
    snapshot(f"pages/{made.name}", made.page.content().replace(str(made.folder), "FOLDER"))


def test_plotly_knows_every_word_of_the_figures(made: Made) -> None:
    for figure in made.page.figures().values():
        go.Figure(figure)  # raises ValueError for a property that there is not


def test_no_figure_brings_plotlys_own_look(made: Made) -> None:
    assert not any("layout" in one["layout"]["template"] for one in made.page.figures().values())


def test_the_page_is_small(made: Made) -> None:
    assert all(page.stat().st_size < 2_000_000 for page in made.folder.rglob("*.html"))


def test_nothing_is_fetched_and_only_our_scripts_may_run(made: Made) -> None:
    for tag, attributes, _ in made.page.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base"}
        assert "src" not in attributes
        href = attributes.get("href") or "#"
        is_ours = href.startswith("#") or re.fullmatch(r"[\w-]+/(index\.html#[\w-]+|[\w.]+)", href)
        assert is_ours or (tag == "a" and href.startswith("https://github.com/"))
    style = "".join(made.page.texts("style"))
    assert "url(" not in style
    assert "@import" not in style
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in made.page.scripts()
    ]
    assert len(hashes) in (0, 1, 2, 3)
    assert made.page.policy() == (
        f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def without_colour(trace: dict[str, object]) -> tuple[str, ...]:
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


def test_no_two_marks_of_a_legend_differ_by_colour_alone(made: Made) -> None:
    for picture, figure in made.page.figures().items():
        if figure["layout"].get("showlegend") is False:
            continue
        told = [one for one in figure["data"] if one.get("name") and one.get("showlegend", True)]
        # Some marks bear a number, which their name begins with.
        borne = {text.strip("\xa0 ") for one in figure["data"] for text in one.get("text") or ()}
        numbers = [one["name"].partition(" ")[0] for one in told]
        looks = [
            (*without_colour(one), number if number in borne else "")
            for one, number in zip(told, numbers, strict=True)
        ]
        assert len(set(looks)) == len(looks), (picture, looks)


def test_pages_of_conformance_need_what_a_light_installation_has() -> None:
    code = "import sys, dashboards.__main__, dashboards.conform_page, dashboards.matrix\n"
    loaded = subprocess.check_output(
        [sys.executable, "-c", f"{code}print(*sys.modules)"], text=True
    )
    assert not {"plotly", "numpy", "pandas"} & set(loaded.split())


def test_only_a_page_of_ours_is_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_played(tmp_path / "run")
    page = run / "page.html"
    for _ in range(2):  # the second time over the first
        assert main(["report", str(run), "-o", str(page)]) == 0
    whole = page.read_bytes()
    assert main(["report", str(run), "-o", str(run / "manifest.json")]) == 2
    assert "exists already and is no earlier output" in capsys.readouterr().err
    assert (run / "manifest.json").read_bytes().startswith(b"{")
    assert page.read_bytes() == whole
    assert main(["report", str(run), "-o", "-"]) == 0
    assert capsys.readouterr().out.encode() == whole
    assert not list(run.glob("*.part"))


def test_a_page_that_cannot_be_finished_leaves_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    save(f"{GENERATOR.decode()} before", page)
    with pytest.raises(UnicodeEncodeError):
        save("half of it\udc80", page)
    assert page.read_text() == f"{GENERATOR.decode()} before"
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize(
    ("kept", "cases", "servers"),
    [
        ("engines", {one.id for one in all_cases()}, {*shipped(SHIPPED_TARGETS)}),
        ("gateways", {one.rpartition("/")[0] for one in gateway_cases()}, {*load_recipes()}),
    ],
)
def test_the_kept_explanations_are_of_cases_and_servers_that_there_are(
    tmp_path: Path, kept: str, cases: set[str], servers: set[str]
) -> None:
    file = RESULTS / kept / "explanations.toml"
    files = list(map(str, save_engines(tmp_path)))
    page = ["-o", str(tmp_path / "m.html"), "--explanations", str(file)]
    assert main(["matrix", *files, *page]) == 0
    explanations = tomllib.loads(file.read_text())["explanation"]
    assert {one["case"] for one in explanations} <= cases
    assert {one["engine"] for one in explanations} <= servers


def test_explanations_that_cannot_be_read_are_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = save_engines(tmp_path)
    for wrong in ("[[explanation", '[[explanation]]\nengine = "vllm"\nwhy = "?"'):
        (tmp_path / "explanations.toml").write_text(wrong)
        assert main(["matrix", *map(str, files), "-o", str(tmp_path / "m.html")]) == 2
        assert "explanations.toml: " in capsys.readouterr().err
    assert main(["matrix", str(tmp_path), "-o", str(tmp_path / "m.html")]) == 2
    assert main(["conform", str(tmp_path)]) == 2
    assert "conform.json: cannot be read: No such file" in capsys.readouterr().err
