"""The log of the wire: what it keeps, and what it masks."""

from pathlib import Path

import pytest

from harness.client.wire_log import WireLog
from harness.store.conform_result import read_wire_log
from tests.harness.client.asking import SPEC

KEY = "sk-secret-of-a-test"


@pytest.mark.parametrize("before", [0, 590, 1195])
def test_a_key_that_a_server_sends_back_is_masked_wherever_it_stands(
    tmp_path: Path, before: int
) -> None:
    log, file = WireLog({"Authorization": f"Bearer {KEY}"}), tmp_path / "wire.jsonl"
    log.begin(file)
    tap = log.tap(SPEC)
    assert tap is not None
    tap.read(1, b"x" * before + KEY.encode(), 1)
    log.end()
    (event,) = read_wire_log(file)
    assert event.text.startswith("x" * min(before, 600))
    assert KEY[:4] not in event.text


def test_a_process_that_is_killed_loses_little(tmp_path: Path) -> None:
    log, file = WireLog({}), tmp_path / "wire.jsonl"
    log.begin(file)
    tap = log.tap(SPEC)
    assert tap is not None
    for number in range(1000):
        tap.read(number, b"token", 1)
    assert len(read_wire_log(file)) > 700
