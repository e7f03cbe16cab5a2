"""Scraping: what is kept of a page, how roles are read from it, what failing looks like."""

from collections.abc import Callable

import httpx
import pytest

from harness.collect.scrape import Scraper, find_unseen, parse_page, read_roles, read_samples
from harness.collect.source import SourceError
from harness.records import MetricSample
from harness.workload.target import MetricRole, MetricSource
from harness.workload.workload import load_target

Script = Callable[[str], tuple[int, dict[str, str], bytes]]
Serve = Callable[[Script], str]

PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 2
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total 40
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created 1.7e9
# TYPE vllm:request_success_total counter
vllm:request_success_total{finished_reason="abort"} 5
vllm:request_success_total{finished_reason="stop"} 9
# TYPE lat histogram
lat_bucket{le="1"} 1
lat_bucket{le="+Inf"} 2
lat_sum 3
lat_count 2
"""

METRICS: dict[MetricRole, MetricSource] = {
    "running": MetricSource(name="vllm:num_requests_running", refresh="live", trust="exact"),
    "aborted": MetricSource(
        name="vllm:request_success_total",
        labels={"finished_reason": "abort"},
        refresh="live",
        trust="exact",
    ),
    "waiting": MetricSource(name="not_there", refresh="live", trust="exact"),
}


def parse(text: str) -> list[tuple[str, str, float]]:
    samples = parse_page(text, t_ns=1, duration_ns=2, extra_labels={})
    return [(sample.name, sample.labels, sample.value) for sample in samples]


def test_buckets_and_creation_times_are_left_out() -> None:
    names = {name for name, _, _ in parse(PAGE)}
    assert "lat_sum" in names
    assert "vllm:generation_tokens_total" in names
    assert not any(name.endswith(("_bucket", "_created")) for name in names)


def test_labels_are_json_with_sorted_keys() -> None:
    assert parse('a{z="1",b="2"} 4') == [("a", '{"b": "2", "z": "1"}', 4.0)]


def test_a_page_in_another_format_is_named_with_what_it_is(serve: Serve) -> None:
    page = (200, {"content-type": "text/html"}, b"<html>please log in</html> {")
    url = f"{serve(lambda _: page)}/metrics"
    with httpx.Client(trust_env=False) as client, pytest.raises(SourceError) as caught:
        read_samples(client, [url], clock_ns=lambda: 0)
    assert str(caught.value) == (
        f"the page at {url} is not in the Prometheus text format (its content-type: text/html): "
        "name the metrics page with --metrics-url"
    )


def test_a_role_is_the_sum_of_its_series_and_an_absent_one_has_no_entry() -> None:
    samples = parse_page(PAGE, t_ns=1, duration_ns=2, extra_labels={})
    assert read_roles(samples, METRICS) == {"running": 5.0, "aborted": 5.0}
    assert find_unseen({sample.name for sample in samples}, METRICS) == ["waiting"]


def test_every_metric_of_the_reference_target_has_a_name_with_its_suffix() -> None:
    gauges = ("running", "waiting", "free_blocks", "kv_usage")
    for role, source in load_target("reference").metrics.items():
        assert source.name.endswith("_total") == (role not in gauges)


def test_a_scrape_is_stamped_in_its_middle_and_kept(serve: Serve) -> None:
    url = serve(lambda path: (200, {}, PAGE.encode())) + "/metrics"
    stamps = iter([100, 300, 1000, 1010])
    kept: list[MetricSample] = []
    with httpx.Client(trust_env=False) as client:
        scraper = Scraper(client, [url], clock_ns=lambda: next(stamps), keep=kept.extend)
        scraper.scrape()
        assert {sample.t_ns for sample in scraper.latest} == {200}
        assert {sample.duration_ns for sample in scraper.latest} == {200}
        scraper.scrape()
    assert {sample.t_ns for sample in scraper.latest} == {1005}
    assert {sample.t_ns for sample in kept} == {200, 1005}
    assert scraper.names == {sample.name for sample in kept}


def test_several_pages_are_told_apart(serve: Serve) -> None:
    url = serve(lambda path: (200, {}, b"a 1\n" if path == "/one" else b"a 2\n"))
    with httpx.Client(trust_env=False) as client:
        samples = read_samples(client, [f"{url}/one", f"{url}/two"], clock_ns=lambda: 0)
    assert len({sample.labels for sample in samples}) == 2


def test_an_error_status_and_a_closed_port_are_source_errors(serve: Serve) -> None:
    url = serve(lambda path: (404, {}, b""))
    with httpx.Client(trust_env=False) as client:
        with pytest.raises(SourceError, match="status 404"):
            read_samples(client, [url], clock_ns=lambda: 0)
        with pytest.raises(SourceError, match="ConnectError"):
            read_samples(client, ["http://127.0.0.1:1/metrics"], clock_ns=lambda: 0)
