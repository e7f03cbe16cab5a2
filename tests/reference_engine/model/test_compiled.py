"""The step compiled ahead of time: its answers, its cache on disk, and what happens without it.

Compiling takes a C++ compiler and, for the two small layers of this checkpoint, some 20 s.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
pytest.importorskip("transformers", reason="writes the checkpoint")

from reference_engine.config import EngineConfig, EngineConfigError, cache_folder  # noqa: E402
from reference_engine.core.scheduler import Scheduler  # noqa: E402
from reference_engine.model.compiled import Job, this_machine  # noqa: E402
from reference_engine.model.shapes import MODEL_SHAPES  # noqa: E402
from reference_engine.model.torch_runner import TorchRunner  # noqa: E402
from tests.reference_engine.model.checkpoints import write_checkpoint  # noqa: E402
from tests.reference_engine.model.side_by_side import SIZES, Side, step_side_by_side  # noqa: E402


class Place:
    """A checkpoint, and the packages that were compiled for it."""

    def __init__(self, folder: Path) -> None:
        self.model, self.cache = folder / "model", folder / "cache"
        write_checkpoint(self.model, "qwen3-tied")

    def runner(self, cache: Path, **settings: Any) -> tuple[TorchRunner, list[str]]:
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(cache))
            config = EngineConfig(**SIZES | {"model": str(self.model)} | settings)
            return TorchRunner(config, said.append), said


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    place = Place(tmp_path_factory.mktemp("compiled"))
    runner, said = place.runner(place.cache, compile=True)
    assert "2 packages" in said[-2]
    assert "compiled after" in said[-1]
    assert runner.info.is_compiled
    return place


def side(place: Place, runner: TorchRunner) -> Side:
    config = EngineConfig(**SIZES | {"model": str(place.model)})
    return Side(runner, Scheduler(config, runner.tokenizer.eos_token_ids))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_steps_answer_as_eager_ones_do_while_requests_come_and_go(place: Place) -> None:
    """Aborts at any moment, preemptions, blocks that are used again; nothing new is compiled."""
    eager, _ = place.runner(place.cache)
    compiled, said = place.runner(place.cache, compile=True)
    assert not any(line.startswith("compil") for line in said)
    served: list[int] = []
    step: Any = compiled.step
    step.compiled = Counted(step.compiled, served)
    sides = side(place, eager), side(place, compiled)
    step_side_by_side(sides, 120)
    assert set(served) >= {1, 2, 3}
    assert sides[1].scheduler.counters.preemptions > 0
    assert sides[1].scheduler.counters.finished["abort"] > 0


class Counted:
    def __init__(self, compiled: Any, served: list[int]) -> None:
        self._compiled, self._served = compiled, served

    def logits(self, spans: Any) -> Any:
        self._served.append(len(spans))
        return self._compiled.logits(spans)


def still_answers(place: Place, runner: TorchRunner) -> bool:
    step_side_by_side((side(place, place.runner(place.cache)[0]), side(place, runner)), 8)
    return not runner.step.is_compiled


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_without_a_compiler_the_steps_are_eager_after_one_warning(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    runner, said = place.runner(tmp_path, compile=True)
    warnings = [line for line in said if "eager" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("--compile: ")
    assert not runner.info.is_compiled
    assert still_answers(place, runner)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_broken_package_is_not_used(place: Place, tmp_path: Path) -> None:
    shutil.copytree(place.cache, tmp_path, dirs_exist_ok=True)
    for package in (tmp_path / "walkaway" / "compiled").iterdir():
        package.write_bytes(package.read_bytes()[:1000])
    runner, said = place.runner(tmp_path, compile=True)
    [warning] = [line for line in said if "eager" in line]
    assert "delete it" in warning
    assert still_answers(place, runner)


def test_another_shape_torch_or_processor_has_other_packages() -> None:
    def name(machine: list[str], **changes: Any) -> str:
        job: dict[str, Any] = {
            "shape": MODEL_SHAPES["tiny"],
            "max_model_len": 64,
            "num_blocks": 8,
            "block_size": 16,
            "num_threads": 1,
            "has_one_row": True,
        }
        return Job(**job | changes).file_name(machine)

    here = this_machine()
    names = [
        name(here),
        name(["2.0.0", *here[1:]]),
        name([*here[:-1], "flags: none"]),
        name(here, num_threads=2),
        name(here, has_one_row=False),
    ]
    assert len(set(names)) == len(names)
    assert name(here) == names[0]


def test_the_cache_lies_where_users_have_their_caches() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/walkaway")
    assert cache_folder({}) == Path.home() / ".cache/walkaway"


@pytest.mark.parametrize("settings", [{"batch_invariant": True}, {"runner": "simulated"}])
def test_compiling_is_refused_where_it_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(EngineConfigError, match="compile needs the torch runner"):
        EngineConfig(compile=True, **settings)
