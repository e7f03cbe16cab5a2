"""A made-up run to which a test adds its rows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.made_up.run import RunBuilder


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[[], RunBuilder]:
    return lambda: RunBuilder(tmp_path)


@pytest.fixture
def run(make_run: Callable[[], RunBuilder]) -> RunBuilder:
    return make_run()
