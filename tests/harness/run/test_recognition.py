"""A kind of server is known by what it shows."""

import socket

import httpx
import pytest

from harness.errors import ConfigError
from harness.run.load_plan import ANY_SERVER
from harness.run.recognition import ShownSigns, look_at, recognise, with_kind
from harness.run.run_config import ServerConfig
from harness.run.settle import read_health
from harness.workload.workload import SHIPPED_TARGETS, load_target, shipped

KINDS = [load_target(name) for name in shipped(SHIPPED_TARGETS)]
NOTHING = ShownSigns(owners=[], metrics="", server="", pages={})


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        (
            NOTHING._replace(owners=["vllm"], metrics="# HELP x\nvllm:num_requests_running 0"),
            "vllm",
        ),
        (NOTHING._replace(owners=["llamacpp"]), "llamacpp"),
        (NOTHING._replace(server="llama.cpp"), "llamacpp"),
        (NOTHING._replace(metrics='vllm:e2e 1\ndynamo_frontend_requests_total{a="b"} 3'), "dynamo"),
        (NOTHING._replace(pages={"/walkaway/config": {}}, metrics="vllm:e2e 1"), "reference"),
        (NOTHING._replace(metrics="# vllm: is not here"), ANY_SERVER),
        (NOTHING, ANY_SERVER),
    ],
)
def test_each_kind_has_a_sign_of_its_own(seen: ShownSigns, kind: str) -> None:
    assert recognise(seen, KINDS)[0] == kind


def test_no_two_kinds_share_a_sign() -> None:
    signs = [kind.signs.model_dump(exclude_none=True) for kind in KINDS if kind.signs is not None]
    assert signs
    shown = [(key, value) for one in signs for key, value in one.items()]
    assert len(shown) == len(set(shown))


def test_what_cannot_be_read_shows_nothing() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        pages = {
            "/v1/models": httpx.Response(200, json={"data": [{"owned_by": 3}, "odd"]}),
            "/metrics": httpx.Response(200, text="sglang:num_running_reqs 0\n"),
            "/walkaway/config": httpx.Response(200, text="a page for browsers"),
        }
        if request.url.path not in pages:
            raise httpx.ConnectError("no")
        return pages[request.url.path]

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        seen = look_at(client, "http://a", [], KINDS)
    assert seen is not None
    assert seen.owners == []
    assert recognise(seen, KINDS)[0] == "sglang"


def test_a_server_that_answers_any_path_is_no_engine_of_ours() -> None:
    """As LM Studio does."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"owned_by": "organization_owner"}]})
        said = f"Unexpected endpoint or method. (GET {request.url.path})"
        return httpx.Response(200, json={"error": said})

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        seen = look_at(client, "http://a", [], KINDS)
        assert read_health(client, "http://a") is None
    assert seen is not None
    assert recognise(seen, KINDS)[0] == ANY_SERVER


def test_a_server_that_is_not_there_is_of_no_known_kind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    config = with_kind(ServerConfig(target_url=f"http://127.0.0.1:{port}"))
    assert (config.engine, config.recognised) == (ANY_SERVER, "")


def test_a_grpc_server_has_to_be_named() -> None:
    with pytest.raises(ConfigError, match="--engine triton"):
        with_kind(ServerConfig(target_url="grpc://127.0.0.1:1"))
