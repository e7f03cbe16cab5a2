"""`walkaway gate` as its command calls it: on a run's folder, with what it said and refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.commands.gate import GateOrder, gate_and_show
from harness.errors import ConfigError


def gate(run: Path, limits: str = "leaked_blocks.max == 0", **more: Any) -> int:
    file = Path("limits.txt")
    file.write_text(limits)
    order = GateOrder(run=run, limits=file, **more)
    return gate_and_show(order, as_json=True, quiet=False)


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(order: GateOrder) -> str:
    with pytest.raises(ConfigError) as raised:
        gate_and_show(order, as_json=True, quiet=False)
    return str(raised.value)
