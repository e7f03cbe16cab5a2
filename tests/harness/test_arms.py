"""Arms: which workload each is, in which order they run, and mistakes in them in plain words."""

from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.run.run_config import ResolvedRun, RunConfig, resolve_run
from harness.workload.arms import ArmRun, arm_runs, unused_engine_settings
from harness.workload.load import AbandonLoad
from harness.workload.workload import load_workload

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
    assert isinstance(load, AbandonLoad)
    assert (load.stay_tokens, load.answer_tokens) == (3, 100)
    assert {workload.engine.block_size for workload in by_name.values()} == {8}
    for workload in by_name.values():
        assert (workload.arms, workload.run.rounds, workload.name) == ([], 1, "mine")


def test_the_order_of_an_arm_is_an_order_of_its_own(tmp_path: Path) -> None:
    assert runs(tmp_path, BASE.replace("rounds = 4", "")) == []
    resolved = resolve_run(RunConfig(workload="memory_pressure"))
    run = resolved.arm_runs[1]
    order = resolved.for_arm(run, out=tmp_path)
    assert (order.arm, order.workload, order.config.out) == (run.arm, run.workload, tmp_path)
    assert list(order.arm_runs) == []


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("engine.watermrk = 1", "mine.toml, arm `x`: unknown key `engine.watermrk`; allowed: "),
        ("engine.victim = 'youngest'", "`engine.victim` must be one of 'policy' or 'rebuild-cost'"),
        ("load.answer_tokens = 2", "the answer would end first"),
        ("engine = 3", "`arms.0.engine` must be a section of keys, not 3"),
    ],
)
def test_a_mistake_in_an_arm_names_the_arm(tmp_path: Path, arm: str, message: str) -> None:
    assert message in mistake(tmp_path, f'{BASE}[[arms]]\nname = "x"\n{arm}\n')


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("", "key `arms.0.name` is missing"),
        ('name = "a/b"', "`arms.0.name`: must be made of letters, digits"),
    ],
)
def test_an_arm_needs_a_name_that_a_folder_can_have(tmp_path: Path, arm: str, message: str) -> None:
    assert message in mistake(tmp_path, f"{BASE}[[arms]]\n{arm}\n")


def test_a_setting_that_no_arm_would_feel_is_refused(tmp_path: Path) -> None:
    arms = '[[arms]]\nname = "a"\nengine.num_blocks = 1\n[[arms]]\nname = "b"\n'
    setting = "engine.num_blocks=5"
    felt = {run.arm: run.workload.engine.num_blocks for run in runs(tmp_path, BASE + arms, setting)}
    assert felt == {"a": 1, "b": 5}
    everywhere = BASE + arms + "engine.num_blocks = 2\n"
    assert mistake(tmp_path, everywhere, setting) == (
        "--set engine.num_blocks=5: every arm has its own (a, b): change it there"
    )


TWO_BUILDS = """\
[[arms]]
name = "before"
[arms.target]
url = "http://127.0.0.1:8001"
metrics_urls = ["http://127.0.0.1:9001/metrics"]
[[arms]]
name = "after"
[arms.target]
url = "http://127.0.0.1:8002/v1/"
engine = "llamacpp"
model = "new"
"""


def resolve(tmp_path: Path, text: str, *settings: str, **typed: Any) -> ResolvedRun:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return resolve_run(RunConfig(workload=str(path), settings=list(settings), **typed))


def refusal(tmp_path: Path, text: str, *settings: str, **typed: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(tmp_path, text, *settings, **typed)
    return str(caught.value)


def test_an_arm_may_have_a_server_of_its_own(tmp_path: Path) -> None:
    text = BASE.replace("num_blocks = 99", "") + TWO_BUILDS
    resolved = resolve(tmp_path, text, engine="vllm", model="old")
    before, after, again = (resolved.for_arm(run, out=tmp_path) for run in resolved.arm_runs[:3])
    found = [(one.url, one.target.name, one.config.model) for one in (before, after)]
    assert found == [
        ("http://127.0.0.1:8001", "vllm", "old"),
        ("http://127.0.0.1:8002", "llamacpp", "new"),
    ]
    assert before.metrics_urls == ["http://127.0.0.1:9001/metrics"]
    assert after.metrics_urls == []
    assert (again.arm, again.url) == ("after", after.url)
    third = text + '[[arms]]\nname = "typed"\n'
    resolved = resolve(tmp_path, third, target_url="http://127.0.0.1:8000")
    urls = {run.arm: resolved.for_arm(run, out=tmp_path).url for run in resolved.arm_runs}
    assert urls["typed"] == "http://127.0.0.1:8000"
    assert resolve(tmp_path, third).url is None, "the third is the bundled engine"


def test_a_mistake_in_an_arms_server_names_the_arm(tmp_path: Path) -> None:
    text = BASE + TWO_BUILDS.replace("http://127.0.0.1:8002", "127.0.0.1:8002")
    assert "arm `after`: " in refusal(tmp_path, text)
    assert "must be a URL such as" in refusal(tmp_path, text)


def test_a_server_for_all_and_one_for_each_arm_is_refused(tmp_path: Path) -> None:
    url = "http://127.0.0.1:8000"
    said = refusal(tmp_path, BASE + TWO_BUILDS, target_url=url)
    assert said == f"--target {url}: every arm of mine has its own"


@pytest.mark.parametrize("workload", ["retry_storm", "value_of_cancellation", "memory_pressure"])
def test_arms_that_a_server_at_a_url_would_not_feel_are_refused(workload: str) -> None:
    with pytest.raises(ConfigError, match=r"would not feel: all such arms would be the same"):
        resolve_run(RunConfig(workload=workload, target_url="http://127.0.0.1:8000"))


def test_settings_that_no_server_would_feel_are_refused(tmp_path: Path) -> None:
    url = "http://127.0.0.1:8000"
    plain = BASE.replace("rounds = 4", "")
    said = "--set engine.num_blocks=5: is for the bundled engine only, and none is started"
    assert said in refusal(tmp_path, plain, "engine.num_blocks=5", target_url=url)
    assert said in refusal(tmp_path, BASE + TWO_BUILDS, "engine.num_blocks=5")
    changed = BASE + TWO_BUILDS.replace("metrics_urls", "[arms.engine]\nwatermark = 0.1\n#")
    assert "arm `before`: changes `engine.watermark`" in refusal(tmp_path, changed)


def test_what_the_file_says_of_the_engine_is_only_noted(tmp_path: Path) -> None:
    url = "http://127.0.0.1:8000"
    resolved = resolve(tmp_path, BASE.replace("rounds = 4", ""), target_url=url)
    said = unused_engine_settings(resolved.workload)
    assert said == (
        "the workload's `engine.num_blocks`: not used, this server has settings of its own"
    )
    plain = BASE.replace("rounds = 4", "").replace("num_blocks = 99", "")
    assert unused_engine_settings(resolve(tmp_path, plain, target_url=url).workload) is None
