"""The measuring process of a page: its run, the command that repeats it, its errors."""

import os
import shlex
import threading
from dataclasses import replace
from typing import Any

import pytest

from harness.commands import run_and_show as run_command
from harness.commands.index import app
from harness.errors import ConfigError, TargetError
from harness.run.run_config import RunConfig, resolve_run
from harness.web.recorder import (
    UserStop,
    command_of,
    in_form_words,
    resolve,
    short,
    tell,
    until_stopped,
)
from harness.workload.form import BY_HAND
from tests.harness.plans import typed_plan


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


@pytest.mark.parametrize(
    ("refusal", "shown"),
    [
        (
            "--engine vllm needs --target URL: only the bundled engine is started",
            '"Kind of server" vllm needs "Host": only the bundled engine is started',
        ),
        (
            "cannot reach http://h (from --target or an arm's `target`): it refuses",
            'cannot reach http://h (from "Host"): it refuses',
        ),
        ("http://h has 2 models (a, b); name one with --model", '"Model"'),
        ("--set run.users: `run.users` must be at least 1, not 0", '"Number of users" must be'),
        ("10.0.0.1 is not loopback: --yes-load-this-host allows it", "--yes-load-this-host"),
    ],
)
def test_a_refusal_of_the_form_names_its_fields(refusal: str, shown: str) -> None:
    assert shown in in_form_words(ConfigError(refusal))


@pytest.mark.parametrize("line", [b"", b"stop\n"], ids=["the page has ended", "Stop"])
def test_an_end_before_the_load_interrupts_what_is_waited_for(line: bytes) -> None:
    reading, writing = os.pipe()
    is_interrupted = threading.Event()
    with os.fdopen(reading, "rb", buffering=0) as stdin, os.fdopen(writing, "wb") as page:
        stop = UserStop(stdin)
        stop.interrupt = is_interrupted.set
        page.write(line)
        page.flush() if line else page.close()
        assert is_interrupted.wait(10)
        assert stop.is_set()


def test_users_who_have_stopped_interrupt_nothing_and_the_end_of_the_page_does() -> None:
    reading, writing = os.pipe()
    is_interrupted = threading.Event()
    with os.fdopen(reading, "rb", buffering=0) as stdin, os.fdopen(writing, "wb") as page:
        stop = UserStop(stdin)
        stop.interrupt, stop.has_load = is_interrupted.set, True
        page.write(b"stop\n")
        page.flush()
        assert stop.wait(10)
        assert not is_interrupted.is_set()
        page.close()
        assert is_interrupted.wait(10)


def test_a_message_to_a_page_that_has_ended_is_lost_silently() -> None:
    stdout, (listener, unheard) = os.dup(1), os.pipe()
    os.close(listener)
    os.dup2(unheard, 1)
    try:
        tell("phase", text="saving all the same")
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(unheard)


def config_of(line: str, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    orders: list[RunConfig] = []
    monkeypatch.setattr(run_command, "run_and_show", lambda order, **_: orders.append(order))
    program, *arguments = shlex.split(line)
    assert program == "walkaway"
    app(arguments, standalone_mode=False)
    return orders[0]


@pytest.mark.parametrize(
    "order",
    [
        {
            "workload": "demo",
            "settings": ["run.seed=1", "load.stop_after_abandons=9"],
            "has_probe_phase": True,
        },
        {"workload": BY_HAND, "api_key_env": "MY_KEY", "has_scraping": False},
    ],
    ids=["walkaway run --web", "plain Locust"],
)
@pytest.mark.parametrize(
    "fields",
    [
        {"walkaway_stay_share": "0.5", "walkaway_seed": "7", "user_count": "3"},
        {"walkaway_leave": "tokens", "walkaway_tokens": "2,3", "walkaway_way": "rst"},
        {"walkaway_arrivals": "poisson", "walkaway_rate": "2.5", "run_time": "20"},
        {"host": "http://127.0.0.1:1", "walkaway_engine": "vllm", "walkaway_model": "my model"},
    ],
)
def test_the_command_of_a_run_repeats_it(
    order: dict[str, Any], fields: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    typed = {"command": ["locust", "--web-port", "1"], "out": "results/mine"}
    fields = {"walkaway_leave": "workload", "walkaway_arrivals": "workload"} | fields
    ordered = resolve({"config": order | typed, "fields": fields})
    line = command_of(ordered.config, seed=ordered.workload.run.seed)
    assert "secret" not in line
    again = resolve_run(config_of(line, monkeypatch))
    as_typed = replace(again.config, settings=ordered.config.settings, out=ordered.config.out)
    as_ordered = replace(as_typed, command=ordered.config.command)
    access = replace(again.access, place=ordered.place)
    assert (again.probe_phase is None) == (ordered.probe_phase is None)
    probes = ordered.probe_phase
    assert replace(again, config=as_ordered, access=access, probe_phase=probes) == ordered


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"host": "foo bar"}, '"Host" foo bar: must be a URL such as http://127.0.0.1:8000'),
        ({"host": "http://me:secret@host"}, '"Host": holds a user name or password, which'),
        ({"walkaway_engine": "vlm"}, '"Kind of server": unknown engine `vlm`: .* `vllm`'),
    ],
)
def test_a_wrong_text_is_refused_by_the_name_of_its_field(fields: dict[str, str], why: str) -> None:
    order = {"workload": "demo", "settings": ["engine.runner=simulated"]}
    with pytest.raises(ConfigError, match=f"^{why}"):
        resolve({"config": order, "fields": fields})


def test_the_command_has_the_last_setting_of_each_key() -> None:
    settings = ["load.mix=[1]", "run.seed=3", "load.mix.0=2", "load.mix=[4]", "run.seed=5"]
    line = command_of(RunConfig(workload="my load.toml", settings=settings), seed=5)
    said = "walkaway run 'my load.toml' --engine reference"
    assert line == f"{said} --set load.mix.0=2 --set 'load.mix=[4]' --set run.seed=5"


@pytest.mark.parametrize(
    ("flags", "left", "elapsed_s", "setting"),
    [
        ((), 0, 12.3, ["run.max_seconds=13"]),
        ((), 0, 60.1, []),
        (("--walkaway-stop-after=5",), 4, 12.3, ["run.max_seconds=13"]),
        (("--walkaway-stop-after=5",), 5, 12.3, []),
        (("--walkaway-arrivals=constant",), 0, 12.3, []),
    ],
)
def test_a_stopped_load_is_repeated_as_long(
    flags: tuple[str, ...], left: int, elapsed_s: float, setting: list[str]
) -> None:
    assert until_stopped(typed_plan(*flags), left=left, elapsed_s=elapsed_s) == setting
