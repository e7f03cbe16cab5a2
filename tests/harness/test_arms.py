"""Arms: which workload each is, in which order they run, and mistakes in them in plain words."""

from pathlib import Path

import pytest

from harness.arms import ArmRun, arm_runs
from harness.config import load_workload
from harness.errors import ConfigError
from harness.load_settings import AbandonSettings
from harness.order import RunOrder, resolve_order

BASE = """\
question = "q?"
[run]
users = 2
max_seconds = 5
seed = 10
rounds = 4
[load]
kind = "abandon"
abandon_after_tokens = [0, 4]
stay_share = 0.5
prompt_tokens = [8, 16]
answer_tokens = 100
stay_tokens = 10
[engine]
num_blocks = 99
"""
ARMS = """\
[[arms]]
name = "plain"
[[arms]]
name = "small"
[arms.engine]
num_blocks = 7
watermark = 0.5
[[arms]]
name = "short"
[arms.load]
stay_tokens = 3
"""


def runs(tmp_path: Path, text: str, *settings: str) -> list[ArmRun]:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return arm_runs(load_workload(str(path), settings), source="mine.toml", settings=settings)


def mistake(tmp_path: Path, text: str, *settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        runs(tmp_path, text, *settings)
    return str(caught.value)


def test_each_round_begins_with_the_next_arm(tmp_path: Path) -> None:
    names = [run.folder_name for run in runs(tmp_path, BASE + ARMS)]
    assert names == [
        *("1-plain", "1-small", "1-short"),
        *("2-small", "2-short", "2-plain"),
        *("3-short", "3-plain", "3-small"),
        *("4-plain", "4-small", "4-short"),
    ]


def test_the_arms_of_a_round_share_its_seed(tmp_path: Path) -> None:
    seeds = {run.round: set() for run in runs(tmp_path, BASE + ARMS)}  # type: dict[int, set[int]]
    for run in runs(tmp_path, BASE + ARMS):
        seeds[run.round].add(run.workload.run.seed)
    assert seeds == {1: {11}, 2: {12}, 3: {13}, 4: {14}}


def test_an_arm_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    by_name = {run.arm: run.workload for run in runs(tmp_path, BASE + ARMS, "engine.block_size=8")}
    assert by_name["plain"].engine.num_blocks == 99
    assert (by_name["small"].engine.num_blocks, by_name["small"].engine.watermark) == (7, 0.5)
    load = by_name["short"].load
    assert isinstance(load, AbandonSettings)
    assert (load.stay_tokens, load.answer_tokens) == (3, 100)
    assert {workload.engine.block_size for workload in by_name.values()} == {8}
    for workload in by_name.values():
        assert (workload.arms, workload.run.rounds, workload.name) == ([], 1, "mine")


def test_a_workload_without_arms_is_no_run_of_rounds(tmp_path: Path) -> None:
    assert runs(tmp_path, BASE.replace("rounds = 4", "")) == []
    assert resolve_order(RunOrder(workload="demo")).arm_runs == []


def test_the_order_of_an_arm_is_an_order_of_its_own(tmp_path: Path) -> None:
    resolved = resolve_order(RunOrder(workload="memory_pressure"))
    run = resolved.arm_runs[1]
    order = resolved.for_arm(run, out=tmp_path)
    assert (order.arm, order.workload, order.order.out) == (run.arm, run.workload, tmp_path)
    assert list(order.arm_runs) == []


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("engine.watermrk = 1", "mine.toml, arm `x`: unknown key `engine.watermrk`; allowed: "),
        ("engine.watermark = 1.0", "arm `x`: `engine.watermark` must be less than 1.0, not 1.0"),
        ("engine.victim = 'youngest'", "`engine.victim` must be one of 'policy' or 'rebuild-cost'"),
        ("load.stay_tokens = 'a'", "arm `x`: `load.stay_tokens` must be a whole number, not 'a'"),
        ("load.answer_tokens = 2", "nobody can leave an answer that is over"),
        (
            "run.users = 3",
            "unknown key `arms.0.run`; allowed: arrivals, collect, engine, load, name",
        ),
        ("engine = 3", "`arms.0.engine` must be a section of keys, not 3"),
    ],
)
def test_a_mistake_in_an_arm_names_the_arm(tmp_path: Path, arm: str, message: str) -> None:
    assert message in mistake(tmp_path, f'{BASE}[[arms]]\nname = "x"\n{arm}\n')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE, "`run.rounds` is 4, but there are no `[[arms]]`"),
        (BASE + '[[arms]]\nname = "a"\n' * 2, "two of the `arms` are named 'a'"),
        (BASE + "[[arms]]\n", "key `arms.0.name` is missing"),
        (BASE + '[[arms]]\nname = "a/b"\n', "`arms.0.name`: must be made of letters, digits"),
        (
            BASE.replace("rounds", "reference_arm = 'b'\nrounds") + '[[arms]]\nname = "a"\n',
            "`run.reference_arm` is 'b', but the arms are: a",
        ),
    ],
)
def test_arms_that_cannot_be(tmp_path: Path, text: str, message: str) -> None:
    assert message in mistake(tmp_path, text)


def test_a_setting_that_no_arm_would_feel_is_refused(tmp_path: Path) -> None:
    arms = '[[arms]]\nname = "a"\nengine.num_blocks = 1\n[[arms]]\nname = "b"\n'
    setting = "engine.num_blocks=5"
    felt = {run.arm: run.workload.engine.num_blocks for run in runs(tmp_path, BASE + arms, setting)}
    assert felt == {"a": 1, "b": 5}
    everywhere = BASE + arms + "engine.num_blocks = 2\n"
    assert mistake(tmp_path, everywhere, setting) == (
        "--set engine.num_blocks=5: every arm has its own (a, b): change it there"
    )
