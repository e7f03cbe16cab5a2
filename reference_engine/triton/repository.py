"""A folder in the layout of Triton's model repositories, loaded and served.

NAME/config.pbtxt
NAME/VERSION/model.py     the highest VERSION is served; an ensemble needs none
"""

import asyncio
from collections.abc import Collection
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from reference_engine.config import EngineConfigError
from reference_engine.triton.configuration import read_configuration
from reference_engine.triton.ensemble import Ensemble, order_steps
from reference_engine.triton.model import Model
from reference_engine.triton.python_model import PythonModel


class Repository:
    """`models` by name. Close it on the event loop that loaded it."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}

    @property
    def python_models(self) -> list[PythonModel]:
        return [model for model in self.models.values() if isinstance(model, PythonModel)]

    async def close(self) -> None:
        await asyncio.gather(*(model.close() for model in self.python_models))

    def check_integrity(self) -> None:
        """Raises RuntimeError at the first contradiction."""
        for model in self.python_models:
            model.check_integrity()


async def load_repository(
    folder: Path, *, is_faithful: bool = False, taken: Collection[str] = ()
) -> Repository:
    """Returns when every model is ready. `taken` are names of the server's own models. Raises
    EngineConfigError with one sentence.
    """
    configs = read_configurations(folder)
    for name in configs.keys() & set(taken):
        raise EngineConfigError(f"{folder / name}: the engine is the model {name!r}: rename it")
    repository = Repository()
    for name, config in configs.items():
        if config.HasField("ensemble_scheduling"):
            order_steps(config, configs)
            version = max(_versions(folder / name), default=1)
            repository.models[name] = Ensemble(config, str(version), repository.models)
        else:
            file = _model_file(folder / name, config)
            repository.models[name] = PythonModel(config, file, is_faithful=is_faithful)
    try:
        await asyncio.gather(*(model.start() for model in repository.python_models))
    except BaseException:
        await repository.close()
        raise
    return repository


def read_configurations(folder: Path) -> dict[str, ModelConfig]:
    try:
        models = sorted(one for one in folder.iterdir() if one.is_dir() and one.name[0] not in "._")
    except OSError as error:
        raise EngineConfigError(f"--model-repository {folder}: {error.strerror}") from error
    if not models:
        raise EngineConfigError(f"--model-repository {folder}: it holds no folder of a model")
    return {model.name: read_configuration(model / "config.pbtxt") for model in models}


def _model_file(folder: Path, config: ModelConfig) -> Path:
    version = max(_versions(folder), default=None)
    if version is None:
        raise EngineConfigError(f"{folder} has no version: put the model into {folder}/1")
    file = folder / str(version) / (config.default_model_filename or "model.py")
    if not file.is_file():
        raise EngineConfigError(f"{file} is missing")
    return file.absolute()


def _versions(folder: Path) -> list[int]:
    return [int(one.name) for one in folder.iterdir() if one.is_dir() and one.name.isdecimal()]
