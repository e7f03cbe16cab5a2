"""A page is written whole or not at all, and over nothing but such a page."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dashboards.__main__ import main
from dashboards.page import GENERATOR, save

MakeRun = Callable[..., Path]


def test_only_a_page_of_ours_is_written_over(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    page = run / "page.html"
    for _ in range(2):  # the second time over the first
        assert main(["report", str(run), "-o", str(page)]) == 0
    whole = page.read_bytes()
    assert main(["report", str(run), "-o", str(run / "manifest.json")]) == 2
    assert "is no page of walkaway" in capsys.readouterr().err
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
