"""Options of plain Locust's command line, and those that a web page's runs get."""

import argparse
import sys

import pytest

from harness.errors import ConfigError
from harness.load.options import add_arguments, load_plan, read_order
from harness.workload.plan import LoadPlan


def parsed(*typed: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group("walkaway"))
    return parser.parse_args(typed)


def test_a_pages_runs_have_the_same_headers_and_no_secret_in_their_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    typed = ["--walkaway-header", "X-Key=secret", "--walkaway-header=X-More=1"]
    monkeypatch.setattr(sys, "argv", ["locust", *typed])
    order = read_order(parsed(*typed))
    assert order["headers"] == {"X-Key": "secret", "X-More": "1"}
    hidden = ["--walkaway-header", "X-Key=***", "--walkaway-header=X-More=***"]
    assert order["command"] == ["locust", *hidden]
    assert (order["ca_file"], order["api_key_env"]) == (None, None)


def plan_of(*typed: str, users: int = 1) -> LoadPlan:
    options = parsed(*typed)
    options.num_users, options.run_time, options.host = users, 2, None
    return load_plan(options)


AT_A_RATE = "--walkaway-arrivals=constant"


@pytest.mark.parametrize(
    ("typed", "users", "raised_by"),
    [
        ([], 20_000, "streams"),
        ([AT_A_RATE, "--walkaway-rate=20000"], 1, "rate"),
        ([AT_A_RATE, "--walkaway-max-streams=20000"], 1, "streams"),
    ],
)
def test_what_is_beyond_a_cap_is_refused_with_the_flag_that_raises_it(
    typed: list[str], users: int, raised_by: str
) -> None:
    flag = f"--walkaway-most-{raised_by}=20000"
    with pytest.raises(ConfigError, match=f"more than `run.most_.*; {flag} raises it: each takes"):
        plan_of(*typed, users=users)
    plan_of(*typed, flag, users=users)


def test_how_many_arrivals_may_be_open_at_once_is_an_option() -> None:
    usual, fewer = plan_of(AT_A_RATE), plan_of(AT_A_RATE, "--walkaway-max-streams=5")
    assert usual.schedule is not None
    assert fewer.schedule is not None
    assert (usual.schedule.max_streams, fewer.schedule.max_streams) == (1000, 5)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--walkaway-most-rate=0", "`run.most_rate` must be .*, not 0"),
        ("--walkaway-most-rate=2000000", "`run.most_rate` must be .*, not 2000000"),
        ("--walkaway-tokens=1;2", "Tokens: '1;2' is refused; allowed: "),
        ("--walkaway-ca-file=nowhere.pem", "--walkaway-ca-file nowhere.pem: No such file"),
        ("--walkaway-header=secret", "--walkaway-header: must look like Name=value"),
    ],
)
def test_a_mistake_is_refused(typed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(typed)
