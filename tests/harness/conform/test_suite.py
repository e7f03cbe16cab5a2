"""The suite's own process: its load process ends or hangs, or the server is gone."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.conform.case import CASES, Case, Selection
from harness.conform.order import Order
from harness.conform.reports import as_junit, as_markdown
from harness.conform.suite import ConformConfig, Suite, all_cases
from harness.conform.verdict import Expectation
from harness.errors import TargetError
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
import json, sys, time
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
    case = {"id": name, "level": "must", "verdict": "pass", "requirement": "", "reason": "good"}
    say(event="case", id=name, case=case | ({"aftermath": "dead"} if act == "die" else {}))
    if act == "die":
        sys.exit()
"""


class Shown:
    def __init__(self) -> None:
        self.decisions: list[tuple[str, Verdict]] = []

    def begin(self, result: ConformResult) -> None: ...

    def started(self, case: Case) -> None: ...

    def decided(self, result: CaseResult) -> None:
        self.decisions.append((result.id, result.verdict))


def a_suite(
    folder: Path, acts: Sequence[str], *, expected: Sequence[Expectation] = (), **changes: Any
) -> Suite:
    all_cases()
    clock = count(0.0, 10.0)
    script = json.dumps(dict(zip(IDS, acts, strict=True)))
    return Suite(
        config=GIVEN,
        secrets=[KEY],
        order=Order(
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
        clock_s=lambda: next(clock),
        **changes,
    )


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
def test_a_check_that_fails_is_undecided_and_the_rest_goes_on(
    tmp_path: Path, act: str, why: str
) -> None:
    suite = a_suite(tmp_path, ["pass", act, "pass"])
    assert suite.run() is None
    assert verdicts(tmp_path) == ["pass", "cannot_decide", "pass"]
    assert why in suite.result.cases[1].reason
    assert suite.finish().exit_code == 4
    assert not [file for file in tmp_path.rglob("*.*") if KEY.encode() in file.read_bytes()]


def test_after_a_death_nothing_more_is_decided(tmp_path: Path) -> None:
    suite = a_suite(tmp_path, ["die", "pass", "pass"])
    assert suite.run() is None
    assert verdicts(tmp_path) == ["pass", "cannot_decide", "cannot_decide"]
    assert suite.result.cases[2].reason == "the server is gone since stream/fin-decode"


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
    if need in ("pid", "direct", "drop_packets"):
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
