"""Scraping: which part of a page is kept, how roles are read from it, and unreadable pages."""

from collections.abc import Callable

import httpx
import pytest

from harness.collect.scrape import (
    find_unseen,
    of_model,
    parse_gauges,
    parse_page,
    read_roles,
    read_samples,
)
from harness.collect.source import SourceError
from harness.workload.target import MetricRole, MetricSource
from harness.workload.workload import load_target

PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 2
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total 40
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created 1.7e9
# TYPE vllm:request_success_total counter
vllm:request_success_total{finished_reason="abort",engine="0"} 5
vllm:request_success_total{finished_reason="stop",engine="0"} 9
# TYPE lat histogram
lat_bucket{le="1"} 1
lat_bucket{le="+Inf"} 2
lat_sum 3
lat_count 2
# TYPE age summary
age{quantile="0.5"} NaN
age_sum +Inf
age_count 0
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


def test_a_page_is_kept_without_buckets_creation_times_and_values_that_are_none() -> None:
    samples = parse_page(PAGE, t_ns=1, duration_ns=2, extra_labels={})
    kept = [(sample.name, sample.labels, sample.value) for sample in samples]
    assert kept[0] == ("vllm:num_requests_running", '{"engine": "0"}', 3.0)
    assert kept[3][1] == '{"engine": "0", "finished_reason": "abort"}', "keys are sorted"
    assert [name for name, _, _ in kept[5:]] == ["lat_sum", "lat_count", "age_count"]


def test_a_role_is_the_sum_of_its_series_and_an_absent_one_has_no_entry() -> None:
    samples = parse_page(PAGE, t_ns=1, duration_ns=2, extra_labels={})
    assert read_roles(samples, METRICS) == {"running": 5.0, "aborted": 5.0}
    assert find_unseen({sample.name for sample in samples}, METRICS) == ["waiting"]


def test_a_value_that_every_page_repeats_counts_once() -> None:
    samples = [
        one
        for url in ("http://a", "http://b")
        for one in parse_page(PAGE, t_ns=1, duration_ns=2, extra_labels={"metrics_url": url})
    ]
    of_whole = METRICS["running"].model_copy(update={"repeated": True})
    absent = METRICS["waiting"].model_copy(update={"optional": True})
    metrics = METRICS | {"running": of_whole, "waiting": absent}
    assert read_roles(samples, metrics) == {"running": 5.0, "aborted": 10.0}
    assert find_unseen({sample.name for sample in samples}, metrics) == []


def test_a_share_of_two_engines_is_their_mean() -> None:
    page = 'usage{engine="0"} 0.2\nusage{engine="1"} 0.6\n'
    usage = MetricSource(name="usage", refresh="live", trust="exact")
    samples = parse_page(page, t_ns=1, duration_ns=2, extra_labels={})
    assert read_roles(samples, {"kv_usage": usage}) == {"kv_usage": pytest.approx(0.4)}


def test_of_several_models_on_a_page_only_the_runs_own_counts() -> None:
    page = 'vllm:num_requests_running{model_name="%s"} %d\n'
    samples = [
        one
        for shown in (("a", 3), ("b", 40))
        for one in parse_page(page % shown, t_ns=1, duration_ns=2, extra_labels={})
    ]
    of_a = of_model(samples, METRICS, "a")
    assert read_roles(samples, of_a) == {"running": 3.0}
    assert of_a["aborted"] == METRICS["aborted"]
    assert of_model(samples, METRICS, "an adapter of b") == METRICS
    assert of_model(samples[:1], METRICS, "a") == METRICS


@pytest.mark.parametrize(
    "series",
    [
        ['{tp_rank="0"} 5'],
        ['{priority="",tp_rank="0"} 5', '{priority="0"} 4', '{priority="None"} 1'],
        [f'{{pp_rank="0",tp_rank="{rank}"}} {5 + rank}' for rank in (10, 9, 0)],
        ['{dp_rank="0",tp_rank="0"} 2', '{dp_rank="1",tp_rank="4"} 3'],
    ],
    ids=["plain", "a total beside its parts", "ranks of one engine", "two engines"],
)
def test_each_request_of_sglang_counts_once(series: list[str]) -> None:
    page = "".join(f"sglang:num_running_reqs{one}\n" for one in series)
    samples = parse_page(page, t_ns=1, duration_ns=2, extra_labels={})
    assert read_roles(samples, load_target("sglang").metrics) == {"running": 5.0}


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("# TYPE ended counter\nended 3\n", ["ended"]),  # as TGI's
        ("# TYPE ended counter\nended_total 3\n# EOF\n", ["ended_total"]),
        ("\ufeff# TYPE a gauge\r\na 3\r\n", ["a"]),
        ('c_total 1 # {trace_id="x"} 0.6 1.5\na 3\n', ["c_total", "a"]),
        ("# TYPE h histogram\nh {count:24,sum:100,schema:0}\n# TYPE a gauge\na 3\n", ["a"]),
    ],
)
def test_names_are_those_of_the_page_and_an_odd_line_costs_no_other(
    page: str, names: list[str]
) -> None:
    samples = parse_page(page, t_ns=1, duration_ns=2, extra_labels={})
    assert [sample.name for sample in samples] == names


def client(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(answer))


def test_a_scrape_is_stamped_in_its_middle_and_pages_are_told_apart() -> None:
    stamps = iter([100, 300, 1000, 1010])
    asking = client(lambda request: httpx.Response(200, text=f"a {request.url.path[1:]}\n"))
    samples = read_samples(asking, ["http://x/1", "http://x/2"], clock_ns=lambda: next(stamps))
    assert [(one.t_ns, one.duration_ns, one.value) for one in samples] == [
        (200, 200, 1.0),
        (1005, 10, 2.0),
    ]
    assert [one.labels for one in samples] == [
        '{"metrics_url": "http://x/1"}',
        '{"metrics_url": "http://x/2"}',
    ]


def unreachable(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda _: httpx.Response(404), "metrics at http://x/m could not be read: status 404"),
        (
            lambda _: httpx.Response(307, headers={"location": "http://x/m/"}),  # as LiteLLM's
            "metrics at http://x/m could not be read: it redirects to http://x/m/: name that page",
        ),
        (unreachable, "metrics at http://x/m could not be read (no connection)"),
        (
            lambda _: httpx.Response(200, html="<html>please log in</html> {"),
            "the page at http://x/m is not in the Prometheus text format (its content-type: "
            "text/html; charset=utf-8): name the metrics page itself",
        ),
    ],
)
def test_an_unreadable_page_is_named(
    answer: Callable[[httpx.Request], httpx.Response], said: str
) -> None:
    with pytest.raises(SourceError) as caught:
        read_samples(client(answer), ["http://x/m"], clock_ns=lambda: 0)
    assert str(caught.value) == said


def test_a_counter_that_is_called_active_is_no_gauge() -> None:
    page = """
# TYPE cx_destroy_with_active_rq counter
cx_destroy_with_active_rq{cluster="behind"} 40
# TYPE open_connections gauge
open_connections{entrypoint="clients"} 3
in_flight 2
broken NaN
"""
    assert parse_gauges(page) == {'open_connections{"entrypoint": "clients"}': 3, "in_flight{}": 2}
