"""The order of the cases, the time that is left, the dated suites, the badge, the last sentence."""

import json
import re
from typing import Any

import pytest

from harness.conform.bad_server import WAYS, table
from harness.conform.config import (
    ConformConfig,
    all_cases,
    cases_of,
    chosen_cases,
    known_suites,
)
from harness.conform.pacing import in_order, time_left, typical_times
from harness.conform.reports import as_badge
from harness.conform.sentence import sentence
from harness.errors import ConfigError
from harness.store.conform_result import CaseResult, Level, Verdict
from tests.made_up.conform import conform_result


def result(name: str, verdict: Verdict, **more: Any) -> CaseResult:
    more = {"level": Level.MUST} | more
    return CaseResult(id=name, verdict=verdict, requirement="", reason="", **more)


def test_cases_that_find_a_server_that_never_stops_come_first() -> None:
    ordered = [case.id for case in in_order(reversed(all_cases()))]
    assert ordered.index("unary/leave") < ordered.index("wedge/health") < ordered.index("leak/kv")
    assert next(iter(chosen_cases(ConformConfig()))).id == "stream/fin-decode"


def test_the_time_left_follows_from_the_cases_of_this_run() -> None:
    typical = {"a": 10.0, "b": 20.0, "c": 30.0}
    assert time_left(["a", "c"], {}, typical) == 40.0
    assert time_left(["c"], {"a": 30.0, "b": 50.0}, typical) == pytest.approx(30 * 90 / 40)
    assert time_left(["new"], {}, typical) == 20.0
    assert time_left([], {"a": 1.0}, typical) == 0.0


def test_a_typical_time_is_that_of_a_case() -> None:
    ids = {case.id for case in all_cases()}
    assert typical_times().keys() <= ids
    full, quick = typical_times(), typical_times(quick=True)
    assert full.keys() == quick.keys()
    assert all(quick[one] <= full[one] for one in full)
    assert {one.id for one in all_cases() if one.quick} <= {
        one for one in full if quick[one] < full[one]
    }


def test_a_suite_stays_what_it_was_and_no_case_is_renamed() -> None:
    cases = all_cases()
    for suite in known_suites():
        assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", suite)
        named = {case.id for case in cases_of(suite, cases)}
        assert named == {case.id for case in cases if case.since <= suite}, suite


def test_an_unknown_suite_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--suite 2020-01: there is no such suite; known: 2026-"):
        chosen_cases(ConformConfig(suite="2020-01"))
    some = chosen_cases(ConformConfig(suite="2026-12", quick=True))
    assert {case.id for case in some} < {case.id for case in all_cases()}


@pytest.mark.parametrize(
    ("code", "color"), [(0, "brightgreen"), (3, "red"), (4, "yellow"), (5, "lightgrey")]
)
def test_a_badge_is_what_shields_reads(code: int, color: str) -> None:
    badge = json.loads(as_badge(conform_result(exit_code=code, suite="2026-12")))
    assert badge == {
        "schemaVersion": 1,
        "label": "walkaway conform 2026-12",
        "message": "2 of 6 pass, 2 undecided",
        "color": color,
    }


def test_the_last_line_says_what_passed_what_failed_and_what_to_change() -> None:
    good = [result("a/one", Verdict.PASS), result("a/none", Verdict.NOT_SUPPORTED)]
    assert sentence(good, {}) == "1 of 1 cases passed."
    assert sentence(good, {"b/x": "why"}) == "1 of 1 cases passed (1 not run)."
    assert sentence([], {}) == "No case was decided."
    bad = [
        *good,
        result("c/counts", Verdict.FAIL, remedy="count each leave once"),
        *(result(f"s/{n}", Verdict.FAIL, remedy="stop when they leave") for n in range(6)),
        result("l/late", Verdict.HARNESS),
        result("k/known", Verdict.FAIL, remedy="never mind", expected="listed"),
        result("w/watch", Verdict.FAIL, remedy="never mind", level=Level.SHOULD),
    ]
    assert sentence(bad, {}) == (
        "1 of 11 cases passed, 1 failed as expected, 1 failed without being judged (--strict "
        "judges them), 1 could not be decided and 7 failed: to mend the server, stop when they "
        "leave (s/0, s/1, s/2, s/3 and 2 more); and count each leave once (c/counts)."
    )


def test_a_gateway_is_told_what_to_change_once_for_all_dialects() -> None:
    cases = [result(f"hop/unary/{one}", Verdict.FAIL, remedy="close it") for one in ("a", "b")]
    for case in cases:
        case.dialect = case.id[-1]
    assert sentence(cases, {}) == (
        "0 of 2 cases passed and 2 failed: to mend the gateway, close it (hop/unary)."
    )


def test_each_case_that_can_fail_says_what_to_change() -> None:
    for case in all_cases():
        assert bool(case.remedy) == (case.level is not Level.INFO), case.id
        assert not case.remedy.endswith("."), case.id


def test_the_bad_server_says_which_of_its_ways_were_found() -> None:
    ids = {case.id for case in all_cases()}
    assert len(WAYS) == len({way.fault for way in WAYS}) == len({way.case for way in WAYS}) == 8
    assert {way.case for way in WAYS} <= ids
    told = table([result(WAYS[0].case, Verdict.FAIL), result(WAYS[1].case, Verdict.PASS)])
    assert "8 ways; 1 were found" in told[0]
    assert told[1].endswith("found by unary/leave")
    assert told[2].endswith("NOT FOUND by queue/bystander")
    assert told[3].endswith("not looked for: n/parent was not run")
