"""The table of metrics: complete, and consistent with itself."""

from harness.metrics import METRICS, headlines


def test_the_table_agrees_with_itself() -> None:
    ranks = [one.rank for one in METRICS.values() if one.rank is not None]
    assert sorted(ranks) == list(range(1, len(ranks) + 1))
    for one in METRICS.values():
        named = {*one.instead, one.part_of or one.name}
        assert named <= METRICS.keys() - ({one.name} if one.part_of else set())


def test_figures_from_the_intended_start_make_start_delay_a_headline() -> None:
    assert "start_delay_s" in headlines({"ttft_s", "ttft_from_intended_s"})
    assert "start_delay_s" not in headlines({"ttft_s", "start_delay_s"})
