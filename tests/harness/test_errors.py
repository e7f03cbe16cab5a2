"""Parts of messages: reasons of the system in words, and the nearest names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from harness.errors import did_you_mean, in_words

SOURCES = [path for top in ("harness", "dashboards") for path in sorted(Path(top).rglob("*.py"))]
OF_THE_SYSTEM = {"OSError", "ConnectionError", "FileNotFoundError", "PermissionError"}


def test_a_reason_of_the_system_has_no_number_and_no_path(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    reasons = []
    for read in (
        lambda: (tmp_path / "none").read_bytes(),
        lambda: pq.ParquetFile(tmp_path / "none"),
        lambda: tmp_path.read_bytes(),
        lambda: (tmp_path / "latin").read_text("utf-8"),
    ):
        with pytest.raises((OSError, UnicodeDecodeError)) as raised:
            read()
        reasons.append(in_words(raised.value))
    missing = "No such file or directory"
    assert reasons[:3] == [missing, missing, "Is a directory"]
    assert reasons[3] == "it is not text in UTF-8 (at byte 3)"
    assert in_words(TimeoutError("timed out")) == "timed out"
    assert in_words(ConnectionResetError()) == "ConnectionResetError"


def bare_reasons(path: Path) -> Iterator[str]:
    """Where the message of such an error is put into a text as it is, with its number."""
    for handler in ast.walk(ast.parse(path.read_text())):
        if not isinstance(handler, ast.ExceptHandler) or handler.type is None:
            continue
        names = {one.id for one in ast.walk(handler.type) if isinstance(one, ast.Name)}
        if not names & OF_THE_SYSTEM:
            continue
        for one in ast.walk(handler):
            shown = one.value if isinstance(one, ast.FormattedValue) else None
            if isinstance(shown, ast.Name) and shown.id == handler.name:
                yield f"{path}:{shown.lineno}"


def test_no_message_shows_the_number_of_an_error() -> None:
    assert [place for path in SOURCES for place in bare_reasons(path)] == []


def test_the_nearest_names_are_offered() -> None:
    known = ["stay_share", "stay_tokens", "think"]
    assert did_you_mean("thnik", known) == "; did you mean `think`?"
    assert did_you_mean("stay_shar", known) == "; did you mean `stay_share` or `stay_tokens`?"
    assert did_you_mean("vanish", known) == ""
