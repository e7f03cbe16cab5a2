"""A repository that cannot be served is refused with one sentence; nothing is left behind."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from reference_engine.config import EngineConfigError
from reference_engine.triton.configuration import as_dict
from reference_engine.triton.repository import Repository, load_repository, read_configurations
from tests.reference_engine.triton.served_repository import write_repository

TENSORS = """
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
"""
PYTHON = f'backend: "python" {TENSORS}'
MODEL = """
class TritonPythonModel:
    def execute(self, requests): ...
"""


def write(folder: Path, name: str, config: str, code: str | None = MODEL) -> Path:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(config)
    if code is not None:
        (folder / name / "1" / "model.py").write_text(code)
    return folder


def load(folder: Path) -> Repository:
    async def load_and_close() -> Repository:
        repository = await load_repository(folder)
        await repository.close()
        return repository

    return asyncio.run(load_and_close())


def refusal(folder: Path) -> str:
    with pytest.raises(EngineConfigError) as refused:
        load(folder)
    return str(refused.value)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (TENSORS, "backend '' is not supported here: use \"python\""),
        (f'platform: "onnxruntime_onnx" {TENSORS}', "platform 'onnxruntime_onnx' is not supported"),
        (PYTHON + 'name: "other"', "name is 'other', but the folder is 'm'"),
        (PYTHON + "colour: 3", 'has no field named "colour"'),
        (PYTHON + "max_batch_size: -1", "max_batch_size is -1"),
        (PYTHON + "instance_group { kind: KIND_GPU }", "instance_group.kind KIND_GPU is not"),
        (PYTHON + "optimization { }", "optimization is not supported here: remove it"),
        (
            PYTHON + "dynamic_batching { preserve_ordering: true }",
            "dynamic_batching.preserve_order",
        ),
        (PYTHON + "version_policy { all { } }", "version_policy.all is not supported"),
        (PYTHON + "version_policy { latest { num_versions: 2 } }", "num_versions over 1"),
        (PYTHON + "dynamic_batching { priority_levels: 2 }", "default_priority_level is 0"),
        (
            PYTHON + "dynamic_batching { priority_queue_policy { key: 3 value { } } }",
            "priority_queue_policy has level 3",
        ),
        (PYTHON + "dynamic_batching { preferred_batch_size: 4 }", "preferred_batch_size [4]"),
        (PYTHON + "sequence_batching { oldest { } }", "max_candidate_sequences must be over 0"),
        (
            PYTHON + "sequence_batching { state { input_name: 'x' } }",
            "sequence_batching.state is not supported",
        ),
        (
            PYTHON + 'sequence_batching { control_input { name: "S" control { } } }',
            "control_input 'S': give one pair, false and true",
        ),
        ('backend: "python"', "input is missing"),
        (PYTHON.replace("TYPE_INT32", "TYPE_INVALID", 1), "input 'IN': data_type is missing"),
        (PYTHON.replace("TYPE_INT32", "TYPE_BF16", 1), "input 'IN': data_type is missing, or"),
        (PYTHON.replace("dims: 1", "dims: 0", 1), "input 'IN': dims must be sizes over 0"),
        (PYTHON.replace("OUT", "", 1), "output.name '': each needs a name of its own"),
        (
            PYTHON.replace("dims: 1", "dims: 1 reshape { shape: [1] }", 1),
            "input.reshape is not supported",
        ),
    ],
)
def test_a_configuration_is_refused_by_file_and_field(
    tmp_path: Path, config: str, sentence: str
) -> None:
    said = refusal(write(tmp_path, "m", config))
    assert said.startswith(f"{tmp_path}/m/config.pbtxt: ")
    assert sentence in said


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_th"),
        ("class TritonPythonModel: ...", "TypeError: TritonPythonModel has no execute"),
        (MODEL + "    def initialize(self, args): raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os._exit(3)", "its process ended with status 3"),
    ],
)
def test_a_model_that_does_not_start_is_refused(tmp_path: Path, code: str, sentence: str) -> None:
    write(tmp_path, "good", PYTHON)
    said = refusal(write(tmp_path, "m", PYTHON, code))
    assert said.startswith(f"{tmp_path}/m/1/model.py: the model does not start: ")
    assert sentence in said
    assert "\n" not in said


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "nothing")
    assert "it holds no folder of a model" in refusal(tmp_path)
    (tmp_path / "m").mkdir()
    assert "config.pbtxt is missing" in refusal(tmp_path)
    (tmp_path / "m" / "config.pbtxt").write_text(PYTHON)
    assert "m has no version: put the model into" in refusal(tmp_path)
    (tmp_path / "m" / "2").mkdir()
    assert "m/2/model.py is missing" in refusal(tmp_path)


ENSEMBLE = f"""
platform: "ensemble" {TENSORS}
ensemble_scheduling {{ step {{ model_name: "m" model_version: -1
  input_map {{ key: "IN" value: "IN" }} output_map {{ key: "OUT" value: "OUT" }} }} }}
"""


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"m"', '"x"', "there is no model 'x'"),
        ('"m"', '"e"', "step 'e' is an ensemble"),
        ("-1", "3", "set model_version to -1"),
        ('input_map { key: "IN"', 'input_map { key: "INN"', "step 'm' does not have ['INN']"),
        ('input_map { key: "IN" value: "IN" }', "", "step 'm' needs ['IN']"),
        ('value: "IN"', 'value: "OUT"', "no step or input makes ['OUT'] before"),
        ('value: "OUT"', 'value: "ELSE"', "no step makes the output(s) ['OUT']"),
    ],
)
def test_an_ensemble_is_refused(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    write(tmp_path, "m", PYTHON)
    write(tmp_path, "e", ENSEMBLE.replace(old, new), None)
    said = refusal(tmp_path)
    assert said.startswith("ensemble 'e': ensemble_scheduling: ")
    assert sentence in said


def test_the_engine_keeps_its_name(tmp_path: Path) -> None:
    write(tmp_path, "generate", PYTHON)
    with pytest.raises(EngineConfigError, match="the engine is the model 'generate': rename it"):
        asyncio.run(load_repository(tmp_path, taken=["generate"]))


def test_the_highest_version_is_served(tmp_path: Path) -> None:
    write(tmp_path, "m", PYTHON)
    (tmp_path / "m" / "10").mkdir()
    (tmp_path / "m" / "10" / "model.py").write_text(MODEL)
    assert load(tmp_path).models["m"].versions == ("10",)


def test_a_model_gets_its_configuration_as_triton_gives_it(tmp_path: Path) -> None:
    config = as_dict(read_configurations(write_repository(tmp_path / "models"))["oldest"])
    assert config["max_batch_size"] == 2
    assert config["input"][0]["dims"] == [1]
    assert config["input"][0]["data_type"] == "TYPE_INT32"
    assert config["sequence_batching"]["max_sequence_idle_microseconds"] == 60_000_000


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--kserve-port", "0"), "m/1/model.py: the model does not start: NameError: "),
        ((), "--model-repository is served over gRPC: give --kserve-port"),
    ],
)
def test_the_engine_ends_with_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    write(tmp_path, "m", PYTHON, "nonsense")
    engine = (sys.executable, "-m", "reference_engine", "--runner", "none", "--port", "0")
    ended = subprocess.run(
        [*engine, *arguments, "--model-repository", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith("walkaway engine: ")
    assert sentence in line
