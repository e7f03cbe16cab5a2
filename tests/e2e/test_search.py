"""`walkaway search` as it is typed, on scripted servers whose truth is known."""

import json
import subprocess
from pathlib import Path

import pytest

from harness.run.process import python_module
from harness.store.search_result import SearchResult, read_search
from tests.harness.conform.slot_server import Manners, serving

TARGET = """
description = "A scripted server with slots"
stream_options = { include_usage = true }
bytes_are_tokens = true
slots_from = "workload"
settle_s = 0.5
"""
SCHEDULE = {
    "seed": 1,
    "bystanders": 1,
    "visits": [
        {"answer": 300, "leave": {"at": 2}},
        {"after": 0, "repeats": 0, "answer": 8},
    ],
}


def searched(folder: Path, manners: Manners) -> tuple[int, SearchResult]:
    (folder / "target.toml").write_text(TARGET)
    (folder / "schedule.json").write_text(json.dumps(SCHEDULE))
    with serving(manners, folder / "server.log") as url:
        flags = ["--target", url, "--engine", str(folder / "target.toml"), "--minutes", "1"]
        flags += ["--schedule", str(folder / "schedule.json"), "--out", str(folder / "out")]
        done = subprocess.run(
            [*python_module("harness", "search"), *flags],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    return done.returncode, read_search(folder / "out")


@pytest.mark.e2e
def test_a_slot_that_is_lost_is_found_and_its_files_are_written(tmp_path: Path) -> None:
    code, result = searched(tmp_path, Manners(step_s=0.005, hold_s=-1))
    assert code == 3
    (one,) = result.findings
    assert one.broken == "lost"
    assert "1 of 4 slots" in one.sentence
    assert "came back" in result.end, "it cannot be tried again without a fresh start"
    place = tmp_path / "out" / one.folder
    assert {file.name for file in place.iterdir()} == {
        "issue.md",
        "repro.py",
        "schedule.json",
        "wire.jsonl",
    }
    assert one.folder in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.e2e
def test_nothing_is_found_on_a_server_that_is_right(tmp_path: Path) -> None:
    code, result = searched(tmp_path, Manners(step_s=0.005))
    assert code == 0
    assert result.played == 5
    assert not result.findings
    assert result.end == "the schedule broke nothing in 5 plays"
