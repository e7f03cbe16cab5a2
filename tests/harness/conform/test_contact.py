"""The suite's first words with a server, and that all of them go to one address."""

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest

from harness.conform.contact import Contact, check_serves
from harness.conform.pages import MetricsPages
from harness.conform.routes import Routes
from harness.errors import TargetError
from harness.experiments.readings import RunningGauge
from harness.run.process import Interruption
from harness.run.progress import Progress
from harness.run.run_config import Access
from harness.run.server import Server
from harness.run.settle import Asker, SilentServerError
from harness.store.run_folder import RunFolder
from harness.workload.target import Target
from harness.workload.workload import load_target
from tests.harness.client.asking import plan_of

LOADING = httpx.Response(503, json={"error": {"message": "Loading model"}})


class Patient(Interruption):
    def pause(self, seconds: float) -> None:
        assert seconds > 0


def stream(_: httpx.Request) -> httpx.Response:
    events = [{"choices": [{"text": "x"}]}] * 24
    usage = {"usage": {"completion_tokens": 24, "prompt_tokens": 3}, "choices": []}
    ended = {"choices": [{"text": "", "finish_reason": "length"}]}
    told = [*events, ended, usage]
    body = "".join(f"data: {json.dumps(one)}\n\n" for one in told) + "data: [DONE]\n\n"
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=body)


@pytest.mark.parametrize("refusals", [1, 4])
def test_a_model_that_still_loads_is_waited_for_at_the_first_answer(
    tmp_path: Path, refusals: int
) -> None:
    asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        return LOADING if asked <= refusals else stream(request)

    target = Target(name="t", description="d", settle_s=0.0)
    access = Access(
        url="http://s", place=None, target=target, metrics_urls=[], headers={}, ca_file=None
    )
    contact = Contact(
        access=access,
        folder=RunFolder(tmp_path),
        progress=Progress(),
        interruption=Patient(),
    )
    server = Server(url="http://s", model="m", config=None, engine=None)
    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        contact.ask_first(client, server, [])
    assert asked > refusals


class Named(BaseHTTPRequestHandler):
    """It answers with the address that it was asked at."""

    def do_GET(self) -> None:
        host = self.connection.getsockname()[0]
        body = f"vllm:num_requests_running {host.rpartition('.')[2]}\n".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def listening(address: str, port: int = 0) -> Iterator[int]:
    with ThreadingHTTPServer((address, port), Named) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_pages_and_routes_are_asked_at_the_address_of_the_load() -> None:
    """Another server listens at the first address of the name."""
    with listening("127.0.0.2") as port, listening("127.0.0.1", port):
        url = f"http://localhost:{port}"
        plan = plan_of(url, address="127.0.0.2", target={"metrics": load_target("vllm").metrics})
        metrics = [f"{url}/metrics"]
        (sample,) = MetricsPages(plan, judged=metrics, every=metrics).samples()
        assert sample.value == 2.0
        assert RunningGauge(plan, metrics).read() == 2.0
        with closing(Routes(plan)) as routes:
            assert routes._client.get(f"{url}/health").text.endswith(" 2\n")
    other = plan.at("http://10.0.0.9:8000")
    assert (other.url, other.urls, other.address) == ("http://10.0.0.9:8000", [], None)


def test_a_server_that_is_silent_may_only_load_its_model() -> None:
    silent = SilentServerError("ReadTimeout within 20 s")
    with httpx.Client() as client:
        asker = Asker(
            client=client,
            url="http://s",
            target=load_target("vllm"),
            model="m",
            clock_ns=time.perf_counter_ns,
        )
        with pytest.raises(TargetError, match="only loads its model now"):
            check_serves(asker, [], silent=silent)
