"""Recorded traffic: the three formats, their mistakes, and the replayed requests.

Published traces are not shipped: WALKAWAY_TRACES names a folder that holds them, as .csv and
.jsonl, since formats in the wild differ from what one makes up. Made-up traces in the same three
shapes are read by the same tests, always.
"""

import csv
import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

import workloads
from harness.errors import ConfigError
from harness.workload.abandon import AbandonPlan, LastTokenPlan, SharePlan
from harness.workload.arrivals import TraceArrivals
from harness.workload.load import AbandonLoad
from harness.workload.observed_latency import ObservedLatency
from harness.workload.schedule import (
    Arrival,
    longest_prompt,
    open_trace,
    planned_arrivals,
    replayed,
    tally,
)
from harness.workload.traces import UNITS_A_SECOND, Recorded, read_trace
from tests.harness.workload.made_up_traces import (
    as_azure,
    as_burst_gpt,
    as_mooncake,
    conversations,
)
from tests.harness.workload.mixes import STAY, load_of, tokens

MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 600, "output_length": 7, "hash_ids": [0, 3]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
"""


def read(text: str) -> list[Recorded]:
    return list(read_trace(text.splitlines(keepends=True), name="trace"))


def trace_of(**changes: Any) -> TraceArrivals:
    return TraceArrivals(**{"kind": "trace", "file": "trace", **changes})


def limits(prompts: tuple[int, int] = (1, 10_000), answers: int = 1000) -> AbandonLoad:
    return load_of(STAY, prompt_tokens=list(prompts), stay_tokens=answers)


def test_spaces_after_commas_empty_lines_and_other_columns_do_no_harm() -> None:
    spaced = (
        "\n\nTIMESTAMP, Id, ContextTokens, GeneratedTokens\n\n2024-05-10 00:00:00+00:00, x, 1, 2\n"
    )
    assert [(one.prompt_tokens, one.answer_tokens) for one in read(spaced)] == [(1, 2)]
    assert len(read("\n" + MOONCAKE.replace("\n", "\n\n"))) == 2
    assert [one.at_s for one in read(MOONCAKE.replace("2500", "0"))] == [0, 0]


def times(*stamps: float) -> str:
    lines = ({"timestamp": t, "input_length": 5, "output_length": 5} for t in stamps)
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize(
    ("stamps", "why"),
    [
        ((0, 1, 1, 3), "in milliseconds, 1,000 requests would come a second"),
        ((7, 20, 46), "in milliseconds, 51 requests would come a second"),
        ((0, 2500.5), "some have a fraction"),
        ((7, 20, 47), None),  # 50 a second
        ((0, 100, 200), None),
        ((3.0, 60_000.0), None),  # whole, however they are written
        ((4, 4, 4), None),  # all at once, in any unit
        ((0.5,), None),
    ],
)
def test_times_that_may_be_seconds_are_refused_without_a_unit(
    stamps: tuple[float, ...], why: str | None
) -> None:
    if why is None:
        assert [one.at_s for one in read(times(*stamps))] == [t / 1e3 for t in stamps]
    else:
        with pytest.raises(ConfigError, match=rf"{why}; say which: `arrivals.time_unit`"):
            read(times(*stamps))
    for unit, size in UNITS_A_SECOND.items():
        told = read_trace(times(*stamps).splitlines(), name="trace", time_unit=unit)
        assert [one.at_s for one in told] == [t / size for t in stamps]


def test_a_unit_is_for_times_that_are_numbers(tmp_path: Path) -> None:
    burst = "".join(as_burst_gpt([Recorded(at_s=2000, prompt_tokens=1, answer_tokens=1)]))
    (one,) = read_trace(burst.splitlines(), name="trace", time_unit="ms")
    assert one.at_s == 2.0
    with pytest.raises(ConfigError, match="its times are dates"):
        list(read_trace(AZURE.splitlines(), name="trace", time_unit="s"))
    path = tmp_path / "trace.jsonl"
    path.write_text(times(0, 1, 2))
    trace = trace_of(file=str(path), time_unit="s")
    assert [one.offset_s for one in planned_arrivals(trace, limits(), seed=1)] == [0, 1, 2]


def test_a_field_without_end_is_a_mistake() -> None:
    for text in (AZURE.replace("109", "1" * 140_000), "x" * 140_000):
        with pytest.raises(ConfigError, match=r"trace:\d: field larger than"):
            read(text)


def test_a_window_is_cut_before_time_is_scaled() -> None:
    requests = [Recorded(at_s=100 + t, prompt_tokens=1, answer_tokens=1) for t in range(10)]
    trace = trace_of(from_s=2.0, seconds=4.0, speed=2.0)
    assert [offset for offset, _ in replayed(requests, trace, limits())] == [0, 0.5, 1, 1.5]


def test_lengths_are_multiplied_then_cut_and_counted() -> None:
    requests = [
        Recorded(at_s=0, prompt_tokens=1001, answer_tokens=50, pages=(7, 8)),
        Recorded(at_s=1, prompt_tokens=100, answer_tokens=900),
        Recorded(at_s=2, prompt_tokens=10, answer_tokens=5),
    ]
    trace, load = trace_of(prompt_factor=0.5), limits((8, 400), 100)
    asked = [one for _, one in replayed(requests, trace, load)]
    assert [one.prompt_tokens for one in asked] == [400, 50, 8]
    assert [one.answer_tokens for one in asked] == [50, 100, 5]
    assert (asked[0].pages, asked[0].page_tokens) == ((7, 8), 256)
    found = tally(requests, trace, load)
    assert (found.prompts_cut, found.prompt_tokens_cut, found.prompt_tokens) == (1, 101, 556)
    assert (found.answers_cut, found.answer_tokens_cut, found.answer_tokens) == (1, 800, 955)
    assert longest_prompt(requests, trace) == 1001


def test_a_file_is_read_as_far_as_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\ufeff" + MOONCAKE + "broken\n")
    schedule = planned_arrivals(trace_of(file=str(path), seconds=2.0), limits(), seed=1)
    arrival = next(schedule)
    assert (arrival.number, arrival.offset_s) == (0, 0)
    assert not list(schedule)  # the next is beyond the window: what follows it is never read


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"TIMESTAMP\xff\xfe")
    for name in ("nowhere", "bytes"):
        with (
            pytest.raises(ConfigError, match=f"{name}: the trace cannot be read"),
            open_trace(str(tmp_path / name)) as requests,
        ):
            list(requests)


def test_the_trace_that_ships_is_the_one_that_is_made_up_here() -> None:
    shipped = Path(workloads.__file__).with_name("made_up_trace.jsonl")
    assert shipped.read_text() == "".join(as_mooncake(conversations(60, seed=1)))


SEEN: Final = ObservedLatency()
HALF: Final = SharePlan(plan="answer_share", share=[0.5, 0.5])
RACE: Final = LastTokenPlan(plan="last_token")


@pytest.mark.parametrize(
    ("plan", "answer", "n", "planned", "max_tokens"),
    [
        (STAY, 33, 1, None, 33),
        (tokens(8), 33, 1, 8, 1000),  # asks for more, so that a ghost shows
        (tokens(33), 33, 1, None, 33),  # would leave after the recorded end: reads to it
        (tokens(33), 33, 2, 33, 1000),
        (HALF, 30, 1, 15, 1000),
        (HALF, 1, 1, None, 1),
        (RACE, 1, 1, None, 1),  # no race for the last of one token
        (RACE, 9, 1, 7, 9),
    ],
)
def test_a_replayed_request_is_left_by_its_recorded_answer(
    plan: AbandonPlan, answer: int, n: int, planned: int | None, max_tokens: int
) -> None:
    asked = Recorded(at_s=0, prompt_tokens=77, answer_tokens=answer)
    load = load_of(plan.model_copy(update={"n": n}))
    spec = Arrival(number=0, offset_s=0, replayed=asked).draw_request(load, seed=7, seen=SEEN)
    assert (spec.prompt_tokens, spec.planned_abandon) == (77, planned)
    assert spec.max_tokens == max_tokens
    assert (spec.way is None) == (planned is None)
    assert (spec.pause == "race") == (plan is RACE and planned is not None)


FOLDER: Final = os.environ.get("WALKAWAY_TRACES")
PUBLISHED: Final = sorted(
    file for file in (Path(FOLDER).iterdir() if FOLDER else ()) if file.suffix in (".csv", ".jsonl")
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


@EACH_TRACE
def test_each_line_is_a_request_at_its_time_that_asks_for_what_was_recorded(file: Path) -> None:
    with open_trace(str(file)) as recorded:
        read = list(recorded)
    assert [(one.prompt_tokens, one.answer_tokens) for one in read] == lengths(file)
    times_s = [one.at_s for one in read]
    assert times_s == sorted(times_s)
    if file.name in MADE_UP:
        written = conversations(60, seed=2)
        assert [at_s - times_s[0] for at_s in times_s] == pytest.approx(
            [one.at_s for one in written]
        )
        has_pages = file.name == "mooncake.jsonl"
        assert [one.pages for one in read] == [one.pages if has_pages else () for one in written]

    load = load_of(STAY, prompt_tokens=[1, LONGEST], stay_tokens=LONGEST)
    trace = trace_of(file=str(file), speed=SPEED)
    arrivals = list(planned_arrivals(trace, load, seed=3))
    due_s = [(one.at_s - times_s[0]) / SPEED for one in read if one.is_whole]
    assert [one.offset_s for one in arrivals] == pytest.approx(due_s)
    specs = [one.draw_request(load, seed=3, seen=SEEN) for one in arrivals]
    wanted = [(prompt, answer) for prompt, answer in lengths(file) if prompt and answer]
    assert [(spec.prompt_tokens, spec.max_tokens) for spec in specs] == wanted
