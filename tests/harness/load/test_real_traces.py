"""Whole traces, read and scheduled: each line is a request, at its time, as long as it says.

Those that were published are not shipped: WALKAWAY_TRACES names a folder that holds them, as .csv
and .jsonl, since formats in the wild differ from what one makes up. The made-up ones, in the same
three shapes, are read by the same tests, always.
"""

import csv
import json
import os
from pathlib import Path
from typing import Final

import pytest

from harness.workload.abandon import Expectation
from harness.workload.plan import AfterAnswerShare, Never
from harness.workload.schedule import open_trace, plan_arrival, planned_arrivals
from harness.workload.traces import TraceReplay
from tests.harness.load.made_up_traces import as_azure, as_burst_gpt, as_mooncake, conversations
from tests.harness.load.mixes import load_of, slice_of

FOLDER: Final = os.environ.get("WALKAWAY_TRACES")
KINDS: Final = (".csv", ".jsonl")
PUBLISHED: Final = sorted(
    file for file in (Path(FOLDER).iterdir() if FOLDER else ()) if file.suffix in KINDS
)
MADE_UP: Final = {"mooncake.jsonl": as_mooncake, "azure.csv": as_azure, "burst.csv": as_burst_gpt}
COLUMNS: Final = {
    "ContextTokens": "GeneratedTokens",
    "Request tokens": "Response tokens",
    "input_length": "output_length",
}
EACH_TRACE: Final = pytest.mark.parametrize(
    "trace", [*MADE_UP, *map(str, PUBLISHED)], ids=lambda name: Path(name).name
)
SPEED: Final = 4.0
LONGEST: Final = 10**7


@pytest.fixture
def file(trace: str, tmp_path: Path) -> Path:
    if trace not in MADE_UP:
        return Path(trace)
    path = tmp_path / trace
    path.write_text("".join(MADE_UP[trace](conversations(60, seed=2))), newline="")
    return path


def lengths(file: Path) -> list[tuple[int, int]]:
    """The tokens of prompt and answer of each line, by the names of its columns."""
    text = file.read_text(encoding="utf-8-sig")
    if file.suffix == ".jsonl":
        lines = [json.loads(line) for line in text.splitlines()]
    else:
        lines = list(csv.DictReader(text.splitlines()))
    (prompt,) = [name for name in COLUMNS if name in lines[0]]
    return [(int(line[prompt]), int(line[COLUMNS[prompt]])) for line in lines]


@pytest.mark.skipif(FOLDER is None, reason="WALKAWAY_TRACES names no folder of published traces")
def test_the_folder_holds_traces() -> None:
    assert PUBLISHED


@EACH_TRACE
def test_each_line_is_a_request(file: Path) -> None:
    with open_trace(str(file)) as recorded:
        read = list(recorded)
    assert [(one.prompt_tokens, one.answer_tokens) for one in read] == lengths(file)
    times_s = [one.at_s for one in read]
    assert times_s == sorted(times_s)
    assert times_s[-1] > times_s[0]


@EACH_TRACE
def test_each_whole_request_arrives_at_its_time_and_asks_for_what_was_recorded(file: Path) -> None:
    replay = TraceReplay(
        file=str(file),
        from_s=0,
        seconds=None,
        speed=SPEED,
        prompt_factor=1,
        prompt_tokens=(1, LONGEST),
        answer_tokens=LONGEST,
    )
    with open_trace(str(file)) as recorded:
        read = list(recorded)
    due_s = [(one.at_s - read[0].at_s) / SPEED for one in read if one.is_whole]
    arrivals = list(planned_arrivals(replay, seed=3))
    assert [one.offset_s for one in arrivals] == pytest.approx(due_s)

    load = load_of(slice_of(Never()), slice_of(AfterAnswerShare(share=(0.1, 0.9))))
    plans = [plan_arrival(load, one, seed=3, seen=Expectation()) for one in arrivals]
    wanted = [(prompt, answer) for prompt, answer in lengths(file) if prompt and answer]
    assert [plan.prompt_tokens for plan in plans] == [prompt for prompt, _ in wanted]
    stays = [plan.intent.planned_abandon is None for plan in plans]
    assert any(stays)
    assert not all(stays)
    for plan, is_staying, (_, answer) in zip(plans, stays, wanted, strict=True):
        assert plan.max_tokens == (answer if is_staying else load.answer_tokens)
