"""A made-up run's folder, as a test asks for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.made_up.played import save_played

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(*, name: str = "run", **more: Any) -> Path:
        return save_played(tmp_path / name, **more)

    return make
