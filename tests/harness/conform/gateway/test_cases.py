"""The declarations of a gateway's cases, and how they are chosen."""

import pytest

from harness.conform.config import ConformConfig, chosen_cases
from harness.conform.gateway.case import DIALECTS
from harness.conform.gateway.cases import gateway_cases
from harness.errors import ConfigError
from harness.store.conform_result import Level


def chosen(*wanted: str, quick: bool = False) -> list[str]:
    return [one.id for one in chosen_cases(ConformConfig(wanted=wanted, upstream="1", quick=quick))]


def test_a_name_without_a_dialect_means_all_dialects() -> None:
    assert chosen("hop/unary") == [f"hop/unary/{dialect}" for dialect in DIALECTS]
    assert chosen("hop/unary/chat") == ["hop/unary/chat"]
    assert chosen("bill/") == [f"bill/left/{dialect}" for dialect in DIALECTS]
    assert chosen() == [*gateway_cases()]
    assert 0 < len(chosen(quick=True)) < len(gateway_cases()) / 3


def test_cases_of_a_server_are_no_cases_of_a_gateway() -> None:
    with pytest.raises(ConfigError, match="there is no case 'stream/fin-decode'"):
        chosen("stream/fin-decode")
    with pytest.raises(ConfigError, match="hop/unary is a case of gateways: add --upstream"):
        chosen_cases(ConformConfig(wanted=["hop/unary"]))


def test_each_case_that_can_fail_says_what_to_change() -> None:
    for name, (case, dialect, *_) in gateway_cases().items():
        assert name == case.id
        assert name.endswith(f"/{dialect}")
        assert case.level is Level.INFO or case.remedy
        assert not case.remedy.endswith(".")
