"""The value of cancellation where the recorded runs have none: prices, missing rounds and logs."""

import msgspec
import pytest

from harness.analysis.cancellations import cancellations
from harness.compare.value import Account, ValueTerms, account, sum_of, value_of
from harness.formatting import DASH, number
from harness.records import ValueRow
from harness.text.tables import value_cells
from harness.workload.workload import ValueSettings
from tests.made_up.run import RunBuilder

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
ON = OFF._replace(wasted_tokens=20, late_tokens=20)


def rows(on: Account | None, off: Account, terms: ValueTerms = TERMS) -> dict[str, ValueRow]:
    return {row.name: row for row in value_of({"on": [on] * 3, "off": [off] * 3}, terms, {}).rows}


def test_the_terms_have_the_defaults_of_a_workload() -> None:
    settings = ValueSettings(honoured="on", ignored="off")
    assert msgspec.structs.asdict(TERMS) == settings.model_dump()


def test_a_server_without_logs_has_no_account(run: RunBuilder) -> None:
    run.abandon("a", t0=150, tokens=[100])
    run.another_engine()
    frames = run.frames()
    assert account(frames, cancellations(frames)) is None


def test_money_is_named_where_a_price_is() -> None:
    assert not any("money" in name for name in rows(ON, OFF))
    priced = rows(ON, OFF, msgspec.structs.replace(TERMS, price_per_million_tokens=2.0))
    an_hour, of_cancels = priced["money wasted an hour"], priced["money wasted per 1,000 cancels"]
    assert an_hour.ignored == pytest.approx(100 * 3600 * 2e-6)  # 100 tokens a second
    assert an_hour.change.ratio == pytest.approx(2 / 100)
    assert of_cancels.ignored == pytest.approx(80 * 1000 * 2e-6)
    assert of_cancels.change.ratio == pytest.approx(1 / 80)


def test_sums_are_of_the_rounds_that_there_are() -> None:
    whole = sum_of([OFF, None, ON])
    assert whole is not None
    assert (whole.load_s, whole.wasted_tokens) == (20, 1620)
    for row in rows(None, ZERO).values():
        assert (row.honoured, row.ignored, row.change.ratio) == (None, None, None)
        assert value_cells(row)[2:] == (DASH, DASH, DASH)


def test_without_an_abandon_its_cost_is_unknown() -> None:
    values = rows(OFF._replace(left=0, wasted_tokens=0, late_tokens=0), OFF)
    for name in ("engine seconds wasted an hour", "blocks held by abandoned requests"):
        assert values[name].honoured is None
    assert values["requests abandoned"].honoured == 0
    assert values["effective throughput"].honoured is not None


def test_shares_differ_by_percentage_points() -> None:
    row = rows(OFF._replace(late_slot_s=0.0), OFF)["... by abandoned requests"]
    share = OFF.late_slot_s / OFF.slot_s
    assert value_cells(row)[-1] == f"-{number(100 * share)} percentage points"
