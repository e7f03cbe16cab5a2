"""Variables that name a server once for all commands."""

import sys

import pytest
from typer.testing import CliRunner

from harness.commands.app import SERVER_VARIABLES, typed_variables
from harness.commands.index import app
from harness.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in SERVER_VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "argv", ["walkaway", "run", "--model=m"])


def test_a_command_is_repeated_with_the_variables_that_it_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert typed_variables() == []
    monkeypatch.setenv("WALKAWAY_TARGET", "http://127.0.0.1:8000")
    monkeypatch.setenv("WALKAWAY_MODEL", "another")  # the flag counts more
    monkeypatch.setenv("WALKAWAY_HEADER", "x-tenant=a x-trace=b")
    found = ["env", "WALKAWAY_TARGET=http://127.0.0.1:8000", "WALKAWAY_HEADER=***"]
    assert typed_variables() == found


@pytest.mark.parametrize("header", ["Authorization=abc", "x-api-key=abc", "Cookie=abc"])
def test_a_key_in_clear_is_refused(monkeypatch: pytest.MonkeyPatch, header: str) -> None:
    monkeypatch.setenv("WALKAWAY_HEADER", f"x-tenant=a {header}")
    with pytest.raises(ConfigError, match="--api-key-env") as refused:
        typed_variables()
    assert "abc" not in str(refused.value)


@pytest.mark.parametrize("variable", ["WALKAWAY_TARGET", "WALKAWAY_ENGINE"])
def test_a_server_that_the_suite_starts_itself_is_not_the_one_of_the_variables(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:8000" if "TARGET" in variable else "vllm")
    result = CliRunner().invoke(app, ["conform", "--against", "bad"])
    assert f"leave out --{variable[9:].lower()} ({variable})" in str(result.exception)
