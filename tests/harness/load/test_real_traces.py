"""Traces as they were published, read whole: formats in the wild differ from what one makes up.

They are not shipped. WALKAWAY_TRACES names a folder that holds them, as .csv and .jsonl.
"""

import csv
import json
import os
from pathlib import Path

import pytest

from harness.load.schedule import open_trace

FOLDER = os.environ.get("WALKAWAY_TRACES")

pytestmark = pytest.mark.skipif(FOLDER is None, reason="WALKAWAY_TRACES names no folder of traces")


def files(kind: str) -> list[Path]:
    found = sorted(Path(FOLDER or "").glob(f"*.{kind}"))
    assert found, f"no .{kind} in WALKAWAY_TRACES"
    return found


def lengths(file: Path) -> list[tuple[int, int]]:
    with open_trace(str(file)) as recorded:
        all_of_it = list(recorded)
    times_s = [one.at_s for one in all_of_it]
    assert times_s == sorted(times_s)
    return [(one.prompt_tokens, one.answer_tokens) for one in all_of_it]


def test_each_line_of_mooncake_is_a_request() -> None:
    for file in files("jsonl"):
        asked = [json.loads(line) for line in file.read_text().splitlines()]
        assert lengths(file) == [(one["input_length"], one["output_length"]) for one in asked]


def test_each_line_of_azure_is_a_request() -> None:
    for file in files("csv"):
        with file.open(encoding="utf-8-sig", newline="") as text:
            asked = list(csv.DictReader(text))
        expected = [(int(one["ContextTokens"]), int(one["GeneratedTokens"])) for one in asked]
        assert lengths(file) == expected
