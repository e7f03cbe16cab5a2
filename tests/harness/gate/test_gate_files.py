"""What the gate writes: JUnit, Markdown and a baseline; each read back by somebody else."""

import json
from pathlib import Path

import junitparser
import pytest

from harness.errors import ConfigError
from harness.gate.baseline import load_baseline, save_baseline
from harness.gate.judge import Check, Judgement, Verdict
from harness.gate.reports import MOST_BYTES, as_junit, as_markdown
from tests.made_up import gated

CHECKS = [
    Check(name="itl_s.p99 <= 2", verdict=Verdict.PASS, measured="1 s", reason="within"),
    Check(name="a.p99 <= 2", verdict=Verdict.FAIL, measured="> 2 | 3", reason="<b>\x00 & more"),
    Check(name="b.p99 <= 2", verdict=Verdict.CANNOT_DECIDE, reason="too few", to_decide="368 more"),
]


def judgement(checks: list[Check] | None = None) -> Judgement:
    return Judgement(
        run="results/`x`|y",
        workload="gate",
        verdict=Verdict.FAIL,
        checks=CHECKS if checks is None else checks,
    )


def test_junit_is_read_back_with_a_test_for_each_limit() -> None:
    read = junitparser.JUnitXml.fromstring(as_junit(judgement()).decode())
    (suite,) = read
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (3, 1, 1, 0)
    passed, failed, undecided = suite
    assert passed.is_passed
    assert isinstance(failed.result[0], junitparser.Failure)
    assert failed.result[0].message == "> 2 | 3: <b>? & more"
    assert isinstance(undecided.result[0], junitparser.Error), "never taken for a pass"
    assert "would decide: 368 more" in str(undecided.result[0].text)


def test_markdown_has_a_row_for_each_limit_the_gravest_first() -> None:
    lines = as_markdown(judgement()).splitlines()
    assert lines[0] == "### ❌ walkaway gate: fail"
    rows = [line for line in lines if line.startswith(("| ❌", "| ❔", "| ✅"))]
    assert [row.split("|")[1].strip() for row in rows] == ["❌ fail", "❔ cannot decide", "✅ pass"]
    assert "&gt; 2 \\| 3" in rows[0]
    assert "&lt;b&gt;" in rows[0]
    assert "would decide: 368 more" in rows[1]


def test_markdown_fits_a_step_summary() -> None:
    text = as_markdown(judgement(CHECKS * 20_000))
    assert len(text.encode()) < MOST_BYTES + 100
    assert text.splitlines()[-1].endswith("more | | |")


def test_a_baseline_comes_back_as_it_was_and_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "baselines" / "gate.json"
    measured = gated.measured(gated.summary())
    save_baseline(measured, path, may_overwrite=False)
    assert load_baseline(path, workload="gate") == measured
    with pytest.raises(ConfigError, match="there is a baseline already; --force replaces it"):
        save_baseline(measured, path, may_overwrite=False)
    save_baseline(measured, path, may_overwrite=True)


def test_a_baseline_that_cannot_be_used_is_said_by_name(tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    save_baseline(gated.measured(gated.summary()), path, may_overwrite=False)
    with pytest.raises(ConfigError, match="is a baseline of workload gate, and the run is of demo"):
        load_baseline(path, workload="demo")
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"schema_version": 99}))
    with pytest.raises(ConfigError, match="schema version 99"):
        load_baseline(path, workload="gate")
    for text in ("", "{", "[]", '{"schema_version": 1}', "[" * 200_000):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is not a baseline that can be read"):
            load_baseline(path, workload="gate")
    with pytest.raises(ConfigError, match="is not a baseline that can be read"):
        load_baseline(tmp_path / "none.json", workload="gate")
