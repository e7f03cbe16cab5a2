"""What a server tells of itself, and how closely it may be watched."""

import json
from collections.abc import Callable

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.collect.scrape import parse_page
from harness.run.preflight import (
    CalibrationError,
    calibrate,
    metrics_pages,
    published_blocks,
    published_slots,
    published_version,
    scrape_note,
    scrape_warning,
    unseen_metrics,
)
from harness.run.server import Server
from harness.workload.prompts import BYTES_ARE_TOKENS, fit_scale
from harness.workload.workload import load_target
from tests.harness.load.asking import PLAN, plan_of

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
        assert published_slots(client, SERVER, load_target("llamacpp")) == slots


def test_others_are_not_asked_for_a_page_that_they_do_not_have() -> None:
    with client_of(httpx.Response(200, json={"total_slots": 4})) as client:
        assert published_slots(client, SERVER, load_target("vllm")) is None


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
        assert published_version(client, SERVER, load_target(target)) == version


def test_vllm_tells_its_blocks() -> None:
    samples = parse_page(PAGE, t_ns=0, duration_ns=0, extra_labels={})
    assert published_blocks(samples, load_target("vllm")) == 4096
    assert published_blocks(samples[:1], load_target("vllm")) is None
    assert published_blocks(samples, load_target("llamacpp")) is None


def test_a_mapping_that_fits_is_told_from_one_that_does_not() -> None:
    samples = parse_page(PAGE, t_ns=0, duration_ns=0, extra_labels={})
    partly = unseen_metrics(samples, ["u"], load_target("vllm"))
    assert partly is not None
    assert partly.startswith("not among the metrics at u: ")
    wholly = unseen_metrics(samples, ["u"], load_target("llamacpp"))
    assert wholly is not None
    assert wholly.startswith("--engine llamacpp does not fit this server")


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
    assert "needs at least 1.1 s" in (scrape_warning(0.5, llamacpp) or "")
    assert scrape_warning(2.0, llamacpp) is None
    assert scrape_warning(None, llamacpp) is None
    assert scrape_warning(0.01, load_target("reference")) is None


Answer = Callable[[httpx.Request], httpx.Response]


def client(answer: Answer) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(answer))


def tokenizer(request: httpx.Request) -> httpx.Response:
    """Four bytes a token and eleven for the template."""
    body = json.loads(request.content)
    assert (body["max_tokens"], body["stream"]) == (1, False)
    text = body["messages"][0]["content"]
    usage = {"prompt_tokens": 11 + -(-len(text) // 4), "completion_tokens": 1}
    return httpx.Response(200, json={"choices": [], "usage": usage})


def test_what_the_server_counts_decides() -> None:
    chat = plan_of(PLAN.url, target={"path": "/v1/chat/completions"})
    scale = calibrate(client(tokenizer), chat)
    assert scale.bytes_per_token == pytest.approx(4)
    assert scale.overhead_tokens == pytest.approx(11)
    assert [size for size, _ in scale.samples] == [64, 256, 512, 1024]
    assert scale.num_bytes(100) == 356
    assert scale.num_bytes(3) == 1  # the template alone is longer


def broken(_: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("nothing came")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda _: httpx.Response(400, json={"error": {"message": "no"}}), "HTTP 400: no"),
        (lambda _: httpx.Response(200, content=b"hm"), "not in OpenAI"),
        (
            lambda _: httpx.Response(200, content=b'{"choices":[{"text":"\xff"}]}'),
            "not in OpenAI",
        ),
        (lambda _: httpx.Response(200, json={"usage": {"prompt_tokens": 2**70}}), "not in OpenAI"),
        (lambda _: httpx.Response(200, json={"choices": []}), "have no `usage.prompt_tokens`"),
        (lambda _: httpx.Response(200, json={"usage": {"prompt_tokens": 5}}), "fit no line"),
        (broken, "nothing came"),
    ],
)
def test_a_server_that_does_not_tell(answer: Answer, why: str) -> None:
    with pytest.raises(CalibrationError, match=why):
        calibrate(client(answer), PLAN)


@given(
    rate=st.floats(0.5, 20),
    overhead=st.floats(0, 500),
    wanted=st.integers(600, 100_000),
)
def test_any_straight_line_is_found_again(rate: float, overhead: float, wanted: int) -> None:
    samples = [(size, round(overhead + size / rate)) for size in (64, 256, 512, 1024)]
    scale = fit_scale(samples)
    assert scale is not None
    made = overhead + scale.num_bytes(wanted) / rate
    assert made == pytest.approx(wanted, rel=0.2)  # samples are whole tokens, and wanted far off


@pytest.mark.parametrize("samples", [[], [(64, 9)], [(64, 9), (64, 10)], [(64, 9), (128, 9)]])
def test_too_little_to_draw_a_line(samples: list[tuple[int, int]]) -> None:
    assert fit_scale(samples) is None


def test_bytes_are_tokens() -> None:
    assert [BYTES_ARE_TOKENS.num_bytes(n) for n in (1, 7, 4096)] == [1, 7, 4096]
