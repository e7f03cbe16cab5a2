"""`walkaway gate` on whole folders: exit codes, baselines, wrong usage, and damaged runs, of which
none is a pass."""

import json
from pathlib import Path
from typing import Any

import junitparser
import msgspec
import pyarrow.parquet as pq
import pytest

from harness.commands.gate import GateOrder, gate_and_show
from harness.errors import ConfigError
from harness.gate.baseline import load_baseline, save_baseline
from harness.gate.run import read_run
from harness.store.run_folder import RECORDS, RunFolder, RunRows, UnusableRunError
from tests.made_up import gated

LEAK = {"leaked_blocks": gated.count(7)}
LIMIT = "build: cancel_latency_steps.p99 <= 2"
AGAINST = "build / baseline: cancel_latency_steps.mean <= 1.1"
GOOD = (1.0, 1.02, 0.98)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has `results/baselines` of its own."""
    monkeypatch.chdir(tmp_path)


def gate(run: Path, limits: str = "leaked_blocks.max == 0", **more: Any) -> int:
    file = Path("limits.txt")
    file.write_text(limits)
    order = GateOrder(run=run, limits=file, **more)
    return gate_and_show(order, as_json=True, quiet=False)


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The judgement that was printed last."""
    out = capsys.readouterr().out
    found: dict[str, Any] = json.loads(out[out.rindex("\n{") + 1 :] if "\n{" in out else out)
    return found


def refusal(run: Path, **order: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        gate_and_show(GateOrder(run=run, **order), as_json=True, quiet=False)
    return str(raised.value)


def change_round(run: Path, manifest: dict[str, Any]) -> None:
    (run / "rounds" / "1-build" / "manifest.json").write_text(json.dumps(manifest))


def test_the_exit_code_is_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = gated.save(tmp_path / "good"), gated.save(tmp_path / "bad", gated.summary(LEAK))
    assert gate(good) == 0
    assert gate(good, "slot_recovery_s.p50 < 1") == 4
    by_workload = GateOrder(run=bad)  # no file of limits: the workload's hold
    assert gate_and_show(by_workload, as_json=False, quiet=True) == 3
    assert gate(bad) == 3
    found = said(capsys)
    assert (found["verdict"], found["workload"]) == ("fail", "gate")
    assert found["checks"][1] == {
        "name": "leaked_blocks.max == 0",
        "verdict": "fail",
        "measured": "7 blocks",
        "reason": "beyond the limit",
        "to_decide": "",
    }


def test_what_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run, none = gated.save(tmp_path / "runs" / "a"), Path("none.txt")
    for place, why in (
        (tmp_path / "none", "there is no such folder"),
        (tmp_path / "empty", "is not a run's folder (it has no manifest.json and no rows)"),
        (run / "manifest.json", "is a file; name the run's folder"),
        (tmp_path / "runs", f"name a run's folder in it, such as {run}"),
    ):
        assert refusal(place).startswith(f"{place}: ")
        assert why in refusal(place)
    none.write_text("# nothing\n")
    assert "has no limit" in refusal(run, limits=none)
    assert "cannot be read" in refusal(run, limits=Path("missing.txt"))
    manifest = gated.manifest()
    del manifest["workload"]["gate"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "no limit to judge it by" in refusal(run)


def test_a_report_is_written_over_its_like_and_nothing_else(tmp_path: Path) -> None:
    run, markdown, junit = gated.save(tmp_path / "run"), Path("gate.md"), Path("gate.xml")
    markdown.touch()  # as CI hands over its step summary
    for limit in ("leaked_blocks.max == 0", "leaked_blocks.max <= 1"):
        assert gate(run, limit, markdown=markdown, junit=junit) == 0
        assert limit in markdown.read_text()
        assert limit.replace("<", "&lt;") in junit.read_text()
    for flag, other in (("markdown", junit), ("junit", markdown)):
        kept = other.read_bytes()
        assert "replace it with --force" in refusal(run, **{flag: other})
        assert "/proc/none.xml: cannot be written" in refusal(run, **{flag: Path("/proc/none.xml")})
        assert other.read_bytes() == kept
    assert gate(run, markdown=junit, may_overwrite=True) == 0


@pytest.mark.parametrize("flag", ["markdown", "junit"])
def test_a_report_can_be_printed(
    flag: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, file = gated.save(tmp_path / "run"), tmp_path / "file"
    dash: dict[str, Any] = {flag: Path("-")}
    saved: dict[str, Any] = {flag: file}
    assert gate_and_show(GateOrder(run=run, **saved), as_json=False, quiet=True) == 0
    assert gate_and_show(GateOrder(run=run, **dash), as_json=False, quiet=False) == 0
    printed = capfd.readouterr()
    assert printed.out == file.read_text()
    assert printed.err.startswith("gate: pass"), "the table stands beside it"
    assert not Path("-").exists()
    assert f"--{flag} -: --json prints the verdicts there" in refusal(run, **dash)
    assert "--baseline -: that is standard output" in refusal_of_a_printed_baseline(run)


def refusal_of_a_printed_baseline(run: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        gate_and_show(GateOrder(run=run, baseline=Path("-")), as_json=False, quiet=True)
    return str(raised.value)


@pytest.mark.parametrize(("first", "second"), [("junit", "markdown"), ("junit", "baseline")])
def test_no_file_is_named_twice(first: str, second: str, tmp_path: Path) -> None:
    run = gated.save(tmp_path / "run")
    order: dict[str, Any] = {first: Path("same"), second: tmp_path / "same"}
    said = refusal(run, **order, saves_baseline=True)
    assert f"is named by --{first} and by --{second}" in said
    assert not Path("same").exists()


# A baseline is saved, and the next run is held to it where they can be compared.


@pytest.mark.parametrize("limit", [LIMIT, AGAINST])
def test_a_run_is_saved_as_the_baseline_and_the_next_is_held_to_it(
    limit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the limits name a baseline that is not there yet, or none."""
    first = gated.save_rounds(tmp_path / "first", *GOOD)
    assert gate(first, limit, saves_baseline=True) == 0
    assert Path("results/baselines/gate.json").is_file()
    like = gated.save_rounds(tmp_path / "like", 1.01, 1.0, 1.02)
    assert gate(like, limit) == 0
    assert AGAINST in [one["name"] for one in said(capsys)["checks"]]
    assert gate(gated.save_rounds(tmp_path / "worse", 2.01, 2.0, 2.02), limit) == 3


def test_an_arm_is_compared_under_its_own_load_and_with_its_own_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate(gated.save_rounds(tmp_path / "first", *GOOD), LIMIT, saves_baseline=True) == 0
    other = gated.save_rounds(tmp_path / "other", *GOOD)
    manifest = gated.manifest()
    manifest["workload"]["load"]["answer_tokens"] = 900
    change_round(other, manifest)
    assert gate(other, AGAINST) == 4
    reason = said(capsys)["checks"][1]["reason"]
    assert "`load.answer_tokens` of the baseline: 300; of this run: 900" in reason


def test_a_baseline_is_not_replaced_and_a_bad_run_is_none(tmp_path: Path) -> None:
    good, file = gated.save_rounds(tmp_path / "good", *GOOD), Path("file")
    assert gate(good, "cancel_latency_steps.p99 < 1", saves_baseline=True) == 3
    assert not Path("results/baselines/gate.json").exists()
    assert gate(good, LIMIT, saves_baseline=True) == 0
    limits = {"limits": Path("limits.txt"), "saves_baseline": True}
    assert "there is a baseline already; --force replaces it" in refusal(good, **limits)
    assert gate(good, LIMIT, saves_baseline=True, may_overwrite=True) == 0
    file.touch()
    said = refusal(good, **limits, baseline=file / "x.json")
    assert "file/x.json: cannot be written" in said


def test_a_run_that_none_can_be_held_to_is_no_baseline_unless_a_limit_says_how(
    tmp_path: Path,
) -> None:
    for run in (gated.save(tmp_path / "run"), gated.save_rounds(tmp_path / "rounds", 1.0, 1.0)):
        said = refusal(run, saves_baseline=True)
        assert "a comparison needs at least 3: walkaway run gate --rounds 5" in said
    assert not Path("results").exists()
    none = gated.of_rounds(1.0, 1.0, 1.0)
    none["arms"]["build"]["per_round"] = {"leaked_slots": {"mean": [0.0] * 3}}
    run = gated.save(tmp_path / "none", none, arms=["build"])
    gated.save(run / "rounds" / "1-build")
    Path("limits.txt").write_text(LIMIT)
    said = refusal(run, limits=Path("limits.txt"), saves_baseline=True)
    assert "in 3 rounds or more" in said
    assert gate(run, "build / baseline: leaked_slots.mean <= 1", saves_baseline=True) == 0


def test_what_is_left_out_on_another_machine_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = gated.of_rounds(*GOOD)
    seconds = gated.steps()
    seconds.unit = "s"
    both["arms"]["build"]["metrics"]["ttft_s"] = msgspec.to_builtins(seconds)
    both["arms"]["build"]["per_round"]["ttft_s"] = {"p50": [1.0, 1.0, 1.0]}
    run = gated.save(tmp_path / "run", both, arms=["build"])
    gated.save(run / "rounds" / "1-build")
    assert gate(run, LIMIT, saves_baseline=True) == 0
    change_round(run, gated.manifest(hardware={"cpu": "another", "cores": 64, "gpus": []}))
    assert gate(run, LIMIT) == 0
    assert said(capsys)["left_out"] == ["build: ttft_s.p50"]


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
    for text in ("", "{", "[]", '{"schema_version": 1}', "[" * 200_000, None):
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(ConfigError, match="is not a baseline that can be read"):
            load_baseline(path, workload="gate")


# Folders that are damaged, cut short or empty.


def undecided(run: Path, capsys: pytest.CaptureFixture[str], *limits: str) -> str:
    """Why the run cannot be judged."""
    assert gate(run, *limits) == 4
    reason: str = said(capsys)["checks"][0]["reason"]
    return reason


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
    manifest = run / "manifest.json"
    content = manifest.read_text()
    manifest.write_text(json.dumps(json.loads(content) | {"repeat": "walkaway run x"}))
    assert advice(run) == "a whole run: walkaway run x"
    manifest.write_text(content)
    shard.write_text("{}")
    assert advice(run) == report
    RunFolder(tmp_path / "run").write_rows(RunRows())
    assert advice(run) == "a whole run"

    arms = gated.save_rounds(tmp_path / "arms", 1.0, 1.0, 1.0)
    (arms / "requests.parquet").unlink()
    assert RunFolder(arms).may_have_requests(), "its round has some"
    RunFolder(arms / "rounds" / "1-build").write_rows(RunRows())
    assert not RunFolder(arms).may_have_requests()


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ({"schema_version": 99}, "summary.json: has schema version 99"),
        ({"outcomes": {"abandoned": 500}}, "has 3 rows, and summary.json is of 500"),
        ({"outcomes": {"abandoned": 3}}, "did not end as summary.json counts them"),
        (None, "cut short before it was judged"),
    ],
)
def test_a_summary_that_is_not_of_the_rows_is_not_judged(
    summary: dict[str, Any] | None,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = gated.save(tmp_path / "run", gated.summary(**(summary or {})))
    if summary is None:
        (run / "summary.json").unlink()
    assert said in undecided(run, capsys)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("requests", b"PAR1 but no more", "requests.parquet cannot be read"),
        ("lifecycle", None, "lifecycle.parquet cannot be read"),
        ("probe/requests", None, "probe/requests.parquet cannot be read"),
        ("probe/lifecycle", b"PAR1 but no more", "probe/lifecycle.parquet cannot be read"),
        ("rounds/1-build/requests", b"PAR1", "1-build/requests.parquet cannot be read"),
        ("rounds/1-build/steps", b"PAR1", "1-build/steps.parquet cannot be read"),
        ("rounds/1-build/requests", None, "the files of the rounds have 0 rows"),
    ],
)
def test_a_damaged_file_of_rows_is_named(
    file: str,
    content: bytes | None,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if file.startswith("rounds"):
        run, limit = gated.save_rounds(tmp_path / "run", 1.0, 1.0, 1.0), LIMIT
    else:
        run, limit = gated.save(tmp_path / "run"), "leaked_blocks.max == 0"
        RunFolder.claim(run / "probe").write_rows(RunRows())
    assert gate(run, limit) == 0
    spoilt = run / f"{file}.parquet"
    spoilt.unlink() if content is None else spoilt.write_bytes(content)
    assert reason in undecided(run, capsys, limit)


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


NESTED = pytest.param('{"a":' * 100_000, id="nested")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 1}', NESTED])
@pytest.mark.parametrize("name", ["summary.json", "manifest.json"])
def test_a_damaged_file_is_no_pass(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = gated.save(tmp_path / "run")
    (run / name).write_text(text)
    assert name in undecided(run, capsys)


def test_an_empty_run_is_no_pass_and_reports_are_written_of_what_cannot_be_judged(
    tmp_path: Path,
) -> None:
    empty = gated.summary({}, outcomes={"abandoned": 0, "completed": 3})
    assert gate(gated.save(tmp_path / "empty", empty)) == 4
    run = gated.save(tmp_path / "run")
    (run / "summary.json").unlink()
    assert gate(run, junit=Path("gate.xml"), markdown=Path("gate.md")) == 4
    assert next(iter(junitparser.JUnitXml.fromfile("gate.xml"))).errors == 1
    assert "cannot decide" in Path("gate.md").read_text()
