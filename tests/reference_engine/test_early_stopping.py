"""Early stopping as a client sees it: an engine with a teacher, asked over HTTP."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from reference_engine.model.runners import VOCAB_SIZE
from reference_engine.model.teacher import words_of
from tests.reference_engine.running_engine import RunningEngine


def words(*counts: tuple[str, int]) -> str:
    return "".join(f" {word}" * n for word, n in counts)


def numbered(first: int, num: int) -> str:
    return "".join(f" w{number}" for number in range(first, first + num))


LONG = " of a long prompt" + "x" * 400
TEXTS = {
    "json": '{"a": "}"} and some more',
    "json in pieces": '  [1, [2, {}], "]" ] then more',
    "quoted": '{"a": "\\"}"} more',
    "open json": '{"a": 1, "b": [' + words(("7,", 300)),
    "label": " Positive, since it praises the food, the room, and all else",
    "late label": numbered(0, 9) + " positive rest",
    "label too late": numbered(0, 10) + " positive rest",
    "longer label": " very good indeed",
    "three": numbered(0, 8) + " a b c" * 30,
    "three at once": " a b c" * 30,
    "twenty": numbered(0, 15) + numbered(100, 20) * 5,
    "twenty-one": numbered(0, 15) + numbered(100, 21) * 4,
    "two": numbered(0, 30) + " a b" * 30,
    "three copies": numbered(0, 30) + " a b c" * 3 + numbered(50, 9),
    "long": "word " * 200,
    "summary" + LONG: "word " * 200,
    "sentence at 49" + LONG: words(("w", 48)) + ". x !" + words(("w", 100)),
    "sentence at 50" + LONG: words(("w", 49)) + "?" + words(("w", 100)),
    "sequence": " a b b c d",
    "poor": "fine fine poor fine",
}
HARDLY: dict[str, Any] = {"prompt": "hardly sure", "text": "word " * 20, "probs": [0.1] * 20}
UNSURE: dict[str, Any] = {
    "prompt": "unsure",
    "text": "word " * 40,
    "probs": [1.0] * 10 + [0.01] * 30,
}
HOOK = "def is_poor(text, token_ids):\n    return text.endswith('poor')\n"


def word_id(word: str) -> int:
    """The teacher's words have the ids after the engine's own."""
    known = dict.fromkeys(one for text in TEXTS.values() for one in words_of(text))
    return VOCAB_SIZE + list(known).index(word)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    folder = tmp_path_factory.mktemp("teacher")
    lines = [{"prompt": name, "text": text} for name, text in TEXTS.items()]
    lines += [HARDLY, UNSURE]
    (folder / "teacher.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "hook_of_a_test.py").write_text(HOOK)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(folder))
        flags = ["--runner", "simulated", "--sim-fixed-ms", "1", "--max-num-seqs", "2"]
        teacher = ["--teacher", str(folder / "teacher.jsonl")]
        engine = RunningEngine(*flags, *teacher, "--quality-hook", "hook_of_a_test:is_poor")
    yield engine
    assert engine.stop() == 0


@dataclass(frozen=True, kw_only=True)
class Said:
    """An answer as its client put it together; `early_stop` is also that of the whole."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    early_stop: dict[str, Any] | None = None


FORMS = [(path, stream) for path in ("completions", "chat/completions") for stream in (False, True)]
Form = tuple[str, bool]


def ask(engine: RunningEngine, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 100, **fields}
    answer: dict[str, Any] = httpx.post(f"{engine.url}/v1/completions", json=body).json()
    return answer


def answers(
    engine: RunningEngine, prompt: str, form: Form, **fields: Any
) -> tuple[list[Said], dict[str, Any]]:
    """Each answer, and the usage of all. In a stream no event of an answer follows its end."""
    path, stream = form
    asked = (
        {"messages": [{"role": "user", "content": prompt}]} if "/" in path else {"prompt": prompt}
    )
    body = {"model": "tiny", "max_tokens": 600, **asked, **fields, "stream": stream}
    if not stream:
        whole = httpx.post(f"{engine.url}/v1/{path}", json=body).json()
        told = [said_by(choice, choice.get("message")) for choice in whole["choices"]]
        early = [one.early_stop for one in told if one.early_stop]
        assert whole.get("early_stop") == (early[0] if early else None)
        return told, whole["usage"]
    body["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", f"{engine.url}/v1/{path}", json=body) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    *chunks, last = map(json.loads, events)
    found = [Said() for _ in range(fields.get("n", 1))]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        before, new = found[choice["index"]], said_by(choice, choice.get("delta"))
        assert before.finish_reason is None, "an event after the end of its answer"
        assert chunk.get("early_stop") == new.early_stop
        found[choice["index"]] = replace(new, text=before.text + new.text)
    return found, last["usage"]


def said_by(choice: dict[str, Any], message: dict[str, Any] | None) -> Said:
    return Said(
        text=choice["text"] if message is None else message.get("content", ""),
        finish_reason=choice["finish_reason"],
        stop_reason=choice.get("stop_reason"),
        early_stop=choice.get("early_stop"),
    )


SUMMARY, EXTRACTION = {"task": "summarization"}, {"task": "extraction"}
LOOPS = {"repetition": True}


def labelled(*labels: str) -> dict[str, Any]:
    return {"task": "classification", "labels": [*labels]}


# The prompt, the conditions, and with how many tokens the answer ends; None: not early. The text of
# an answer is that of its tokens, unless it is given.
BOUNDARIES: list[tuple[str, dict[str, Any], int | None, str | None]] = [
    ("json", EXTRACTION, 9, '{"a": "}"}'),  # brackets in strings do not count
    ("json in pieces", EXTRACTION, 14, None),
    ("quoted", EXTRACTION, 11, '{"a": "\\"}"}'),
    ("open json", EXTRACTION, 500, None),
    ("label", EXTRACTION, None, None),
    ("label", labelled("positive", "negative"), 1, " Positive"),
    ("label", {"task": "classification"}, 10, None),
    ("late label", labelled("positive"), 10, None),  # the tenth token is the label
    ("label too late", labelled("positive"), 10, None),
    ("longer label", labelled("very", "very good"), 2, " very good"),
    ("three", LOOPS, 8 + 4 * 3, None),  # the shortest pattern
    ("three at once", LOOPS, 20, None),  # not before the twentieth token
    ("twenty", LOOPS, 15 + 4 * 20, None),  # the longest, in the last hundred tokens
    ("twenty-one", LOOPS, None, None),
    ("two", LOOPS, 30 + 4 * 4, None),  # two in turn are a pattern of four
    ("three copies", LOOPS, None, None),  # in all; four are needed
    ("unsure", {"low_confidence": True}, 15, None),
    ("hardly sure", {"low_confidence": True}, None, None),  # 0.1 is not below 0.1
    ("long", SUMMARY, 20, None),  # 0.3 of the prompt is less
    ("sentence at 49" + LONG, SUMMARY, 51, None),
    ("sentence at 50" + LONG, SUMMARY, 50, None),
    ("poor", {}, 3, "fine fine poor"),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("prompt", "wanted", "num_tokens", "text"), BOUNDARIES)
def test_each_boundary_in_each_form(
    engine: RunningEngine,
    form: Form,
    prompt: str,
    wanted: dict[str, Any],
    num_tokens: int | None,
    text: str | None,
) -> None:
    whole = words_of({**TEXTS, **{one["prompt"]: one["text"] for one in (HARDLY, UNSURE)}}[prompt])
    (said,), usage = answers(engine, prompt, form, early_stop=wanted)
    if num_tokens is None:
        assert said == Said(text="".join(whole), finish_reason="stop")
        return
    condition = wanted.get("task") or next(iter(wanted), "quality")
    assert said == Said(
        text="".join(whole[:num_tokens]) if text is None else text,
        finish_reason="stop",
        stop_reason="early_stop",
        early_stop={"condition": condition, "tokens_saved": 600 - num_tokens},
    )
    assert usage["completion_tokens"] == num_tokens


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_summary_has_at_most_a_share_of_its_prompt(engine: RunningEngine, form: Form) -> None:
    (said,), usage = answers(engine, "summary" + LONG, form, early_stop=SUMMARY)
    assert usage["completion_tokens"] == int(0.3 * usage["prompt_tokens"]) > 100
    assert said.text == "word" + " word" * (usage["completion_tokens"] - 1)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_stop_tokens_are_not_shown_also_where_they_straddle_steps(
    engine: RunningEngine, form: Form
) -> None:
    a, b, c = (word_id(word) for word in (" a", " b", " c"))
    for fields, num_tokens, reason, text in (
        ({"stop_token_ids": [c, b]}, 2, b, " a"),
        ({"stop_token_sequences": [[b, c]]}, 4, "early_stop", " a b"),  # the first b was none
        ({"stop_token_sequences": [[b, b, b], [a, b]]}, 2, "early_stop", ""),
    ):
        (said,), usage = answers(engine, "sequence", form, **fields)
        early = {"condition": "stop_sequence", "tokens_saved": 600 - num_tokens}
        assert said == Said(
            text=text, finish_reason="stop", stop_reason=reason, early_stop=early
        ), fields
        assert usage["completion_tokens"] == num_tokens
    (said,), _ = answers(engine, "sequence", form, stop_token_sequences=[[b, b, c, a]])
    assert said == Said(text=TEXTS["sequence"], finish_reason="stop"), "held back, then shown"
    (said,), _ = answers(engine, "sequence", form, stop=["b c"], early_stop={"repetition": True})
    assert said == Said(text=" a b ", finish_reason="stop", stop_reason="b c")


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    ("prompt", "fields", "text"),
    [
        ("json", {"early_stop": EXTRACTION}, '{"a": "}"}'),
        ("longer label", {"early_stop": labelled("very", "very good")}, " very good"),
        ("sequence", {"stop_token_sequences": True}, " a b"),
    ],
)
def test_each_of_n_answers_is_stopped_by_itself(
    engine: RunningEngine, form: Form, prompt: str, fields: dict[str, Any], text: str
) -> None:
    """Two slots: two answers grow side by side, the third one after."""
    if fields.get("stop_token_sequences"):
        fields = {"stop_token_sequences": [[word_id(" b"), word_id(" c")]]}
    told, usage = answers(engine, prompt, form, n=3, **fields)
    assert told == [told[0]] * 3
    assert (told[0].text, told[0].stop_reason) == (text, "early_stop")
    assert told[0].early_stop is not None
    assert usage["completion_tokens"] == 3 * (600 - told[0].early_stop["tokens_saved"])


def test_off_by_default(engine: RunningEngine) -> None:
    answer = ask(engine, "json")
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXTS["json"], "stop")
    assert choice["stop_reason"] is None
    assert "early_stop" not in answer


def test_stop_strings_and_stop_tokens_have_their_reasons(engine: RunningEngine) -> None:
    third = word_id("a")
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


def test_the_slot_goes_to_the_very_next_schedule(engine: RunningEngine) -> None:
    """Two slots: the third answer waits for the first that ends."""
    answer = ask(engine, "long", n=3, early_stop=SUMMARY)
    assert answer["early_stop"] == {"condition": "summarization", "tokens_saved": 80}
    events = [e for e in engine.events() if e["request_id"].startswith(answer["id"][5:])]
    removed, freed, finished, admitted = (
        next(e for e in events if (e["event"], e["request_id"][-1]) == wanted)
        for wanted in (
            ("removed", "0"),
            ("blocks_freed", "0"),
            ("finished", "0"),
            ("admitted", "2"),
        )
    )
    assert (removed["reason"], freed["reason"], finished["reason"]) == (
        "early_stop",
        "early_stop",
        "stop",
    )
    assert freed["num_blocks"] > 0
    assert admitted["step"] == removed["step"] + 1


def test_metrics_count_stops_and_saved_tokens_and_no_abort(engine: RunningEngine) -> None:
    name, saved = (
        "walkaway_engine_early_stops_total",
        "walkaway_engine_early_stop_tokens_saved_total",
    )
    before = [engine.metric(name, condition="repetition"), engine.metric(saved), stopped(engine)]
    ask(engine, "three", early_stop={"repetition": True})
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
