"""`walkaway gate` on whole folders: exit codes, bad input, and that nothing is overwritten."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import junitparser
import msgspec
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from harness.errors import ConfigError
from harness.gate.judge import Judgement
from harness.gate.run_folder import read_run
from harness.gate.verdict import Check, Verdict
from harness.gate_command import GateOrder, gate_and_show, print_judgement
from harness.judged import UnusableRunError
from harness.store import RECORDS, RunFolder, RunRows
from tests.harness.gate import gated
from tests.harness.gate.test_gate_files import judgement

LEAK = {"leaked_blocks": gated.count(7)}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`results/baselines` of this test alone."""
    monkeypatch.chdir(tmp_path)


def gate(run: Path, limits: str = "leaked_blocks.max == 0", **more: Any) -> int:
    file = Path("limits.txt")
    file.write_text(limits)
    order = GateOrder(run=run, limits=file, **more)
    return gate_and_show(order, as_json=True, quiet=False)


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_exit_code_is_the_verdict(tmp_path: Path) -> None:
    good = gated.save(tmp_path / "good")
    assert gate(good) == 0
    assert gate(gated.save(tmp_path / "bad", gated.summary(LEAK))) == 3
    assert gate(good, "slot_recovery_s.p50 < 1") == 4


def test_the_limits_of_the_workload_hold_where_no_file_is_named(tmp_path: Path) -> None:
    run = gated.save(tmp_path / "run", gated.summary(LEAK))
    assert gate_and_show(GateOrder(run=run), as_json=False, quiet=True) == 3


def test_json_tells_each_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate(gated.save(tmp_path / "bad", gated.summary(LEAK)))
    found = said(capsys)
    assert (found["verdict"], found["workload"]) == ("fail", "gate")
    assert found["checks"][1] == {
        "name": "leaked_blocks.max == 0",
        "verdict": "fail",
        "measured": "7 blocks",
        "reason": "beyond the limit",
        "to_decide": "",
    }


# Bad input.


def undecided(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Why the run cannot be judged."""
    assert gate(run) == 4
    reason: str = said(capsys)["checks"][0]["reason"]
    return reason


def test_a_killed_run_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = gated.save(tmp_path / "run")
    (run / "summary.json").unlink()
    assert "cut short before it was judged" in undecided(run, capsys)


def test_a_report_is_advised_only_of_a_killed_run_that_has_requests(tmp_path: Path) -> None:
    def advice(run: Path) -> str:
        (run / "summary.json").unlink(missing_ok=True)
        with pytest.raises(UnusableRunError) as raised:
            read_run(run)
        return raised.value.remedy

    run = gated.save(tmp_path / "run")
    report = f"a whole run; for what was saved of this one: walkaway report {run}"
    assert advice(run) == report
    (run / "requests.parquet").write_bytes(b"PAR1 but no more")
    assert advice(run) == report
    (run / "requests.parquet").unlink()
    assert advice(run) == "a whole run"
    (run / "shards").mkdir()
    shard = run / "shards" / "requests-here-1.ndjson"
    shard.touch()
    assert advice(run) == "a whole run"
    shard.write_text("{}")
    assert advice(run) == report
    RunFolder(tmp_path / "run").write_rows(RunRows())
    assert advice(run) == "a whole run"


def test_a_killed_run_with_arms_has_the_requests_of_its_rounds(tmp_path: Path) -> None:
    run = save_rounds(tmp_path / "run", 1.0, 1.0, 1.0)
    (run / "requests.parquet").unlink()
    assert RunFolder(run).may_have_requests()
    RunFolder(run / "rounds" / "1-build").write_rows(RunRows())
    assert not RunFolder(run).may_have_requests()


def test_another_schema_version_is_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = gated.save(tmp_path / "run", gated.summary(schema_version=99))
    assert "summary.json: has schema version 99" in undecided(run, capsys)


@pytest.mark.parametrize("name", ["requests", "lifecycle"])
def test_a_corrupt_parquet_file_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = gated.save(tmp_path / "run")
    (run / f"{name}.parquet").write_bytes(b"PAR1 but no more")
    assert f"{name}.parquet cannot be read" in undecided(run, capsys)
    (run / f"{name}.parquet").unlink()
    assert f"{name}.parquet cannot be read" in undecided(run, capsys)


def test_rows_that_the_summary_is_not_of_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = gated.save(tmp_path / "run", gated.summary(outcomes={"abandoned": 500}))
    assert "requests.parquet has 3 rows, and summary.json is of 500" in undecided(run, capsys)


NESTED = pytest.param('{"a":' * 100_000, id="nested")


@pytest.mark.parametrize("name", ["requests", "lifecycle", "steps"])
def test_a_damaged_round_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_rounds(tmp_path / "run", 1.0, 1.0, 1.0)
    (run / "rounds" / "1-build" / f"{name}.parquet").write_bytes(b"PAR1 but no more")
    limit = "build: cancel_latency_steps.p99 <= 2"
    assert gate(run, limit) == 4
    assert f"1-build/{name}.parquet cannot be read" in said(capsys)["checks"][0]["reason"]


def test_rows_that_a_round_has_lost_are_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_rounds(tmp_path / "run", 1.0, 1.0, 1.0)
    (run / "rounds" / "1-build" / "requests.parquet").unlink()
    assert gate(run, "build: cancel_latency_steps.p99 <= 2") == 4
    assert "the files of the rounds have 0 rows" in said(capsys)["checks"][0]["reason"]


@pytest.mark.parametrize("name", RECORDS)
def test_a_byte_flipped_in_any_column_of_any_file_is_found(name: str, tmp_path: Path) -> None:
    run = gated.save(tmp_path / "run")
    file = run / f"{name}.parquet"
    whole = file.read_bytes()
    columns = pq.read_metadata(file).row_group(0)
    read_run(run)
    for number in range(columns.num_columns):
        column = columns.column(number)
        end = column.data_page_offset  # of a dictionary, whose last bytes are a value
        if not column.has_dictionary_page:
            end += column.total_compressed_size
        content = bytearray(whole)
        content[end - 1] ^= 255
        file.write_bytes(content)
        with pytest.raises(UnusableRunError, match=f"{name}.parquet cannot be read"):
            read_run(run)


def test_requests_that_ended_otherwise_than_was_counted_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = gated.save(tmp_path / "run", gated.summary(outcomes={"abandoned": 3}))
    assert "did not end as summary.json counts them" in undecided(run, capsys)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 1}', NESTED])
@pytest.mark.parametrize("name", ["summary.json", "manifest.json"])
def test_a_damaged_file_is_no_pass(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = gated.save(tmp_path / "run")
    (run / name).write_text(text)
    assert name in undecided(run, capsys)


def test_an_empty_run_is_no_pass(tmp_path: Path) -> None:
    empty = gated.summary({}, outcomes={"abandoned": 0, "completed": 3})
    assert gate(gated.save(tmp_path / "run", empty)) == 4


def test_reports_are_written_for_a_run_that_cannot_be_judged_too(tmp_path: Path) -> None:
    run = gated.save(tmp_path / "run")
    (run / "summary.json").unlink()
    assert gate(run, junit=Path("gate.xml"), markdown=Path("gate.md")) == 4
    assert next(iter(junitparser.JUnitXml.fromfile("gate.xml"))).errors == 1
    assert "cannot decide" in Path("gate.md").read_text()


def refusal(order: GateOrder) -> str:
    with pytest.raises(ConfigError) as raised:
        gate_and_show(order, as_json=True, quiet=False)
    return str(raised.value)


def test_what_is_no_run_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is not a run's folder" in refusal(GateOrder(run=tmp_path / "empty"))
    assert "is not a run's folder" in refusal(GateOrder(run=tmp_path / "none"))


def test_a_gate_without_a_limit_is_wrong_usage(tmp_path: Path) -> None:
    run = gated.save(tmp_path / "run")
    Path("none.txt").write_text("# nothing\n")
    assert "has no limit" in refusal(GateOrder(run=run, limits=Path("none.txt")))
    assert "cannot be read" in refusal(GateOrder(run=run, limits=Path("missing.txt")))
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["workload"]["gate"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "nothing to judge it by" in refusal(GateOrder(run=run))


def test_no_report_is_overwritten_but_an_empty_one_is_filled(tmp_path: Path) -> None:
    run = gated.save(tmp_path / "run")
    file = Path("summary.md")
    file.touch()  # as CI hands over its step summary
    assert gate(run, markdown=file) == 0
    kept = file.read_text()
    assert "--force replaces it" in refusal(GateOrder(run=run, markdown=file))
    assert "--force replaces it" in refusal(GateOrder(run=run, junit=file))
    assert file.read_text() == kept
    assert gate(run, markdown=file, may_overwrite=True) == 0
    assert "cannot be written" in refusal(GateOrder(run=run, junit=Path("none") / "gate.xml"))


def test_what_cannot_be_written_is_wrong_usage(tmp_path: Path) -> None:
    run = save_rounds(tmp_path / "run", 1.0, 1.0, 1.0)
    limits = Path("limits.txt")
    limits.write_text("cancel_latency_steps.p99 <= 2")
    for flag in ("junit", "markdown"):
        named: dict[str, Any] = {flag: Path("/proc/none.xml")}
        assert "/proc/none.xml: cannot be written" in refusal(
            GateOrder(run=run, limits=limits, **named)
        )
    file = Path("file")
    file.touch()
    order = GateOrder(run=run, limits=limits, baseline=file / "x.json", saves_baseline=True)
    assert "file/x.json: cannot be written" in refusal(order)


@pytest.mark.parametrize("flags", [("junit", "markdown"), ("junit", "baseline")])
def test_no_file_is_named_twice(flags: tuple[str, str], tmp_path: Path) -> None:
    run = gated.save(tmp_path / "run")
    first, second = flags
    order: dict[str, Any] = {first: Path("same"), second: tmp_path / "same"}
    said = refusal(GateOrder(run=run, **order, saves_baseline=True))
    assert f"is named by --{first} and by --{second}" in said
    assert not Path("same").exists()


# Baselines.


def of_rounds(*values: float) -> dict[str, Any]:
    rounds = {"cancel_latency_steps": {"mean": list(values)}}
    arm = gated.arm({"cancel_latency_steps": gated.steps()}, rounds)
    return gated.summary_of_arms({"build": arm})


def save_rounds(path: Path, *values: float) -> Path:
    """A run with one arm; the server's facts are in the manifest of its first round, which has all
    the rows."""
    run = gated.save(path, of_rounds(*values), arms=["build"])
    gated.save(run / "rounds" / "1-build")
    return run


def test_a_run_is_saved_as_the_baseline_and_the_next_is_held_to_it(tmp_path: Path) -> None:
    first = save_rounds(tmp_path / "first", 1.0, 1.02, 0.98)
    limit = "build: cancel_latency_steps.p99 <= 2"
    assert gate(first, limit, saves_baseline=True) == 0
    assert Path("results/baselines/gate.json").is_file()
    assert gate(save_rounds(tmp_path / "like", 1.01, 1.0, 1.02), limit) == 0
    against = "build / baseline: cancel_latency_steps.mean <= 1.1"
    assert gate(tmp_path / "like", against) == 0
    assert gate(save_rounds(tmp_path / "worse", 2.01, 2.0, 2.02), limit) == 3


def test_the_first_baseline_is_saved_though_limits_name_it(tmp_path: Path) -> None:
    limit = "build / baseline: cancel_latency_steps.mean <= 1.1"
    assert gate(save_rounds(tmp_path / "first", 1.0, 1.02, 0.98), limit, saves_baseline=True) == 0
    assert gate(save_rounds(tmp_path / "worse", 2.01, 2.0, 2.02), limit) == 3


def test_an_arm_is_compared_under_its_own_load_and_with_its_own_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = "build / baseline: cancel_latency_steps.mean <= 1.1"
    first = save_rounds(tmp_path / "first", 1.0, 1.02, 0.98)
    assert gate(first, "build: cancel_latency_steps.p99 <= 2", saves_baseline=True) == 0
    other = save_rounds(tmp_path / "other", 1.0, 1.02, 0.98)
    manifest = gated.manifest()
    manifest["workload"]["load"]["answer_tokens"] = 900
    (other / "rounds" / "1-build" / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert gate(other, limit) == 4
    reason = said(capsys)["checks"][1]["reason"]
    assert "`load.answer_tokens` of the baseline: 300; of this run: 900" in reason


def test_what_nobody_limits_is_held_to_the_baseline_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = save_rounds(tmp_path / "first", 1.0, 1.02, 0.98)
    limit = "build: cancel_latency_steps.p99 <= 2"
    gate(first, limit, saves_baseline=True)
    capsys.readouterr()
    gate(first, limit)
    names = [one["name"] for one in said(capsys)["checks"]]
    assert "build / baseline: cancel_latency_steps.mean <= 1.1" in names


def test_a_baseline_is_not_replaced_and_a_bad_run_is_none(tmp_path: Path) -> None:
    good = save_rounds(tmp_path / "good", 1.0, 1.02, 0.98)
    place = Path("results/baselines/gate.json")
    assert gate(good, "cancel_latency_steps.p99 < 1", saves_baseline=True) == 3
    assert not place.exists()
    limit = "cancel_latency_steps.p99 <= 2"
    assert gate(good, limit, saves_baseline=True) == 0
    with pytest.raises(ConfigError, match="--force"):
        gate(good, limit, saves_baseline=True)
    assert gate(good, limit, saves_baseline=True, may_overwrite=True) == 0


def test_a_run_of_one_round_is_no_baseline(tmp_path: Path) -> None:
    for run in (gated.save(tmp_path / "run"), save_rounds(tmp_path / "rounds", 1.0, 1.0)):
        said = refusal(GateOrder(run=run, saves_baseline=True))
        assert "nothing can be compared with fewer than 3: walkaway run gate --set 'arms=" in said
    assert not Path("results").exists()


def test_a_run_that_none_can_be_held_to_is_no_baseline_unless_a_limit_says_how(
    tmp_path: Path,
) -> None:
    none = of_rounds(1.0, 1.0, 1.0)
    none["arms"]["build"]["per_round"] = {"leaked_slots": {"mean": [0.0] * 3}}
    run = gated.save(tmp_path / "run", none, arms=["build"])
    gated.save(run / "rounds" / "1-build")
    limits = Path("limits.txt")
    limits.write_text("build: cancel_latency_steps.p99 <= 2")
    said = refusal(GateOrder(run=run, limits=limits, saves_baseline=True))
    assert "the arm build has none in 3 rounds or more" in said
    assert gate(run, "build / baseline: leaked_slots.mean <= 1", saves_baseline=True) == 0


def test_a_baseline_from_before_a_setting_is_compared_where_that_is_at_its_default(
    tmp_path: Path,
) -> None:
    run = save_rounds(tmp_path / "run", 1.0, 1.02, 0.98)
    limit = "build: cancel_latency_steps.p99 <= 2"
    assert gate(run, limit, saves_baseline=True) == 0
    place = Path("results/baselines/gate.json")
    saved = json.loads(place.read_text())
    for conditions in (saved["measured"], saved["measured"]["sides"]["build"]):
        del conditions["conditions"]["demand"]["run"]["keep_alive"]
    place.write_text(json.dumps(saved))
    assert gate(run, limit) == 0


def test_what_is_left_out_on_another_machine_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = of_rounds(1.0, 1.02, 0.98)
    seconds = gated.steps()
    seconds.unit = "s"
    both["arms"]["build"]["metrics"]["ttft_s"] = msgspec.to_builtins(seconds)
    both["arms"]["build"]["per_round"]["ttft_s"] = {"p50": [1.0, 1.0, 1.0]}
    run = gated.save(tmp_path / "run", both, arms=["build"])
    gated.save(run / "rounds" / "1-build")
    limit = "build: cancel_latency_steps.p99 <= 2"
    assert gate(run, limit, saves_baseline=True) == 0
    gated_elsewhere = gated.manifest(hardware={"cpu": "another", "cores": 64, "gpus": []})
    (run / "rounds" / "1-build" / "manifest.json").write_text(json.dumps(gated_elsewhere))
    capsys.readouterr()
    assert gate(run, limit, markdown=Path("gate.md")) == 0
    assert said(capsys)["left_out"] == ["build: ttft_s.p50"]
    words = "not compared, being times of another machine than the baseline's: build: ttft_s.p50"
    assert words in Path("gate.md").read_text()
    order = GateOrder(run=run, limits=Path("limits.txt"))
    gate_and_show(order, as_json=False, quiet=False)
    assert words in " ".join(capsys.readouterr().out.split())


# On a terminal.


def shown(one: Judgement, saved: str | None = None, width: int = 80) -> list[str]:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        print_judgement(console, one, saved)
    return captured.get().splitlines()


def test_the_terminal_shows_the_gravest_first_and_what_would_decide() -> None:
    lines = shown(judgement(), saved="not saved as the baseline: only a run that passes is")
    assert lines[0].startswith("gate: fail  gate in")
    verdicts = [line[:13].strip() for line in lines[3:6]]
    assert verdicts == ["fail", "cannot decide", ""]
    assert any("would decide: 368 more" in line for line in lines)
    assert lines[-1].startswith("not saved")
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize(
    "name",
    ["leaked_slots.max == 0", "new / baseline: cancel_latency_prefill_steps.mean <= 1.12345678"],
)
def test_no_word_is_lost_beyond_the_edge(name: str, width: int) -> None:
    reason = "not measurable: the server shows no gauge of requests that run, " * 3
    to_decide = "a server with `max_num_seqs` known, or the workload `gate_black_box`"
    said = {"reason": f"{reason}nor any other", "to_decide": to_decide, "measured": "12 of 500"}
    one = Check(name=name, verdict=Verdict.CANNOT_DECIDE, **said)
    lines = shown(judgement([one]), width=width)
    assert all(len(line) <= width for line in lines)
    printed = Counter(" ".join(lines).split())
    asked = Counter(" ".join([*said.values(), name, "would decide:"]).split())
    assert not asked - printed
