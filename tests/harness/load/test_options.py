"""What plain Locust was told on its command line, as a web page's runs are told it."""

import argparse
import sys

import pytest

from harness.load.options import add_arguments, read_order


def test_a_pages_runs_have_the_same_headers_and_no_secret_in_their_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    typed = ["--walkaway-header", "X-Key=secret", "--walkaway-header=X-More=1"]
    monkeypatch.setattr(sys, "argv", ["locust", *typed])
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group("walkaway"))
    order = read_order(parser.parse_args(typed))
    assert order["headers"] == {"X-Key": "secret", "X-More": "1"}
    hidden = ["--walkaway-header", "X-Key=***", "--walkaway-header=X-More=***"]
    assert order["command"] == ["locust", *hidden]
    assert (order["ca_file"], order["api_key_env"]) == (None, None)
