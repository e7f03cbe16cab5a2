"""Finding and starting the server, and the errors if it is not as expected."""

import re
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.errors import ConfigError, InterruptedRunError, TargetError
from harness.run.process import Interruption
from harness.run.server import Server, attach, engine_command, parse_command, start_command
from harness.workload.workload import EngineSettings, load_target
from tests.conftest import ServePages

NOWHERE = "http://127.0.0.1:1"
Answer = Callable[[httpx.Request], httpx.Response]


def find(answer: Answer, engine: str, model: str | None = None, url: str = "http://x") -> Server:
    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        return attach(url, load_target(engine), model=model, client=client, engine=None, ready={})


def models(*names: str) -> Answer:
    def answer(request: httpx.Request) -> httpx.Response:
        has_page = names and request.url.path == "/v1/models"
        data = [{"id": name} for name in names if name]
        return httpx.Response(200, json={"data": data}) if has_page else httpx.Response(404)

    return answer


def test_the_reference_engine_gives_its_configuration() -> None:
    config = {"model": "tiny", "max_num_seqs": 8, "max_model_len": 64}
    found = find(lambda _: httpx.Response(200, json=config), "reference")
    assert (found.config, found.model, found.slots, found.context) == (config, "tiny", 8, 64)
    assert find(lambda _: httpx.Response(200, json=config), "reference", "m").model == "m"


@pytest.mark.parametrize("names", [("",), ("a", "b"), ()], ids=["none", "several", "no list"])
def test_a_model_that_cannot_be_guessed_needs_the_flag(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"name one with --model"):
        find(models(*names), "openai")
    found = find(models("small"), "vllm")
    assert (found.model, found.config, found.slots, found.context) == ("small", None, None, None)
    assert find(models(*names), "openai", "b").model == "b"


@pytest.mark.parametrize("listed", [[{"id": "m"}], {"data": [{"id": "m"}, {"id": "m"}]}])
def test_models_are_listed_in_several_ways(listed: Any) -> None:
    assert find(lambda _: httpx.Response(200, json=listed), "openai").model == "m"


def test_a_router_of_hundreds_of_models_names_a_few() -> None:
    with pytest.raises(ConfigError, match=r"has 300 models \(m0, .*, m11, \.\.\.\); name one"):
        find(models(*(f"m{number}" for number in range(300))), "openai")


def test_an_error_with_status_200_keeps_the_servers_words() -> None:
    body = {"error": {"message": "no such tenant: acme", "code": 1301}}
    with pytest.raises(ConfigError, match=r"status 200: no such tenant: acme\)$"):
        find(lambda _: httpx.Response(200, json=body), "openai")


def test_a_server_of_another_kind_is_told_apart_from_one_that_is_not_there() -> None:
    def unreachable(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(ConfigError, match="not like --engine reference"):
        find(models("small"), "reference")
    for engine in ("reference", "vllm"):
        with pytest.raises(TargetError, match=r"cannot reach http://127\.0\.0\.1:1/.*--target"):
            find(unreachable, engine, url=NOWHERE)


def test_a_closed_port_is_a_dead_server(serve_pages: ServePages) -> None:
    url = serve_pages(lambda _: (404, {}, b""))
    Server(url=url, model="m", config=None, engine=None).check_alive()
    with pytest.raises(TargetError, match="is gone"):
        Server(url=NOWHERE, model="m", config=None, engine=None).check_alive()


@pytest.mark.parametrize(
    ("settings", "model", "flags"),
    [
        ({}, None, ""),
        ({"model": "tiny"}, "other", "--model other"),
        ({"max_num_seqs": 2, "sim_fixed_ms": 5}, None, "--max-num-seqs 2 --sim-fixed-ms 5.0"),
        ({"faults": ["leak=1"], "allow_faults": True}, None, "--fault leak=1 --allow-faults"),
        (
            {"enable_prefix_caching": False, "reserve_full_isl": True},
            None,
            "--no-enable-prefix-caching --reserve-full-isl",
        ),
        ({"frontends": 1, "workers": 1, "migrate": 2}, None, ""),
        (
            {"frontends": 2, "disaggregated": True},
            None,
            "--frontends 2 --workers 1 --disaggregated --worker-metrics-port 0",
        ),
    ],
)
def test_the_engine_gets_a_flag_for_each_chosen_setting(
    settings: dict[str, Any], model: str | None, flags: str
) -> None:
    module, *own = engine_command(EngineSettings(**settings), "simulated", model=model)[2:]
    always = "--host 127.0.0.1 --port 0 --exit-with-stdin --runner simulated --device auto"
    assert module == "reference_engine"
    assert " ".join(own[:9]) == always
    assert sorted(own[9:]) == sorted(flags.split())


def test_an_engine_of_several_processes_names_them_and_their_pages() -> None:
    ready = {
        "urls": ["http://h:1", "http://h:2"],
        "worker_metrics_urls": ["http://h:8/metrics", "http://h:9/metrics"],
        "frontend_pids": [11, 12],
        "worker_pids": [21, 22],
    }
    server = Server(url="http://h:1", model="m", config={}, engine=None, ready=ready)
    assert server.metrics_urls == [f"http://h:{port}/metrics" for port in (1, 2, 8, 9)]
    assert server.worker_urls == ["http://h:8", "http://h:9"]
    named = {"frontend 0": 11, "frontend 1": 12, "worker 0": 21, "worker 1": 22}
    assert server.pids == named

    alone = Server(url="http://h:1", model="m", config={"frontend_pid": 5}, engine=None)
    assert (alone.urls, alone.worker_urls, alone.pids) == (["http://h:1"], [], {"frontend": 5})


SERVER = """\
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Handler.asked += self.path == "/health"
        is_well = self.path != "/health" or Handler.asked > 2
        self.send_response(200 if is_well else 503)
        self.end_headers()

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SILENT = "import signal; signal.pause()"


def start(words: list[str], folder: Path, *, ready_s: float = 60.0, stops: bool = False) -> None:
    """Start it, see that it answers, and end it."""
    interruption = Interruption()
    interruption.requested = stops
    with httpx.Client() as client, ExitStack() as children:
        child, url = start_command(
            parse_command(shlex.join(words)),
            folder / "engine.log",
            children,
            client=client,
            ready_s=ready_s,
            interruption=interruption,
        )
        assert client.get(f"{url}/health").is_success
    assert child.wait(0) is not None


def test_a_server_by_its_command_is_awaited_and_ends_with_its_run(tmp_path: Path) -> None:
    start([sys.executable, "-c", SERVER, "{port}"], tmp_path)

    def python(code: str) -> list[str]:
        return [sys.executable, "-c", code, "{port}"]

    with pytest.raises(TargetError, match="ended with code 3:\n  server: no such model"):
        start(python("print('no such model'); raise SystemExit(3)"), tmp_path)
    with pytest.raises(TargetError, match=r"was not ready in 0\.2 s \(target\.ready_s\)"):
        start(python(SILENT), tmp_path, ready_s=0.2)
    with pytest.raises(InterruptedRunError):
        start(python(SILENT), tmp_path, stops=True)
    with pytest.raises(ConfigError, match=r"target\.command: no-such-program: No such file"):
        start(["no-such-program", "{port}"], tmp_path)
    for text, said in (
        ("serve --port 8000", "has no {port}: write it as the server's port"),
        ("serve 'the {port}", "No closing quotation"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            parse_command(text)
