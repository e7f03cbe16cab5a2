"""GPU figures of a second of load, every number worked out by hand."""

import pytest

from harness.analysis.figure import Figures
from harness.analysis.run_facts import run_facts
from harness.analysis.summary import figures_of, observe
from tests.harness.analysis.scenes import four_steps, leave_in_decode
from tests.harness.told import metric, ms, reason, summary_of, warnings
from tests.made_up.run import RunBuilder

GPU = ("gpu_utilisation", "gpu_memory_bytes", "gpu_power_w", "gpu_energy_j", "energy_per_token_j")


def judged(run: RunBuilder) -> Figures:
    frames = run.frames()
    return figures_of(frames, observe(frames))


def half_a_batch(run: RunBuilder) -> None:
    """8 tokens are sampled; "a" leaves at 33 in a step until 40, of which it has half."""
    leave_in_decode(run)
    four_steps(run, "a", "b")


def test_two_devices_are_one_by_their_power(run: RunBuilder) -> None:
    """Readings outside the load count only at its two ends."""
    half_a_batch(run)
    for t in range(-100, 1200, 100):
        peak = 900 if t == 500 else 0
        watts = 120 + t / 10  # 120 W at its beginning, 220 W at its end
        run.gpu_reading(t, utilisation=0.4, memory_bytes=100 + peak, power_w=watts)
        run.gpu_reading(t, gpu=1, utilisation=0.8, memory_bytes=50, power_w=30.0)
    run.gpu_reading(5000, utilisation=1.0, memory_bytes=10**6, power_w=900.0)
    run.gpu_reading(5000, gpu=1, utilisation=1.0, memory_bytes=10**6, power_w=900.0)
    figures = judged(run)
    found = {name: metric(figures[name]).mean for name in GPU}
    assert found == pytest.approx(dict(zip(GPU, (0.6, 1050, 200, 200, 200 / 8), strict=True)))
    assert metric(figures["gpu_power_w"]).max == 250
    energy, wasted = metric(figures["gpu_energy_j"]), metric(figures["energy_wasted_j"])
    assert (energy.method, energy.bound, energy.n) == ("gauge", "point", 11)
    assert (wasted.method, wasted.n) == ("gauge", 1)
    # 7 ms of half a step, at the mean power between two readings.
    assert wasted.mean == pytest.approx(0.5 * 0.007 * (125 + 30))
    assert metric(figures["gpu_interval_s"]).p50 == ms(100)
    assert not warnings(run, "GPU")


def test_a_counter_goes_before_power_and_is_read_where_it_moved(run: RunBuilder) -> None:
    """It moves by 15 J every 50 ms and is read every 10 ms; the power says 250 W."""
    half_a_batch(run)
    for t in range(-100, 1110, 10):
        run.gpu_reading(t, utilisation=0.05, power_w=250.0, energy_j=1e6 + 15 * (t // 50))
    figures = judged(run)
    energy = metric(figures["gpu_energy_j"])
    assert (energy.method, energy.bound) == ("counter", "point")
    assert energy.mean == pytest.approx(300)
    assert energy.others["gauge"].mean == pytest.approx(250)
    assert metric(figures["energy_wasted_j"]).mean == pytest.approx(0.5 * 0.007 * 300)
    assert metric(figures["gpu_interval_s"]).p50 == ms(50)
    assert metric(figures["gpu_utilisation"]).mean == 0.05, "all readings are equal"


@pytest.mark.parametrize("restarts", [True, False])
def test_a_counter_that_restarts_or_hardly_moves_leaves_it_to_the_power(
    run: RunBuilder, restarts: bool
) -> None:
    half_a_batch(run)
    for t in range(-100, 1200, 100):
        joules = 10.0 * (t % 800) if restarts else 300.0 * (t // 600)
        run.gpu_reading(t, power_w=250.0 + t % 2, energy_j=joules)
    energy = metric(judged(run)["gpu_energy_j"])
    assert energy.method == "gauge"
    assert energy.mean == pytest.approx(250)


def test_what_a_device_hides_is_not_measurable(run: RunBuilder) -> None:
    half_a_batch(run)
    for t in range(-100, 1200, 100):
        run.gpu_reading(t, utilisation=t / 1000)
        run.gpu_reading(t, gpu=1, utilisation=t / 1000, power_w=100.0)
    figures = judged(run)
    assert metric(figures["gpu_utilisation"]).mean == pytest.approx(0.5)
    assert reason(figures["gpu_memory_bytes"]) == "the GPU does not show it"
    for name in ("gpu_energy_j", "energy_per_token_j", "energy_wasted_j"):
        assert "neither the energy nor the power of the GPU was read twice" in reason(figures[name])


def test_without_a_gpu_each_figure_says_why(run: RunBuilder) -> None:
    half_a_batch(run)
    reasons = summary_of(run.frames())["not_measurable"]
    assert {reasons[name] for name in GPU} == {"no GPU of the server was watched"}
    run.target.config = {"device": "cpu", "max_num_seqs": 2}
    reasons = summary_of(run.frames())["not_measurable"]
    assert {reasons[name] for name in GPU} == {"the engine computes on the CPU"}


def test_readings_that_end_early_give_a_lower_bound_and_rare_ones_a_warning(
    run: RunBuilder,
) -> None:
    half_a_batch(run)
    for t in range(0, 700, 200):
        run.gpu_reading(t, power_w=100.0 + t)
    figures = judged(run)
    energy = metric(figures["gpu_energy_j"])
    assert energy.bound == "lower"
    assert "do not cover the load" in reason(figures["energy_per_token_j"])
    assert energy.mean == pytest.approx(0.2 * (200 + 400 + 600 + 600))
    assert "changed 4 times during the load" in warnings(run, "GPU")[0]


def test_one_reading_gives_levels_and_two_give_energy(run: RunBuilder) -> None:
    half_a_batch(run)
    run.gpu_reading(400, power_w=100.0)
    figures = judged(run)
    assert metric(figures["gpu_power_w"]).mean == 100
    assert "was read twice" in reason(figures["gpu_energy_j"])
    run.gpu_reading(600, power_w=100.0)
    assert metric(judged(run)["gpu_energy_j"]).mean == pytest.approx(0.6 * 100)


def test_energy_over_the_tokens_that_were_read_is_an_upper_bound(run: RunBuilder) -> None:
    run.another_engine()
    run.request("a", sent=0, tokens=[10.0 * i for i in range(1, 11)], outcome="completed", end=110)
    for t in range(-100, 1200, 100):
        run.gpu_reading(t, power_w=50.0)
    per_token = metric(judged(run)["energy_per_token_j"])
    assert per_token.bound == "upper"
    assert per_token.mean == pytest.approx(5)
    assert run_facts(run.frames()).no_gpu is None
