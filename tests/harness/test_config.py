"""Every mistake in a file or a --set is one message that names file, key and what is allowed."""

import re
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.workload.load import AbandonSettings, SlotRecoverySettings
from harness.workload.target import Target
from harness.workload.toml_file import apply_settings, parse_setting
from harness.workload.workload import (
    SHIPPED_WORKLOADS,
    Workload,
    load_target,
    load_workload,
    shipped,
)

GOOD = """\
question = "q?"
[run]
users = 2
max_seconds = 5
[load]
kind = "abandon"
abandon_after_tokens = [0, 4]
stay_share = 0.5
prompt_tokens = [8, 16]
answer_tokens = 100
stay_tokens = 10
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def message(tmp_path: Path, text: str, *settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_workload(write(tmp_path, text), settings)
    return str(caught.value)


def test_a_file_is_read_with_defaults_filled_in(tmp_path: Path) -> None:
    workload = load_workload(write(tmp_path, GOOD))
    assert workload.name == "mine"
    assert isinstance(workload.load, AbandonSettings)
    assert workload.load.abandon_after_tokens == [0, 4]
    assert workload.load.think == "step"
    assert workload.load.stop_after_abandons is None
    assert workload.run.seed == 0
    assert workload.engine.runner == "auto"


@pytest.mark.parametrize("name", sorted(shipped(SHIPPED_WORKLOADS)))
def test_every_shipped_workload_loads(name: str) -> None:
    assert isinstance(load_workload(name), Workload)


def test_more_users_than_slots_in_the_demo() -> None:
    demo = load_workload("demo")
    assert demo.run.users > (demo.engine.max_num_seqs or 0)


@pytest.mark.parametrize("name", ["reference", "vllm", "llamacpp", "sglang", "openai"])
def test_every_shipped_target_loads(name: str) -> None:
    target = load_target(name)
    assert isinstance(target, Target)
    assert target.name == name
    assert target.lifecycle == (name == "reference")


def test_llamacpp_is_scraped_less_than_once_a_second() -> None:
    interval = load_target("llamacpp").scrape_interval_s
    assert interval is not None
    assert interval > 1


def test_shipped_lists_the_names() -> None:
    assert {"reference", "vllm", "llamacpp", "sglang", "openai"} == set(shipped("harness.targets"))


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown workload `dmeo`.*cancel_steps, .*demo"):
        load_workload("dmeo")
    with pytest.raises(
        ConfigError, match=r"unknown engine `vlm`.*llamacpp, openai, reference, sglang, vllm"
    ):
        load_target("vlm")


def test_an_unknown_key_is_named_with_what_is_allowed_and_a_guess(tmp_path: Path) -> None:
    text = message(tmp_path, GOOD.replace("stay_share", "stay_shar"))
    assert "mine.toml: unknown key `load.stay_shar`; allowed: " in text
    assert "abandon_after_tokens, answer_tokens, ask_again_after" in text
    assert "did you mean `stay_share`?" in text
    assert "key `load.stay_share` is missing" in text


def test_an_unknown_section_is_named(tmp_path: Path) -> None:
    text = message(tmp_path, GOOD + "[engin]\nseed = 1\n")
    assert "unknown key `engin`; allowed: arms, arrivals, collect, engine, gate, headlines," in text
    assert "did you mean `engine`?" in text


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("users = 2", 'users = "two"', "`run.users` must be a whole number, not 'two'"),
        ("users = 2", "users = 0", "`run.users` must be at least 1, not 0"),
        ("users = 2", "users = 2.5", "`run.users` must be a whole number"),
        ("max_seconds = 5", "max_seconds = -1", "`run.max_seconds` must be more than 0.0, not -1"),
        ("= 0.5", "= 1.5", "`load.stay_share` must be at most 1.0, not 1.5"),
        ("= 0.5", "= nan", "`load.stay_share` must be"),
        ("[0, 4]", "[]", "either `abandon_after_tokens` or a `mix`"),
        ("[0, 4]", "[-1]", "`load.abandon_after_tokens.0` must be at least 0"),
        ("[0, 4]", "[100]", "`answer_tokens` must be larger"),
        ("[8, 16]", "[16, 8]", "`load.prompt_tokens`: must be [lowest, highest]"),
        ("[8, 16]", "[0, 8]", "`load.prompt_tokens`: must be [lowest, highest]"),
        ('"abandon"', '"leave"', "`load.kind` must be one of 'abandon', 'slot_recovery'"),
        ('kind = "abandon"\n', "", "key `load.kind` is missing"),
        ("stay_share = 0.5", 'stay_share = 0.5\nthink = "long"', "`load.think`: must be "),
        ("stay_share = 0.5", "stay_share = 0.5\nthink = true", "`load.think`: must be "),
        ('question = "q?"\n', "", "key `question` is missing"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    assert old in GOOD
    text = message(tmp_path, GOOD.replace(old, new))
    assert "mine.toml: " in text
    assert expected in text


def test_broken_toml_is_said_with_its_line(tmp_path: Path) -> None:
    text = message(tmp_path, GOOD.replace("users = 2", "users = "))
    assert "mine.toml: not valid TOML" in text
    assert "line 3" in text


def test_settings_override_the_file(tmp_path: Path) -> None:
    settings = ["run.users=7", "load.think=none", "engine.runner=simulated", "settle.seconds=1.5"]
    workload = load_workload(write(tmp_path, GOOD), settings)
    assert workload.run.users == 7
    assert isinstance(workload.load, AbandonSettings)
    assert workload.load.think == "none"
    assert workload.engine.runner == "simulated"
    assert workload.settle.seconds == 1.5


def test_a_mistake_in_a_setting_names_the_setting(tmp_path: Path) -> None:
    assert "--set run.usrs: unknown key `run.usrs`" in message(tmp_path, GOOD, "run.usrs=7")
    assert "--set run.users: `run.users` must be" in message(tmp_path, GOOD, "run.users=many")
    assert "must look like section.key=value" in message(tmp_path, GOOD, "run.users")
    assert "`question` is a value, not a section" in message(tmp_path, GOOD, "question.x=1")


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("a.b=1", ["a", "b"], 1),
        ("a.b=0.5", ["a", "b"], 0.5),
        ("a.b=[1, 2]", ["a", "b"], [1, 2]),
        ("a.b=true", ["a", "b"], True),
        ("a.b=word", ["a", "b"], "word"),
        ('a="1"', ["a"], "1"),
        ("a=x=y", ["a"], "x=y"),
    ],
)
def test_a_setting_is_toml_or_a_bare_word(setting: str, path: list[str], value: object) -> None:
    assert parse_setting(setting) == (path, value)


def test_settings_leave_the_original_alone() -> None:
    data = {"a": {"b": 1}}
    assert apply_settings(data, ["a.b=2", "c.d=3"]) == {"a": {"b": 2}, "c": {"d": 3}}
    assert data == {"a": {"b": 1}}


def test_slot_recovery_may_leave_the_slots_to_the_target() -> None:
    load = load_workload("slot_recovery").load
    assert isinstance(load, SlotRecoverySettings)
    assert load.slots is None


def test_a_target_with_an_unknown_role_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(
        'description = "d"\nsettle_s = 1\n'
        '[metrics]\nrunnin = { name = "x", refresh = "live", trust = "exact" }\n'
    )
    with pytest.raises(ConfigError, match=r"odd\.toml: `metrics\.runnin.*'running'"):
        load_target(str(path))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("settle.seconds=inf", "`settle.seconds` must be"),
        ("run.timeout_s=nan", "`run.timeout_s` must be"),
        ("engine.num_blocks=1000000000000", "`engine.num_blocks` must be at most 1000000"),
        ("run.users=9999999", "`run.users` must be at most 1000000"),
        ("collect.scrape_interval_s=0.001", "`collect.scrape_interval_s` must be at least 0.01"),
    ],
)
def test_values_beyond_any_machine_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_workload("demo", [setting])
    assert message in str(caught.value)


def test_a_file_with_an_odd_name_is_named_fittingly(tmp_path: Path) -> None:
    odd = tmp_path / "weird name!.toml"
    odd.write_bytes(b"\xef\xbb\xbf" + shipped(SHIPPED_WORKLOADS)["demo"].read_bytes())
    assert load_workload(str(odd)).name == "weird-name"


def test_a_folder_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        load_workload(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("extra_body = { a = [1] }", "`extra_body.a`: must be a number, text in quotes, true or"),
        ("extra_body = { a = nan }", "`extra_body.a`: must be a number, text in quotes, true or"),
        ("extra_body = 5", "`extra_body` must be a section of keys, not 5"),
        ("stream_options = { a = 1 }", "`stream_options.a` must be true or false, not 1"),
        ('path = "v1"', '`path`: must begin with "/"'),
        ("lifecycle = 1", "`lifecycle` must be true or false, not 1"),
        ("metrics = { running = 5 }", "`metrics.running` must be a section of keys, not 5"),
        (
            'slots_from = "sky"',
            "`slots_from` must be one of 'config', 'props' or 'workload', not 'sky'",
        ),
    ],
)
def test_a_mistake_is_one_line_in_plain_words(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(f'description = "d"\nsettle_s = 1\n{line}\n')
    with pytest.raises(ConfigError) as caught:
        load_target(str(path))
    assert str(caught.value).startswith(f"{path}: {message}")
    assert len(str(caught.value).splitlines()) == 1


def test_a_section_that_is_a_value_is_said_in_plain_words() -> None:
    with pytest.raises(ConfigError) as caught:
        load_workload("demo", ["run=5", "load=4"])
    assert str(caught.value) == (
        "--set run: `run` must be a section of keys, not 5\n"
        "--set load: `load` must be a section of keys, not 4"
    )


@pytest.mark.parametrize(
    ("workload", "settings", "message"),
    [
        ("slot_recovery", ["run.processes=2"], "is directed from one process"),
        ("demo", ["run.processes=2", "load.canaries=1"], "learn their answers one after the other"),
        ("demo", ["run.processes=13"], "there are only 12 `run.users` to share out"),
        ("demo", ["run.processes=0"], "run.processes"),
    ],
)
def test_a_load_that_cannot_be_shared_is_refused(
    workload: str, settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_workload(workload, settings)


def test_the_arrivals_of_an_open_loop_are_shared_whatever_its_users() -> None:
    assert load_workload("open_loop", ["run.processes=4"]).run.processes == 4
