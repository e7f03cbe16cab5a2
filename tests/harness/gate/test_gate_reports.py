"""Reports of the gate: on a terminal, as JUnit and as Markdown."""

from collections import Counter

import junitparser
import pytest
from rich.console import Console

from harness.commands.gate import print_judgement
from harness.gate.judge import Check, GateVerdict, Judgement
from harness.gate.reports import MOST_BYTES, as_junit, as_markdown
from tests.conftest import Snapshot

CHECKS = [
    Check(name="itl_s.p99 <= 2", verdict=GateVerdict.PASS, measured="1 s", reason="within"),
    Check(name="a.p99 <= 2", verdict=GateVerdict.FAIL, measured="> 2 | 3", reason="<b> & more"),
    Check(
        name="b.p99 <= 2", verdict=GateVerdict.CANNOT_DECIDE, reason="too few", to_decide="368 more"
    ),
]


def judgement(checks: list[Check] | None = None) -> Judgement:
    return Judgement(
        run="results/`x`|y",
        workload="gate",
        verdict=GateVerdict.FAIL,
        checks=CHECKS if checks is None else checks,
        baseline="a-run-before",
        left_out=["build: ttft_s.p50"],
    )


def shown(one: Judgement, saved: str | None = None, width: int = 80) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        print_judgement(console, one, saved)
    return captured.get()


def test_the_gravest_come_first_with_what_would_decide(snapshot: Snapshot) -> None:
    snapshot("gate/terminal", shown(judgement(), saved="saved as the baseline: gate.json"))
    snapshot("gate/markdown", as_markdown(judgement()))


def test_junit_is_read_back_with_a_test_for_each_limit() -> None:
    read = junitparser.JUnitXml.fromstring(as_junit(judgement()).decode())
    (suite,) = read
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (3, 1, 1, 0)
    passed, failed, undecided = suite
    assert passed.is_passed
    assert isinstance(failed.result[0], junitparser.Failure)
    assert failed.result[0].message == "> 2 | 3: <b> & more"
    assert isinstance(undecided.result[0], junitparser.Error), "never taken for a pass"
    assert "would decide: 368 more" in str(undecided.result[0].text)


def test_junit_stands_characters_that_xml_forbids() -> None:
    odd = Check(name="a\x00b", verdict=GateVerdict.FAIL, reason="c\x1bd")
    (suite,) = junitparser.JUnitXml.fromstring(as_junit(judgement([odd])).decode())
    (case,) = suite
    assert (case.name, case.result[0].message) == ("a?b", "c?d")


def test_markdown_fits_a_step_summary() -> None:
    text = as_markdown(judgement(CHECKS * 20_000))
    assert len(text.encode()) < MOST_BYTES + 100
    assert text.splitlines()[-1].endswith("more | | |")


def test_on_a_narrow_terminal_the_names_of_limits_give_way() -> None:
    lines = shown(judgement(CHECKS), width=40).splitlines()
    assert max(map(len, lines)) <= 40
    (head,) = (line for line in lines if line.startswith("verdict"))
    assert 40 - head.index("why") >= 12
    assert any("cannot decide" in line for line in lines)


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize(
    "name",
    ["leaked_slots.max == 0", "new / baseline: cancel_latency_prefill_steps.mean <= 1.12345678"],
)
def test_no_word_is_lost_beyond_the_edge(name: str, width: int) -> None:
    reason = "not measurable: the server shows no gauge of requests that run, " * 3
    to_decide = "a server with `max_num_seqs` known, or the workload `gate_black_box`"
    said = {"reason": f"{reason}nor any other", "to_decide": to_decide, "measured": "12 of 500"}
    one = Check(name=name, verdict=GateVerdict.CANNOT_DECIDE, **said)
    lines = shown(judgement([one]), width=width).splitlines()
    assert all(len(line) <= width for line in lines)
    printed = Counter(" ".join(lines).split())
    asked = Counter(" ".join([*said.values(), name, "would decide:"]).split())
    assert not asked - printed
