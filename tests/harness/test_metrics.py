"""The table of metrics: complete, consistent with itself, and with what the analysis makes."""

from harness.metrics import METRICS, headlines
from tests.harness.analysis.test_summary import small_run
from tests.harness.told import summary_of
from tests.made_up.run import RunBuilder


def test_ranks_are_a_full_order_of_the_headlines() -> None:
    ranks = [one.rank for one in METRICS.values() if one.rank is not None]
    assert sorted(ranks) == list(range(1, len(ranks) + 1))


def test_metrics_refer_only_to_metrics() -> None:
    for one in METRICS.values():
        named = {*one.instead, one.part_of or one.name}
        assert named <= METRICS.keys() - ({one.name} if one.part_of else set())


def test_the_analysis_gives_every_metric_the_unit_of_the_table(run: RunBuilder) -> None:
    metrics = summary_of(small_run(run).frames())["metrics"]
    assert {name: one["unit"] for name, one in metrics.items()} == {
        name: METRICS[name].unit for name in metrics
    }


def test_figures_from_the_intended_start_make_start_delay_a_headline() -> None:
    assert "start_delay_s" in headlines({"ttft_s", "ttft_from_intended_s"})
    assert "start_delay_s" not in headlines({"ttft_s", "start_delay_s"})
