"""The facts that a server publishes, and how closely it may be watched."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import ConfigError
from harness.run.preflight import (
    CalibrationError,
    calibrate,
    find_gpus,
    note_target,
    published_context,
    read_first,
    with_lengths,
    with_slots,
)
from harness.run.server import Server
from harness.run.settle import Asker, IdlePages
from harness.workload.prompts import BYTES_ARE_TOKENS, fit_scale
from tests.conftest import ServePages
from tests.harness.client.asking import PLAN, plan_of
from tests.harness.run.conftest import Begin
from tests.made_up.rows import target_facts

NO_COUNT = "do not count the tokens of their prompts"
SERVER = Server(url="http://there", model="m", config=None, engine=None)
PAGE = """\
vllm:num_requests_running 0
vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1
"""
Answer = Callable[[httpx.Request], httpx.Response]


def client(answer: Answer) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(answer))


def showing(page: object) -> httpx.Client:
    """Every page of the server holds this; None: there is none."""
    found = httpx.Response(404) if page is None else httpx.Response(200, json=page)
    return client(lambda _: found)


@pytest.mark.parametrize(
    ("engine", "page", "slots"),
    [
        ("llamacpp", {"total_slots": 4}, 4),
        ("llamacpp", {"total_slots": 0}, None),
        ("llamacpp", [], None),
        ("llamacpp", None, None),
        ("vllm", {"total_slots": 4}, None),
    ],
)
def test_slots_are_read_from_a_page_that_the_target_has(
    begin: Begin, engine: str, page: object, slots: int | None
) -> None:
    run, facts = begin(engine=engine), target_facts()
    asker = Asker(
        client=showing(page), url=SERVER.url, target=run.target, model="m", clock_ns=lambda: 0
    )
    assert with_slots(run, facts, SERVER, asker).slots == facts.slots_found == slots
    assert run.notes.texts() == ([f"batch slots: {slots}, from its page /props"] if slots else [])


@pytest.mark.parametrize(
    ("page", "tokens"),
    [
        ({"data": [{"id": "x", "max_model_len": 1}, {"id": "m", "max_model_len": 2048}]}, 2048),
        ({"data": [{"id": "m"}], "default_generation_settings": {"n_ctx": 512}}, 512),
        ({"data": [{"id": "m", "max_model_len": None}]}, None),
        ({"data": ["m"], "default_generation_settings": "none"}, None),
    ],
)
def test_the_context_is_read_where_it_is_published(page: object, tokens: int | None) -> None:
    assert published_context(showing(page), SERVER) == tokens


@pytest.mark.parametrize(
    ("engine", "page", "version"),
    [
        ("vllm", {"version": "0.32.0"}, "0.32.0"),
        ("llamacpp", {"build_info": "b4321-abc"}, "b4321-abc"),
        ("vllm", {"version": None}, None),
        ("vllm", ["0.32.0"], None),
        ("vllm", None, None),
        ("openai", {"version": "1"}, None),
    ],
)
def test_a_version_is_published_or_unknown(
    begin: Begin, engine: str, page: object, version: str | None
) -> None:
    run = begin(engine=engine)
    facts = note_target(run, showing(page), SERVER)
    assert run.manifest.target is facts
    assert facts.version == version


@pytest.mark.parametrize(
    ("engine", "urls", "scrapes", "found", "said"),
    [
        ("vllm", [], True, ["http://there/metrics"], ""),
        ("openai", [], True, [], "figures that need /metrics are not measurable"),
        ("openai", ["http://x/m"], True, ["http://x/m"], ""),
        ("vllm", [], False, ["http://there/metrics"], "before the load and after it"),
    ],
)
def test_metrics_are_read_from_known_pages(
    begin: Begin, engine: str, urls: list[str], scrapes: bool, found: list[str], said: str
) -> None:
    run = begin(engine=engine, metrics_urls=urls, has_scraping=scrapes)
    facts = note_target(run, showing(None), SERVER)
    assert facts.metrics_urls == found
    assert said in "".join(run.notes.texts())
    assert bool(said) == bool(run.notes.texts())


@pytest.mark.parametrize("compiled", [True, False])
def test_an_engine_that_could_not_compile_is_a_warning(begin: Begin, compiled: bool) -> None:
    run = begin(target_url=None, settings=["engine.compile=true"])
    note_target(run, showing(None), replace(SERVER, config={"compile": compiled}))
    assert ("computes eagerly" in "".join(run.notes.warnings())) != compiled


@pytest.mark.parametrize(
    ("settings", "config", "warns"),
    [
        ([], {"device": "cuda", "compile": False}, True),
        ([], {"device": "cuda", "compile": True}, False),
        ([], {"device": "cuda", "compile": False, "batch_invariant": True}, False),
        (["engine.compile=false"], {"device": "cuda", "compile": False}, False),
        ([], {"device": "cpu", "compile": False}, False),
    ],
)
def test_an_engine_on_cuda_that_could_not_capture_is_a_warning(
    begin: Begin, settings: list[str], config: dict[str, Any], warns: bool
) -> None:
    run = begin(target_url=None, settings=settings)
    note_target(run, showing(None), replace(SERVER, config=config, ready={"event": "ready"}))
    assert ("computes eagerly" in "".join(run.notes.warnings())) == warns


@pytest.mark.parametrize(("interval_s", "warns"), [("0.5", True), ("2.0", False)])
def test_scraping_more_often_than_the_target_bears_is_a_warning(
    begin: Begin, interval_s: str, warns: bool
) -> None:
    run = begin(engine="llamacpp", settings=[f"collect.scrape_interval_s={interval_s}"])
    note_target(run, showing(None), SERVER)
    said = "".join(run.notes.warnings())
    assert ("needs at least 1.1 s" in said) == warns


@pytest.mark.parametrize(
    ("engine", "warning", "blocks"),
    [("vllm", "", 4096), ("llamacpp", "--engine llamacpp does not fit this server: not ", None)],
)
def test_a_mapping_that_fits_is_told_apart_from_one_that_does_not(
    begin: Begin, engine: str, warning: str, blocks: int | None
) -> None:
    run, facts = begin(engine=engine), target_facts()
    pages = IdlePages(
        client=client(lambda _: httpx.Response(200, text=PAGE)),
        urls=["http://there/metrics"],
        target=run.target,
        notes=run.notes,
    )
    read_first(run, facts, pages)
    assert "".join(run.notes.warnings()).startswith(warning)
    assert bool(warning) == bool(run.notes.warnings())
    assert facts.blocks_found == blocks
    assert run.manifest.idle.before == ({"running": 0.0} if engine == "vllm" else {})


def test_of_a_page_of_several_models_the_run_reads_its_own(begin: Begin) -> None:
    run, facts = begin(engine="vllm"), target_facts()
    lines = (f'vllm:num_requests_running{{model_name="{name}"}} 3' for name in (facts.model, "b"))
    page = "\n".join(lines)
    pages = IdlePages(
        client=client(lambda _: httpx.Response(200, text=page)),
        urls=["http://there/metrics"],
        target=run.target,
        notes=run.notes,
    )
    read_first(run, facts, pages)
    assert run.manifest.idle.before == pages.roles() == {"running": 3.0}
    assert facts.spec["metrics"]["running"]["labels"] == {"model_name": facts.model}


def tokenizer(request: httpx.Request) -> httpx.Response:
    """Four bytes a token and eleven for the template."""
    body = json.loads(request.content)
    assert (body["max_tokens"], body["stream"]) == (1, False)
    text = body["messages"][0]["content"]
    usage = {"prompt_tokens": 11 + -(-len(text) // 4), "completion_tokens": 1}
    return httpx.Response(200, json={"choices": [], "usage": usage})


def test_prompt_lengths_are_fitted_to_the_tokens_that_the_server_counts() -> None:
    chat = plan_of(PLAN.url, target={"path": "/v1/chat/completions"})
    scale = calibrate(client(tokenizer), chat)
    assert scale.bytes_per_token == pytest.approx(4)
    assert scale.overhead_tokens == pytest.approx(11)
    assert [size for size, _ in scale.samples] == [64, 256, 512, 1024]
    assert scale.num_bytes(100) == 356
    assert scale.num_bytes(3) == 1  # the template alone is longer


def test_a_server_with_a_shortest_answer_counts_prompts_too() -> None:
    """As OpenAI's Responses do, which take no limit below 16."""

    def least(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if body["max_output_tokens"] < 16:
            said = "Invalid 'max_output_tokens': integer below minimum value. Expected >= 16"
            return httpx.Response(400, json={"error": {"message": said}})
        usage = {"input_tokens": len(body["input"]), "output_tokens": 16}
        told = {"status": "incomplete", "output": [], "usage": usage}
        return httpx.Response(200, json=told)

    responses = plan_of(PLAN.url, target={"path": "/v1/responses"})
    assert calibrate(client(least), responses).bytes_per_token == pytest.approx(1)


def always_streams(request: httpx.Request) -> httpx.Response:
    """Also where a whole answer was asked for."""
    usage = json.loads(tokenizer(request).content)
    events = [{"choices": [{"index": 0, "delta": {"content": "w"}}]}, usage]
    text = "".join(f"data: {json.dumps(one)}\n\n" for one in events)
    kind = {"content-type": "text/event-stream; charset=utf-8"}
    return httpx.Response(200, text=f"{text}data: [DONE]", headers=kind)


def test_prompt_lengths_are_found_in_a_stream_too() -> None:
    chat = plan_of(PLAN.url, target={"path": "/v1/chat/completions"})
    assert calibrate(client(always_streams), chat).bytes_per_token == pytest.approx(4)

    def fails(_: httpx.Request) -> httpx.Response:
        text = 'event: error\ndata: {"message": "out of blocks"}\n\ndata: [DONE]\n\n'
        return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})

    with pytest.raises(CalibrationError, match=r"^out of blocks$"):
        calibrate(client(fails), chat)


def broken(_: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("nothing came")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda _: httpx.Response(400, json={"error": {"message": "no"}}), "HTTP 400: no"),
        (lambda _: httpx.Response(200, json={"error": "out of blocks"}), "out of blocks"),
        (lambda _: httpx.Response(200, content=b"hm"), f"{NO_COUNT}: 'hm' is no JSON"),
        (lambda _: httpx.Response(200, json={"detail": "it sleeps"}), f"{NO_COUNT}: it sleeps"),
        (lambda _: httpx.Response(200, content=b'{"choices":[{"text":"\xff"}]}'), NO_COUNT),
        (
            lambda _: httpx.Response(200, json={"usage": {"prompt_tokens": -1}}),
            f"{NO_COUNT}: `usage.prompt_tokens` is -1",
        ),
        (lambda _: httpx.Response(200, json={"choices": []}), NO_COUNT),
        (lambda _: httpx.Response(200, json={"usage": {"prompt_tokens": 5}}), "fit no line"),
        (broken, "nothing came"),
    ],
)
def test_a_server_without_token_counts_gets_bytes_for_tokens(
    begin: Begin, answer: Answer, why: str
) -> None:
    with pytest.raises(CalibrationError, match=why):
        calibrate(client(answer), PLAN)
    run = begin(engine="vllm")
    server = Server(url=PLAN.url, model=PLAN.model, config=None, engine=None)
    assert with_lengths(run, client(answer), server, PLAN) == PLAN
    assert why in "".join(run.notes.warnings())


@pytest.mark.parametrize(("bytes_are_tokens", "bytes_per_token"), [(True, 1), (False, 4)])
def test_the_reference_engine_says_whether_its_tokens_are_bytes(
    begin: Begin, bytes_are_tokens: bool, bytes_per_token: int
) -> None:
    config = {"bytes_are_tokens": bytes_are_tokens}
    server = Server(url=PLAN.url, model=PLAN.model, config=config, engine=None)
    chat = plan_of(PLAN.url, target={"path": "/v1/chat/completions"})
    fitted = with_lengths(begin(engine="reference"), client(tokenizer), server, chat)
    assert fitted.prompt_scale.bytes_per_token == pytest.approx(bytes_per_token)


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


def test_lengths_are_fitted_by_the_light_base() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; from harness.workload.prompts import fit_scale;"
        "print(fit_scale([(64, 20), (128, 36)]).bytes_per_token)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "4.0\n"


def test_too_few_samples_make_no_line() -> None:
    for samples in ([], [(64, 9)], [(64, 9), (64, 10)], [(64, 9), (128, 9)]):
        assert fit_scale(samples) is None
    assert [BYTES_ARE_TOKENS.num_bytes(n) for n in (1, 7, 4096)] == [1, 7, 4096]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"device": "cpu"}, "no GPU counters: the engine computes on the CPU"),
        (None, "the server is on another machine; name the page of its DCGM exporter"),
    ],
)
def test_gpus_that_compute_for_no_server_are_not_read(
    begin: Begin, config: dict[str, str] | None, said: str
) -> None:
    run = begin()
    assert (
        find_gpus(run, replace(SERVER, url="http://192.0.2.1", config=config), is_local=False)
        is None
    )
    assert said in "".join(run.notes.texts())


def test_an_exporter_that_was_named_is_read_also_of_another_machine(
    begin: Begin, serve_pages: ServePages
) -> None:
    page = 'DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a",modelName="Card"} 70\n'
    url = serve_pages(lambda _: (200, {}, page.encode()))
    run = begin(settings=[f"collect.gpu_metrics_url={url}"])
    gpus = find_gpus(run, replace(SERVER, config={"gpu_uuid": "GPU-a"}), is_local=False)
    assert gpus is not None
    assert (gpus.names, [row.power_w for row in gpus.sample()]) == (["Card"], [70.0])
    gpus.close()
    with pytest.raises(ConfigError, match=r"--gpu-metrics-url: the page .* does not show GPU-b"):
        find_gpus(run, replace(SERVER, config={"gpu_uuid": "GPU-b"}), is_local=True)
    assert not run.notes.warnings()
    with pytest.raises(ConfigError, match="--gpu-metrics-url nonsense: must be a URL"):
        begin(settings=["collect.gpu_metrics_url=nonsense"])
