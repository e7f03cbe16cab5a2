import pytest

from reference_engine.cancellation import Cancellation, CancelReason, DetectionMethod
from reference_engine.config import EngineConfig
from reference_engine.metrics.collector import Collector, Histogram, token_bounds


def test_a_value_on_a_bound_is_below_it_as_prometheus_has_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 8.0)


def test_bounds_of_lengths_go_up_to_the_context() -> None:
    assert token_bounds(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_bounds(4096)[-2:] == (1000, 2000)
    assert token_bounds(1) == (1,)


def ended(statistics: Collector, **times: float | None) -> None:
    known: dict[str, float | None] = {"queue_s": None, "prefill_s": None, "decode_s": None}
    known.update(times)
    statistics.ended(
        finish_reason="abort",
        prompt_tokens=5,
        generated_tokens=11,
        max_tokens=100,
        e2e_s=3.0,
        queue_s=known["queue_s"],
        prefill_s=known["prefill_s"],
        decode_s=known["decode_s"],
    )


def test_an_aborted_request_is_in_the_histograms_as_far_as_it_came() -> None:
    statistics = Collector(EngineConfig())
    ended(statistics)
    ended(statistics, queue_s=1.0)
    ended(statistics, queue_s=1.0, prefill_s=0.5, decode_s=2.0)
    counts = {
        name: sum(getattr(statistics, name).counts)
        for name in ("e2e_s", "generated_tokens", "queue_s", "prefill_s", "decode_s")
    }
    expected = {"e2e_s": 3, "generated_tokens": 3, "queue_s": 2, "prefill_s": 1, "decode_s": 1}
    assert counts == expected
    assert statistics.inference_s.total == 2.5
    assert statistics.token_mean_s.total == pytest.approx(0.2), "ten gaps in two seconds"
    assert statistics.generated_by_end == {"abort": 33}


def test_a_cancellation_is_counted_by_reason_phase_and_method() -> None:
    statistics = Collector(EngineConfig())
    cancellation = Cancellation(CancelReason.USER_DISCONNECT, DetectionMethod.CONNECTION, t_ns=0)
    for phase in ("decode", "decode", "waiting"):
        statistics.cancelled(cancellation, phase=phase, latency_s=0.02, unread_tokens=3)
    assert statistics.cancellations == {
        ("user_disconnect", "decode", "connection"): 2,
        ("user_disconnect", "waiting", "connection"): 1,
    }
    assert (statistics.unread_tokens, sum(statistics.cancel_s.counts)) == (9, 3)
