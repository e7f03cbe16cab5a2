"""A workload is read with its defaults, its settings and its arms; the shipped ones can be run."""

from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.run.run_config import RunConfig, make_load_plan, resolve_run
from harness.run.server import Server
from harness.workload.load import AbandonLoad
from harness.workload.toml_file import apply_settings, parse_setting
from harness.workload.workload import SHIPPED_WORKLOADS, load_target, load_workload, shipped
from tests.harness.workload.test_refused import GOOD

WORKLOADS = sorted(shipped(SHIPPED_WORKLOADS))
# The bundled engine's own, where a workload does not say otherwise.
ENGINE = {"max_num_seqs": 16, "max_model_len": 4096}


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_a_file_is_read_with_defaults_filled_in(tmp_path: Path) -> None:
    workload = load_workload(write(tmp_path, GOOD))
    assert workload.name == "mine"
    assert isinstance(workload.load, AbandonLoad)
    assert workload.load.abandon_after_tokens == [0, 4]
    assert workload.load.think == "step"
    assert workload.load.stop_after_abandons is None
    assert (workload.run.seed, workload.engine.runner) == (0, "auto")
    assert workload.arrivals.kind == "closed"


def test_settings_override_the_file(tmp_path: Path) -> None:
    settings = ["run.users=7", "load.think=none", "engine.runner=simulated", "settle.seconds=1.5"]
    workload = load_workload(write(tmp_path, GOOD), settings)
    assert workload.run.users == 7
    assert isinstance(workload.load, AbandonLoad)
    assert workload.load.think == "none"
    assert workload.engine.runner == "simulated"
    assert workload.settle.seconds == 1.5


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


def test_a_file_with_an_odd_name_is_named_fittingly(tmp_path: Path) -> None:
    odd = tmp_path / "weird name!.toml"
    odd.write_bytes(b"\xef\xbb\xbf" + shipped(SHIPPED_WORKLOADS)["demo"].read_bytes())
    assert load_workload(str(odd)).name == "weird-name"


@pytest.mark.parametrize("name", ["reference", "vllm", "llamacpp", "sglang", "openai"])
def test_every_shipped_target_loads(name: str) -> None:
    target = load_target(name)
    assert (target.name, target.lifecycle) == (name, name == "reference")
    assert name in shipped("harness.targets")


def test_llamacpp_is_scraped_less_than_once_a_second() -> None:
    assert (load_target("llamacpp").scrape_interval_s or 0) > 1


def test_every_question_of_the_list_has_its_workload() -> None:
    assert {
        "chat_stop",
        "type_ahead",
        "navigate_away",
        "regenerate",
        "queue_abandon",
        "prefill_abandon",
        "last_token_race",
        "cancel_storm",
        "retry_storm",
        "memory_pressure",
        "innocent_bystanders",
        "value_of_cancellation",
        "soak",
    } <= set(WORKLOADS)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_shipped_workload_can_be_run_as_it_stands(name: str, tmp_path: Path) -> None:
    resolved = resolve_run(RunConfig(workload=name))
    first, _, _ = shipped(SHIPPED_WORKLOADS)[name].read_text().partition("\n")
    assert first == f'question = "{resolved.workload.question}"'
    assert first.endswith('?"')
    orders = [resolved.for_arm(run, out=tmp_path) for run in resolved.arm_runs] or [resolved]
    for order in orders:
        engine = order.workload.engine.model_dump(exclude_none=True)
        server = Server(url="http://127.0.0.1:1", model="m", config=ENGINE | engine, engine=None)
        assert make_load_plan(order, server, rows_dir=tmp_path).run == order.workload.run


def test_more_users_than_slots_in_the_demo() -> None:
    demo = load_workload("demo")
    assert demo.run.users > (demo.engine.max_num_seqs or 0)


RATE = ["arrivals.kind=constant", "arrivals.seconds=1"]


@pytest.mark.parametrize(
    ("name", "settings", "cap"),
    [
        ("demo", ["run.users=20000"], "run.most_streams=20000"),
        ("cancel_storm", ["load.streams=9000", "load.stayers=2000"], "run.most_streams=11000"),
        ("demo", [*RATE, "arrivals.rate=20000"], "run.most_rate=20000"),
    ],
)
def test_a_cap_that_is_raised_as_its_message_says_lets_the_load_pass(
    name: str, settings: list[str], cap: str
) -> None:
    with pytest.raises(ConfigError, match=f"--set {cap} raises it"):
        load_workload(name, settings)
    load_workload(name, [*settings, cap])


@pytest.mark.parametrize(
    ("name", "settings", "streams"),
    [
        ("demo", ["run.users=13"], 13),
        ("demo", ["run.users=13", "run.processes=2"], 7),
        ("open_loop", ["arrivals.max_streams=8"], 8),
        ("open_loop", ["arrivals.max_streams=8", "run.processes=4"], 2),
        ("cancel_storm", ["load.streams=9", "load.stayers=2"], 11),
        ("slot_recovery", [], 0),
    ],
)
def test_what_one_process_has_open(name: str, settings: list[str], streams: int) -> None:
    assert load_workload(name, settings).streams_of_each_process == streams


def test_a_trace_that_is_replayed_too_fast(tmp_path: Path) -> None:
    """Ten a second as recorded."""
    trace = tmp_path / "trace.jsonl"
    lines = (f'{{"timestamp":{100 * n},"input_length":9,"output_length":3}}' for n in range(40))
    trace.write_text("\n".join(lines))

    def at_speed(speed: int) -> RunConfig:
        settings = [f"arrivals.file={trace}", "run.most_rate=15", f"arrivals.speed={speed}"]
        return RunConfig(workload="trace_replay", settings=settings)

    resolve_run(at_speed(1))
    with pytest.raises(ConfigError, match=r"trace.jsonl: `arrivals` bring up to 2. .*most_rate=2"):
        resolve_run(at_speed(2))


def test_nobody_leaves_after_the_run() -> None:
    plan: list[Any] = ['load.mix=[{plan="time", seconds=20}]', "load.abandon_after_tokens=[]"]
    load_workload("chat_stop", [*plan, "run.max_seconds=21"])
    with pytest.raises(ConfigError, match=r"leaves 20 s after `sent`, but `run.max_seconds` is 20"):
        load_workload("chat_stop", [*plan, "run.max_seconds=20"])
