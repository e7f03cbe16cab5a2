"""Early stopping as a client sees it: an engine with a teacher, asked over HTTP."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.reference_engine.running_engine import RunningEngine

TEXTS = {
    "json": '{"a": "}"} and some more',
    "label": " Positive, since it praises the food, the room, and all else",
    "loop": "one two three four five six seven eight" + " again and again" * 30,
    "long": "word " * 200,
    "poor": "fine fine poor fine",
}
UNSURE = {"prompt": "unsure", "text": "word " * 40, "probs": [1.0] * 10 + [0.01] * 30}
HOOK = "def is_poor(text, token_ids):\n    return text.endswith('poor')\n"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    folder = tmp_path_factory.mktemp("teacher")
    lines = [*({"prompt": name, "text": text} for name, text in TEXTS.items()), UNSURE]
    (folder / "teacher.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "hook_of_a_test.py").write_text(HOOK)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(folder))
        flags = ["--runner", "simulated", "--sim-fixed-ms", "1", "--max-num-seqs", "1"]
        teacher = ["--teacher", str(folder / "teacher.jsonl")]
        engine = RunningEngine(*flags, *teacher, "--quality-hook", "hook_of_a_test:is_poor")
    yield engine
    assert engine.stop() == 0


def ask(engine: RunningEngine, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 100, **fields}
    answer: dict[str, Any] = httpx.post(f"{engine.url}/v1/completions", json=body).json()
    return answer


def chunks(engine: RunningEngine, prompt: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], **fields}
    url = f"{engine.url}/v1/chat/completions"
    with httpx.stream("POST", url, json={"stream": True, **body}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


CASES = [
    ("json", {"task": "extraction"}, "extraction", '{"a": "}"}', 9),
    ("label", {"task": "classification", "labels": ["positive"]}, "classification", " Positive", 1),
    ("label", {"task": "classification"}, "classification", TEXTS["label"][:46], 10),
    ("long", {"task": "summarization"}, "summarization", "word " * 20, 20),
    ("loop", {"repetition": True}, "repetition", None, 8 + 4 * 3),
    ("unsure", {"low_confidence": True}, "low_confidence", None, 15),
    ("poor", {}, "quality", "fine fine poor", 3),
]


@pytest.mark.parametrize(("prompt", "wanted", "condition", "text", "num_tokens"), CASES)
def test_each_condition_ends_a_whole_and_a_streamed_answer(
    engine: RunningEngine,
    prompt: str,
    wanted: dict[str, Any],
    condition: str,
    text: str | None,
    num_tokens: int,
) -> None:
    early = {"condition": condition, "tokens_saved": 100 - num_tokens}
    answer = ask(engine, prompt, early_stop=wanted)
    [choice] = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "early_stop")
    assert choice["early_stop"] == answer["early_stop"] == early
    assert answer["usage"]["completion_tokens"] == num_tokens
    *_, last = parts = chunks(engine, prompt, early_stop=wanted, max_tokens=100)
    assert last["early_stop"] == last["choices"][0]["early_stop"] == early
    streamed = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert streamed == choice["text"]
    assert text is None or streamed.strip() == text.strip()


def test_off_by_default(engine: RunningEngine) -> None:
    answer = ask(engine, "json")
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXTS["json"], "stop")
    assert choice["stop_reason"] is None
    assert "early_stop" not in answer


def test_stop_strings_and_stop_tokens_have_their_reasons(engine: RunningEngine) -> None:
    words = ["{", '"', "a", '"', ":", ' "', "}"]  # the teacher's first: ids from the vocabulary on
    third = 2048 + words.index("a")
    answer = ask(engine, "json", stop=["some"])
    assert answer["choices"][0]["stop_reason"] == "some"
    assert "early_stop" not in answer
    answer = ask(engine, "json", stop_token_ids=[third])
    assert answer["choices"][0]["text"] == '{"'
    assert answer["choices"][0]["stop_reason"] == third
    assert answer["early_stop"] == {"condition": "stop_sequence", "tokens_saved": 97}
    answer = ask(engine, "json", stop_token_sequences=[[third, third], [third - 1, third]])
    assert answer["choices"][0]["text"] == "{"
    assert answer["choices"][0]["stop_reason"] == "early_stop"


def test_each_of_n_answers_stops_and_the_slot_goes_to_the_next_schedule(
    engine: RunningEngine,
) -> None:
    """One slot: the second answer waits for the first one's."""
    answer = ask(engine, "long", n=2, early_stop={"task": "summarization"})
    early = {"condition": "summarization", "tokens_saved": 80}
    assert [choice["early_stop"] for choice in answer["choices"]] == [early, early]
    assert answer["early_stop"] == early
    events = [e for e in engine.events() if e["request_id"].startswith(answer["id"][5:])]
    removed, freed, finished, admitted = (
        next(e for e in events if (e["event"], e["request_id"][-1]) == wanted)
        for wanted in (
            ("removed", "0"),
            ("blocks_freed", "0"),
            ("finished", "0"),
            ("admitted", "1"),
        )
    )
    assert (removed["reason"], freed["reason"], finished["reason"]) == (
        "early_stop",
        "early_stop",
        "stop",
    )
    assert admitted["step"] == removed["step"] + 1


def test_metrics_count_stops_and_saved_tokens_and_no_abort(engine: RunningEngine) -> None:
    name, saved = (
        "walkaway_engine_early_stops_total",
        "walkaway_engine_early_stop_tokens_saved_total",
    )
    before = [engine.metric(name, condition="repetition"), engine.metric(saved), stopped(engine)]
    ask(engine, "loop", early_stop={"repetition": True})
    after = [engine.metric(name, condition="repetition"), engine.metric(saved), stopped(engine)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 80, 1]
    assert engine.metric("vllm:request_success_total", finished_reason="abort") == 0


def stopped(engine: RunningEngine) -> float:
    return engine.metric("vllm:request_success_total", finished_reason="stop")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "token ids go from 0 to"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids", "Expected `int`"),
        ({"stop_token_sequences": [[]]}, "stop_token_sequences", "length >= 1"),
        ({"early_stop": True}, "early_stop", "Expected `object | null`"),
        ({"early_stop": {"task": "poetry"}}, "early_stop", "poetry"),
        ({"early_stop": {"labels": ["a"]}}, "early_stop", 'need the task "classification"'),
        ({"early_stop": {"low_confidence": {"below": 2}}}, "early_stop", "<= 1"),
        (
            {"early_stop": {"repetition": {"min_pattern": 9, "max_pattern": 8}}},
            "early_stop",
            "above",
        ),
        ({"early_stop": {"repetition": {"window": 11}}}, "early_stop", "window"),
        ({"early_stop": {"verbosity": 1}}, "early_stop", "unknown field `verbosity`"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_field(
    engine: RunningEngine, fields: dict[str, Any], param: str, said: str
) -> None:
    error = ask(engine, "json", **fields)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert said in error["message"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--teacher", "FILE"], "teacher needs the simulated runner"),
        (["--runner", "simulated", "--teacher", "nowhere.jsonl"], "No such file"),
        (["--runner", "simulated", "--teacher", "FILE"], "line 2: "),
        (["--runner", "simulated", "--quality-hook", "nowhere:hook"], "No module named 'nowhere'"),
        (["--runner", "simulated", "--quality-hook", "os:sep"], "not a function"),
    ],
)
def test_a_teacher_or_a_hook_that_cannot_work(tmp_path: Path, flags: list[str], said: str) -> None:
    path = tmp_path / "teacher.jsonl"
    path.write_text('{"prompt": "a", "text": "b"}\n{"prompt": "a"}\n')
    command = [sys.executable, "-m", "reference_engine", "--port", "0"]
    named = [str(path) if flag == "FILE" else flag for flag in flags]
    ended = subprocess.run([*command, *named], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
