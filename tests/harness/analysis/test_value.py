"""What cancellation is worth: accounts of small runs and the rows made of them, all by hand."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from rich.console import Console

from harness.analysis.pool import analyse_round
from harness.analysis.value import (
    Account,
    ValueTerms,
    account,
    sum_of,
    until,
    value_of,
)
from harness.commands.run_table import print_arms
from harness.export.tables import stage_cells, value_cells, value_columns
from harness.formatting import DASH, number
from harness.records import Metric, Value, ValueRow
from tests.harness.told import pooled_summary
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder
from tests.made_up.summaries import made_up_arms_summary

if TYPE_CHECKING:
    from pathlib import Path

    MakeRun = Callable[[], RunBuilder]

TERMS = ValueTerms(honoured="on", ignored="off")
ZERO = Account(
    load_s=0,
    slot_s=0,
    block_s=0,
    requests=0,
    left=0,
    completed=0,
    read_tokens=0,
    generated_tokens=0,
    wasted_tokens=0,
    late_tokens=0,
    used_slot_s=0,
    late_engine_s=0,
    late_slot_s=0,
    late_block_s=0,
)


def ghost(run: RunBuilder) -> None:
    """Two share steps of 100 ms; one leaves at 150 and is computed to 1,200: beyond the load, which
    ends at 1,000. One reads all that comes."""
    assert run.manifest.target is not None
    assert run.manifest.target.config is not None
    run.manifest.target.config["num_blocks"] = 10
    run.abandon("gone", t0=150, tokens=[100], planned_abandon=1)
    run.events("gone", reason="length", arrived=0, admitted=0, first_token=100, generated=1)
    run.events(
        "gone", reason="length", removed=1200, blocks_freed=1200, finished=1200, generated=12
    )
    tokens = [100.0 * (i + 1) for i in range(10)]
    run.request("stays", sent=0, tokens=tokens, outcome="completed", end=1000)
    run.steps(0, 11, "gone", "stays", length=100)


def test_the_account_of_a_run(make_run: MakeRun) -> None:
    run = make_run()
    ghost(run)
    one = account(run.frames())
    assert one is not None
    assert (one.load_s, one.slot_s, one.block_s) == (1.0, 2.0, 10.0)
    assert (one.requests, one.left, one.completed) == (2, 1, 1)
    assert one.read_tokens == 11
    assert one.generated_tokens == 20  # ten steps in the load, two tokens each
    assert one.wasted_tokens == 11  # to its end
    assert one.late_tokens == 9  # in the load
    assert one.used_slot_s == pytest.approx(2.0)
    assert one.late_slot_s == pytest.approx(0.85)  # from 150 to 1,000
    assert one.late_engine_s == pytest.approx(0.85 / 2)  # half of each step
    # 2 tokens at 100, 5 at 400 and 9 at 800: blocks of 4 tokens.
    assert one.late_block_s == pytest.approx(1 * 0.25 + 2 * 0.4 + 3 * 0.2)


def test_a_server_that_tells_nothing_has_no_account(make_run: MakeRun) -> None:
    run = make_run()
    ghost(run)
    run.another_engine()
    assert account(run.frames()) is None


def test_a_run_cut_short_forgets_what_came_later(make_run: MakeRun) -> None:
    run = make_run()
    ghost(run)
    short = until(run.frames(), at(600))
    assert len(short.steps) == 6
    assert set(short.lifecycle["event"]) == {"arrived", "admitted", "first_token"}
    assert short.manifest["window"]["settled_ns"] == at(600)


OFF = Account(
    load_s=10,
    slot_s=80,
    block_s=1000,
    requests=100,
    left=20,
    completed=70,
    read_tokens=3000,
    generated_tokens=4000,
    wasted_tokens=1600,
    late_tokens=1000,
    used_slot_s=76,
    late_engine_s=2,
    late_slot_s=20,
    late_block_s=150,
)
ON = Account(
    load_s=10,
    slot_s=80,
    block_s=1000,
    requests=120,
    left=20,
    completed=100,
    read_tokens=3900,
    generated_tokens=3920,
    wasted_tokens=20,
    late_tokens=20,
    used_slot_s=76,
    late_engine_s=0.02,
    late_slot_s=0.4,
    late_block_s=1.5,
)


def rows(terms: ValueTerms = TERMS) -> dict[str, ValueRow]:
    made = value_of({"on": [ON, ON, ON], "off": [OFF, OFF, OFF]}, terms, {})
    return {row.name: row for row in made.rows}


@pytest.mark.parametrize(
    ("name", "ignored", "honoured"),
    [
        ("requests abandoned", 0.2, 1 / 6),
        ("tokens wasted per cancel", 80, 1),
        ("engine seconds wasted an hour", 720, 7.2),
        ("... as the source estimates it", 7200, 144),  # 100 and 2 tokens a second, 20 ms each
        ("blocks held by abandoned requests", 15, 0.15),
        ("... of all blocks", 0.15, 0.0015),
        ("slot utilisation", 0.95, 0.95),
        ("... by abandoned requests", 0.25, 0.005),
        ("... by all other requests", 0.70, 0.945),
        ("generated tokens that were wasted", 0.25, 20 / 3920),
        ("effective throughput", 300, 390),
        ("answers completed", 7, 10),
    ],
)
def test_a_row_is_its_formula(name: str, ignored: float, honoured: float) -> None:
    row = rows()[name]
    assert row.ignored == pytest.approx(ignored)
    assert row.honoured == pytest.approx(honoured)
    assert row.change.ratio == pytest.approx(honoured / ignored)
    assert row.formula


def test_money_is_told_where_there_is_a_price() -> None:
    assert not any("money" in name for name in rows())
    priced = rows(ValueTerms(honoured="on", ignored="off", price_per_million_tokens=2.0))
    assert priced["money wasted an hour"].ignored == pytest.approx(100 * 3600 * 2e-6)
    assert priced["money wasted per 1,000 cancels"].honoured == pytest.approx(1000 * 2e-6)


def test_sums_are_of_the_rounds_that_there_are() -> None:
    whole = sum_of([OFF, None, ON])
    assert whole is not None
    assert (whole.load_s, whole.wasted_tokens) == (20, 1620)
    assert sum_of([None]) is None


def test_a_round_without_an_account_is_left_out_and_nothing_is_0() -> None:
    made = value_of({"on": [None], "off": [ZERO]}, TERMS, {})
    for row in made.rows:
        assert row.honoured is None
        assert row.ignored is None
        assert row.change.ratio is None
        assert value_cells(row)[1:] == (DASH, DASH, DASH)


def test_the_words_of_both_tables() -> None:
    metrics = {"wait_s": Metric(unit="s", n=3, p50=0.011, p99=0.02, method="exact")}
    made = value_of({"on": [ON, ON, ON], "off": [OFF, OFF, OFF]}, TERMS, metrics)
    assert value_columns(made)[1:3] == ("off", "on")
    cells = {row.name: value_cells(row) for row in made.rows}
    wasted = cells["tokens wasted per cancel"]
    assert wasted[1:] == ("80 tokens", "1 token", "-98.8 % (-98.8 to -98.8)")
    assert cells["effective throughput"][3].startswith("+30 %")
    stages = {stage.name: stage_cells(stage) for stage in made.stages}
    assert stages["wait_s"][2:4] == ("11 ms", "20 ms")
    assert stages["detect_s"][2:] == (DASH, DASH, "0 s to 5 ms")


def test_the_summary_of_arms_holds_it_where_the_workload_asks(tmp_path: Path) -> None:
    made = []
    for arm in ("off", "on"):
        folder = tmp_path / arm
        folder.mkdir()
        run = RunBuilder(folder)
        ghost(run)
        made.append(analyse_round(run.frames(), round_number=1, arm=arm))
    workload: dict[str, Any] = {
        "name": "w",
        "headlines": [],
        "run": {"rounds": 1, "reference_arm": None},
        "arms": [{"name": "off"}, {"name": "on"}],
        "value": {
            "honoured": "on",
            "ignored": "off",
            "assumed_ms_per_token": 20.0,
            "price_per_million_tokens": None,
        },
    }
    value = msgspec.convert(pooled_summary(made, {"workload": workload})["value"], Value)
    found = {row.name: row.ignored for row in value.rows}
    assert found["tokens wasted per cancel"] == 11
    assert pooled_summary(made, {"workload": workload | {"value": None}})["value"] is None


def test_a_terminal_shows_both_tables() -> None:
    value = value_of({"on": [ON, ON, ON], "off": [OFF, OFF, OFF]}, TERMS, {})
    summary = {
        "workload": "w",
        "engine": "reference",
        "model": "tiny",
        "reference": "off",
        "rounds": 3,
        "headlines": [],
        "arms": {"off": {"metrics": {}}, "on": {"metrics": {}}},
        "differences": {},
        "validity": [],
        "value": msgspec.to_builtins(value),
    }
    console = Console(file=io.StringIO(), width=120)
    print_arms(console, made_up_arms_summary(summary), shows_all=True)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for row in value.rows:
        assert row.name in text
    for stage in value.stages:
        assert stage.name in text


def test_where_nobody_left_nothing_is_known_of_leaving() -> None:
    nobody = OFF._replace(left=0, wasted_tokens=0, late_tokens=0)
    made = value_of({"on": [nobody] * 3, "off": [OFF] * 3}, TERMS, {})
    values = {row.name: row.honoured for row in made.rows}
    for name in (
        "engine seconds wasted an hour",
        "blocks held by abandoned requests",
        "... by abandoned requests",
    ):
        assert values[name] is None
    assert values["requests abandoned"] == 0
    assert values["effective throughput"] is not None


def test_shares_differ_by_percentage_points() -> None:
    none = OFF._replace(late_slot_s=0.0)
    made = value_of({"on": [none] * 3, "off": [OFF] * 3}, TERMS, {})
    cells = {row.name: value_cells(row) for row in made.rows}
    share = OFF.late_slot_s / OFF.slot_s
    assert cells["... by abandoned requests"][3] == f"-{number(100 * share)} percentage points"
