"""Two servers share a name and a port: all of a run goes to one of them."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from harness.client.transport import SocketTransport
from tests.harness.client.asking import wire_request
from tests.harness.run.conftest import Begin, NoLoad

MODELS = b'{"data": [{"id": "m"}]}'


class Handler(BaseHTTPRequestHandler):
    asked: list[tuple[str, str]]

    def do_GET(self) -> None:
        self.asked.append((self.connection.getsockname()[0], self.headers["host"]))
        self.send_response(200)
        self.send_header("content-length", str(len(MODELS)))
        self.end_headers()
        self.wfile.write(MODELS)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def answering(handler: type[Handler], host: str, port: int) -> Iterator[int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kind = type("Server", (ThreadingHTTPServer,), {"address_family": family})
    with kind((host, port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_checks_load_and_what_follows_reach_one_of_two_servers(begin: Begin) -> None:
    asked: list[tuple[str, str]] = []
    handler = type("Asked", (Handler,), {"asked": asked})
    with ExitStack() as servers:
        port = servers.enter_context(answering(handler, "127.0.0.1", 0))
        try:
            servers.enter_context(answering(handler, "::1", port))
        except OSError:
            pytest.skip("::1 is not on this machine")
        run = begin(
            target_url=f"http://localhost:{port}", engine="openai", settings=["settle.seconds=0"]
        )
        with ExitStack() as children:
            run.take(children, when_loaded=lambda: None)
        assert isinstance(run.load, NoLoad)
        (plan,) = run.load.plans
        transport = SocketTransport(httpx.URL(plan.url), address=plan.address)
        with transport.open(wire_request()) as connection:
            assert connection.sock.getpeername()[0] == plan.address
        run.check_server()
    assert len(asked) > 4
    assert {address for address, _ in asked} == {plan.address}
    assert {host for _, host in asked} <= {f"localhost:{port}", "h"}
    assert run.manifest.target is not None
    assert run.manifest.target.address == plan.address
