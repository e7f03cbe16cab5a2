"""The metrics page: both formats by their strict parsers, and the names that dashboards ask for."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from harness.collect.scrape import find_unseen, parse_page, read_roles
from harness.workload.workload import load_target
from reference_engine.cancellation import Cancellation, CancelReason, DetectionMethod
from reference_engine.config import EngineConfig, FrontendSettings
from reference_engine.core.accounting import Counters
from reference_engine.metrics.collector import Collector
from reference_engine.metrics.exposition import CONTENT_TYPE, Page, metric_families
from reference_engine.protocol import StepRecord, StepReport
from reference_engine.serve.faults import FaultyLink
from tests.reference_engine.running_engine import body, post_raw, running

CONFIG = EngineConfig()

# What vLLM's own dashboards query (examples/online_serving: prometheus_grafana/grafana.json,
# dashboards/grafana/performance_statistics.json, query_statistics.json), less what vLLM itself no
# longer has (requests swapped, the CPU's cache).
DASHBOARDS_ASK_FOR = {
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:generation_tokens_total",
    "vllm:gpu_cache_usage_perc",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_success_total",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_count",
    "vllm:time_per_output_token_seconds_sum",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_count",
    "vllm:time_to_first_token_seconds_sum",
}
# And what others that vLLM has are asked for elsewhere.
VLLM_HAS_TOO = {
    "vllm:cache_config_info",
    "vllm:iteration_tokens_total_bucket",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_params_max_tokens_bucket",
    "vllm:request_params_n_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
}
OF_OUR_OWN = {
    "walkaway_engine_abort_signals_total",
    "walkaway_engine_cached_blocks",
    "walkaway_engine_cancel_latency_seconds_bucket",
    "walkaway_engine_cancellations_total",
    "walkaway_engine_reclaimed_blocks_total",
    "walkaway_engine_recomputed_tokens_total",
    "walkaway_engine_resumed_prefix_hits_total",
    "walkaway_engine_retained_hits_total",
    "walkaway_engine_saved_tokens_total",
    "walkaway_engine_slot_steps_total",
    "walkaway_engine_slot_utilisation",
    "walkaway_engine_unread_tokens_total",
    "walkaway_engine_unread_answers_total",
}


def busy_link() -> FaultyLink:
    """A link whose engine has done things: no figure is like another."""
    link = FaultyLink(
        lambda: 0,
        lambda message: None,
        settings=FrontendSettings(),
        collector=Collector(CONFIG),
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
        finished={"abort": 107, "length": 108},
    )
    report = StepReport(
        step=StepRecord(
            step=10,
            started_ns=0,
            ended_ns=1,
            num_running=3,
            num_waiting=5,
            free_blocks=1024,
            scheduled={"req-1": 16, "req-2": 1},
            sampled={},
        ),
        outputs=[],
        events=[],
        num_running=3,
        num_waiting=5,
        free_blocks=1024,
        cached_blocks=7,
        counters=counters,
    )
    link.take_in(report)
    cancellation = Cancellation(CancelReason.USER_DISCONNECT, DetectionMethod.CONNECTION, t_ns=0)
    link.collector.signals[cancellation.reason, cancellation.method] += 1
    link.collector.cancelled(cancellation, phase="decode", latency_s=0.02, unread_tokens=9)
    link.collector.first_token_s.observe(0.03)
    return link


def written(config: EngineConfig = CONFIG) -> str:
    return Page(metric_families(busy_link().collector, config)).write().decode()


def parsed(text: str) -> list[Sample]:
    families = text_string_to_metric_families(text)
    return [sample for family in families for sample in family.samples]


def test_all_that_is_asked_for_is_there_and_no_series_twice() -> None:
    samples = parsed(written())
    missing = (DASHBOARDS_ASK_FOR | VLLM_HAS_TOO | OF_OUR_OWN) - {sample.name for sample in samples}
    assert not missing
    for sample in samples:
        assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")
    series = {(sample.name, *sorted(sample.labels.items())) for sample in samples}
    lines = [line for line in written().splitlines() if not line.startswith("#")]
    assert len(lines) == len(samples) == len(series)


def test_the_figures_are_those_of_the_link() -> None:
    values = {
        (sample.name, *sorted(set(sample.labels.values()) - {"tiny", "0"})): sample.value
        for sample in parsed(written())
    }
    assert values["vllm:num_requests_running",] == 3
    assert values["vllm:kv_cache_usage_perc",] == 0.75
    assert values["vllm:generation_tokens_total",] == 101
    assert values["vllm:request_success_total", "abort"] == 107
    assert values["vllm:request_success_total", "error"] == 0
    assert values["walkaway_engine_slot_utilisation",] == 0.25
    assert values["walkaway_engine_reclaimed_blocks_total", "retained"] == 106
    cancelled = ("walkaway_engine_cancellations_total", "connection", "decode", "user_disconnect")
    assert values[cancelled] == 1
    assert values["walkaway_engine_cancel_latency_seconds_bucket", "0.01"] == 0
    assert values["walkaway_engine_cancel_latency_seconds_bucket", "0.02"] == 1
    assert values["walkaway_engine_cancel_latency_seconds_bucket", "+Inf"] == 1
    assert values["walkaway_engine_cancel_latency_seconds_sum",] == 0.02
    assert values["walkaway_engine_unread_tokens_total",] == 9


def test_the_harness_finds_all_that_it_looks_for() -> None:
    metrics = load_target("reference").metrics
    samples = parse_page(written(), t_ns=0, duration_ns=0, extra_labels={})
    assert find_unseen({sample.name for sample in samples}, metrics) == []
    roles = read_roles(samples, metrics)
    assert (roles["aborted"], roles["free_blocks"], roles["recomputed_tokens"]) == (107, 1024, 104)


def test_a_label_may_have_anything_in_it() -> None:
    config = EngineConfig(model='a "quoted"\\\nname')
    names = {sample.labels["model_name"] for sample in parsed(written(config))}
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
        answer = httpx.get(f"{url}/metrics")
    assert answer.headers["content-type"] == CONTENT_TYPE
    samples = parsed(answer.text)

    def total(name: str, **labels: str) -> float:
        values = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
        assert values, name
        return sum(values)

    assert total("vllm:request_success_total") == 7, "an answer counts as one"
    assert total("vllm:request_success_total", finished_reason="abort") == 4
    assert total("walkaway_engine_cancellations_total") == 4
    assert total("walkaway_engine_cancellations_total", reason="api", method="none") == 1
    assert total("walkaway_engine_abort_signals_total") == 4
    assert total("walkaway_engine_cancel_latency_seconds_count") == 4
    generated = total("vllm:generation_tokens_total")
    assert generated == total("vllm:request_generation_tokens_sum")
    assert generated == total("walkaway_engine_ended_generation_tokens_total")
    first, later = (
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_count",
    )
    assert generated == total(first) + total(later)
    aborted = total("walkaway_engine_ended_generation_tokens_total", finished_reason="abort")
    assert aborted == generated - 15
    assert total("walkaway_engine_saved_tokens_total") == 4 * 3000 - aborted
    assert 0 <= total("walkaway_engine_unread_tokens_total") <= aborted
    assert total("vllm:e2e_request_latency_seconds_count") == 7
    assert total("vllm:request_params_n_sum") == 1 + 2 + 4
    assert total("vllm:request_params_n_count") == 6
    assert total("vllm:iteration_tokens_total_count") == total("walkaway_engine_steps_total")
    assert 0 < total("walkaway_engine_slot_utilisation") <= 1
    assert total("vllm:kv_cache_usage_perc") == 0
