"""The server's command: in the foreground, or one that restarts a server elsewhere and returns."""

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.experiments.outcome import CannotDecideError
from harness.search.keeper import ServerKeeper

STAYS = "import sys; sys.stdin.read()"
RETURNS = "pass"
FAILS = "import sys; sys.exit('the address is in use')"


def keeper(tmp_path: Path, script: str, *, is_up: bool = False) -> ServerKeeper:
    command = [sys.executable, "-c", script]
    log = tmp_path / "server.log"
    return ServerKeeper(command, log, is_up=lambda: is_up, is_ready=lambda: True, longest_s=20)


@pytest.fixture(name="foreground")
def _foreground(tmp_path: Path) -> Iterator[ServerKeeper]:
    one = keeper(tmp_path, STAYS)
    yield one
    one.close()


def test_a_command_in_the_foreground_is_the_server_until_the_next_start(
    foreground: ServerKeeper,
) -> None:
    foreground.start()
    first = foreground.pid
    assert first is not None
    foreground.start()
    assert not psutil.pid_exists(first)
    second = foreground.pid
    assert second is not None
    assert second != first
    foreground.close()
    assert not psutil.pid_exists(second)
    with pytest.raises(CannotDecideError, match="has ended"):
        foreground.start()


def test_a_command_that_restarts_a_server_elsewhere_is_waited_for(tmp_path: Path) -> None:
    one = keeper(tmp_path, RETURNS, is_up=True)
    one.start()
    assert one.pid is None, "it has returned, and the server is not its own"
    one.close()


def test_a_command_that_cannot_take_the_address_is_no_fresh_start(tmp_path: Path) -> None:
    one = keeper(tmp_path, FAILS, is_up=True)
    with pytest.raises(CannotDecideError, match=r"ended with code 1: see .*server\.log"):
        one.start()
    one.close()
    assert "in use" in (tmp_path / "server.log").read_text()


def test_a_command_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    one = ServerKeeper(
        ["/no/such/server"], tmp_path / "log", is_up=lambda: False, is_ready=lambda: True
    )
    with pytest.raises(CannotDecideError, match="--restart /no/such/server: "):
        one.start()
    one.close()
