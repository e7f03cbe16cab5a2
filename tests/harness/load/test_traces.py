"""Recorded traffic: the three formats, their mistakes, and how long a replayed request is."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import workloads
from harness.errors import ConfigError
from harness.workload.schedule import open_trace, planned_arrivals
from harness.workload.traces import (
    Recorded,
    TraceReplay,
    longest_prompt,
    read_trace,
    replayed,
    tally,
)
from tests.harness.load.made_up_traces import as_azure, as_burst_gpt, as_mooncake, conversations

MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 600, "output_length": 7, "hash_ids": [0, 3]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
"""
BURST_GPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""


def read(text: str) -> list[Recorded]:
    return list(read_trace(text.splitlines(keepends=True), name="trace"))


def replay_of(
    *,
    file: str = "trace",
    from_s: float = 0,
    seconds: float | None = None,
    speed: float = 1,
    factor: float = 1,
    prompts: tuple[int, int] = (1, 10_000),
    answers: int = 1000,
) -> TraceReplay:
    return TraceReplay(
        file=file,
        from_s=from_s,
        seconds=seconds,
        speed=speed,
        prompt_factor=factor,
        prompt_tokens=prompts,
        answer_tokens=answers,
    )


def test_mooncake_has_milliseconds_and_pages() -> None:
    first, second = read(MOONCAKE)
    assert first == Recorded(at_s=0, prompt_tokens=1100, answer_tokens=50, pages=(0, 1, 2))
    assert (second.at_s, second.pages) == (2.5, (0, 3))


def test_azure_has_dates() -> None:
    first, second = read(AZURE)
    assert (first.prompt_tokens, first.answer_tokens) == (374, 44)
    assert second.at_s - first.at_s == pytest.approx(4.314579, abs=1e-5)


def test_burst_gpt_has_failures_that_are_left_out_and_counted() -> None:
    requests = read(BURST_GPT)
    assert [one.at_s for one in requests] == [5, 45, 118]
    assert [offset for offset, _ in replayed(requests, replay_of())] == [0, 113]
    found = tally(requests, replay_of())
    assert (found.requests, found.left_out) == (2, 1)


def test_spaces_after_commas_empty_lines_and_other_columns_do_no_harm() -> None:
    spaced = (
        "\n\nTIMESTAMP, Id, ContextTokens, GeneratedTokens\n\n2024-05-10 00:00:00+00:00, x, 1, 2\n"
    )
    assert [(one.prompt_tokens, one.answer_tokens) for one in read(spaced)] == [(1, 2)]
    assert len(read("\n" + MOONCAKE.replace("\n", "\n\n"))) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace: the file is empty"),
        ("\nwhat is this\n", "trace:2: neither Mooncake's JSON lines nor a CSV"),
        ("TIMESTAMP,Tokens\n", "trace:1: neither"),
        (MOONCAKE + "{}\n", "trace:3: Object missing required field `timestamp`"),
        (MOONCAKE + '{"timestamp": 3\n', "trace:3: "),
        (MOONCAKE.replace("600", '"600"'), r"trace:2: Expected `int`.*\$.input_length"),
        (MOONCAKE.replace("600", "-1"), "trace:2: `input_length` is -1, not a number of tokens"),
        (
            MOONCAKE.replace("2500", "-2500"),
            "trace:2: this request came 2.5 s before the one above",
        ),
        (AZURE.replace("374", "many"), "trace:2: `ContextTokens` is 'many', not a number"),
        (AZURE.replace("109", ""), "trace:3: `GeneratedTokens` is '', not a number"),
        (AZURE.replace(",109", ""), "trace:3: `GeneratedTokens` is '', not a number"),
        (AZURE.replace("109", "109,1"), "trace:3: more fields than the header has columns"),
        (AZURE.replace("2023-11-16 18:15:50", "soon"), "trace:3: `TIMESTAMP` is 'soon"),
        pytest.param(
            AZURE.replace("109", "1" * 140_000), "trace:3: field larger than", id="long field"
        ),
        pytest.param("x" * 140_000, "trace:1: field larger than", id="long first field"),
        (BURST_GPT.replace("45,", "nan,"), "trace:3: `Timestamp` is 'nan', not a time"),
        (BURST_GPT.replace("417", "4.5"), "trace:4: `Request tokens` is '4.5', not a number"),
    ],
)
def test_a_mistake_is_said_with_file_line_and_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_a_window_is_cut_before_time_is_scaled() -> None:
    requests = [Recorded(at_s=100 + t, prompt_tokens=1, answer_tokens=1) for t in range(10)]
    replay = replay_of(from_s=2, seconds=4, speed=2)
    assert [offset for offset, _ in replayed(requests, replay)] == [0, 0.5, 1, 1.5]


def test_lengths_are_multiplied_then_cut_and_it_is_counted() -> None:
    requests = [
        Recorded(at_s=0, prompt_tokens=1001, answer_tokens=50, pages=(7, 8)),
        Recorded(at_s=1, prompt_tokens=100, answer_tokens=900),
        Recorded(at_s=2, prompt_tokens=10, answer_tokens=5),
    ]
    replay = replay_of(factor=0.5, prompts=(8, 400), answers=100)
    asked = [one for _, one in replayed(requests, replay)]
    assert [one.prompt_tokens for one in asked] == [400, 50, 8]
    assert [one.answer_tokens for one in asked] == [50, 100, 5]
    assert (asked[0].pages, asked[0].page_tokens) == ((7, 8), 256)
    found = tally(requests, replay)
    assert (found.prompts_cut, found.prompt_tokens_cut, found.prompt_tokens) == (1, 101, 556)
    assert (found.answers_cut, found.answer_tokens_cut, found.answer_tokens) == (1, 800, 955)
    assert longest_prompt(requests, replay) == 1001


def test_a_file_is_read_as_far_as_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\ufeff" + MOONCAKE + "broken\n")
    schedule = planned_arrivals(replay_of(file=str(path), seconds=2), seed=1)
    arrival = next(schedule)
    assert (arrival.number, arrival.offset_s) == (0, 0)
    assert not list(schedule)  # the next is beyond the window: what follows it is never read


def test_a_file_that_is_not_there_or_no_text_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"TIMESTAMP\xff\xfe")
    for name in ("nowhere", "bytes"):
        with (
            pytest.raises(ConfigError, match=f"{name}: the trace cannot be read"),
            open_trace(str(tmp_path / name)) as requests,
        ):
            list(requests)


@pytest.mark.parametrize("write", [as_mooncake, as_azure, as_burst_gpt])
def test_what_was_written_in_a_format_is_read_from_it(
    write: Callable[[list[Recorded]], Iterator[str]],
) -> None:
    written = conversations(50, seed=3)
    found = list(read_trace(write(written), name="trace"))
    begin_s = found[0].at_s
    assert [one.at_s - begin_s for one in found] == pytest.approx([one.at_s for one in written])
    assert [(one.prompt_tokens, one.answer_tokens) for one in found] == [
        (one.prompt_tokens, one.answer_tokens) for one in written
    ]
    assert [one.pages for one in found] == [
        one.pages if write is as_mooncake else () for one in written
    ]


def test_the_trace_that_ships_is_the_one_that_is_made_up_here() -> None:
    shipped = Path(workloads.__file__).with_name("made_up_trace.jsonl")
    assert shipped.read_text() == "".join(as_mooncake(conversations(60, seed=1)))
