"""Arms: which workload each is, in which order they run, and mistakes in them in plain words."""

from pathlib import Path
from typing import Any

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
URL = "http://127.0.0.1:8000"
PLAIN = BASE.replace("rounds = 4", "")
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


def test_each_round_has_its_seed_and_begins_with_the_next_arm(tmp_path: Path) -> None:
    found = runs(tmp_path, BASE + ARMS)
    assert [run.folder_name for run in found] == [
        *("1-plain", "1-small", "1-short"),
        *("2-small", "2-short", "2-plain"),
        *("3-short", "3-plain", "3-small"),
        *("4-plain", "4-small", "4-short"),
    ]
    assert [run.workload.run.seed for run in found] == [10 + run.round for run in found]


def test_an_arm_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    settings = ("engine.block_size=8", "engine.num_blocks=5")
    by_name = {run.arm: run.workload for run in runs(tmp_path, BASE + ARMS, *settings)}
    assert {name: one.engine.num_blocks for name, one in by_name.items()} == {
        "plain": 5,
        "small": 7,
        "short": 5,
    }
    assert by_name["small"].engine.watermark == 0.5
    load = by_name["short"].load
    assert isinstance(load, AbandonLoad)
    assert (load.stay_tokens, load.answer_tokens) == (3, 100)
    for workload in by_name.values():
        assert workload.engine.block_size == 8
        assert (workload.arms, workload.run.rounds, workload.name) == ([], 1, "mine")


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


def resolve(tmp_path: Path, text: str, **typed: Any) -> ResolvedRun:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return resolve_run(RunConfig(workload=str(path), **typed))


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
    resolved = resolve(tmp_path, third, target_url=URL)
    urls = {run.arm: resolved.for_arm(run, out=tmp_path).url for run in resolved.arm_runs}
    assert urls["typed"] == URL
    assert resolve(tmp_path, third).url is None, "the third is the bundled engine"


def test_what_the_file_says_of_the_engine_is_only_noted(tmp_path: Path) -> None:
    said = unused_engine_settings(resolve(tmp_path, PLAIN, target_url=URL).workload)
    assert said == (
        "the workload's `engine.num_blocks`: not used, this server has settings of its own"
    )
    plain = PLAIN.replace("num_blocks = 99", "")
    assert unused_engine_settings(resolve(tmp_path, plain, target_url=URL).workload) is None
