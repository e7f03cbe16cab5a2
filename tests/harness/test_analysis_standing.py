"""Who is better at a figure: by interval and direction, as measured and in steps."""

import pytest

from harness.analysis.compare import Pair, Standing, pair_of, ratio_ci95, standing
from harness.records import Metric


def latency(p50: float, half: float = 0.001) -> Metric:
    limits = (p50 - half, p50 + half)
    return Metric(unit="s", n=100, p50=p50, p50_ci95=limits, method="exact")


def share(mean: float) -> Metric:
    return Metric(unit="ratio", n=500, mean=mean, upper95=1.0, method="exact")


def pair(name: str, baseline: Metric, candidate: Metric, steps_s: tuple[float, float]) -> Pair:
    key = "p50" if baseline.p50 is not None else "mean"
    return pair_of(name, key, baseline, candidate, steps_s=steps_s)


@pytest.mark.parametrize(
    ("name", "baseline", "candidate", "found"),
    [
        ("cancel_latency_s", latency(0.020), latency(0.030), Standing.WORSE),
        ("cancel_latency_s", latency(0.030), latency(0.020), Standing.BETTER),
        ("cancel_latency_s", latency(0.020), latency(0.0205), Standing.UNSURE),
        ("removed_at_first_boundary", share(0.99), share(0.80), Standing.WORSE),
        ("removed_at_first_boundary", share(0.80), share(0.99), Standing.BETTER),
        ("ghost_rate", share(0.0), share(0.05), Standing.WORSE),
        ("slot_utilisation", share(0.2), share(0.9), Standing.NOT_JUDGED),
    ],
)
def test_the_direction_of_the_figure_decides(
    name: str, baseline: Metric, candidate: Metric, found: Standing
) -> None:
    assert standing(pair(name, baseline, candidate, (0.02, 0.02))) == found


def test_a_slower_machine_is_no_worse_server() -> None:
    """Twice as long in steps that take twice as long; and in steps of one length."""
    slow = latency(0.040), latency(0.080, half=0.002)
    assert standing(pair("cancel_latency_s", *slow, (0.02, 0.04))) == Standing.UNSURE
    assert standing(pair("cancel_latency_s", *slow, (0.02, 0.02))) == Standing.WORSE


@pytest.mark.parametrize("name", ["cancel_latency_s", "detect_s", "slot_refill_s", "ttft_s"])
@pytest.mark.parametrize("steps_waited", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("step_s", [0.005, 0.02, 0.2])
def test_an_identical_build_with_other_steps_is_neither_better_nor_worse(
    name: str, steps_waited: float, step_s: float
) -> None:
    """A millisecond that waits for nothing, and so many steps; known as finely as one likes."""
    build = [latency(0.001 + steps_waited * of, half=1e-6) for of in (0.010, step_s)]
    assert standing(pair(name, build[0], build[1], (0.010, step_s))) == Standing.UNSURE


def test_what_is_better_by_both_is_better_though_steps_differ() -> None:
    old, new = latency(0.040), latency(0.030)
    assert standing(pair("cancel_latency_s", old, new, (0.01, 0.02))) == Standing.BETTER
    assert standing(pair("cancel_latency_s", new, old, (0.02, 0.01))) == Standing.WORSE
    assert standing(pair("cancel_latency_s", old, new, (0.02, 0.01))) == Standing.UNSURE


def test_where_nothing_is_known_in_steps_nothing_is_sure() -> None:
    """An interval that reaches down to nothing has no logarithm."""
    wide, long = latency(0.001, half=0.001), latency(0.040)
    assert standing(pair("free_s", wide, long, (0.01, 0.02))) == Standing.UNSURE


def test_a_count_is_certain_and_other_readings_are_not() -> None:
    none, some = (Metric(unit="blocks", n=1, mean=value, method="gauge") for value in (0.0, 5.0))
    assert standing(pair("leaked_blocks", none, some, (1, 1))) == Standing.WORSE
    assert standing(pair("leaked_blocks", none, none, (1, 1))) == Standing.UNSURE
    assert standing(pair("throughput_tps", none, some, (1, 1))) == Standing.UNSURE


def test_what_is_not_compared_is_not_judged() -> None:
    other = Metric(unit="s", n=100, p50=0.02, method="probe")
    assert standing(pair("detect_s", latency(0.02), other, (1, 1))) == Standing.NOT_COMPARED


def test_the_interval_of_a_ratio_is_that_of_logarithms() -> None:
    """With equal relative errors of 10 %: 2 times or by 1.1 to the square root of two."""
    found = ratio_ci95(20.0, (20 / 1.1, 22.0), 10.0, (10 / 1.1, 11.0))
    factor = 1.1 ** (2**0.5)
    assert found == pytest.approx((2 / factor, 2 * factor))


def test_no_interval_of_a_ratio_reaches_from_nothing() -> None:
    assert ratio_ci95(20.0, (0.0, 22.0), 10.0, (9.0, 11.0)) is None
    assert ratio_ci95(20.0, None, 10.0, (9.0, 11.0)) is None
