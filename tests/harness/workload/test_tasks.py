"""Known texts: how long they are, and that the engine's conditions end them where they should."""

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.workload.abandon import TaskPlan
from harness.workload.tasks import NUM_TEXTS, TRACE_QUANTILES, TaskText, WorkloadTask, parse_text
from reference_engine.api.bodies import CompletionBody
from reference_engine.api.openai import read_completion
from reference_engine.config import EngineConfig
from reference_engine.model.teacher import words_of
from reference_engine.model.tokenizer import WordTokenizer
from reference_engine.worker.answer import GrowingAnswer

SHARES = (0.0, 0.4, 0.95, 1.0)
LONG_PROMPT = 3000  # 0.3 of it is more than any text
TRACES = os.environ.get("WALKAWAY_TRACES")


def texts(*tasks: WorkloadTask, share: float = 0.4) -> Iterator[TaskText]:
    for task in tasks or WorkloadTask:
        yield from (TaskText(task, number, share) for number in range(NUM_TEXTS))


@pytest.mark.parametrize("share", SHARES)
def test_a_text_has_its_length_and_its_answer_ends_with_the_completing_event(share: float) -> None:
    ends = {
        WorkloadTask.CHAT: ".",
        WorkloadTask.SUMMARIZATION: ".",
        WorkloadTask.CLASSIFICATION: " positive",
        WorkloadTask.EXTRACTION: '"]',
        WorkloadTask.CODE: "\n```",
    }
    for text in texts(share=share):
        words = words_of(text.text)
        assert len(words) + 1 == text.num_tokens, "with the end of the sequence"
        answer = words[: text.num_answer]
        assert "".join(answer).endswith(ends[text.task]), text
        assert ends[text.task] not in "".join(answer[:-1])
        if text.task is WorkloadTask.EXTRACTION:
            assert isinstance(msgspec.json.decode("".join(answer)), list)
        assert len(answer) == max(4, round((1 - share) * len(words)))


def stopped_at(text: TaskText, prompt_tokens: int = LONG_PROMPT) -> int | None:
    """The number of tokens at which the engine would end the text; None: at its own end."""
    fields: dict[str, Any] = {"model": "tiny", "prompt": "p", "max_tokens": 1000}
    body = CompletionBody(**fields | text.conditions(has_tasks=True))
    tokenizer = WordTokenizer(2048)
    asked = read_completion(msgspec.json.encode(body), EngineConfig(model="tiny"), tokenizer)
    words = words_of(text.text)
    answer = GrowingAnswer(asked.sampling, prompt_tokens, hook=None, text_of=words.__getitem__)
    for number in range(len(words)):
        answer.push(number)
        if answer.end is not None:
            return number + 1
    return None


@pytest.mark.parametrize("share", SHARES[1:])
def test_the_engine_ends_a_text_where_its_answer_is_complete(share: float) -> None:
    for text in texts(WorkloadTask.EXTRACTION, WorkloadTask.CODE, share=share):
        assert stopped_at(text) == text.num_answer, text
    for text in texts(WorkloadTask.CHAT, share=share):
        assert stopped_at(text) is None, "its user leaves"
    for text in texts(WorkloadTask.CLASSIFICATION, share=share):
        assert stopped_at(text) == min(10, text.num_answer), text
    for text in texts(WorkloadTask.SUMMARIZATION, share=share):
        if text.num_answer >= 50:
            assert stopped_at(text) == text.num_answer
            assert stopped_at(text, prompt_tokens=100) == 30
        else:
            at = stopped_at(text)
            assert at is None or 50 <= at < 50 + 15, "the next sentence's end"
    for text in texts(share=share):
        whole = TaskText(text.task, text.number, share, stops_early=False)
        assert (whole.text, stopped_at(whole)) == (text.text, None)


def test_other_servers_get_no_field_that_they_do_not_know() -> None:
    for task in WorkloadTask:
        fields = TaskText(task, 0, 0.4).conditions(has_tasks=False)
        assert fields == ({"stop": ["```"]} if task is WorkloadTask.CODE else {})


def test_a_row_names_its_text() -> None:
    for text in texts():
        assert parse_text(text.plan) == text
    whole = TaskText(WorkloadTask.CODE, 3, 0.25, stops_early=False)
    assert (whole.plan, parse_text("whole:code:3:0.25")) == ("whole:code:3:0.25", whole)
    assert [parse_text(plan) for plan in ("never", "tokens:16", "first_token+2")] == [None] * 3


def test_each_text_has_a_prompt_of_its_own_with_a_length_in_the_range() -> None:
    plan = TaskPlan(plan="task", after_answer=0.4)
    sizes = [text.prompt_tokens([600, 1400]) for text in plan.texts]
    assert min(sizes) == 620
    assert max(sizes) == 1380
    prompts = [text.prompt(size) for text, size in zip(plan.texts, sizes, strict=True)]
    assert [len(prompt) for prompt in prompts] == sizes
    others = [text.prompt(700) for text in texts(share=0.6)]
    assert len({*prompts, *others}) == 2 * len(prompts)


@pytest.mark.skipif(TRACES is None, reason="WALKAWAY_TRACES names no folder of traces")
def test_the_quantiles_are_those_of_the_trace() -> None:
    file = Path(TRACES or "") / "AzureLLMInferenceTrace_conv.csv"
    if not file.exists():
        pytest.skip(f"{file} is not there")
    with file.open() as lines:
        found = sorted(int(row["GeneratedTokens"]) for row in csv.DictReader(lines))
    last = len(found) - 1
    assert (
        tuple(found[round(n * last / NUM_TEXTS)] for n in range(NUM_TEXTS + 1)) == TRACE_QUANTILES
    )
    mean = sum(text.num_tokens for text in texts(WorkloadTask.CODE)) / NUM_TEXTS
    assert mean == pytest.approx(sum(found) / len(found), rel=0.04)
