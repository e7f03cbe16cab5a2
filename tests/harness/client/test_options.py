"""Options of plain Locust's command line, and the options of runs from a web page."""

import argparse
import sys

import pytest

from harness.errors import ConfigError
from harness.locust.options import add_arguments, check_host_is_named, read_order
from tests.harness.plans import typed, typed_plan


def test_a_pages_runs_have_the_same_headers_and_no_secret_in_their_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ["--walkaway-header", "X-Key=secret", "--walkaway-header=X-More=1"]
    monkeypatch.setattr(sys, "argv", ["locust", *flags])
    order = read_order(typed(*flags))
    assert order["headers"] == {"X-Key": "secret", "X-More": "1"}
    hidden = ["--walkaway-header", "X-Key=***", "--walkaway-header=X-More=***"]
    assert order["command"] == ["locust", *hidden]
    assert (order["ca_file"], order["api_key_env"]) == (None, None)


AT_A_RATE = "--walkaway-arrivals=constant"


@pytest.mark.parametrize(
    ("flags", "users", "raised_by"),
    [
        ([], 20_000, "streams"),
        ([AT_A_RATE, "--walkaway-rate=20000"], 1, "rate"),
        ([AT_A_RATE, "--walkaway-max-streams=20000"], 1, "streams"),
    ],
)
def test_what_is_beyond_a_cap_is_refused_with_the_flag_that_raises_it(
    flags: list[str], users: int, raised_by: str
) -> None:
    flag = f"--walkaway-most-{raised_by}=20000"
    with pytest.raises(ConfigError, match=f"more than --walkaway-most-.*; {flag} raises it"):
        typed_plan(*flags, users=users)
    typed_plan(*flags, flag, users=users)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--walkaway-most-rate=0", "--walkaway-most-rate must be .*, not 0"),
        ("--walkaway-most-rate=2000000", "--walkaway-most-rate must be .*, not 2000000"),
        ("--walkaway-tokens=1;2", "--walkaway-tokens must be numbers .*, not '1;2'"),
        ("--walkaway-timeout=0", "--walkaway-timeout must be more than 0.0, not 0"),
        ("--walkaway-ca-file=nowhere.pem", "--walkaway-ca-file nowhere.pem: No such file"),
        ("--walkaway-header=secret", "--walkaway-header: must look like Name=value"),
    ],
)
def test_a_mistake_is_refused(flag: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        typed_plan(flag)


@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [
        (["--headless"], True),
        (["--autostart"], True),
        (["--headless", "--host", "http://127.0.0.1:1"], False),
        (["--headless", "--worker"], False),  # its master names the host
        (["--headless", "--walkaway-plan", "-"], False),
        ([], False),  # the page asks for it
    ],
)
def test_no_load_begins_at_a_server_that_was_not_named(flags: list[str], is_refused: bool) -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--headless", "--autostart", "--worker"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--host")
    add_arguments(parser.add_argument_group("walkaway"))
    options = parser.parse_args(flags)
    if not is_refused:
        check_host_is_named(options)
        return
    with pytest.raises(ConfigError, match=r"no server is named.*--host http://127\.0\.0\.1:8000"):
        check_host_is_named(options)
