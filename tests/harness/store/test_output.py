"""Files that a user names for an output: what is written over, and what is refused, in one rule."""

import os
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.store.output import STDOUT, check_output, write_output

MARK = b"# made by us"
MADE = MARK + b"\nrows\n"


def test_a_dash_is_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    check_output(STDOUT, ours=None)
    write_output(STDOUT, MADE, ours=None)
    assert capfdbinary.readouterr().out == MADE
    assert not STDOUT.exists()


def test_an_output_is_written_over_its_like_and_over_an_empty_file(tmp_path: Path) -> None:
    new, empty = tmp_path / "not" / "yet" / "there", tmp_path / "empty"
    empty.touch()
    for file in (new, empty):
        for content in (MADE, MADE + b"more"):
            write_output(file, content, ours=MARK)
            assert file.read_bytes() == content
    assert sorted(tmp_path.iterdir()) == [empty, tmp_path / "not"], "no part of a file is left"


@pytest.mark.parametrize(
    ("ours", "may_overwrite", "said"),
    [
        (MARK, None, "exists already and is no earlier output .* or move it away"),
        (MARK, False, "exists already and is no earlier output .* or replace it with --force"),
        (None, False, "exists already; name another file, or replace it with --force"),
    ],
)
def test_what_is_not_ours_is_kept(
    ours: bytes | None, may_overwrite: bool | None, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "notes"
    file.write_text("a user's")
    for link in (file, tmp_path / "link"):
        if link != file:
            link.symlink_to(file)
        with pytest.raises(ConfigError, match=said):
            check_output(link, ours=ours, may_overwrite=may_overwrite)
        with pytest.raises(ConfigError, match=said):
            write_output(link, MADE, ours=ours, may_overwrite=may_overwrite)
    assert file.read_text() == "a user's"
    write_output(file, MADE, ours=ours, may_overwrite=True)
    assert file.read_bytes() == MADE


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for place, why in (
        (tmp_path, "it is a folder; name a file in it"),
        (file / "below", "Not a directory; name another place"),
        (Path("/proc/none"), "No such file or directory; name another place"),
    ):
        with pytest.raises(ConfigError, match=f"^{place}: cannot be written: {why}$"):
            check_output(place, ours=MARK)


def test_a_device_is_written_as_it_stands() -> None:
    check_output(Path(os.devnull), ours=MARK)
    write_output(Path(os.devnull), MADE, ours=MARK)
    assert Path(os.devnull).is_char_device()
