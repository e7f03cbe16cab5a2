"""What the measuring process of a page says of a mistake, and that it needs nobody to listen."""

import argparse
import json
import os
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from harness.errors import TargetError
from harness.load.options import add_arguments, load_plan
from harness.web.recorder import WatchedLoad, short, tell


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


def test_another_number_of_users_is_noted_and_shown(capfd: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group())
    options = parser.parse_args([])
    options.num_users, options.run_time, options.host = 4, 60, None
    plan = load_plan(options)
    said = deque([{"note": "the page set 8 users, 1 a second", "users": 8}, {"stop": True}])
    commands: Any = SimpleNamespace(next=lambda _: said.popleft())
    load, kept = WatchedLoad(commands), set[str]()
    measurement: Any = SimpleNamespace(notes=kept)
    load.measurement = measurement
    assert not load._is_told_to_stop(plan, 0)
    assert load._is_told_to_stop(plan, 0)
    assert [text.endswith("the page set 8 users, 1 a second") for text in kept] == [True]
    told = json.loads(capfd.readouterr().out)
    assert (told["event"], told["text"]) == ("phase", "load: 8 users for 60 s")
