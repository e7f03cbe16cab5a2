"""The metrics page: both formats by their strict parsers, and the names that dashboards ask for."""

from random import Random
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from harness.collect.scrape import find_unseen, parse_page, read_roles
from harness.workload.workload import load_target
from reference_engine.config import EngineConfig, FrontendSettings
from reference_engine.context import Cancellation, CancelReason, DetectionMethod
from reference_engine.core.accounting import Counters
from reference_engine.metrics.collector import Histogram, MetricsCollector
from reference_engine.metrics.exposition import CONTENT_TYPE, MetricsPage
from reference_engine.protocol import StepRecord
from reference_engine.serve.faults import FaultyLink
from tests.conftest import Snapshot
from tests.reference_engine.fake_worker import EMPTY_REPORT
from tests.reference_engine.running_engine import body, post_raw, running

CONFIG = EngineConfig()


def busy_link() -> FaultyLink:
    """A link whose engine has worked, with no two figures alike."""
    link = FaultyLink(
        lambda: 0,
        lambda worker, message: None,
        settings=FrontendSettings(),
        collector=MetricsCollector(CONFIG),
        random=Random(1),
    )
    counters = Counters(
        steps=10,
        slot_steps=20,
        generated_tokens=101,
        prompt_tokens=102,
        preemptions=103,
        recomputed_tokens=104,
        reclaimed_freed=105,
        reclaimed_retained=106,
        reclaimed_forced=109,
        finished={"abort": 107, "length": 108},
    )
    gauges: dict[str, Any] = {"num_running": 3, "num_waiting": 5, "free_blocks": 1024}
    scheduled = {"req-1": 16, "req-2": 1}
    step = StepRecord(step=10, started_ns=0, ended_ns=1, scheduled=scheduled, sampled={}, **gauges)
    link.take_in(
        "worker-0", replace(EMPTY_REPORT, step=step, cached_blocks=7, counters=counters, **gauges)
    )
    cancellation = Cancellation(CancelReason.USER_DISCONNECT, DetectionMethod.CONNECTION, t_ns=0)
    link.collector.signals[cancellation.reason, cancellation.method] += 1
    link.collector.cancelled(cancellation, phase="decode", latency_s=0.02, unread_tokens=9)
    link.collector.count_leaving("tiny", "completions", stream=True, num_sent=1)
    link.collector.first_token_s.observe(0.03)
    return link


def written(config: EngineConfig = CONFIG) -> str:
    return MetricsPage(busy_link().collector, config).write().decode()


def parsed(text: str) -> list[Sample]:
    families = text_string_to_metric_families(text)
    return [sample for family in families for sample in family.samples]


def test_the_page_is_as_recorded_and_has_no_series_twice(snapshot: Snapshot) -> None:
    """It has all that vLLM's own dashboards query."""
    text = written()
    snapshot("engine_metrics", text)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(parsed(text)) == len({line.rpartition(" ")[0] for line in lines})


def test_the_harness_finds_all_that_it_looks_for() -> None:
    metrics = load_target("reference").metrics
    samples = parse_page(written(), t_ns=0, duration_ns=0, extra_labels={})
    assert find_unseen({sample.name for sample in samples}, metrics) == []
    roles = read_roles(samples, metrics)
    assert roles["forced_reclaims"] == 109
    assert (roles["aborted"], roles["free_blocks"], roles["recomputed_tokens"]) == (107, 1024, 104)


def test_a_label_may_have_anything_in_it() -> None:
    config = EngineConfig(model='a "quoted"\\\nname')
    labels = [sample.labels for sample in parsed(written(config))]
    names = {one["model_name"] for one in labels if "model_name" in one}
    assert names == {config.model}


@pytest.mark.e2e
def test_the_sums_agree_with_each_other_after_answers_and_cancellations() -> None:
    flags = ["--runner", "simulated", "--sim-fixed-ms", "2", "--max-num-seqs", "2"]
    with running(*flags) as engine:
        url = engine.url
        for n in (1, 2):
            httpx.post(f"{url}/v1/completions", json=body(max_tokens=5, n=n), timeout=60)
        leavers = [post_raw(engine, f"leaver-{i}", stream=True) for i in range(4)]
        engine.wait_for("first_token", "leaver-1")
        assert httpx.post(f"{url}/v1/requests/leaver-0/cancel").json()["cancelled"]
        for leaver in leavers:
            leaver.close()
        for i in range(4):
            engine.wait_for("finished", f"leaver-{i}")
        assert httpx.get(f"{url}/metrics").headers["content-type"] == CONTENT_TYPE
        total = engine.metric
        assert total("vllm:request_success_total") == 7, "an answer counts as one"
        assert total("vllm:request_success_total", finished_reason="abort") == 4
        assert total("walkaway_engine_cancellations_total") == 4
        assert total("walkaway_engine_cancellations_total", reason="api", method="none") == 1
        assert total("walkaway_engine_abort_signals_total") == 4
        assert total("walkaway_engine_cancel_latency_seconds_count") == 4
        generated = total("vllm:generation_tokens_total")
        assert generated == total("vllm:request_generation_tokens_sum")
        ended = "walkaway_engine_ended_generation_tokens_total"
        assert generated == total(ended)
        first = total("vllm:time_to_first_token_seconds_count")
        assert generated == first + total("vllm:inter_token_latency_seconds_count")
        aborted = total(ended, finished_reason="abort")
        assert aborted == generated - 15
        assert total("walkaway_engine_saved_tokens_total") == 4 * 3000 - aborted
        assert 0 <= total("walkaway_engine_unread_tokens_total") <= aborted
        assert total("vllm:e2e_request_latency_seconds_count") == 7
        assert total("vllm:request_params_n_sum") == 1 + 2 + 4
        assert total("vllm:request_params_n_count") == 6
        assert total("vllm:iteration_tokens_total_count") == total("walkaway_engine_steps_total")
        assert 0 < total("walkaway_engine_slot_utilisation") <= 1
        assert total("vllm:kv_cache_usage_perc") == 0


def test_a_value_on_a_bound_is_below_it_as_prometheus_has_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 8.0)


def test_an_aborted_request_is_in_the_histograms_as_far_as_it_came() -> None:
    collector = MetricsCollector(CONFIG)
    for queue_s, prefill_s, decode_s in ((None, None, None), (1.0, None, None), (1.0, 0.5, 2.0)):
        collector.ended(
            finish_reason="abort",
            prompt_tokens=5,
            generated_tokens=11,
            max_tokens=100,
            e2e_s=3.0,
            queue_s=queue_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
        )
    expected = {"e2e_s": 3, "generated_tokens": 3, "queue_s": 2, "prefill_s": 1, "decode_s": 1}
    assert {name: sum(getattr(collector, name).counts) for name in expected} == expected
    assert collector.inference_s.total == 2.5
    assert collector.token_mean_s.total == pytest.approx(0.2), "ten gaps in two seconds"
    assert collector.generated_by_reason["abort",] == 33
