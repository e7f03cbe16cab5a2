"""A folder of its own for each test of `walkaway gate`, whose baselines lie below where it runs."""

from pathlib import Path

import pytest


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`results/baselines` of this test alone."""
    monkeypatch.chdir(tmp_path)
