"""What the measuring process of a page says of a mistake, and that it needs nobody to listen."""

import os

import pytest

from harness.errors import TargetError
from harness.web.recorder import short, tell


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("file.toml: wrong\nsay `x`\nsee there", "file.toml: wrong say `x`"),
        ("the engine ended:\n  engine: one\n  engine: two", "the engine ended: engine: two"),
        ('it died:\n  engine: {"event":"ready","pid":1}', "it died"),
    ],
)
def test_an_error_is_one_line_without_the_log(text: str, shown: str) -> None:
    assert short(TargetError(text)) == shown


def test_what_it_says_may_go_unheard() -> None:
    stdout, (listener, unheard) = os.dup(1), os.pipe()
    os.close(listener)
    os.dup2(unheard, 1)
    try:
        tell("phase", text="saving all the same")
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(unheard)
