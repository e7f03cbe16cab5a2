"""The value of cancellation: accounts of small runs and the rows made of them, all by hand."""

import io

import msgspec
import pytest
from rich.console import Console

from harness.analysis.value import Account, ValueTerms, account, sum_of, value_of
from harness.commands.run_table import print_arms
from harness.export.tables import stage_cells, value_cells, value_columns
from harness.formatting import DASH, number
from harness.records import Metric, Value, ValueRow
from tests.made_up.run import RunBuilder
from tests.made_up.summaries import made_up_arms_summary

TERMS = ValueTerms(honoured="on", ignored="off")
ZERO = Account(*[0.0] * len(Account._fields))
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
ON = OFF._replace(
    requests=120,
    completed=100,
    read_tokens=3900,
    generated_tokens=3920,
    wasted_tokens=20,
    late_tokens=20,
    late_engine_s=0.02,
    late_slot_s=0.4,
    late_block_s=1.5,
)


def ghost(run: RunBuilder) -> RunBuilder:
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
    return run


def test_the_account_of_a_run(run: RunBuilder) -> None:
    expected = Account(
        load_s=1.0,
        slot_s=2.0,
        block_s=10.0,
        requests=2,
        left=1,
        completed=1,
        read_tokens=11,
        generated_tokens=20,  # ten steps in the load, two tokens each
        wasted_tokens=11,  # to its end
        late_tokens=9,  # in the load
        used_slot_s=2.0,
        late_engine_s=0.85 / 2,  # half of each step
        late_slot_s=0.85,  # from 150 to 1,000
        late_block_s=1 * 0.25 + 2 * 0.4 + 3 * 0.2,  # 2 tokens at 100, 5 at 400, 9 at 800
    )
    assert account(ghost(run).frames()) == pytest.approx(expected)


def test_a_server_without_logs_has_no_account(run: RunBuilder) -> None:
    ghost(run).another_engine()
    assert account(run.frames()) is None


def value(on: Account = ON, terms: ValueTerms = TERMS, **metrics: Metric) -> Value:
    return value_of({"on": [on] * 3, "off": [OFF] * 3}, terms, metrics)


def rows(on: Account = ON, terms: ValueTerms = TERMS) -> dict[str, ValueRow]:
    return {row.name: row for row in value(on, terms).rows}


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
        ("money wasted an hour", 100 * 3600 * 2e-6, 2 * 3600 * 2e-6),
        ("money wasted per 1,000 cancels", 80 * 1000 * 2e-6, 1000 * 2e-6),
    ],
)
def test_a_row_is_its_formula(name: str, ignored: float, honoured: float) -> None:
    assert ("money" in name) is (name not in rows())
    priced = msgspec.structs.replace(TERMS, price_per_million_tokens=2.0)
    row = rows(terms=priced)[name]
    assert row.ignored == pytest.approx(ignored)
    assert row.honoured == pytest.approx(honoured)
    assert row.change.ratio == pytest.approx(honoured / ignored)
    assert row.formula


def test_sums_are_of_the_rounds_that_there_are() -> None:
    whole = sum_of([OFF, None, ON])
    assert whole is not None
    assert (whole.load_s, whole.wasted_tokens) == (20, 1620)
    for row in value_of({"on": [None], "off": [ZERO]}, TERMS, {}).rows:
        assert (row.honoured, row.ignored, row.change.ratio) == (None, None, None)
        assert value_cells(row)[1:] == (DASH, DASH, DASH)


def test_the_words_of_both_tables() -> None:
    made = value(wait_s=Metric(unit="s", n=3, p50=0.011, p99=0.02, method="exact"))
    assert value_columns(made)[1:3] == ("off", "on")
    cells = {row.name: value_cells(row) for row in made.rows}
    wasted = cells["tokens wasted per cancel"]
    assert wasted[1:] == ("80 tokens", "1 token", "-98.8 % (-98.8 to -98.8)")
    assert cells["effective throughput"][3].startswith("+30 %")
    stages = {stage.name: stage_cells(stage) for stage in made.stages}
    assert stages["wait_s"][2:4] == ("11 ms", "20 ms")
    assert stages["detect_s"][2:] == (DASH, DASH, "0 s to 5 ms")


def test_a_terminal_shows_both_tables() -> None:
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
        "value": msgspec.to_builtins(value()),
    }
    text = io.StringIO()
    print_arms(Console(file=text, width=120), made_up_arms_summary(summary), shows_all=True)
    names = [one.name for one in value().rows] + [one.name for one in value().stages]
    assert all(name in text.getvalue() for name in names)


def test_without_an_abandon_its_cost_is_unknown() -> None:
    values = rows(OFF._replace(left=0, wasted_tokens=0, late_tokens=0))
    for name in ("engine seconds wasted an hour", "blocks held by abandoned requests"):
        assert values[name].honoured is None
    assert values["requests abandoned"].honoured == 0
    assert values["effective throughput"].honoured is not None


def test_shares_differ_by_percentage_points() -> None:
    row = rows(OFF._replace(late_slot_s=0.0))["... by abandoned requests"]
    share = OFF.late_slot_s / OFF.slot_s
    assert value_cells(row)[3] == f"-{number(100 * share)} percentage points"
