"""A workload is read with its defaults, its settings and its arms; the shipped ones can be run."""

from pathlib import Path

import pytest

from harness.run.run_config import RunConfig, make_load_plan, resolve_run
from harness.workload.load import AbandonLoad
from harness.workload.toml_file import apply_settings, parse_setting
from harness.workload.workload import SHIPPED_WORKLOADS, load_workload, shipped
from tests.harness.plans import ENGINE, server
from tests.harness.workload.test_refused import GOOD

WORKLOADS = sorted(shipped(SHIPPED_WORKLOADS))
# The bundled engine's own, where a workload does not say otherwise.


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_a_file_is_read_with_its_defaults_and_settings(tmp_path: Path) -> None:
    settings = ["run.users=7", "load.think=none", "engine.runner=simulated", "settle.seconds=1.5"]
    file = write(tmp_path, GOOD)
    plain, changed = load_workload(file), load_workload(file, settings)
    assert plain.name == "mine"
    assert isinstance(plain.load, AbandonLoad)
    assert isinstance(changed.load, AbandonLoad)
    assert plain.load.abandon_after_tokens == changed.load.abandon_after_tokens == [0, 4]
    assert (plain.load.think, changed.load.think) == ("step", "none")
    assert (plain.run.users, changed.run.users) == (2, 7)
    assert (plain.engine.runner, changed.engine.runner) == ("auto", "simulated")
    assert (plain.settle.seconds, changed.settle.seconds) == (None, 1.5)
    assert (plain.run.seed, plain.arrivals.kind) == (0, "closed")


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


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_shipped_workload_can_be_run_as_it_stands(name: str, tmp_path: Path) -> None:
    is_simulated = load_workload(name).simulate is not None
    resolved = resolve_run(RunConfig(workload=name), simulates=is_simulated)
    first, _, _ = shipped(SHIPPED_WORKLOADS)[name].read_text().partition("\n")
    assert first == f'question = "{resolved.workload.question}"'
    assert first.endswith('?"')
    orders = [resolved.for_arm(run, out=tmp_path) for run in resolved.arm_runs] or [resolved]
    for order in orders:
        engine = order.workload.engine.model_dump(exclude_none=True, exclude={"workers"})
        at = server(ENGINE | engine)
        assert make_load_plan(order, at, rows_dir=tmp_path).run == order.workload.run


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
