"""The suite's own process: its load process ends or hangs, or the server is gone."""

import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.conform.case import CASES, NOT_GIVEN, Case, Selection
from harness.conform.config import ConformConfig, all_cases
from harness.conform.following import Suite
from harness.conform.messages import SuiteRequest
from harness.conform.pacing import SuiteStanding
from harness.conform.reports import as_junit, as_markdown
from harness.conform.verdict import Expectation
from harness.errors import InterruptedRunError, TargetError
from harness.run.process import Interruption
from harness.store.conform_result import (
    CONFORM_FILE,
    CaseResult,
    ConformResult,
    ConformTarget,
    Machine,
    Verdict,
    read_conform,
)
from harness.store.run_folder import RunFolder

IDS = ("stream/fin-decode", "stream/rst-decode", "unary/leave")
SECONDS_A_LOOK = 10.0  # of the clock of these tests
KEY = "sk-secret-of-a-test"
GIVEN = ConformConfig(
    target_url="http://127.0.0.1:1",
    engine="my own.toml",
    api_key_env="MY_KEY",
    headers={"X-Other": KEY},
    tries=3,
    loads_any_host=True,
    direct="http://127.0.0.1:2",
)
# A load process that says what stands in its arguments, case by case, as far as they go.
CHILD = """
import json, os, signal, sys, time
order = json.loads(sys.stdin.readline())
script = json.loads(sys.argv[1])
def say(**event): print(json.dumps(event), flush=True)
say(event="facts", facts={"slots": 4, "step_s": 0.01, "ttft_s": 0.02, "lag_s": 0.0})
for name in order["cases"]:
    act = script[name]
    if act in ("unusable", "gone"):
        say(event=act, why="it is odd")
        sys.exit()
    say(event="started", id=name)
    if act == "crash":
        sys.exit("Segmentation fault, the key was sk-secret-of-a-test")
    if act == "hang":
        sys.stdin.read()
    if act == "ctrl-c":
        os.kill(os.getppid(), signal.SIGINT)
        sys.stdin.read()
    case = {"id": name, "level": "must", "verdict": "pass", "requirement": "", "reason": "good"}
    if act == "ctrl-c, some known":
        say(event="so_far", id=name, case={**case, "verdict": "cannot_decide", "left": 3})
        os.kill(os.getppid(), signal.SIGINT)
        sys.stdin.read()
    if act == "crash, some known":
        say(event="so_far", id=name, case={**case, "left": 3})
        sys.exit("Segmentation fault")
    if act == "die":
        first = {**case, "id": order["cases"][0], "verdict": "fail", "aftermath": "dead"}
        say(event="case", id=first["id"], case={**first, "left": 3, "left_in_all": 5})
        say(event="unusable", why="the server died")
        sys.exit()
    say(event="case", id=name, case=case | ({"verdict": "fail"} if act == "fail" else {}))
"""


class Shown:
    def __init__(self) -> None:
        self.decisions: list[tuple[str, Verdict]] = []

    def begin(self, result: ConformResult, cases: Sequence[Case]) -> None: ...

    def started(self, case: Case, place: SuiteStanding) -> None: ...

    def decided(self, result: CaseResult) -> None:
        self.decisions.append((result.id, result.verdict))


def a_suite(
    folder: Path, acts: Sequence[str], *, expected: Sequence[Expectation] = (), **changes: Any
) -> Suite:
    all_cases()
    script = json.dumps(dict(zip(IDS, acts, strict=True)))
    more: dict[str, Any] = {"config": GIVEN} | changes
    return Suite(
        secrets=[KEY],
        order=SuiteRequest(
            plan=msgspec.Raw(b"{}"),
            cases=[],
            folder=str(folder),
            settle_s=1.0,
            tries=2,
            quick=False,
            seed=0,
        ),
        selection=Selection([CASES[name] for name in IDS], {}, {}, {}),
        result=ConformResult(
            walkaway="0",
            started_at="",
            command="",
            seed=0,
            machine=Machine(cpu="", cores=1, python=""),
            target=ConformTarget(engine="openai", url="http://127.0.0.1:1", model="m"),
        ),
        folder=RunFolder(folder),
        expected=list(expected),
        show=Shown(),
        interruption=Interruption(),
        command=lambda: [sys.executable, "-c", CHILD, script],
        **more,
    )


def quick_clock() -> Callable[[], float]:
    seconds = count(0.0, SECONDS_A_LOOK)
    return lambda: next(seconds)


def verdicts(folder: Path) -> list[str]:
    return [one.verdict.value for one in read_conform(folder / CONFORM_FILE).cases]


def test_all_cases_are_decided_and_written(tmp_path: Path) -> None:
    suite = a_suite(tmp_path, ["pass", "pass", "pass"])
    assert suite.run() is None
    assert suite.finish().exit_code == 0
    assert verdicts(tmp_path) == ["pass"] * 3
    assert (suite.result.slots, suite.result.step_s) == (4, 0.01)
    assert shlex.split(suite.result.cases[0].repeat) == [
        *("walkaway", "conform", IDS[0], "--target", "http://127.0.0.1:1"),
        *("--engine", "my own.toml", "--model", "m", "--slots", "4", "--api-key-env", "MY_KEY"),
        *("--header", "X-Other=***", "--direct", "http://127.0.0.1:2", "--tries", "3"),
        *("--seed", "0", "--yes-load-this-host"),
    ]


@pytest.mark.parametrize(
    ("act", "why"), [("crash", "Segmentation fault"), ("hang", "took too long")]
)
def test_a_load_process_that_fails_is_no_verdict_on_the_server_and_the_rest_is_run(
    tmp_path: Path, act: str, why: str
) -> None:
    suite = a_suite(tmp_path, ["pass", act, "pass"], clock_s=quick_clock())
    assert suite.run() is None
    assert verdicts(tmp_path) == ["pass", "harness", "pass"]
    assert why in suite.result.cases[1].reason
    assert suite.finish().exit_code == 4
    assert not [file for file in tmp_path.rglob("*.*") if KEY.encode() in file.read_bytes()]


def test_what_was_known_of_a_case_is_kept_when_its_process_ends(tmp_path: Path) -> None:
    suite = a_suite(tmp_path, ["pass", "crash, some known", "pass"], clock_s=quick_clock())
    assert suite.run() is None
    assert verdicts(tmp_path) == ["pass", "pass", "pass"]
    kept = suite.result.cases[1]
    assert kept.left == 3
    assert "; it ended early: the check's own process ended with code 1" in kept.reason


def test_a_death_is_laid_at_an_earlier_case_and_nothing_more_is_decided(tmp_path: Path) -> None:
    suite = a_suite(tmp_path, ["pass", "die", "pass"])
    assert suite.run() is None
    assert verdicts(tmp_path) == ["fail", "cannot_decide", "cannot_decide"]
    assert suite.result.cases[2].reason == "the server died"
    assert isinstance(suite.show, Shown)
    assert [name for name, _ in suite.show.decisions] == [IDS[0], IDS[0], *IDS[1:]]


def test_the_rest_is_not_run_when_the_time_is_up(tmp_path: Path) -> None:
    short = dataclasses.replace(GIVEN, max_seconds=5.0)
    suite = a_suite(
        tmp_path,
        ["pass", "hang", "hang"],
        config=short,
        clock_s=quick_clock(),
        until_s=SECONDS_A_LOOK,
    )
    assert suite.run() is None
    result = suite.finish()
    assert result.not_run.keys() | {one.id for one in result.cases} == set(IDS)
    assert result.not_run
    assert "--max-seconds 5" in result.not_run[IDS[-1]]
    assert result.exit_code == 4, "a case that must be decided is missing"


@pytest.mark.parametrize(
    ("acts", "known", "missing", "said"),
    [
        (["ctrl-c", "", ""], [], [*IDS], "interrupted before a case was decided"),
        (["pass", "ctrl-c", ""], ["pass"], [*IDS[1:]], "interrupted; what was decided is in"),
        (["ctrl-c, some known", "", ""], ["cannot_decide"], [*IDS[1:]], "what was decided is in"),
    ],
)
def test_an_interruption_keeps_all_that_is_known(
    tmp_path: Path, acts: list[str], known: list[str], missing: list[str], said: str
) -> None:
    suite = a_suite(tmp_path, acts)
    with suite.interruption:
        failure = suite.run()
    assert isinstance(failure, InterruptedRunError)
    assert said in str(failure)
    result = suite.finish()
    assert verdicts(tmp_path) == known
    assert result.not_run == dict.fromkeys(missing, "the run was interrupted")
    assert result.exit_code == 4, "a case that must be decided is missing"


def test_with_fail_fast_nothing_is_run_after_a_failure(tmp_path: Path) -> None:
    fast = dataclasses.replace(GIVEN, fail_fast=True)
    suite = a_suite(tmp_path, ["fail", "hang", "hang"], config=fast)
    assert suite.run() is None
    assert suite.finish().exit_code == 3
    assert list(suite.result.not_run) == [*IDS[1:]]
    assert "stream/fin-decode had failed (--fail-fast)" in suite.result.not_run[IDS[1]]


def test_a_server_that_cannot_be_measured_decides_nothing(tmp_path: Path) -> None:
    suite = a_suite(tmp_path, ["unusable", "pass", "pass"])
    assert suite.run() is None
    assert verdicts(tmp_path) == ["cannot_decide"] * 3


def test_a_server_that_never_served_is_an_error_of_its_own(tmp_path: Path) -> None:
    failure = a_suite(tmp_path, ["gone", "pass", "pass"]).run()
    assert isinstance(failure, TargetError)


def test_a_passing_case_that_is_listed_is_stale(tmp_path: Path) -> None:
    suite = a_suite(tmp_path, ["pass"] * 3, expected=[Expectation(IDS[0], "", "", "known")])
    suite.run()
    assert suite.finish().exit_code == 3
    assert b'failures="1"' in as_junit(suite.result)
    assert "stale: remove the line" in as_markdown(suite.result)


def needing() -> Iterator[tuple[str, str]]:
    for case in all_cases():
        for need in sorted(case.needs):
            yield case.id, need


@pytest.mark.parametrize(("name", "need"), list(needing()))
def test_a_case_without_what_it_needs_is_not_run_but_by_its_name(name: str, need: str) -> None:
    case = CASES[name]
    if need in NOT_GIVEN:
        assert Selection.of([case], [], {need: False}, {}).not_run.keys() == {name}
        assert Selection.of([case], [name], {need: False}, {}).missing.keys() == {name}
    else:
        assert Selection.of([case], [], {}, {need: False}).refused.keys() == {name}


def test_the_declarations_are_whole() -> None:
    assert ConformConfig().engine == "reference"
    for case in all_cases():
        assert case.requirement.endswith("."), case.id
        assert case.wire, case.id
        assert case.passes, case.id
        assert set(case.methods.split()) <= {*"POKBRWC", "pid"}, case.id


def test_the_load_process_may_end_each_run_of_a_case_itself(tmp_path: Path) -> None:
    """On a server whose first token takes half a minute."""
    suite = a_suite(tmp_path, ["pass"] * len(IDS))
    suite.result.ttft_s, suite.order.settle_s = 30.0, 2.0
    case = CASES[IDS[0]]
    assert suite._limit_s(case) > 4 * case.longest_s(2.0, 30.0) > 4 * 900.0
