"""`walkaway gate` saves a baseline, and holds the next run to it where they can be compared."""

import json
from pathlib import Path

import msgspec
import pytest

from harness.commands.gate import GateOrder, gate_and_show
from harness.errors import ConfigError
from harness.gate.baseline import load_baseline, save_baseline
from tests.harness.gate.gating import gate, refusal, said
from tests.made_up import gated

pytestmark = pytest.mark.usefixtures("elsewhere")


LIMIT = "build: cancel_latency_steps.p99 <= 2"
AGAINST = "build / baseline: cancel_latency_steps.mean <= 1.1"


@pytest.mark.parametrize("limit", [LIMIT, AGAINST])
def test_a_run_is_saved_as_the_baseline_and_the_next_is_held_to_it(
    limit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the limits name a baseline that is not there yet, or none."""
    first = gated.save_rounds(tmp_path / "first", 1.0, 1.02, 0.98)
    assert gate(first, limit, saves_baseline=True) == 0
    assert Path("results/baselines/gate.json").is_file()
    like = gated.save_rounds(tmp_path / "like", 1.01, 1.0, 1.02)
    capsys.readouterr()
    assert gate(like, limit) == 0
    assert AGAINST in [one["name"] for one in said(capsys)["checks"]]
    assert gate(gated.save_rounds(tmp_path / "worse", 2.01, 2.0, 2.02), limit) == 3


def test_an_arm_is_compared_under_its_own_load_and_with_its_own_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = gated.save_rounds(tmp_path / "first", 1.0, 1.02, 0.98)
    assert gate(first, LIMIT, saves_baseline=True) == 0
    other = gated.save_rounds(tmp_path / "other", 1.0, 1.02, 0.98)
    manifest = gated.manifest()
    manifest["workload"]["load"]["answer_tokens"] = 900
    (other / "rounds" / "1-build" / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert gate(other, AGAINST) == 4
    reason = said(capsys)["checks"][1]["reason"]
    assert "`load.answer_tokens` of the baseline: 300; of this run: 900" in reason


def test_a_baseline_is_not_replaced_and_a_bad_run_is_none(tmp_path: Path) -> None:
    good = gated.save_rounds(tmp_path / "good", 1.0, 1.02, 0.98)
    assert gate(good, "cancel_latency_steps.p99 < 1", saves_baseline=True) == 3
    assert not Path("results/baselines/gate.json").exists()
    assert gate(good, LIMIT, saves_baseline=True) == 0
    with pytest.raises(ConfigError, match="there is a baseline already; --force replaces it"):
        gate(good, LIMIT, saves_baseline=True)
    assert gate(good, LIMIT, saves_baseline=True, may_overwrite=True) == 0


def test_a_run_of_one_round_is_no_baseline(tmp_path: Path) -> None:
    for run in (gated.save(tmp_path / "run"), gated.save_rounds(tmp_path / "rounds", 1.0, 1.0)):
        said = refusal(GateOrder(run=run, saves_baseline=True))
        assert "a comparison needs at least 3: walkaway run gate --set 'arms=" in said
    assert not Path("results").exists()


def test_a_run_that_none_can_be_held_to_is_no_baseline_unless_a_limit_says_how(
    tmp_path: Path,
) -> None:
    none = gated.of_rounds(1.0, 1.0, 1.0)
    none["arms"]["build"]["per_round"] = {"leaked_slots": {"mean": [0.0] * 3}}
    run = gated.save(tmp_path / "run", none, arms=["build"])
    gated.save(run / "rounds" / "1-build")
    limits = Path("limits.txt")
    limits.write_text(LIMIT)
    said = refusal(GateOrder(run=run, limits=limits, saves_baseline=True))
    assert "in 3 rounds or more" in said
    assert gate(run, "build / baseline: leaked_slots.mean <= 1", saves_baseline=True) == 0


def test_what_is_left_out_on_another_machine_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = gated.of_rounds(1.0, 1.02, 0.98)
    seconds = gated.steps()
    seconds.unit = "s"
    both["arms"]["build"]["metrics"]["ttft_s"] = msgspec.to_builtins(seconds)
    both["arms"]["build"]["per_round"]["ttft_s"] = {"p50": [1.0, 1.0, 1.0]}
    run = gated.save(tmp_path / "run", both, arms=["build"])
    gated.save(run / "rounds" / "1-build")
    assert gate(run, LIMIT, saves_baseline=True) == 0
    gated_elsewhere = gated.manifest(hardware={"cpu": "another", "cores": 64, "gpus": []})
    (run / "rounds" / "1-build" / "manifest.json").write_text(json.dumps(gated_elsewhere))
    capsys.readouterr()
    assert gate(run, LIMIT, markdown=Path("gate.md")) == 0
    assert said(capsys)["left_out"] == ["build: ttft_s.p50"]
    words = "not compared, being times of another machine than the baseline's: build: ttft_s.p50"
    assert words in Path("gate.md").read_text()
    order = GateOrder(run=run, limits=Path("limits.txt"))
    gate_and_show(order, as_json=False, quiet=False)
    assert words in " ".join(capsys.readouterr().out.split())


def test_a_baseline_that_cannot_be_used_is_said_by_name(tmp_path: Path) -> None:
    path = tmp_path / "baselines" / "gate.json"
    measured = gated.measured(gated.summary())
    save_baseline(measured, path, may_overwrite=False)
    assert load_baseline(path, workload="gate") == measured
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
