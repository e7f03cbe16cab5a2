"""The shipped workloads: each can be run as it stands; and what their newer keys must not say."""

from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.records import Outcome
from harness.run.load_plan import make_load
from harness.run.run_config import RunOrder, make_load_plan, resolve_order
from harness.run.server import Server
from harness.workload.plan import AbandonLoad, CancelStormLoad
from harness.workload.workload import SHIPPED_WORKLOADS, load_target, load_workload, shipped

WORKLOADS = sorted(shipped(SHIPPED_WORKLOADS))
# The bundled engine's own, where a workload does not say otherwise.
ENGINE = {"max_num_seqs": 16, "max_model_len": 4096}


def server(**config: Any) -> Server:
    return Server(url="http://127.0.0.1:1", model="m", config=config, engine=None)


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
def test_the_first_line_is_the_question(name: str) -> None:
    first, _, _ = shipped(SHIPPED_WORKLOADS)[name].read_text().partition("\n")
    assert first == f'question = "{load_workload(name).question}"'
    assert first.endswith('?"')


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_shipped_workload_can_be_run_as_it_stands(name: str, tmp_path: Path) -> None:
    resolved = resolve_order(RunOrder(workload=name))
    orders = [resolved.for_arm(run, out=tmp_path) for run in resolved.arm_runs] or [resolved]
    for order in orders:
        engine = order.workload.engine.model_dump(exclude_none=True)
        plan = make_load_plan(order, server(**(ENGINE | engine)), rows_dir=tmp_path)
        assert plan.users == order.workload.run.users


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("cancel_storm", ["load.answer_tokens=8"], "`answer_tokens` must be larger"),
        ("slot_recovery", ["load.answer_tokens=1"], "`answer_tokens` must be larger"),
        ("regenerate", ['load.ask_again_after=["failed"]'], "must be one of"),
        ("retry_storm", ["load.retry_pause_s=-1"], "must be at least 0"),
        ("value_of_cancellation", ["value.honoured=on"], "but the arms are: honoured, ignored"),
        ("value_of_cancellation", ["value.price_per_million_tokens=-1"], "must be at least 0"),
        ("chat_stop", ["value.honoured=a", "value.ignored=b"], "but the arms are: none"),
    ],
)
def test_what_cannot_be_is_refused(name: str, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workload(name, settings)


def test_a_storm_must_fit_the_slots() -> None:
    storm, target = load_workload("cancel_storm"), load_target("reference")
    load = make_load(storm, target, server(max_num_seqs=32), Path())
    assert isinstance(load, CancelStormLoad)
    assert (load.streams, load.stayers) == (28, 4)
    with pytest.raises(ConfigError, match="are 32, but the server has 31 slots"):
        make_load(storm, target, server(max_num_seqs=31), Path())


def test_canaries_must_have_company() -> None:
    target = load_target("reference")
    alone = load_workload("innocent_bystanders", ["run.users=3"])
    with pytest.raises(ConfigError, match="there must be others beside them"):
        make_load(alone, target, server(), Path())
    load = make_load(load_workload("innocent_bystanders"), target, server(), Path())
    assert isinstance(load, AbandonLoad)
    assert (load.canaries, load.canary_tokens) == (3, 24)


def test_the_outcomes_after_which_users_ask_again_reach_the_load() -> None:
    load = make_load(load_workload("retry_storm"), load_target("reference"), server(), Path())
    assert isinstance(load, AbandonLoad)
    assert load.ask_again_after == [Outcome.TIMED_OUT]
    assert load.retry_pause_s == 0
