"""What a server tells of itself, and how closely it may be watched."""

import httpx
import pytest

from harness.collect.scrape import parse_page
from harness.run.preflight import (
    metrics_pages,
    scrape_note,
    scrape_warning,
    told_blocks,
    told_slots,
    told_version,
    unseen_metrics,
)
from harness.run.server import Server
from harness.workload.workload import load_target

SERVER = Server(url="http://there", model="m", config=None, engine=None)
PAGE = """\
vllm:num_requests_running 0
vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1
"""


def client_of(response: httpx.Response) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(lambda _: response))


@pytest.mark.parametrize(
    ("response", "slots"),
    [
        (httpx.Response(200, json={"total_slots": 4}), 4),
        (httpx.Response(200, json={"total_slots": 0}), None),
        (httpx.Response(200, json=[]), None),
        (httpx.Response(404, text="File Not Found"), None),
    ],
)
def test_llamacpp_tells_its_slots(response: httpx.Response, slots: int | None) -> None:
    with client_of(response) as client:
        assert told_slots(client, SERVER, load_target("llamacpp")) == slots


def test_others_are_not_asked_for_a_page_that_they_do_not_have() -> None:
    with client_of(httpx.Response(200, json={"total_slots": 4})) as client:
        assert told_slots(client, SERVER, load_target("vllm")) is None


@pytest.mark.parametrize(
    ("target", "response", "version"),
    [
        ("vllm", httpx.Response(200, json={"version": "0.32.0"}), "0.32.0"),
        ("llamacpp", httpx.Response(200, json={"build_info": "b4321-abc"}), "b4321-abc"),
        ("vllm", httpx.Response(200, json={"version": None}), None),
        ("vllm", httpx.Response(200, json=["0.32.0"]), None),
        ("vllm", httpx.Response(404, text="Not Found"), None),
        ("openai", httpx.Response(200, json={"version": "1"}), None),
    ],
)
def test_a_version_is_told_or_not_known(
    target: str, response: httpx.Response, version: str | None
) -> None:
    with client_of(response) as client:
        assert told_version(client, SERVER, load_target(target)) == version


def test_vllm_tells_its_blocks() -> None:
    samples = parse_page(PAGE, t_ns=0, duration_ns=0, extra_labels={})
    assert told_blocks(samples, load_target("vllm")) == 4096
    assert told_blocks(samples[:1], load_target("vllm")) is None
    assert told_blocks(samples, load_target("llamacpp")) is None


def test_a_mapping_that_fits_is_told_from_one_that_does_not() -> None:
    samples = parse_page(PAGE, t_ns=0, duration_ns=0, extra_labels={})
    partly = unseen_metrics(samples, ["u"], load_target("vllm"))
    assert partly is not None
    assert partly.startswith("not among the metrics at u: ")
    wholly = unseen_metrics(samples, ["u"], load_target("llamacpp"))
    assert wholly is not None
    assert wholly.startswith("--engine llamacpp fits nothing here")


def test_the_page_is_known_where_something_is_known_of_it() -> None:
    assert metrics_pages([], SERVER, load_target("vllm")) == ["http://there/metrics"]
    assert metrics_pages([], SERVER, load_target("openai")) == []
    assert metrics_pages(["http://x/m"], SERVER, load_target("openai")) == ["http://x/m"]


def test_what_is_not_scraped_is_said() -> None:
    assert scrape_note(1.0, ["u"]) is None
    assert "before the load and after it" in (scrape_note(None, ["u"]) or "")
    assert "figures that need /metrics" in (scrape_note(None, []) or "")


def test_watching_more_closely_than_the_target_bears_is_warned_of() -> None:
    llamacpp = load_target("llamacpp")
    assert "bears that only every 1.1 s" in (scrape_warning(0.5, llamacpp) or "")
    assert scrape_warning(2.0, llamacpp) is None
    assert scrape_warning(None, llamacpp) is None
    assert scrape_warning(0.01, load_target("reference")) is None
